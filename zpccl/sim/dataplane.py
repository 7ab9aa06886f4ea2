"""A model of the data plane and of the buffers of users.

Buffers are numbers and every collective is a sum in place. While an attempt runs, its buffers hold rubbish; a peer that
has received all holds the sum. An attempt makes its way only after all its peers have started it, and only while its
ring holds: whoever has not all then gets none of the rest. The neighbours of a break notice it, the others stall. A
path that carries nothing large is noticed by the two at its ends, who lose their link.

A shared state is a few numbers by key. Peers that fetch copy them from a holder that serves the same sync.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zpccl.limits import MS, PATH_TIMEOUT_NS, SECOND, STALL_TIMEOUT_NS, STATE_SOURCE_TIMEOUT_NS, STATE_STALL_TIMEOUT_NS
from zpccl.protocol import events
from zpccl.protocol.messages import SyncPlan
from zpccl.sim.clock import Timer

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import PeerNode

RUBBISH = -1
DIGEST_MASK = 2**64 - 1


@dataclass(eq=False)
class Buffer:
    """A tensor of a user: its contents are one number, never negative unless an attempt is writing it."""

    value: int


@dataclass(eq=False)
class SharedState:
    """A shared state: numbers by key. Keys that begin with "local" may differ between peers."""

    revision: int = 0
    values: dict[str, int] = field(default_factory=lambda: {"local": 0, "momentum": 0, "params": 0})

    def shared(self) -> dict[str, int]:
        """What must be equal on all peers after a sync."""
        return {key: value for key, value in self.values.items() if not key.startswith("local")}


def digest_of(value: int) -> bytes:
    """The digest of one tensor of a shared state: the contents themselves, which nothing can beat."""
    return value.to_bytes(32, "big")


@dataclass(eq=False)
class Part:
    """What one peer does in one attempt."""

    node: PeerNode
    call_id: int
    buffer: Buffer
    saved: int
    is_finished: bool = False
    finish: Timer | None = None
    timers: list[Timer] = field(default_factory=list)

    def stop(self) -> None:
        """Nothing happens to the buffer any more."""
        for timer in self.timers:
            timer.cancel()
        if self.finish is not None:
            self.finish.cancel()


@dataclass(eq=False)
class Transfer:
    """One attempt."""

    attempt_id: int
    order: tuple[bytes, ...]
    parts: dict[bytes, Part] = field(default_factory=dict)
    inputs: dict[bytes, int] = field(default_factory=dict)
    is_broken: bool = False

    def edges_of(self, peer_id: bytes) -> set[bytes]:
        """The neighbours of a peer in the ring."""
        place = self.order.index(peer_id)
        return {self.order[place - 1], self.order[(place + 1) % len(self.order)]}


@dataclass(eq=False)
class Fetch:
    """What one peer does in one sync."""

    plan: SyncPlan
    values: dict[str, int] = field(default_factory=dict)
    next_step: Timer | None = None
    stall: Timer | None = None
    is_done: bool = False
    is_here: bool = False
    """All that was to be fetched has come."""

    def stop(self) -> None:
        """Nothing is fetched or reported any more."""
        for timer in (self.next_step, self.stall):
            if timer is not None:
                timer.cancel()


class DataPlane:
    """The engines of all peers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.child_rng()
        self.transfers: dict[int, Transfer] = {}
        self.ended: set[tuple[bytes, int]] = set()
        self.wrong: set[tuple[bytes, int]] = set()  # Peers that computed a wrong result.
        self.fetches: dict[tuple[bytes, int], Fetch] = {}

    # --- Collectives ------------------------------------------------------------------------------------------------

    def start_reduce(
        self, node: PeerNode, call_id: int, attempt_id: int, order: tuple[bytes, ...], buffer: Buffer
    ) -> None:
        """One peer begins its part of an attempt. ReduceDone follows, unless it is ended before."""
        transfer = self.transfers.setdefault(attempt_id, Transfer(attempt_id, order))
        self._cluster.require(transfer.order == order, "S3", f"attempt {attempt_id} has two orders")
        self._cluster.require(
            (node.peer_id, attempt_id) not in self.ended and node.peer_id not in transfer.parts,
            "S4",
            f"{node.name} starts attempt {attempt_id} again",
        )
        part = Part(node, call_id, buffer, buffer.value)
        transfer.parts[node.peer_id] = part
        transfer.inputs[node.peer_id] = buffer.value
        clock = self._cluster.clock
        part.timers.append(clock.after(self._delay_ns(node), lambda: self._spoil(part)))
        part.timers.append(clock.after(STALL_TIMEOUT_NS, lambda: self._stall(transfer, part)))
        links = self._cluster.links
        for other_id in sorted(transfer.edges_of(node.peer_id)):
            if not links.are_linked(node.peer_id, other_id):
                transfer.is_broken = True
            elif not links.carries(node.peer_id, other_id):
                transfer.is_broken = True
                self._lose_later(transfer, part, other_id)
            if not links.is_up_at(node.peer_id, other_id):
                self._fail_later(transfer, part, other_id)
        if not transfer.is_broken and len(transfer.inputs) == len(order):
            for other in transfer.parts.values():
                self._let_finish(transfer, other)

    def end_reduce(self, node: PeerNode, attempt_id: int, commit: bool) -> None:
        """Gives a buffer back: with the sum, or as it was."""
        self.ended.add((node.peer_id, attempt_id))
        transfer = self.transfers.get(attempt_id)
        part = transfer.parts.pop(node.peer_id, None) if transfer is not None else None
        if transfer is None or part is None:
            self._cluster.require(not commit, "S1", f"{node.name} commits attempt {attempt_id}, which it never started")
            return
        part.stop()
        if not part.is_finished:
            self._cluster.require(not commit, "S1", f"{node.name} commits attempt {attempt_id} before it has the sum")
            self._break(transfer)
        if not commit:
            part.buffer.value = part.saved

    def active_calls(self, node: PeerNode) -> set[int]:
        """The calls of a peer whose buffers the data plane may touch."""
        return {t.parts[node.peer_id].call_id for t in self.transfers.values() if node.peer_id in t.parts}

    def lose_peer(self, node: PeerNode) -> None:
        """A process is dead."""
        for transfer in self.transfers.values():
            part = transfer.parts.pop(node.peer_id, None)
            if part is not None:
                part.stop()
                self._break(transfer)
        for key, fetch in list(self.fetches.items()):
            if key[0] == node.peer_id:
                self._stop_fetch(key, fetch)

    def on_link_broken(self, one: bytes, other: bytes) -> None:
        """A link is dead: attempts whose ring needs it break."""
        for transfer in self.transfers.values():
            if one in transfer.order and other in transfer.edges_of(one):
                self._break(transfer)

    def on_break_noticed(self, peer_id: bytes, other_id: bytes) -> None:
        """One end notices that a link is dead: its parts of attempts that need it fail."""
        for transfer in self.transfers.values():
            part = transfer.parts.get(peer_id)
            if part is not None and other_id in transfer.edges_of(peer_id) and part.finish is None:
                self._fail_later(transfer, part, other_id)

    def _break(self, transfer: Transfer) -> None:
        """Nobody gets the rest of an attempt, but those who had it all on the way to them already."""
        transfer.is_broken = True
        for part in transfer.parts.values():
            if part.finish is not None and not part.is_finished and self._rng.random() < 0.7:
                part.finish.cancel()
                part.finish = None

    def _spoil(self, part: Part) -> None:
        if not part.is_finished:
            part.buffer.value = RUBBISH

    def _let_finish(self, transfer: Transfer, part: Part) -> None:
        delay_ns = self._delay_ns(part.node)
        part.finish = self._cluster.clock.after(delay_ns, lambda: self._finish(transfer, part))

    def _finish(self, transfer: Transfer, part: Part) -> None:
        part.is_finished = True
        part.buffer.value = sum(transfer.inputs.values())
        if self._rng.random() < self._cluster.faults.corruption_chance:
            self._cluster.note("wrong result", part.node)
            self.wrong.add((part.node.peer_id, transfer.attempt_id))
            part.buffer.value += self._rng.randrange(1, 2**32)
        part.node.handle(events.ReduceDone(transfer.attempt_id, part.buffer.value & DIGEST_MASK))

    def _stall(self, transfer: Transfer, part: Part) -> None:
        if not part.is_finished:
            self._fail(transfer, part, None)

    def _fail_later(self, transfer: Transfer, part: Part, fault: bytes) -> None:
        delay_ns = self._rng.randrange(40 * MS)
        part.timers.append(self._cluster.clock.after(delay_ns, lambda: self._fail(transfer, part, fault)))

    def _lose_later(self, transfer: Transfer, part: Part, other_id: bytes) -> None:
        """The link is lost when nothing was acknowledged for a while, by then with every attempt that needs it."""

        def happen() -> None:
            links = self._cluster.links
            if transfer.parts.get(part.node.peer_id) is part and links.are_linked(part.node.peer_id, other_id):
                links.break_link(part.node.peer_id, other_id, is_silent=False)

        delay_ns = self._rng.randrange(PATH_TIMEOUT_NS, PATH_TIMEOUT_NS + SECOND)
        part.timers.append(self._cluster.clock.after(delay_ns, happen))

    def _fail(self, transfer: Transfer, part: Part, fault: bytes | None) -> None:
        if part.is_finished or transfer.parts.get(part.node.peer_id) is not part:
            return
        part.timers = [timer for timer in part.timers if timer.callback is not None]
        error = "no byte came for too long" if fault is None else "the link broke"
        part.node.handle(events.ReduceDone(transfer.attempt_id, 0, error, fault))

    def _delay_ns(self, node: PeerNode) -> int:
        return self._rng.randrange(MS, 150 * MS) * node.slowness

    # --- Shared state -----------------------------------------------------------------------------------------------

    def start_sync(self, node: PeerNode, plan: SyncPlan) -> None:
        """One peer begins to fetch, or to serve. FetchDone follows, unless it is ended before."""
        key = (node.peer_id, plan.attempt_id)
        self._cluster.require(key not in self.ended and key not in self.fetches, "S4", f"{node.name} syncs twice")
        fetch = self.fetches[key] = Fetch(plan)
        self._continue(node, fetch)
        self._wake(plan.attempt_id)
        fetch.stall = self._cluster.clock.after(
            STATE_STALL_TIMEOUT_NS, lambda: self._report_fetch(node, fetch, "stalled", None)
        )

    def end_sync(self, node: PeerNode, attempt_id: int, commit: bool) -> None:
        """Stops fetching and serving; writes what was fetched, if the sync was committed.

        A peer that had nothing to fetch may be told the end of a sync of which it never got the plan.
        """
        key = (node.peer_id, attempt_id)
        self.ended.add(key)
        fetch = self.fetches.get(key)
        if fetch is None:
            return
        self._stop_fetch(key, fetch)
        if commit:
            missing = {entry.key for entry in fetch.plan.fetch} - fetch.values.keys()
            self._cluster.require(not missing, "S5", f"{node.name} commits sync {attempt_id} without {sorted(missing)}")
            node.shared_state.values.update(fetch.values)

    def is_syncing(self, node: PeerNode) -> bool:
        """True while the data plane may touch the shared state of a peer."""
        return any(peer_id == node.peer_id for peer_id, _ in self.fetches)

    def _stop_fetch(self, key: tuple[bytes, int], fetch: Fetch) -> None:
        fetch.stop()
        del self.fetches[key]

    def _continue(self, node: PeerNode, fetch: Fetch) -> None:
        """Fetches from some source that has all there is to have, once there is one."""
        links, attempt_id = self._cluster.links, fetch.plan.attempt_id
        sources = fetch.plan.sources or fetch.plan.holders
        linked = [s for s in sources if links.are_linked(node.peer_id, s)]
        good = [s for s in linked if links.carries(node.peer_id, s)]
        serving = [s for s in good if self._serves(s, attempt_id)]
        source = self._rng.choice(serving) if serving else None
        delay_ns = self._delay_ns(node) + (STATE_SOURCE_TIMEOUT_NS if linked != good else 0)

        def happen() -> None:
            if not fetch.plan.fetch:
                self._report_fetch(node, fetch, "", None)
            elif source is not None:
                self._copy(node, fetch, source)
            else:
                self._report_fetch(node, fetch, "no link to a source, or nothing comes", (linked or sources)[0])

        if serving or not good or not fetch.plan.fetch:
            fetch.next_step = self._cluster.clock.after(delay_ns, happen)

    def _serves(self, peer_id: bytes, attempt_id: int) -> bool:
        fetch = self.fetches.get((peer_id, attempt_id))
        return fetch is not None and (not fetch.plan.fetch or fetch.is_here)

    def _copy(self, node: PeerNode, fetch: Fetch, source_id: bytes) -> None:
        attempt_id = fetch.plan.attempt_id
        if not self._serves(source_id, attempt_id) or not self._cluster.links.are_linked(node.peer_id, source_id):
            return self._report_fetch(node, fetch, "the source is gone", source_id)
        held = {**self._cluster.nodes[source_id].shared_state.values, **self.fetches[source_id, attempt_id].values}
        for entry in fetch.plan.fetch:
            if digest_of(held[entry.key]) != entry.digest:
                return self._report_fetch(node, fetch, f"{entry.key} does not check", source_id)
            fetch.values[entry.key] = held[entry.key]
        fetch.is_here = True
        self._wake(attempt_id)
        return self._report_fetch(node, fetch, "", None)

    def _wake(self, attempt_id: int) -> None:
        """Who waits for a source to have something goes on."""
        for (other_id, of_attempt), other in list(self.fetches.items()):
            if of_attempt == attempt_id and other.next_step is None:
                self._continue(self._cluster.nodes[other_id], other)

    def _report_fetch(self, node: PeerNode, fetch: Fetch, error: str, fault: bytes | None) -> None:
        if not fetch.is_done:
            fetch.is_done = True
            node.handle(events.FetchDone(fetch.plan.attempt_id, error, fault))
