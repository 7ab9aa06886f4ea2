"""Strangers: connections that do not come from peers."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator

import zmq

from e2e import harness
from e2e.harness import Peer
from zpccl.control.addresses import parse_address
from zpccl.control.handshake import LinkHello
from zpccl.protocol import messages
from zpccl.protocol.messages import decode_master_message

MIB = 1 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
"""ZMTP 3.0, mechanism NULL (rfc.zeromq.org/spec/23)."""
_METADATA = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = b"\x04" + bytes([len(_METADATA)]) + _METADATA


def receive(stranger: zmq.Socket[bytes]) -> messages.MasterMessage:
    assert stranger.poll(int(harness.HANG_SECONDS * 1000)), "no answer"
    return decode_master_message(stranger.recv())


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{address}")
        yield stranger


def raw(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address), harness.HANG_SECONDS)


def reset_when_closed(connection: socket.socket) -> None:
    """Makes the end of a connection a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def read(connection: socket.socket, size: int) -> bytes:
    """Waits for `size` bytes, and returns them."""
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, "closed"
        data += piece
    return data


def is_dropped(connection: socket.socket) -> bool:
    """Waits until the other side closes the connection."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


GARBAGE = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": os.urandom(100_000),
    "zeros": bytes(4096),
    "messages of ZMTP 1.0": b"\x01\x00" + b"\x05\x00zp\x01\x90" * 100,
    "half a greeting": GREETING[:20],
    "a greeting, then noise": GREETING + os.urandom(5000),
}


def data_address(peer: Peer) -> tuple[str, bytes, bytes]:
    options = harness.loop_of(peer.comm).options
    return options.addresses[0], options.peer_id, harness.run_id_of(peer.comm)


def hello_of_nobody(run_id: bytes, receiver: bytes) -> bytes:
    return LinkHello(run_id, b"?" * 16, receiver, b"n" * 16, 0, 4).encode(b"")


@contextlib.contextmanager
def server(greeting: bytes, *, closes: bool) -> Iterator[str]:
    """A TCP server that is not a master. It sends `greeting` to each client, then hangs up or stays silent."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            with contextlib.suppress(OSError):  # The listener is shut down.
                while True:
                    connection, _ = listener.accept()
                    with contextlib.suppress(OSError):
                        connection.sendall(greeting)
                    if closes:
                        connection.close()
                    else:
                        stack.push(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
