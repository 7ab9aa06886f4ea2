"""Invariants that are checked during every simulated run. Each checker names the promise of the design that it checks.

Checkers see the messages of the master, the effects of peers and the answers to user calls. They compare these with the
true state of the simulated world; of the machines they read only public state such as epoch and member list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zpccl import limits
from zpccl.errors import (
    CollectiveMismatch,
    InvalidUsage,
    Kicked,
    NoSharedState,
    PCCLError,
    Result,
    TooFewPeers,
    VersionMismatch,
)
from zpccl.protocol import effects
from zpccl.protocol.calls import CallPhase
from zpccl.protocol.kinds.sync import NOBODY_LEFT
from zpccl.protocol.messages import (
    NO_ID,
    Decision,
    Fetching,
    Hello,
    Kick,
    MasterMessage,
    Member,
    Members,
    MembersCommitted,
    Plan,
    Reducing,
    Refusal,
    Refused,
    RunReport,
    Welcome,
    since_of,
)
from zpccl.protocol.peer import LEFT_BEHIND, State
from zpccl.sim.dataplane import result_of
from zpccl.sim.faults import FAR_HANDSHAKE_NS, OUTAGE, SLOW_GRACE_NS
from zpccl.sim.program import Answer, Collective, Connect, Sync
from zpccl.types import CollectiveKind

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import RunKey, SimulatedMaster, SimulatedPeer, UserCall

ANSWERS_KEPT_MAX = 64
"""Far below the limit of the master: simulated programs make few calls, so more kept answers would be a leak."""


REFUSED = "a refusal"
"""The value of a call that the master refused."""
_FAILURES = (None, REFUSED)
FAR_HANDSHAKES = 3
"""So many handshakes must fit into the time for which a master waits for a peer whose connection broke."""
HOST_GONE = "has lost a peer"
NO_RING = "around a ring of all peers"
"""A part of the text of a refusal for lack of a ring."""
LINK_FAULTS = {"link broken", "path cut", "path is a black hole", "connection broken", OUTAGE}
"""Faults for which a member may lack links."""


def has_data(call: UserCall) -> bool:
    """True for a collective that is not a barrier."""
    return isinstance(call.request, Collective) and call.request.spec.kind != CollectiveKind.BARRIER


class Checker:
    """Base of all checkers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """The master sends a message."""

    def on_master_step(self, master: SimulatedMaster) -> None:
        """The master has handled an event."""

    def on_peer_effect(self, node: SimulatedPeer, effect: effects.PeerEffect) -> None:
        """A peer is about to perform an effect."""

    def on_peer_step(self, node: SimulatedPeer) -> None:
        """A peer has handled an event."""

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """A call of the user is answered."""

    def on_closed(self, node: SimulatedPeer) -> None:
        """A process ends by closing its communicator."""

    def on_heal(self) -> None:
        """The faults end."""

    def on_end(self) -> None:
        """The run is over: faults have ended, and the cluster is quiet."""


