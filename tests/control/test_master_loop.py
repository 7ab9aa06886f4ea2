"""The shell of the master: what reaches the machine, and in which order."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import zmq
from e2e.harness import stream_sockets
from e2e.strangers import GREETING, READY, dealer, is_dropped, raw, receive
from engine_mesh import until

import zpccl
from zpccl import limits
from zpccl.control.addresses import parse_address
from zpccl.control.master_loop import MasterLoop
from zpccl.observe.snapshot import Snapshot
from zpccl.protocol.effects import Broadcast
from zpccl.protocol.events import MalformedReceived, PeerMessageReceived
from zpccl.protocol.membership import Standing
from zpccl.protocol.messages import (
    NO_ID,
    Decision,
    Hello,
    Kick,
    Leave,
    MeasurementsRequest,
    Ready,
    Refusal,
    Refused,
    RunReport,
    Welcome,
    encode,
    is_compressed,
)

WAIT_S = 30
NOW_NS = 10**15


@contextlib.contextmanager
def open_loop(**arguments: Any) -> Iterator[MasterLoop]:
    """A master's loop whose turns are the test's."""
    loop = MasterLoop("127.0.0.1:0", **arguments)
    try:
        yield loop
    finally:
        loop._close()


def test_leave_counts_though_the_connection_closed_before_it_was_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both arrive after the loop has read the messages and before it looks for closed connections.

    This moment lasts microseconds. Only the loop itself can be stopped in it, so the test uses private names.
    """
    take_messages = MasterLoop._take_messages
    armed, taken, left = threading.Event(), threading.Event(), threading.Event()

    def take_and_wait(loop: MasterLoop) -> list[Any]:
        messages = take_messages(loop)
        if armed.is_set() and not messages:
            armed.clear()
            taken.set()
            assert left.wait(WAIT_S)
            assert loop._monitor.poll(WAIT_S * 1000)
        return messages

    monkeypatch.setattr(MasterLoop, "_take_messages", take_and_wait)
    caplog.set_level(logging.INFO, "zpccl.master")
    with zpccl.MasterNode("127.0.0.1:0") as master:
        comm = zpccl.Communicator(master.address, listen="127.0.0.1")
        comm.connect()
        armed.set()
        assert master._loop is not None
        os.write(master._loop.wakeup_descriptor, b"\0")
        assert taken.wait(WAIT_S)
        comm.close()
        left.set()
        witness = zpccl.Communicator(master.address, listen="127.0.0.1")
        witness.connect()  # The answer comes after the leave.
        witness.close()
    texts = [record.getMessage() for record in caplog.records]
    assert any(text.endswith(" left") for text in texts)
    assert not any("lost" in text for text in texts)


