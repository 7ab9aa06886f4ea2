"""Networks for tests (tools/networks.py), and TCP counters of their hosts."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from networks import Namespaces, Network, NetworkUnavailable, counter
from wan.emulated import EmulatedNetwork
from wan.settings import Settings

from e2e import harness

N = TypeVar("N", bound=Namespaces)


def or_skip(make: Callable[[], N]) -> N:
    """A network. Skips the test if this process cannot create one."""
    try:
        return make()
    except NetworkUnavailable as error:
        pytest.skip(str(error))


def hosts(count: int) -> Network:
    """A network of `count` hosts, or a skipped test."""
    return or_skip(lambda: Network(count))


def wide(host_count: int, *lines: str, seed: int = 0) -> EmulatedNetwork:
    """An emulated wide-area network, or a skipped test."""
    return or_skip(lambda: EmulatedNetwork(Settings(host_count).with_lines(lines), seed, realtime=False))


def load_rules(rules: str) -> None:
    """Adds nftables rules to the network of the calling thread. Skips the test if the kernel has no nftables."""
    if shutil.which("nft") is None:
        pytest.skip("there is no nft")
    tried = subprocess.run(["nft", "add table inet tried"], text=True, capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"cannot load rules of nftables: {tried.stderr.strip()}")
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)


def datagram_socket(network: Namespaces, host: int) -> socket.socket:
    """A UDP socket on a host, with buffers for everything that a test sends."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE, asm-generic/socket.h
        made.bind((network.address(host), 0))
        made.settimeout(harness.HANG_SECONDS)
        return made

    return network.run(host, make)


@contextlib.contextmanager
def connection(network: Namespaces, one: int, other: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection between two hosts. Yields its two ends."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(network.run(other, lambda: socket.create_server((network.address(other), 0))))
        address = listener.getsockname()
        dial = partial(socket.create_connection, address, harness.HANG_SECONDS)
        dialled = stack.enter_context(network.run(one, dial))
        accepted = stack.enter_context(listener.accept()[0])
        accepted.settimeout(harness.HANG_SECONDS)
        yield dialled, accepted


def check_a_cut_is_silent(
    network: Namespaces, cut: Callable[[], object], heal: Callable[[], object], resends: int
) -> None:
    """A path from host 0 to host 1 is cut: there is no RST, other paths work, and what was sent comes after all."""
    with connection(network, 0, 1) as (dialled, accepted):
        dialled.sendall(b"before")
        assert accepted.recv(100) == b"before"
        cut()
        dialled.sendall(b"lost")
        wait_for_resends(network, 0, resends)
        assert dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        accepted.setblocking(False)
        with pytest.raises(BlockingIOError):
            accepted.recv(100)
        with connection(network, 0, 2) as (to_third, from_first):
            to_third.sendall(b"other paths work")
            assert from_first.recv(100) == b"other paths work"
        heal()
        accepted.settimeout(harness.HANG_SECONDS)
        assert accepted.recv(100) == b"lost"


def is_running(pid: int) -> bool:
    """True if there is such a process and it is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_resends(network: Namespaces, host: int, count: int) -> None:
    """Waits until TCP on a host has retransmitted `count` segments. Its timeout grows with each one."""
    before = network.run(host, lambda: counter("Tcp", "RetransSegs"))
    harness.until(
        lambda: network.run(host, lambda: counter("Tcp", "RetransSegs")) >= before + count, f"{count} segments again"
    )