class Agreement(Checker):
    """S1: all survivors of an attempt get the same outcome and equal results."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.decisions: dict[RunKey, dict[bool, set[tuple[int, int, int]]]] = {}  # Attempt -> committed? -> masters.
        self._ended: dict[RunKey, dict[bytes, bool]] = {}
        self._planned: set[RunKey] = set()  # By a Plan, not ahead.
        self._between_peers: set[RunKey] = set()  # Committed by a participant before the master.
        self._calls_between: dict[tuple[bytes, int], RunKey] = {}  # These attempts, by participant and call.
        self._released: dict[bytes, set[tuple[int, RunKey]]] = {}  # Released calls whose attempts were undecided.
        self._have_released: set[bytes] = set()
        self._results: dict[RunKey, int] = {}

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """A master does not contradict its decision on an attempt. Its successor may, if no peer knows the decision."""
        if isinstance(message, Plan):
            attempt = master.key(connection, message.attempt_id)
            self._planned.add(attempt)
            node = self.cluster.node_of(connection)  # None: it has another connection by now.
            is_new = node is not None and node.machine.state is State.MEMBER and attempt not in self._between_peers
            again = [call for call in message.participants.items() if is_new and self._is_again(master, call, attempt)]
            self.cluster.require(not again, "S1", f"a call that its peers have committed is planned: {again}")
        if isinstance(message, Decision):
            attempt, committed, lifetime = (
                master.key(connection, message.attempt_id),
                message.committed,
                master.lifetime,
            )
            decided = self.decisions.setdefault(attempt, {True: set(), False: set()})
            decided[committed].add(lifetime)
            is_one = lifetime not in decided[not committed] and (committed or attempt not in self._between_peers)
            self.cluster.require(is_one, "S1", f"attempt {message.attempt_id} is decided twice")

    def _is_again(self, master: SimulatedMaster, call: tuple[bytes, int], attempt: RunKey) -> bool:
        """True if an attempt is planned for a call that was committed between peers, and its peer may obey."""
        between = self._calls_between.get(call)
        # With one address the history may fork: a peer that has gone on elsewhere is lost here, and its attempt ends.
        if between is None or call[0] not in master.machine.registry.peers:
            return False
        # A leader that was replaced may not know it yet, as its connections end late. The peer does not obey it: having
        # taken part in an attempt of a later term, it has promised that term or a later one.
        return between[0] != attempt[0] or between[1] >> limits.EPOCH_BITS <= attempt[1] >> limits.EPOCH_BITS

    def on_peer_effect(self, node: SimulatedPeer, effect: effects.PeerEffect) -> None:
        """A member ends an attempt as decided; no peer commits an attempt that was not committed."""
        if isinstance(effect, effects.Reject) and effect.call_id in node.machine.calls:
            self._have_released.add(node.peer_id)
        if not isinstance(effect, (effects.EndReduce, effects.EndSync)):
            return
        attempt_id, commit, attempt = effect.attempt_id, effect.commit, node.key(effect.attempt_id)
        released = [call for call in node.machine.calls.values() if call.is_released and call.attempt_id == attempt_id]
        if released and node.machine.state is State.MEMBER:
            self._released.setdefault(node.peer_id, set()).add((released[0].call_id, attempt))
            return self.cluster.require(not commit, "S1", f"{node.name} commits attempt {attempt_id} undecided")
        calls = node.machine.calls.values()
        if any(call.phase is CallPhase.COMMITTED and call.attempt_id == attempt_id for call in calls):
            return self._on_commit_between(node, attempt)
        decided = {committed for committed, masters in self.decisions.get(attempt, {}).items() if masters}
        is_survivor = node.machine.state is State.MEMBER
        if not commit and attempt not in self._planned:
            decided.add(False)  # Planned ahead, and unknown to the master that has answered the call.
        self.cluster.require(
            commit in decided if is_survivor and decided else not commit,
            "S1",
            f"{node.name} ends attempt {attempt_id} with commit={commit}, decided was {decided}",
        )
        if not is_survivor or not decided:
            return
        self._on_ended(node, attempt, commit)

    def _on_commit_between(self, node: SimulatedPeer, attempt: RunKey) -> None:
        """All participants have the same result, and no master has decided otherwise, nor will."""
        running = self.cluster.dataplane.attempts[attempt]
        has_all = set(running.inputs) == set(running.order) and all(p.is_finished for p in running.parts.values())
        self.cluster.require(has_all, "S1", f"{node.name} commits attempt {attempt[1]} before all have their results")
        self.cluster.require(
            not self.decisions.get(attempt, {}).get(False), "S1", f"{node.name} commits attempt {attempt[1]}, aborted"
        )
        self._between_peers.add(attempt)
        self._calls_between.update(dict.fromkeys(running.calls.items(), attempt))
        self._on_ended(node, attempt, commit=True)

    def _on_ended(self, node: SimulatedPeer, attempt: RunKey, commit: bool) -> None:
        attempt_id = attempt[1]
        ended = self._ended.setdefault(attempt, {})
        ended[node.peer_id] = commit
        for other_id, other_commit in ended.items():
            other = self.cluster.nodes[other_id]
            has_survived = (
                other.is_alive and other.machine.state is State.MEMBER and other_id in self.cluster.member_ids
            )
            same = other_commit == commit or not has_survived or node.peer_id not in self.cluster.member_ids
            self.cluster.require(same, "S1", f"attempt {attempt_id} ends differently for {node.name} and {other.name}")

    def on_peer_step(self, node: SimulatedPeer) -> None:
        """A peer that released a call before its decision, and then learns that it was committed, leaves the group."""
        released = self._released.get(node.peer_id)
        if not released or node.machine.state is not State.MEMBER:
            return
        for call_id, attempt_id in [pair for pair in released if pair[0] not in node.machine.calls]:
            released.discard((call_id, attempt_id))
            is_lost = self.decisions.get(attempt_id, {}).get(False, set())
            ended = self._ended.get(attempt_id, {})
            # A decision that reached no living peer does not count.
            is_won = any(commit and self.cluster.nodes[peer_id].is_alive for peer_id, commit in ended.items())
            text = f"{node.name} stays a member without the result of attempt {attempt_id}"
            self.cluster.require(not is_won or bool(is_lost), "S1", text)

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """Committed results are equal; a call succeeds only after its attempt was committed.

        A peer may be left behind (LEFT_BEHIND) only after a change of the master or after it released a call itself.
        """
        if isinstance(outcome, Kicked) and outcome.reason.startswith(LEFT_BEHIND):
            has_cause = node.peer_id in self._have_released or self.cluster.master_crash_count > 0
            has_cause = has_cause or len(self.cluster.masters) > 1
            self.cluster.require(has_cause, "S1", f"{node.name}: {outcome!r}")
        if not has_data(call) or isinstance(outcome, PCCLError):
            return
        attempt = node.committed.get(call.call_id)
        if attempt is None:
            raise self.cluster.violation("S1", f"{node.name}: call {call.call_id} succeeds without a commit")
        assert isinstance(call.request, Collective)
        if not CollectiveKind(call.request.spec.kind).has_one_result:
            return
        value = call.request.buffer.value
        first = self._results.setdefault(attempt, value)
        self.cluster.require(first == value, "S1", f"attempt {attempt[1]}: {node.name} has another result")


class InputSafety(Checker):
    """S2: a failed call restores its buffer; a successful one leaves the result of exactly the peers of the plan."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._inputs: dict[RunKey, dict[bytes, int]] = {}
        self._orders: dict[RunKey, tuple[bytes, ...]] = {}
        self._roots: dict[RunKey, bytes] = {}  # From the users' calls, not from plans.

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """Records the participants of each attempt."""
        if isinstance(message, Plan):
            self._orders[master.key(connection, message.attempt_id)] = message.order

    def on_peer_effect(self, node: SimulatedPeer, effect: effects.PeerEffect) -> None:
        """Records the input of each peer."""
        if isinstance(effect, effects.StartReduce) and effect.call_id in node.calls:
            attempt = node.key(effect.attempt_id)
            self._orders.setdefault(attempt, effect.how.order)  # Perhaps it was planned ahead.
            inputs = self._inputs.setdefault(attempt, {})
            call = node.calls[effect.call_id]
            inputs[node.peer_id] = call.value_before
            if isinstance(call.request, Collective) and call.request.spec.is_root:
                first = self._roots.setdefault(attempt, node.peer_id)
                self.cluster.require(first == node.peer_id, "S1", f"attempt {effect.attempt_id} has two roots")

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """Compares the buffer, or the shared state, with what the outcome requires."""
        if isinstance(call.request, Sync) and isinstance(outcome, PCCLError):
            state = (node.shared_state.revision, node.shared_state.values)
            self.cluster.require(state == call.state_before, "S2", f"{node.name}: a failed sync changed the state")
        if not isinstance(call.request, Collective):
            return
        value = call.request.buffer.value
        if isinstance(outcome, PCCLError):
            same = value == call.value_before
            self.cluster.require(same, "S2", f"{node.name}: call {call.call_id} failed and changed its buffer")
            return
        if not has_data(call):
            self.cluster.require(value == call.value_before, "S2", f"{node.name}: a barrier changed a buffer")
            return
        attempt = node.committed.get(call.call_id, node.key(0))
        attempt_id, order, inputs = attempt[1], self._orders.get(attempt, ()), self._inputs.get(attempt, {})
        if (node.peer_id, attempt_id) in self.cluster.dataplane.wrong and self._is_last(node, order):
            return  # It is the only survivor: no other digest to compare with.
        is_whole = inputs.keys() == set(order) and call.request.spec.min_world_size <= outcome == len(order)
        root = self._roots.get(attempt, b"")
        self.cluster.require(
            is_whole and value == result_of(call.request.spec.kind, inputs, root, node.peer_id),
            "S2",
            f"{node.name}: attempt {attempt_id} left {value} and says {outcome}, inputs were {list(inputs.values())}",
        )

    def _is_last(self, node: SimulatedPeer, order: tuple[bytes, ...]) -> bool:
        return not any(peer_id in order for peer_id in self.cluster.member_ids if peer_id != node.peer_id)


