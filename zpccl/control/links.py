"""Setting up links: who dials and who accepts, which connections become the link; dialling lost connections again.

One thread runs an asyncio loop; it owns the listeners and every socket until the link is complete. Complete links go to
`on_link` as a list of connected sockets, and failures of dialling to `on_failed`; both are called in this thread and
must only pass their arguments on. All public methods may be called from any thread.

Both ends dial, since one of them may be behind a NAT or a firewall. The end with `Neighbour.dial` dials at once. The
other one dials DIAL_HEAD_START later, and not while connections that the first has begun by then are in their
handshake. If both dial at the same time, the end with the greater peer id decides which connections become the link:

    the greater id    the first of two that happens: its own dial sends COMMIT, or the other's dial has sent all COMMITs
      own dial        is in doubt until READY comes, or it fails. The other's connections wait for that: if it succeeds
                      they are closed, if it fails they become the link
      other's dial    becomes the link, and its own dial is given up; it has sent no COMMIT, and sends none any more
    the smaller id    takes what the other one commits, gives its own dial up, and closes its connections

When the dial of one end has succeeded, the other end has given its own up. So a connection whose HELLO was read before
that is stale, and is closed. A HELLO that is read later belongs to a new link: the other end has lost the first one.

When an open link loses a connection, the side that dialled the link dials it again, until it succeeds or the link is
lost. The new connection goes to `on_connection`, at the acceptor first. The broker numbers its links and passes the
number on with each, so that it and its user know which link they mean.

An incoming connection must complete its handshake within LINK_SETUP_TIMEOUT and send its first message within
HELLO_TIMEOUT; at most HANDSHAKES_MAX are unfinished. At this limit, or if those that have not yet proved to come from a
neighbour are HANDSHAKES_OF_ADDRESS_MAX of one address or take a quarter of the descriptors of this process, a new one
takes the place of a random one of these. So no stranger can keep the port shut: a neighbour's connection proves it a
moment after it is accepted. Nor can a neighbour: of those that proved to come from it, only the latest
LINK_CONNECTIONS_MAX stay, enough for one link. A connection that comes before this peer has heard of its sender waits
for that, within its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from zpccl import limits
from zpccl.control.addresses import let_pass_descriptors, other_end, parse_address, plain_host, reachable_at
from zpccl.control.descriptors import share_of_descriptors
from zpccl.control.dialling import Dialler, Results, Secrets, close_all, receive, text_of
from zpccl.control.forks import closed_in_children
from zpccl.control.greeting import mechanism_of
from zpccl.control.handshake import (
    HELLO_BYTES,
    NO_SHARE,
    NONCE_BYTES,
    SIGNAL_BYTES,
    AuthenticationError,
    HandshakeError,
    LinkHello,
    Signal,
    Transcript,
    check_hello,
    encode_refusal,
)
from zpccl.engine.ciphers import SHARE_BYTES, Cipher, CipherKeys, best_of, public_share
from zpccl.errors import printable
from zpccl.observe.logs import RefusalLog
from zpccl.protocol.messages import Neighbour
from zpccl.state.workers import start_thread

logger = logging.getLogger("zpccl.links")

_TIMEOUT_S = limits.LINK_SETUP_TIMEOUT_NS / limits.SECOND
_HELLO_TIMEOUT_S = limits.HELLO_TIMEOUT_NS / limits.SECOND
_CONNECT_TIMEOUT_S = limits.CONNECT_TIMEOUT_NS / limits.SECOND
_HEAD_START_S = limits.DIAL_HEAD_START_NS / limits.SECOND
_RETRY_S = limits.LINK_RETRY_INTERVAL_NS / limits.SECOND
_RETRY_MAX_S = limits.LINK_RETRY_INTERVAL_MAX_NS / limits.SECOND
_THIS_HOST = "this host"
T = TypeVar("T")


@dataclass
class _IncomingLink:
    """Connections of one link that have been accepted and committed so far."""

    count: int
    cipher: Cipher
    sockets: dict[int, tuple[socket.socket, Transcript, CipherKeys | None]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Handshake:
    """An incoming connection until it is part of a link.

    Attributes:
        host: the host that it comes from; "" once it has proved to come from a neighbour.
        sender: that neighbour, once proved.
        awaited: the neighbour that it claims to come from, if this peer has not heard of it yet.
        arrival: set once this peer has heard of that neighbour.
        hello_timer: ends the handshake if the first message does not come in time.
        timer: ends the handshake when its time is up.
    """

    host: str
    hello_timer: asyncio.TimerHandle
    timer: asyncio.TimerHandle
    sender: bytes = b""
    awaited: bytes = b""
    arrival: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Dial:
    """A link that this side dials, until it is set up, has failed or is given up."""

    task: asyncio.Task[None] | None = None
    has_committed: bool = False
    """True once the other end may have accepted it as the link."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class NewLink:
    """A link that is set up. Its sockets belong to the receiver of this object.

    Attributes:
        peer_id: its other end.
        number: the broker's number of this link.
        sockets: all its connections.
        cipher_keys: cipher and keys of each connection; None if the link is not encrypted.
    """

    peer_id: bytes
    number: int
    sockets: list[socket.socket]
    cipher_keys: list[CipherKeys] | None = field(repr=False)


