"""The interface that a link uses."""

from __future__ import annotations

import socket

import pytest

from zpccl.control.link_ends import ends_of, interface_of


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_addresses_and_interface_of_tcp(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)) as one, socket.create_connection((host, port)) as two:
            ends = ends_of([one, two])
            assert ends.remote_address.endswith(f":{port}") and not ends.is_local
            assert ends.local_address.rpartition(":")[0].strip("[]") == host
            assert (ends.interface, ends.connections) == ("lo", 2)
            assert ends.congestion_control in str(ends) and "(lo)" in str(ends)


def test_ipv4_at_a_listener_for_both() -> None:
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])), listener.accept()[0] as accepted:
        ends = ends_of([accepted])
    assert ends.local_address.startswith("127.0.0.1:") and ends.interface == "lo"


def test_sockets_within_a_host() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        ends = ends_of([one])
    assert ends.is_local and ends.local_address == ends.interface == ends.congestion_control == ""
    assert str(ends) == "shared memory, 1 Unix-domain sockets"


def test_a_broken_connection() -> None:
    with socket.socket() as closed, pytest.raises(OSError):
        ends_of([closed])


def test_an_address_that_no_interface_has() -> None:
    assert interface_of("192.0.2.77") == ""  # RFC 5737: no host has this address.
