"""Messages from strangers, and masters that are absent: typed errors, bounded memory, and no member is disturbed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

import zpccl
from e2e import harness
from e2e.harness import Child, Cluster, Peer, cluster, until
from e2e.secured import reducing
from e2e.strangers import GARBAGE, GREETING, MIB, READY, data_address, dealer, is_dropped, raw, receive, server
from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol import messages
from zpccl.protocol.messages import Leave, Refusal, Refused, encode

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run() -> Iterator[Cluster]:
    with cluster() as run:
        run.members(2)
        yield run


@pytest.fixture
def busy(run: Cluster) -> Iterator[list[Child]]:
    """Two members that reduce while the test goes on. No reduce may fail."""
    with reducing(run.children[:2]) as members:
        yield members


# --- To the master ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_on_the_port_of_the_master(run: Cluster, busy: list[Child], what: str) -> None:
    with raw(run.master.address) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(GARBAGE[what])
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        assert is_dropped(connection)


VERSION = b"zp" + bytes([limits.PROTOCOL_VERSION])
MESSAGES = {
    "noise": [os.urandom(2000)],
    "no message": [VERSION + b"\xc0"],
    "an unknown message": [VERSION + b"\x91\xa4what"],
    "deep": [VERSION + b"\x91" * 20_000],
    "a huge array": [VERSION + b"\xdd\xff\xff\xff\xff"],
    "another version": [b"zp" + bytes([limits.PROTOCOL_VERSION + 1]) + b"\x90"],
    "too many at once": [encode(Leave())] * (limits.MESSAGE_PARTS_MAX + 1),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_messages_that_are_none_are_refused(run: Cluster, busy: list[Child], what: str) -> None:
    with dealer(run.master.address) as stranger:
        stranger.send_multipart(MESSAGES[what])
        answer = receive(stranger)
        assert isinstance(answer, Refused) and answer.refusal is Refusal.MALFORMED and answer.reason


def test_a_compressed_report_of_a_stranger_is_not_expanded(run: Cluster, busy: list[Child]) -> None:
    """B1: a few bytes would cost the master much time."""
    with dealer(run.master.address) as stranger:
        stranger.send(VERSION + b"\xc1" + zlib.compress(bytes(limits.MESSAGE_BYTES_MAX)))
        answer = receive(stranger)
        assert isinstance(answer, Refused) and answer.refusal is Refusal.UNREGISTERED


def test_a_message_of_a_gigabyte_is_not_taken(run: Cluster, busy: list[Child]) -> None:
    """B1: the master closes the connection when it reads the declared length, before it allocates memory."""
    before = run.master.resident_bytes()
    with raw(run.master.address) as connection:
        connection.sendall(GREETING + READY + b"\x02" + struct.pack(">Q", 1 << 30))
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                connection.sendall(bytes(MIB))
        assert is_dropped(connection)
    assert run.master.resident_bytes() < before + 32 * MIB


# --- To a peer --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_many_silent_connections_to_a_peer_do_not_keep_a_joiner_out(run: Cluster) -> None:
    """L2: there are more than a peer accepts at a time. It drops them soon enough."""
    with cluster() as other:
        members = other.members(2)
        address, _, _ = members[0].call(data_address)
        with contextlib.ExitStack() as stack:
            for _ in range(limits.HANDSHAKES_MAX + 20):
                stack.enter_context(raw(address))
            newcomer = other.newcomer(members)
        assert newcomer.call(harness.attributes) == (3, 3, 1, 3)


# --- Masters that are none --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("greeting", "closes"),
    [(b"", False), (b"", True), (b"SSH-2.0-OpenSSH_9.6\r\n" * 50, False), (b"HTTP/1.1 400 Bad Request\r\n\r\n", True)],
)
def test_a_server_that_is_no_master(greeting: bytes, closes: bool) -> None:
    with server(greeting, closes=closes) as address:
        comm = zpccl.Communicator(address)
        with pytest.raises(zpccl.MasterUnreachable) as caught:
            comm.connect(1)
    assert caught.value.address == address and address in str(caught.value)
    assert caught.value.result == Result.MASTER_CONNECTION_FAILED
    comm.close()


@pytest.mark.slow
def test_a_zmq_server_that_is_no_master() -> None:
    """The server speaks ZeroMQ and never answers: the call ends after REGISTRATION_TIMEOUT."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        comm = zpccl.Communicator(f"127.0.0.1:{port}")
        with pytest.raises(zpccl.MasterUnreachable, match="does not answer as a master"):
            comm.connect()


NOBODY = ["127.0.0.1:1", "[::1]:1", "no.such.host.invalid:48148", "256.1.1.1:5"]


@pytest.mark.parametrize("address", NOBODY)
def test_nobody_listens(address: str) -> None:
    comm = zpccl.Communicator(address)
    for _ in range(2):  # A user may call it again.
        with pytest.raises((zpccl.MasterUnreachable, zpccl.InvalidArgument)) as caught:
            comm.connect(2)
        assert caught.value.result in (Result.MASTER_CONNECTION_FAILED, Result.INVALID_ARGUMENT)
        assert address in str(caught.value)
    with pytest.raises((zpccl.MasterUnreachable, zpccl.InvalidUsage, zpccl.InvalidArgument)):
        comm.all_reduce(np.ones(3))


@pytest.mark.parametrize("attempts", [0, -1, 1.5, "3", None, True])
def test_bad_numbers_of_attempts(attempts: Any) -> None:
    with pytest.raises(zpccl.InvalidArgument, match="n_attempts"):
        zpccl.Communicator("127.0.0.1:1").connect(attempts)


def connect_with_another_version(peer: Peer, address: str) -> None:
    """Connects as a peer of the next protocol version. The import of the module makes the prefix from the version."""
    limits.PROTOCOL_VERSION += 1
    messages._PREFIX = messages.MAGIC + bytes([limits.PROTOCOL_VERSION])
    harness.connect(peer, address)


def test_a_peer_of_another_version(run: Cluster, busy: list[Child]) -> None:
    """The older master answers the newer peer. Seen from the other side, it is an older peer and a newer master."""
    failure = run.child().fails(connect_with_another_version, run.master.address)
    assert failure.kind == "VersionMismatch" and failure.result == Result.MASTER_CONNECTION_FAILED
    own = limits.PROTOCOL_VERSION
    assert f"version {own}, this peer {own + 1}" in failure.text
    until(lambda: f"protocol version {own + 1}" in run.master.log.read_text(), "the master to say so")
