"""The control connection of a peer: when to open which socket, and what the end of a socket means.

Each try to reach a master uses a new socket, which is never used again: no message of an old connection appears on a
new one, in either direction. libzmq does the ZeroMQ handshake and the heartbeats; if the master is silent, SocketBroke
follows. libzmq does not report why a handshake failed. So a newcomer asks the server for its mechanism (greeting.py),
to tell a master with another secret from a server that is no master.

    event            DIALLING        HANDSHAKE             ASKING          UP              PAUSED
    DialStarted      (notes time)    -                     -               -               -
    TcpConnected     HANDSHAKE       -                     -               -               -
    HandshakeDone    -               UP: Up                -               -               -
    DialFailed       PAUSED: Failed  -                     -               -               -
    HandshakeFailed  -               PAUSED or ASKING [1]  -               -               -
    MechanismTold    -               -                     PAUSED [2][5]   -               -
    SocketBroke      -               PAUSED: Failed        -               PAUSED: Down    -
    DataReceived     message [3]     message [3]           message [3]     message [3]     message [3]
    UseMaster        DIALLING [4]    DIALLING [4]          DIALLING [4]    DIALLING [4]    DIALLING [4]
    Tick, when due   -               PAUSED: Failed        -               -               DIALLING [4]

    Up, Failed, Refused, Down: ConnectionUp, ConnectionFailed, AuthenticationRefused and ConnectionDown, for the peer.
    [1] PAUSED: Refused if the server reports that it refuses the key; ASKING for a newcomer if the server closed the
        connection at once, as it does to reject a handshake; else PAUSED: Failed.
    [2] Refused if the mechanism shows that only one side has a secret, or that the secrets differ; else Failed.
    [3] MasterMessageReceived. Data that is no message of this protocol is reported once per connection.
    [4] OpenSocket. UseMaster: at once, to the master that it names. Tick: to the same master, after a pause that grows
        with the number of consecutive failures.
    [5] DIALLING, once, if the secrets seem to differ: a master that dies during the handshake and is up again when it
        is asked looks like one that rejects the peer.

A session begins with a try at the first master, whose socket the shell has opened.
"""

from __future__ import annotations

import enum
import zlib
from typing import TypeAlias

from zpccl import limits
from zpccl.protocol import events
from zpccl.protocol.effects import AskMechanism, OpenSocket, UseMaster
from zpccl.protocol.messages import Malformed, OtherVersion, Welcome, decode_master_message

_REFUSED = "the connection was refused, timed out or broke, or the host name is unknown"
_NO_ZMQ = "the server there does not speak ZeroMQ"
_KEY_REFUSED = "it does not allow the key of this peer; is its public key in the allow list of the master?"
_NEEDS_SECRET = "the run has a secret and this peer has none; set ZPCCL_SECRET or secret= to that of the run"
_HAS_NO_SECRET = "this peer has a secret and the master there has none; start it with the same, or unset ZPCCL_SECRET"
_OTHER_SECRET = "its secret or key differs from the one given to this peer; compare ZPCCL_SECRET or ZPCCL_MASTER_KEY"
_HANDSHAKE_LEFT_NS = limits.REGISTRATION_TIMEOUT_NS - limits.CONNECT_TIMEOUT_NS // 2
"""If more of the time is left, the server has rejected the handshake; if less, libzmq has waited in vain."""

SessionEvent: TypeAlias = (
    events.DialStarted
    | events.DialFailed
    | events.TcpConnected
    | events.HandshakeDone
    | events.HandshakeFailed
    | events.MechanismTold
    | events.DataReceived
    | events.SocketBroke
    | events.Tick
    | UseMaster
)
SessionEffect: TypeAlias = (
    OpenSocket
    | AskMechanism
    | events.ConnectionUp
    | events.ConnectionFailed
    | events.AuthenticationRefused
    | events.ConnectionDown
    | events.MasterMessageReceived
    | events.OtherVersionReceived
    | events.NonsenseReceived
)
"""Actions of the shell, and events that it passes to the machine of the peer."""


class SocketPhase(enum.Enum):
    """The state of the current socket."""

    DIALLING = "dialling"
    HANDSHAKE = "handshake"
    ASKING = "asking"
    UP = "up"
    PAUSED = "paused"