def test_leave_counts_though_the_connection_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two leave at once: the second one has closed before the master tells it of the first one."""
    caplog.set_level(logging.INFO, "zpccl.master")
    hellos = [Hello(name * 16, b"t" * 16, False, 0, "peter", ("127.0.0.1:1",)) for name in (b"p", b"q")]
    with open_loop(recovery_grace=0) as loop, contextlib.ExitStack() as stack:
        handle, peers = loop.machine.handle_all, loop.machine.registry.peers
        first, second = (stack.enter_context(dealer(loop.address)) for _ in hellos)
        first.send(encode(hellos[0]))
        until(lambda: len(turn(loop).machine.registry.peers) == 1)
        second.send(encode(hellos[1]))
        until(lambda: len(turn(loop).machine.registry.peers) == 2)
        routing_id = peers[hellos[1].peer_id].connection
        assert isinstance(routing_id, bytes)

        def is_unreachable() -> bool:
            try:
                loop._socket.send_multipart((routing_id, b""))
            except zmq.ZMQError as error:
                return error.errno == zmq.EHOSTUNREACH
            return False

        def handle_once_second_has_closed(batch: Sequence[Any], now_ns: int) -> Any:
            monkeypatch.undo()
            second.send(encode(Leave()))
            second.close(linger=WAIT_S * 1000)
            until(is_unreachable)
            return handle(batch, now_ns)

        monkeypatch.setattr(loop.machine, "handle_all", handle_once_second_has_closed)
        first.send(encode(Leave()))
        until(lambda: not turn(loop).machine.registry.peers)
    assert sum(record.getMessage().endswith(" left") for record in caplog.records) == 2


@pytest.mark.parametrize("sizes", [(200, 200), (90, 90, 90), (10,) * 8, (300, 300)])
def test_what_was_sent_and_read_does_not_count_as_queued(sizes: tuple[int, ...]) -> None:
    """B1: a difference of a few bytes per message would reach the bound of a member within days."""
    hello = Hello(b"p" * 16, b"t" * 16, False, 0, "peter", ("127.0.0.1:1",))
    with open_loop(recovery_grace=0) as loop, dealer(loop.address) as peer:
        peer.send(encode(hello))
        until(lambda: len(turn(loop).machine.registry.peers) == 1)
        (routing_id,) = loop.machine.registry.by_connection
        assert isinstance(routing_id, bytes)
        for _ in range(1000):
            loop._send(routing_id, [bytes(size) for size in sizes], NOW_NS)
        taken = 0
        while taken < 1000:
            taken += len(peer.recv_multipart()) == len(sizes)
        connection = loop.inflow._by_routing_id[routing_id]

        def is_all_acknowledged() -> bool:
            loop.inflow._measure(connection)
            return connection.sent == connection.acknowledged

        until(is_all_acknowledged)


def test_metrics_are_there_as_soon_as_the_master_is() -> None:
    """A reader that comes right after the master has begun to listen finds all series."""
    seen: list[Snapshot] = []
    loop = MasterLoop("127.0.0.1:0", publish=seen.append)
    try:
        assert len(seen) == 1
    finally:
        loop.stop()
        loop.run()


def test_what_may_wait_is_sent_with_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer's message waits separately; all are sent together when the time is up."""
    sent: list[tuple[bytes, int]] = []
    monkeypatch.setattr(MasterLoop, "_send", lambda loop, to, parts, now_ns: sent.append((to, len(parts))))
    lazy, urgent = Broadcast((b"a", b"b"), Kick(0, ""), may_wait=True), Broadcast((b"b", b"c"), Kick(0, ""))
    with open_loop() as loop:
        loop._perform([lazy, lazy], NOW_NS)
        loop._flush(NOW_NS + limits.SEND_HOLD_NS - 1)
        assert sent == [] and loop._deadline_ns(None) == NOW_NS + limits.SEND_HOLD_NS
        loop._perform([urgent], NOW_NS)
        loop._flush(NOW_NS)
        assert sent == [(b"b", 3), (b"c", 1)]
        loop._flush(NOW_NS + limits.SEND_HOLD_NS)
        assert sent[2:] == [(b"a", 2)] and loop._outgoing.deadline_ns is None
        loop._perform([lazy] * (limits.MESSAGE_PARTS_MAX + 1), NOW_NS)
        loop._flush(NOW_NS)
        assert sent[3:] == [(to, count) for to in (b"a", b"b") for count in (limits.MESSAGE_PARTS_MAX, 1)]


def test_messages_that_come_together_are_all_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zpccl.master")
    hello = Hello(b"p" * 16, b"t" * 16, False, 0, "peter", ("127.0.0.1:1",))
    with zpccl.MasterNode("127.0.0.1:0", recovery_grace=0) as master, dealer(master.address) as peer:
        peer.send(encode(hello))
        until(lambda: any("peter registered" in record.getMessage() for record in caplog.records))
        peer.send_multipart([encode(Ready()), encode(Leave())])
        until(lambda: any(record.getMessage().endswith(" left") for record in caplog.records))


