"""The shell of a peer: how it uses the sockets of its session."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import zmq
from e2e.harness import loop_of, until
from e2e.local import local_run
from e2e.strangers import GREETING, READY, server
from msgspec.structs import replace

import zpccl
from zpccl import arguments, limits
from zpccl.control import peer_loop
from zpccl.control.calls import PendingCall
from zpccl.control.link_ends import LinkEnds
from zpccl.control.links import NewConnection, NewLink
from zpccl.control.peer_loop import PeerLoop, _Link
from zpccl.engine.engine import (
    DIGEST_CHANNEL,
    Body,
    ConnectionLost,
    Engine,
    EngineEvent,
    LinkStats,
    MessageReceived,
    ReduceDone,
    ReducePlan,
)
from zpccl.errors import Kicked, PeerLost
from zpccl.protocol import events
from zpccl.protocol.effects import EndReduce, Reject, Resolve, Send, StartReduce, UseMaster
from zpccl.protocol.messages import (
    Hello,
    Kick,
    Leave,
    Member,
    PathSample,
    Reducing,
    Withdraw,
    decode_peer_message,
    encode,
)
from zpccl.protocol.peer import State
from zpccl.protocol.session import SocketPhase
from zpccl.types import ReduceOp

WAIT_MS = 10_000
NOW_NS = 10**15


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    """A socket that replaces a master."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, WAIT_MS)
        router.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        router.bind_to_random_port("tcp://127.0.0.1")
        yield router


@pytest.fixture
def loop(router: zmq.Socket[bytes]) -> Iterator[PeerLoop]:
    """The loop of a peer that connects. Its thread is not started: the test runs the loop."""
    address = router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
    loop = zpccl.Communicator(f"{address},127.0.0.1:1", listen="127.0.0.1")._make_loop()
    loop._begin()
    loop.call([PendingCall()], connect_tries=1)
    loop._run_once({loop._wakeup.fileno()}, NOW_NS)
    loop._waiter.register(loop._wakeup.fileno())
    loop._socket.connect(loop._endpoints[0])
    yield loop
    loop._shut_down()


def run_until(loop: PeerLoop, condition: Callable[[], bool]) -> None:
    while not condition():
        ready = loop._waiter.wait(WAIT_MS)
        assert ready, "nothing comes"
        loop._run_once(ready, NOW_NS)


def is_up(loop: PeerLoop) -> Callable[[], bool]:
    return lambda: loop._session.phase is SocketPhase.UP


def first_message(router: zmq.Socket[bytes]) -> tuple[bytes, object]:
    sender, data = router.recv_multipart()
    return sender, decode_peer_message(data)


def test_nothing_waits_for_a_connection(loop: PeerLoop, router: zmq.Socket[bytes]) -> None:
    """Hello is the first message on each connection."""
    loop._perform([Send(Leave())], NOW_NS)
    run_until(loop, is_up(loop))
    assert isinstance(first_message(router)[1], Hello)


def test_what_came_before_the_end_is_heard(loop: PeerLoop, router: zmq.Socket[bytes]) -> None:
    """The master sends a reason and closes. That last message is not lost, whichever of the two is noticed first."""
    run_until(loop, is_up(loop))
    router.send_multipart([first_message(router)[0], encode(Kick(0, "enough"))])
    router.close()
    assert loop._monitor.poll(WAIT_MS)
    loop._run_once({loop._monitor}, NOW_NS)
    assert isinstance(loop.error, Kicked) and "enough" in str(loop.error)