class Session:
    """The control connection to a master.

    Args:
        peer_id: of the peer; makes its pauses differ from those of others.
        has_keys: True if this peer was given a secret or keys.
    """

    def __init__(self, peer_id: bytes, *, has_keys: bool) -> None:
        self.phase = SocketPhase.DIALLING
        self._peer_id = peer_id
        self._has_keys = has_keys
        self._index = 0
        self._is_newcomer = True
        self._has_complained = False  # True once it has reported a malformed message of this connection.
        self._socket_count = 0
        self._failures = 0  # Consecutive ones, at this master.
        self._is_rejected = False  # True while it tries again after the secrets seemed to differ.
        self._begun_ns: int | None = None  # When the try began.
        self._due_ns: int | None = None  # The end of the handshake or of the pause.

    def deadline_ns(self) -> int | None:
        """When the next Tick is due, or None."""
        return self._due_ns

    def validate(self) -> None:
        """Asserts what always holds between events."""
        assert (self._due_ns is not None) == (self.phase in (SocketPhase.HANDSHAKE, SocketPhase.PAUSED))

    def handle(self, event: SessionEvent, now_ns: int) -> list[SessionEffect]:
        """Takes one event and returns what to do, in order."""
        if isinstance(event, events.DataReceived):
            return self._on_data(event.data)
        if isinstance(event, UseMaster):
            self._index, self._failures, self._is_rejected = event.index, 0, False
            return self._open()
        if isinstance(event, events.MechanismTold):
            is_asked = self.phase is SocketPhase.ASKING and event.index == self._index
            return self._on_told(event, now_ns) if is_asked else []
        if isinstance(event, events.Tick):
            return self._on_tick(now_ns)
        if self.phase is SocketPhase.DIALLING:
            return self._on_dialling(event, now_ns)
        if self.phase is SocketPhase.HANDSHAKE:
            return self._on_handshake(event, now_ns)
        if self.phase is SocketPhase.UP and isinstance(event, events.SocketBroke):
            return self._pause(events.ConnectionDown(), now_ns)
        return []  # From a socket that is no longer used.

    def _enter(self, phase: SocketPhase, due_ns: int | None = None) -> None:
        self.phase, self._due_ns = phase, due_ns

    def _open(self) -> list[SessionEffect]:
        """Begins a try."""
        self._enter(SocketPhase.DIALLING)
        self._begun_ns = None
        self._socket_count += 1
        return [OpenSocket(self._index)]

    def _pause(self, why: SessionEffect, now_ns: int) -> list[SessionEffect]:
        """Ends a try or a connection. Pauses differ, so peers that lose a master together reconnect one by one."""
        pause_ns = min(limits.RECONNECT_INTERVAL_NS << min(self._failures, 8), limits.RECONNECT_INTERVAL_MAX_NS)
        salt = zlib.crc32(self._peer_id + self._socket_count.to_bytes(8, "big"))
        self._enter(SocketPhase.PAUSED, now_ns + pause_ns + salt % limits.RECONNECT_INTERVAL_NS)
        self._failures += 1
        self._is_rejected = False
        return [why]

    def _on_dialling(self, event: SessionEvent, now_ns: int) -> list[SessionEffect]:
        if isinstance(event, events.DialStarted):
            self._begun_ns = now_ns
        elif isinstance(event, events.TcpConnected):
            self._enter(SocketPhase.HANDSHAKE, now_ns + limits.REGISTRATION_TIMEOUT_NS)
        elif isinstance(event, events.DialFailed):
            return self._pause(events.ConnectionFailed(event.reason or _REFUSED), now_ns)
        return []

    def _on_handshake(self, event: SessionEvent, now_ns: int) -> list[SessionEffect]:
        if isinstance(event, events.HandshakeDone):
            self._enter(SocketPhase.UP)
            self._failures, self._is_rejected, self._has_complained = 0, False, False
            return [events.ConnectionUp(0 if self._begun_ns is None else now_ns - self._begun_ns)]
        if isinstance(event, events.SocketBroke):
            return self._pause(events.ConnectionFailed(_REFUSED), now_ns)
        if not isinstance(event, events.HandshakeFailed):
            return []
        if event.is_key_refused:
            return self._pause(events.AuthenticationRefused(_KEY_REFUSED), now_ns)
        if self._is_newcomer and self._due_ns is not None and self._due_ns - now_ns > _HANDSHAKE_LEFT_NS:
            self._enter(SocketPhase.ASKING)
            return [AskMechanism(self._index)]
        return self._pause(events.ConnectionFailed(_NO_ZMQ), now_ns)

    def _on_told(self, told: events.MechanismTold, now_ns: int) -> list[SessionEffect]:
        if told.mechanism == "CURVE" and self._has_keys and not self._is_rejected:
            self._is_rejected = True
            return self._open()
        return self._pause(self._verdict(told), now_ns)

    def _verdict(self, told: events.MechanismTold) -> SessionEffect:
        """Why a server closed the connection."""
        if told.mechanism == "CURVE":
            return events.AuthenticationRefused(_OTHER_SECRET if self._has_keys else _NEEDS_SECRET)
        if told.mechanism == "NULL" and self._has_keys:
            return events.AuthenticationRefused(_HAS_NO_SECRET)
        return events.ConnectionFailed(told.reason or _NO_ZMQ)

    def _on_data(self, data: bytes) -> list[SessionEffect]:
        foreign: SessionEffect
        try:
            message = decode_master_message(data)
        except OtherVersion as error:
            foreign = events.OtherVersionReceived(error.version)
        except Malformed as error:
            foreign = events.NonsenseReceived(error.message)
        else:
            if isinstance(message, Welcome):
                self._is_newcomer = False
            return [events.MasterMessageReceived(message)]
        is_first, self._has_complained = not self._has_complained, True
        return [foreign] if is_first else []

    def _on_tick(self, now_ns: int) -> list[SessionEffect]:
        if self._due_ns is None or now_ns < self._due_ns:
            return []
        if self.phase is SocketPhase.PAUSED:
            return self._open()
        return self._pause(events.ConnectionFailed(_NO_ZMQ), now_ns)
