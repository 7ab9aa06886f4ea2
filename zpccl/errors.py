"""Result codes and every exception of zpccl.

Every error is a `PCCLError` and carries a `Result`. Subclasses say what happened and hold the facts as attributes, so
that a training script can act on them: `PeerLost` means "call again", `TooFewPeers` means "wait for others", `Kicked`
means "connect again".
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Result(enum.IntEnum):
    """Result code of an operation. Names and values are those of PCCL."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_USAGE = 4
    TOO_FEW_PEERS = 5
    MASTER_CONNECTION_FAILED = 6
    RANK_CONNECTION_FAILED = 7
    RANK_CONNECTION_LOST = 8
    NO_SHARED_STATE_AVAILABLE = 9
    PENDING_ASYNC_OPS = 10
    UPDATE_TOPOLOGY_FAILED = 11
    TOPOLOGY_OPTIMIZATION_FAILED = 12


def printable(text: str) -> str:
    """The text, with escapes for the characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class PCCLError(RuntimeError):
    """Root of all errors of zpccl. It is a RuntimeError, which programs that use torch.distributed catch.

    Masters and other peers choose parts of the text, so line ends and control characters are escaped in it.

    Attributes:
        result: the `Result` code.
        function: name of the public function that failed; "" if unknown.
    """

    default_result = Result.INTERNAL_ERROR

    def __init__(self, message: str = "", *, result: Result | None = None, function: str = "") -> None:
        self.result = self.default_result if result is None else result
        self.function = function
        self.message = printable(message)
        super().__init__(self.message)

    def __str__(self) -> str:
        place = f"{self.function}: " if self.function else ""
        detail = f": {self.message}" if self.message else ""
        return f"{place}{self.result.name}{detail}"


def public(method: _Function) -> _Function:
    """Puts the name of a public method into the errors that it raises; for `__init__`, the name of the class."""

    @functools.wraps(method)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        try:
            return method(*arguments, **keywords)
        except PCCLError as error:
            owner = arguments[0] if isinstance(arguments[0], type) else type(arguments[0])
            error.function = error.function or f"{owner.__name__}.{method.__name__}".removesuffix(".__init__")
            raise

    return wrapper  # type: ignore[return-value]


class InternalError(PCCLError):
    """A bug in zpccl, or the operating system is out of a resource (memory, descriptors)."""


class InvalidArgument(PCCLError, ValueError):
    """An invalid value: wrong dtype, read-only or non-contiguous tensor, malformed address."""

    default_result = Result.INVALID_ARGUMENT


class InvalidUsage(PCCLError):
    """A call at the wrong time: before connect, after close, in the wrong phase, or one that the other peers did not
    make."""

    default_result = Result.INVALID_USAGE


class PendingAsyncOps(InvalidUsage):
    """Another kind of operation was started while collectives are in flight. Wait for their handles first."""

    default_result = Result.PENDING_ASYNC_OPS


class CollectiveMismatch(InvalidUsage):
    """Peers called the same tag with different arguments.

    Attributes:
        tag: the tag of the collective.
        field: the argument that differs: "count", "datatype", "op", "quantization", ...
        values: a text for each value seen, with the peers that passed it; of many values, the first ones and a count.
    """

    def __init__(self, message: str = "", *, tag: int = 0, field: str = "", values: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tag = tag
        self.field = field
        self.values = tuple(values)


class TooFewPeers(PCCLError):
    """The caller is alone in its peer group, or the group has fewer members than `min_world_size`.

    Wait for others with `update_topology`.
    """

    default_result = Result.TOO_FEW_PEERS


class MasterUnreachable(PCCLError):
    """No master answers at the given address.

    Attributes:
        address: the address that was tried, "host:port".
    """

    default_result = Result.MASTER_CONNECTION_FAILED

    def __init__(self, message: str = "", *, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class VersionMismatch(MasterUnreachable):
    """The master speaks another version of the protocol."""


class AuthenticationFailed(MasterUnreachable):
    """The master does not accept the secret or key of this peer, or only one of the two has a secret."""


class Kicked(PCCLError):
    """The master removed this peer from the run. Connect again to take part.

    Attributes:
        reason: why, as text.
    """

    default_result = Result.MASTER_CONNECTION_FAILED

    def __init__(self, message: str = "", *, reason: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason or message


class HostIncomplete(Kicked):
    """Not all peers of this peer's host (`host_size=`) registered in time, or one left before all had registered.

    Attributes:
        host: the name of the host.
        missing: how many of its peers have not registered.
    """

    def __init__(self, message: str = "", *, host: str = "", missing: int = 0) -> None:
        super().__init__(message)
        self.host = host
        self.missing = missing


class PeerUnreachable(PCCLError):
    """This peer could make no data connection to another peer, or the members' links allow no route for a call.

    For most calls it is enough that links connect all members, through others where necessary.

    Attributes:
        peers: names of the peers concerned.
    """

    default_result = Result.RANK_CONNECTION_FAILED

    def __init__(self, message: str = "", *, peers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class PeerLost(PCCLError):
    """A peer or the path to it was lost while the operation ran. Inputs are as before the call; call again.

    Attributes:
        peers: names of the peers concerned, as far as known.
    """

    default_result = Result.RANK_CONNECTION_LOST

    def __init__(self, message: str = "", *, peers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class OperationTimeout(PeerLost, TimeoutError):
    """The `timeout=` of the call expired before all peers took part. Inputs are as before the call.

    The call raises within WITHDRAW_TIMEOUT (2 s) of its timeout, whether or not a master can be reached, and the peer
    stays a member. There is one exception: if this peer has finished the collective and told the others its digest, the
    call waits for the others or for the master's decision, which comes within the master's heartbeat timeout if another
    peer is silent. If the other peers have committed a collective that this peer gave up, this peer lacks their result
    and is `Kicked`.
    """


class ResultMismatch(PeerLost):
    """The peers' results differed, so no peer got a result. Inputs are as before the call; call again."""


class NoSharedState(PCCLError):
    """No peer offers a shared state: all are RECEIVE_ONLY, or the offers were refused."""

    default_result = Result.NO_SHARED_STATE_AVAILABLE


class CheckpointFailed(PCCLError, OSError):
    """A checkpoint could not be written or read: full disk, missing file or directory, no permission.

    Attributes:
        path: the path of the checkpoint.
        errno: the reason, as in `OSError`.
    """

    errno = 0  # Shadows OSError.errno, which pickle would not restore.

    def __init__(self, message: str = "", *, path: str = "", errno: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno


class CheckpointDamaged(PCCLError):
    """The file is not a checkpoint, or it is damaged. Nothing was loaded from it.

    Attributes:
        path: the path of the file.
        reason: what is wrong with it.
        tensor: name of the first tensor with a wrong digest; "" if another part of the file is damaged.
    """

    default_result = Result.INVALID_ARGUMENT

    def __init__(self, message: str = "", *, path: str = "", reason: str = "", tensor: str = "") -> None:
        super().__init__(message or reason)
        self.path = path
        self.reason = reason or message
        self.tensor = tensor


class UpdateTopologyFailed(PCCLError):
    """The topology could not be updated. It can be tried again. This release never raises it; PCCL does."""

    default_result = Result.UPDATE_TOPOLOGY_FAILED


class TopologyOptimizationFailed(PCCLError):
    """The topology could not be optimised. It can be tried again. This release never raises it; PCCL does."""

    default_result = Result.TOPOLOGY_OPTIMIZATION_FAILED


class ProtocolViolation(PCCLError):
    """The other side violated the protocol. Never raised to users: it is logged, and the sender is disconnected."""

    default_result = Result.INTERNAL_ERROR
