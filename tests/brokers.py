"""Link brokers for tests that use them without an engine, and a relay that records what diallers send."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

from e2e.harness import HANG_SECONDS
from e2e.strangers import raw, read

from zpccl.control.addresses import format_address, listen_locally, listen_on_first_free
from zpccl.control.handshake import HELLO_BYTES, SIGNAL_BYTES, LinkHello, Signal, Transcript, accepted
from zpccl.control.links import LinkBroker, NewConnection, NewLink
from zpccl.engine.ciphers import Cipher
from zpccl.protocol.messages import Neighbour

RUN = b"r" * 16


class Broker:
    """A broker, with everything that it hands over and reports.

    With `ciphers`, links need the key of the pair. A `local` broker can also be reached at a Unix-domain socket.
    """

    def __init__(self, name: str, connections: int, ciphers: tuple[Cipher, ...] = (), *, local: bool = False) -> None:
        self.peer_id = name.encode().ljust(16, b".")
        self.links: queue.SimpleQueue[NewLink] = queue.SimpleQueue()
        self.added: queue.SimpleQueue[NewConnection] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[tuple[bytes, str]] = queue.SimpleQueue()
        self.broker = LinkBroker(
            self.peer_id,
            listen_on_first_free("127.0.0.1", range(1)),
            connections,
            None,
            self.links.put,
            lambda *failure: self.failures.put(failure),
            requires_keys=bool(ciphers),
            ciphers=ciphers or (Cipher.PLAIN,),
            on_connection=self.added.put,
            local_listener=listen_locally(self.peer_id) if local else None,
        )
        self.broker.set_run(RUN)
        self.address = self.broker.addresses[0]
        self._sockets: list[socket.socket] = []

    def meet(self, other: Broker, *addresses: str, dial: bool = False, key: bytes = b"") -> None:
        """Opens a link to another broker, at its own address or at the given ones."""
        self.broker.open(Neighbour(other.peer_id, "other", addresses or (other.address,), dial, key))

    def dial(self, other: Broker, *addresses: str, key: bytes = b"") -> None:
        """Dials a link to another broker, which waits for it."""
        other.meet(self, key=key)
        self.meet(other, *addresses, dial=True, key=key)

    def link(self) -> NewLink:
        """Waits for a link. It is closed together with this broker."""
        link = self.links.get(timeout=HANG_SECONDS)
        self._sockets += link.sockets
        return link

    def connection(self) -> NewConnection:
        """Waits for an added connection. It is closed together with this broker."""
        new = self.added.get(timeout=HANG_SECONDS)
        self._sockets.append(new.connection)
        return new

    def failure(self) -> str:
        """Waits for the reason of a failure."""
        return self.failures.get(timeout=HANG_SECONDS)[1]

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.broker.close()
        while not self.links.empty():
            self.link()
        while not self.added.empty():
            self.connection()
        for connection in self._sockets:
            connection.close()

    def has_no_link(self) -> bool:
        """Closes the broker. True if it had nothing to hand over."""
        self.broker.close()
        return self.links.empty() and self.added.empty()


@contextlib.contextmanager
def brokers(
    *names: str, connections: int = 3, local: bool = False, ciphers: tuple[Cipher, ...] = ()
) -> Iterator[list[Broker]]:
    """Brokers that are alike."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Broker(name, connections, ciphers, local=local)) for name in names]


def say_hello(connection: socket.socket, hello: LinkHello, key: bytes = b"") -> Transcript:
    """The dialler's first step, by hand."""
    connection.sendall(hello.encode(key))
    answer = read(connection, SIGNAL_BYTES)
    read(connection, len(hello.padding))
    return accepted(hello, answer, key)


def shake_hands(connection: socket.socket, hello: LinkHello, key: bytes = b"") -> None:
    """Plays all steps of a dialler by hand."""
    connection.sendall(say_hello(connection, hello, key).encode(Signal.COMMIT) + hello.padding)


class Recorder:
    """Relays `count` handshakes between a dialler and an acceptor, and records what the dialler sends in each."""

    def __init__(self, target: str, count: int) -> None:
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self.listener.getsockname())
        self.said: list[bytes] = []
        self._threads = [threading.Thread(target=self.relay) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def relay(self) -> None:
        incoming, _ = self.listener.accept()
        with incoming, raw(self.target) as outgoing:
            hello = read(incoming, HELLO_BYTES)
            outgoing.sendall(hello)
            padding = len(LinkHello.decode(hello).padding)
            incoming.sendall(read(outgoing, SIGNAL_BYTES + padding))
            commit = read(incoming, SIGNAL_BYTES + padding)
            outgoing.sendall(commit)
            self.said.append(hello + commit)
            incoming.sendall(read(outgoing, SIGNAL_BYTES))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(HANG_SECONDS)
        self.listener.close()
