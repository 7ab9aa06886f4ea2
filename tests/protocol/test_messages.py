"""Messages survive the wire. Any other bytes raise Malformed or OtherVersion, and no other exception."""

from __future__ import annotations

import itertools
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol import messages as m
from zpccl.types import Algorithm

from .harness import HELLO, pid, spec, sync_spec, topology_vote

PEER_TYPES = get_args(m.PeerMessage)
MASTER_TYPES = get_args(m.MasterMessage)
PREFIX = m.MAGIC + bytes([limits.PROTOCOL_VERSION])


def decode_both(data: bytes) -> list[Any]:
    """What each side makes of the bytes: a message, or one of the allowed exceptions."""
    outcomes: list[Any] = []
    for decode in (m.decode_peer_message, m.decode_master_message):
        try:
            outcomes.append(decode(data))
        except (m.Malformed, m.OtherVersion) as error:
            outcomes.append(error)
    return outcomes


ids = st.binary(min_size=16, max_size=16)
naturals = st.integers(0, 2**64 - 1)
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=limits.NAME_CHARS_MAX)
texts = st.text(max_size=50)
groups = st.integers(0, limits.PEER_GROUP_MAX)
visible = st.characters(min_codepoint=0x21, max_codepoint=0x7E)
addresses = st.lists(st.text(visible, max_size=30), max_size=limits.ADDRESSES_PER_PEER_MAX).map(tuple)
bytes_ = st.integers(0, 255)
digests = st.binary(min_size=32, max_size=32)
keys = st.text(max_size=20)


def tuples(of: st.SearchStrategy[Any], least: int = 0, most: int = 4) -> st.SearchStrategy[Any]:
    return st.lists(of, min_size=least, max_size=most).map(tuple)


specs = st.builds(
    m.CollectiveSpec,
    st.integers(-(2**63), 2**64 - 1),
    st.integers(1, limits.ELEMENTS_MAX),
    bytes_,
    bytes_,
    bytes_,
    bytes_,
    st.integers(1, 2**31),
    bytes_,
)
ranks = st.integers(0, 2)
entries = st.builds(m.StateEntry, keys, bytes_, naturals, st.booleans(), digests)
faults = st.none() | ids
neighbours = st.builds(m.Neighbour, ids, names, addresses, st.booleans(), is_member=st.booleans())
terms = st.integers(0, limits.TERM_MAX)
hellos = st.builds(
    m.Hello,
    *(ids, ids, st.booleans(), groups, names, addresses, naturals, ids, terms, terms),
    *(ids, st.lists(addresses.filter(bool).map(lambda some: some[0]), max_size=limits.MASTERS_MAX).map(tuple)),
    *(st.integers(0, limits.MASTERS_MAX - 1), ids, st.booleans()),
)
members = tuples(st.builds(m.Member, ids, groups, names))
outcomes = st.builds(
    m.Decision,
    *(naturals, st.integers(0, 12), st.integers(-(2**63), 2**63), texts, names, tuples(texts), naturals, naturals),
    *(tuples(ids), tuples(naturals), tuples(names)),
)


def with_orders(found: tuple[m.Decision, ...], orders: tuple[tuple[bytes, ...], ...]) -> tuple[m.Decision, ...]:
    """Peers report an order with calls, or neither."""
    pairs = zip(found, itertools.cycle(orders), strict=False)
    return tuple(replace(one, order=order if one.calls else ()) for one, order in pairs)


