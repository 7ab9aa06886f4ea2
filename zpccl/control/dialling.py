"""Dialling a peer: the choice among its addresses, and the dialler's part of the handshake.

The dialler tries the local socket of the peer first, then its likely address, which is the first of its list. Each has
a head start of ADDRESS_STAGGER, which ends early if it fails. Then all others are dialled at the same time.
If a name has several addresses, all of them are dialled: an IPv6 address may lead nowhere.
The first connection on which the right peer accepts is taken, and the others are closed. `Results` keeps the result of
each address, for the error and the log.

Two peers behind NATs may open a connection together: each dials the address at which the master sees the other, from
the port at which it listens. Each SYN opens the sender's own NAT for the SYN of the other end. This works where NATs
keep ports and drop unexpected packets. Both ends have dialled then, and both send HELLO; the HELLO of the smaller peer
id is ignored. Only one connection is possible between the two ports, so such a link has one, and it is tried last.

A `Dialler` runs in the loop of the broker (links.py) and owns a socket until it returns it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zpccl import limits
from zpccl.control.addresses import (
    bind_beside,
    is_local_address,
    let_pass_descriptors,
    local_address,
    parse_address,
)
from zpccl.control.connection_count import congestion_control, connections_for, round_trip_ns, use_bbr
from zpccl.control.forks import closed_in_children
from zpccl.control.handshake import (
    HELLO_BYTES,
    SIGNAL_BYTES,
    HandshakeError,
    LinkHello,
    Signal,
    Transcript,
    accepted,
    is_hello,
)
from zpccl.engine.ciphers import CipherKeys
from zpccl.errors import PCCLError
from zpccl.protocol.messages import Neighbour

logger = logging.getLogger("zpccl.links")

_STAGGER_S = limits.ADDRESS_STAGGER_NS / limits.SECOND
_OPEN_TOGETHER_DELAY_S = limits.OPEN_TOGETHER_DELAY_NS / limits.SECOND
_UNANSWERED = "no answer in time"
_CONNECTED = f"connected, then {_UNANSWERED}"
_ANSWERED = "answered, then silent (does the path lose large packets? check its MTU)"
"""The padding of one of the two has not arrived."""
_TEXTS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed out",
    errno.ENETUNREACH: "unreachable (no route to the network)",
    errno.EHOSTUNREACH: "unreachable (no route to the host)",
}

_Target: TypeAlias = tuple[int, Any]
"""The family of an address, and the argument of connect()."""


@dataclass(frozen=True)
class Dialled:
    """A connection that the right peer has accepted."""

    connection: socket.socket
    transcript: Transcript
    keys: CipherKeys | None
    hello: LinkHello


@dataclass(frozen=True)
class Secrets:
    """The secret values of a link, which a dialler never sends."""

    link_key: bytes = field(repr=False)
    private: bytes = field(repr=False)


class Results:
    """The result of each address that was dialled, in order."""

    def __init__(self) -> None:
        self._by_address: dict[str, str] = {}

    def begin(self, address: str) -> None:
        """The address is dialled."""
        self._by_address[address] = _UNANSWERED

    def resolved(self, name: str) -> None:
        """The address is a name, and its addresses are dialled instead."""
        self._by_address.pop(name, None)

    def note(self, address: str, text: str) -> None:
        """The dial has got so far."""
        self._by_address[address] = text

    def failed(self, address: str, error: BaseException) -> None:
        """The dial failed. If it was cancelled, what was noted last says why."""
        if not isinstance(error, asyncio.CancelledError):
            self._by_address[address] = text_of(error)

    def text(self, reason: str = "") -> str:
        """One line for people: each address with its result, without the local socket, which most peers do not have."""
        dialled = [f"{address}: {text}" for address, text in self._by_address.items() if not is_local_address(address)]
        return "; ".join([reason] * bool(reason) + dialled) or "it gave no address"


class Dialler:
    """Dials peers.

    Args:
        loop: the loop in whose thread the dialler is called.
        listener: the listening socket of this peer.
        dials_locally: whether peers of this host are dialled at their Unix-domain sockets.
        adopt: accepts a connection that both ends have opened, given the other end's HELLO, and waits for the end of
            its handshake.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        dials_locally: bool,
        adopt: Callable[[socket.socket, bytes], Awaitable[None]],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._dials_locally = dials_locally
        self._adopt = adopt
        self._lacks_bbr = False  # True once the warning is logged.

    async def set_up(
        self, neighbour: Neighbour, hello: LinkHello, secrets: Secrets, results: Results, may_commit: Callable[[], None]
    ) -> list[Dialled]:
        """Dials all connections of a link, and commits them.

        Args:
            neighbour: the peer to dial.
            hello: HELLO of the first connection; a count of 0 is replaced by one that fits the path.
            secrets: secret values of the link.
            results: filled in by this call.
            may_commit: called before the first COMMIT is sent; it raises if the link is no longer wanted.

        Raises:
            HandshakeError, OSError: no link could be set up.
        """
        address, first = await self.dial_any(neighbour, hello, secrets, results)
        dialled = [first]
        try:
            hellos = [dataclasses.replace(first.hello, index=index) for index in range(1, first.hello.count)]
            target = first.connection.family, first.connection.getpeername()
            dialled += await _all_or_none([self._dial_target(target, hello, secrets) for hello in hellos])
            if len({one.transcript.cipher for one in dialled}) > 1:
                raise HandshakeError("the other side chose different ciphers for the connections")
            may_commit()
            await _all_or_none([self._confirm(one) for one in dialled])
        except BaseException as error:
            results.failed(address, error)
            close_all(dialled)
            raise
        return dialled

    async def dial_one_more(self, neighbour: Neighbour, hello: LinkHello, secrets: Secrets) -> Dialled:
        """Dials one more connection of an open link, mostly in place of a lost one, and commits it."""
        _, one = await self.dial_any(neighbour, hello, secrets, Results())
        try:
            await self._confirm(one)
        except BaseException:
            one.connection.close()
            raise
        return one

    async def dial_any(
        self, neighbour: Neighbour, hello: LinkHello, secrets: Secrets, results: Results
    ) -> tuple[str, Dialled]:
        """Dials the addresses. Returns the first one where the right peer answers, and the connection to it."""
        tries: dict[asyncio.Task[Dialled | list[_Target]], str] = {}
        local = [local_address(neighbour.peer_id)] if self._dials_locally else []
        others = neighbour.addresses[1:]
        waiting: list[Sequence[str | tuple[str, _Target]]]
        waiting = [group for group in (local, neighbour.addresses[:1], others) if group]
        try:
            while waiting or tries:
                group = waiting.pop(0) if waiting else ()
                for one in group:
                    address, target = one if isinstance(one, tuple) else (one, None)
                    results.begin(address)
                    tries[self._loop.create_task(self._dial_one(address, target, hello, secrets, results))] = address
                if group and group is others and hello.generation == 0:  # The master saw the first of them.
                    name = f"{others[0]} from our port"
                    results.begin(name)
                    tries[self._loop.create_task(self._open_together(others[0], hello, secrets))] = name
                timeout = _STAGGER_S if waiting else None
                done, _ = await asyncio.wait(tries, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error, address = task.exception(), tries[task]
                    del tries[task]
                    if error is not None:
                        results.failed(address, error)
                        continue
                    found = task.result()
                    if isinstance(found, Dialled):
                        return address, found
                    results.resolved(address)
                    del found[max(1, limits.ADDRESSES_PER_PEER_MAX - len(tries)) :]  # Each takes a descriptor.
                    waiting.insert(0, [(f"{address} at {target[0]}", (family, target)) for family, target in found])
            raise HandshakeError("none of its addresses works" if neighbour.addresses else "it gave no address")
        finally:
            for task in tries:
                task.cancel()
                task.add_done_callback(_close_result)

    async def _resolve(self, address: str) -> list[_Target]:
        """The targets of an address: one, or several if it is a name."""
        if is_local_address(address):
            return [(socket.AF_UNIX, address)]
        host, port = parse_address(address)
        try:  # A numeric address needs no thread that asks a name server.
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, target) for family, _, _, _, target in found[: limits.ADDRESSES_PER_PEER_MAX]]

    async def _dial_one(
        self, address: str, target: _Target | None, hello: LinkHello, secrets: Secrets, results: Results
    ) -> Dialled | list[_Target]:
        """Dials an address, at `target` if that is known. Does not dial a name with several targets: returns them."""
        if target is None:
            targets = await self._resolve(address)
            if len(targets) > 1:
                return targets
            target = targets[0]
        return await self._dial_target(target, hello, secrets, lambda text: results.note(address, text))

    async def _dial_target(
        self, target: _Target, hello: LinkHello, secrets: Secrets, note: Callable[[str], None] = lambda _: None
    ) -> Dialled:
        connection = await self._connect(target)
        try:
            note(_CONNECTED)
            if hello.count == 0:
                count = connections_for(round_trip_ns(connection), congestion_control(connection))
                hello = dataclasses.replace(hello, count=count)
            answer = await self._greet(connection, hello, secrets)
            return await self._dialled(connection, hello, answer, secrets, note)
        except BaseException:
            connection.close()
            raise

    async def _open_together(self, address: str, hello: LinkHello, secrets: Secrets) -> Dialled:
        """Dials from the port at which this peer listens, as the other end may do at the same time."""
        await asyncio.sleep(_OPEN_TOGETHER_DELAY_S)
        connection = await self._connect((await self._resolve(address))[0], beside=self._listener)
        try:
            hello = dataclasses.replace(hello, count=1)
            answer = await self._greet(connection, hello, secrets)
            if is_hello(answer):
                theirs = answer + await receive(self._loop, connection, HELLO_BYTES - SIGNAL_BYTES)
                if hello.sender < hello.receiver:
                    await self._adopt(closed_in_children(socket.socket(fileno=connection.detach())), theirs)
                    raise HandshakeError("the other side sets the link up")
                answer = await receive(self._loop, connection, SIGNAL_BYTES)
            return await self._dialled(connection, hello, answer, secrets)
        except BaseException:
            connection.close()
            raise

    async def _connect(self, target: _Target, *, beside: socket.socket | None = None) -> socket.socket:
        """Connects to an address, from the port of the listener `beside` if that is given."""
        family, address = target
        connection = closed_in_children(socket.socket(family, socket.SOCK_STREAM))
        try:
            connection.setblocking(False)
            let_pass_descriptors(connection, allowed=False)
            if beside is not None:
                bind_beside(connection, beside)
            await self._loop.sock_connect(connection, address)
            self.choose_congestion_control(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _greet(self, connection: socket.socket, hello: LinkHello, secrets: Secrets) -> bytes:
        """Sends HELLO. Returns the first bytes of the answer."""
        await self._loop.sock_sendall(connection, hello.encode(secrets.link_key))
        return await receive(self._loop, connection, SIGNAL_BYTES)

    async def _dialled(
        self,
        connection: socket.socket,
        hello: LinkHello,
        answer: bytes,
        secrets: Secrets,
        note: Callable[[str], None] = lambda _: None,
    ) -> Dialled:
        """A connection whose HELLO was answered by ACCEPT. Raises HandshakeError if it was not."""
        transcript = accepted(hello, answer, secrets.link_key)
        note(_ANSWERED)
        await receive(self._loop, connection, len(hello.padding))
        return Dialled(connection, transcript, transcript.derive_keys(secrets.private, is_dialler=True), hello)

    def choose_congestion_control(self, connection: socket.socket) -> None:
        """Asks the kernel for BBR on a connection that was dialled or accepted."""
        if not use_bbr(connection) and not self._lacks_bbr:
            self._lacks_bbr = True
            logger.warning(
                "the kernel does not let this process use BBR, so far links lose rate with each lost packet (%s); "
                "as root: modprobe tcp_bbr; sysctl net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'",
                congestion_control(connection),
            )

    async def _confirm(self, one: Dialled) -> None:
        let_pass_descriptors(one.connection, allowed=True)  # The other end passes them right after READY.
        await self._loop.sock_sendall(one.connection, one.transcript.encode(Signal.COMMIT) + one.hello.padding)
        one.transcript.check(await receive(self._loop, one.connection, SIGNAL_BYTES), Signal.READY)


async def receive(loop: asyncio.AbstractEventLoop, connection: socket.socket, size: int) -> bytes:
    """Receives the next `size` bytes of a connection, and no more.

    Raises:
        HandshakeError: the connection ended before that.
    """
    data = b""
    while len(data) < size:
        piece = await loop.sock_recv(connection, size - len(data))
        if not piece:
            raise HandshakeError("the other side closed the connection")
        data += piece
    return data


def close_all(dialled: list[Dialled]) -> None:
    """Closes connections that are no longer wanted."""
    for one in dialled:
        one.connection.close()


def text_of(error: BaseException) -> str:
    """An error in a few words, for people."""
    if isinstance(error, PCCLError):
        return error.message
    if isinstance(error, asyncio.CancelledError):
        return _UNANSWERED
    code = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
    return _TEXTS.get(code, os.strerror(code)) if code else str(error) or _UNANSWERED


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
    if not task.cancelled() and task.exception() is None and isinstance(task.result(), Dialled):
        task.result().connection.close()
