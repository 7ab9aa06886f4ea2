"""Emulated wide-area networks with real traffic: nothing arrives early or above its rate, and no byte changes.

Tests with the clock only check lower bounds, which hold on any machine. test_wan_model.py tests the model's times
exactly.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from networks import DEVICE, NetworkUnavailable
from wan.emulated import EmulatedNetwork

from e2e.harness import HANG_SECONDS, until
from e2e.networks import check_a_cut_is_silent, connection, datagram_socket, is_running, wide

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOOLS = Path(__file__).resolve().parents[2] / "tools"
COUNT = 5000
"""Number of datagrams over which losses are counted."""


def flood(network: EmulatedNetwork, count: int, size_bytes: int) -> list[int]:
    """Sends numbered datagrams from host 0 to host 1 at full speed. Returns those that arrive, in order of arrival."""
    with datagram_socket(network, 0) as sender, datagram_socket(network, 1) as receiver:
        for number in range(count):
            sender.sendto(number.to_bytes(4, "big") + bytes(size_bytes - 4), receiver.getsockname())

        def settled() -> bool:
            path = network.counts().paths[0, 1]
            return path["out"] + path["lost"] + path["overflown"] + path["cut"] == count

        until(settled, "the end of all datagrams")
        arriving = network.counts().paths[0, 1]["out"]
        arrived: list[int] = []
        with contextlib.suppress(TimeoutError):
            while len(arrived) < arriving:
                arrived.append(int.from_bytes(receiver.recv(2000)[:4], "big"))
        counts = network.counts()
        what = f"{counts.paths[0, 1]}, {counts.total}, {dropped(receiver)} dropped by the receiving socket"
        assert len(arrived) == arriving, f"{len(arrived)} datagrams of {what}"
        return arrived


def dropped(receiver: socket.socket) -> int:
    """Number of datagrams that the kernel dropped for lack of room: SK_MEMINFO_DROPS of SO_MEMINFO
    (asm-generic/socket.h)."""
    count: int = struct.unpack("9I", receiver.getsockopt(socket.SOL_SOCKET, 55, 36))[-1]
    return count


def test_no_answer_is_earlier_than_the_round_trip() -> None:
    with (
        wide(2, "path 0 1 delay_ms=20", "path 1 0 delay_ms=30") as network,
        datagram_socket(network, 0) as zero,
        datagram_socket(network, 1) as one,
    ):
        for _ in range(5):
            began = time.monotonic()
            zero.sendto(b"there", one.getsockname())
            assert one.recv(100) == b"there"
            assert time.monotonic() - began >= 0.020
            one.sendto(b"back", zero.getsockname())
            assert zero.recv(100) == b"back"
            assert time.monotonic() - began >= 0.050


def test_no_more_comes_than_the_rate_carries() -> None:
    """The limit holds for TCP and for other traffic, whatever the number of connections."""
    with wide(2, "path 0 1 rate_mbit=20") as network, contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(connection(network, 0, 1)) for _ in range(3)]
        began = time.monotonic()
        received = transfer(pairs, 1 << 20)
        seconds = time.monotonic() - began
        assert received == 3 << 20
        assert seconds * 20e6 >= 3 * 2**20 * 8  # Headers and the wait of the first packet only add to it.
        assert network.counts().paths[0, 1]["out_bytes"] > 3 << 20


def transfer(pairs: list[tuple[socket.socket, socket.socket]], size_bytes: int) -> int:
    """Sends random bytes over all connections at once. Returns how many arrived, all of them right."""
    digests: dict[int, bytes] = {}
    received: dict[int, tuple[int, bytes]] = {}

    def send(index: int) -> None:
        content = os.urandom(size_bytes)
        digests[index] = hashlib.sha256(content).digest()
        pairs[index][0].sendall(content)
        pairs[index][0].shutdown(socket.SHUT_WR)

    def receive(index: int) -> None:
        digest, total = hashlib.sha256(), 0
        while content := pairs[index][1].recv(1 << 20):
            digest.update(content)
            total += len(content)
        received[index] = total, digest.digest()

    with ThreadPoolExecutor(2 * len(pairs)) as executor:
        for future in [executor.submit(what, index) for index in range(len(pairs)) for what in (send, receive)]:
            future.result()
    assert {index: digest for index, (_, digest) in received.items()} == digests
    return sum(total for total, _ in received.values())


def test_not_a_byte_is_changed_by_cuts_of_super_packets_losses_and_full_queues() -> None:
    lines = ["link 0 1 delay_ms=2 rate_mbit=200 loss=1% jitter_ms=1 queue_bytes=60k"]
    with wide(2, *lines) as network, contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(connection(network, 0, 1)) for _ in range(4)]
        backwards = [pair[::-1] for pair in (stack.enter_context(connection(network, 0, 1)) for _ in range(4))]
        assert transfer(pairs + backwards, 2 << 20) == 16 << 20
        counts = network.counts()
        assert counts.paths[0, 1]["lost"] > 0 and counts.paths[1, 0]["lost"] > 0
        assert counts.paths[0, 1]["overflown"] > 0
        assert counts.paths[0, 1]["queue_bytes_max"] <= 60_000
        assert counts.total["write_errors"] == counts.total["no_route"] == 0


def test_the_seed_says_what_is_lost() -> None:
    arrived = []
    for seed in (1, 1, 2):
        with wide(2, "path 0 1 loss=2%", seed=seed) as network:
            arrived.append(flood(network, COUNT, 100))
            assert network.counts().total["device_drops"] == 0
    assert arrived[0] == arrived[1] != arrived[2]
    for numbers in arrived:
        assert numbers == sorted(set(numbers))
        assert COUNT * 0.01 < COUNT - len(numbers) < COUNT * 0.03


def test_nothing_overtakes_however_the_delay_wanders() -> None:
    with wide(2, "path 0 1 delay_ms=5 jitter_ms=5 jitter_period_ms=1") as network:
        assert flood(network, COUNT, 100) == list(range(COUNT))


def test_a_full_queue_drops_the_rest() -> None:
    with wide(2, "path 0 1 rate_mbit=1 queue_bytes=20k") as network:
        numbers = flood(network, 1000, 500)
        path = network.counts().paths[0, 1]
        assert numbers[:30] == list(range(30)) and len(numbers) + path["overflown"] == 1000
        assert path["overflown"] > 0 and path["queue_bytes_max"] <= 20_000


def test_a_cut_pair_is_silent_and_comes_back() -> None:
    """There is no RST and no ICMP: TCP retransmits, and other paths work."""
    with wide(3, "link * * delay_ms=1") as network:
        cut, heal = (lambda: network.change("link 0 1 cut=1")), (lambda: network.change("link 0 1 cut=0"))
        check_a_cut_is_silent(network, cut, heal, 2)


def test_a_host_is_cut_off_and_one_way_alone() -> None:
    with wide(3) as network, contextlib.ExitStack() as stack:
        zero, one, two = (stack.enter_context(datagram_socket(network, host)) for host in range(3))
        network.change("host 2 down=1", "path 0 1 cut=1")
        for sender, receiver in ((zero, two), (two, zero), (two, one), (zero, one)):
            sender.sendto(b"lost", receiver.getsockname())
        one.sendto(b"heard", zero.getsockname())
        assert zero.recv(100) == b"heard"
        until(lambda: sum(path["cut"] for path in network.counts().paths.values()) == 4, "four cut datagrams")
        network.change("path * * cut=0", "host * down=0")
        for sender, receiver in ((zero, two), (two, one), (zero, one)):
            sender.sendto(b"later", receiver.getsockname())
            assert receiver.recv(100) == b"later"


def test_counters_begin_anew_with_what_the_kernel_drops_too() -> None:
    with wide(2) as network, datagram_socket(network, 0) as sender, datagram_socket(network, 1) as receiver:
        network.run(0, lambda: subprocess.run(["ip", "link", "set", DEVICE, "txqueuelen", "10"], check=True))
        os.kill(network.emulator_pid, signal.SIGSTOP)
        try:
            for _ in range(100):
                sender.sendto(b"one of too many", receiver.getsockname())
        finally:
            os.kill(network.emulator_pid, signal.SIGCONT)
        counts = network.counts()
        assert counts.total["device_drops"] > 0
        network.reset_counts()
        assert network.counts().total["device_drops"] == 0


def test_a_congestion_control_that_the_kernel_lacks_is_named() -> None:
    with wide(2) as network, pytest.raises(NetworkUnavailable, match="no congestion control 'nonsense'"):
        network.use_congestion_control("nonsense")


def test_delays_and_rates_change_while_bytes_are_under_way() -> None:
    with wide(2, "link 0 1 rate_mbit=1") as network, connection(network, 0, 1) as pair:
        lines = ["link 0 1 rate_mbit=0 delay_ms=5", "link 0 1 delay_ms=0", "link 0 1 rate_mbit=500 loss=0.1%"]

        def change() -> None:
            before = 0
            for line in lines:
                before = until(lambda before=before: bytes_out(network, before + 50_000), "bytes")  # type: ignore[misc]
                network.change(line)

        changing = threading.Thread(target=change)
        changing.start()
        assert transfer([pair], 8 << 20) == 8 << 20
        changing.join()
        assert network.settings.paths[0, 1].rate_mbit == 500


def bytes_out(network: EmulatedNetwork, least: int) -> int:
    """Bytes that have come from host 0 to host 1, or 0 while there are fewer than `least`."""
    out = network.counts().paths[0, 1]["out_bytes"]
    return out if out >= least else 0


def test_the_emulator_ends_with_its_network_and_with_its_owner() -> None:
    with wide(2) as network:
        pid = network.emulator_pid
        network.close()
        assert not Path(f"/proc/{pid}").exists()
    script = (
        "import os, signal\nfrom wan.emulated import EmulatedNetwork\nfrom wan.settings import Settings\n"
        "print(EmulatedNetwork(Settings(2)).emulator_pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TOOLS), *filter(None, sys.path)))}
    killed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    until(lambda: not is_running(int(killed.stdout)), "the end of the emulator")


# --- The command ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def network_up(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A network by `python tools/wan`, and for each host the command that enters it. Ends the network if it still runs.
    Skips the test if this process cannot create one."""
    command = [sys.executable, str(TOOLS / "wan"), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as up:
        try:
            lines = [answer(up) for _ in range(int(arguments[0]))]
            if not all(lines):
                assert up.stderr is not None
                problem = up.stderr.read()
                assert "cannot" in problem
                pytest.skip(problem)
            yield up, [line.partition(": ")[2].replace("COMMAND", "").strip() for line in lines]
        finally:
            up.kill()


def answer(up: subprocess.Popen[str], *lines: str) -> str:
    """Sends these lines to the command. Returns the next line that it prints."""
    assert up.stdin is not None and up.stdout is not None
    up.stdin.writelines(f"{line}\n" for line in lines)
    up.stdin.flush()
    return up.stdout.readline()


def test_the_command_runs_programs_on_hosts_and_changes_the_network(tmp_path: Path) -> None:
    configuration = tmp_path / "wan.conf"
    configuration.write_text("link * * delay_ms=1\n", encoding="utf-8")
    with network_up("2", str(configuration)) as (up, ways):
        address = subprocess.check_output([*ways[1].split(), "ip", "-brief", "address", "show", "eth0"], text=True)
        assert "10.77.1.1" in address
        shown = [answer(up, "path 1 0 loss=1%", "link 0 1 delay_ms=7 loss=soon", "show")]
        while not shown[-1].startswith("path 1 0"):
            shown.append(answer(up))
        assert "path 1 0 delay_ms=1 " in shown[-1] and " loss=0.01 " in shown[-1]
        assert up.stderr is not None and "'soon' is no number" in up.stderr.readline()
        assert answer(up, "reset", "stats").startswith("emulator: reads=")
        assert up.stdin is not None
        up.stdin.close()  # The network stays up.
        assert subprocess.run([*ways[0].split(), "true"], check=False).returncode == 0
        up.send_signal(signal.SIGINT)
        assert up.wait(HANG_SECONDS) == 128 + signal.SIGINT
        assert up.stderr.read() == "interrupted\n"
