"""Link brokers in one process, and attacks of strangers on them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from brokers import RUN, Broker, brokers, say_hello, shake_hands
from e2e.harness import HANG_SECONDS, until
from e2e.strangers import is_dropped, raw, read

import zpccl
from zpccl import limits
from zpccl.control.addresses import format_address
from zpccl.control.dialling import Dialler, Results, Secrets
from zpccl.control.handshake import HELLO_BYTES, SIGNAL_BYTES, LinkHello, Signal, accepted
from zpccl.control.links import _LookUps
from zpccl.protocol.messages import Neighbour


@pytest.fixture
def pair() -> Iterator[tuple[Broker, Broker]]:
    with Broker("one", 3) as one, Broker("other", 5) as other:
        yield one, other


def talk(link: list[socket.socket], other: list[socket.socket]) -> None:
    """Checks that each connection is the same at both ends, and that no byte of the handshake is left."""
    assert len(link) == len(other)
    for index, connection in enumerate(link):
        connection.setblocking(True)
        connection.sendall(bytes([index]))
    for index, connection in enumerate(other):
        connection.settimeout(HANG_SECONDS)
        assert connection.recv(10) == bytes([index])


@pytest.mark.parametrize("dialler_first", [True, False])
def test_a_link_has_the_connections_that_the_dialler_wants(pair: tuple[Broker, Broker], dialler_first: bool) -> None:
    """Either side may hear of the other one first."""
    one, other = pair
    for broker in (one, other) if dialler_first else (other, one):
        broker.meet(other if broker is one else one, dial=broker is one)
    theirs, ours = one.link(), other.link()
    assert (theirs.peer_id, ours.peer_id) == (other.peer_id, one.peer_id) and len(ours.sockets) == 3
    talk(theirs.sockets, ours.sockets)


@pytest.mark.parametrize(
    ("round_trip_ms", "name", "count"), [(0, "cubic", 4), (100, "cubic", 64), (0, "bbr", 4), (100, "bbr", 16)]
)
def test_the_dialler_chooses_by_round_trip_and_congestion_control(
    monkeypatch: pytest.MonkeyPatch, round_trip_ms: int, name: str, count: int
) -> None:
    """Both ends get the same number if the dialler's user named none. The acceptor's user is not asked."""
    monkeypatch.setattr("zpccl.control.dialling.round_trip_ns", lambda _: round_trip_ms * limits.MS)
    monkeypatch.setattr("zpccl.control.dialling.congestion_control", lambda _: name)
    with Broker("one", 0) as one, Broker("other", 5) as other:
        one.dial(other)
        theirs, ours = one.link().sockets, other.link().sockets
        assert len(theirs) == count
        talk(theirs, ours)


def test_a_kernel_without_bbr_is_named_once_by_each_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pair: tuple[Broker, Broker]
) -> None:
    monkeypatch.setattr("zpccl.control.dialling.use_bbr", lambda _: False)
    one, other = pair
    other.dial(one)
    assert len(one.link().sockets) == len(other.link().sockets) > 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert all("tcp_allowed_congestion_control" in record.getMessage() for record in caplog.records)


def test_the_right_address_is_found_among_wrong_ones(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    wrong = ("127.0.0.1:1", "nonsense", "a..b:5", "no.such.host.invalid:5", one.address)
    one.dial(other, *wrong, other.address)
    talk(one.link().sockets, other.link().sockets)


def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch, pair: tuple[Broker, Broker]) -> None:
    """The first one is mostly an IPv6 address, which may lead nowhere. The error reports the result of each."""
    one, other = pair
    ask = socket.getaddrinfo

    def answer(host: str, *arguments: Any, **keywords: Any) -> Any:
        if host == "two.test" and not keywords.get("flags"):
            return [found for each in ("127.0.0.2", "127.0.0.1") for found in ask(each, *arguments, **keywords)]
        return ask(host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    port = other.address.rpartition(":")[2]
    one.dial(other, f"two.test:{port}")
    talk(one.link().sockets, other.link().sockets)
    one.broker.close_link(other.peer_id)
    one.meet(other, "two.test:1", dial=True)
    assert one.failure() == "two.test:1 at 127.0.0.2: refused; two.test:1 at 127.0.0.1: refused"


@pytest.mark.parametrize("addresses", [(), ("127.0.0.1:1",), ("nonsense", "a..b:5")])
def test_a_dial_that_fails_is_reported_and_may_be_repeated(
    pair: tuple[Broker, Broker], addresses: tuple[str, ...]
) -> None:
    one, other = pair
    for _ in range(2):
        one.broker.open(Neighbour(other.peer_id, "other", addresses, True))
        peer_id, reason = one.failures.get(timeout=HANG_SECONDS)
        assert peer_id == other.peer_id and reason
    assert one.links.empty()


def test_another_run_is_refused(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    other.broker.set_run(b"x" * 16)
    one.dial(other)
    assert "refused" in one.failure()


def test_a_link_of_which_one_connection_breaks_is_none(pair: tuple[Broker, Broker]) -> None:
    """The other connections are closed too, and the next try works."""
    one, other = pair
    other.meet(one)
    with raw(other.address) as first, raw(other.address) as second:
        for index, connection in enumerate((first, second)):
            shake_hands(connection, LinkHello(RUN, one.peer_id, other.peer_id, b"n" * 16, index, 3))
        first.close()
    one.meet(other, dial=True)
    talk(one.link().sockets, other.link().sockets)
    assert other.links.empty()


def test_a_lack_of_descriptors_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pair: tuple[Broker, Broker]
) -> None:
    """It may last for days, and any client can cause it."""
    one, other = pair
    accept, tries = socket.socket.accept, list[int]()

    def fail_at_first(listener: socket.socket) -> Any:
        tries.append(len(tries))
        if len(tries) <= 10:
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(limits, "RECONNECT_INTERVAL_NS", limits.MS)
    monkeypatch.setattr(limits, "REFUSALS_LOGGED_MAX", 3)
    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    one.dial(other)
    talk(one.link().sockets, other.link().sockets)
    assert len([record for record in caplog.records if "cannot accept" in record.getMessage()]) == 3


def test_closing_in_the_middle_leaks_nothing(pair: tuple[Broker, Broker]) -> None:
    """Here a warning about an unclosed socket is an error."""
    for _ in range(20):
        with Broker("a", 8) as one, Broker("b", 8) as other:
            one.dial(other)
            one.broker.close_link(other.peer_id)
            one.meet(other, dial=True)


def test_a_link_that_is_not_wanted_any_more_is_not_dialled(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one.meet(other, f"127.0.0.1:{silent.getsockname()[1]}", dial=True)
        connection, _ = silent.accept()
        with connection:
            one.broker.close_link(other.peer_id)
            connection.settimeout(HANG_SECONDS)
            until(lambda: not connection.recv(4096), "the end of the connection")
    assert one.failures.empty() and one.links.empty()


def test_a_hello_that_was_too_early_for_too_long_spoils_no_later_one(
    pair: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the same sender wait until this peer hears of it. The time of the first one ends before that."""
    one, other = pair
    monkeypatch.setattr("zpccl.control.links._TIMEOUT_S", 1)
    hello = LinkHello(RUN, one.peer_id, other.peer_id, b"m" * 16, 0, 1)
    with raw(other.address) as first, raw(other.address) as stranger:
        first.sendall(LinkHello(RUN, one.peer_id, other.peer_id, b"n" * 16, 0, 1).encode(b""))
        stranger.sendall(LinkHello(RUN, one.peer_id, b"somebody else...", b"n" * 16, 0, 1).encode(b""))
        read(stranger, SIGNAL_BYTES)  # It is refused, so the first connection has been accepted.
        monkeypatch.setattr("zpccl.control.links._TIMEOUT_S", HANG_SECONDS)
        with raw(other.address) as second:
            second.sendall(hello.encode(b""))
            assert first.recv(1) == b""
            other.meet(one)
            second.sendall(accepted(hello, read(second, SIGNAL_BYTES), b"").encode(Signal.COMMIT) + hello.padding)
            assert other.link().peer_id == one.peer_id


