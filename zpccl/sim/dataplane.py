"""A model of the data plane and of user buffers.

A buffer is one number, and every collective is in place: see `result_of`. While an attempt runs its buffers hold
garbage; a peer that has received all frames holds the result. An attempt progresses only after all its peers have
started it, and only while all links that it needs are up (ring: between neighbours; direct exchange: between all).
When one breaks, peers that are not finished get nothing more. Both ends of the broken link notice it; the others
stall. A path that drops large packets is noticed by both of its ends, which lose their link. Frames of an attempt that
their receiver has not started are kept there until it starts or ends that attempt, or the link breaks.

A shared state is a few numbers by key. A fetcher gets one key after another, each from any seed or partial seed of the
sync that has it by then. It drops sources that send wrong data or nothing, or whose link is lost. A source whose own
state has changed since it was offered reports that and sends nothing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zpccl.limits import (
    HEARTBEAT_TIMEOUT_NS,
    MS,
    PATH_TIMEOUT_NS,
    SECOND,
    STALL_TIMEOUT_NS,
    STATE_SOURCE_TIMEOUT_NS,
    STATE_STALL_TIMEOUT_NS,
)
from zpccl.protocol import effects, events
from zpccl.protocol.messages import CollectiveSpec, FetchEntry, Fetching, PathSample, Reducing
from zpccl.protocol.rings import neighbours_of
from zpccl.sim.clock import Timer
from zpccl.types import CollectiveKind

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import SimulatedPeer

RATE_CHANGE_CHANCE = 0.05
"""For each path, at each measurement."""
RUBBISH = -1
EARLY_NS_MAX = HEARTBEAT_TIMEOUT_NS + 6 * SECOND
"""How long the frames of an attempt that its sender has ended may stay at a peer that a master leads, and that does not
start it. It may miss its master late, and its loop stands still for up to 5 s."""


@dataclass(eq=False)
class Buffer:
    """A user's tensor. Its contents are one number, which is negative only while an attempt writes it."""

    value: int


@dataclass(eq=False)
class SimulatedState:
    """A shared state: numbers by key. Keys that begin with "local" may differ between peers."""

    revision: int = 0
    values: dict[str, int] = field(default_factory=lambda: {"local": 0, "momentum": 0, "params": 0})

    def shared(self) -> dict[str, int]:
        """The values that must be equal on all peers after a sync."""
        return {key: value for key, value in self.values.items() if not key.startswith("local")}


def digest_of(value: int) -> bytes:
    """The digest of one tensor of a shared state: its contents, so that there are no collisions."""
    return value.to_bytes(32, "big")


def result_of(kind: int, inputs: Mapping[bytes, int], root: bytes, peer_id: bytes) -> int:
    """The result of a collective on one peer: a number that depends on all inputs and, for rows, on their order."""
    if kind == CollectiveKind.BROADCAST:
        return inputs[root]
    rows = sorted(inputs)
    if kind == CollectiveKind.ALL_GATHER:
        return sum(inputs[row] << 40 * index for index, row in enumerate(rows))
    total = sum(inputs.values())
    return total if CollectiveKind(kind).has_one_result else total * len(rows) + rows.index(peer_id)


@dataclass(eq=False)
class Part:
    """One peer's part in an attempt."""

    node: SimulatedPeer
    call_id: int
    buffer: Buffer
    saved: int
    tells_digest: bool = False
    is_ahead: bool = False
    has_failed: bool = False
    is_finished: bool = False
    finish: Timer | None = None
    """Runs until the result is there, and then until the machine hears of it."""
    done: events.ReduceDone | None = None
    timers: list[Timer] = field(default_factory=list)

    def stop(self) -> None:
        """Cancels everything that would still change the buffer."""
        for timer in self.timers:
            timer.cancel()
        if self.finish is not None:
            self.finish.cancel()


@dataclass(eq=False)
class RunningAttempt:
    """One attempt at a collective, with the parts of the peers that have started it."""

    attempt_id: int
    how: Reducing
    kind: int
    parts: dict[bytes, Part] = field(default_factory=dict)
    inputs: dict[bytes, int] = field(default_factory=dict)
    calls: dict[bytes, int] = field(default_factory=dict)
    is_broken: bool = False

    def edges_of(self, peer_id: bytes) -> set[bytes]:
        """The peers to which a peer needs a link."""
        return neighbours_of(self.how, peer_id)

    @property
    def order(self) -> tuple[bytes, ...]:
        """The participants in the order of the plan."""
        return self.how.order


