"""What the machines ask their shells to do. Shells perform effects in order and decide nothing."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from zpccl.errors import PCCLError
from zpccl.protocol.messages import Fetching, MasterMessage, Neighbour, PeerMessage
from zpccl.types import Algorithm


class Level(enum.IntEnum):
    """Severity of a log line, with the values of the `logging` package."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, slots=True)
class Log:
    """Write a line to the log. `of_stranger`: one who is no peer caused it, and may cause many."""

    level: Level
    text: str
    of_stranger: bool = False


# --- Of the master --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send one message on each of several connections."""

    connections: tuple[Hashable, ...]
    message: MasterMessage


MasterEffect: TypeAlias = Broadcast | Log

# --- Of a session ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """Close the socket, and open a new one to a master of the list. Nothing more comes of the old one."""

    index: int


@dataclass(frozen=True, slots=True)
class AskMechanism:
    """Ask a master of the list, on a connection of its own, which security mechanism it has. MechanismTold follows."""

    index: int


# --- Of a peer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the master."""

    message: PeerMessage


@dataclass(frozen=True, slots=True)
class UseMaster:
    """Connect to another master of the list. Nothing more comes of the one before."""

    index: int


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Start the data plane on the buffers of a call: `order` is that of the ring, or of the ranks."""

    call_id: int
    attempt_id: int
    order: tuple[bytes, ...]
    frame_bytes: int
    algorithm: int = Algorithm.RING


@dataclass(frozen=True, slots=True)
class EndReduce:
    """Give the buffers of an attempt back, with the result (commit) or with their old contents.

    Also performed for an attempt that never started here: its frames are then known to be stale.
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
    """Stop fetching and serving. With commit, write what was fetched to its place first.

    Also performed for a sync that never started here; with commit only where there was nothing to fetch.
    """

    call_id: int
    attempt_id: int
    commit: bool


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Set up a link to a peer: dial it, or expect it to dial. LinkUp or LinkFailed follows."""

    neighbour: Neighbour


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the link to a peer, or give up setting it up. Nothing follows."""

    peer_id: bytes


@dataclass(frozen=True, slots=True)
class FetchAhead:
    """Fetch state from those of these peers who offer it: all to whom there shall be links. Then ReadyCalled follows.

    May be performed again: who these are may have changed.
    """

    peers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Resolve:
    """Decision a call of the user with a value."""

    call_id: int
    value: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Decision a call of the user with an error."""

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
    | Resolve
    | Reject
    | Log
)