def test_a_master_that_does_not_read_is_connected_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: messages that do not fit into the full queue would never be sent, while heartbeats still get through."""
    monkeypatch.setattr(limits, "CONTROL_QUEUE_MESSAGES_MAX", 2)
    with server(GREETING + READY, closes=False) as address:
        loop = zpccl.Communicator(address, listen="127.0.0.1")._make_loop()
        try:
            loop._begin()
            loop.call([PendingCall()], connect_tries=5)
            loop._run_once({loop._wakeup.fileno()}, NOW_NS)
            loop._socket.connect(loop._endpoints[0])
            run_until(loop, is_up(loop))
            first = loop._socket
            for _ in range(1000):
                loop._outgoing.add(None, bytes(limits.MIB), NOW_NS, may_wait=False)
                loop._flush(NOW_NS)
                if not is_up(loop)():
                    break
            assert loop._session.phase is SocketPhase.PAUSED and first.closed
            loop._on_session(events.Tick(), NOW_NS + limits.SECOND)
            run_until(loop, is_up(loop))
        finally:
            loop._shut_down()


def test_every_connection_has_a_socket_of_its_own(loop: PeerLoop, router: zmq.Socket[bytes]) -> None:
    run_until(loop, is_up(loop))
    first, socket = first_message(router)[0], loop._socket
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    with router.get_monitor_socket(zmq.EVENT_CLOSED) as monitor:
        router.unbind(endpoint)
        assert monitor.poll(WAIT_MS), "libzmq closes the port some time later"
        router.disable_monitor()
    loop._on_session(events.SocketBroke(), NOW_NS)
    router.bind(endpoint)
    loop._on_session(events.Tick(), NOW_NS + limits.SECOND)
    assert loop._socket is not socket and socket.closed
    run_until(loop, is_up(loop))
    second, hello = first_message(router)
    assert second != first and isinstance(hello, Hello)


def test_what_may_wait_is_sent_with_the_next_message(loop: PeerLoop, router: zmq.Socket[bytes]) -> None:
    run_until(loop, is_up(loop))
    first_message(router)
    loop._perform([Send(Withdraw(1), may_wait=True)], NOW_NS)
    loop._flush(NOW_NS + limits.SEND_HOLD_NS - 1)
    loop._perform([Send(Withdraw(2)), Send(Withdraw(3), may_wait=True)], NOW_NS)
    loop._flush(NOW_NS)
    _, *parts = router.recv_multipart()
    assert [decode_peer_message(part) for part in parts] == [Withdraw(1), Withdraw(2), Withdraw(3)]


def test_what_may_wait_does_not_wait_long(loop: PeerLoop, router: zmq.Socket[bytes]) -> None:
    run_until(loop, is_up(loop))
    first_message(router)
    loop._perform([Send(Withdraw(1), may_wait=True)], NOW_NS)
    loop._perform([Send(Withdraw(2), may_wait=True)], NOW_NS + 1)
    assert loop._deadline_ns() == NOW_NS + limits.SEND_HOLD_NS
    loop._run_once(set(), NOW_NS + limits.SEND_HOLD_NS)
    assert len(router.recv_multipart()) == 3
    assert loop._outgoing.deadline_ns is None


def test_who_has_nothing_to_say_says_so(
    loop: PeerLoop, router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1: otherwise the master would count its heartbeats as one endless message, and shut the connection down."""
    run_until(loop, is_up(loop))
    first_message(router)
    monkeypatch.setattr(loop._machine, "deadline_ns", lambda: None)
    monkeypatch.setattr(loop._machine, "handle", lambda event, now_ns: [])
    for turn in (1, 2):
        due_ns = NOW_NS + turn * limits.PEER_SILENCE_NS
        assert loop._deadline_ns() == due_ns
        loop._run_once(set(), due_ns, is_due=True)
        assert router.recv_multipart()[1:] == [b""]
    loop._session.phase = SocketPhase.ASKING
    assert loop._deadline_ns() is None
    loop._run_once(set(), NOW_NS + 9 * limits.PEER_SILENCE_NS, is_due=True)
    assert not router.poll(100)


def test_what_may_wait_waits_for_few_others(loop: PeerLoop, router: zmq.Socket[bytes]) -> None:
    """B1. Their decisions bring plans ahead, which calls use up in the meantime."""
    run_until(loop, is_up(loop))
    first_message(router)
    for number in range(limits.SEND_HELD_MAX):
        loop._flush(NOW_NS)
        assert loop._outgoing.deadline_ns == (NOW_NS + limits.SEND_HOLD_NS if number else None)
        loop._perform([Send(Withdraw(number), may_wait=True)], NOW_NS)
    loop._flush(NOW_NS)
    assert loop._outgoing.deadline_ns is None
    assert len(router.recv_multipart()) == 1 + limits.SEND_HELD_MAX