class Barriers(Checker):
    """S1: no peer passes a barrier before all its participants have reached it, and all agree on the participants."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._passed: dict[tuple[bytes, int], tuple[tuple[bytes, int], ...]] = {}  # By peer and call.
        self._decided: dict[RunKey, tuple[tuple[bytes, int], ...]] = {}  # By attempt.

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """Records the participants of each barrier. Those that have been removed since are not in later messages."""
        node = self.cluster.node_of(connection)
        if isinstance(message, Decision) and message.committed and node is not None:
            pairs = tuple(zip(message.order, message.calls, strict=True))
            all_pairs = self._decided.setdefault(master.key(connection, message.attempt_id), pairs)
            self._passed[node.peer_id, message.call_id] = all_pairs

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """Checks that all participants have called the barrier."""
        if call.call_id not in node.barriers or isinstance(outcome, PCCLError):
            return
        pairs = self._passed.get((node.peer_id, call.call_id), ())
        who = f"{node.name}: barrier {call.call_id}"
        self.cluster.require((node.peer_id, call.call_id) in pairs, "S1", f"{who} opens without a decision on it")
        self.cluster.require(outcome == len(pairs), "S1", f"{who} opens for {outcome}, not for {len(pairs)}")
        for peer_id, call_id in pairs:
            other = self.cluster.nodes[peer_id]
            self.cluster.require(call_id in other.barriers, "S1", f"{who} opens before {other.name} reaches it")


class SingleHistory(Checker):
    """S3: one member list per epoch, one plan per attempt; both numbers grow."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._members: dict[RunKey, tuple[Member, ...]] = {}
        self._orders: dict[RunKey, tuple[bytes, ...]] = {}
        self._epochs: dict[tuple[int, int, int], int] = {}  # By lifetime of a master.
        self._plans: dict[RunKey, object] = {}
        self._epoch_of_peer: dict[tuple[bytes, bytes], int] = {}  # By peer and run.

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """Compares member lists and plans with those sent before."""
        require = self.cluster.require
        if isinstance(message, Members):
            first = self._members.setdefault(master.key(connection, message.epoch), message.members)
            require(first == message.members, "S3", f"epoch {message.epoch} has two member lists")
        elif isinstance(message, Plan):
            attempt_id, attempt = message.attempt_id, master.key(connection, message.attempt_id)
            how = message.how
            facts = how if isinstance(how, Reducing) else (how.revision, how.holders)
            require(self._plans.setdefault(attempt, facts) == facts, "S3", f"attempt {attempt_id} has two plans")

    def on_master_step(self, master: SimulatedMaster) -> None:
        """The member list changes only with the epoch. A new master continues above every epoch that peers know."""
        machine = master.machine
        if machine.is_recovering:
            return
        epoch = machine.registry.epoch
        earlier = self._epochs.get(master.lifetime)
        if earlier is None:
            of_run = [node.machine for node in self.cluster.live_nodes() if node.machine.run_id == machine.run_id]
            led = [peer.epoch for peer in of_run if peer.term < machine.term]
            earlier = max(led, default=0)
        order = tuple([peer.peer_id for peer in machine.registry.order])
        if epoch < earlier:
            raise self.cluster.violation("S3", f"epoch {epoch} after {earlier}")
        self._epochs[master.lifetime] = epoch
        if self._orders.setdefault((machine.run_id, epoch), order) != order:
            raise self.cluster.violation("S3", f"epoch {epoch} changes its members")

    def on_peer_step(self, node: SimulatedPeer) -> None:
        """The epoch of a peer never decreases, and its member list is one that a master sent."""
        machine = node.machine
        here = node.peer_id, machine.run_id
        earlier = self._epoch_of_peer.get(here, 0) if machine.state is State.MEMBER else 0  # Else: a newcomer.
        if machine.epoch < earlier:
            raise self.cluster.violation("S3", f"{node.name} goes back from epoch {earlier}")
        self._epoch_of_peer[here] = machine.epoch
        if machine.state is State.MEMBER and machine.members != self._members.get(node.key(machine.epoch)):
            raise self.cluster.violation("S3", f"{node.name} has a member list of its own for epoch {machine.epoch}")


class Quiet(Checker):
    """S4: after a call is answered the data plane does not touch its buffer any more."""

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """The data plane has released the buffer."""
        dataplane = self.cluster.dataplane
        if isinstance(call.request, Collective):
            is_active = call.call_id in dataplane.active_calls(node)
        else:
            is_active = isinstance(call.request, Sync) and dataplane.is_syncing(node)
        self.cluster.require(not is_active, "S4", f"{node.name}: call {call.call_id} is answered while it runs")

    def on_closed(self, node: SimulatedPeer) -> None:
        """A closed process has no active attempt and no open call."""
        is_active = self.cluster.dataplane.active_calls(node) or self.cluster.dataplane.is_syncing(node)
        self.cluster.require(not is_active, "S4", f"{node.name} is closed while the data plane runs")
        self.cluster.require(not node.calls, "L1", f"{node.name} is closed with calls open: {list(node.calls)}")


class EqualState(Checker):
    """S5: after a sync all participants hold the same contents at the same revision."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._outcomes: dict[RunKey, tuple[int, dict[str, int]]] = {}

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """Compares states."""
        if not isinstance(call.request, Sync) or isinstance(outcome, PCCLError):
            return
        attempt = node.committed.get(call.call_id)
        if attempt is None:
            raise self.cluster.violation("S5", f"{node.name}: sync {call.call_id} succeeds without a commit")
        attempt_id = attempt[1]
        if (node.peer_id, attempt_id) in self.cluster.dataplane.changed:
            return  # Its own user wrote into the state during the sync.
        found = (node.shared_state.revision, node.shared_state.shared())
        first = self._outcomes.setdefault(attempt, found)
        self.cluster.require(first == found, "S5", f"sync {attempt_id}: {node.name} holds another state")
        self.cluster.require(outcome == found[0], "S5", f"sync {attempt_id}: {node.name} gets revision {outcome}")


class SyncSources(Checker):
    """L2: a sync does not fail for lack of sources while a complete seed has links to all fetchers.

    Only plans of the master that fails the sync count. A new master knows of earlier plans only what peers report, and
    may find no sources for a peer that its plan never reached.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._plans: dict[tuple[RunKey, int], dict[bytes, Fetching]] = {}  # By term, too.

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """Looks for such a seed; a link counts if both its ends have reported it."""
        term = master.machine.term
        node = self.cluster.node_of(connection)
        if isinstance(message, Plan) and isinstance(message.how, Fetching) and node is not None:
            self._plans.setdefault((master.key(connection, message.attempt_id), term), {})[node.peer_id] = message.how
        if not isinstance(message, Decision) or message.committed or NOBODY_LEFT not in message.reason:
            return
        registry = master.machine.registry
        plans = self._plans.get((master.key(connection, message.attempt_id), term), {})
        here = {peer_id: registry.peers[peer_id] for peer_id in plans if peer_id in registry.peers}
        others = {peer_id for how in plans.values() for peer_id in how.order} - plans.keys()
        if any(peer_id not in registry.peers or registry.peers[peer_id].connection is None for peer_id in others):
            return  # A peer that was lost before its plan could be sent may have had other sources.
        fetchers = [peer for peer_id, peer in here.items() if plans[peer_id].fetch]
        for peer_id, peer in here.items():
            is_source = bool(fetchers) and all(peer_id in plans[f.peer_id].sources for f in fetchers)
            reaches_all = is_source and all(registry.are_linked(peer, fetcher) for fetcher in fetchers)
            self.cluster.require(
                not reaches_all, "L2", f"sync {message.attempt_id} fails for lack of sources, but {peer.name} is one"
            )