@dataclass(frozen=True)
class NewConnection:
    """A connection that an open link gets later, mostly for a lost one. Its socket belongs to the receiver of this.

    Attributes:
        peer_id: of the other end.
        number: the broker's number of the link, counted from 1.
        index: its place in the link.
        generation: greater than that of any earlier connection in this place.
        keys: its cipher and keys; None if the link is not encrypted.
        ready: sent before anything else, and only if the data plane takes the connection; empty at the dialler.
    """

    peer_id: bytes
    number: int
    index: int
    generation: int
    connection: socket.socket
    keys: CipherKeys | None = field(repr=False)
    ready: bytes


@dataclass
class _OpenLink:
    """A link that was handed over."""

    number: int
    nonce: bytes
    cipher: Cipher
    neighbour: Neighbour | None
    """The neighbour, if this side dialled the link; None if the other side did."""
    generations: dict[int, int] = field(default_factory=dict)  # The last one dialled, by place in the link.
    joined_s: dict[int, float] = field(default_factory=dict)  # Time of the last dial that succeeded, by place.
    delays_s: dict[int, float] = field(default_factory=dict)  # Delay before the next dial, by place.
    dials: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class LinkBroker:
    """Sets up the links of one peer.

    Args:
        peer_id: of this peer.
        listener: a listening, non-blocking socket; the broker owns it from now on.
        connection_count: TCP connections of each link that this peer dials; 0: connection_count.py chooses.
        advertise: an address at which others reach this peer, in addition to those of its interfaces.
        on_link: called with each link that is complete.
        on_failed: called with the neighbour's id and the reason when a link cannot be set up.
        on_connection: called with each connection that is added to an open link.
        requires_keys: the run has a secret, so no link is set up without a key from the master.
        ciphers: the ciphers that a link may use; only PLAIN works without keys.
        masters: addresses of the masters; other peers mostly reach this one at the address that it uses towards them.
        local_listener: for peers of this host, at its `local_address`; the broker owns it from now on. None: peers of
            this host are dialled and accepted like others.
    """

    def __init__(
        self,
        peer_id: bytes,
        listener: socket.socket,
        connection_count: int,
        advertise: str | None,
        on_link: Callable[[NewLink], None],
        on_failed: Callable[[bytes, str], None],
        on_connection: Callable[[NewConnection], None],
        requires_keys: bool = False,
        ciphers: Sequence[Cipher] = (Cipher.PLAIN,),
        local_listener: socket.socket | None = None,
        masters: Sequence[str] = (),
    ) -> None:
        self._peer_id = peer_id
        self._listeners = [closed_in_children(each) for each in (listener, local_listener) if each is not None]
        self._connection_count = connection_count
        self._on_link = on_link
        self._on_failed = on_failed
        self._requires_keys = requires_keys
        self._ciphers = tuple(ciphers)
        self._on_connection = on_connection
        self._links: dict[bytes, _OpenLink] = {}  # The last one with each neighbour, while it is open.
        self._link_count = 0  # Handed over so far.
        self._refusals = RefusalLog(logger)
        self.addresses = reachable_at(listener, advertise, masters)
        self._run_id = b""
        self._keys: dict[bytes, bytes] = {}  # Link keys of the wanted neighbours, by peer id.
        self._dials: dict[bytes, _Dial] = {}  # By neighbour.
        self._incoming: dict[tuple[bytes, bytes], _IncomingLink] = {}  # By sender and nonce.
        self._handshakes: dict[asyncio.Task[None], _Handshake] = {}  # By the task that runs it.
        self._questions: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_make_task)
        self._loop.set_default_executor(_LookUps())
        self._outsiders = asyncio.Semaphore(limits.OUTSIDER_DIALS_MAX)
        self._dialler = Dialler(self._loop, listener, local_listener is not None, self._adopt)
        self._stop = asyncio.Event()
        self._has_begun = threading.Lock()  # Taken by the thread, or by a failed constructor.
        self._thread = threading.Thread(target=self._run, name="zpccl-links", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:  # The system has no thread to give, or Ctrl-C came meanwhile.
            if self._has_begun.acquire(blocking=False):
                self._loop.close()
            else:
                self.close()
            raise

    def set_run(self, run_id: bytes) -> None:
        """Sets the run in which this peer is registered; all links belong to one run."""
        self._call(self._set_run, run_id)

    def open(self, neighbour: Neighbour, *, is_outsider: bool = False) -> None:
        """Accepts a neighbour's connections from now on, and dials it unless there is a link to it.

        At most OUTSIDER_DIALS_MAX outsiders are dialled at a time: silent addresses would use up the descriptors.
        """
        self._call(self._open, neighbour, is_outsider)

    def close_link(self, peer_id: bytes) -> None:
        """Accepts no more connections of a neighbour, and stops dialling it."""
        self._call(self._forget, peer_id)

    def redial(self, peer_id: bytes, number: int, index: int, generation: int) -> None:
        """Dials a lost connection, if this side dialled the link and it is still the last with this neighbour.

        Args:
            peer_id: of the other end.
            number: of the link; see `NewConnection`.
            index: its place in the link.
            generation: that of the last connection in this place; -1: there was none. Such a place is given up once
                the delay between dials is at its maximum, and is not dialled again: the other end may lack descriptors.
        """
        self._call(self._redial, peer_id, number, index, generation)

    def lose_link(self, peer_id: bytes, number: int) -> None:
        """Notes that a link is lost: no connection is added to it any more."""
        self._call(self._lose_link, peer_id, number)

    def ask_mechanism(self, address: str, on_answer: Callable[[str, str], object]) -> None:
        """Asks a ZeroMQ server for its security mechanism. `on_answer` is called in the broker's thread, with the
        mechanism, or with "" and a reason if there was no answer.
        """
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
        if not self._has_begun.acquire(blocking=False):
            return
        # Otherwise a connection that ends at the wrong moment would end a program that has not left SIGPIPE ignored.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
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

    def _open(self, neighbour: Neighbour, is_outsider: bool) -> None:
        if self._requires_keys and not neighbour.link_key:
            return self._on_failed(neighbour.peer_id, "the master gave no key for it, and this run has a secret")
        self._keys[neighbour.peer_id] = neighbour.link_key
        for handshake in self._handshakes.values():
            if handshake.awaited == neighbour.peer_id:
                handshake.arrival.set()
        if neighbour.peer_id not in self._dials and neighbour.peer_id not in self._links:
            dial = self._dials[neighbour.peer_id] = _Dial()
            dial.task = self._loop.create_task(self._dial(neighbour, dial, is_outsider))

    def _forget(self, peer_id: bytes) -> None:
        self._keys.pop(peer_id, None)
        self._give_up(peer_id)
        self._drop_link(peer_id)

    async def _accept_until_stopped(self) -> None:
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)
        await self._stop.wait()
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        self._links.clear()
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}  # Also those of dials given up.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # The connection is gone already.
            return
        except OSError as error:  # Descriptors or memory ran out. The connection stays queued; try again later.
            self._refusals.write(logging.WARNING, f"cannot accept a data connection: {error}", time.monotonic_ns())
            self._loop.remove_reader(listener)
            self._loop.call_later(limits.RECONNECT_INTERVAL_NS / limits.SECOND, self._accept_again, listener)
            return
        host = _THIS_HOST if listener.family == socket.AF_UNIX else plain_host(address[0])
        closed_in_children(connection).setblocking(False)
        self._begin_handshake(connection, host)

    async def _adopt(self, connection: socket.socket, hello: bytes) -> None:
        """Accepts a connection that both sides dialled. Waits for the end of its handshake."""
        try:
            host = plain_host(connection.getpeername()[0])
        except OSError:  # It was reset a moment ago.
            connection.close()
            raise
        task = self._begin_handshake(connection, host, hello)
        if task is not None:
            await asyncio.wait([task])

    def _begin_handshake(self, connection: socket.socket, host: str, hello: bytes = b"") -> asyncio.Task[None] | None:
        if not self._make_room(host):
            connection.close()
            return None
        name = _peer_name(connection)
        task = self._loop.create_task(self._take_part(connection, hello))
        hello_timer, timer = (self._loop.call_later(seconds, task.cancel) for seconds in (_HELLO_TIMEOUT_S, _TIMEOUT_S))
        self._handshakes[task] = handshake = _Handshake(host, hello_timer, timer)

        def end(task: asyncio.Task[None]) -> None:
            self._handshakes.pop(task, None)
            handshake.hello_timer.cancel()
            handshake.timer.cancel()
            self._note_end(name, task)
            connection.close()  # Without effect if a link has taken its descriptor.

        task.add_done_callback(end)
        return task

    def _make_room(self, host: str) -> bool:
        """Ends a handshake if a new one from this host would be one too many. False: none may be ended."""
        unproved = [task for task, handshake in self._handshakes.items() if handshake.host]
        candidates = [task for task in unproved if self._handshakes[task].host == host]
        if len(candidates) < limits.HANDSHAKES_OF_ADDRESS_MAX:
            if len(self._handshakes) < limits.HANDSHAKES_MAX and len(unproved) < share_of_descriptors(4):
                return True
            candidates = unproved
        text = f"a data connection from {host}: too many other handshakes are unfinished"
        self._refusals.add(text, time.monotonic_ns())
        if not candidates:
            return False
        self._end_early(random.choice(candidates))
        return True

    def _end_early(self, task: asyncio.Task[None]) -> None:
        """Ends a handshake that others need the room of."""
        del self._handshakes[task]
        task.cancel()

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._stop.is_set():
            self._loop.add_reader(listener, self._accept, listener)

    # --- Accepting --------------------------------------------------------------------------------------------------

    def _note_end(self, name: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AuthenticationError):
            self._refusals.add(f"a data connection from {name}: {error.message}", time.monotonic_ns())
        elif task.cancelled() or isinstance(error, (HandshakeError, OSError)):
            logger.debug("data connection from %s dropped: %s", name, error or "it took too long")
        elif error is not None:
            logger.error("the handshake with %s failed; this is a bug in zpccl", name, exc_info=error)

    async def _take_part(self, connection: socket.socket, data: bytes) -> None:
        task = asyncio.current_task()
        assert task is not None
        handshake = self._handshakes[task]
        data = data or await receive(self._loop, connection, HELLO_BYTES)
        handshake.hello_timer.cancel()
        hello = LinkHello.decode(data)
        if hello.receiver != self._peer_id:
            await self._loop.sock_sendall(connection, encode_refusal())
            raise HandshakeError("it is for another peer")
        if hello.sender not in self._keys:
            handshake.awaited = hello.sender
            await handshake.arrival.wait()
        if hello.run_id != self._run_id:
            await self._loop.sock_sendall(connection, encode_refusal())
            raise HandshakeError("it is of another run")
        link_key = self._keys.get(hello.sender)
        if link_key is None:
            raise HandshakeError("its sender is no longer a neighbour")
        check_hello(data, link_key)
        handshake.host, handshake.sender = "", hello.sender
        of_sender = [task for task, each in self._handshakes.items() if each.sender == hello.sender]
        if len(of_sender) > limits.LINK_CONNECTIONS_MAX:
            self._end_early(of_sender[0])
        self._dialler.choose_congestion_control(connection)
        cipher = best_of(self._ciphers, hello.ciphers)
        if cipher is None:
            await self._loop.sock_sendall(connection, encode_refusal(Signal.DISAGREE))
            text = f"the other side offers no cipher that this side accepts (encrypt=): {hello.ciphers}"
            raise AuthenticationError(text)
        private, share = _new_share(cipher is not Cipher.PLAIN)
        transcript = Transcript(hello, os.urandom(NONCE_BYTES), link_key, cipher, share)
        await self._loop.sock_sendall(connection, transcript.encode(Signal.ACCEPT))
        await self._loop.sock_sendall(connection, hello.padding)  # In packets of its own.
        transcript.check(await receive(self._loop, connection, SIGNAL_BYTES), Signal.COMMIT)
        await receive(self._loop, connection, len(hello.padding))
        keys = transcript.derive_keys(private, is_dialler=False)
        if hello.sender not in self._keys:
            raise HandshakeError("its sender is no longer a neighbour")
        if hello.generation:
            return self._join(hello, connection, transcript, keys)
        key = (hello.sender, hello.nonce)
        link = self._incoming.setdefault(key, _IncomingLink(hello.count, cipher))
        try:
            if (link.count, link.cipher) != (hello.count, cipher) or hello.index in link.sockets:
                raise HandshakeError(f"connection {hello.index} of {hello.count} does not fit its link")
            link.sockets[hello.index] = connection, transcript, keys
            while len(link.sockets) == link.count and (dial := self._own_dial(hello.sender)) is not None:
                await dial.ended.wait()
            if len(link.sockets) == link.count and not link.complete.is_set():
                self._complete(hello, link)
            await link.complete.wait()
        finally:
            if not link.complete.is_set() and link.sockets.get(hello.index) == (connection, transcript, keys):
                del link.sockets[hello.index]
            if link.complete.is_set() or not link.sockets:
                self._incoming.pop(key, None)

    def _join(
        self, hello: LinkHello, connection: socket.socket, transcript: Transcript, keys: CipherKeys | None
    ) -> None:
        """Adds a connection to an open link. Only the side that dialled the link may dial it: it counts generations."""
        link = self._links.get(hello.sender)
        if link is None or link.nonce != hello.nonce or link.neighbour is not None:
            raise HandshakeError("it is for a link that is not open")
        if transcript.cipher is not link.cipher:
            raise HandshakeError("the other connections of its link have another cipher")
        taken = _taken(connection)
        ready = transcript.encode(Signal.READY)
        new = NewConnection(hello.sender, link.number, hello.index, hello.generation, taken, keys, ready)
        self._on_connection(new)

    def _complete(self, hello: LinkHello, link: _IncomingLink) -> None:
        """Completes a link whose connections are all committed: sends READY, and hands the link over."""
        self._give_up(hello.sender)
        link.complete.set()
        sockets, cipher_keys = [], []
        for connection, transcript, keys in (link.sockets[index] for index in range(link.count)):
            sockets.append(_taken(connection))
            # A fresh socket takes these few bytes at once; if not, the link is broken and the data plane will notice.
            with contextlib.suppress(OSError):
                sockets[-1].send(transcript.encode(Signal.READY))
            cipher_keys.append(keys)
        self._note_link(hello.sender, hello.nonce, link.cipher, None)
        self._tell_link(hello.sender, sockets, cipher_keys)

    def _tell_link(self, peer_id: bytes, sockets: list[socket.socket], cipher_keys: list[CipherKeys | None]) -> None:
        """Hands a link over. All its connections are encrypted, or none is."""
        encrypted = [keys for keys in cipher_keys if keys is not None]
        number = self._links[peer_id].number
        self._on_link(NewLink(peer_id, number, sockets, encrypted or None))

    # --- Dialling ---------------------------------------------------------------------------------------------------

    async def _dial(self, neighbour: Neighbour, dial: _Dial, is_outsider: bool) -> None:
        if not neighbour.dial:
            await self._wait_for_other(neighbour.peer_id)
        async with self._outsiders if is_outsider else contextlib.nullcontext():
            await self._dial_now(neighbour, dial)

    async def _dial_now(self, neighbour: Neighbour, dial: _Dial) -> None:
        peer_id, nonce, results = neighbour.peer_id, os.urandom(NONCE_BYTES), Results()

        def may_commit() -> None:
            if self._dials.get(peer_id) is not dial:
                raise HandshakeError("the link was set up by the other side")
            dial.has_committed = True

        private, share = _new_share(self._ciphers != (Cipher.PLAIN,))
        offers = sum(1 << cipher for cipher in self._ciphers)
        hello = LinkHello(self._run_id, self._peer_id, peer_id, nonce, 0, self._connection_count, offers, share)
        secrets = Secrets(neighbour.link_key, private)
        try:
            set_up = self._dialler.set_up(neighbour, hello, secrets, results, may_commit)
            dialled = await asyncio.wait_for(set_up, _TIMEOUT_S)
        except (HandshakeError, OSError, asyncio.TimeoutError) as error:
            if self._end_dial(peer_id, dial):
                reason = f"no link in {_TIMEOUT_S:.0f} s" if isinstance(error, asyncio.TimeoutError) else ""
                self._on_failed(peer_id, results.text(reason))
            return
        if not self._end_dial(peer_id, dial):
            return close_all(dialled)
        for task, handshake in self._handshakes.items():
            if handshake.sender == peer_id:
                task.cancel()
        self._note_link(peer_id, nonce, dialled[0].transcript.cipher, neighbour)
        self._tell_link(peer_id, [one.connection for one in dialled], [one.keys for one in dialled])

    async def _wait_for_other(self, peer_id: bytes) -> None:
        """Waits for the other end's head start, then until the handshakes of its connections have ended.

        Not of those that begin later: a stranger could repeat a HELLO that it has seen, again and again.
        """
        await asyncio.sleep(_HEAD_START_S)
        if begun := [task for task, handshake in self._handshakes.items() if handshake.sender == peer_id]:
            await asyncio.wait(begun)

    def _own_dial(self, peer_id: bytes) -> _Dial | None:
        """This side's dial, if connections that the other side dialled must wait for its outcome."""
        dial = self._dials.get(peer_id)
        return dial if dial is not None and dial.has_committed and self._peer_id > peer_id else None

    def _end_dial(self, peer_id: bytes, dial: _Dial) -> bool:
        """Removes a dial that is over. False: it was given up before."""
        if self._dials.get(peer_id) is not dial:
            return False
        del self._dials[peer_id]
        dial.ended.set()
        return True

    def _give_up(self, peer_id: bytes) -> None:
        """Ends a dial that is no longer wanted."""
        dial = self._dials.get(peer_id)
        if dial is not None and dial.task is not None:
            self._end_dial(peer_id, dial)
            dial.task.cancel()

    # --- Dialling again ---------------------------------------------------------------------------------------------

    def _note_link(self, peer_id: bytes, nonce: bytes, cipher: Cipher, neighbour: Neighbour | None) -> None:
        self._drop_link(peer_id)
        self._link_count += 1
        self._links[peer_id] = _OpenLink(self._link_count, nonce, cipher, neighbour)

    def _drop_link(self, peer_id: bytes) -> None:
        link = self._links.pop(peer_id, None)
        for task in [] if link is None else list(link.dials.values()):
            task.cancel()

    def _lose_link(self, peer_id: bytes, number: int) -> None:
        link = self._links.get(peer_id)
        if link is not None and link.number == number:
            self._drop_link(peer_id)

    def _redial(self, peer_id: bytes, number: int, index: int, generation: int) -> None:
        link = self._links.get(peer_id)
        if link is None or link.number != number or index in link.dials:
            return
        if link.neighbour is None:
            return  # The other side dialled this link.
        is_new = generation < 0
        if is_new and index in link.generations:
            return  # It was dialled before: the connection may be on its way to the caller.
        link.generations[index] = max(generation, link.generations.get(index, 0))
        if self._loop.time() - link.joined_s.get(index, 0.0) > _RETRY_MAX_S:
            link.delays_s[index] = 0.0  # Not if the last one was lost soon after it joined: then the delay stays.
        dial = self._dial_again(link, link.neighbour, index, is_new)
        link.dials[index] = self._loop.create_task(dial)

    async def _dial_again(self, link: _OpenLink, neighbour: Neighbour, index: int, is_new: bool) -> None:
        while self._links.get(neighbour.peer_id) is link:  # In Python 3.11 wait_for() may lose a cancellation.
            delay_s = link.delays_s.get(index, 0.0)
            link.delays_s[index] = min(max(2 * delay_s, _RETRY_S), _RETRY_MAX_S)
            await asyncio.sleep(delay_s)
            generation = link.generations[index] = link.generations[index] + 1
            ids = self._run_id, self._peer_id, neighbour.peer_id
            private, share = _new_share(link.cipher is not Cipher.PLAIN)
            place = index, limits.LINK_CONNECTIONS_MAX
            hello = LinkHello(*ids, link.nonce, *place, 1 << link.cipher, share, generation)
            try:
                secrets = Secrets(neighbour.link_key, private)
                one = await asyncio.wait_for(self._dialler.dial_one_more(neighbour, hello, secrets), _TIMEOUT_S)
            except (HandshakeError, OSError, asyncio.TimeoutError) as error:
                logger.debug("connection %d to %s: %s", index, printable(neighbour.name), text_of(error))
                if is_new and link.delays_s[index] >= _RETRY_MAX_S:
                    del link.dials[index]
                    return None
                continue
            link.joined_s[index] = self._loop.time()
            del link.dials[index]  # Before anybody can report it lost again.
            new = NewConnection(neighbour.peer_id, link.number, index, generation, one.connection, one.keys, b"")
            return self._on_connection(new)