def test_what_waits_is_not_sent_on_another_connection(loop: PeerLoop, router: zmq.Socket[bytes]) -> None:
    """There the peer sends everything anew, Hello first."""
    run_until(loop, is_up(loop))
    first_message(router)
    loop._perform([Send(Withdraw(1), may_wait=True)], NOW_NS)
    loop._on_session(UseMaster(0), NOW_NS)
    run_until(loop, is_up(loop))
    assert isinstance(first_message(router)[1], Hello)


def test_messages_that_wait_are_not_too_many_at_once(loop: PeerLoop, router: zmq.Socket[bytes]) -> None:
    """B1: the master accepts no more."""
    run_until(loop, is_up(loop))
    first_message(router)
    count = limits.MESSAGE_PARTS_MAX
    for number in range(count + 1):
        loop._perform([Send(Withdraw(number), may_wait=True)], NOW_NS)
    loop._flush(NOW_NS)
    assert [len(router.recv_multipart()) for _ in range(2)] == [count + 1, 2]


def test_an_address_that_libzmq_does_not_take(loop: PeerLoop) -> None:
    """The try fails. For the first master, connect() itself refuses the address."""
    loop._endpoints = (loop._endpoints[0], "tcp://no address")
    loop._on_session(UseMaster(1), NOW_NS)
    assert loop._session.phase is SocketPhase.PAUSED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # About objects that nobody has closed.
def test_no_thread_is_left_where_descriptors_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No port is left either: each new try would leave one more."""

    def fail() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(peer_loop, "Waiter", fail)
    threads = threading.active_count()
    with pytest.raises(OSError, match="too many"):
        zpccl.Communicator("127.0.0.1:1", listen="127.0.0.1").connect()
    assert threading.active_count() == threads


def test_the_greeting_of_the_server_ends_the_asking(loop: PeerLoop, router: zmq.Socket[bytes]) -> None:
    """L1: this master has no secret either, so the only remaining reason is that it is not a master."""
    loop._on_session(events.TcpConnected(), NOW_NS)
    loop._on_session(events.HandshakeFailed(), NOW_NS)  # A simulated failure.
    assert loop._session.phase is SocketPhase.ASKING
    run_until(loop, lambda: loop._session.phase is SocketPhase.PAUSED)


class Told(Engine):
    """An engine that has told a digest of which the loop has not heard."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = [ReduceDone(1, 0, 7, 0, 0, None, has_told=True)]

    def withhold_digest(self, attempt_id: int) -> bool:
        assert attempt_id == 1
        return bool(self.waits)

    def poll(self, events_max: int = 64, channel_id: int | None = None) -> list[EngineEvent]:
        taken, self.waits = self.waits, []
        return list(taken)