def test_a_connection_that_was_given_up_is_heard_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It sends a thousand malformed messages at once, and cannot receive even the first answer."""
    monkeypatch.setattr(limits, "OUTSIDER_UNSENT_BYTES_MAX", -(1 << 20))
    caplog.set_level(logging.INFO, "zpccl.master")
    with zpccl.MasterNode("127.0.0.1:0") as master:
        with raw(master.address) as connection:
            connection.sendall(GREETING)
            with connection.makefile("rb") as reader:
                reader.read(len(GREETING))
            connection.sendall(READY + b"\0\4junk" * 1000)
            assert is_dropped(connection)
        monkeypatch.undo()
        witness = zpccl.Communicator(master.address, listen="127.0.0.1")
        witness.connect()
        witness.close()
    texts = [record.getMessage() for record in caplog.records]
    assert sum("malformed" in text for text in texts) == 1
    assert sum("does not read" in text for text in texts) == 1


def accepted_by(loop: MasterLoop) -> int:
    """How many connections libzmq has accepted for a master and not closed."""
    count, address = 0, parse_address(loop.address)
    for connection, own, _ in stream_sockets():
        with connection:
            count += own == address
    return count


@pytest.mark.parametrize("is_heard_before", [True, False])
def test_what_a_closed_connection_has_left_is_not_taken_for_the_next_one_s(
    monkeypatch: pytest.MonkeyPatch, is_heard_before: bool
) -> None:
    """L1: otherwise the end of the next connection, which has the same descriptor, would count as the end of the first
    one.

    The master stood still, so messages of more than one turn wait.
    """
    monkeypatch.setattr(limits, "POLL_EVENTS_MAX", 4)
    first, second = (Hello(name * 16, b"t" * 16, False, 0, "peter", ("127.0.0.1:1",)) for name in (b"p", b"q"))

    def turn() -> int:
        loop._run_once(time.monotonic_ns(), None)
        return len(loop._known)

    with open_loop(recovery_grace=0) as loop:
        with dealer(loop.address) as peer:
            peer.setsockopt(zmq.LINGER, WAIT_S * 1000)
            peer.send(encode(first))
            until(lambda: loop._monitor.poll(0) > 0)
            until(lambda: not is_heard_before or turn() == 1)
            for _ in range(1000):
                peer.send(encode(Ready()))
        until(lambda: accepted_by(loop) == 0)  # The connection has ended, after everything that it had sent.
        with dealer(loop.address) as peer:
            peer.send(encode(second))
            for _ in range(1000):
                time.sleep(limits.MS / limits.SECOND)  # The error would occur in any of these turns.
                turn()
            assert list(loop._generation.values()) == [3], "both have had the same descriptor"
            assert len(loop._known) == 1 and set(loop._routing_id_of.values()) == loop._known
            (routing_id,) = loop._known
            assert loop.machine.standing(routing_id) is not Standing.STRANGER
        until(lambda: turn() == 0)
        assert not loop._routing_id_of and loop.machine.standing(routing_id) is Standing.STRANGER


def test_what_a_closed_connection_has_left_may_be_read_after_the_next_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: otherwise the next one, which has its descriptor, would count as closed, and wait for ever.

    ZeroMQ reads from its connections in turn, and moves the last one to the place of one that has no more messages.
    """
    monkeypatch.setattr(limits, "POLL_EVENTS_MAX", 1)
    hello = Hello(b"q" * 16, b"t" * 16, False, 0, "peter", ("127.0.0.1:1",))
    heard: list[Any] = []
    with open_loop(recovery_grace=0) as loop:
        handle = loop.machine.handle_all

        def handle_all(batch: Sequence[Any], now_ns: int) -> Any:
            heard.extend(event.connection for event in batch if isinstance(event, PeerMessageReceived))
            return handle(batch, now_ns)

        def heard_after_a_turn() -> list[Any]:
            loop._run_once(time.monotonic_ns(), None)
            return heard

        monkeypatch.setattr(loop.machine, "handle_all", handle_all)
        with dealer(loop.address) as one, dealer(loop.address) as other:
            for peer in (one, other):
                peer.send(encode(Ready()))
            until(lambda: len(heard_after_a_turn()) == 2)
            with dealer(loop.address) as first:
                first.setsockopt(zmq.LINGER, WAIT_S * 1000)
                until(lambda: loop._monitor.poll(0) > 0)
                first.send(encode(Ready()))
            until(lambda: accepted_by(loop) == 2)
            with dealer(loop.address) as second:
                second.send(encode(hello))
                time.sleep(0.5)  # Both have arrived; a check would read one of them.
                until(lambda: len(heard_after_a_turn()) == 4)
                assert heard[2] > heard[3], "the second one was heard first"
                heard_after_a_turn()
                assert sorted(loop._generation.values()) == [1, 1, 3], "both have had the same descriptor"
                assert loop.machine.registry.peers[hello.peer_id].connection == heard[2]
            until(lambda: heard_after_a_turn()[2] not in loop._known)
            assert loop.machine.registry.peers[hello.peer_id].connection is None


