"""Access control of a master: the handler of ZAP, the authentication protocol of ZeroMQ (rfc.zeromq.org/spec/27).

libzmq asks the handler over inproc, within the master's context, before it admits a CURVE client. A CURVE server
without a ZAP domain admits every key, and one whose domain is not enforced does so while no handler listens. So
`secure()` sets both options, and a master without its handler admits no one. The sockets belong to the thread of the
master's loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import zmq

from zpccl import limits
from zpccl.control.addresses import other_end, plain_host
from zpccl.control.inflow import Duplicates
from zpccl.control.keys import MasterKeys, public_text
from zpccl.control.waiter import is_readable
from zpccl.observe.logs import RefusalLog

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"zpccl"
_VERSION = b"1.0"


class ZapHandler:
    """Answers libzmq whether a key may connect.

    Args:
        context: the context of the sockets that it guards; make the handler before they bind.
        allowed: name of each admitted peer, by the text of its public key.
        refusals: logs refused keys.
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
        """Answers pending requests, at most POLL_EVENTS_MAX per call: strangers must not keep the master busy."""
        for _ in range(limits.POLL_EVENTS_MAX):
            if not is_readable(self.socket):
                return
            request = self.socket.recv_multipart(zmq.NOBLOCK)
            self.socket.send_multipart(self._answer(request, now_ns))

    def _answer(self, request: list[bytes], now_ns: int) -> list[bytes]:
        request_id = request[1] if len(request) > 1 else b""
        key = self._key_of(request)
        if key in self.allowed:
            return [_VERSION, request_id, b"200", b"OK", key.encode(), b""]
        address = plain_host(request[3].decode(errors="replace")) if len(request) > 3 else "an unknown address"
        self._refusals.add(f"{address}: the key {key or 'that it shows'} is not allowed", now_ns)
        return [_VERSION, request_id, b"400", b"this key is not allowed", b"", b""]

    @staticmethod
    def _key_of(request: list[bytes]) -> str:
        """The text of the public key in a request; "" if it is not a CURVE request for this master."""
        if len(request) != 7 or request[0] != _VERSION or request[2] != DOMAIN or request[5] != b"CURVE":
            return ""
        return public_text(request[6]) if len(request[6]) == 32 else ""

    def close(self) -> None:
        """Closes the handler; from then on no client is admitted."""
        self.socket.close(linger=0)


def secure(server: zmq.Socket[bytes], keys: MasterKeys) -> None:
    """Makes a server socket admit only clients whose keys the handler of its context allows. Call before bind."""
    server.setsockopt(zmq.CURVE_SERVER, 1)
    server.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
    server.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def identity_of(frame: zmq.Frame) -> str:
    """The key of a frame's connection, as the ZAP handler has set it; "" if no handler was asked."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class HandshakeWatch:
    """Logs connections that fail before libzmq asks about a key: clients without a secret or with another one.

    It gets the events of the server's socket monitor: libzmq reports why a handshake failed, and directly after that
    which connection closed. Addresses are for the log only: a descriptor may have closed before its event is read.
    """

    EVENTS = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )

    def __init__(self, refusals: RefusalLog, duplicates: Duplicates) -> None:
        self._refusals = refusals
        self._duplicates = duplicates
        self._addresses: dict[int, str] = {}  # By descriptor.
        self._reason = ""

    def take(self, kind: int, value: int, now_ns: int) -> None:
        """Handles one event of the monitor."""
        if kind == zmq.EVENT_ACCEPTED:
            self._addresses.pop(value, None)
            with contextlib.suppress(OSError), self._duplicates.of(value) as connection:
                self._addresses[value] = other_end(connection)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._reason = _REASONS.get(value, "it does not follow the protocol of a peer")
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._reason = "it disconnected or fell silent before it sent a key"
        elif kind == zmq.EVENT_DISCONNECTED:
            address = self._addresses.pop(value, "") or "an unknown address"
            if self._reason:
                self._refusals.add(f"{address}: {self._reason}", now_ns)
                self._reason = ""


_REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "its secret or its key of the master is wrong",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it has no secret, or is not a peer",
}