def test_before_a_withdrawal_the_machine_hears_what_was_told(loop: PeerLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: otherwise the machine withdraws a call that others have committed."""
    heard: list[events.PeerEvent] = []
    monkeypatch.setattr(loop, "_handle", lambda event, now_ns: heard.append(event))
    with Told() as engine:
        monkeypatch.setattr(loop, "engine", engine)
        call = running(loop, 1)
        loop.withdraw(call, timed_out=True)
        loop._run_once({loop._wakeup.fileno()}, NOW_NS)
    assert heard == [events.ReduceDone(1, 7, has_told=True), events.CallWithdrawn(11, True)]


def test_before_a_message_of_the_master_the_machine_hears_what_was_told(
    loop: PeerLoop, router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: others have committed a call with what was told. If their commit came first, this peer would leave."""
    run_until(loop, is_up(loop))
    heard: list[events.PeerEvent] = []
    monkeypatch.setattr(loop, "_handle", lambda event, now_ns: heard.append(event))
    with Told() as engine:
        monkeypatch.setattr(loop, "engine", engine)
        router.send_multipart([first_message(router)[0], encode(Kick(0, "enough"))])
        assert loop._socket.poll(WAIT_MS)
        loop._run_once({loop._socket}, NOW_NS)
    assert heard == [events.ReduceDone(1, 7, has_told=True), events.MasterMessageReceived(Kick(0, "enough"))]


FLOODED_COUNT = 3 * limits.ENGINE_MESSAGES_TAKEN_MAX


class Flooded(Engine):
    """An engine with messages without end, and before them the results of many attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[EngineEvent] = [ReduceDone(number, 0, 7, 0, 0, None) for number in range(FLOODED_COUNT)]
        self.messages_taken = 0

    def poll(self, events_max: int = 64, channel_id: int | None = None) -> list[EngineEvent]:
        taken, self.waits = self.waits[:events_max], self.waits[events_max:]
        messages = [MessageReceived(SLOW.peer_id, DIGEST_CHANNEL, Digest()) for _ in range(events_max - len(taken))]
        self.messages_taken += len(messages)
        return [*taken, *messages]


class Digest(Body):
    """A digest of another peer."""

    def __init__(self) -> None:
        pass

    def read(self) -> bytes:
        return bytes(24)


def test_who_sends_messages_all_the_time_does_not_hold_up_the_master_s(
    loop: PeerLoop, router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: a pending peer has links, too. All results are heard nevertheless."""
    run_until(loop, is_up(loop))
    heard: list[events.PeerEvent] = []
    monkeypatch.setattr(loop, "_handle", lambda event, now_ns: heard.append(event))
    engine = Flooded()
    with engine:
        monkeypatch.setattr(loop, "engine", engine)
        router.send_multipart([first_message(router)[0], encode(Kick(0, "enough"))])
        assert loop._socket.poll(WAIT_MS)
        loop._run_once({loop._socket, engine.fileno()}, NOW_NS)
    place = heard.index(events.MasterMessageReceived(Kick(0, "enough")))
    assert sum(isinstance(event, events.ReduceDone) for event in heard[:place]) == FLOODED_COUNT
    assert engine.messages_taken <= 1 + limits.ENGINE_MESSAGES_TAKEN_MAX


def test_after_a_stop_the_machine_hears_what_came_before_it_hears_that_time_has_run_out(
    loop: PeerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: else a peer that was stopped releases a call whose answer has come, and leaves when it reads that answer."""
    run_until(loop, is_up(loop))
    heard: list[events.PeerEvent] = []
    monkeypatch.setattr(loop, "_handle", lambda event, now_ns: heard.append(event))
    monkeypatch.setattr(loop._machine, "deadline_ns", lambda: NOW_NS)

    def run_at(now_ns: int) -> list[events.PeerEvent]:
        loop._run_once(set(), now_ns, is_due=loop._is_due(loop._deadline_ns(), now_ns))
        return heard

    assert run_at(NOW_NS + limits.LATE_TICK_NS) == [events.Tick()]
    heard.clear()
    woken_ns = NOW_NS + 100 * limits.SECOND
    assert run_at(woken_ns) == []
    assert loop._deadline_ns() == woken_ns + limits.LATE_TICK_NS
    assert run_at(woken_ns + limits.SECOND) == [events.Tick()], "a thread that is always late would never hear of time"


def test_after_a_stop_the_peer_dials_at_once(loop: PeerLoop) -> None:
    """L1: a peer that stays away for half a second is removed. A stop during the pause has taken a part of that."""
    run_until(loop, is_up(loop))
    loop._on_session(events.SocketBroke(), NOW_NS)
    woken_ns = NOW_NS + limits.SECOND
    loop._run_once(set(), woken_ns, is_due=loop._is_due(loop._deadline_ns(), woken_ns))
    assert loop._session.phase is SocketPhase.DIALLING


class Restoring(Engine):
    """An engine that restores old contents when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.threads: list[str] = []

    def end_reduce(self, attempt_id: int, *, commit: bool) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.go_on.wait(WAIT_MS / 1000)


def link_of(connections: int) -> _Link:
    return _Link(1, 1, LinkEnds("", "", "eth0", connections, "cubic", is_local=False))


def running(loop: PeerLoop, attempt_id: int, count: int = limits.SMALL_TENSOR_BYTES) -> PendingCall:
    """A call with a running attempt."""
    array = np.zeros(count, np.uint8)
    call = arguments.all_reduce(array, array, ReduceOp.SUM, 0, None, None, "auto")
    call.call_id = 10 + attempt_id
    loop._calls[10 + attempt_id] = call
    loop._attempts[attempt_id] = 10 + attempt_id
    return call


@pytest.fixture
def engine(loop: PeerLoop) -> Restoring:
    loop.engine.close()
    loop.engine = Restoring()
    return loop.engine


def test_others_are_answered_while_the_memory_of_one_is_restored(loop: PeerLoop, engine: Restoring) -> None:
    """S2: another thread restores it. The call's own answer waits for that, even if the call is given up meanwhile."""
    large, small = running(loop, 1), running(loop, 2, count=1)
    loop._perform([EndReduce(1, commit=False), Reject(11, PeerLost("gone"))], NOW_NS)
    loop.withdraw(large, timed_out=False)
    loop._run_once({loop._wakeup.fileno()}, NOW_NS)
    loop._perform([Resolve(12, 3)], NOW_NS)
    assert small.future.result() == 3 and not large.future.done()
    engine.go_on.set()
    run_until(loop, large.future.done)
    assert isinstance(large.future.exception(), PeerLost) and threading.current_thread().name not in engine.threads


def test_who_gives_up_before_its_attempt_begins_tells_nothing(
    loop: PeerLoop, engine: Restoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: the attempt waits for the memory of the attempt before it, which is being restored."""
    plans: list[ReducePlan] = []
    monkeypatch.setattr(engine, "start_reduce", plans.append)
    call = running(loop, 1)
    how = Reducing((loop.options.peer_id, b"o" * 16), 4096)
    loop._perform([EndReduce(1, commit=False), StartReduce(11, 2, how, tells_digest=True)], NOW_NS)
    loop.withdraw(call, timed_out=True)
    loop._run_once({loop._wakeup.fileno()}, NOW_NS)
    engine.go_on.set()
    run_until(loop, lambda: bool(plans))
    assert (plans[0].attempt_id, plans[0].digest_channel) == (2, 0)


def test_what_is_small_is_restored_at_once(loop: PeerLoop, engine: Restoring) -> None:
    """That costs less than to wake another thread."""
    engine.go_on.set()
    small = running(loop, 1, count=1)
    loop._perform([EndReduce(1, commit=False), Reject(11, PeerLost("gone"))], NOW_NS)
    assert small.future.done() and engine.threads == [threading.current_thread().name]


def test_the_end_waits_for_memory_that_is_restored(loop: PeerLoop, engine: Restoring) -> None:
    """S4: a call is answered only after its memory is restored, even if it is given up at that moment."""
    large = running(loop, 1)
    loop._perform([EndReduce(1, commit=False), Reject(11, PeerLost("gone"))], NOW_NS)
    ending = threading.Thread(target=loop._shut_down)
    ending.start()
    while not loop._is_closing:
        assert ending.is_alive()
    loop.withdraw(large, timed_out=False)
    assert not large.future.done()
    engine.go_on.set()
    ending.join(WAIT_MS / 1000)
    assert isinstance(large.future.exception(), PeerLost)


# --- Connections that stand by ----------------------------------------------------------------------------------------


class Choosing(Engine):
    """An engine that has one link with 16 connections, and records how many are to be used."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[int] = []

    def link_state(self, peer: bytes) -> LinkStats:
        return LinkStats(1, 16, 16, 0, 0, [], [], [])

    def set_senders(self, peer: bytes, senders: int) -> None:
        self.chosen.append(senders)


SLOW = PathSample(b"s" * 16, 10**6, 10**6, round_trip_us=50_000, is_limited=True)
QUICK = replace(SLOW, sent_bytes=10**9)


@pytest.mark.parametrize(
    ("path", "count", "chosen"),
    [
        (SLOW, 0, [7]),
        (QUICK, 0, []),
        (replace(SLOW, peer_id=b"g" * 16), 0, []),  # The link is gone.
        (SLOW, 16, []),  # The user chose the number.
    ],
    ids=["slow", "quick", "gone", "of the user"],
)
def test_slow_paths_leave_connections_unused(
    loop: PeerLoop, path: PathSample, count: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_handle", lambda event, now_ns: None)
    monkeypatch.setattr(loop, "_chooses_senders", count == 0)
    monkeypatch.setattr(loop._rates, "end", lambda attempt_id: (path,))
    loop._links[SLOW.peer_id] = link_of(16)
    engine = Choosing()
    with engine:
        monkeypatch.setattr(loop, "engine", engine)
        loop._on_engine_event(ReduceDone(1, 0, 7, 0, 0, None, has_told=True), NOW_NS)
    assert engine.chosen == chosen


LOSSY = PathSample(b"s" * 16, 180 * 10**6, 5 * 10**6, round_trip_us=100_000, is_limited=True)


@pytest.mark.parametrize(
    ("open_count", "descriptors", "dialled"),
    [
        (64, 1024, range(64, 128)),
        (100, 1024, range(100, 128)),
        (128, 1024, ()),
        (64, 255, ()),  # Half of the descriptors are for others.
    ],
)
def test_a_path_that_loses_packets_gets_more_connections(
    loop: PeerLoop, open_count: int, descriptors: int, dialled: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost connections of the 64 with which it was opened are dialled again in any case."""
    generations = [0] * 64 + [1] * (open_count - 64) + [0] * (128 - open_count)
    state = LinkStats(1, open_count, 128, 0, 0, [], [], generations)
    redialled: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    monkeypatch.setattr(loop._broker, "redial", lambda peer, number, index, generation: redialled.append(index))
    loop._links[LOSSY.peer_id] = link_of(64)
    with monkeypatch.context() as patch:
        patch.setattr(loop.engine, "link_state", lambda peer: state)
        patch.setattr(loop.engine, "set_senders", lambda peer, senders: None)
        loop._choose_senders([LOSSY])
    del loop._links[LOSSY.peer_id]
    assert redialled == list(dialled)


def test_a_connection_more_without_descriptors_is_given_up(
    loop: PeerLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise it is dialled for ever, and each time the other end reports that it has lost it."""
    ours, theirs = socket.socketpair()
    peer, redialled = LOSSY.peer_id, list[int]()
    state = LinkStats(1, 64, 128, 0, 0, [], [], [0] * 128)
    loop._links[peer] = link_of(64)
    with theirs, monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(resource, "getrlimit", lambda _: (128, 128))
        patch.setattr(loop._broker, "redial", lambda peer, number, index, generation: redialled.append(index))
        patch.setattr(loop.engine, "link_state", lambda peer: state)
        loop._add_connection(NewConnection(peer, 1, 70, 1, ours, None, b""), NOW_NS)
        loop._on_engine_event(ConnectionLost(peer, 1, 80, 1, -errno.ECONNRESET), NOW_NS)
    del loop._links[peer]
    assert ours.fileno() < 0
    assert redialled == [80]
    assert not caplog.records


def test_a_neighbour_that_connects_all_the_time_does_not_fill_the_log(
    loop: PeerLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It sets its link up again and again, or adds connections to it in place of those that it has ended."""
    monkeypatch.setattr(limits, "LOG_LINES_MAX", 8)
    monkeypatch.setattr(loop._machine, "wants_link", lambda peer: True)
    monkeypatch.setattr(loop._machine, "neighbour_name", lambda peer: "far")
    monkeypatch.setattr(loop, "_handle", lambda event, now_ns: None)
    monkeypatch.setattr(loop.engine, "add_connection", lambda *arguments: os.close(arguments[4]))
    with caplog.at_level(logging.INFO), contextlib.ExitStack() as theirs:
        for number in range(10):
            (ours, their), (more, other) = socket.socketpair(), socket.socketpair()
            theirs.enter_context(their)
            loop._take(NewLink(LOSSY.peer_id, number, [ours], None), number)
            loop._take(NewConnection(LOSSY.peer_id, number, 0, 1, more, None, b""), number)
            other.close()
    assert [record.levelname for record in caplog.records] == ["INFO"] * 4


@pytest.mark.parametrize("counts", [{"x": 12, "y": 1, "m": 5}, {"m": 12, "x": 1, "z": 3, "y": 1}])
def test_outsiders_leave_a_quarter_of_the_descriptors(
    loop: PeerLoop, monkeypatch: pytest.MonkeyPatch, counts: dict[str, int]
) -> None:
    """B1: in a run without a secret anybody may have a link to each member, of 128 connections. Here y is one too many,
    and m is a member.
    """
    told: list[events.PeerEvent] = []
    lost: list[bytes] = []
    ids = {name: name.encode() * 16 for name in counts}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    monkeypatch.setattr(loop._machine, "state", State.MEMBER)
    monkeypatch.setattr(loop._machine, "members", (Member(ids["m"], 0, "m"),))
    monkeypatch.setattr(loop._machine, "wants_link", lambda peer: True)
    monkeypatch.setattr(loop._machine, "neighbour_name", lambda peer: "one")
    monkeypatch.setattr(loop, "_handle", lambda event, now_ns: told.append(event))
    monkeypatch.setattr(loop._broker, "lose_link", lambda peer, number: lost.append(peer))
    with contextlib.ExitStack() as theirs:
        for name, count in counts.items():
            pairs = [socket.socketpair() for _ in range(count)]
            for _, their in pairs:
                theirs.enter_context(their)
            loop._take(NewLink(ids[name], 1, [ours for ours, _ in pairs], None), NOW_NS)
    (failed,) = (event for event in told if isinstance(event, events.LinkFailed))
    assert "ulimit -n" in failed.reason and [failed.peer_id] == lost == [ids["y"]]
    assert [event for event in told if event is not failed] == [
        events.LinkUp(ids[name]) for name in counts if name != "y"
    ]


def test_a_link_that_is_not_wanted_any_more_is_lost(loop: PeerLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the broker would take it for open, and not dial that peer again."""
    lost: list[tuple[bytes, int]] = []
    monkeypatch.setattr(loop._broker, "lose_link", lambda *link: lost.append(link))
    ours, theirs = socket.socketpair()
    with theirs:
        loop._take(NewLink(LOSSY.peer_id, 7, [ours], None), NOW_NS)
    assert ours.fileno() < 0 and lost == [(LOSSY.peer_id, 7)]


def test_a_link_has_more_connections_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends have more: the end that dialled the link also dials the added connections."""
    monkeypatch.setattr(limits, "LINK_CONNECTIONS_DEFAULT", limits.LINK_CONNECTIONS_FAR_DEFAULT)
    monkeypatch.setattr(limits, "LINK_CONNECTIONS_MAX", limits.LINK_CONNECTIONS_FAR_DEFAULT + 3)
    monkeypatch.setattr(peer_loop, "senders_for", lambda *_: limits.LINK_CONNECTIONS_MAX)  # Within a host it is less.
    with local_run(2, local_sockets=False) as run:
        loops = {loop.options.peer_id: loop for loop in map(loop_of, run.comms)}
        others = list(zip(loops, reversed(loops.values()), strict=True))
        for peer_id, loop in others:
            choose = functools.partial(loop._choose_senders, [replace(LOSSY, peer_id=peer_id)])
            loop.ask_measurements().add_done_callback(lambda _, choose=choose: choose())  # type: ignore[misc]
        for peer_id, loop in others:
            until(lambda loop=loop, peer_id=peer_id: loop.engine.link_state(peer_id).open_count == 67)  # type: ignore[misc]
            assert loop.engine.link_state(peer_id).generations[64:] == [1, 1, 1]
        assert run.all(lambda comm: float(comm.all_reduce(np.ones(10**6, np.float32)).sum())) == [2e6, 2e6]


def test_the_user_s_number_of_connections_is_used() -> None:
    for count, chooses in ((0, True), (16, False)):
        loop = zpccl.Communicator("127.0.0.1:1", listen="127.0.0.1", connections=count)._make_loop()
        assert loop._chooses_senders == chooses
        loop._machine.state = State.NEW
        loop.close()
