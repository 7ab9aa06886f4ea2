"""The guard of a master's connections: real sockets, time as an argument."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import socket
import termios
from collections.abc import Iterator

import pytest
from e2e.harness import HANG_SECONDS, until
from interpreter import limited

from zpccl import limits
from zpccl.control.inflow import Duplicates, Inflow
from zpccl.observe.logs import RefusalLog
from zpccl.protocol.membership import Standing

START_NS = 10**12


class Bench:
    """A listener. An Inflow guards its accepted connections, as it guards those of libzmq."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        self.listener = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.standings: dict[bytes, Standing] = {}
        self.now_ns = START_NS
        duplicates = Duplicates()
        self.stack.callback(duplicates.close)
        self.inflow = Inflow(
            self.listener.getsockname()[1],
            False,
            lambda routing_id: self.standings.get(routing_id, Standing.STRANGER),
            RefusalLog(logging.getLogger("zpccl.test")),
            duplicates,
        )

    def connect(self, routing_id: bytes = b"", standing: Standing = Standing.STRANGER) -> Pair:
        pair = self.accept()
        self.inflow.opened(pair.ours.fileno(), self.now_ns)
        if routing_id:
            self.standings[routing_id] = standing
            self.inflow.named(pair.ours.fileno(), routing_id)
        return pair

    def accept(self) -> Pair:
        """A connection that the guard does not know yet."""
        theirs = self.stack.enter_context(socket.create_connection(self.listener.getsockname(), HANG_SECONDS))
        ours = self.stack.enter_context(self.listener.accept()[0])
        return Pair(theirs, ours)

    def look(self, after_ns: int = limits.SECOND) -> None:
        self.now_ns += after_ns
        self.inflow.look(self.now_ns)


class Pair:
    """Both ends of a connection."""

    def __init__(self, theirs: socket.socket, ours: socket.socket) -> None:
        self.theirs, self.ours = theirs, ours

    def say(self, size: int) -> None:
        """Sends `size` bytes and reads them, as libzmq does."""
        for begin in range(0, size, 1 << 16):
            piece = min(1 << 16, size - begin)
            self.theirs.sendall(bytes(piece))
            while piece:
                piece -= len(self.ours.recv(piece))

    def is_cut(self) -> bool:
        self.theirs.setblocking(False)
        try:
            return self.theirs.recv(1) == b""
        except BlockingIOError:
            return False
        finally:
            self.theirs.settimeout(HANG_SECONDS)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.stack:
        yield bench


