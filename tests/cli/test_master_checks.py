"""How answers of a master are interpreted. tests/e2e/test_doctor.py tests the questions themselves."""

from __future__ import annotations

import shutil
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from zpccl import limits
from zpccl.cli.findings import Finding, Level
from zpccl.cli.master_checks import Reached, ask, is_host, judge, mtu_of, open_command
from zpccl.limits import SECOND
from zpccl.protocol.messages import CheckAnswer

MASTER = "10.9.9.9:48148"
OWN = ("127.0.0.1:48149", "192.168.1.5:48149")
PORTS = range(48149, 48251)
SEEN = CheckAnswer("192.168.1.5", True, 0)
GOOD = Reached(SEEN, "", True, "192.168.1.5", 20_000_000, 1500, 0, True)


def judged(found: Reached = GOOD, candidates: tuple[str, ...] = OWN, advertise: str = "") -> dict[str, Finding]:
    return {finding.check: finding for finding in judge(MASTER, found, candidates, PORTS, advertise)}


def changed(**changes: Any) -> Reached:
    return replace(GOOD, **changes)


def test_all_is_good() -> None:
    found = judged()
    assert list(found) == ["master", "NAT", "data port", "MTU", "clock"]
    assert all(finding.level is Level.OK and not finding.fix for finding in found.values())
    assert "round trip 20 ms" in found["master"].text and "192.168.1.5:48149" in found["data port"].text


def test_without_an_answer() -> None:
    unreached = judged(Reached(reason="Connection refused"))
    assert list(unreached) == ["master"] and unreached["master"].level is Level.PROBLEM
    assert "Connection refused" in unreached["master"].text and "--bind 0.0.0.0:48148" in unreached["master"].fix
    assert judged(Reached(reason="its secret or key differs", is_connected=True))["master"].fix == ""
    (of_ipv6,) = judge("[2001:db8::1]:48148", Reached(reason="Connection refused"), OWN, PORTS, "")
    assert "--bind [::]:48148" in of_ipv6.fix


@pytest.mark.parametrize("name", ["a..b", "x" * 64])
def test_a_name_that_is_none(name: str) -> None:
    """The check knows so at once."""
    begin_ns = time.monotonic_ns()
    assert "no valid host name" in ask(f"{name}:48148", None, None, 0).reason
    assert time.monotonic_ns() - begin_ns < limits.CHECK_TIMEOUT_NS


def test_nat() -> None:
    seen = changed(answer=CheckAnswer("203.0.113.7", True, 0), has_dialled_back=False)
    found = judged(seen)
    assert found["NAT"].level is Level.WARNING and "203.0.113.7" in found["NAT"].text
    assert found["data port"].level is Level.PROBLEM
    assert "ZPCCL_ADVERTISE=203.0.113.7:48149" in found["data port"].fix
    assert "192.168.1.5:48149" in found["data port"].fix
    forwarded = judged(replace(seen, has_dialled_back=True), advertise="203.0.113.7:5000")
    assert {found.level for found in forwarded.values()} == {Level.OK}
    assert "203.0.113.7:5000" in forwarded["data port"].text


def test_an_address_that_the_master_does_not_see() -> None:
    """The master dials only the address that it sees."""
    found = judged(changed(has_dialled_back=False), advertise="198.51.100.1:48149")
    assert found["data port"].level is Level.WARNING and "not tried" in found["data port"].text


def test_an_advertised_port_on_which_nobody_listens() -> None:
    """To open other ports in the firewall would not help."""
    found = judged(changed(has_dialled_back=False), advertise="192.168.1.5:5000")["data port"]
    assert found.level is Level.PROBLEM and found.text.endswith("listen on other ports, from 48149 to 48250")
    assert found.fix.startswith("zpccl doctor --advertise 192.168.1.5 ")


def test_an_advertised_name_of_the_address_that_the_master_sees() -> None:
    found = judged(
        changed(answer=CheckAnswer("127.0.0.1", True, 0), has_dialled_back=False), advertise="localhost:5000"
    )
    assert found["data port"].level is Level.PROBLEM and "127.0.0.1:5000" in found["data port"].text


def test_a_host_that_listens_at_an_address_that_the_master_does_not_see() -> None:
    """Its firewall and routers need no change: the master dials the address by which it is reached."""
    port = judged(changed(has_dialled_back=False), ("10.2.0.5:48149",))["data port"]
    assert port.level is Level.WARNING and not port.fix
    assert "10.2.0.5:48149 was not tried" in port.text and "192.168.1.5" in port.text


@pytest.mark.parametrize("host", ["", "203.0.113.7", "2001:db8::7", "fe80::7%eth0"])
def test_addresses_that_a_master_tells(host: str) -> None:
    assert is_host(host)


@pytest.mark.parametrize("host", ["$(reboot)", "x;reboot", "fe80::7%$(reboot)", "::1]:1;reboot;[", "1.2.3.4:5"])
def test_a_command_is_no_address(host: str) -> None:
    """S7: a fix names the address that the master tells, and the user may copy it into a shell."""
    assert not is_host(host)


def test_a_blocked_port() -> None:
    found = judged(changed(has_dialled_back=False))
    assert found["NAT"].level is Level.OK and found["data port"].level is Level.PROBLEM
    assert found["data port"].fix == open_command(PORTS)


def test_a_master_that_does_not_dial_now() -> None:
    found = judged(changed(answer=CheckAnswer(SEEN.host, False, 0), has_dialled_back=False))
    assert found["data port"].level is Level.WARNING
    assert "data port" not in judged(changed(has_dialled_back=False), candidates=()), "nothing listens"


@pytest.mark.parametrize("tool", ["ufw", "firewall-cmd", "nft", "none"])
def test_the_command_is_of_the_firewall_that_is_here(monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name == tool else None)
    command = open_command(PORTS)
    assert command.startswith(tool if tool != "none" else "iptables")
    assert "48149" in command and "48250" in command


@pytest.mark.parametrize(("mtu", "level"), [(0, Level.WARNING), (576, Level.WARNING), (1280, Level.OK)])
def test_mtu(mtu: int, level: Level) -> None:
    assert judged(changed(mtu=mtu))["MTU"].level is level


@pytest.mark.parametrize(("ahead_s", "word"), [(2, "ahead of"), (-2, "behind"), (0, "behind")])
def test_clocks(ahead_s: int, word: str) -> None:
    found = judged(changed(clock_ahead_ns=ahead_s * SECOND))["clock"]
    assert word in found.text and found.level is (Level.WARNING if ahead_s else Level.OK)
    assert limits.CLOCK_DIFFERENCE_MAX_NS < 2 * SECOND


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_mtu_of_a_connection(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    with listener, socket.create_connection(listener.getsockname()[:2]) as connection:
        assert mtu_of(connection) > 1280
    with socket.socket() as unconnected:
        assert mtu_of(unconnected) == 0
