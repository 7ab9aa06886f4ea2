"""Measures the paths of a group for `optimize_topology`.

In rounds, so that nothing else uses the lines of those who send. First each peer sends to each other one, alone: that
shows the rate of their path. Of two peers only one sends at a time: if both did, acknowledgements would wait behind
data, and a slow path would seem to carry half of what it does. Then each peer in turn sends to all others: that shows
how much its host sends in all. Between rounds all peers meet in an all-reduce of a few bytes, whose reports take the
measurements to the master (protocol/plans.py).

What is sent are messages on a channel that the receiver has not opened, so it drops them. The rate is that at which TCP
counts bytes as acknowledged once its windows are open.

The user's thread does all this. `Prober` owns the channel and its mailbox.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from zpccl import limits
from zpccl.control.connection_count import ask_for_bbr
from zpccl.engine.engine import PROBE_CHANNEL, Engine, EngineError, LinkFlow
from zpccl.engine.mailbox import Mailbox
from zpccl.errors import CollectiveMismatch, PeerLost, TooFewPeers
from zpccl.protocol.messages import PathSample
from zpccl.protocol.network import connections_in_use

_BODY = bytes(limits.PROBE_MESSAGE_BYTES)
_Taken: TypeAlias = tuple[int, dict[bytes, LinkFlow]]
"""When TCP's counters were read, and the counters by peer."""


def measure_paths(
    peers: Sequence[bytes],
    measured: Collection[bytes],
    own: bytes,
    probe: Callable[[Sequence[bytes]], tuple[PathSample, ...]],
    meet: Callable[[int, tuple[PathSample, ...]], object],
) -> None:
    """Measures all paths between the members of a group. All of them must call it.

    If a peer is lost, all others end it; the measurements made so far stay.

    Args:
        peers: the members, in an order that is the same for all.
        measured: those whose paths to each other are known already.
        own: this peer.
        probe: sends to some peers for a while, and returns what the paths have carried.
        meet: returns when all peers have called it with the same number of rounds, and reports measurements.
    """
    samples: tuple[PathSample, ...] = ()
    plan = list(rounds(peers, measured))
    try:
        for targets in plan:
            meet(len(plan), samples)
            samples = probe(targets.get(own, ()))
        meet(len(plan), samples)
    except (PeerLost, TooFewPeers, CollectiveMismatch):
        pass  # A peer was lost, and peers may have counted the members with and without it. All others end here, too.