@pytest.mark.parametrize("name", [b"\xff" * 5, b"\0\xff\xff\xff\xff", b"x"])
def test_who_names_its_connection_cannot_pass_for_the_next_one(name: bytes) -> None:
    """L1: otherwise the next one, which has its descriptor, would count as closed, and nobody could join."""
    named = READY[2:] + b"\x08Identity" + len(name).to_bytes(4, "big") + name
    hello = Hello(b"q" * 16, b"t" * 16, False, 0, "peter", ("127.0.0.1:1",))

    def say(connection: socket.socket, ready: bytes, data: bytes) -> None:
        connection.connect(parse_address(loop.address))
        connection.sendall(GREETING)
        connection.recv(len(GREETING), socket.MSG_WAITALL)
        connection.sendall(b"\4" + bytes([len(ready)]) + ready + b"\0" + bytes([len(data)]) + data)
        time.sleep(0.5)  # It has arrived; a check would read it.

    with open_loop(recovery_grace=0) as loop, socket.socket() as stranger, socket.socket() as peer:
        say(stranger, named, b"junk")
        stranger.shutdown(socket.SHUT_WR)
        assert is_dropped(stranger)
        say(peer, READY[2:], encode(hello))
        until(lambda: hello.peer_id in turn(loop).machine.registry.peers)
        assert list(loop._generation.values()) == [3], "both have had the same descriptor"
        connection = loop.machine.registry.peers[hello.peer_id].connection
        assert connection is not None and list(loop._routing_id_of.values()) == [connection]


def test_a_message_of_many_parts_is_taken_in_many_turns() -> None:
    """B1: it may have millions of parts, which take seconds to read, while others may send without end."""
    turns = 3
    with open_loop() as loop, dealer(loop.address) as peer:
        peer.send_multipart([b""] * (turns * limits.PARTS_TAKEN_MAX + 1), copy=False)
        peer.send(encode(Leave()))
        taken: list[Any] = []
        for _ in range(turns):
            assert loop._socket.poll(WAIT_S * 1000)
            taken += loop._take_messages()
            assert taken == [] and not loop._is_drained
        while len(taken) < 2:
            assert loop._socket.poll(WAIT_S * 1000)
            taken += loop._take_messages()
    assert [type(event) for event in taken] == [MalformedReceived, PeerMessageReceived]


def test_messages_of_many_parts_share_a_turn() -> None:
    """B1: hundreds of such messages, each within the bound, would take a second."""
    with open_loop() as loop, dealer(loop.address) as peer:
        peer.send_multipart([b""] * (limits.PARTS_TAKEN_MAX - 1), copy=False)
        for _ in range(3):
            peer.send_multipart([b"", encode(Leave())])
        time.sleep(0.5)  # They have arrived; a check would read them.
        turns = []
        while not loop._is_drained:
            turns.append([type(event) for event in loop._take_messages()])
    assert turns == [[MalformedReceived], [PeerMessageReceived] * 3]


def test_a_turn_takes_some_hundred_messages() -> None:
    """S6: members wait for the end of a turn, and handling a message takes 30 us and more."""
    with open_loop() as loop, dealer(loop.address) as peer:
        for _ in range(16):
            peer.send_multipart([encode(Leave())] * limits.MESSAGE_PARTS_MAX)
        time.sleep(0.5)  # They have arrived; a check would read them.
        turns = [len(loop._take_messages()) for _ in range(2)]
    assert turns == [512, 512]


def report_of(hello: Hello) -> bytes:
    """A report that is so large that it is compressed."""
    outcomes = tuple(Decision(call_id, 0, reason="why") for call_id in range(1000))
    data = encode(RunReport(hello, 0, 0, (), 0, 0, None, outcomes, ()))
    assert is_compressed(data)
    return data