told = st.builds(with_orders, tuples(outcomes), tuples(tuples(ids, 1), 1, 2))
lanes = st.builds(m.Lane, st.integers(1, limits.LANE_SHARE_MAX), ranks, st.just(()) | tuples(ranks, 3, 3))
reducings = st.builds(m.Reducing, tuples(ids), st.integers(1, 2**24), st.integers(1, 3)) | st.builds(
    m.Reducing, tuples(ids, 3, 3), st.integers(1, 2**24), st.just(Algorithm.TREES), tuples(lanes, 1, 4)
)
hows = reducings | st.builds(
    m.Fetching,
    *(tuples(ids), naturals, tuples(ids), tuples(st.builds(m.FetchEntry, keys, digests)), tuples(ids), tuples(ids)),
)
plans = st.builds(m.Plan, naturals, tuples(naturals), hows)
any_spec = st.one_of(
    specs,
    st.builds(m.TopologySpec, st.sampled_from(m.TopologyKind), naturals),
    st.builds(
        m.SyncSpec, *(st.integers(0, 2), st.integers(0, limits.REVISION_MAX), tuples(entries, 1), st.integers(0, 255))
    ),
)
rates = st.none() | st.integers(0, limits.RATE_TOLD_MAX)
measured = st.builds(m.MeasuredPath, st.just(0), st.just(0), naturals, rates, st.none() | naturals)
hosts = st.builds(m.MeasuredHost, st.just(0), rates, rates)
BUILDERS: dict[type[msgspec.Struct], st.SearchStrategy[Any]] = {
    m.Hello: hellos,
    m.Ready: st.builds(m.Ready),
    m.Linked: st.builds(m.Linked, tuples(ids)),
    m.Votes: st.builds(m.Votes, naturals, tuples(st.builds(m.Vote, naturals, any_spec), 1)),
    m.Report: st.builds(
        m.Report,
        *(naturals, naturals, st.booleans(), faults, texts, naturals, naturals),
        tuples(st.builds(m.Dropped, ids, texts)),
    ),
    m.Withdraw: st.builds(m.Withdraw, naturals),
    m.MeasurementsRequest: st.builds(m.MeasurementsRequest),
    m.CheckRequest: st.builds(m.CheckRequest, st.integers(0, 65535), ids),
    m.Acknowledgement: st.builds(m.Acknowledgement, naturals),
    m.Leave: st.builds(m.Leave),
    m.RunReport: st.builds(
        m.RunReport,
        hellos,
        *(naturals, st.integers(0, limits.EPOCH_MAX), members, st.integers(0, limits.ROUND_MAX), naturals),
        st.none() | outcomes,
        told,
        tuples(st.builds(m.Running, plans, st.none() | specs, st.booleans())),
        tuples(ids),
    ),
    m.Welcome: st.builds(m.Welcome, ids, terms, ids, st.integers(0, limits.HOST_PEERS_MAX)),
    m.Refused: st.builds(m.Refused, st.sampled_from(m.Refusal), texts, ids, terms),
    m.Kick: st.builds(m.Kick, st.integers(0, 12), texts),
    m.Members: st.builds(m.Members, naturals, members, naturals, naturals, tuples(ids)),
    m.MembersCommitted: st.builds(m.MembersCommitted, naturals),
    m.Neighbours: st.builds(m.Neighbours, tuples(neighbours)),
    m.NeighboursChanged: st.builds(m.NeighboursChanged, tuples(neighbours), tuples(ids)),
    m.Plan: plans,
    m.Decision: outcomes,
    m.CheckAnswer: st.builds(m.CheckAnswer, st.sampled_from(("", "10.0.1.2", "fd00::2")), st.booleans(), naturals),
    m.Measurements: st.builds(m.Measurements, st.just((m.Member(bytes(16), 0, "a"),)), tuples(measured), tuples(hosts)),
}
any_message = st.one_of(*BUILDERS.values())


def test_every_message_is_tried() -> None:
    assert set(BUILDERS) == set(PEER_TYPES) | set(MASTER_TYPES)


@pytest.mark.parametrize("kind", [*PEER_TYPES, *MASTER_TYPES], ids=lambda kind: kind.__name__)
def test_messages_survive_the_wire(kind: type) -> None:
    decoders: list[Callable[[bytes], Any]] = [m.decode_peer_message, m.decode_master_message]
    decode, decode_other = decoders if kind in PEER_TYPES else reversed(decoders)

    @given(BUILDERS[kind])
    def check(message: Any) -> None:
        data = m.encode(message)
        assert decode(data) == message
        assert type(decode(data)) is kind
        with pytest.raises(m.Malformed):
            decode_other(data)

    check()


