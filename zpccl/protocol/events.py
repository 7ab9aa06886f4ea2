"""What the shells tell the machines. Time is an argument beside them, never part of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from zpccl.protocol.messages import MasterMessage, PeerMessage, Vote

# --- To the master --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerMessageReceived:
    """A message came on a connection.

    Attributes:
        host: the sender's address as the master sees it, "" where unknown.
        identity: the key that the connection has proved to hold, "" in a run without a secret.
    """

    connection: Hashable
    message: PeerMessage
    host: str = ""
    identity: str = ""


@dataclass(frozen=True, slots=True)
class MalformedReceived:
    """Bytes that are no message came on a connection."""

    connection: Hashable
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """A connection of a peer is gone."""

    connection: Hashable


@dataclass(frozen=True, slots=True)
class KeysRevoked:
    """Keys may take part no more: their names by identity. The shell takes only farewells of theirs then."""

    names: Mapping[str, str]


# --- To a session: what becomes of the socket that it opened last ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class DialStarted:
    """The name of the master is resolved, and the first packet is out."""


@dataclass(frozen=True, slots=True)
class DialFailed:
    """There is no TCP connection; why, where that is known."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class TcpConnected:
    """The TCP connection stands, and the handshake of ZeroMQ begins."""


@dataclass(frozen=True, slots=True)
class HandshakeDone:
    """What answers speaks ZeroMQ, with the same secret or none."""


@dataclass(frozen=True, slots=True)
class HandshakeFailed:
    """It broke off, broke the protocol, or said nothing in time; or it refuses the key of this peer, and says so."""

    is_key_refused: bool = False


@dataclass(frozen=True, slots=True)
class MechanismTold:
    """The answer to AskMechanism: the name of the security mechanism, or "" and why there is none."""

    index: int
    mechanism: str
    reason: str


@dataclass(frozen=True, slots=True)
class DataReceived:
    """A message came."""

    data: bytes


@dataclass(frozen=True, slots=True)
class SocketBroke:
    """The connection broke, or was silent for too long. All that came on it was handed over before."""


# --- To a peer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectionUp:
    """The connection to the master stands, for the first time or again.

    Attributes:
        handshake_ns: how long it took from the beginning of the try; 0: not known.
    """

    handshake_ns: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionFailed:
    """One try to connect to the master failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class AuthenticationRefused:
    """What answers at the master's address is not for holders of the peer's secret, or of none."""

    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionDown:
    """The connection to the master broke. The session goes on trying to connect."""


@dataclass(frozen=True, slots=True)
class MasterMessageReceived:
    """A message of the master came."""

    message: MasterMessage


@dataclass(frozen=True, slots=True)
class OtherVersionReceived:
    """The master answered in another protocol version. A connection brings one of this or NonsenseReceived."""

    version: int


@dataclass(frozen=True, slots=True)
class NonsenseReceived:
    """Bytes that are no message came from what answers at the master's address."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """All connections to a peer stand and are in the hands of the data plane."""

    peer_id: bytes


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """A link could not be set up, or was lost."""

    peer_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class ReduceDone:
    """The data plane is done with an attempt: `error` is "" or says what failed, `fault` at which neighbour."""

    attempt_id: int
    digest: int = 0
    error: str = ""
    fault: bytes | None = None


@dataclass(frozen=True, slots=True)
class FetchDone:
    """All that a sync plan told to fetch is here and checked, or `error` says why not.

    It may come from those who only serve too, and after all is here, with an error: what this peer offered has changed.

    Attributes:
        fault: the source that is to blame for the error; this peer itself, where it finds its own state changed.
        dropped: sources that it went on without, and why.
    """

    attempt_id: int
    error: str = ""
    fault: bytes | None = None
    dropped: tuple[tuple[bytes, str], ...] = ()


# Calls of the user. The shell numbers them: call ids grow.


@dataclass(frozen=True, slots=True)
class ConnectCalled:
    """connect(): resolved when admitted. `attempts` tries to reach the master are made."""

    call_id: int
    attempts: int


@dataclass(frozen=True, slots=True)
class ReadyCalled:
    """What was to be fetched ahead is here, or was given up: the peer may be admitted."""


@dataclass(frozen=True, slots=True)
class Called:
    """The user has made calls: some collectives at once, or any other call."""

    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class CallWithdrawn:
    """The user gives a call up: `timed_out`, or interrupted."""

    call_id: int
    timed_out: bool


@dataclass(frozen=True, slots=True)
class CloseCalled:
    """close(): leave the run."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `deadline_ns()` has come. Harmless at any time."""


MasterEvent: TypeAlias = PeerMessageReceived | MalformedReceived | ConnectionClosed | KeysRevoked | Tick
PeerEvent: TypeAlias = (
    ConnectionUp
    | ConnectionFailed
    | AuthenticationRefused
    | ConnectionDown
    | MasterMessageReceived
    | OtherVersionReceived
    | NonsenseReceived
    | LinkUp
    | LinkFailed
    | ReduceDone
    | FetchDone
    | ConnectCalled
    | ReadyCalled
    | Called
    | CallWithdrawn
    | CloseCalled
    | Tick
)
