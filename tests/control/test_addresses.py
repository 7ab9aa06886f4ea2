"""Addresses as text, and the addresses at which to listen."""

from __future__ import annotations

import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl import limits
from zpccl.control import addresses
from zpccl.control.addresses import (
    addresses_of,
    advertised_address,
    format_address,
    is_loopback,
    is_name,
    listen_on_first_free,
    other_end,
    parse_address,
    parse_listen,
    reachable_at,
    source_towards,
)
from zpccl.errors import InvalidArgument, InvalidUsage


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:5", "127.0.0.1", 5),
        ("[::1]:48148", "::1", 48148),
        ("a-b.example:65535", "a-b.example", 65535),
        ("h:0", "h", 0),
        *((f"[fe80::1%{interface}]:5", f"fe80::1%{interface}", 5) for interface in ("eth0", "br-lan", "eth0.100")),
    ],
)
def test_addresses_are_read_and_written(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize("text", " :5 h h: h:x h:65536 ::1:5 [::1] h:5\t [h]:5 [:5]:5 [1.2.3.4]:5 h:5\n".split(" "))
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="of the form"):
        parse_address(text)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text)
    except InvalidArgument:
        return
    assert parse_address(format_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        (None, "", range(48149, 49149)),
        ("", "", range(48149, 49149)),
        ("h", "h", range(48149, 49149)),
        ("h:5", "h", range(5, 6)),
        (":5-9", "", range(5, 10)),
        ("[::1]", "::1", range(48149, 49149)),
        ("[::1]:7", "::1", range(7, 8)),
    ],
)
def test_listen_options(text: str | None, host: str, ports: range) -> None:
    assert parse_listen(text) == (host, ports)


@pytest.mark.parametrize("text", ["h:", "h:x", "h:9-5", "h:5-70000", "h:-5", "h:5-", "48149", "48149-48156"])
def test_bad_listen_options(text: str) -> None:
    with pytest.raises(InvalidArgument, match="listen"):
        parse_listen(text)


@pytest.mark.parametrize("text", ["::1", "fe80::1:48149", "2001:db8::5:48149-48156"])
def test_listen_options_without_brackets(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"without brackets; write \"\[ipv6\]:port"):
        parse_listen(text)


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.0.2.1", "example.org", "*"]))


def test_addresses_of_names() -> None:
    assert "127.0.0.1" in addresses_of("localhost")
    assert addresses_of("192.0.2.1") == {"192.0.2.1"} and addresses_of("2001:db8::1") == {"2001:db8::1"}
    assert addresses_of("a..b") == set()


def test_names() -> None:
    assert all(map(is_name, ["localhost:1", "example.org:1"]))
    assert not any(map(is_name, ["127.0.0.1:1", "[::1]:1", "[fe80::1%eth0]:1"]))


def test_the_first_free_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with listen_on_first_free("127.0.0.1", range(port, min(port + 100, 65536))) as listener:
            assert listener.getsockname()[1] > port and not listener.getblocking()
        with pytest.raises(InvalidUsage, match=r"no free port .* ZPCCL_LISTEN"):
            listen_on_first_free("127.0.0.1", range(port, port + 1))


def test_a_port_is_not_free_if_another_program_has_it_for_ipv6() -> None:
    """Not even if IPv4 is free: peers could then not reach this one by IPv6."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        port = other.getsockname()[1]
        with listen_on_first_free("", range(port, min(port + 100, 65536))) as listener:
            assert listener.family == socket.AF_INET6
            assert listener.getsockname()[1] != port


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.77", "cannot listen on '192.0.2.77': this host has no such address$"),
        ("no.such.host.invalid", r"cannot listen on 'no.such.host.invalid': [^\[]*$"),  # No number of an error.
        ("a..b", "cannot listen on a..b:48149: "),
    ],
)
def test_hosts_that_are_not_ours(host: str, reason: str) -> None:
    """RFC 5737: only by mistake does a host have an address of 192.0.2.0/24."""
    with pytest.raises(InvalidArgument, match=reason):
        listen_on_first_free(host, range(48149, 48151))


def test_the_other_end_of_a_connection() -> None:
    """An IPv4 address has its own form, whatever the family of the socket."""
    with (
        listen_on_first_free("", range(1)) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as theirs,
        listener.accept()[0] as ours,
    ):
        assert other_end(ours) == f"127.0.0.1:{theirs.getsockname()[1]}"


def test_where_a_listener_is_reached() -> None:
    with listen_on_first_free("", range(1)) as listener:
        port = listener.getsockname()[1]
        found = reachable_at(listener, "example.org")
        assert found[:2] == (f"example.org:{port}", f"127.0.0.1:{port}")
        assert len(set(found)) == len(found)
    with listen_on_first_free("127.0.0.1", range(1)) as listener:
        assert reachable_at(listener, None) == (f"127.0.0.1:{listener.getsockname()[1]}",)


@pytest.mark.parametrize("likely", ["10.1.2.3", "2001:db8::1", "172.17.0.1", "127.0.0.1"])
def test_the_address_towards_the_master_comes_first_and_bridges_last(
    monkeypatch: pytest.MonkeyPatch, likely: str
) -> None:
    found = [("br0", "172.17.0.1"), ("eth0", "10.1.2.3"), ("eth0", "2001:db8::1"), ("lo", "127.0.0.1"), ("lo", "::1")]
    monkeypatch.setattr(addresses, "interface_addresses", lambda: found)
    monkeypatch.setattr(addresses, "_is_bridge", lambda interface: interface == "br0")
    monkeypatch.setattr(addresses, "source_towards", lambda address: likely if address == "second:5" else "")
    with listen_on_first_free("", range(1)) as listener:
        port = listener.getsockname()[1]
        others = [host for host in ("127.0.0.1", "10.1.2.3", "2001:db8::1", "172.17.0.1") if host != likely]
        expected = tuple(format_address(host, port) for host in (likely, *others))
        assert reachable_at(listener, None, ("first:5", "second:5")) == expected
        assert reachable_at(listener, "h", ("first:5", "second:5")) == (f"h:{port}", *expected)


def test_a_listener_of_ipv4_has_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at the other address, though packets to the master leave from it."""
    found = [("eth0", "10.1.2.3"), ("eth0", "2001:db8::1"), ("lo", "127.0.0.1")]
    monkeypatch.setattr(addresses, "interface_addresses", lambda: found)
    monkeypatch.setattr(addresses, "source_towards", lambda _: "2001:db8::1")
    with listen_on_first_free("0.0.0.0", range(1)) as listener:
        port = listener.getsockname()[1]
        assert reachable_at(listener, None, ("first:5",)) == (f"127.0.0.1:{port}", f"10.1.2.3:{port}")


def test_the_way_to_a_master() -> None:
    assert source_towards("127.0.0.1:9") == "127.0.0.1"
    for nowhere in ("", "nonsense", "no.such.host.invalid:5", "a..b:5"):
        assert source_towards(nowhere) == ""


def test_advertised_addresses() -> None:
    assert advertised_address("h", 5) == "h:5"
    assert advertised_address("h:6", 5) == "h:6"
    assert advertised_address("[::1]", 5) == advertised_address("::1", 5) == "[::1]:5"
    for text in ("a b", "h:", ":5", "h:70000", "h" * limits.ADDRESS_CHARS_MAX):  # The last is too long with its port.
        with pytest.raises(InvalidArgument, match=f"advertise {re.escape(repr(text))} "):
            advertised_address(text, 5)
