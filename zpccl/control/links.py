"""Setting up links: listening, dialling, the handshake of data connections.

One thread runs an asyncio loop; it owns the listener and every socket until the link is complete. Complete links go to
`on_link` as a list of connected sockets, failures of dialling to `on_failed`; both are called in this thread and must
only pass on. All public methods may be called from any thread.

An incoming connection is bounded in time by LINK_SETUP_TIMEOUT and in number by HANDSHAKES_MAX; it may come before this
peer has heard of its sender, and then waits for that within its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from zpccl import limits
from zpccl.control.addresses import format_address, parse_address, reachable_at
from zpccl.control.greeting import mechanism_of
from zpccl.control.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    SIGNAL_BYTES,
    AuthenticationError,
    HandshakeError,
    LinkHello,
    Signal,
    Transcript,
    accepted,
    encode_refusal,
)
from zpccl.control.zap import RefusalLog
from zpccl.errors import PCCLError
from zpccl.protocol.messages import Neighbour

logger = logging.getLogger("zpccl.links")

_TIMEOUT_S = limits.LINK_SETUP_TIMEOUT_NS / limits.SECOND
_CONNECT_TIMEOUT_S = limits.CONNECT_TIMEOUT_NS / limits.SECOND
_STAGGER_S = limits.ADDRESS_STAGGER_NS / limits.SECOND


@dataclass
class _IncomingLink:
    """Connections of one link that have been accepted and committed so far."""

    count: int
    sockets: dict[int, tuple[socket.socket, Transcript]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class _Dialled:
    """A connection that the right peer has accepted."""

    connection: socket.socket
    transcript: Transcript


class LinkBroker:
    """Sets up the links of one peer.

    Args:
        peer_id: of this peer.
        listener: a listening, non-blocking socket; the broker owns it from now on.
        connection_count: TCP connections of each link that this peer dials.
        advertise: an address at which others reach this peer, beside those of its interfaces.
        on_link: called with the neighbour's id and the connected sockets of a complete link.
        on_failed: called with the neighbour's id and the reason when a link cannot be set up.
        requires_keys: the run has a secret, so no link is set up without a key from the master.
    """

    def __init__(
        self,
        peer_id: bytes,
        listener: socket.socket,
        connection_count: int,
        advertise: str | None,
        on_link: Callable[[bytes, list[socket.socket]], None],
        on_failed: Callable[[bytes, str], None],
        requires_keys: bool = False,
    ) -> None:
        self._peer_id = peer_id
        self._listener = listener
        self._connection_count = connection_count
        self._on_link = on_link
        self._on_failed = on_failed
        self._requires_keys = requires_keys
        self._refusals = RefusalLog(logger)
        self.addresses = reachable_at(listener, advertise)
        self._run_id = b""
        self._wanted: dict[bytes, asyncio.Event] = {}  # Set once a neighbour is wanted; kept while somebody waits.
        self._keys: dict[bytes, bytes] = {}  # Of the links to neighbours, by peer id.
        self._dials: dict[bytes, asyncio.Task[None]] = {}
        self._incoming: dict[tuple[bytes, bytes], _IncomingLink] = {}  # By sender and nonce.
        self._handshakes: set[asyncio.Task[None]] = set()
        self._questions: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="zpccl-links", daemon=True)
        self._thread.start()

    def set_run(self, run_id: bytes) -> None:
        """Tells the run that this peer is registered in; links are of one run."""
        self._call(self._set_run, run_id)

    def open(self, neighbour: Neighbour) -> None:
        """Dials a neighbour, or accepts its connections from now on."""
        self._call(self._open, neighbour)

    def close_link(self, peer_id: bytes) -> None:
        """Accepts no more connections of a neighbour, and stops dialling it."""
        self._call(self._forget, peer_id)

    def ask_mechanism(self, address: str, on_answer: Callable[[str, str], object]) -> None:
        """Asks a ZeroMQ server for its security mechanism; "" and a reason if it tells none. Called in the thread."""
        self._call(self._ask, address, on_answer)

    def close(self) -> None:
        """Closes the listener and all unfinished connections, and ends the thread."""
        self._call(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: there is nothing left to do.
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- In the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._accept_until_stopped())
        finally:
            self._loop.close()

    def _ask(self, address: str, on_answer: Callable[[str, str], object]) -> None:
        task = self._loop.create_task(_ask_mechanism(address, on_answer))
        self._questions.add(task)  # The loop itself holds no reference.
        task.add_done_callback(self._questions.discard)

    def _set_run(self, run_id: bytes) -> None:
        self._run_id = run_id

    def _open(self, neighbour: Neighbour) -> None:
        if self._requires_keys and not neighbour.link_key:
            return self._on_failed(neighbour.peer_id, "the master gave no key for it, and this run has a secret")
        self._keys[neighbour.peer_id] = neighbour.link_key
        self._want(neighbour.peer_id).set()
        if neighbour.dial and neighbour.peer_id not in self._dials:
            task = self._loop.create_task(self._dial(neighbour))
            self._dials[neighbour.peer_id] = task

    def _forget(self, peer_id: bytes) -> None:
        self._wanted.pop(peer_id, None)
        self._keys.pop(peer_id, None)
        task = self._dials.pop(peer_id, None)
        if task is not None:
            task.cancel()

    def _want(self, peer_id: bytes) -> asyncio.Event:
        return self._wanted.setdefault(peer_id, asyncio.Event())

    async def _accept_until_stopped(self) -> None:
        self._loop.add_reader(self._listener, self._accept)
        await self._stop.wait()
        self._loop.remove_reader(self._listener)
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}  # Those of forgotten dials too.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # It is gone already.
            return
        except OSError as error:  # Descriptors or memory ran out. The connection waits; so do we.
            logger.warning("cannot accept a data connection: %s", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(limits.RECONNECT_INTERVAL_NS / limits.SECOND, self._accept_again)
            return
        if len(self._handshakes) >= limits.HANDSHAKES_MAX:
            text = f"a data connection from {_peer_name(connection)}: too many others are unfinished"
            self._refusals.add(text, time.monotonic_ns())
            return connection.close()
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection))
        self._handshakes.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._handshakes.discard(task)
            connection.close()  # Unless it is part of a link by now, which has taken its descriptor.

        task.add_done_callback(end)

    def _accept_again(self) -> None:
        if not self._stop.is_set():
            self._loop.add_reader(self._listener, self._accept)

    # --- Accepting --------------------------------------------------------------------------------------------------

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await asyncio.wait_for(self._take_part(connection), _TIMEOUT_S)
        except AuthenticationError as error:
            self._refusals.add(f"a data connection from {_peer_name(connection)}: {error.message}", time.monotonic_ns())
        except (HandshakeError, OSError, asyncio.TimeoutError) as error:
            reason = "it said nothing in time" if isinstance(error, asyncio.TimeoutError) else error
            logger.debug("data connection dropped: %s", reason)

    async def _take_part(self, connection: socket.socket) -> None:
        hello = LinkHello.decode(await self._receive(connection, HELLO_BYTES))
        if hello.receiver != self._peer_id:
            await self._loop.sock_sendall(connection, encode_refusal())
            raise HandshakeError("it is for another peer")
        wanted = self._want(hello.sender)
        try:
            await wanted.wait()
        finally:
            if not wanted.is_set() and self._wanted.get(hello.sender) is wanted:
                del self._wanted[hello.sender]
        if hello.run_id != self._run_id:
            await self._loop.sock_sendall(connection, encode_refusal())
            raise HandshakeError("it is of another run")
        link_key = self._keys.get(hello.sender)
        if link_key is None:
            raise HandshakeError("its sender is a neighbour no more")
        transcript = Transcript(hello, os.urandom(NONCE_BYTES), link_key)
        await self._loop.sock_sendall(connection, transcript.encode(Signal.ACCEPT))
        transcript.check(await self._receive(connection, SIGNAL_BYTES), Signal.COMMIT)
        if hello.sender not in self._keys:
            raise HandshakeError("its sender is a neighbour no more")
        key = (hello.sender, hello.nonce)
        link = self._incoming.setdefault(key, _IncomingLink(hello.count))
        try:
            if link.count != hello.count or hello.index in link.sockets:
                raise HandshakeError(f"connection {hello.index} of {hello.count} does not fit its link")
            link.sockets[hello.index] = connection, transcript
            if len(link.sockets) == link.count:
                self._complete(hello.sender, link)
            await link.complete.wait()
        finally:
            if not link.complete.is_set() and link.sockets.get(hello.index) == (connection, transcript):
                del link.sockets[hello.index]
            if link.complete.is_set() or not link.sockets:
                self._incoming.pop(key, None)

    def _complete(self, sender: bytes, link: _IncomingLink) -> None:
        """All connections of a link are committed: READY goes out, and the link to the data plane."""
        link.complete.set()
        sockets = []
        for connection, transcript in (link.sockets[index] for index in range(link.count)):
            sockets.append(socket.socket(fileno=connection.detach()))
            # A fresh socket takes so few bytes at once; if not, the link is broken and the data plane will notice.
            with contextlib.suppress(OSError):
                sockets[-1].send(transcript.encode(Signal.READY))
        self._on_link(sender, sockets)

    # --- Dialling ---------------------------------------------------------------------------------------------------

    async def _dial(self, neighbour: Neighbour) -> None:
        try:
            sockets = await asyncio.wait_for(self._set_up(neighbour), _TIMEOUT_S)
        except (HandshakeError, OSError, asyncio.TimeoutError) as error:
            self._dials.pop(neighbour.peer_id, None)
            reason = "no answer in time" if isinstance(error, asyncio.TimeoutError) else _text(error)
            self._on_failed(neighbour.peer_id, f"{reason} at {', '.join(neighbour.addresses) or 'no address'}")
            return
        self._dials.pop(neighbour.peer_id, None)
        self._on_link(neighbour.peer_id, sockets)

    async def _set_up(self, neighbour: Neighbour) -> list[socket.socket]:
        nonce = os.urandom(16)

        def hello(index: int) -> LinkHello:
            return LinkHello(self._run_id, self._peer_id, neighbour.peer_id, nonce, index, self._connection_count)

        key = neighbour.link_key
        address, first = await self._dial_any(neighbour.addresses, hello(0), key)
        dialled = [first]
        try:
            rest = [self._dial_one(address, hello(index), key) for index in range(1, self._connection_count)]
            dialled += await _all_or_none(rest)
            await _all_or_none([self._confirm(one) for one in dialled])
        except BaseException:
            for one in dialled:
                one.connection.close()
            raise
        return [one.connection for one in dialled]

    async def _dial_any(self, addresses: tuple[str, ...], hello: LinkHello, key: bytes) -> tuple[str, _Dialled]:
        """The first address where the right peer answers. Each has a head start over the next."""
        reasons: list[str] = []
        tries: dict[asyncio.Task[_Dialled], str] = {}
        waiting = list(addresses)
        try:
            while waiting or tries:
                if waiting:
                    address = waiting.pop(0)
                    tries[self._loop.create_task(self._dial_one(address, hello, key))] = address
                timeout = _STAGGER_S if waiting else None
                done, _ = await asyncio.wait(tries, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    address = tries.pop(task)
                    error = task.exception()
                    if error is None:
                        return address, task.result()
                    reasons.append(f"{address}: {_text(error)}")
            raise HandshakeError("; ".join(reasons) or "it gave no address")
        finally:
            for task in tries:
                task.cancel()
                task.add_done_callback(_close_result)

    async def _dial_one(self, address: str, hello: LinkHello, key: bytes) -> _Dialled:
        host, port = parse_address(address)
        try:  # A number needs no thread that asks a name server.
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, target = found[0]
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            await self._loop.sock_connect(connection, target)
            await self._loop.sock_sendall(connection, hello.encode())
            return _Dialled(connection, accepted(hello, await self._receive(connection, SIGNAL_BYTES), key))
        except BaseException:
            connection.close()
            raise

    async def _confirm(self, one: _Dialled) -> None:
        await self._loop.sock_sendall(one.connection, one.transcript.encode(Signal.COMMIT))
        one.transcript.check(await self._receive(one.connection, SIGNAL_BYTES), Signal.READY)

    async def _receive(self, connection: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self._loop.sock_recv(connection, size - len(data))
            if not piece:
                raise HandshakeError("the other side closed the connection")
            data += piece
        return data


async def _ask_mechanism(address: str, on_answer: Callable[[str, str], object]) -> None:
    try:
        on_answer(await asyncio.wait_for(mechanism_of(*parse_address(address)), _CONNECT_TIMEOUT_S), "")
    except (OSError, asyncio.TimeoutError) as error:
        on_answer("", f"the connection broke during the handshake, then: {str(error) or 'no answer in time'}")


def _peer_name(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
        return format_address(host.removeprefix("::ffff:"), port)
    except OSError:
        return "an unknown address"


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, PCCLError) else str(error)


async def _all_or_none(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all; if one fails, the others are cancelled and their sockets closed, and it raises."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_close_result)
        raise


def _close_result(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is None and isinstance(task.result(), _Dialled):
        task.result().connection.close()