@dataclass(eq=False)
class Fetch:
    """One peer's part in a sync."""

    attempt_id: int
    plan: Fetching
    values: dict[str, int] = field(default_factory=dict)
    dropped: dict[bytes, str] = field(default_factory=dict)
    """Seeds and partial seeds that are not asked any more, and why."""
    silent: set[bytes] = field(default_factory=set)
    """Sources that do not answer and will be dropped after a timeout."""
    timers: list[Timer] = field(default_factory=list)
    step: Timer | None = None
    """Set while a key is in flight to this peer."""
    stall: Timer | None = None
    is_done: bool = False
    has_changed: bool = False
    """The state of this peer has changed since it was offered."""

    @property
    def missing(self) -> list[FetchEntry]:
        """The entries that are still to be fetched."""
        return [entry for entry in self.plan.fetch if entry.key not in self.values]

    def stop(self) -> None:
        """Cancels everything that would still fetch or report."""
        for timer in (self.step, self.stall, *self.timers):
            if timer is not None:
                timer.cancel()


class DataPlane:
    """The data plane of all peers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.child_rng()
        self.attempts: dict[tuple[bytes, int], RunningAttempt] = {}  # By run and attempt.
        self.ended: set[tuple[bytes, int]] = set()
        # By receiver, run and attempt: who has sent, and when the sender ended the attempt without a commit.
        self._early: dict[tuple[bytes, tuple[bytes, int]], dict[bytes, int | None]] = {}
        self.wrong: set[tuple[bytes, int]] = set()  # Peers that computed a wrong result.
        self.fetches: dict[tuple[bytes, int], Fetch] = {}
        self._rates: dict[frozenset[bytes], int] = {}  # Bytes per second of each path, where they are uneven.
        self.changed: set[tuple[bytes, int]] = set()  # Peers whose user wrote into a state that was being synced.

    # --- Collectives ------------------------------------------------------------------------------------------------

    def start_reduce(
        self, node: SimulatedPeer, start: effects.StartReduce, spec: CollectiveSpec, buffer: Buffer
    ) -> None:
        """Begins one peer's part in an attempt. ReduceDone follows unless end_reduce() comes first."""
        call_id, attempt_id, order = start.call_id, start.attempt_id, start.how.order
        attempt = self.attempts.setdefault(node.key(attempt_id), RunningAttempt(attempt_id, start.how, spec.kind))
        self._cluster.require(attempt.how == start.how, "S3", f"attempt {attempt_id} has two plans")
        has_data = spec.kind != CollectiveKind.BARRIER
        self._cluster.require(has_data and attempt.kind == spec.kind, "S1", f"attempt {attempt_id} is of two kinds")
        self._cluster.require(
            (node.peer_id, attempt_id) not in self.ended and node.peer_id not in attempt.parts,
            "S4",
            f"{node.name} starts attempt {attempt_id} again",
        )
        part = Part(node, call_id, buffer, buffer.value, start.tells_digest, start.is_ahead)
        attempt.parts[node.peer_id] = part
        attempt.inputs[node.peer_id] = buffer.value
        attempt.calls[node.peer_id] = call_id
        clock = self._cluster.clock
        part.timers.append(clock.after(self._delay_ns(node), lambda: self._spoil(part)))
        self._watch(attempt, part, clock.now_ns)
        links = self._cluster.links
        self._early.pop((node.peer_id, node.key(attempt_id)), None)
        for other_id in sorted(attempt.edges_of(node.peer_id)):
            is_linked = links.are_linked(node.peer_id, other_id)
            if is_linked and other_id not in attempt.inputs and (other_id, attempt_id) not in self.ended:
                self._early.setdefault((other_id, node.key(attempt_id)), {})[node.peer_id] = None
            if not is_linked:
                attempt.is_broken = True
            elif not links.carries(node.peer_id, other_id):
                attempt.is_broken = True
                self._lose_later(attempt, part, other_id)
            if not links.is_up_at(node.peer_id, other_id):
                self._fail_later(attempt, part, other_id)
        if not attempt.is_broken and len(attempt.inputs) == len(order):
            for other in attempt.parts.values():
                self._let_finish(attempt, other)

    def end_reduce(self, node: SimulatedPeer, attempt_id: int, commit: bool) -> None:
        """Releases a buffer: with the result (commit), or restored."""
        self.ended.add((node.peer_id, attempt_id))
        self._early.pop((node.peer_id, node.key(attempt_id)), None)
        attempt = self.attempts.get(node.key(attempt_id))
        part = attempt.parts.pop(node.peer_id, None) if attempt is not None else None
        if attempt is None or part is None:
            self._cluster.require(not commit, "S1", f"{node.name} commits attempt {attempt_id}, which it never started")
            return
        part.stop()
        if not part.is_finished:
            self._cluster.require(
                not commit, "S1", f"{node.name} commits attempt {attempt_id} before it has its result"
            )
            self._break(attempt)
        if not commit:
            part.buffer.value = part.saved
            self._withdraw_frames(node, attempt, part.is_ahead)

    def _withdraw_frames(self, node: SimulatedPeer, attempt: RunningAttempt, is_ahead: bool) -> None:
        """A peer has ended an attempt. If that was planned ahead, it tells the others over its links."""
        for (_, key), senders in self._early.items():
            if key == node.key(attempt.attempt_id) and node.peer_id in senders:
                senders[node.peer_id] = self._cluster.clock.now_ns
        for other_id in attempt.order:
            if is_ahead and other_id != node.peer_id:
                arrive = functools.partial(self._tell_ended, node.peer_id, other_id, attempt.attempt_id)
                self._cluster.clock.after(self._delay_ns(node), arrive)

    def _tell_ended(self, sender_id: bytes, peer_id: bytes, attempt_id: int) -> None:
        if self._cluster.links.are_linked(sender_id, peer_id):
            self._cluster.nodes[peer_id].handle(events.AttemptEnded(sender_id, attempt_id))

    def stale_frames(self) -> list[str]:
        """The attempts whose frames peers keep in vain: their senders have ended them, and links stand."""
        cluster, found = self._cluster, []
        for (peer_id, (run_id, attempt_id)), senders in self._early.items():
            node = cluster.nodes[peer_id]
            is_led = node.is_alive and node.machine.is_led and node.machine.run_id == run_id
            for sender_id, ended_ns in senders.items() if is_led else ():
                from_ns = None if ended_ns is None else max(ended_ns, node.led_ns)
                is_old = from_ns is not None and from_ns + EARLY_NS_MAX < cluster.clock.now_ns
                if is_old and cluster.links.are_linked(sender_id, peer_id):
                    found.append(f"{node.name} keeps frames of {cluster.nodes[sender_id].name}, attempt {attempt_id}")
        return found

    def withhold_digest(self, node: SimulatedPeer, call_id: int) -> None:
        """From now on nobody is told the digest of a call's result. If it was told before, the machine hears of it."""
        for attempt in list(self.attempts.values()):
            part = attempt.parts.get(node.peer_id)
            if part is not None and part.call_id == call_id:
                part.tells_digest = False
                self._hear(part)

    def _send_digest(self, attempt: RunningAttempt, part: Part, digest: int) -> None:
        """Tells the others a digest. Each may get it before or after anything else, or never, if the link breaks."""
        own_id = part.node.peer_id
        event = events.DigestReceived(own_id, attempt.attempt_id, part.call_id, digest)
        for peer_id in attempt.order:
            if peer_id != own_id:
                arrive = functools.partial(self._deliver, own_id, peer_id, event)
                self._cluster.clock.after(self._delay_ns(part.node), arrive)

    def _deliver(self, sender_id: bytes, peer_id: bytes, event: events.PeerEvent) -> None:
        links, node = self._cluster.links, self._cluster.nodes[peer_id]
        if links.are_linked(sender_id, peer_id) and links.carries(sender_id, peer_id):
            node.handle(event)

    def active_calls(self, node: SimulatedPeer) -> set[int]:
        """The calls of a peer whose buffers the data plane may write."""
        return {t.parts[node.peer_id].call_id for t in self.attempts.values() if node.peer_id in t.parts}

    def lose_peer(self, node: SimulatedPeer) -> None:
        """Ends all parts and fetches of a dead process."""
        for attempt in self.attempts.values():
            part = attempt.parts.pop(node.peer_id, None)
            if part is not None:
                part.stop()
                self._break(attempt)
        for key, fetch in list(self.fetches.items()):
            if key[0] == node.peer_id:
                self._stop_fetch(key, fetch)

    def on_link_broken(self, one: bytes, other: bytes) -> None:
        """A link is down: attempts that need it break, and frames that came early are dropped."""
        for (peer_id, _), senders in self._early.items():
            if peer_id in (one, other):
                senders.pop(other if peer_id == one else one, None)
        for attempt in self.attempts.values():
            if one in attempt.order and other in attempt.edges_of(one):
                self._break(attempt)

    def on_break_noticed(self, peer_id: bytes, other_id: bytes) -> None:
        """One end notices that a link is down: its parts of attempts that need it fail."""
        for attempt in self.attempts.values():
            part = attempt.parts.get(peer_id)
            if part is not None and other_id in attempt.edges_of(peer_id) and part.finish is None:
                self._fail_later(attempt, part, other_id)
        for (fetcher_id, _), fetch in list(self.fetches.items()):
            if fetcher_id == peer_id and fetch.plan.fetch:
                self._continue(self._cluster.nodes[peer_id], fetch)

    def _break(self, attempt: RunningAttempt) -> None:
        """Stops an attempt; some peers whose last frames were in flight may still finish."""
        attempt.is_broken = True
        for part in attempt.parts.values():
            if part.finish is not None and not part.is_finished and self._rng.random() < 0.7:
                part.finish.cancel()
                part.finish = None

    def _spoil(self, part: Part) -> None:
        if not part.is_finished:
            part.buffer.value = RUBBISH

    def _let_finish(self, attempt: RunningAttempt, part: Part) -> None:
        delay_ns = self._delay_ns(part.node)
        part.finish = self._cluster.clock.after(delay_ns, lambda: self._finish(attempt, part))

    def _finish(self, attempt: RunningAttempt, part: Part) -> None:
        if part.has_failed:
            return
        part.is_finished = True
        part.buffer.value = result_of(attempt.kind, attempt.inputs, attempt.order[0], part.node.peer_id)
        is_shared = CollectiveKind(attempt.kind).has_one_result
        is_wrong = is_shared and self._rng.random() < self._cluster.faults.corruption_chance
        if is_wrong and self._cluster.injector.strikes("corruption_chance", part.node):
            self._cluster.note("wrong result", part.node)
            self.wrong.add((part.node.peer_id, attempt.attempt_id))
            part.buffer.value += self._rng.randrange(1, 2**32)
        digest = int.from_bytes(hashlib.blake2b(str(part.buffer.value).encode(), digest_size=8).digest(), "big")
        told = digest if is_shared else 0
        if part.tells_digest:
            self._send_digest(attempt, part, told)
        paths = self._measure(attempt, part.node.peer_id) if self._cluster.script.is_uneven else ()
        part.done = events.ReduceDone(attempt.attempt_id, told, has_told=part.tells_digest, paths=paths)
        part.finish = self._cluster.clock.after(self._rng.randrange(2 * MS), lambda: self._hear(part))

    def _measure(self, attempt: RunningAttempt, peer_id: bytes) -> tuple[PathSample, ...]:
        """What the paths to other peers have carried, as a peer reports it. The rates of some have just changed."""
        samples = []
        for other_id in sorted(attempt.edges_of(peer_id)):
            edge = frozenset((peer_id, other_id))
            if edge not in self._rates or self._rng.random() < RATE_CHANGE_CHANCE:
                self._rates[edge] = int(10 ** self._rng.uniform(6, 9))
            busy_us = self._rng.randrange(1000, 10_000_000)
            sent_bytes = self._rates[edge] * busy_us // 1_000_000
            samples.append(
                PathSample(other_id, sent_bytes, busy_us, self._rng.randrange(200_000), self._rng.random() < 0.7)
            )
        return tuple(samples)

    def _hear(self, part: Part) -> None:
        """The machine hears that the result is there, unless it has heard so already."""
        done, part.done = part.done, None
        if done is not None:
            part.node.handle(done)

    def _watch(self, attempt: RunningAttempt, part: Part, since_ns: int) -> None:
        due_ns = since_ns + STALL_TIMEOUT_NS
        part.timers.append(self._cluster.clock.at(due_ns, lambda: self._stall(attempt, part, since_ns)))

    def _stall(self, attempt: RunningAttempt, part: Part, since_ns: int) -> None:
        """Fails a part that has stalled for a whole timeout, all of it while a master led its peer."""
        is_led, led_ns = part.node.machine.is_led, part.node.led_ns
        if not part.is_finished and is_led and led_ns <= since_ns:
            self._fail(attempt, part, None)
        elif not part.is_finished:
            self._watch(attempt, part, led_ns if is_led else self._cluster.clock.now_ns)

    def _fail_later(self, attempt: RunningAttempt, part: Part, fault: bytes) -> None:
        delay_ns = self._cluster.distance_ns(self._rng.randrange(40 * MS))
        part.timers.append(self._cluster.clock.after(delay_ns, lambda: self._fail(attempt, part, fault)))

    def _lose_later(self, attempt: RunningAttempt, part: Part, other_id: bytes) -> None:
        """Breaks the link after the path timeout, and with it every attempt that needs it."""

        def happen() -> None:
            links = self._cluster.links
            if attempt.parts.get(part.node.peer_id) is part and links.are_linked(part.node.peer_id, other_id):
                links.break_link(part.node.peer_id, other_id, is_silent=False)

        delay_ns = self._rng.randrange(PATH_TIMEOUT_NS, PATH_TIMEOUT_NS + SECOND)
        part.timers.append(self._cluster.clock.after(delay_ns, happen))

    def _fail(self, attempt: RunningAttempt, part: Part, fault: bytes | None) -> None:
        if part.is_finished or attempt.parts.get(part.node.peer_id) is not part:
            return
        part.has_failed = True
        part.timers = [timer for timer in part.timers if timer.callback is not None]
        error = "no byte came for too long" if fault is None else "the link broke"
        part.node.handle(events.ReduceDone(attempt.attempt_id, 0, error, fault))

    def _delay_ns(self, node: SimulatedPeer) -> int:
        return self._cluster.distance_ns(self._rng.randrange(MS, 150 * MS)) * node.slowness

    # --- Shared state -----------------------------------------------------------------------------------------------

    def start_sync(self, node: SimulatedPeer, attempt_id: int, plan: Fetching) -> None:
        """Begins one peer's part in a sync. A fetcher gets FetchDone unless end_sync() comes first."""
        key = (node.peer_id, attempt_id)
        self._cluster.require(key not in self.ended and key not in self.fetches, "S4", f"{node.name} syncs twice")
        fetch = self.fetches[key] = Fetch(attempt_id, plan)
        if plan.fetch:
            self._expect(node, fetch)
            self._continue(node, fetch)
        self._wake(attempt_id)

    def end_sync(self, node: SimulatedPeer, attempt_id: int, commit: bool) -> None:
        """Stops fetching and serving; writes the fetched values if the sync was committed.

        A peer with nothing to fetch may get the end of a sync whose plan it never received.
        """
        key = (node.peer_id, attempt_id)
        self.ended.add(key)
        fetch = self.fetches.get(key)
        if fetch is None:
            return
        self._stop_fetch(key, fetch)
        if commit:
            missing = [entry.key for entry in fetch.missing]
            self._cluster.require(not missing, "S5", f"{node.name} commits sync {attempt_id} without {missing}")
            node.shared_state.values.update(fetch.values)

    def is_syncing(self, node: SimulatedPeer) -> bool:
        """True while the data plane may read or write the shared state of a peer."""
        return any(peer_id == node.peer_id for peer_id, _ in self.fetches)

    def serving(self) -> set[bytes]:
        """The peers from which others fetch."""
        fetching = [fetch for fetch in self.fetches.values() if fetch.missing and not fetch.is_done]
        named = ((i, fetch.attempt_id) for fetch in fetching for i in (*fetch.plan.sources, *fetch.plan.partial_seeds))
        return {peer_id for peer_id, attempt_id in named if (peer_id, attempt_id) in self.fetches}

    def change_state(self, node: SimulatedPeer, key: str, value: int) -> None:
        """Writes a value to a state that is being synced, as a user may."""
        node.shared_state.values[key] = value
        self.changed.update(sync for sync in self.fetches if sync[0] == node.peer_id)

    def _stop_fetch(self, key: tuple[bytes, int], fetch: Fetch) -> None:
        fetch.stop()
        del self.fetches[key]

    def _expect(self, node: SimulatedPeer, fetch: Fetch) -> None:
        """Restarts the stall timeout of a fetcher."""
        if fetch.stall is not None:
            fetch.stall.cancel()
        fetch.stall = self._cluster.clock.after(
            STATE_STALL_TIMEOUT_NS, lambda: self._report_fetch(node, fetch, "nothing came for too long", None)
        )

    def _continue(self, node: SimulatedPeer, fetch: Fetch) -> None:
        """Requests a missing key from a random source that has it, unless one is in flight."""
        if fetch.is_done or fetch.step is not None:
            return
        if not fetch.missing:
            return self._report_fetch(node, fetch, "", None)
        links = self._cluster.links
        for other_id in (*fetch.plan.sources, *fetch.plan.partial_seeds):
            if other_id in fetch.dropped or other_id in fetch.silent:
                continue
            if not links.are_linked(node.peer_id, other_id):
                fetch.dropped[other_id] = "the link to it was lost"
            elif not links.carries(node.peer_id, other_id):
                self._drop_later(node, fetch, other_id)
        left = [i for i in (*fetch.plan.sources, *fetch.plan.partial_seeds) if i not in fetch.dropped]
        if not left:
            last = next(reversed(fetch.dropped), None)
            return self._report_fetch(node, fetch, "no source is left", last)
        offers = [
            (other_id, entry)
            for other_id in left
            for entry in fetch.missing
            if other_id not in fetch.silent and self._has(other_id, fetch.attempt_id, entry.key)
        ]
        if offers:
            source_id, entry = self._rng.choice(offers)
            fetch.step = self._cluster.clock.after(
                self._delay_ns(node), lambda: self._copy(node, fetch, source_id, entry)
            )

    def _drop_later(self, node: SimulatedPeer, fetch: Fetch, other_id: bytes) -> None:
        """Drops a silent source after the source timeout."""

        def happen() -> None:
            fetch.dropped[other_id] = "it sent nothing for too long"
            self._continue(node, fetch)

        fetch.silent.add(other_id)
        fetch.timers.append(self._cluster.clock.after(STATE_SOURCE_TIMEOUT_NS, happen))

    def _has(self, peer_id: bytes, attempt_id: int, key: str) -> bool:
        """True if a peer serves this sync and believes that it has the elected contents of a key."""
        theirs = self.fetches.get((peer_id, attempt_id))
        return theirs is not None and not theirs.has_changed and key not in [entry.key for entry in theirs.missing]

    def _copy(self, node: SimulatedPeer, fetch: Fetch, source_id: bytes, entry: FetchEntry) -> None:
        """Receives a key, unless the source is gone by now."""
        fetch.step = None
        attempt_id, key = fetch.attempt_id, entry.key
        is_linked = self._cluster.links.are_linked(node.peer_id, source_id)
        if is_linked and self._has(source_id, attempt_id, key):
            value = self._serve(source_id, attempt_id, entry)
            if value is not None and digest_of(value) == entry.digest:
                fetch.values[key] = value
                self._expect(node, fetch)
                self._wake(attempt_id)
            elif value is not None:
                fetch.dropped[source_id] = f"the digest of {key} is wrong"
        self._continue(node, fetch)

    def _serve(self, source_id: bytes, attempt_id: int, entry: FetchEntry) -> int | None:
        """The value that a source sends; None if it finds that its own state has changed."""
        source, theirs = self._cluster.nodes[source_id], self.fetches[source_id, attempt_id]
        value = theirs.values.get(entry.key, source.shared_state.values[entry.key])
        if digest_of(value) != entry.digest:
            is_known = (source_id, attempt_id) in self.changed
            self._cluster.require(is_known, "S5", f"{source.name} is a source of {entry.key} and never had it")
            theirs.has_changed = True
            self._tell(source, theirs, events.FetchDone(attempt_id, f"tensor {entry.key!r} has changed", source_id))
            return None
        is_damaged = self._rng.random() < self._cluster.faults.damage_chance
        if is_damaged and self._cluster.injector.strikes("damage_chance", source):
            self._cluster.note("sends wrong data", source)
            return value + 1
        return value

    def _wake(self, attempt_id: int) -> None:
        """Continues those fetchers of a sync that wait for a source to have more."""
        for (other_id, of_attempt), other in list(self.fetches.items()):
            if of_attempt == attempt_id and other.plan.fetch:
                self._continue(self._cluster.nodes[other_id], other)

    def _report_fetch(self, node: SimulatedPeer, fetch: Fetch, error: str, fault: bytes | None) -> None:
        if not fetch.is_done:
            fetch.is_done = True
            if fetch.stall is not None:
                fetch.stall.cancel()
            dropped = tuple(fetch.dropped.items())
            self._tell(node, fetch, events.FetchDone(fetch.attempt_id, error, fault, dropped))

    def _tell(self, node: SimulatedPeer, fetch: Fetch, event: events.FetchDone) -> None:
        """Passes an event to the machine in a separate step."""
        fetch.timers.append(self._cluster.clock.after(0, lambda: node.handle(event)))