class Causes(Checker):
    """S6: attempts abort and members are removed only because of a fault that concerns them, never because of a joiner.

    L2: no member is removed because of its links while the working paths connect all members, and no call is refused
    for lack of a ring while they allow one.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._participants: dict[RunKey, tuple[frozenset[bytes], int]] = {}
        self._members: dict[bytes, str] = {}
        self._evicted: set[bytes] = set()
        self._halved: set[bytes] = set()  # Members whose hosts have lost another member.
        self._run_id = b""
        self._lifetime = (0, 0, 1)
        self._terms: dict[bytes, int] = {}
        self._gone_over: set[bytes] = set()  # Peers that went to another run before this master led.
        self._away_ns: dict[bytes, int] = {}  # Members that this master has no connection to, and since when.

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """An abort needs a fault that concerns its participants; so does an eviction."""
        if isinstance(message, Kick):
            return self._on_kick(connection, message)
        if not isinstance(message, (Plan, Decision)):
            return
        if isinstance(message, Decision) and NO_RING in message.reason:
            node = self.cluster.node_of(connection)
            has_ring = node is not None and node.is_alive and self._have_ring(self._steady_group(node))
            self.cluster.require(not has_ring, "L2", f"a call is refused though there is a ring: {message.reason}")
        attempt = master.key(connection, message.attempt_id)
        how = message.how if isinstance(message, Plan) else None
        if how is not None:
            peers, since_ns = self._participants.get(attempt, (frozenset(), self.cluster.clock.now_ns))
            self._participants[attempt] = (peers.union(how.order), since_ns)
        elif isinstance(message, Decision) and not message.committed and attempt in self._participants:
            peers, since_ns = self._participants[attempt]
            has_cause = self.cluster.has_cause(peers, since_ns) or self.cluster.has_stalled(since_ns)
            has_cause = has_cause or self._has_lost_one(peers)
            self.cluster.require(
                has_cause, "S6", f"attempt {message.attempt_id} aborts without a fault: {message.reason}"
            )

    def _is_dead(self, peer_id: bytes) -> bool:
        """True for a dead process. It may have died long ago: a master waits for lost peers."""
        node = self.cluster.nodes.get(peer_id)
        return node is None or not node.is_alive

    def _has_lost_one(self, peers: frozenset[bytes]) -> bool:
        """True if one of these peers, or another member of its host, is dead; or if such a member has been removed."""
        listed = self.cluster.with_hosts(peers).intersection(self._members)
        return not self._halved.isdisjoint(peers) or any(self._is_dead(peer_id) for peer_id in listed)

    def _on_kick(self, connection: str, kick: Kick) -> None:
        node = self.cluster.node_of(connection)
        if node is None or not node.is_alive:
            return
        if node.peer_id not in self.cluster.member_ids and node.peer_id not in self._members:
            return  # `_members` has it until the list without it is committed, perhaps long after that was sent.
        if kick.reason.endswith("the former master had removed it"):
            self._evicted.add(node.peer_id)  # For a fault at that time.
        if kick.reason.endswith(HOST_GONE):
            mates = [other for other in self.cluster.nodes.values() if other.host == node.host]
            self.cluster.require(node.host != "", "S6", f"{node.name} has no host: {kick.reason}")
            peer = frozenset((node.peer_id,))
            is_struck = self.cluster.has_cause(peer, self.cluster.clock.now_ns, of_removal=True)  # Or a host mate is.
            has_lost = is_struck or any(not mate.is_alive or mate.peer_id in self._evicted for mate in mates)
            self.cluster.require(has_lost, "S6", f"{node.name} is removed though its host is whole")
            self._evicted.update(mate.peer_id for mate in mates)
        is_for_links, is_for_votes = kick.result == Result.RANK_CONNECTION_FAILED, "did not vote" in kick.reason
        if is_for_links:
            group = self._steady_group(node)
            self.cluster.require(
                not self._are_connected(group), "L2", f"{node.name} is removed though paths lead to it"
            )
        if is_for_links or is_for_votes:
            kinds = LINK_FAULTS if is_for_links else {"hung"}
            since_ns = self.cluster.clock.now_ns - limits.LINK_WAIT_TIMEOUT_NS - limits.LINK_SUSPECT_NS
            is_guilty = any(
                incident.over_ns >= since_ns and incident.kind in kinds and node.peer_id in incident.peers
                for incident in self.cluster.incidents
            )
            is_guilty = is_guilty or (is_for_links and node.is_behind_nat)
            self.cluster.require(is_guilty, "S6", f"{node.name} is removed without a fault: {kick.reason}")
            self._evicted.add(node.peer_id)

    def _known_ns(self) -> int:
        """The time before which paths must have become as they are for the master to know it."""
        return self.cluster.clock.now_ns - limits.LINK_SUSPECT_NS - 2 * limits.LINK_WAIT_TIMEOUT_NS

    def _steady_group(self, node: SimulatedPeer) -> list[bytes]:
        """The members of a member's group; none if the master may not know of all their paths."""
        faults, nodes = self.cluster.faults, self.cluster.nodes
        group = [nodes[i] for i in self.cluster.member_ids if i in nodes and nodes[i].group == node.group]
        is_quiet = faults.refusal_chance == faults.link_breaks == faults.connection_breaks == faults.master_crashes == 0
        if not is_quiet or self.cluster.healed_ns > self._known_ns() or not all(member.is_alive for member in group):
            return []
        return [member.peer_id for member in group]

    def _is_sound(self, one: bytes, other: bytes) -> bool:
        since_ns = self.cluster.links.carries_since_ns(one, other)
        return since_ns is not None and since_ns <= self._known_ns()

    def _are_connected(self, group: list[bytes]) -> bool:
        """True if the paths of a group have connected all its members for so long that the master must know it."""
        reached, left = group[:1], group[1:]
        for one in reached:  # The list grows.
            reached += [other for other in left if self._is_sound(one, other)]
            left = [other for other in left if other not in reached]
        return bool(group) and not left

    def _have_ring(self, group: list[bytes]) -> bool:
        """True if the paths of a group have allowed a ring for so long that the master must know it."""

        def reaches_first(last: bytes, left: list[bytes]) -> bool:
            if not left:
                return self._is_sound(last, group[0])
            return any(self._is_sound(last, i) and reaches_first(i, [j for j in left if j != i]) for i in left)

        return bool(group) and reaches_first(group[0], group[1:])

    def on_master_step(self, master: SimulatedMaster) -> None:
        """A removal needs a fault that concerns the member."""
        machine = master.machine
        if machine.is_recovering or machine.registry.old_members or master is not self.cluster.master:
            return  # A list that is not committed may be superseded, and its newcomers are not members then.
        known = self._terms.get(machine.run_id)
        if known is not None and machine.term < known:
            return  # Another master leads in a higher term; this one does not know it yet.
        self._terms[machine.run_id] = machine.term
        members = {peer.peer_id: peer.name for peer in machine.registry.order}
        has_changed, has_gone_on = self._run_id != machine.run_id, master.went_on_ns == self.cluster.clock.now_ns
        if has_changed or self._lifetime != master.lifetime:  # A peer that has not received its admission is no member.
            self._lifetime = master.lifetime
            nodes = self.cluster.nodes
            # A master that stood still may begin a run before it reads what members sent; that run yields to theirs.
            if has_changed and (known is not None or has_gone_on or not self.cluster.faults.fails_nothing):
                self._members = {}  # A new run, as the members of the last were away for too long; or their run again.
            self._run_id = machine.run_id
            left = ((i, n) for i, n in self._members.items() if i in nodes and nodes[i].is_alive)
            self._members = {i: n for i, n in left if is_member(nodes[i]) and not self._is_passed_over(nodes[i])}
            self._gone_over = set(members)
            self._away_ns = {}
        gone = frozenset(self._members.keys() - members.keys())
        self._halved.update(self.cluster.with_hosts(gone).intersection(self._members, members))
        for peer_id in gone - self._evicted:
            since_ns = self.cluster.clock.now_ns
            node = self.cluster.nodes.get(peer_id)
            has_cause = self.cluster.has_cause(frozenset((peer_id,)), since_ns, of_removal=True)
            is_right = has_cause or self._is_dead(peer_id)
            self.cluster.require(is_right, "S6", f"{self._members[peer_id]} is removed without a fault")
            is_open = node is not None and node.is_alive and node.machine.state is not State.CLOSED
            connection = node.connection if node is not None and is_open else None
            is_here = connection is not None and connection.is_greeted and not connection.is_broken
            # Only the leading master is watched, so with several a removal may be seen after the peer has returned.
            # A master that stood still takes in order what came meanwhile: the loss of links first, then a later Hello.
            has_returned = is_here and len(self.cluster.masters) == 1 and not has_gone_on
            if connection is not None and since_ns < connection.stalled_until_ns + SLOW_GRACE_NS:
                has_returned = False  # The master received its Hello, but its report may have come too late.
            if node is not None and self._is_passed_over(node):
                has_returned = False  # Another member has told of an earlier removal.
            self.cluster.require(not has_returned, "S6", f"{self._members[peer_id]} is removed though it reconnected")
            has_had_time = node is None or not node.is_far or self._has_had_time(node)
            self.cluster.require(has_had_time, "L2", f"{self._members[peer_id]} is removed before it can reconnect")
        now_ns, away = self.cluster.clock.now_ns, [p.peer_id for p in machine.registry.order if p.connection is None]
        self._away_ns = {peer_id: self._away_ns.get(peer_id, now_ns) for peer_id in away}
        # A new master lists these peers until it hears that they have gone, perhaps long after a fault.
        self._gone_over = {i for i in members if i in self._gone_over and self._has_gone_over(i, machine.run_id)}
        self._members = {i: n for i, n in members.items() if i not in self._gone_over}

    def _has_had_time(self, node: SimulatedPeer) -> bool:
        """False for a far peer that needs longer to reconnect than its connection is broken, if nothing else is."""
        now_ns = self.cluster.clock.now_ns
        peers = self.cluster.with_hosts(frozenset((node.peer_id,)))
        struck = [i for i in self.cluster.incidents if i.over_ns >= now_ns and not peers.isdisjoint(i.peers)]
        is_whole = node.is_alive and all(incident.kind == "connection broken" for incident in struck)
        away_ns = now_ns - self._away_ns.get(node.peer_id, now_ns)
        return not is_whole or away_ns >= FAR_HANDSHAKES * FAR_HANDSHAKE_NS

    def _has_gone_over(self, peer_id: bytes, run_id: bytes) -> bool:
        """True for a peer of another run, or of none if its own has yielded and it waits to be admitted anew."""
        peer = self.cluster.nodes[peer_id].machine if peer_id in self.cluster.nodes else None
        return peer is not None and (peer.run_id not in (NO_ID, run_id) or peer.is_unregistered)

    def _is_passed_over(self, node: SimulatedPeer) -> bool:
        """True if the only master had removed a member by a list that others know, though it is listed again now."""
        live = self.cluster.live_nodes() if len(self.cluster.masters) == 1 else []
        others = [other.machine for other in live if is_member(other) and other.machine.run_id == node.machine.run_id]
        since = since_of(node.machine.members, node.peer_id)
        later = [other for other in others if other.epoch > since]
        return any(all(member.peer_id != node.peer_id for member in other.members) for other in later)