def test_a_compressed_report_of_a_registered_peer_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """S6, B2: 4 KB of it could take the master 4 s, and it has nothing to report."""
    monkeypatch.setattr(zlib, "decompressobj", None)
    hello = Hello(b"p" * 16, b"t" * 16, False, 0, "peter", ("127.0.0.1:1",))
    with zpccl.MasterNode("127.0.0.1:0", recovery_grace=0) as master, dealer(master.address) as peer:
        peer.send(encode(hello))
        while not isinstance(receive(peer), Welcome):
            pass
        peer.send(report_of(hello))
        while not isinstance(answer := receive(peer), Refused):
            pass
        assert answer.refusal is Refusal.UNREGISTERED


def test_a_turn_decodes_no_more_reports_once_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: a peer that is to report could send many at once."""
    monkeypatch.setattr(limits, "REPORTS_DECODING_NS", 0)
    hello = Hello(b"p" * 16, b"t" * 16, True, 0, "peter", ("127.0.0.1:1",), run_id=b"r" * 16, term=1)
    with open_loop() as loop, dealer(loop.address) as peer:  # It looks for peers of an earlier run.
        peer.send(encode(hello))
        until(lambda: bool(turn(loop)._known))
        asked = receive(peer)
        assert isinstance(asked, Refused) and asked.refusal is Refusal.REPORT and asked.leader != NO_ID
        for _ in range(2):
            peer.send_multipart([report_of(hello), report_of(hello)])
        peer.send(encode(Leave()))
        turns = []
        for _ in range(3):
            taken = first_taken(loop)
            turns.append([type(event.message) for event in taken if isinstance(event, PeerMessageReceived)])
            assert loop._is_drained == (len(turns) == 3)
        loop._flush(NOW_NS)
        answers = [receive(peer) for _ in range(2)]
    assert turns == [[RunReport], [RunReport], [Leave]]
    assert [answer.refusal for answer in answers if isinstance(answer, Refused)] == [Refusal.UNREGISTERED] * 2


def test_a_turn_takes_few_messages_with_long_answers() -> None:
    """B1, S6: 200 pending peers that repeat their Hellos had a master hold 3 GB of answers, and took it 12 s a turn."""
    messages = [encode(Hello(b"p" * 16, b"t" * 16, False, 0, "peter", ())), encode(MeasurementsRequest())]
    with open_loop() as loop, dealer(loop.address) as peer:
        for _ in range(limits.LONG_ANSWERS_TAKEN_MAX):
            for message in messages:
                peer.send(message)
        time.sleep(0.5)  # They have arrived; a check would read them.
        turns = [len(loop._take_messages()) for _ in range(3)]
    assert turns == [limits.LONG_ANSWERS_TAKEN_MAX, limits.LONG_ANSWERS_TAKEN_MAX, 0]


def first_taken(loop: MasterLoop) -> list[Any]:
    """What the first turn takes in which anything has come."""
    while True:
        assert loop._socket.poll(WAIT_S * 1000)
        if taken := loop._take_messages():
            return taken


def test_a_hello_comes_alone() -> None:
    """B1: a message could have a Hello in each of its parts. Peers send it by itself."""
    hello = encode(Hello(b"p" * 16, b"t" * 16, False, 0, "peter", ()))
    with open_loop() as loop, dealer(loop.address) as peer:
        peer.send_multipart([hello, hello])
        taken = first_taken(loop)
    assert [type(event) for event in taken] == [MalformedReceived] * 2


def test_empty_messages_say_nothing() -> None:
    """Peers with nothing to send send them from time to time. They cause no warning."""
    with open_loop() as loop, dealer(loop.address) as peer:
        peer.send(b"")
        peer.send_multipart([b"", encode(Leave()), b""])
        taken = first_taken(loop)
    assert [type(event) for event in taken] == [PeerMessageReceived]


def never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a flood, the socket is never found empty."""
    take_messages = MasterLoop._take_messages

    def take(loop: MasterLoop) -> list[Any]:
        messages = take_messages(loop)
        loop._is_drained = False
        return messages

    monkeypatch.setattr(MasterLoop, "_take_messages", take)