class _LookUps(ThreadPoolExecutor):
    """Looks names up for asyncio, in threads that the end of the program does not wait for, as for those of the base
    class. A name server that does not answer holds one up for a minute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._free = threading.Semaphore(limits.NAMES_LOOKED_UP_MAX)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Begins to look a name up.

        Raises:
            OSError: too many are being looked up.
        """
        future: Future[T] = Future()

        def look_up() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
                future.set_exception(error)
            finally:
                self._free.release()

        if not self._free.acquire(blocking=False):
            raise OSError(errno.EAGAIN, "too many names are being looked up")
        future.set_running_or_notify_cancel()
        try:
            start_thread(threading.Thread(target=look_up, name="zpccl-name", daemon=True))
        except BaseException:
            self._free.release()
            raise
        return future


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **keywords: Any
) -> asyncio.Future[Any]:
    """Makes a task that leaves asyncio's weak set when it ends, in this thread.

    A failed task is part of a reference cycle, through the frames of its error. If garbage collection removed it from
    the set in the main thread, Ctrl-C would end that removal and not the program.
    """
    task = asyncio.Task(coroutine, loop=loop, **keywords)
    task.add_done_callback(asyncio._unregister_task)
    return task


async def _ask_mechanism(address: str, on_answer: Callable[[str, str], object]) -> None:
    try:
        on_answer(await asyncio.wait_for(mechanism_of(*parse_address(address)), _CONNECT_TIMEOUT_S), "")
    except Exception as error:  # noqa: BLE001 - who asks waits for an answer; a look-up also fails if it gets no thread
        on_answer("", f"the connection broke during the handshake, then: {str(error) or 'no answer in time'}")


def _new_share(is_needed: bool) -> tuple[bytes, bytes]:
    """A fresh private key of a key exchange, and the public share to send."""
    if not is_needed:
        return b"", NO_SHARE
    private = os.urandom(SHARE_BYTES)
    return private, public_share(private)


def _taken(connection: socket.socket) -> socket.socket:
    """The same connection as a socket that does not end with its handshake task. READY is sent on it next."""
    let_pass_descriptors(connection, allowed=True)
    return closed_in_children(socket.socket(fileno=connection.detach()))


def _peer_name(connection: socket.socket) -> str:
    if connection.family == socket.AF_UNIX:
        return _THIS_HOST
    try:
        return other_end(connection)
    except OSError:
        return "an unknown address"