def is_member(node: SimulatedPeer) -> bool:
    """True if the peer machine of a process is in state MEMBER."""
    return node.machine.state is State.MEMBER


@dataclass
class _List:
    """A member list and its possible predecessors. Within one lifetime of a master, that is the list before it."""

    members: tuple[bytes, ...]
    parents: list[RunKey]


class Lineage(Checker):
    """S3: every committed member list descends from the last committed one of its run, whichever master commits it.

    The messages do not name the predecessor of a master's first list. The checker infers it from the lists that the
    reporting peers had: one with the same members; or, if the master admits or removes peers at once, with a prefix or
    a superset of them; or one whose members are all dead. Of epoch numbers it uses only the term, to tell the
    leaderships of a master apart.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._lists: dict[RunKey, _List] = {}
        self._newest: dict[tuple[int, int, bytes, int], RunKey] = {}  # By process, run and term.
        self._reported: dict[tuple[int, int, int], dict[tuple[RunKey, bytes], None]] = {}  # By lifetime: list and peer.
        self._committed: dict[bytes, RunKey] = {}  # The last one, by run.
        self._seen: set[RunKey] = set()  # Those that have been committed.
        self._refused: dict[tuple[bytes, bytes], int] = {}  # By run and peer: the list by which it was refused.
        self._accepted: dict[RunKey, set[bytes]] = {}  # With one address: the peers that have a list.
        self._planned: set[tuple[bytes, int]] = set()  # Runs and terms in which something was planned.

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """Records lists that are proposed and committed in the middle of a step."""
        if isinstance(message, Members):
            members = tuple([member.peer_id for member in message.members])
            self._enter(master, master.key(connection, message.epoch), members)
        elif isinstance(message, MembersCommitted):
            self._commit(master, master.key(connection, message.epoch))
        elif isinstance(message, Plan):
            self._planned.add((master.machine.run_id, message.attempt_id >> limits.EPOCH_BITS))
        elif isinstance(message, Refused) and message.refusal is Refusal.UNKNOWN_SESSION:
            node = self.cluster.node_of(connection)
            # Another run that refuses it may admit it as a newcomer later.
            if node is not None and node.machine.run_id == message.run_id and message.epoch > node.machine.epoch:
                self._refused[message.run_id, node.peer_id] = message.epoch

    def on_peer_step(self, node: SimulatedPeer) -> None:
        """Records who has which list, in a run with one address."""
        if len(self.cluster.masters) == 1 and is_member(node):
            self._accepted.setdefault((node.machine.run_id, node.machine.epoch), set()).add(node.peer_id)

    def on_peer_effect(self, node: SimulatedPeer, effect: effects.PeerEffect) -> None:
        """Records the list of a peer that sends a report, and who registers again."""
        if isinstance(effect, effects.Send) and isinstance(effect.message, Hello) and not effect.message.is_member:
            self._refused.pop((effect.message.run_id, node.peer_id), None)
        if isinstance(effect, effects.Send) and isinstance(effect.message, RunReport) and node.connection is not None:
            key = node.key(node.machine.epoch)
            self._reported.setdefault(node.connection.master.lifetime, {})[key, node.peer_id] = None

    def on_master_step(self, master: SimulatedMaster) -> None:
        """Records lists for which no message is sent."""
        machine, registry = master.machine, master.machine.registry
        if machine.is_recovering or not registry.order:
            return
        key = machine.run_id, registry.epoch
        if key not in self._lists:
            self._enter(master, key, tuple([peer.peer_id for peer in registry.order]))
        if registry.is_committed and len(self.cluster.masters) > 1:
            self._commit(master, key)

    def _check_return(self, master: SimulatedMaster, key: RunKey) -> None:
        """L3: with one address no revision is lost, even if members of a removed minority return first.

        There are two exceptions: so many members of the last list are gone, or away for long, that no quorum of it
        comes; or the peers that come first were a quorum of an earlier list. Lists of a term in which nothing was
        planned do not count.
        """
        parents = self._lists[key].parents
        planned = [k for k in self._lists if (k[0], k[1] >> limits.EPOCH_BITS) in self._planned]
        earlier = [k for k in planned if k[0] == key[0] and k != key]
        lasts = [k for k in reversed(earlier) if 2 * len(self._accepted.get(k, ())) > len(self._lists[k].members)]
        if not parents or not lasts or self._descends(key, lasts[0]):
            return
        last, nodes = lasts[0], self.cluster.nodes
        listed = [nodes[i] for i in self._lists[last].members if i in nodes]  # Strangers may be members, too.
        here = [node for node in listed if node.is_alive and node.machine.run_id == key[0]]
        may_come = 2 * sum(is_member(node) for node in here) > len(self._lists[last].members)
        is_soon = master.clock.now_ns() < master.started_ns + limits.MINORITY_WAIT_NS
        reporters = {peer_id for _, peer_id in self._reports_to(master)}
        is_quorum = any(
            2 * len(reporters.intersection(self._lists[k].members)) >= len(self._lists[k].members) for k in parents
        )
        text = f"{master.name} goes back to a list before {last[1] >> 32}+{last[1] & 0xFFFFFFFF}"
        self.cluster.require(not may_come or not is_soon or is_quorum, "L3", text)

    def _reports_to(self, master: SimulatedMaster) -> dict[tuple[RunKey, bytes], None]:
        """Lists that peers have reported. A master that yields to another run got them while it still led its own."""
        index, crashes, generation = master.lifetime
        return self._reported.get((index, crashes, generation - 1), {}) | self._reported.get(master.lifetime, {})

    def _enter(self, master: SimulatedMaster, key: RunKey, members: tuple[bytes, ...]) -> None:
        index, crashes, _ = master.lifetime
        leadership = index, crashes, key[0], key[1] >> limits.EPOCH_BITS  # It may have stepped down in the same step.
        newest = self._newest.get(leadership)
        if newest == key:
            return
        self._newest[leadership] = key
        if key in self._lists:
            return
        reported = dict.fromkeys(k for k, _ in self._reports_to(master))
        known = [(k, self._lists[k].members) for k in reported if k[0] == key[0] and k in self._lists]
        if newest is not None:
            parents = [newest]
        else:
            parents = [other for other, theirs in known if theirs == members]
            parents = parents or [other for other, theirs in known if theirs == members[: len(theirs)]]
            parents = parents or [other for other, theirs in known if set(members) <= set(theirs)]
            parents = parents or [other for other, theirs in known if self._are_all_gone(theirs)]
        self._lists[key] = _List(members, parents)
        if newest is None and len(self.cluster.masters) == 1:
            self._check_return(master, key)

    def _are_all_gone(self, members: tuple[bytes, ...]) -> bool:
        nodes = [self.cluster.nodes.get(peer_id) for peer_id in members]
        return all(node is not None and not node.is_alive for node in nodes)

    def _commit(self, master: SimulatedMaster, key: RunKey) -> None:
        if key in self._seen or key not in self._lists or self._needs_no_quorum(key):
            return
        self._seen.add(key)
        for (run_id, peer_id), epoch in self._refused.items():
            is_back = run_id == key[0] and key[1] > epoch and peer_id in self._lists[key].members
            is_lost = is_back and self.cluster.nodes[peer_id].machine.state is State.CLOSED
            self.cluster.require(not is_lost, "L3", "a member is refused for good by a list that is never committed")
        last = self._committed.get(key[0])
        if last is None or self._descends(key, last):
            self._committed[key[0]] = key
        else:  # An acknowledgement may have been late, so that another master already continued from this list.
            numbers = [f"{epoch >> 32}+{epoch & 0xFFFFFFFF}" for epoch in (key[1], last[1])]
            text = f"{master.name} commits list {numbers[0]}, which does not descend from {numbers[1]}"
            self.cluster.require(self._descends(last, key), "S3", text)

    def _needs_no_quorum(self, key: RunKey) -> bool:
        """True if the members were given one address. Their master may commit a list that no peer ever receives."""
        nodes = [self.cluster.nodes.get(peer_id) for peer_id in self._lists[key].members]
        return all(node is not None and len(node.list) == 1 for node in nodes)

    def _descends(self, key: RunKey, ancestor: RunKey) -> bool:
        seen, left = {key}, [key]
        while left:
            one = left.pop()
            if one == ancestor:
                return True
            new = [parent for parent in self._lists[one].parents if parent not in seen]
            seen.update(new)
            left += new
        return False


class Commits(Checker):
    """S1: no two peers that are members at the end hold different results of the same operation.

    Calls belong to the same operation if the plan of a successful one names them. So a call that ended without an
    attempt, or in another attempt, counts as well. A peer that was lost and has registered again is a newcomer: its
    calls that failed before do not count. A refusal is a result, too: what one is refused succeeds for nobody.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._calls: dict[RunKey, dict[bytes, int]] = {}  # Attempt -> participant -> its call.
        self._refusals: dict[RunKey, dict[bytes, int]] = {}  # The same of calls that a master refused.
        self._answers: dict[bytes, dict[int, object]] = {}  # By peer and call; None: the call failed otherwise.
        self._winners: dict[RunKey, tuple[bytes, object]] = {}  # By attempt: the first success.

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """Records participants and calls of each attempt."""
        if isinstance(message, Plan):
            self._calls.setdefault(master.key(connection, message.attempt_id), message.participants)
        elif isinstance(message, Decision) and message.order and (message.committed or message.is_refusal):
            calls = dict(zip(message.order, message.calls, strict=True))
            known = self._calls if message.committed else self._refusals
            known.setdefault(master.key(connection, message.attempt_id), calls)

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """Records the result of each peer.

        Some kinds give each peer its own result, and users write into shared states: of these, only the success or the
        revision counts.
        """
        is_barrier = isinstance(call.request, Collective) and not has_data(call)
        if is_barrier or not isinstance(call.request, (Collective, Sync)):
            return
        if isinstance(outcome, PCCLError) and not is_member(node):
            return  # It was lost. If it is a member at the end, it has registered again since.
        attempt = node.committed.get(call.call_id) if not isinstance(outcome, PCCLError) else None
        value: object = REFUSED if isinstance(outcome, (InvalidUsage, CollectiveMismatch)) else None
        if attempt is not None and isinstance(call.request, Collective):
            is_one = CollectiveKind(call.request.spec.kind).has_one_result
            is_wrong = (node.peer_id, attempt[1]) in self.cluster.dataplane.wrong
            value = call.request.buffer.value if is_one and not is_wrong else "a result"
        elif attempt is not None:
            value = outcome
        self._answers.setdefault(node.peer_id, {})[call.call_id] = value
        if attempt is not None:
            self._winners.setdefault(attempt, (node.peer_id, value))

    def on_peer_step(self, node: SimulatedPeer) -> None:
        """A peer that waits to be admitted again was lost: it may have given calls up before it learnt of that."""
        if node.machine.state is State.RETURNING and node.peer_id in self._answers:
            answers = self._answers[node.peer_id]
            successes = {call_id: value for call_id, value in answers.items() if value not in _FAILURES}
            self._answers[node.peer_id] = successes

    def on_end(self) -> None:
        """Compares the results of the members."""
        for attempt, (winner_id, value) in self._winners.items():
            if not self._has_survived(winner_id, attempt[0]):
                continue
            for peer_id, call_id in self._calls.get(attempt, {}).items():
                theirs = self._answers.get(peer_id, {}).get(call_id, value)
                is_same = theirs == value or (theirs not in _FAILURES and "a result" in (theirs, value))
                if not is_same and self._has_survived(peer_id, attempt[0]):
                    one, other = self.cluster.nodes[winner_id].name, self.cluster.nodes[peer_id].name
                    text = f"attempt {attempt[1]}: {one} has {value}, {other} {theirs or 'an error'}"
                    raise self.cluster.violation("S1", text)
        for attempt, calls in self._refusals.items():
            here = [peer_id for peer_id in calls if self._has_survived(peer_id, attempt[0])]
            answers = {peer_id: self._answers.get(peer_id, {}).get(calls[peer_id]) for peer_id in here}
            if REFUSED in answers.values():
                winners = [self.cluster.nodes[i].name for i, value in answers.items() if value not in _FAILURES]
                self.cluster.require(not winners, "S1", f"{winners} succeed with what others were refused")

    def _has_survived(self, peer_id: bytes, run_id: bytes) -> bool:
        node = self.cluster.nodes.get(peer_id)
        return node is not None and node.is_alive and is_member(node) and node.machine.run_id == run_id


