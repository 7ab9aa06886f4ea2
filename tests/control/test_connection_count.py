"""How many connections a link gets by itself."""

from __future__ import annotations

import socket
from typing import cast

import pytest

from zpccl import limits
from zpccl.control.connection_count import congestion_control, connections_for, round_trip_ns, use_bbr


@pytest.mark.parametrize("round_trip_ms", [0, 0.05, 10, 24])
@pytest.mark.parametrize("name", ["bbr", "cubic", ""])
def test_few_near_by(round_trip_ms: float, name: str) -> None:
    assert connections_for(int(round_trip_ms * limits.MS), name) == 4


@pytest.mark.parametrize("round_trip_ms", [25, 100, 5000])
@pytest.mark.parametrize(("name", "count"), [("bbr", 16), ("bbr2", 16), ("cubic", 64), ("reno", 64), ("", 64)])
def test_by_the_congestion_control_far_away(round_trip_ms: int, name: str, count: int) -> None:
    assert connections_for(round_trip_ms * limits.MS, name) == count


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
    """Stands for a connection with this round-trip time and congestion control, which may be chosen or not."""

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
