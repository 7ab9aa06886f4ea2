"""The number of connections that a link gets by default."""

from __future__ import annotations

import socket
from typing import cast

import pytest

from zpccl import limits
from zpccl.control.connection_count import (
    congestion_control,
    connections_for,
    places_for,
    round_trip_ns,
    senders_for,
    use_bbr,
)
from zpccl.protocol.messages import PathSample


@pytest.mark.parametrize("round_trip_ms", [0, 0.05, 10, 24])
@pytest.mark.parametrize("name", ["bbr", "cubic", ""])
def test_few_near_by(round_trip_ms: float, name: str) -> None:
    assert connections_for(int(round_trip_ms * limits.MS), name) == 4


@pytest.mark.parametrize("round_trip_ms", [25, 100, 5000])
@pytest.mark.parametrize(("name", "count"), [("bbr", 16), ("bbr2", 16), ("cubic", 64), ("reno", 64), ("", 64)])
def test_by_the_congestion_control_far_away(round_trip_ms: int, name: str, count: int) -> None:
    assert connections_for(round_trip_ms * limits.MS, name) == count


def carried(mbit: float, round_trip_ms: float, *, seconds: float = 10, is_limited: bool = True) -> PathSample:
    """A sample of a path with this rate."""
    sent_bytes, busy_us = int(mbit * 125_000 * seconds), int(seconds * 1_000_000)
    return PathSample(b"p" * 16, sent_bytes, busy_us, int(round_trip_ms * 1000), is_limited)


FULL = limits.SECOND
"""Time in the queues of a path that is full."""


def settled(path: PathSample, congestion_control: str) -> int:
    """How many of 64 connections are still in use in the end."""
    used = 64
    for _ in range(10):
        used = senders_for(path, FULL, used, 64, congestion_control)
    return used


@pytest.mark.parametrize(
    ("mbit", "round_trip_ms", "bbr", "cubic"),
    [
        (1000, 100, 64, 64),
        (130, 100, 25, 64),  # Carried by one connection with BBR if 0.1 % is lost.
        (8, 40, 1, 5),
        (3, 40, 1, 2),
        (0.1, 300, 1, 1),
        (1000, 0.2, 20, 64),  # A near link has 4.
        (30, 0.2, 1, 5),
    ],
)
def test_slow_paths_are_not_sent_on_by_all_connections(mbit: float, round_trip_ms: float, bbr: int, cubic: int) -> None:
    assert settled(carried(mbit, round_trip_ms), "bbr") == bbr
    assert settled(carried(mbit, round_trip_ms), "cubic") == settled(carried(mbit, round_trip_ms), "") == cubic


@pytest.mark.parametrize(
    ("path", "senders"),
    [
        (carried(8, 40), 16),  # At most to a quarter.
        (carried(8, 40, seconds=0.7), 64),  # At the earliest after 20 round trips.
        (carried(8, 40, is_limited=False), 64),  # It has waited for bytes.
    ],
)
def test_few_connections_are_left_out_at_a_time(path: PathSample, senders: int) -> None:
    assert senders_for(path, FULL, 64, 64, "bbr") == senders


@pytest.mark.parametrize("path", [carried(1000, 100), carried(1000, 100, seconds=0.1, is_limited=False)])
def test_all_are_back_at_once(path: PathSample) -> None:
    assert senders_for(path, FULL, 1, 64, "bbr") == senders_for(path, FULL, 64, 64, "bbr") == 64


@pytest.mark.parametrize(("name", "segments"), [("bbr", 100), ("cubic", 6), ("cubic", 12), ("cubic", 39)])
def test_lost_packets_alone_leave_no_connection_out(name: str, segments: int) -> None:
    """The bytes in flight over 100 ms with CUBIC and losses of 4, 1 and 0.1 %. One connection grows to all."""
    used = 1
    for _ in range(100):
        used = senders_for(carried(used * segments * 1448 * 8 / 100_000, 100), FULL, used, 64, name)
    assert used == 64


LOSSY = carried(64 * 39 * 1448 * 8 / 100_000, 100)
"""The rate of 64 connections with CUBIC over 100 ms with 0.1 % loss."""


@pytest.mark.parametrize(
    ("path", "queued_us", "used", "senders"),
    [
        (LOSSY, 10_000, 64, 128),
        (LOSSY, 25_001, 64, 64),  # The path is full.
        (LOSSY, 10_000, 63, 64),  # Some connections have not been used.
        (carried(290, 100, seconds=1.9), 10_000, 64, 64),  # At the earliest after 20 round trips.
        (carried(290, 100, is_limited=False), 10_000, 64, 64),  # It has waited for bytes.
        (carried(60, 100), 10_000, 64, 92),
        (carried(580, 100), 90_000, 128, 128),  # Added connections stay, even if they fill the path.
        (carried(8, 40), 90_000, 128, 32),
    ],
)
def test_a_link_gets_more_where_losses_are_the_limit(path: PathSample, queued_us: int, used: int, senders: int) -> None:
    assert senders_for(path, queued_us, used, 64, "cubic") == senders


@pytest.mark.parametrize(("count", "name"), [(4, "cubic"), (16, "bbr"), (63, "cubic")])
def test_other_links_get_no_more(count: int, name: str) -> None:
    """These are near links, links with BBR, and links for which the user named a number other than 64."""
    assert places_for(count) == count == senders_for(LOSSY, 0, count, count, name)


def test_tcp_knows_the_round_trip_of_a_new_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        assert 0 < round_trip_ns(connection) < limits.SECOND


def test_what_is_no_tcp_connection_has_none() -> None:
    with socket.socket() as unconnected:
        assert round_trip_ns(unconnected) == 0
    one, other = socket.socketpair()
    with one, other:
        assert round_trip_ns(one) == 0


def test_the_congestion_control_is_that_of_the_socket() -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # Any process may choose it.
        assert congestion_control(connection) == "reno"
    one, other = socket.socketpair()
    with one, other:
        assert congestion_control(one) == ""


class FarConnection:
    """Replaces a connection with these properties. `is_allowed`: the process may choose the congestion control."""

    def __init__(self, round_trip_ms: int, name: str, is_allowed: bool) -> None:
        self.round_trip_us, self.name, self.is_allowed = round_trip_ms * 1000, name, is_allowed

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert level == socket.IPPROTO_TCP
        if option == socket.TCP_INFO:
            return bytes(68) + self.round_trip_us.to_bytes(4, "little")
        assert option == socket.TCP_CONGESTION
        return self.name.encode().ljust(size, b"\0")

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if not self.is_allowed:
            raise PermissionError
        self.name = value.decode()


@pytest.mark.parametrize(
    ("round_trip_ms", "name", "is_allowed", "expected"),
    [
        (100, "cubic", True, ("bbr", True)),
        (100, "cubic", False, ("cubic", False)),
        (100, "bbr2", False, ("bbr2", True)),
        (10, "cubic", True, ("cubic", True)),
        (10, "cubic", False, ("cubic", True)),
    ],
)
def test_bbr_far_away(round_trip_ms: int, name: str, is_allowed: bool, expected: tuple[str, bool]) -> None:
    connection = FarConnection(round_trip_ms, name, is_allowed)
    is_well = use_bbr(cast(socket.socket, connection))
    assert (connection.name, is_well) == expected