class Readiness(Checker):
    """S6: a joiner that prefetches state is not admitted before it is ready, unless there is no other member."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._admitted: set[bytes] = set()

    def on_master_step(self, master: SimulatedMaster) -> None:
        """Checks every peer that is a member for the first time."""
        if master.machine.is_recovering:
            return
        order = master.machine.registry.order
        for peer in order:
            if peer.peer_id not in self._admitted:
                self._admitted.add(peer.peer_id)
                node = self.cluster.nodes.get(peer.peer_id)
                is_early = node is not None and not node.is_ready and len(order) > max(self.cluster.script.host_size, 1)
                self.cluster.require(not is_early, "S6", f"{peer.name} is admitted before it is ready")


class Hosts(Checker):
    """L1: the peers of a host are admitted together, so that none of them waits for another without end."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._members: dict[tuple[int, int, int], set[bytes]] = {}  # By the lifetime of a master.

    def on_master_step(self, master: SimulatedMaster) -> None:
        """A peer is admitted with its whole host. A new master also has the members that the former one admitted.

        A member that brings its list back may be alone with it: then its host is not whole, and it is removed. If its
        host is whole by the list, the other peers of the host may not know yet that they are members.
        """
        size, nodes = self.cluster.script.host_size, self.cluster.nodes
        if not size or master.machine.is_recovering:
            return
        members = {peer.peer_id for peer in master.machine.registry.order}
        new = members - self._members.get(master.lifetime, members)
        counts = Counter(nodes[peer_id].host for peer_id in members if peer_id in nodes)
        for host in {nodes[peer_id].host for peer_id in new if peer_id in nodes and not is_member(nodes[peer_id])}:
            count = counts[host]
            self.cluster.require(count == size, "L1", f"{master.name} admits {count} of {size} peers of {host}")
        self._members[master.lifetime] = members