def test_silent_connections_do_not_keep_a_neighbour_out(pair: tuple[Broker, Broker]) -> None:
    """B2: the maximum number of handshakes, from its own address."""
    one, other = pair
    other.meet(one)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(raw(other.address)) for _ in range(limits.HANDSHAKES_MAX + 10)]
        one.meet(other, dial=True)
        talk(one.link().sockets, other.link().sockets)
        assert one.failures.empty()
        for connection in silent:
            assert is_dropped(connection)


def test_strangers_leave_descriptors_to_the_program(
    pair: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: they come from more addresses than one, and the program of this peer has files to open."""
    one, other = pair
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(raw(other.address)) for _ in range(30)]
        one.dial(other)
        talk(one.link().sockets, other.link().sockets)
        silent_count = sum(handshake.host != "" for handshake in list(other.broker._handshakes.values()))
        assert silent_count <= 10
        assert all(is_dropped(connection) for connection in silent)


@pytest.mark.parametrize("answer_bytes", [SIGNAL_BYTES, SIGNAL_BYTES + limits.LINK_PADDING_BYTES])
def test_a_path_that_loses_large_packets_gets_no_link(
    pair: tuple[Broker, Broker], answer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: it would carry the handshake, and no frame. Here either the padding of the acceptor or ours is lost."""
    one, other = pair
    monkeypatch.setattr("zpccl.control.links._TIMEOUT_S", 1)
    other.meet(one)
    with socket.create_server(("127.0.0.1", 0)) as listener, raw(other.address) as outgoing:
        one.meet(other, format_address(*listener.getsockname()), dial=True)
        incoming, _ = listener.accept()
        with incoming:
            outgoing.sendall(read(incoming, HELLO_BYTES))
            incoming.sendall(read(outgoing, answer_bytes))
            assert "large packets" in one.failure()
            assert one.has_no_link() and other.has_no_link()


def test_a_neighbour_does_not_keep_another_out(pair: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: it proves who it is on as many connections as there may be, and says nothing more. The latest ones stay."""
    monkeypatch.setattr(limits, "HANDSHAKES_MAX", 8)
    monkeypatch.setattr(limits, "LINK_CONNECTIONS_MAX", 4)
    one, other = pair
    hostile = LinkHello(RUN, b"h" * 16, other.peer_id, b"n" * 16, 0, 1)
    other.meet(one)
    other.broker.open(Neighbour(hostile.sender, "hostile", (), False))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(raw(other.address)) for _ in range(limits.HANDSHAKES_MAX)]
        transcripts = [say_hello(connection, hostile) for connection in silent]
        with raw(other.address) as connection:
            shake_hands(connection, LinkHello(RUN, one.peer_id, other.peer_id, b"n" * 16, 0, 1))
            assert other.link().peer_id == one.peer_id
        assert all(is_dropped(connection) for connection in silent[: -limits.LINK_CONNECTIONS_MAX])
        silent[-1].sendall(transcripts[-1].encode(Signal.COMMIT) + hostile.padding)
        assert other.link().peer_id == hostile.sender


SILENT_NAME_SERVER = """
import socket, sys, threading
from brokers import Broker
from zpccl.protocol.messages import Neighbour

is_asked, look_up = threading.Event(), socket.getaddrinfo

def silent(host, *arguments, **keywords):
    if host == "silent.example" and not keywords.get("flags"):
        is_asked.set()
        threading.Event().wait()
    return look_up(host, *arguments, **keywords)

socket.getaddrinfo = silent
broker = Broker("a", 1)
broker.broker.open(Neighbour(b"b" * 16, "b", ("silent.example:9",), True, b""))
assert is_asked.wait(60)
broker.close()
"""


def test_a_program_ends_while_a_name_is_looked_up() -> None:
    """L1: a name server that does not answer does not keep it alive."""
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", SILENT_NAME_SERVER]
    subprocess.run(command, env=environment, timeout=HANG_SECONDS, check=True)


def test_names_that_are_looked_up_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: a member may give many names."""
    monkeypatch.setattr(limits, "NAMES_LOOKED_UP_MAX", 1)
    look_ups, is_answered = _LookUps(), threading.Event()
    first = look_ups.submit(is_answered.wait, HANG_SECONDS)
    with pytest.raises(OSError, match="too many names"):
        look_ups.submit(print)
    is_answered.set()
    assert first.result(HANG_SECONDS)
    until(lambda: look_ups._free._value == 1)
    assert look_ups.submit(lambda: 7).result(HANG_SECONDS) == 7


def test_a_question_without_a_thread_is_answered(pair: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: the session waits for the answer, and a name is looked up in a thread of its own."""

    def start(thread: threading.Thread) -> None:
        raise zpccl.InternalError(f"the thread {thread.name} cannot be started")

    answers: queue.Queue[tuple[str, str]] = queue.Queue()
    monkeypatch.setattr("zpccl.control.links.start_thread", start)
    pair[0].broker.ask_mechanism("nobody.invalid:48148", lambda *answer: answers.put(answer))
    mechanism, reason = answers.get(timeout=HANG_SECONDS)
    assert not mechanism and "cannot be started" in reason


def test_few_outsiders_are_dialled_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: the silent addresses of many would use up the descriptors. Members do not wait for them."""
    monkeypatch.setattr(limits, "OUTSIDER_DIALS_MAX", 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        brokers("one", "outsider", "member", connections=1) as (one, outsider, member),
    ):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        outsider.meet(one)
        one.broker.open(Neighbour(b"s" * 16, "silent", (address,), True, b""), is_outsider=True)
        one.broker.open(Neighbour(outsider.peer_id, "", (outsider.address,), True, b""), is_outsider=True)
        one.dial(member)
        assert one.link().peer_id == member.peer_id
        one.broker.close_link(b"s" * 16)
        assert one.link().peer_id == outsider.peer_id


def test_many_names_take_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: a peer may name eight hosts, and each name may have eight addresses that are silent."""
    targets = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{number}", 1)) for number in range(8)]
    names = tuple(f"{letter}.invalid:1" for letter in "abcdefgh")
    dialled: list[object] = []

    async def look_up(*_: object, **__: object) -> list[tuple[Any, ...]]:
        return targets

    async def connect(target: object, *_: object, **__: object) -> None:
        dialled.append(target)
        await asyncio.Event().wait()

    async def dial() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", look_up)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dialler = Dialler(loop, listener, False, connect)
            monkeypatch.setattr(dialler, "_connect", connect)
            neighbour = Neighbour(b"s" * 16, "silent", names, True, b"")
            hello = LinkHello(RUN, b"o" * 16, neighbour.peer_id, bytes(16), 0, 1)
            task = loop.create_task(dialler.dial_any(neighbour, hello, Secrets(b"", b""), Results()))
            for _ in range(1000):  # Turns of the loop, not time: nothing tells that it dials no more.
                await asyncio.sleep(0)
            task.cancel()

    monkeypatch.setattr("zpccl.control.dialling._STAGGER_S", 0)
    asyncio.run(dial())
    assert len(names) <= len(dialled) <= 2 * limits.ADDRESSES_PER_PEER_MAX