def test_the_bytes_of_a_message() -> None:
    """Golden: a change of the encoding needs a new PROTOCOL_VERSION."""
    assert m.encode(m.Leave()) == b"zp\x1e\x91\xa5leave"
    assert m.encode(m.Withdraw(5)) == b"zp\x1e\x93\xa8withdraw\x05\xc2"
    assert (
        m.encode(topology_vote(3, 4, m.TopologyKind.PENDING))
        == b"zp\x1e\x93\xa5votes\x03\x91\x93\x04\x93\xa8topology\x02\x00\x00"
    )
    assert m.encode(HELLO).hex() == (
        "7a701e" "dc0014" "a568656c6c6f" "c410612e2e2e2e2e2e2e2e2e2e2e2e2e2e2e" "c41041212121212121212121212121212121"
        "c2" "00" "a161" "91" "a3613a31" "01" "c410" "00000000000000000000000000000000" "00" "00"
        "c410" "00000000000000000000000000000000" "90" "00"
        "c410" "00000000000000000000000000000000" "c3" "00" "a0" "00" "c2"
    )  # fmt: skip


def test_names_of_messages_differ() -> None:
    tags = [kind.__struct_config__.tag for kind in BUILDERS]
    assert len(set(tags)) == len(tags)


@given(st.binary(max_size=200))
@example(b"")
@example(b"z")
@example(b"zp")
@example(PREFIX)
@example(PREFIX + b"\xc1")
@example(PREFIX + b"\x91\xa5leave\x00")
def test_random_bytes(data: bytes) -> None:
    decode_both(data)
    assert all(isinstance(outcome, m.Malformed) for outcome in decode_both(b"!" + data))


@given(st.binary(max_size=100))
def test_random_bodies(data: bytes) -> None:
    decode_both(PREFIX + data)


@given(any_message, st.data())
def test_cut_and_changed_messages(message: Any, data: st.DataObject) -> None:
    whole = m.encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert all(isinstance(outcome, m.Malformed) for outcome in decode_both(whole[:cut]))
    place = data.draw(st.integers(0, len(whole) - 1))
    decode_both(whole[:place] + bytes([data.draw(bytes_)]) + whole[place + 1 :])
    assert all(isinstance(outcome, m.Malformed) for outcome in decode_both(whole + b"\x00"))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(st.sampled_from(sorted(str(kind.__struct_config__.tag) for kind in BUILDERS)), st.lists(json_like, max_size=8))
def test_wrong_types(tag: str, fields: list[Any]) -> None:
    decode_both(PREFIX + msgspec.msgpack.encode([tag, *fields]))


@pytest.mark.parametrize("version", [0, 1, 255])
def test_another_version(version: int) -> None:
    for outcome in decode_both(m.MAGIC + bytes([version]) + b"anything"):
        assert isinstance(outcome, m.OtherVersion)
        assert outcome.version == version
        assert str(limits.PROTOCOL_VERSION) in str(outcome)


def large_report(count: int = 1000) -> m.RunReport:
    """A report of 64 peers, which have joined at different times, after many calls."""
    order = tuple(bytes([number]) * 16 for number in range(64))
    joined = tuple(number * number * 977 for number in range(64))
    outcomes = tuple(
        m.Decision(n, 0, attempt_id=n, order=order, calls=tuple(n + first for first in joined))
        for n in range(1, count + 1)
    )
    return m.RunReport(HELLO, 1, 5, (), 0, 0, None, outcomes, ())


def test_large_reports_are_compressed() -> None:
    """L3: many peers send theirs at the same time when a master takes over."""
    report = large_report()
    data = m.encode(report)
    decoded = m.decode_peer_message(data)
    assert isinstance(decoded, m.RunReport)
    assert m.is_compressed(data) and decoded == report
    assert len(data) < len(msgspec.msgpack.encode(report)) / 200
    assert len({id(outcome.order) for outcome in decoded.outcomes}) == 1
    assert not m.is_compressed(m.encode(large_report(0)))


def test_what_members_report_alike_is_decoded_once() -> None:
    """L3: decoding takes milliseconds in a large group, and a master that takes over waits some seconds for all."""
    listed = tuple(m.Member(bytes([number]) * 16, 0, f"member {number}") for number in range(64))
    report = replace(large_report(), members=listed)
    first = m.decode_peer_message(m.encode(report))
    other = m.decode_peer_message(m.encode(replace(report, hello=replace(HELLO, connection=7), round=3)))
    assert isinstance(first, m.RunReport) and isinstance(other, m.RunReport)
    assert first == report and other.round == 3
    assert first.members is other.members and first.outcomes is other.outcomes