class Lists(Checker):
    """S3: all members were configured with the same list of masters."""

    def on_master_step(self, master: SimulatedMaster) -> None:
        """Compares the lists of masters of all members."""
        if master.machine.is_recovering or len(self.cluster.masters) == 1:
            return
        nodes = self.cluster.nodes
        lists = {nodes[peer.peer_id].list for peer in master.machine.registry.order if peer.peer_id in nodes}
        self.cluster.require(len(lists) < 2, "S3", f"{master.name} leads members with several lists of masters")


class OneRun(Checker):
    """S3: with several masters, a newcomer begins a run only if each of its masters has told it that it leads none."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._told: dict[bytes, set[int]] = {}  # By peer: the masters that have told it so.
        self._first: dict[bytes, list[bytes]] = {}  # By run: the peers that were welcomed to it in the first step.
        self._begun: set[bytes] = set()

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """Records who is told that there is no run, and who is welcomed to a new one."""
        node = self.cluster.node_of(connection)
        if node is not None and isinstance(message, Refused) and message.refusal is Refusal.NO_RUN:
            self._told.setdefault(node.peer_id, set()).add(master.index)
        elif node is not None and isinstance(message, Welcome) and message.run_id not in self._begun:
            self._first.setdefault(message.run_id, []).append(node.peer_id)

    def on_master_step(self, master: SimulatedMaster) -> None:
        """Looks at a run that has just begun."""
        run_id = master.machine.run_id
        if run_id not in self._first:
            return
        self._begun.add(run_id)
        lists = {peer_id: self.cluster.nodes[peer_id].list for peer_id in self._first.pop(run_id)}
        may_begin = any(len(i) == 1 or self._told.get(peer_id, set()) >= set(i) for peer_id, i in lists.items())
        self.cluster.require(may_begin, "S3", f"a run begins at {master.name}, perhaps beside another one")


class Patience(Checker):
    """L3: no call of a member fails just because the master dies or a standby runs another version."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._has_left = False  # A peer leaves, so calls of others may fail, too.
        self._given_up: set[str] = set()  # Hosts one of whose peers has given up connect(), perhaps as a member.

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """Some errors follow from the call itself, whatever the master does."""
        if not isinstance(outcome, PCCLError):
            return
        is_passed_over = isinstance(call.request, Connect) or not isinstance(outcome, VersionMismatch)
        self.cluster.require(is_passed_over, "L3", f"{node.name}: {call.request} fails: {outcome!r}")
        if not self.cluster.faults.fails_nothing:
            return
        is_earned = isinstance(call.request, Connect) or isinstance(outcome, (TooFewPeers, NoSharedState))
        if "is ahead of the run's" in str(outcome):  # It has trained alone, and the run yielded: its program ends.
            self._has_left = True
        if isinstance(call.request, Connect) and node.host:
            self._given_up.add(node.host)
        is_earned = is_earned or self._has_left or (isinstance(outcome, Kicked) and node.host in self._given_up)
        self.cluster.require(is_earned, "L3", f"{node.name}: {call.request} fails: {outcome!r}")


