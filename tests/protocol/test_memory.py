"""What a peer remembers for a master that takes the run over: enough, and no more than fits in a message."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.calls import Call, CallPhase
from zpccl.protocol.memory import Memory
from zpccl.protocol.messages import (
    Decision,
    FetchEntry,
    Fetching,
    Hello,
    Lane,
    Member,
    Plan,
    Reducing,
    SyncSpec,
    decode_peer_message,
    encode,
)
from zpccl.types import Algorithm

from .harness import digest, entry, member_list, pid, pids, spec, sync_spec

LONG = 2**63 - 1
"""The number with the longest encoding."""
HELLO = Hello(pid("a"), pid("t"), True, 0, "a", (), 1)


def member_ids(count: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "big") for number in range(count))


def memory_of(names: str, **groups: int) -> Memory:
    memory = Memory()
    memory.on_members(member_list(1, names, **groups).members, 0, is_committed=True)
    return memory


def outcomes(memory: Memory) -> tuple[Decision, ...]:
    return memory.report(HELLO, 0, 1, (), (), 0, ()).outcomes


def refusal(call_id: int, attempt_id: int, ids: tuple[bytes, ...], reason: str = "no") -> Decision:
    calls = (call_id,) * len(ids)
    return Decision(call_id, Result.INVALID_USAGE, 0, reason, "", (), 0, attempt_id, ids, calls)


@pytest.mark.parametrize("group_size", [2, 16, 64, 100, 128, 256, 512, 1024, 2048])
def test_the_largest_report_fits_into_a_message(group_size: int) -> None:
    """L3: libzmq drops the connection of a peer that sends more, each time, and the run could not go on."""
    ids = member_ids(group_size)
    calls_max, open_max = limits.calls_in_flight_max(group_size), limits.calls_open_max(group_size)
    listed = tuple(
        Member(peer_id, 0 if place < group_size else 1, "\U0001f600" * limits.NAME_CHARS_MAX)
        for place, peer_id in enumerate(member_ids(limits.PEERS_MAX))
    )
    memory = Memory()
    memory.on_members(listed, 0, is_committed=True)
    memory.on_round(limits.ROUND_MAX, LONG)
    values = ("v" * limits.MISMATCH_VALUE_BYTES_MAX,) * limits.MISMATCH_VALUES_MAX
    field, reason = "quantized_datatype", "\U0001f600" * limits.TEXT_CHARS_MAX
    everybody = member_ids(limits.PEERS_MAX)
    for number in range(2 * limits.PARTIAL_REFUSALS_KEPT_MAX):  # Refusals of rounds, in which all groups take part.
        memory.on_decision(refusal(LONG, LONG - 9999 + number, everybody, reason), None, ())
    for number in range(open_max):
        answer = refusal(LONG, LONG - number, ids, reason)
        facts = (answer.result, 0, reason, field, values, 0, answer.attempt_id, answer.order, (LONG,) * group_size)
        memory.on_decision(Decision(LONG, *facts), None, ())
    plan = Plan(LONG, (LONG,) * group_size, widest_plan(ids))
    widest = spec(limits.TAG_MAX, count=limits.ELEMENTS_MAX, datatype=255, op=255, quantization=255)
    calls: list[Call] = [Call(LONG, widest, CallPhase.RUNNING, LONG, plan) for _ in range(calls_max)]
    key = "k" * limits.KEY_CHARS_MAX
    count = limits.REPORT_CONTENTS_BYTES_MAX // (len(key) + limits.STATE_ENTRY_BYTES_MAX)
    state = sync_spec(LONG, *(entry(f"{number:04}{key[4:]}", "v", free=True) for number in range(count)))
    calls[-1] = Call(LONG, state, CallPhase.RUNNING, LONG, Plan(LONG, plan.calls, Fetching(ids, LONG, ids)))
    addresses = ("h" * limits.ADDRESS_CHARS_MAX,) * limits.ADDRESSES_PER_PEER_MAX
    hello = Hello(ids[0], ids[0], True, limits.PEER_GROUP_MAX, listed[0].name, addresses, LONG)
    report = memory.report(hello, LONG, limits.EPOCH_MAX, listed, everybody, limits.EPOCH_MAX, calls)
    last = Decision(0, 0, LONG, attempt_id=LONG, order=ids, calls=(LONG,) * group_size)
    report = replace(report, last_sync=last)
    kept = {outcome.attempt_id for outcome in report.outcomes}
    assert {LONG - number for number in range(open_max)} <= kept
    assert len(report.running) == calls_max and isinstance(report.running[-1].plan.how, Fetching)
    assert len(report.running[-1].plan.how.fetch) == count
    data = encode(report)
    assert len(data) <= limits.MESSAGE_BYTES_MAX
    assert decode_peer_message(data) == report


def test_what_a_report_tells_of_a_running_sync() -> None:
    """It has the final contents of keys that allow inequality, unless there are too many of these."""
    own = (entry("w", "old"), entry("x", "own", free=True), entry("y", "own", free=True))
    how = Fetching(pids("ab"), 2, pids("a"), tuple(FetchEntry(key, digest("new")) for key in "wx"), pids("a"))

    def told(state: SyncSpec) -> Fetching:
        call = Call(1, state, CallPhase.RUNNING, 7, Plan(7, (1, 1), how))
        (running,) = Memory().report(HELLO, 0, 1, (), (), 0, [call]).running
        assert running.is_open and isinstance(running.plan.how, Fetching)
        return running.plan.how

    brief = replace(how, sources=(), fetch=(FetchEntry("x", digest("new")), FetchEntry("y", digest("own"))))
    assert told(sync_spec(1, *own)) == brief
    count = limits.REPORT_CONTENTS_BYTES_MAX // limits.STATE_ENTRY_BYTES_MAX
    many = sync_spec(1, *(entry(f"{number:05}", "v", free=True) for number in range(count)))
    assert told(many) == replace(brief, fetch=())


def widest_plan(ids: tuple[bytes, ...]) -> Reducing:
    """The longest plan of this many peers, with the maximum of lanes, and of trees in the lanes."""
    size = len(ids)
    if size > limits.DIRECT_PEERS_MAX:
        return Reducing(ids, limits.FRAME_BYTES_MAX, Algorithm.RING)
    count = min(limits.LANE_PARENTS_MAX // size, limits.DIRECT_PEERS_MAX)
    trees = (Lane(limits.LANE_SHARE_MAX, size - 1, (size - 1,) * size),) * count
    stars = (Lane(limits.LANE_SHARE_MAX, size - 1),) * (limits.DIRECT_PEERS_MAX - count)
    return Reducing(ids, limits.FRAME_BYTES_MAX, Algorithm.TREES, trees + stars)


def test_a_report_fits_after_the_group_has_shrunk() -> None:
    """Earlier attempts name all their participants; ends of attempts name only the present members."""
    memory, before, after = Memory(), member_ids(limits.PEERS_MAX), member_ids(2)
    memory.on_members([Member(peer_id, 0, "n" * 128) for peer_id in before], 0, is_committed=True)
    first = limits.calls_open_max(len(before))
    for number in range(first):
        memory.on_decision(refusal(1, 1 + number, before), None, ())
    memory.on_members(member_list(2, "").members, 0, is_committed=False)
    assert len(outcomes(memory)[0].order) == len(before)
    memory.on_members([Member(peer_id, 0, "n") for peer_id in after], 0, is_committed=True)
    second = limits.calls_open_max(len(after)) - first
    for number in range(first, first + second):
        memory.on_decision(refusal(1, 1 + number, after), None, ())
    assert [outcome.order for outcome in outcomes(memory)] == [after] * (first + second)
    plans = [Plan(9, (2**32 - 1,) * len(ids), Reducing(ids, 1)) for ids in [before] * first + [after] * second]
    calls = [Call(1, spec(1), CallPhase.RUNNING, 9, plan) for plan in plans]
    assert len(encode(memory.report(HELLO, 0, 1, (), (), 0, calls))) <= limits.MESSAGE_BYTES_MAX


def test_the_ends_of_as_many_calls_as_another_may_have_in_flight_are_kept() -> None:
    """S1: with 256 members and 600 calls in flight, the ends of 88 calls were forgotten."""
    memory, ids = Memory(), member_ids(256)
    memory.on_members([Member(peer_id, 0, "n") for peer_id in ids], 0, is_committed=True)
    in_flight = limits.calls_open_max(256)
    for number in range(in_flight):
        plan = Plan(1 + number, (1,) * 256, Reducing(ids, 1))
        call = Call(number, spec(number), CallPhase.REPORTED, 1 + number, plan)
        memory.on_decision(Decision(number, 0, 256, attempt_id=1 + number), call, frozenset(ids))
    for number in range(limits.PARTIAL_REFUSALS_KEPT_MAX):  # The others had no part in these.
        memory.on_decision(refusal(1, 10_000 + number, ids[:2]), None, ())
    kept = {outcome.attempt_id: len(outcome.calls) for outcome in outcomes(memory)}
    assert all(kept[1 + number] == 256 for number in range(in_flight))
    memory.on_decision(refusal(1, 20_000, ids), None, ())
    assert len(outcomes(memory)) == in_flight + limits.PARTIAL_REFUSALS_KEPT_MAX


def test_other_groups_do_not_count() -> None:
    memory = memory_of("abxy", x=1, y=1)
    assert len(memory._group_ids) == 2


def test_who_is_gone_makes_room_once_the_others_agree() -> None:
    memory = memory_of("abc")
    memory.on_decision(refusal(5, 1, pids("abc")), None, ())
    memory.on_decision(refusal(6, 2, pids("ab")), None, ())
    memory.on_members(member_list(2, "ab").members, 0, is_committed=False)
    assert [outcome.order for outcome in outcomes(memory)] == [pids("abc"), pids("ab")]
    memory.on_members(member_list(2, "ab").members, 0, is_committed=True)
    assert [(outcome.order, outcome.calls) for outcome in outcomes(memory)] == [
        (pids("ab"), (5, 5)),
        (pids("ab"), (6, 6)),
    ]
    assert memory._call_count == 4


@pytest.mark.parametrize("text", ["\U0001f600" * 400, "ab" + "\U0001f600" * 400, "x" * 5000])
def test_a_reason_is_cut_to_its_bytes(text: str) -> None:
    memory = memory_of("ab")
    memory.on_decision(refusal(5, 1, pids("ab"), text), None, ())
    (kept,) = outcomes(memory)
    assert limits.OUTCOME_TEXT_CHARS_MAX - 3 <= len(kept.reason.encode()) <= limits.OUTCOME_TEXT_CHARS_MAX
    assert text.startswith(kept.reason)
