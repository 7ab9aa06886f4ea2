"""Events: what the shells report to the machines. An event has no time: `handle()` takes the time as an argument."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from zpccl.protocol.messages import MasterMessage, PathSample, PeerMessage, Vote

# --- To the master --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerMessageReceived:
    """A message arrived on a connection.

    Attributes:
        host: the sender's address as the master sees it, "" if unknown.
        identity: the key with which the connection is authenticated, "" in a run without a secret.
    """

    connection: Hashable
    message: PeerMessage
    host: str = ""
    identity: str = ""


@dataclass(frozen=True, slots=True)
class MalformedReceived:
    """Bytes that are not a message arrived on a connection."""

    connection: Hashable
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """A connection of a peer has closed."""

    connection: Hashable


@dataclass(frozen=True, slots=True)
class KeysRevoked:
    """Keys are no longer allowed: their names by identity. From now on the shell passes on only Leave and
    Acknowledgement from their peers."""

    names: Mapping[str, str]


# --- To a session: about the socket that it opened last -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DialStarted:
    """The name of the master is resolved, and the first packet is sent."""


@dataclass(frozen=True, slots=True)
class DialFailed:
    """The TCP connection failed; `reason` is "" if it is not known why."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class TcpConnected:
    """The TCP connection is established, and the ZeroMQ handshake begins."""


@dataclass(frozen=True, slots=True)
class HandshakeDone:
    """The ZeroMQ handshake is complete: both sides have the same secret, or none."""


@dataclass(frozen=True, slots=True)
class HandshakeFailed:
    """The handshake broke off, violated the protocol or timed out; or the server refuses the key (`is_key_refused`)."""

    is_key_refused: bool = False


@dataclass(frozen=True, slots=True)
class MechanismTold:
    """The answer to AskMechanism: the name of the security mechanism, or "" and the reason why there is none."""

    index: int
    mechanism: str
    reason: str


@dataclass(frozen=True, slots=True)
class DataReceived:
    """A message arrived."""

    data: bytes


@dataclass(frozen=True, slots=True)
class SocketBroke:
    """The connection broke, or was silent for too long. All data received on it was handed over before."""


# --- To a peer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectionUp:
    """The connection to the master is established, for the first time or again.

    Attributes:
        handshake_ns: time from the start of the try to this event; 0: not known.
    """

    handshake_ns: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionFailed:
    """One attempt to connect to the master failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class AuthenticationRefused:
    """The server at the master's address refuses the peer's key or secret, or only one of the two has a secret."""

    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionDown:
    """The connection to the master broke. The session reconnects."""


@dataclass(frozen=True, slots=True)
class MasterMessageReceived:
    """A message of the master arrived."""

    message: MasterMessage


@dataclass(frozen=True, slots=True)
class OtherVersionReceived:
    """The master answered in another protocol version. A connection reports this or NonsenseReceived at most once."""

    version: int


@dataclass(frozen=True, slots=True)
class NonsenseReceived:
    """The server at the master's address sent bytes that are not a message."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkUp:
    """All connections to a peer are established and handed to the data plane."""

    peer_id: bytes


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """A link could not be set up, or was lost."""

    peer_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class ReduceDone:
    """The data plane has finished an attempt.

    Attributes:
        error: "" or the failure.
        fault: the neighbour whose link failed.
        has_told: the other participants were told the digest.
        paths: what the paths to other participants have carried.
    """

    attempt_id: int
    digest: int = 0
    error: str = ""
    fault: bytes | None = None
    has_told: bool = False
    paths: tuple[PathSample, ...] = ()


@dataclass(frozen=True, slots=True)
class DigestReceived:
    """Another participant of an attempt has its result, by its call `call_id`."""

    peer_id: bytes
    attempt_id: int
    call_id: int
    digest: int


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """A neighbour says that it has ended an attempt that it had started by a plan ahead."""

    peer_id: bytes
    attempt_id: int


@dataclass(frozen=True, slots=True)
class FetchDone:
    """All that a sync plan lists is fetched and verified, or `error` says why not.

    An event with an error may also come when there was nothing to fetch, or after an event without one: then this peer
    has found that the state it offered has changed.

    Attributes:
        fault: the source that caused the error; this peer itself if its own state has changed.
        dropped: sources that the fetch stopped using, and why.
    """

    attempt_id: int
    error: str = ""
    fault: bytes | None = None
    dropped: tuple[tuple[bytes, str], ...] = ()


# Calls of the user. The shell numbers them: call ids grow.


@dataclass(frozen=True, slots=True)
class ConnectCalled:
    """connect(): resolved when the peer is admitted. The session tries `attempts` times to reach the master."""

    call_id: int
    attempts: int


@dataclass(frozen=True, slots=True)
class ReadyCalled:
    """The peer has fetched state ahead, or has given that up: it may be admitted."""


@dataclass(frozen=True, slots=True)
class Called:
    """The user has made one call of any kind, or a batch of collectives."""

    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class MeasurementsCalled:
    """topology(): asks the master for its measurements. ShowMeasurements follows, once for all waiting callers."""


@dataclass(frozen=True, slots=True)
class CallWithdrawn:
    """The user gives a call up: its timeout has expired (`timed_out`) or it was interrupted.

    From now on the call's digest is told to nobody. If it was told before, the ReduceDone that says so has come.
    """

    call_id: int
    timed_out: bool


@dataclass(frozen=True, slots=True)
class CloseCalled:
    """close(): leave the run."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline of `deadline_ns()` has passed. An early Tick does no harm."""


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
    | DigestReceived
    | AttemptEnded
    | FetchDone
    | ConnectCalled
    | ReadyCalled
    | Called
    | MeasurementsCalled
    | CallWithdrawn
    | CloseCalled
    | Tick
)
