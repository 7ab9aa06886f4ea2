"""Effects: what the machines ask their shells to do. Shells perform them in order and decide nothing."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from zpccl.errors import PCCLError
from zpccl.protocol.messages import Fetching, MasterMessage, Measurements, Neighbour, PeerMessage, Reducing


class Level(enum.IntEnum):
    """Severity of a log line, with the values of the `logging` package."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, slots=True)
class Log:
    """Write a line to the log. `of_stranger`: somebody who is not a peer caused it, and may cause many such lines."""

    level: Level
    text: str
    of_stranger: bool = False


# --- Of the master --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send one message on each of several connections. `may_wait`: as in Send."""

    connections: tuple[Hashable, ...]
    message: MasterMessage
    may_wait: bool = False


MasterEffect: TypeAlias = Broadcast | Log

# --- Of a session ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """Close the socket, and open a new one to a master of the list. No event of the old one follows."""

    index: int


@dataclass(frozen=True, slots=True)
class AskMechanism:
    """Ask a master of the list for its security mechanism, on a separate connection. MechanismTold follows."""

    index: int


# --- Of a peer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the master. `may_wait`: it may be held back until the next one, SEND_HOLD_NS at most."""

    message: PeerMessage
    may_wait: bool = False


@dataclass(frozen=True, slots=True)
class UseMaster:
    """Connect to another master of the list. No message of the previous one follows."""

    index: int


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Start the data plane on the buffers of a call.

    Attributes:
        how: the plan.
        tells_digest: the data plane tells all other participants the digest of the result as soon as it has the result,
            unless the call is withdrawn before. A broken link may lose the digest.
        is_ahead: another attempt at the same call may follow this one, with the same input. So the old contents of the
            buffers are kept, whatever the user says.
    """

    call_id: int
    attempt_id: int
    how: Reducing
    tells_digest: bool = False
    is_ahead: bool = False


@dataclass(frozen=True, slots=True)
class EndReduce:
    """Give the buffers of an attempt back to the user, with the result (`commit`) or with their old contents.

    Also performed for an attempt that this peer never started, so that the data plane drops its frames as stale.
    """

    attempt_id: int
    commit: bool


@dataclass(frozen=True, slots=True)
class StartSync:
    """Fetch or serve state as the plan says, until EndSync."""

    call_id: int
    attempt_id: int
    how: Fetching


@dataclass(frozen=True, slots=True)
class EndSync:
    """Stop fetching and serving. With `commit`, write the fetched blocks to the tensors first.

    Also performed for a sync that this peer never started; then `commit` is set only if it had nothing to fetch.
    """

    call_id: int
    attempt_id: int
    commit: bool


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Set up a link to a peer: dial now, or later if the peer has not dialled by then. LinkUp or LinkFailed follows."""

    neighbour: Neighbour


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the link to a peer, or stop setting it up. No event follows."""

    peer_id: bytes


@dataclass(frozen=True, slots=True)
class FetchAhead:
    """Fetch state ahead from those of `peers` that offer it. `peers`: the members to which this peer must have links.

    ReadyCalled follows. Performed again when the peers change.
    """

    peers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ShowMeasurements:
    """Give what the master has measured to all who asked for it."""

    measurements: Measurements


@dataclass(frozen=True, slots=True)
class Resolve:
    """Complete a call of the user with a value."""

    call_id: int
    value: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Complete a call of the user with an error."""

    call_id: int
    error: PCCLError


PeerEffect: TypeAlias = (
    Send
    | UseMaster
    | StartReduce
    | EndReduce
    | StartSync
    | EndSync
    | OpenLink
    | CloseLink
    | FetchAhead
    | ShowMeasurements
    | Resolve
    | Reject
    | Log
)
