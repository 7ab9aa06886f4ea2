"""Peers that send anything at any time: the master keeps its invariants and its bounds, and never raises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from zpccl import limits
from zpccl.protocol import events
from zpccl.protocol.effects import Broadcast
from zpccl.protocol.master import MasterMachine
from zpccl.protocol.messages import (
    Decision,
    Hello,
    Leave,
    Linked,
    Ready,
    Report,
    SyncSpec,
    TopologyKind,
    TopologySpec,
    Vote,
    Votes,
    Withdraw,
    decode_master_message,
    encode,
)

from .harness import FIRST_ATTEMPT, MasterBench, bench_of, entry, pid, pids, said_together, spec, token

NAMES = "abcde"
call_ids = st.integers(0, 4)
attempt_ids = st.integers(FIRST_ATTEMPT, FIRST_ATTEMPT + 3)
peer_sets = st.sets(st.sampled_from(NAMES)).map(lambda names: pids(sorted(names)))
specs = st.builds(spec, st.integers(0, 1), count=st.sampled_from([8, 8, 8, 9]))
ENTRIES = [(entry("w", "x"),), (entry("w", "y"),), (entry("v", "x"),), (entry("w", "x"), entry("a", "x"))]
entries = st.sampled_from(ENTRIES)
faults = st.none() | st.sampled_from(NAMES).map(pid)

MESSAGES = st.one_of(
    st.builds(
        Hello,
        st.sampled_from(NAMES).map(pid),
        st.sampled_from("ab").map(token),
        st.booleans(),
        st.integers(0, 1),
        st.just("someone"),
        st.just(("h:1",)),
        is_ready=st.booleans(),
    ),
    st.builds(Ready),
    st.builds(Linked, peer_sets),
    st.builds(
        Votes,
        call_ids,
        st.lists(
            st.builds(
                Vote,
                call_ids,
                specs
                | st.builds(TopologySpec, st.sampled_from(TopologyKind))
                | st.builds(SyncSpec, st.integers(0, 2), st.integers(0, 3), entries),
            ),
            min_size=1,
            max_size=3,
        ).map(tuple),
    ),
    st.builds(Report, call_ids, attempt_ids, st.booleans(), faults, digest=st.integers(0, 1)),
    st.builds(Withdraw, call_ids, st.booleans()),
    st.builds(Leave),
)
CONNECTIONS = st.sampled_from(["a1", "b1", "c1", "j1", "stranger"])
ANYTHING = st.one_of(
    st.builds(events.PeerMessageReceived, CONNECTIONS, MESSAGES),
    st.builds(events.MalformedReceived, CONNECTIONS, st.just("nonsense")),
    st.builds(events.ConnectionClosed, CONNECTIONS),
    st.just(events.Tick()),
)
TOGETHER = st.sampled_from(
    ["begin", "begin", "finish", "finish", "offer", "offer", "fetched", "update", "hello", "link"]
)
Step = tuple[Any, int, int]
"""An event, or something that all members do together; a number that it may use; the time that passes before it."""
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.one_of(TOGETHER, TOGETHER, ANYTHING),
        st.integers(0, 3),
        st.sampled_from([0, 0, 0, 1, limits.DISCONNECT_GRACE_NS, 3 * limits.SECOND]),
    ),
    min_size=10,
    max_size=30,
)


def play(machine: MasterMachine, steps: list[Step], now_ns: int) -> Iterator[tuple[events.MasterEvent, int]]:
    """The events of the steps. Each must be handled before the next one is requested."""
    for what, number, after_ns in steps:
        now_ns += after_ns
        for event in said_together(machine, what, number) if isinstance(what, str) else [what]:
            yield event, now_ns


def machine_with_members() -> tuple[MasterMachine, int]:
    """Three members that are linked, and a joiner."""
    bench = bench_of("abc")
    bench.register("j")
    return bench.machine, bench.now_ns


@settings(max_examples=150)
@given(STEPS)
def test_the_master_survives_anything(steps: list[Step]) -> None:
    """S1, S3, B1: every message that it sends is valid for its receiver."""
    machine, now_ns = machine_with_members()
    epochs: dict[int, Any] = {}
    outcomes: dict[int, bool] = {}
    for event, at_ns in play(machine, steps, now_ns):
        for effect in machine.handle(event, at_ns):
            if isinstance(effect, Broadcast):
                message = effect.message
                assert decode_master_message(encode(message)) == message
                if isinstance(message, Decision):
                    assert outcomes.setdefault(message.attempt_id, message.committed) == message.committed
        machine.validate()
        members = machine.registry.member_list()
        assert epochs.setdefault(members.epoch, members) == members
    for peer in machine.registry.peers.values():
        assert len(peer.answers) <= limits.ANSWERS_KEPT_MAX
        assert len(peer.open_calls) <= limits.CALLS_IN_FLIGHT_MAX


@settings(max_examples=100)
@given(STEPS)
def test_the_master_comes_to_rest(steps: list[Step]) -> None:
    """L1: once all are silent and have withdrawn their calls, none stays open and no deadline keeps the master busy."""
    machine, now_ns = machine_with_members()
    for event, at_ns in play(machine, steps, now_ns):
        now_ns = at_ns
        machine.handle(event, now_ns)
    # If all members are gone at once, the master decides nothing about them until it hears from some peer.
    machine.handle(events.PeerMessageReceived("somebody", Leave()), now_ns)
    for _ in range(100):
        deadline_ns = machine.deadline_ns()
        if deadline_ns is None or deadline_ns - now_ns > 3600 * limits.SECOND:  # Warnings of stragglers become rare.
            break
        now_ns = max(now_ns, deadline_ns)
        machine.handle(events.Tick(), now_ns)
        machine.validate()
        assert machine.deadline_ns() != deadline_ns
    else:
        raise AssertionError("deadlines without end")
    for peer in list(machine.registry.peers.values()):
        for call_id in list(peer.open_calls):
            if call_id in peer.open_calls and peer.connection is not None:
                machine.handle(events.PeerMessageReceived(peer.connection, Withdraw(call_id)), now_ns)
                machine.validate()
    assert not any(peer.open_calls for peer in machine.registry.peers.values())
    assert not machine.operations.pending
    assert not machine.operations.running


@settings(max_examples=100)
@given(STEPS)
def test_what_comes_twice_changes_nothing(steps: list[Step]) -> None:
    machine, now_ns = machine_with_members()
    bench = MasterBench()
    bench.machine = machine
    for event, at_ns in play(machine, steps, now_ns):
        machine.handle(event, at_ns)
        before = bench.snapshot()
        machine.handle(event, at_ns)
        machine.validate()
        assert bench.snapshot() == before
