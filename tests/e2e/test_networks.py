"""The network that other tests cut: its cuts are silent, and nothing of it remains afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from networks import HOSTS_MAX, Network, counter

from e2e.harness import TESTS, until
from e2e.networks import check_a_cut_is_silent, datagram_socket, hosts, is_running, wait_for_resends

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PORT = 5000


def icmp_messages_received(network: Network) -> int:
    """The number of ICMP messages that all hosts have received."""
    return sum(network.run(host, lambda: counter("Icmp", "InMsgs")) for host in range(network.host_count))


def test_a_cut_path_is_silent_and_comes_back() -> None:
    """TCP retransmits and gets neither an RST nor an ICMP message. When the path is back, the bytes arrive."""
    with hosts(3) as network:
        check_a_cut_is_silent(network, lambda: network.cut(0, 1), network.heal, 3)
        assert network.icmp_messages_sent() == icmp_messages_received(network) == 0


def test_nobody_answers_a_new_connection_over_a_cut_path() -> None:
    with hosts(2) as network:
        network.cut(0, 1)

        def dial() -> socket.socket:
            dialled = socket.socket()
            dialled.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                dialled.connect((network.address(1), PORT))  # Nobody listens: a whole path returns an RST.
            return dialled

        with network.run(0, dial) as dialled:
            wait_for_resends(network, 0, 2)
            assert dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            assert network.icmp_messages_sent() == 0
            network.heal()
            until(lambda: dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "the refusal")


def test_one_way_is_cut_and_the_other_is_not() -> None:
    with hosts(2) as network, datagram_socket(network, 0) as zero, datagram_socket(network, 1) as one:
        network.cut_one_way(0, 1)
        zero.sendto(b"lost", one.getsockname())
        one.sendto(b"heard", zero.getsockname())
        assert zero.recv(100) == b"heard"
        network.heal()
        zero.sendto(b"later", one.getsockname())
        assert one.recv(100) == b"later"
        assert icmp_messages_received(network) == 0


def test_a_host_is_cut_off_from_all() -> None:
    with hosts(3) as network, contextlib.ExitStack() as stack:
        zero, one, two = (stack.enter_context(datagram_socket(network, host)) for host in range(3))
        network.cut_host(2)
        for other in (zero, one):
            other.sendto(b"lost", two.getsockname())
            two.sendto(b"lost too", other.getsockname())
        zero.sendto(b"not lost", one.getsockname())
        assert one.recv(100) == b"not lost"
        network.heal()
        one.sendto(b"one", two.getsockname())
        assert two.recv(100) == b"one"
        for other in (zero, one):
            two.sendto(b"two", other.getsockname())
            assert other.recv(100) == b"two"
        assert network.icmp_messages_sent() == icmp_messages_received(network) == 0


def test_this_process_stays_where_it_is() -> None:
    before = os.stat("/proc/self/ns/net").st_ino
    forwarding = Path("/proc/sys/net/ipv4/ip_forward").read_text(encoding="ascii")
    with hosts(1) as network:
        assert os.stat("/proc/thread-self/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino == before
        assert network.run(0, lambda: os.stat("/proc/thread-self/ns/net").st_ino) != before
    assert Path("/proc/sys/net/ipv4/ip_forward").read_text(encoding="ascii") == forwarding


KILLED = """
import os, signal
from e2e.harness import Cluster
from networks import Network
network = Network(2)
cluster = Cluster({directory!r}, network=network)
child = cluster.child()
print(cluster.master.pid, child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_test_run_that_is_killed(tmp_path: Path) -> None:
    """Its processes end, and with them everything that keeps its namespaces alive."""
    with hosts(1):
        pass  # Skips the test if this process cannot create a network.
    command = [sys.executable, "-c", KILLED.format(directory=str(tmp_path))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in (str(TESTS), *sys.path) if path)}
    killed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        until(lambda pid=pid: not is_running(pid), f"the end of process {pid}")  # type: ignore[misc]


def test_hosts_have_addresses_of_their_own() -> None:
    with hosts(3) as network:
        assert len({network.address(host) for host in range(3)}) == 3
    assert HOSTS_MAX < 256
