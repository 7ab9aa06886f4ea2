"""The network as users see it."""

from __future__ import annotations

from zpccl import limits
from zpccl.control.link_ends import LinkEnds
from zpccl.protocol.messages import MeasuredHost, MeasuredPath, Measurements, Member
from zpccl.topology import Topology

MBIT = 125_000
ENDS = LinkEnds("10.0.1.2:48149", "10.0.2.2:48149", "eth0", 4, "cubic", is_local=False)


def ids(count: int) -> list[bytes]:
    return [index.to_bytes(16, "big") for index in range(count)]


def members(count: int, group: int = 0) -> tuple[Member, ...]:
    return tuple(Member(peer_id, group, f"peer{index}") for index, peer_id in enumerate(ids(count)))


def test_each_pair_has_a_path() -> None:
    """None means unknown."""
    measured = MeasuredPath(0, 1, 1500, 94 * MBIT, 20_000), MeasuredPath(1, 0, 10)
    topology = Topology.of(Measurements(members(3), measured, (MeasuredHost(0, 100 * MBIT),)))
    zero, one, two = topology.peers
    assert zero.name == "peer0" and zero.peer_id == ids(1)[0].hex()
    assert (zero.sent_bytes_per_second, zero.received_bytes_per_second) == (100 * MBIT, None)
    path = topology.path(zero, one)
    assert (path.bytes_per_second, path.round_trip, path.age) == (94 * MBIT, 0.02, 1.5)
    back = topology.path(one, zero)
    assert (back.bytes_per_second, back.round_trip, back.age) == (None, None, 0.01)
    unused = Topology.of(Measurements(members(2), (MeasuredPath(0, 1, 5, MBIT, 20_000),))).path(one, zero)
    assert (unused.bytes_per_second, unused.age, unused.round_trip) == (None, None, 0.02), "that of the other direction"
    unknown = topology.path(zero, two)
    assert (unknown.sender, unknown.receiver) == (zero, two)
    assert (unknown.bytes_per_second, unknown.round_trip, unknown.age) == (None, None, None)


def test_a_peer_sees_its_group() -> None:
    listed = (*members(2), Member(b"x" * 16, 1, "other"))
    measured = MeasuredPath(0, 1, 1, MBIT), MeasuredPath(0, 2, 1, MBIT)
    topology = Topology.of(Measurements(listed, measured), 0, {ids(2)[1]: ENDS, b"?" * 16: ENDS})
    assert [peer.name for peer in topology.peers] == ["peer0", "peer1"]
    assert [path.receiver.name for path in topology.paths] == ["peer1"]
    assert [(link.peer.name, link.ends) for link in topology.links] == [("peer1", ENDS)]
    assert [peer.name for peer in Topology.of(Measurements(listed)).peers][2] == "other"


def test_few_peers_are_printed_as_a_table() -> None:
    measured = MeasuredPath(0, 1, 1500, 94 * MBIT, 20_000), MeasuredPath(1, 0, 10)
    text = str(Topology.of(Measurements(members(2), measured), 0, {ids(2)[1]: ENDS}))
    assert text.splitlines() == [
        "2 peers; paths measured: 1; rates in Mbit/s, round trips in ms",
        "  from \\ to  0        1  host sends  receives",
        "  0 peer0    -  94 20ms           ?         ?",
        "  1 peer1    ?        -           ?         ?",
        "links of this peer:",
        "  peer1: 10.0.1.2:48149 (eth0) to 10.0.2.2:48149, 4 connections, cubic",
    ]


def test_names_control_no_terminal_and_begin_no_line() -> None:
    """S7: a member chooses its name, and the master logs the topology."""
    for count in (2, limits.TOPOLOGY_MATRIX_PEERS_MAX + 1):
        first = Member(ids(1)[0], 0, "evil\u2028\x85\x9b2J")
        measured = (MeasuredPath(0, 1, 1, MBIT),)
        text = str(Topology.of(Measurements((first, *members(count)[1:]), measured), 0, {first.peer_id: ENDS}))
        assert text.count("evil\\u2028\\x85\\x9b2J") == 2
        assert all(line.isprintable() for line in text.split("\n"))


def test_large_numbers_are_written_out() -> None:
    measured = (MeasuredPath(0, 1, 1, 9412 * MBIT, 1_234_000),)
    text = str(Topology.of(Measurements(members(2), measured, (MeasuredHost(0, 10_000 * MBIT),))))
    assert text.splitlines()[2].split() == ["0", "peer0", "-", "9412", "1234ms", "10000", "?"]


def test_of_many_peers_the_slowest_paths_are_printed() -> None:
    """The output for a run of 1,000 peers fits on a screen."""
    count = 1000
    measured = tuple(MeasuredPath(index, (index + 1) % count, 1, (count - index) * MBIT) for index in range(count))
    topology = Topology.of(Measurements(members(count), measured), 0, dict.fromkeys(ids(count), ENDS))
    lines = str(topology).splitlines()
    assert len(lines) == 2 + 1 + 2 * (limits.TOPOLOGY_LINES_MAX + 1)
    assert lines[2].split() == ["peer999", "to", "peer0", "1"]
    assert "980 more paths" in lines[22] and "980 more links" in lines[-1]
    assert [path.bytes_per_second for path in topology.slowest(2)] == [MBIT, 2 * MBIT]


def test_without_peers() -> None:
    assert str(Topology.of(Measurements(()))).startswith("0 peers")
