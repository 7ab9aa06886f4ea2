"""S6, S7, B1 with real processes: whatever a hostile joiner does, members reduce on, and memory and logs are bounded.

Each test runs with a master without a secret and with one that has a secret. The attacker has the secret if it would
not get in without it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from protocol.harness import topology_vote

import zpccl
from e2e import harness
from e2e.harness import Child, Cluster, Process, all_of, cluster, until
from e2e.secured import credentials, dealer_with, log_all, write_private
from e2e.strangers import GARBAGE, GREETING, MIB, READY, data_address, hello_of_nobody, is_dropped, raw, receive
from zpccl import limits
from zpccl.control.keys import new_secret, peer_keys
from zpccl.protocol.identity import SALT_BYTES, make_peer_id
from zpccl.protocol.messages import (
    CollectiveSpec,
    Hello,
    PeerMessage,
    Refusal,
    Refused,
    Report,
    RunReport,
    TopologyKind,
    Vote,
    Votes,
    Welcome,
    Withdraw,
    encode,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MASTER_GROWTH_BYTES_MAX = 256 * MIB
"""How much any of these attacks may add to the master's peak memory. It covers what loopback delivers while the master
does not look: for INFLOW_INTERVAL, and as long as other processes have the processors. Endless senders offer more."""
MEMBER_GROWTH_BYTES_MAX = 32 * MIB
LOG_LINES_MAX = limits.REFUSALS_LOGGED_MAX + limits.LOG_LINES_MAX
SALTS = itertools.count()


class HostileRun:
    """A run of two members, and what an attacker needs to take part in it."""

    def __init__(self, run: Cluster, secret: str | None) -> None:
        self.run, self.secret = run, secret
        self.options: dict[str, Any] = {} if secret is None else {"secret": secret}
        self.members = run.members(2, **self.options)
        for child in self.members:
            child.call(log_all)
        self.credentials = [child.call(credentials) for child in self.members]
        self.places = [child.call(data_address) for child in self.members]

    @property
    def address(self) -> str:
        return self.run.master.address

    @contextlib.contextmanager
    def dealer(self) -> Iterator[zmq.Socket[bytes]]:
        """A connection of an attacker. It has the secret, if there is one."""
        if self.secret is not None:
            with dealer_with(self.address, self.options) as dealer:
                yield dealer
        else:
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.connect(f"tcp://{self.address}")
                yield dealer

    def hello(self) -> Hello:
        """The Hello of an unknown peer whose addresses lead nowhere."""
        salt = next(SALTS).to_bytes(SALT_BYTES, "big")
        keys = peer_keys(self.secret)
        peer_id = salt * 2 if keys is None else make_peer_id(keys.identity, salt)
        return Hello(peer_id, b"t" * 16, False, 0, "hostile", ("127.0.0.1:1",))


@pytest.fixture(scope="module", params=["no secret", "a secret"])
def hostile_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileRun]:
    secret = new_secret() if request.param == "a secret" else None
    arguments = []
    if secret is not None:
        arguments = ["--secret-file", write_private(tmp_path_factory.mktemp("secret") / "secret", secret)]
    with cluster(*arguments) as run:
        yield HostileRun(run, secret)


def peak_bytes(process: Process) -> int:
    """The largest resident size since `forget_peak`."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{process.name} is gone")