def test_a_stranger_may_say_hello_and_not_much_more(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    pair = bench.connect()
    pair.say(limits.STRANGER_BYTES_MAX)
    bench.look()
    assert not pair.is_cut()
    pair.say(1)
    bench.look()
    assert pair.is_cut()
    assert [r.getMessage() for r in caplog.records] == [
        f"refused 127.0.0.1:{pair.theirs.getsockname()[1]}: "
        f"it has sent {limits.STRANGER_BYTES_MAX + 1} bytes that belong to no complete message, too many for a stranger"
    ]


@pytest.mark.parametrize(
    ("standing", "bytes_max"),
    [(Standing.PENDING, limits.PENDING_BYTES_MAX), (Standing.MEMBER, limits.MEMBER_BYTES_MAX)],
)
def test_what_was_delivered_is_held_no_more(bench: Bench, standing: Standing, bytes_max: int) -> None:
    pair = bench.connect(b"a", standing)
    for _ in range(3):
        pair.say(bytes_max)
        bench.look()
        bench.inflow.delivered(b"a", bytes_max)
    assert not pair.is_cut()
    pair.say(bytes_max + 1)
    bench.look()
    assert pair.is_cut()


def test_heartbeats_are_no_part_of_messages(bench: Bench) -> None:
    """This holds for ever: a member that sends is never shut down for its heartbeats."""
    pair = bench.connect(b"a", Standing.MEMBER)
    beat = limits.HEARTBEAT_BYTES_PER_SECOND_MAX
    hours = 2 * limits.MEMBER_BYTES_MAX // (3600 * beat)
    for _ in range(hours):
        pair.say(3600 * beat)
        bench.look(3600 * limits.SECOND)
        bench.inflow.drained()
        pair.say(100)
        bench.inflow.delivered(b"a", 100)
        bench.inflow.drained()
        bench.look()
    assert not pair.is_cut()


def test_heartbeats_are_only_so_many(bench: Bench) -> None:
    """Messages between heartbeats do not make a flood harmless."""
    pair = bench.connect(b"a", Standing.MEMBER)
    count = 0
    while not pair.is_cut():
        pair.say(100)
        bench.inflow.delivered(b"a", 100)
        bench.inflow.drained()
        pair.say(limits.MIB)
        bench.look()
        bench.inflow.drained()
        count += 1
    assert count == limits.MEMBER_BYTES_MAX // limits.MIB + 1


def test_a_message_that_had_waited_says_nothing_of_what_came_after_it(bench: Bench) -> None:
    """The socket was not empty: its bytes may belong to a message that is not complete."""
    pair = bench.connect(b"a", Standing.MEMBER)
    pair.say(100 + 4096)
    bench.look()
    bench.inflow.delivered(b"a", 100)
    pair.say(limits.MEMBER_BYTES_MAX - 4096)
    bench.look()
    assert not pair.is_cut()
    pair.say(1)
    bench.look()
    assert pair.is_cut()


def test_who_does_not_register_goes_after_a_while(bench: Bench) -> None:
    silent, member = bench.connect(), bench.connect(b"a", Standing.MEMBER)
    bench.look()
    bench.look(limits.STRANGER_TIMEOUT_NS - limits.SECOND - 1)
    assert not silent.is_cut()
    bench.look(limits.SECOND)
    assert silent.is_cut() and not member.is_cut()


def test_who_waits_for_a_recovering_master_stays(bench: Bench) -> None:
    """L3: a restarted master may wait for a quorum for longer than a stranger may stay."""
    pair = bench.connect(b"a", Standing.EXPECTED)
    bench.look()
    for _ in range(limits.MINORITY_WAIT_NS // limits.SECOND):
        bench.look(limits.SECOND)
        assert not pair.is_cut()
    bench.look(limits.EXPECTED_TIMEOUT_NS)
    assert pair.is_cut()


def test_who_is_removed_from_the_run_goes_after_a_while(bench: Bench) -> None:
    pair = bench.connect(b"a", Standing.MEMBER)
    pair.say(limits.MIB)
    bench.look(60 * limits.SECOND)
    bench.inflow.delivered(b"a", limits.MIB)
    bench.standings[b"a"] = Standing.STRANGER
    pair.say(10)
    bench.look()
    assert not pair.is_cut()
    bench.look(limits.STRANGER_TIMEOUT_NS)
    assert pair.is_cut()


def test_too_many_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STRANGERS_MAX", 3)
    bench = Bench()
    with bench.stack:
        member, *strangers = bench.connect(b"a", Standing.MEMBER), *(bench.connect() for _ in range(5))
        bench.look()
        assert [pair.is_cut() for pair in strangers] == [True, True, False, False, False] and not member.is_cut()


def test_strangers_do_not_keep_the_last_descriptors(bench: Bench) -> None:
    """A connection that comes while all descriptors are in use is recorded, and later ends like earlier ones."""
    before, last = bench.connect(), bench.accept()
    os.close(free := os.dup(0))
    with limited(resource.RLIMIT_NOFILE, free):
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        bench.inflow.opened(last.ours.fileno(), bench.now_ns)
        bench.look(limits.STRANGER_TIMEOUT_NS)
        assert before.is_cut() and last.is_cut()


def test_strangers_together_have_a_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: the connections that hold most end first, as many as necessary."""
    monkeypatch.setattr(limits, "OUTSIDERS_BYTES_MAX", 10_000)
    pairs = [bench.connect() for _ in range(4)]
    for pair, size in zip(pairs, (3000, 1000, 6000, 4000), strict=True):
        pair.say(size)
    bench.look()
    assert [pair.is_cut() for pair in pairs] == [False, False, True, False]


def test_who_does_not_read(bench: Bench) -> None:
    pair = bench.connect(b"a", Standing.PENDING)
    size = limits.MIB
    pair.ours.setblocking(False)
    data = bytes(size)
    sent = waiting = 0
    while bench.inflow.may_send(b"a", size):  # libzmq writes what the kernel accepts, and keeps the rest.
        waiting += size
        with contextlib.suppress(BlockingIOError):
            while waiting:
                count = pair.ours.send(data[:waiting])
                sent, waiting = sent + count, waiting - count
    assert limits.OUTSIDER_UNSENT_BYTES_MAX <= sent + waiting <= limits.OUTSIDER_UNSENT_BYTES_MAX + (64 << 20)
    while sent:
        sent -= len(pair.theirs.recv(1 << 20))
    until(lambda: bench.inflow.may_send(b"a", 0), "acknowledgement of what was read")
    assert bench.inflow.may_send(b"unknown", size)


def test_acknowledged_heartbeats_make_no_room_for_messages(bench: Bench) -> None:
    """B1: nobody counts heartbeats that went to the connection for days."""
    pair = bench.connect(b"a", Standing.PENDING)
    beats = bytes(2 * limits.OUTSIDER_UNSENT_BYTES_MAX)
    for begin in range(0, len(beats), 1 << 16):
        pair.ours.sendall(beats[begin : begin + (1 << 16)])
        assert pair.theirs.recv(1 << 16, socket.MSG_WAITALL)
    until(lambda: fcntl.ioctl(pair.ours, termios.TIOCOUTQ, bytes(4)) == bytes(4), "acknowledgement of the last of them")
    bench.look()
    count = 0
    while bench.inflow.may_send(b"a", limits.MIB):
        count += 1
    assert count <= limits.OUTSIDER_UNSENT_BYTES_MAX // limits.MIB


def test_the_descriptor_of_another_file_is_left_alone(bench: Bench) -> None:
    """libzmq closes its descriptors at any time, and another file may get the number next."""
    pair = bench.connect()
    pair.say(limits.STRANGER_BYTES_MAX + 1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = pair.ours.fileno()
        os.dup2(ours.fileno(), number)
        bench.look(limits.STRANGER_TIMEOUT_NS)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
        bench.inflow.opened(number, bench.now_ns)  # It was not accepted at the master's port.
        assert bench.inflow.deadline_ns() is None


def test_what_is_left_of_a_connection_is_known_until_the_socket_is_empty(bench: Bench) -> None:
    """This holds if the connection is shut down before its first message is read, and after that."""
    unnamed, named = bench.connect(), bench.connect(b"named")
    for pair in (unnamed, named):
        pair.say(limits.STRANGER_BYTES_MAX + 1)
    bench.look()
    assert bench.inflow.is_cut(b"named") and not bench.inflow.is_cut(b"unnamed")
    bench.inflow.named(unnamed.ours.fileno(), b"unnamed")
    assert bench.inflow.is_cut(b"unnamed")
    bench.inflow.closed(named.ours.fileno())
    assert bench.inflow.is_cut(b"named")
    bench.inflow.drained()
    assert not bench.inflow.is_cut(b"named") and bench.inflow.is_cut(b"unnamed")


def close_strangers(bench: Bench, count: int) -> None:
    """Each connection has another descriptor: it is too late to ask the kernel about them."""
    for descriptor in range(1000, 1000 + count):
        bench.inflow.opened(descriptor, bench.now_ns)
        bench.inflow.closed(descriptor)


def test_what_closed_strangers_have_left_is_read_before_others_come(bench: Bench) -> None:
    """B1: nobody knows how much libzmq holds for them. Connected peers stay connected."""
    bench.inflow.listening(bench.listener.fileno())
    stays, goes = bench.connect(), bench.connect()
    close_strangers(bench, limits.CLOSED_STRANGERS_MAX)
    assert not bench.inflow.is_holding_back
    bench.inflow.closed(goes.ours.fileno())
    with pytest.raises(TimeoutError):
        socket.create_connection(bench.listener.getsockname(), 0.3)
    stays.say(100)
    bench.inflow.drained()
    assert not bench.inflow.is_holding_back
    bench.connect()


def test_strangers_that_close_and_are_read_keep_nobody_out(bench: Bench) -> None:
    bench.inflow.listening(bench.listener.fileno())
    for _ in range(3):
        close_strangers(bench, limits.CLOSED_STRANGERS_MAX)
        bench.inflow.drained()
    assert not bench.inflow.is_holding_back


def test_members_that_lose_their_connections_keep_nobody_out(bench: Bench) -> None:
    """L1, S6: they come back, however busy the master is."""
    bench.inflow.listening(bench.listener.fileno())
    members = [bench.connect(b"%d" % number, Standing.MEMBER) for number in range(20)]
    for member in members:
        member.say(100)
    bench.look()
    close_strangers(bench, limits.CLOSED_STRANGERS_MAX)
    for member in members:
        bench.inflow.closed(member.ours.fileno())
    assert not bench.inflow.is_holding_back


def test_the_port_is_left_alone_where_its_descriptor_is_another_socket_s(bench: Bench) -> None:
    """libzmq has closed the port, and the next socket has its number."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bench.inflow.listening(number := listener.fileno())
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert other.fileno() == number
        close_strangers(bench, limits.CLOSED_STRANGERS_MAX + 1)
        socket.create_connection(other.getsockname(), HANG_SECONDS).close()
    assert not bench.inflow.is_holding_back


def test_it_sleeps_while_there_are_no_connections(bench: Bench) -> None:
    assert bench.inflow.deadline_ns() is None
    pair = bench.connect()
    bench.look()
    assert bench.inflow.deadline_ns() == bench.now_ns + limits.INFLOW_INTERVAL_NS + 50_000
    bench.inflow.closed(pair.ours.fileno())
    assert bench.inflow.deadline_ns() is None
