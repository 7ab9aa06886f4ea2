"""A model of the data links between pairs of peers. Each end has its own state:

    CLOSED --OpenLink--> WANTED --both want it, one has dialled--> UP --broken, closed by the other end--> CLOSED
                            `--refused, other end gone, timeout-------------------------------------------^

Both ends dial, one of them at once and the other one DIAL_HEAD_START later. Nobody can dial a peer behind a NAT.

A link is alive or not; each end learns it after a delay of its own, so an end may believe a dead link to be up.

The path of a link may be cut: then no link comes up until it is restored. Or it may be a black hole: links come up, but
large packets are dropped.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zpccl.limits import DIAL_HEAD_START_NS, LINK_SETUP_TIMEOUT_NS, MS, PATH_TIMEOUT_NS, SECOND
from zpccl.protocol import events
from zpccl.protocol.messages import Neighbour
from zpccl.sim.clock import Timer

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import SimulatedPeer


class EndState(enum.Enum):
    """The state of a link at one end."""

    CLOSED = "closed"
    WANTED = "wanted"
    UP = "up"


@dataclass(slots=True)
class End:
    """One end of a link."""

    state: EndState = EndState.CLOSED
    is_dialling: bool = False
    told_ns: int = 0
    """Time of the last event that is scheduled for this end; events stay in order."""
    timers: list[Timer] = field(default_factory=list)
    reset_count: int = 0

    def reset(self, state: EndState) -> None:
        """Sets the state and cancels what was scheduled for this end."""
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        self.state, self.is_dialling = state, False
        self.reset_count += 1

    def is_as_now(self) -> Callable[[], bool]:
        """A function that is true until the next reset."""
        count = self.reset_count
        return lambda: self.reset_count == count


@dataclass(slots=True)
class Pair:
    """A link."""

    ends: dict[bytes, End]
    is_alive: bool = False
    is_cut: bool = False
    is_black_hole: bool = False
    restored_ns: int = -(10**18)
    """When its path was last repaired."""


class Links:
    """All links."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.child_rng()
        self._pairs: dict[tuple[bytes, bytes], Pair] = {}

    def are_linked(self, one: bytes, other: bytes) -> bool:
        """True while the link between two peers is alive."""
        return self._pair(one, other).is_alive

    def is_up_at(self, peer_id: bytes, other_id: bytes) -> bool:
        """True while the end of `peer_id` believes the link to be up."""
        return self._pair(peer_id, other_id).ends[peer_id].state is EndState.UP

    def up(self) -> list[tuple[bytes, bytes]]:
        """The peer ids of every link that is alive."""
        return [key for key, pair in self._pairs.items() if pair.is_alive]

    def carries(self, one: bytes, other: bytes) -> bool:
        """True while the path between two peers is neither cut nor a black hole."""
        pair = self._pair(one, other)
        return not pair.is_cut and not pair.is_black_hole

    def can_meet(self, one: bytes, other: bytes) -> bool:
        """False for two peers behind NATs: they never have a link."""
        nodes = self._cluster.nodes
        return not (nodes[one].is_behind_nat and nodes[other].is_behind_nat)

    def carries_since_ns(self, one: bytes, other: bytes) -> int | None:
        """Time since which carries() is true and the network is there; None if that is not so, or they never meet."""
        network = self._cluster.network
        is_sound = self.carries(one, other) and self.can_meet(one, other) and not network.is_away
        return max(self._pair(one, other).restored_ns, network.back_ns) if is_sound else None

    def damage(self, one: bytes, other: bytes, *, is_cut: bool) -> None:
        """Silently cuts the path between two peers, or makes it a black hole."""
        pair = self._pair(one, other)
        if is_cut:
            pair.is_cut = True
            self.break_link(one, other, is_silent=True)
        else:
            pair.is_black_hole = True

    def restore(self, one: bytes, other: bytes) -> None:
        """Repairs a path."""
        pair = self._pair(one, other)
        pair.is_cut = pair.is_black_hole = False
        pair.restored_ns = self._cluster.clock.now_ns

    def open(self, node: SimulatedPeer, neighbour: Neighbour) -> None:
        """Opens one end of a link; LinkUp or LinkFailed follows."""
        other_id = neighbour.peer_id
        pair = self._pair(node.peer_id, other_id)
        end, other_end = pair.ends[node.peer_id], pair.ends[other_id]
        self._cluster.require(end.state is not EndState.UP, "links", f"{node.name} opens a link that is up")
        end.reset(EndState.WANTED)
        if other_end.is_dialling:
            self._try(other_id, node.peer_id)

        def dial() -> None:
            end.is_dialling = True
            self._try(node.peer_id, other_id)
            fail = functools.partial(self._fail, node.peer_id, other_id, "nobody there")
            end.timers.append(self._cluster.clock.after(LINK_SETUP_TIMEOUT_NS, fail))

        if neighbour.dial:
            dial()
        else:
            end.timers.append(self._cluster.clock.after(DIAL_HEAD_START_NS, dial))

    def close(self, node: SimulatedPeer, other_id: bytes) -> None:
        """Closes one end of a link, which gets no more events about it."""
        self._drop(node.peer_id, other_id, is_silent=False)

    def lose_peer(self, peer_id: bytes, *, is_silent: bool) -> None:
        """Ends the links of a dead process."""
        for key in list(self._pairs):
            if peer_id in key:
                self._drop(peer_id, key[0] if key[1] == peer_id else key[1], is_silent=is_silent)

    def break_link(self, one: bytes, other: bytes, *, is_silent: bool) -> None:
        """Breaks a link that is alive."""
        pair = self._pair(one, other)
        pair.is_alive = False
        for end_id, other_id in ((one, other), (other, one)):
            self._tell_broken(end_id, other_id, is_silent=is_silent)
        self._cluster.dataplane.on_link_broken(one, other)

    def _drop(self, closer: bytes, other_id: bytes, *, is_silent: bool) -> None:
        pair = self._pair(closer, other_id)
        pair.ends[closer].reset(EndState.CLOSED)
        if pair.is_alive:
            pair.is_alive = False
            self._tell_broken(other_id, closer, is_silent=is_silent)
            self._cluster.dataplane.on_link_broken(closer, other_id)

    def _pair(self, one: bytes, other: bytes) -> Pair:
        key = (one, other) if one < other else (other, one)
        if key not in self._pairs:
            self._pairs[key] = Pair({one: End(), other: End()})
        return self._pairs[key]

    def _try(self, dialler: bytes, other_id: bytes) -> None:
        """Schedules the arrival of the dialler's connection at the other end."""
        pair = self._pair(dialler, other_id)

        def happen() -> None:
            end, other_end = pair.ends[dialler], pair.ends[other_id]
            other = self._cluster.nodes.get(other_id)
            is_cut = pair.is_cut or self._cluster.network.is_away
            if is_cut or (other is not None and other.is_behind_nat):
                return
            is_there = other is not None and other.is_alive
            if not is_there or self._refuses(self._cluster.nodes[dialler]):
                self._fail(dialler, other_id, "refused")
            elif other_end.state is EndState.WANTED:
                pair.is_alive = True
                for end_id, end in pair.ends.items():
                    end.reset(EndState.UP)
                    self._tell(end_id, other_id if end_id == dialler else dialler, self._rng.randrange(40 * MS), "")

        pair.ends[dialler].timers.append(self._cluster.clock.after(self._rng.randrange(MS, 80 * MS), happen))

    def _refuses(self, dialler: SimulatedPeer) -> bool:
        is_refused = self._rng.random() < self._cluster.faults.refusal_chance
        return is_refused and self._cluster.injector.strikes("refusal_chance", dialler)

    def _fail(self, peer_id: bytes, other_id: bytes, reason: str) -> None:
        node, end = self._cluster.nodes[peer_id], self._pair(peer_id, other_id).ends[peer_id]
        end.reset(EndState.CLOSED)
        self._cluster.dataplane.on_break_noticed(peer_id, other_id)
        node.handle(events.LinkFailed(other_id, reason), end.is_as_now())

    def _tell_broken(self, peer_id: bytes, other_id: bytes, *, is_silent: bool) -> None:
        times = (PATH_TIMEOUT_NS // 2, PATH_TIMEOUT_NS + SECOND) if is_silent else (self._cluster.distance_ns(40 * MS),)
        if self._pair(peer_id, other_id).ends[peer_id].state is EndState.UP:
            self._tell(peer_id, other_id, self._rng.randrange(*times), "broken")

    def _tell(self, peer_id: bytes, other_id: bytes, delay_ns: int, reason: str) -> None:
        """Schedules LinkUp, or LinkFailed with `reason`, at one end, after all its earlier events."""
        end = self._pair(peer_id, other_id).ends[peer_id]

        def happen() -> None:
            if reason:
                self._fail(peer_id, other_id, reason)
            else:
                self._cluster.nodes[peer_id].handle(events.LinkUp(other_id), end.is_as_now())

        clock = self._cluster.clock
        end.told_ns = max(end.told_ns, clock.now_ns + delay_ns)
        end.timers.append(clock.at(end.told_ns, happen))