def test_long_parts_of_reports_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: a member cannot make the master keep all that fits into a message."""
    monkeypatch.setattr(limits, "REPORT_PART_KEPT_BYTES_MAX", 100)
    first, other = (m.decode_peer_message(m.encode(large_report())) for _ in range(2))
    assert isinstance(first, m.RunReport) and isinstance(other, m.RunReport)
    assert first.outcomes == other.outcomes and first.outcomes is not other.outcomes


def test_steps_without_the_calls_before() -> None:
    """B1: an outcome whose calls are steps needs an outcome before it with as many calls."""
    first, second = large_report(2).outcomes
    for outcomes in ((replace(first, order=()),), (first, replace(second, order=(), calls=(1,)))):
        report = replace(large_report(0), outcomes=outcomes)
        with pytest.raises(m.Malformed, match="steps from"):
            m.decode_peer_message(PREFIX + msgspec.msgpack.encode(report))


def test_reports_name_no_more_calls_than_peers_remember() -> None:
    """B1: two bytes of a call become an object, and a compressed report may have millions."""
    order = tuple(pid(str(number)) for number in range(limits.PEERS_MAX))
    count = limits.OUTCOME_CALLS_KEPT_MAX // len(order)
    calls = (0,) * len(order)
    outcomes = [m.Decision(n, 0, attempt_id=n, order=order, calls=calls) for n in range(1, count + 2)]
    rest = limits.OUTCOME_CALLS_KEPT_MAX - count * len(order)
    outcomes[-1] = replace(outcomes[-1], order=order[:rest], calls=calls[:rest])
    report = replace(large_report(0), outcomes=tuple(outcomes))
    assert m.decode_peer_message(m.encode(report)) == report
    outcomes[-1] = replace(outcomes[-1], order=order[: rest + 1], calls=calls[: rest + 1])
    with pytest.raises(m.Malformed, match="at most"):
        m.decode_peer_message(m.encode(replace(report, outcomes=tuple(outcomes))))


def test_large_reports_that_are_not_compressed() -> None:
    """S6: the master decodes reports that are compressed only where it expects one."""
    with pytest.raises(m.Malformed, match="not compressed"):
        m.decode_peer_message(PREFIX + msgspec.msgpack.encode(large_report()))


def test_names_that_a_report_may_have_by_the_million_are_not_matched() -> None:
    """L3: that took 4 s, in which the master did nothing else."""
    outcome = m.Decision(1, 0, peers=("\n",))
    report = replace(large_report(0), outcomes=(outcome,))
    assert m.decode_peer_message(m.encode(report)) == report


def test_damaged_reports() -> None:
    """B1: what expands to more than a message may have is refused, and so is what is cut off or no report."""
    whole = m.encode(large_report())
    bomb = zlib.compress(bytes(limits.MESSAGE_BYTES_MAX + 1))
    other = zlib.compress(m.encode(m.Leave())[len(PREFIX) :])
    again = zlib.compress(whole[len(PREFIX) :])
    for body in (b"", b"noise", bomb, other, again):
        with pytest.raises(m.Malformed):
            m.decode_peer_message(PREFIX + b"\xc1" + body)
    for data in (whole[:-1], whole + b"\x00"):
        with pytest.raises(m.Malformed):
            m.decode_peer_message(data)
    with pytest.raises(m.Malformed):
        m.decode_master_message(whole)


def test_deep_nesting() -> None:
    for opener in (b"\x91", b"\x81\xa1k", b"\xdc\x00\x01"):
        for head in (b"", b"\x92\xa6linked", b"\x97\xa5hello"):
            for outcome in decode_both(PREFIX + head + opener * 200_000):
                assert isinstance(outcome, m.Malformed)


def test_oversized() -> None:
    """B1: nothing above the bound is decoded."""
    data = PREFIX + bytes(limits.MESSAGE_BYTES_MAX + 1 - len(PREFIX))
    for outcome in decode_both(data):
        assert isinstance(outcome, m.Malformed)
        assert str(limits.MESSAGE_BYTES_MAX) in str(outcome)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x92\xa6linked\xdd\xff\xff\xff\xff",
        b"\x93\xa5begin\x00\xdd\xff\xff\xff\xff",
        b"\x97\xa5hello\xc6\xff\xff\xff\xff",
        b"\x96\xa5offer\x00\x00\x00\x00\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ],
)
def test_lying_lengths(body: bytes) -> None:
    """B1: a false length makes nobody allocate memory."""
    tracemalloc.start()
    try:
        for outcome in decode_both(PREFIX + body):
            assert isinstance(outcome, m.Malformed)
        assert tracemalloc.get_traced_memory()[1] < limits.MIB
    finally:
        tracemalloc.stop()


def test_the_text_of_an_error_is_short() -> None:
    """B1: bytes that a stranger sends do not fill the log."""
    data = PREFIX + msgspec.msgpack.encode(["x" * 1_000_000])
    for outcome in decode_both(data):
        assert isinstance(outcome, m.Malformed)
        assert len(str(outcome)) < 1000


def changed(message: Any, **changes: Any) -> bytes:
    """The bytes of a message with fields that no honest sender would send."""
    return m.encode(msgspec.structs.replace(message, **changes))


VOTES = m.Votes(0, (m.Vote(1, spec()),))
OFFER = sync_spec(0)


def begin_with(**changes: Any) -> bytes:
    return m.encode(m.Votes(0, (m.Vote(1, spec(**changes)),)))


def offer_with(**changes: Any) -> bytes:
    return m.encode(m.Votes(0, (m.Vote(1, msgspec.structs.replace(OFFER, **changes)),)))


@pytest.mark.parametrize(
    "data",
    [
        changed(HELLO, peer_id=b"short"),
        changed(HELLO, peer_id=bytes(17)),
        changed(HELLO, token=b""),
        changed(HELLO, group=-1),
        changed(HELLO, group=2**32),
        changed(HELLO, group=1.5),
        changed(HELLO, group="0"),
        changed(HELLO, group=True),
        changed(HELLO, name="n" * (limits.NAME_CHARS_MAX + 1)),
        changed(HELLO, is_member=1),
        changed(HELLO, leader=b"short"),
        changed(HELLO, masters=("m:1",) * (limits.MASTERS_MAX + 1)),
        changed(HELLO, master_index=limits.MASTERS_MAX),
        changed(HELLO, addresses=("a:1",) * (limits.ADDRESSES_PER_PEER_MAX + 1)),
        changed(HELLO, addresses=("a:1\n",)),
        changed(HELLO, addresses=("a" * (limits.ADDRESS_CHARS_MAX + 1),)),
        changed(HELLO, name="a\nWARNING forged line of the log"),
        changed(HELLO, addresses=("a" * 301,)),
        m.encode(m.Linked((b"short",))),
        m.encode(m.Linked((pid("a"),) * (limits.PEERS_MAX + 1))),
        changed(VOTES, votes=()),
        changed(VOTES, votes=VOTES.votes * (limits.SPECS_PER_MESSAGE_MAX + 1)),
        changed(VOTES, oldest_call_id=-1),
        m.encode(m.Votes(0, (m.Vote(-1, spec()),))),
        begin_with(count=-1),
        begin_with(count=limits.ELEMENTS_MAX + 1),
        begin_with(datatype=256),
        begin_with(op=-1),
        begin_with(block_size=0),
        m.encode(topology_vote(0, 1, 3)),  # type: ignore[arg-type]
        offer_with(entries=()),
        offer_with(entries=OFFER.entries * (limits.STATE_ENTRIES_MAX + 1)),
        offer_with(revision=-1),
        offer_with(revision=limits.REVISION_MAX + 1),
        offer_with(strategy=3),
        offer_with(entries=(m.StateEntry("k" * (limits.KEY_CHARS_MAX + 1), 0, 1, False, bytes(32)),)),
        offer_with(entries=(m.StateEntry("k", 0, 1, False, bytes(31)),)),
        m.encode(m.Report(1, 1, True, reason="r" * 4097)),
        m.encode(m.Withdraw(-1)),
        PREFIX + msgspec.msgpack.encode(["leave", "more"]),
        PREFIX + msgspec.msgpack.encode(["withdraw"]),
        PREFIX + msgspec.msgpack.encode({"type": "leave"}),
    ],
)
def test_bounds_of_peer_messages(data: bytes) -> None:
    with pytest.raises(m.Malformed):
        m.decode_peer_message(data)


@pytest.mark.parametrize(
    "message",
    [
        m.Plan(1, (), m.Reducing((b"x",), 1)),
        m.Plan(1, (), m.Reducing((), 1, 0)),
        m.Plan(1, (), m.Reducing((), 1, 5)),
        m.Plan(1, (), m.Reducing((), 0)),
        m.Plan(1, (), m.Reducing((), limits.FRAME_BYTES_MAX + 1)),
        m.Plan(1, (), m.Reducing((m.NO_ID,), 1, Algorithm.TREES, (m.Lane(limits.LANE_SHARE_MAX + 1, 0),))),
        m.Plan(1, (), m.Reducing((m.NO_ID,) * 129, 1, Algorithm.TREES, (m.Lane(1, limits.DIRECT_PEERS_MAX),))),
        m.Refused(9, ""),  # type: ignore[arg-type]
        m.Kick(1, "r" * 4097),
        m.Welcome(b"", 1),
        m.Decision(1, -1, True),
        m.Decision(1, 0, values=("v" * 4097,)),
    ],
)
def test_bounds_of_master_messages(message: Any) -> None:
    with pytest.raises(m.Malformed):
        m.decode_master_message(m.encode(message))


@pytest.mark.parametrize(
    ("algorithm", "count", "lanes"),
    [
        (Algorithm.TREES, 3, ()),
        (Algorithm.RING, 3, (m.Lane(1, 0),)),
        (Algorithm.TREES, 3, (m.Lane(1, 0, (0, 0)),)),
        (Algorithm.TREES, 3, (m.Lane(0, 0), m.Lane(0, 1))),
        (Algorithm.TREES, 3, (m.Lane(1, 0), m.Lane(1, 1, (1, 1, 1, 1)))),
        (Algorithm.TREES, 3, (m.Lane(1, 0), m.Lane(1, 3))),
        (Algorithm.TREES, 3, (m.Lane(1, 0, (0, 3, 0)),)),
        (Algorithm.TREES, 128, (m.Lane(1, 0, (0,) * 128),) * (limits.LANES_MAX + 1)),
    ],
)
def test_lanes_fit_their_plan(algorithm: int, count: int, lanes: tuple[m.Lane, ...]) -> None:
    """Such a plan cannot be made, and cannot be decoded."""
    how = tuple(number.to_bytes(16, "big") for number in range(count)), 1, algorithm, lanes
    with pytest.raises(ValueError, match="lane"):
        m.Reducing(*how)
    body = msgspec.msgpack.encode(["plan", 1, (), ["reduce", *how], ()])
    with pytest.raises(m.Malformed):
        m.decode_master_message(PREFIX + body)


def test_the_bounds_themselves_are_allowed() -> None:
    for message in (
        msgspec.structs.replace(HELLO, group=limits.PEER_GROUP_MAX, name="n" * limits.NAME_CHARS_MAX),
        msgspec.structs.replace(VOTES, votes=VOTES.votes * limits.SPECS_PER_MESSAGE_MAX),
        m.Votes(0, (m.Vote(1, msgspec.structs.replace(OFFER, revision=limits.REVISION_MAX)),)),
        m.Votes(0, (m.Vote(1, spec(limits.TAG_MAX, count=limits.ELEMENTS_MAX)),)),
        m.Linked(tuple(i.to_bytes(16, "big") for i in range(limits.PEERS_MAX))),
    ):
        assert m.decode_peer_message(m.encode(message)) == message


@pytest.mark.parametrize("field", ["term", "promised", "epoch", "round"])
def test_a_report_leaves_room_for_the_next_number(field: str) -> None:
    """A master that takes the run over continues with that number, and sends it in messages."""
    maximum = {"epoch": limits.EPOCH_MAX, "round": limits.ROUND_MAX}.get(field, limits.TERM_MAX)

    def report(number: int) -> m.RunReport:
        blank = m.RunReport(HELLO, 0, 0, (), 0, 0, None, (), ())
        if field in m.Hello.__struct_fields__:
            return msgspec.structs.replace(blank, hello=msgspec.structs.replace(HELLO, **{field: number}))
        return msgspec.structs.replace(blank, **{field: number})

    assert m.decode_peer_message(m.encode(report(maximum))) == report(maximum)
    for number in (maximum + 1, 2**64 - 1):
        with pytest.raises(m.Malformed):
            m.decode_peer_message(m.encode(report(number)))