class Bounds(Checker):
    """B1: the state that the master keeps per peer is bounded and does not grow with time."""

    def on_master_step(self, master: SimulatedMaster) -> None:
        """Counts the state kept for each peer."""
        machine = master.machine
        calls_max: dict[int, int] = {}
        for peer in machine.registry.peers.values():
            if peer.group not in calls_max:
                calls_max[peer.group] = limits.calls_open_max(machine.registry.member_count(peer.group))
            if len(peer.answers) > ANSWERS_KEPT_MAX:
                raise self.cluster.violation("B1", f"{len(peer.answers)} answers are kept for {peer.name}")
            if len(peer.open_calls) > calls_max[peer.group]:
                raise self.cluster.violation("B1", f"{peer.name} has {len(peer.open_calls)} open calls")
        registered = len(machine.registry.peers)
        count = len(machine.operations.pending) + len(machine.operations.running)
        if count > 16 * registered:
            raise self.cluster.violation("B1", f"{count} calls are kept for {registered} peers")


class Frames(Checker):
    """B1: no peer keeps frames of attempts that it will never start."""

    def on_heal(self) -> None:
        """Looks at the frames that came early."""
        for text in self.cluster.dataplane.stale_frames():
            raise self.cluster.violation("B1", text)

    def on_end(self) -> None:
        """The same once the cluster is quiet."""
        self.on_heal()


class Liveness(Checker):
    """L2: records which groups have committed a collective since the healing; quiesces() demands it of all."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._fresh_ns = 0
        self._begun: dict[RunKey, tuple[tuple[bytes, int], int]] = {}
        self._parts: set[tuple[bytes, RunKey]] = set()  # What each peer has begun; it also ends attempts of others.
        self.groups_done: set[tuple[bytes, int]] = set()  # By run.
        self.committed_count = 0
        self.aborted_count = 0
        self.answered_count = 0

    def restart(self) -> None:
        """Only operations that begin from now on count."""
        self._fresh_ns = self.cluster.clock.now_ns
        self.groups_done.clear()

    def on_peer_effect(self, node: SimulatedPeer, effect: effects.PeerEffect) -> None:
        """Records begin and end of attempts."""
        if isinstance(effect, effects.StartReduce):
            begun = (node.machine.run_id, node.group), self.cluster.clock.now_ns
            self._begun.setdefault(node.key(effect.attempt_id), begun)
            self._parts.add((node.peer_id, node.key(effect.attempt_id)))
        elif isinstance(effect, effects.EndReduce):
            if effect.commit:
                self.committed_count += 1
                group, begun_ns = self._begun[node.key(effect.attempt_id)]
                if begun_ns >= self._fresh_ns:
                    self.groups_done.add(group)
            elif (node.peer_id, node.key(effect.attempt_id)) in self._parts:
                self.aborted_count += 1

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """Counts answers. A barrier has no EndReduce effect, so its answer counts as the commit."""
        self.answered_count += 1
        if call.call_id in node.barriers and not isinstance(outcome, PCCLError):
            self.committed_count += 1
            if call.opened_ns >= self._fresh_ns:
                self.groups_done.add((node.machine.run_id, node.group))


class Checkers(Checker):
    """All checkers."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.liveness = Liveness(cluster)
        kinds = (
            *(
                Agreement,
                InputSafety,
                Barriers,
                SingleHistory,
                Lineage,
                Commits,
                Quiet,
                EqualState,
                SyncSources,
                Causes,
            ),
            *(OneRun, Patience, Lists, Hosts, Readiness, Bounds, Frames),
        )
        self.all: list[Checker] = [*(kind(cluster) for kind in kinds), self.liveness]
        self._watching = {name: self._who_watch(name) for name in vars(Checker) if name.startswith("on_")}

    def _who_watch(self, name: str) -> list[Callable[..., None]]:
        """The checkers that override a method. Most override few methods, and these are called at every step."""
        return [getattr(c, name) for c in self.all if getattr(type(c), name) is not getattr(Checker, name)]

    def on_master_message(self, master: SimulatedMaster, connection: str, message: MasterMessage) -> None:
        """The master sends a message."""
        for check in self._watching["on_master_message"]:
            check(master, connection, message)

    def on_master_step(self, master: SimulatedMaster) -> None:
        """The master has handled an event."""
        machine = master.machine
        if not machine.is_recovering and master is self.cluster.master:
            self.cluster.member_ids = {peer.peer_id: None for peer in machine.registry.order}
        for check in self._watching["on_master_step"]:
            check(master)

    def on_peer_effect(self, node: SimulatedPeer, effect: effects.PeerEffect) -> None:
        """A peer is about to perform an effect."""
        for check in self._watching["on_peer_effect"]:
            check(node, effect)

    def on_peer_step(self, node: SimulatedPeer) -> None:
        """A peer has handled an event."""
        for check in self._watching["on_peer_step"]:
            check(node)

    def on_answer(self, node: SimulatedPeer, call: UserCall, outcome: Answer) -> None:
        """A call of the user is answered."""
        for check in self._watching["on_answer"]:
            check(node, call, outcome)

    def on_closed(self, node: SimulatedPeer) -> None:
        """A process ends by closing its communicator."""
        for check in self._watching["on_closed"]:
            check(node)

    def on_heal(self) -> None:
        """The faults end."""
        for check in self._watching["on_heal"]:
            check()

    def on_end(self) -> None:
        """The run is over."""
        for check in self._watching["on_end"]:
            check()
