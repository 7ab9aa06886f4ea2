"""How many connections a link gets by itself."""

from __future__ import annotations

import socket

import pytest

from zpccl import limits
from zpccl.control.connection_count import connections_for, far_round_trip_ns, round_trip_ns


@pytest.mark.parametrize(("round_trip_ms", "count"), [(0, 4), (0.05, 4), (10, 4), (50, 9), (100, 17), (200, 32)])
def test_more_the_longer_the_path(round_trip_ms: float, count: int) -> None:
    assert connections_for(int(round_trip_ms * limits.MS)) == count


def test_it_grows_with_the_path_and_has_bounds() -> None:
    counts = [connections_for(round_trip_ms * limits.MS) for round_trip_ms in range(5000)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (limits.LINK_CONNECTIONS_DEFAULT, limits.LINK_CONNECTIONS_FAR_MAX)


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


@pytest.mark.parametrize(("address", "is_far"), [("127.0.0.1", False), ("127.0.0.2", True)])
def test_the_same_address_at_both_ends_is_not_far(address: str, is_far: bool) -> None:
    with (
        socket.create_server((address, 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0)) as connection,
    ):
        assert (far_round_trip_ns(connection) > 0) is is_far
    with socket.socket() as unconnected:
        assert far_round_trip_ns(unconnected) == 0
