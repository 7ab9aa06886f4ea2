"""Who may connect to a master: the handler of ZAP, the authentication protocol of ZeroMQ (rfc.zeromq.org/spec/27).

libzmq asks over inproc, within the master's own context, before it lets a CURVE client in. A CURVE server that has no
ZAP domain admits every key, and one whose domain is not enforced does so while no handler listens: so `secure()` sets
both, and a master without its handler admits nobody. The sockets belong to the thread of the master's loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping

import zmq

from zpccl import limits
from zpccl.control.addresses import format_address
from zpccl.control.keys import MasterKeys, public_text

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"zpccl"
_VERSION = b"1.0"


class RefusalLog:
    """Logs who was refused, as a warning each, a bounded number of them in a minute: strangers may come in floods."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._begin_ns: int | None = None
        self._count = 0
        self.refused_count = 0
        """Refusals since the beginning."""

    def add(self, text: str, now_ns: int) -> None:
        """Takes note of one refusal."""
        self.refused_count += 1
        if self._begin_ns is None or now_ns - self._begin_ns >= limits.REFUSALS_LOGGED_INTERVAL_NS:
            suppressed = self._count - limits.REFUSALS_LOGGED_MAX
            if suppressed > 0:
                self._logger.warning("%d more were refused before that", suppressed)
            self._begin_ns, self._count = now_ns, 0
        self._count += 1
        if self._count <= limits.REFUSALS_LOGGED_MAX:
            self._logger.warning("refused %s", text)


class ZapHandler:
    """Answers libzmq whether a key may connect.

    Args:
        context: of the sockets that it guards; make the handler before they bind.
        allowed: names by public key text.
        refusals: where refused keys are logged.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Mapping[str, str], refusals: RefusalLog):
        self.allowed = dict(allowed)
        self._refusals = refusals
        self.socket = context.socket(zmq.REP)
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.bind(ENDPOINT)
        except BaseException:
            self.socket.close(linger=0)
            raise

    def serve(self, now_ns: int) -> None:
        """Answers the questions that wait, up to POLL_EVENTS_MAX at a time: strangers must not keep the master busy."""
        for _ in range(limits.POLL_EVENTS_MAX):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(request, now_ns))

    def _answer(self, request: list[bytes], now_ns: int) -> list[bytes]:
        request_id = request[1] if len(request) > 1 else b""
        key = self._key_of(request)
        if key in self.allowed:
            return [_VERSION, request_id, b"200", b"OK", key.encode(), b""]
        address = request[3].decode(errors="replace") if len(request) > 3 else "an unknown address"
        self._refusals.add(f"{address}: the key {key or 'that it shows'} is not allowed", now_ns)
        return [_VERSION, request_id, b"400", b"this key is not allowed", b"", b""]

    @staticmethod
    def _key_of(request: list[bytes]) -> str:
        """The public key text that a question is about; "" if it is not about a CURVE key for this master."""
        if len(request) != 7 or request[0] != _VERSION or request[2] != DOMAIN or request[5] != b"CURVE":
            return ""
        return public_text(request[6]) if len(request[6]) == 32 else ""

    def close(self) -> None:
        """Lets nobody in any more."""
        self.socket.close(linger=0)


def secure(server: zmq.Socket[bytes], keys: MasterKeys) -> None:
    """Makes a server's socket admit only clients with keys that its context's handler allows. Call before bind."""
    server.setsockopt(zmq.CURVE_SERVER, 1)
    server.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
    server.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def identity_of(frame: zmq.Frame) -> str:
    """The key of the connection that a frame came on, as its handler named it; "" if none was asked for."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class HandshakeWatch:
    """Logs connections that fail before libzmq has a key to ask about: of clients without a secret or with another one.

    It is told of the events of the server's socket monitor: libzmq says why a handshake failed and right after it
    which connection closed. Addresses are for the log only: a descriptor may have closed before its event is read.
    """

    EVENTS = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )

    def __init__(self, refusals: RefusalLog) -> None:
        self._refusals = refusals
        self._addresses: dict[int, str] = {}  # By descriptor.
        self._reason = ""

    def take(self, kind: int, value: int, now_ns: int) -> None:
        """Takes one event of the monitor."""
        if kind == zmq.EVENT_ACCEPTED:
            self._addresses[value] = _address_of(value)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._reason = _REASONS.get(value, "it does not speak as a peer")
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._reason = "it went, or fell silent, before it had shown a key"
        elif kind == zmq.EVENT_DISCONNECTED:
            address = self._addresses.pop(value, "") or "an unknown address"
            if self._reason:
                self._refusals.add(f"{address}: {self._reason}", now_ns)
                self._reason = ""


_REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "its secret or its key of the master is another one",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it has no secret, or is no peer",
}


def _address_of(descriptor: int) -> str:
    try:
        copy = os.dup(descriptor)
    except OSError:
        return ""
    try:
        with socket.socket(fileno=copy) as connection:
            host, port = connection.getpeername()[:2]
            return format_address(host.removeprefix("::ffff:"), port)
    except OSError:  # No socket, or not connected any more.
        with contextlib.suppress(OSError):
            os.close(copy)
        return ""