def forget_peak(process: Process) -> int:
    """Starts to count the peak anew. Returns the size at which it starts."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return peak_bytes(process)


@pytest.fixture(autouse=True)
def nobody_disturbed(hostile_run: HostileRun) -> Iterator[None]:
    """The members reduce while the test runs. No reduce fails, and no process grows or logs beyond its bounds."""
    members, master = hostile_run.members, hostile_run.run.master
    for child in members:
        child.start(harness.reduce_until_told)
        child.note()
    before = {process: (forget_peak(process), lines_of(process)) for process in (master, *members)}
    yield
    log = master.log
    try:
        until(
            lambda: log.read_text().count("hostile registered") == log.read_text().count("pending peer hostile "),
            "peace",
        )
    finally:
        members[0].tell()
        counts = {child.value() for child in members}
    assert len(counts) == 1
    first, second = (child.call(harness.view) for child in members)
    assert first[:2] == second[:2] and first[3] == second[3]
    for process, (size, lines) in before.items():
        bytes_max = MASTER_GROWTH_BYTES_MAX if process is master else MEMBER_GROWTH_BYTES_MAX
        assert peak_bytes(process) - size < bytes_max, process.name
        assert lines_of(process) - lines <= LOG_LINES_MAX, process.name
        assert "Traceback" not in texts_of(process), process.name


def texts_of(process: Process) -> str:
    return process.log.read_text()


def lines_of(process: Process) -> int:
    """Number of log lines of level INFO and above: a user who enables more gets more."""
    return sum(" DEBUG " not in line for line in texts_of(process).splitlines())


# --- What it says -----------------------------------------------------------------------------------------------------


def test_registers_a_thousand_times_on_one_connection(hostile_run: HostileRun) -> None:
    """The first Hello goes alone: the master may cut off a stranger that sends more before it is read (B1)."""
    with hostile_run.dealer() as dealer:
        dealer.send(encode(hostile_run.hello()))
        assert isinstance(receive(dealer), Welcome)
        for _ in range(999):
            dealer.send(encode(hostile_run.hello()))
        refusals = 0
        while refusals < 999:
            answer = receive(dealer)
            refusals += isinstance(answer, Refused) and answer.refusal is Refusal.MALFORMED


def test_registers_on_hundreds_of_connections(hostile_run: HostileRun) -> None:
    """More than may be pending: the master refuses the others."""
    count = limits.PENDING_PEERS_MAX + 50
    with contextlib.ExitStack() as stack:
        dealers = [stack.enter_context(hostile_run.dealer()) for _ in range(count)]
        for dealer in dealers:
            dealer.send(encode(hostile_run.hello()))
        answers = [receive(dealer) for dealer in dealers]
    assert 0 < sum(isinstance(answer, Welcome) for answer in answers) <= limits.PENDING_PEERS_MAX
    assert {answer.refusal for answer in answers if isinstance(answer, Refused)} == {Refusal.FULL}


NUMBER = 2**62
SPEC = CollectiveSpec(7, 10, 10, 0, 0, 0, 1)
NONSENSE: dict[str, PeerMessage] = {
    "a vote": Votes(NUMBER, (Vote(NUMBER, SPEC),)),
    "an attempt that is none": Report(NUMBER, NUMBER, True, b"?" * 16, digest=1),
    "a sync that is none": Report(NUMBER, NUMBER, False, b"?" * 16),
    "a topology vote": topology_vote(0, 0, TopologyKind.UPDATE, NUMBER),
    "a call that is none": Withdraw(NUMBER),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_votes_for_what_does_not_exist(hostile_run: HostileRun, what: str) -> None:
    """Before the attacker registers, and as a pending peer."""
    with hostile_run.dealer() as dealer:
        dealer.send(encode(NONSENSE[what]))
        answer = receive(dealer)
        assert isinstance(answer, Refused) and answer.refusal is Refusal.UNREGISTERED
        dealer.send(encode(hostile_run.hello()))
        while not isinstance(receive(dealer), Welcome):
            pass
        for _ in range(1000):
            dealer.send(encode(NONSENSE[what]))
        refusals = 0
        while refusals < 1000:
            answer = receive(dealer)
            refusals += isinstance(answer, Refused) and answer.refusal is Refusal.UNKNOWN_SESSION


def test_claims_the_ids_of_members(hostile_run: HostileRun) -> None:
    """With another token, on a second connection, as a peer of an earlier master, with a report."""
    for other_id, token in hostile_run.credentials:
        hello = hostile_run.hello()
        claims: list[PeerMessage] = [
            Hello(other_id, b"?" * 16, False, 0, "hostile", ("127.0.0.1:1",)),
            Hello(other_id, b"?" * 16, True, 0, "hostile", ("127.0.0.1:1",), NUMBER),
            Hello(other_id, token[::-1], True, 0, "hostile", ("127.0.0.1:1",), NUMBER, b"r" * 16),
        ]
        claims.append(RunReport(claims[1], 0, NUMBER, (), 0, 0, None, (), ()))  # type: ignore[arg-type]
        for claim in claims:
            with hostile_run.dealer() as dealer:
                dealer.send(encode(claim))
                answer = receive(dealer)
                assert isinstance(answer, Refused) and answer.refusal is Refusal.UNKNOWN_SESSION
                dealer.send(encode(hello))
                dealer.send(encode(claim))
                until_refused(dealer)


def until_refused(dealer: zmq.Socket[bytes]) -> None:
    while not isinstance(receive(dealer), Refused):
        pass


def test_never_reads_its_messages(hostile_run: HostileRun) -> None:
    """It says Hello over and over, which has longer answers. Its connection ends when too many of them wait for it."""
    data, lost = encode(hostile_run.hello()), "peer hostile lost its connection"
    before = texts_of(hostile_run.run.master).count(lost)

    def is_dropped_for_it(dealer: zmq.Socket[bytes]) -> bool:
        with contextlib.suppress(zmq.Again):
            for _ in range(1000):
                dealer.send(data, zmq.NOBLOCK)
        return texts_of(hostile_run.run.master).count(lost) > before

    with hostile_run.dealer() as dealer:
        dealer.disconnect(f"tcp://{hostile_run.address}")
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 4096)
        dealer.connect(f"tcp://{hostile_run.address}")  # Options set above apply to this connection.
        until(lambda: is_dropped_for_it(dealer), "the end of its connection")


# --- How much it sends ------------------------------------------------------------------------------------------------

PART = b"\x03" + struct.pack(">Q", 4 * MIB) + bytes(4 * MIB)
FLOODS = {
    "a frame of a gigabyte": (b"\x02" + struct.pack(">Q", 1 << 30), bytes(MIB)),
    "large parts": (b"", PART),
    "small parts": (b"", (b"\x01\x40" + bytes(64)) * 16384),
    "parts of no bytes": (b"", b"\x01\x00" * (MIB // 2)),
    "large messages": (b"", b"\x02" + struct.pack(">Q", limits.MESSAGE_BYTES_MAX) + bytes(limits.MESSAGE_BYTES_MAX)),
    "pings": (b"", b"\x04\x07\x04PING\x00\x00" * (MIB // 9)),
    "subscriptions": (b"", b"\x04\x0b\x09SUBSCRIBE\x61" * (MIB // 13)),
}


def flood(connection: socket.socket, first: bytes, rest: bytes) -> None:
    """Sends `first`, then `rest` until the other side takes no more."""
    with contextlib.suppress(OSError):  # The connection is closed, or its window is full (BlockingIOError).
        connection.sendall(first)
        connection.setblocking(False)
        for _ in range(64):
            connection.sendall(rest)
    connection.settimeout(harness.HANG_SECONDS)


@pytest.mark.parametrize("what", FLOODS)
def test_sends_without_end(hostile_run: HostileRun, what: str) -> None:
    """16 connections, until each is shut down. With a secret they get no further than the greeting."""
    first, rest = FLOODS[what]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw(hostile_run.address)) for _ in range(16)]
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(GREETING + READY)
        for connection in connections:
            flood(connection, first, rest)
        assert all(is_dropped(connection) for connection in connections)


@pytest.mark.parametrize("registers", [False, True])
def test_sends_messages_of_many_parts(hostile_run: HostileRun, registers: bool) -> None:
    """Messages made by ZeroMQ itself, encrypted if there is a secret."""
    with hostile_run.dealer() as dealer, dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        if registers:
            dealer.send(encode(hostile_run.hello()))
            while not isinstance(receive(dealer), Welcome):
                pass
        part = bytes(4 * MIB)
        for _ in range(500):
            dealer.send(part, zmq.SNDMORE, copy=False)
        dealer.send(b"")
        assert monitor.poll(int(harness.HANG_SECONDS * 1000)), "its connection stands"
        dealer.disable_monitor()
    assert " refused " in texts_of(hostile_run.run.master)  # The log may count the reason without naming it.


# --- How many connections it has --------------------------------------------------------------------------------------


def test_silent_connections_to_the_master(hostile_run: HostileRun) -> None:
    """Connections without a greeting, with part of one, and after one. All end, and meanwhile a newcomer registers."""
    beginnings = [b"", b"\xff", GREETING[:20], GREETING, GREETING + READY]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw(hostile_run.address)) for _ in range(300)]
        for connection, beginning in zip(connections, itertools.cycle(beginnings), strict=False):
            connection.sendall(beginning)
        with hostile_run.dealer() as dealer:
            dealer.send(encode(hostile_run.hello()))
            assert isinstance(receive(dealer), Welcome)
        assert all(is_dropped(connection) for connection in connections)


def test_silent_connections_to_the_peers(hostile_run: HostileRun) -> None:
    """More connections of each kind than a peer accepts at a time."""
    for address, peer_id, run_id in hostile_run.places:
        beginnings = [
            b"",
            *GARBAGE.values(),
            os.urandom(256),
            hello_of_nobody(run_id, b"!" * 16),
            hello_of_nobody(run_id, peer_id),
            hello_of_nobody(run_id, peer_id)[:-1],
            hello_of_nobody(bytes(16), peer_id),
        ]
        with contextlib.ExitStack() as stack:
            connections: list[socket.socket] = []
            for beginning in itertools.islice(itertools.cycle(beginnings), limits.HANDSHAKES_MAX + 100):
                connections.append(stack.enter_context(raw(address)))
                with contextlib.suppress(ConnectionError):
                    connections[-1].sendall(beginning)
            assert all(is_dropped(connection) for connection in connections)


def test_sends_without_end_to_the_peers(hostile_run: HostileRun) -> None:
    """The peer reads nothing after the hello: the kernel holds back the rest until the connection is closed."""
    with contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []
        for address, peer_id, run_id in hostile_run.places:
            for beginning in (b"", GREETING + READY, hello_of_nobody(run_id, peer_id)):
                connections.append(stack.enter_context(raw(address)))
                flood(connections[-1], beginning, bytes(MIB))
        assert all(is_dropped(connection) for connection in connections)


def test_a_newcomer_joins_after_all_that(hostile_run: HostileRun) -> None:
    """The members cannot reduce meanwhile, as they must vote for the newcomer."""
    members = hostile_run.members
    members[0].tell()
    assert len({child.value() for child in members}) == 1
    newcomer: Child = hostile_run.run.newcomer(members, **hostile_run.options)
    assert newcomer.call(harness.view)[1] == 3
    newcomer.call(harness.close)
    all_of(members, update_until_alone_with, 2)
    for child in members:
        child.start(harness.reduce_until_told)
        child.note()


def update_until_alone_with(peer: harness.Peer, size: int) -> None:
    while peer.comm.get_attribute(zpccl.Attribute.GLOBAL_WORLD_SIZE) > size:
        peer.comm.update_topology()
