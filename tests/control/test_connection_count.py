"""How many connections a link gets by itself."""

from __future__ import annotations

import socket

import pytest

from zpccl import limits
from zpccl.control.connection_count import congestion_control, connections_for, round_trip_ns


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
