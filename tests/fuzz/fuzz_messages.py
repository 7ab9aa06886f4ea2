"""The decoders of control messages: they accept or refuse any bytes, and each message survives the round trip."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

from protocol.harness import (
    FIRST_ATTEMPT,
    HELLO,
    entry,
    offer,
    pid,
    pids,
    plan_of,
    running_attempt,
    running_sync,
    spec,
    sync_plan,
    topology_vote,
)

from zpccl.protocol import messages as m

EXPANSION_MAX = 256
"""Maximum bytes of memory for one byte of a message: the worst case is arrays of empty values."""


def one_input(data: bytes) -> None:
    """B1, and no other exceptions."""
    for decode in (m.decode_peer_message, m.decode_master_message):
        _check(decode, data)


def _check(decode: Callable[[bytes], Any], data: bytes) -> None:
    is_tracing = tracemalloc.is_tracing()
    if is_tracing:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
    try:
        message = decode(data)
    except (m.Malformed, m.OtherVersion):
        return
    finally:
        if is_tracing:
            assert tracemalloc.get_traced_memory()[1] - before < 65_536 + EXPANSION_MAX * len(data)
    assert decode(m.encode(message)) == message


def seeds() -> list[bytes]:
    """One message of each kind."""
    outcome = m.Decision(0, 0, 2, attempt_id=FIRST_ATTEMPT, order=pids("ab"), calls=(1, 2))
    running = running_attempt(FIRST_ATTEMPT + 1, "ab", (3, 4), spec())
    sync = running_sync(FIRST_ATTEMPT + 2, 3, "a", "ab", (5, 6), True)
    member = m.Member(pid("a"), 0, "a")
    peers: list[m.PeerMessage] = [
        HELLO,
        m.Ready(),
        m.Linked(pids("abc")),
        m.Votes(1, (m.Vote(1, spec()), m.Vote(2, spec(1)))),
        m.Report(1, FIRST_ATTEMPT, False, pid("b"), "reset"),
        topology_vote(1, 2, m.TopologyKind.UPDATE, 3),
        offer(2, 3, entry("v", "x"), entry("w", "y"), oldest=1),
        m.Report(1, FIRST_ATTEMPT, True, dropped=(m.Dropped(pid("b"), "silence"),)),
        m.Withdraw(1),
        m.MeasurementsRequest(),
        m.CheckRequest(48149, pid("a")),
        m.Leave(),
        m.RunReport(HELLO, 1, 2, (member,), 3, 4, outcome, (outcome,), (running, sync), pids("a")),
    ]
    masters: list[m.MasterMessage] = [
        m.Welcome(pid("r"), 1),
        m.Refused(m.Refusal.REPORT, "why"),
        m.Kick(4, "why"),
        m.Members(1, (member,), 2, 3),
        m.Neighbours((m.Neighbour(pid("b"), "b", ("h:1",), True, b"k" * 32),)),
        m.NeighboursChanged((m.Neighbour(pid("b"), "b", ("h:1",), False),), pids("c")),
        plan_of(1, FIRST_ATTEMPT, "ab"),
        m.Decision(1, 3, 2, "why", attempt_id=FIRST_ATTEMPT, order=pids("ab"), calls=(1, 2), peers=("b",)),
        m.Decision(1, 2, 3, "why", "count", ("8", "9"), 4, FIRST_ATTEMPT, pids("ab"), (1, 2)),
        m.CheckAnswer("10.0.1.2", True, 1),
        m.Measurements((member,), (m.MeasuredPath(0, 0, 1, 2, 3),), (m.MeasuredHost(0, 4),)),
        sync_plan(1, 2, "a", ("w", "d"), sources="a", partial_seeds="b"),
    ]
    return [m.encode(message) for message in (*peers, *masters)]