def turn(loop: MasterLoop) -> MasterLoop:
    loop._run_once(time.monotonic_ns(), None)
    return loop


def test_what_is_kept_of_closed_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: in a flood the socket is never found empty, and strangers come, send something and are shut down."""
    monkeypatch.setattr(limits, "CLOSED_CONNECTIONS_MAX", 5)
    never_empty(monkeypatch)
    with open_loop(recovery_grace=0) as loop:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(dealer(loop.address)).send(encode(Ready()))
            until(lambda: len(turn(loop)._known) == 20)
            for routing_id in loop._known:
                loop.inflow.cut(routing_id, "for no reason", NOW_NS)
        until(lambda: not turn(loop)._routing_id_of)
        assert [len(kept) for kept in (loop._gone, loop._known, loop.inflow._cut_ids)] == [5, 5, 5]


def test_no_connections_are_taken_while_what_closed_ones_have_left_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: strangers come, send much and close, over and over; nothing else bounds what libzmq holds for them."""
    monkeypatch.setattr(limits, "CLOSED_STRANGERS_MAX", 0)
    with open_loop(recovery_grace=0) as loop, dealer(loop.address) as open_one:
        open_one.send(encode(Ready()))
        until(lambda: len(turn(loop)._known) == 1)
        with monkeypatch.context() as patch:
            never_empty(patch)
            with dealer(loop.address) as stranger:
                stranger.send(encode(Ready()))
                until(lambda: len(turn(loop)._known) == 2)
                assert not turn(loop).inflow.is_holding_back, "nobody has closed yet"
            until(lambda: turn(loop).inflow.is_holding_back)
            with pytest.raises(TimeoutError):
                socket.create_connection(parse_address(loop.address), 0.3)
            open_one.send(encode(Ready()))  # The master still reads from connected peers.
            until(lambda: turn(loop)._traffic.messages_received == 3)
        assert not turn(loop).inflow.is_holding_back
        raw(loop.address).close()


def test_connections_that_close_all_the_time_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """B2, L1: messages that were read are still handled, and the master can be stopped."""
    turns = 0

    def another_has_closed(loop: MasterLoop, now_ns: int) -> list[bytes]:
        nonlocal turns
        turns += 1
        assert turns < 1000, "it takes messages for ever"
        return [b"another"]

    with open_loop(recovery_grace=0) as loop, monkeypatch.context() as patch:
        patch.setattr(MasterLoop, "_drain_monitor", another_has_closed)
        loop._run_once(time.monotonic_ns(), None)


RESET_WHILE_NOBODY_READS = """
import socket, struct, sys
import zmq
from zpccl import limits
from zpccl.control.addresses import parse_address
from zpccl.control.master_loop import open_router

limits.HEARTBEAT_INTERVAL_NS = limits.MS
greeting, ready = bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2])
with zmq.Context() as context, open_router(context, 10 * limits.SECOND) as router:
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with router.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(greeting)
            connection.recv(len(greeting), socket.MSG_WAITALL)
            connection.sendall(ready + b"\\0\\4junk" * 1000)
            assert router.poll(30000)
        assert monitor.poll(30000), "nobody tells of its end"
        router.disable_monitor()
    count = 0
    while router.poll(0):
        router.recv_multipart()
        count += 1
    print(count)
"""


def test_a_connection_that_is_reset_while_nobody_reads_aborts_nothing() -> None:
    """Heartbeats are due all the time, and nobody reads what it sent: libzmq aborts if it had stopped reading."""
    arguments = [sys.executable, "-c", RESET_WHILE_NOBODY_READS, GREETING.hex(), READY.hex()]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0


def test_connections_that_come_and_go_as_it_stops_hold_up_no_end() -> None:
    """libzmq's thread waits for a reader of these events. In a child process: a caller that waits for that thread
    hangs."""
    script = """
import socket
from zpccl.control.addresses import parse_address
from zpccl.control.master_loop import MasterLoop

loop = MasterLoop("127.0.0.1:0")
for _ in range(1300):
    socket.create_connection(parse_address(loop.address), 30).close()
loop.stop()
loop.run()
"""
    subprocess.run([sys.executable, "-c", script], timeout=WAIT_S, check=True)
