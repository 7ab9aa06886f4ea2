"""Links between peers of one host, over Unix-domain sockets."""

from __future__ import annotations

import contextlib
import errno
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import pytest
from brokers import RUN, Broker
from e2e.harness import HANG_SECONDS
from e2e.strangers import is_dropped, read
from interpreter import handling, limited

from zpccl import limits
from zpccl.control.addresses import _SO_PASSRIGHTS, listen_locally, local_address
from zpccl.control.handshake import SIGNAL_BYTES, LinkHello
from zpccl.engine.ciphers import Cipher
from zpccl.protocol.messages import Neighbour

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract names are Linux's")

COUNT = 3


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Broker, Broker]]:
    """The parameter says which brokers have a local socket; by default both have one."""
    one_local, other_local = getattr(request, "param", (True, True))
    with Broker("one", COUNT, local=one_local) as one, Broker("other", COUNT, local=other_local) as other:
        yield one, other


def families(one: Broker, other: Broker) -> set[socket.AddressFamily]:
    """The address families of a link that comes up, at both ends."""
    ours, theirs = one.link().sockets, other.link().sockets
    assert len(ours) == len(theirs) == COUNT
    for sender, receiver in zip(ours, theirs, strict=True):
        sender.sendall(b"x")
        receiver.settimeout(HANG_SECONDS)
        assert receiver.recv(10) == b"x", "nothing of the handshake is left"
    return {connection.family for connection in (*ours, *theirs)}


def test_they_meet_at_the_local_socket_first(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    one.dial(other)
    assert families(one, other) == {socket.AF_UNIX}


def test_no_other_address_is_needed(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    one.dial(other, "127.0.0.1:1")
    assert families(one, other) == {socket.AF_UNIX}


@pytest.mark.parametrize("pair", [(True, False), (False, True)], indirect=True)
def test_where_one_has_none_they_use_tcp(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    one.dial(other)
    assert families(one, other) == {socket.AF_INET}


def test_the_link_is_authenticated_as_over_tcp() -> None:
    """S7: a peer without the pair's key is refused at the local address and at the other one."""
    ciphers = (Cipher.PLAIN,)
    with Broker("one", COUNT, ciphers, local=True) as one, Broker("other", COUNT, ciphers, local=True) as other:
        other.meet(one, key=b"k" * 32)
        one.meet(other, dial=True, key=b"w" * 32)
        assert "closed" in one.failure()
        one.meet(other, dial=True, key=b"k" * 32)
        assert families(one, other) == {socket.AF_UNIX}


def test_a_failure_names_only_what_a_person_can_look_at(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    other.close()
    one.meet(other, "127.0.0.1:1", dial=True)
    reason = one.failure()
    assert reason == "127.0.0.1:1: refused" and "zpccl/" not in reason and "\0" not in reason


def test_a_lost_connection_comes_back_there(pair: tuple[Broker, Broker]) -> None:
    one, other = pair
    one.dial(other)
    assert families(one, other) == {socket.AF_UNIX}
    one.broker.redial(other.peer_id, 1, 2, 0)
    theirs = other.connection()
    theirs.connection.sendall(theirs.ready)
    ours = one.connection()
    assert ours.connection.family == theirs.connection.family == socket.AF_UNIX


def test_silent_processes_of_the_host_do_not_keep_a_neighbour_out(pair: tuple[Broker, Broker]) -> None:
    """B2: the maximum number of handshakes."""
    one, other = pair
    other.meet(one)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(limits.HANDSHAKES_MAX + 10)]
        for connection in silent:
            connection.connect(local_address(other.peer_id))  # With a timeout, connect() fails if the queue is full.
            connection.settimeout(HANG_SECONDS)
        one.meet(other, dial=True)
        families(one, other)
        assert one.failures.empty()
        for connection in silent:
            assert is_dropped(connection)


def lets_pass_descriptors(sender: socket.socket) -> bool:
    try:
        return socket.send_fds(sender, [b"x"], [sender.fileno()]) == 1
    except PermissionError:
        return False


@pytest.fixture
def forbids_descriptors() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        except OSError:
            pytest.skip("Linux before 6.16")


@pytest.mark.usefixtures("forbids_descriptors")
def test_strangers_pass_no_descriptors(pair: tuple[Broker, Broker]) -> None:
    """S6: the close of a stranger's descriptor could take for ever. Neighbours pass one: their shared memory."""
    one, other = pair
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(local_address(other.peer_id))
        assert not lets_pass_descriptors(stranger)
    one.dial(other)
    for connection in (*one.link().sockets, *other.link().sockets):
        assert lets_pass_descriptors(connection)


@pytest.mark.usefixtures("forbids_descriptors")
def test_who_has_the_name_of_a_neighbour_passes_no_descriptors() -> None:
    with Broker("one", COUNT, local=True) as one, socket.socket(socket.AF_UNIX) as impostor:
        name = b"named".ljust(16, b".")
        impostor.bind(local_address(name))
        impostor.listen()
        impostor.settimeout(HANG_SECONDS)
        one.broker.open(Neighbour(name, "named", ("127.0.0.1:1",), True, b""))
        connection, _ = impostor.accept()
        with connection:
            assert not lets_pass_descriptors(connection)


def test_the_name_is_free_when_the_peer_is_gone() -> None:
    with Broker("one", COUNT, local=True):
        assert listen_locally(b"one".ljust(16, b".")) is None, "it is taken"
    again = listen_locally(b"one".ljust(16, b"."))
    assert again is not None
    again.close()


def test_a_sandbox_without_unix_sockets_leaves_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr("zpccl.engine.engine.socket.socketpair", refuse)
    assert listen_locally(b"one".ljust(16, b".")) is None


def test_without_shared_memory_peers_of_this_host_use_tcp(caplog: pytest.LogCaptureFixture) -> None:
    """L3: a socket that led to no link would be tried again and again. Memory counts as a file here."""
    with caplog.at_level("INFO", "zpccl.links"), limited(resource.RLIMIT_FSIZE, 0):
        assert listen_locally(b"one".ljust(16, b".")) is None
    assert "peers of this host are reached over TCP" in caplog.text and "File too large" in caplog.text


def test_strangers_that_end_too_soon_cause_no_signal() -> None:
    """S6: the default handler of SIGPIPE ends the program; many programs set it for the sake of `| head`."""
    hello = LinkHello(RUN, b"s" * 16, b"another peer".ljust(16), bytes(16), 0, 1).encode(b"")
    signals: list[int] = []
    with (
        Broker("one", COUNT, local=True) as one,
        handling(signal.SIGPIPE, lambda number, _: signals.append(number)),
    ):
        for _ in range(100):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(local_address(one.peer_id))
                stranger.sendall(hello)
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(local_address(one.peer_id))
            last.sendall(hello)
            read(last, SIGNAL_BYTES)
    assert not signals
