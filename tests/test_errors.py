"""Results and errors: the values are those of PCCL, and every error says what happened and carries the facts."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import numpy
import pytest

from zpccl import MasterNode, SharedState, TensorInfo, errors
from zpccl.errors import (
    AuthenticationFailed,
    CollectiveMismatch,
    InvalidArgument,
    InvalidUsage,
    Kicked,
    MasterUnreachable,
    OperationTimeout,
    PCCLError,
    PeerLost,
    PeerUnreachable,
    PendingAsyncOps,
    Result,
    ResultMismatch,
    TooFewPeers,
    VersionMismatch,
)

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PCCLError)]


def test_results_are_those_of_pccl() -> None:
    names = (
        "SUCCESS NOT_INITIALIZED INTERNAL_ERROR INVALID_ARGUMENT INVALID_USAGE TOO_FEW_PEERS MASTER_CONNECTION_FAILED"
        " RANK_CONNECTION_FAILED RANK_CONNECTION_LOST NO_SHARED_STATE_AVAILABLE PENDING_ASYNC_OPS"
        " UPDATE_TOPOLOGY_FAILED TOPOLOGY_OPTIMIZATION_FAILED"
    )
    assert [(result.name, result.value) for result in Result] == [(n, i) for i, n in enumerate(names.split())]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error(kind: type[PCCLError]) -> None:
    error = kind("what was seen")
    assert isinstance(error, Exception)
    assert isinstance(error.result, Result)
    assert error.result is not Result.SUCCESS
    assert str(error) == f"{error.result.name}: what was seen"
    error.function = "all_reduce"
    assert str(error) == f"all_reduce: {error.result.name}: what was seen"
    assert str(kind()) == error.result.name
    assert kind.__doc__


def test_nobody_controls_a_terminal() -> None:
    """Names of peers and of their tensors, and reasons of a master, are part of errors, which programs print."""
    error = pickle.loads(pickle.dumps(PeerLost("lost \x1b[2J\nbob ä", peers=["bob"])))
    assert str(error) == r"RANK_CONNECTION_LOST: lost \x1b[2J\nbob ä"
    assert error.args == (error.message,)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_errors_can_be_copied_and_travel_between_processes(kind: type[PCCLError]) -> None:
    """As multiprocessing and torch.distributed.elastic send them."""
    error = kind("what was seen")
    error.function = "all_reduce"
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is kind
        assert (str(twin), twin.result, vars(twin)) == (str(error), error.result, vars(error))


@pytest.mark.parametrize(
    "kind, base, result",
    [
        (InvalidArgument, ValueError, Result.INVALID_ARGUMENT),
        (PendingAsyncOps, InvalidUsage, Result.PENDING_ASYNC_OPS),
        (CollectiveMismatch, InvalidUsage, Result.INVALID_USAGE),
        (TooFewPeers, PCCLError, Result.TOO_FEW_PEERS),
        (VersionMismatch, MasterUnreachable, Result.MASTER_CONNECTION_FAILED),
        (AuthenticationFailed, MasterUnreachable, Result.MASTER_CONNECTION_FAILED),
        (Kicked, PCCLError, Result.MASTER_CONNECTION_FAILED),
        (PeerUnreachable, PCCLError, Result.RANK_CONNECTION_FAILED),
        (PeerLost, PCCLError, Result.RANK_CONNECTION_LOST),
        (OperationTimeout, PeerLost, Result.RANK_CONNECTION_LOST),
        (OperationTimeout, TimeoutError, Result.RANK_CONNECTION_LOST),
        (ResultMismatch, PeerLost, Result.RANK_CONNECTION_LOST),
    ],
)
def test_what_scripts_can_catch(kind: type[PCCLError], base: type[Exception], result: Result) -> None:
    assert issubclass(kind, base)
    assert kind().result is result


def test_the_reason_of_a_kick() -> None:
    assert (Kicked("text", reason="why").message, Kicked("text", reason="why").reason) == ("text", "why")
    assert Kicked("text").reason == "text"
    assert Kicked(reason="why").message == "why"


@pytest.mark.parametrize(
    "name, call",
    [
        ("MasterNode", lambda: MasterNode("127.0.0.1:0", straggler_timeout=0)),
        ("MasterNode.run", lambda: MasterNode("no address").run()),
        ("TensorInfo.from_numpy", lambda: TensorInfo.from_numpy([1.0], "w")),
        ("TensorInfo.from_torch", lambda: TensorInfo.from_torch(numpy.zeros(1), "w")),
        ("SharedState", lambda: SharedState([])),
    ],
)
def test_the_function_that_failed_is_named(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument) as raised:
        call()
    assert str(raised.value).startswith(f"{name}: INVALID_ARGUMENT: ")