def rounds(peers: Sequence[bytes], measured: Collection[bytes]) -> Iterator[dict[bytes, tuple[bytes, ...]]]:
    """To whom each peer sends, round by round: first one other peer each, then all others. As for `measure_paths`.

    There are none in a group that is too large for plans that follow the network.
    """
    count = len(peers)
    if count > limits.DIRECT_PEERS_MAX:
        return
    places = count + count % 2  # The last place stays empty if the number of peers is odd.
    for turn in range(places - 1):
        circle = [0, *(1 + (turn + place) % (places - 1) for place in range(places - 1))]
        pairs = [(circle[i], circle[-1 - i]) for i in range(places // 2)]
        met = [(peers[one], peers[other]) for one, other in pairs if max(one, other) < count]
        met = [pair for pair in met if not all(peer in measured for peer in pair)]
        if met:
            yield {one: (other,) for one, other in met}
            yield {other: (one,) for one, other in met}
    known = [peer for peer in peers if peer in measured]
    known = known if len(known) > 2 else []  # Two peers measure nothing but their path.
    hosts = [peer for peer in peers if peer not in known] if count > 2 else []
    turns = min(len(hosts), limits.PROBE_HOST_ROUNDS_MAX)
    for turn in range(turns):
        yield {one: tuple(other for other in peers if other != one) for one in hosts[turn::turns]}


class Prober:
    """Sends meaningless bytes, and measures what the paths carry.

    Args:
        engine: the engine whose links are used.
        rank: of this peer.
        chooses_senders: False if the user has set the number of connections, all of which are used.
    """

    def __init__(self, engine: Engine, rank: int, *, chooses_senders: bool = True) -> None:
        self._engine = engine
        self._chooses_senders = chooses_senders
        with socket.socket() as far:
            self._is_bbr = ask_for_bbr(far)  # As far connections do.
        self._channel = PROBE_CHANNEL + rank
        self._mailbox = Mailbox()
        self._mailbox.listen(engine, self._channel)

    def probe(self, peers: Sequence[bytes]) -> tuple[PathSample, ...]:
        """Sends to one peer for at most PROBE_NS, or to several at once for at most PROBE_HOST_NS.

        Paths within this host are no limit, and carry nothing.
        """
        far = [peer for peer in peers if not self._engine.is_local(peer)]
        samples = tuple(PathSample(peer, 0, 1, is_probe=True) for peer in peers if peer not in far)
        if not far:
            return samples
        with contextlib.suppress(EngineError):  # The communicator was closed.
            self._engine.open_channel(self._channel, self._mailbox.fileno())
            try:
                samples += self._probe(far)
                self._drain(far)
            finally:
                self._engine.close_channel(self._channel)
        return samples

    def _probe(self, peers: Sequence[bytes]) -> tuple[PathSample, ...]:
        is_chosen = self._chooses_senders and len(peers) == 1
        senders = self._use(peers[0], limits.LINK_CONNECTIONS_DEFAULT) if is_chosen else 0
        begin_ns = time.monotonic_ns()
        end_ns = begin_ns + _duration_ns(peers)
        taken = [self._take(peers)]
        while True:
            now_ns, flows = taken[-1]
            for peer in peers:
                self._fill(peer, taken, len(peers))
            moved = sum(_moved(taken[0][1].get(peer), flow) for peer, flow in flows.items())
            if now_ns >= end_ns or moved >= limits.PROBE_BYTES_MAX or not flows:
                break
            next_ns = min(now_ns + limits.PROBE_SAMPLE_NS, end_ns)
            while self._mailbox.take(next_ns) and time.monotonic_ns() < next_ns:
                for peer in peers:
                    self._fill(peer, taken, len(peers))
            taken.append(self._take(peers))
            if senders:
                senders = self._use(peers[0], max(senders, self._needed(peers[0], *taken[-2:])))
        open_ns = begin_ns + min(limits.PROBE_RAMP_NS, (now_ns - begin_ns) // 2)
        shut = sum(then_ns <= open_ns for then_ns, _ in taken)
        return tuple(_samples(peers, taken[max(0, shut - 1) :]))

    def _fill(self, peer: bytes, taken: list[_Taken], count: int) -> None:
        """Posts as much as the path seems to carry in some round trips: what is queued at the end must drain."""
        (then_ns, before), (now_ns, after) = taken[-2:] if len(taken) > 1 else (taken[0], taken[0])
        flow = after.get(peer)
        round_trip_ns = (flow.round_trip_us or 0) * limits.US if flow is not None else 0
        ahead_ns = limits.PROBE_QUEUE_NS + limits.PROBE_QUEUE_ROUND_TRIP_COUNT * round_trip_ns
        moved = _moved(before.get(peer), flow)
        queued = limits.PROBE_QUEUED_BYTES + moved * ahead_ns // max(1, now_ns - then_ns)
        queued = min(queued, limits.PROBE_BYTES_MAX // count)
        with contextlib.suppress(EngineError):  # The link was lost.
            while self._engine.post_message(peer, self._channel, b"", _BODY, queued):
                pass

    def _use(self, peer: bytes, senders: int) -> int:
        """Sends over this number of connections.

        The windows of all at once would fill the queue of a slow path. Fewer than those of a near link would send
        nothing for most of a round after a loss that only a timeout repairs.
        """
        with contextlib.suppress(EngineError):  # The link was lost.
            self._engine.set_senders(peer, senders)
        return senders

    def _needed(self, peer: bytes, before: _Taken, after: _Taken) -> int:
        """How many connections a link needs for the rate that it has shown between two measurements."""
        flow = after[1].get(peer)
        if flow is None:
            return 1
        round_trip_ns = (flow.round_trip_us or 0) * limits.US
        rate = _moved(before[1].get(peer), flow) * limits.SECOND // max(1, after[0] - before[0])
        is_bbr = self._is_bbr and round_trip_ns >= limits.LINK_FAR_ROUND_TRIP_NS
        window = limits.LINK_SENDER_WINDOW_BBR_BYTES if is_bbr else limits.LINK_SENDER_WINDOW_BYTES
        return connections_in_use(rate, round_trip_ns, window)

    def _drain(self, peers: Sequence[bytes]) -> None:
        """Waits until the other ends have what is queued, for as long as sending took: it would disturb others."""
        deadline_ns = time.monotonic_ns() + _duration_ns(peers)
        for peer in peers:
            with contextlib.suppress(EngineError):  # The link was lost.
                while not self._engine.post_message(peer, self._channel, b"", b"", 1):
                    if time.monotonic_ns() >= deadline_ns:
                        return
                    self._mailbox.take(deadline_ns)

    def _take(self, peers: Sequence[bytes]) -> _Taken:
        """Reads TCP's counters."""
        for _ in range(limits.PROBE_READ_ATTEMPTS_MAX):
            begin_ns, flows = time.monotonic_ns(), self._flows(peers)
            if time.monotonic_ns() - begin_ns <= limits.PROBE_READ_NS:
                break
        return begin_ns, flows

    def _flows(self, peers: Sequence[bytes]) -> dict[bytes, LinkFlow]:
        flows = {}
        for peer in peers:
            with contextlib.suppress(EngineError):  # There is no link.
                flows[peer] = self._engine.link_flow(peer)
        return flows


def _duration_ns(peers: Sequence[bytes]) -> int:
    return limits.PROBE_NS if len(peers) == 1 else limits.PROBE_HOST_NS


def _samples(peers: Sequence[bytes], taken: Sequence[_Taken]) -> Iterator[PathSample]:
    """What each path has carried: the slope of the line that fits best to all counts, since single ones jump."""
    (begin_ns, before), (end_ns, after) = taken[0], taken[-1]
    seconds = [(then_ns - begin_ns) / limits.SECOND for then_ns, _ in taken]
    for peer in peers:
        if _moved(before.get(peer), after.get(peer)) and end_ns > begin_ns:
            # Step by step: the count of a connection that is lost, or replaced, falls to 0.
            steps = (_moved(flows.get(peer), later.get(peer)) for (_, flows), (_, later) in itertools.pairwise(taken))
            moved = list(itertools.accumulate(steps, initial=0))
            sent_bytes = max(1, round(np.polyfit(seconds, moved, 1)[0] * seconds[-1]))
            busy_us = max(1, (end_ns - begin_ns) // limits.US)
            yield PathSample(peer, sent_bytes, busy_us, after[peer].round_trip_us or 0, True, True)


def _moved(before: LinkFlow | None, after: LinkFlow | None) -> int:
    """Bytes acknowledged between two measurements; 0 if these are of different links."""
    if before is None or after is None or before.link_id != after.link_id:
        return 0
    return sum(max(0, new - old) for old, new in zip(before.acked_bytes, after.acked_bytes, strict=True))
