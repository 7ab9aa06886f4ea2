"""Fault-tolerant collective communication for training across the public internet."""

from typing import TYPE_CHECKING

from zpccl import cuda
from zpccl.communicator import AsyncReduceHandle, Communicator
from zpccl.errors import (
    AuthenticationFailed,
    CheckpointDamaged,
    CheckpointFailed,
    CollectiveMismatch,
    HostIncomplete,
    InternalError,
    InvalidArgument,
    InvalidUsage,
    Kicked,
    MasterUnreachable,
    NoSharedState,
    OperationTimeout,
    PCCLError,
    PeerLost,
    PeerUnreachable,
    PendingAsyncOps,
    Result,
    ResultMismatch,
    TooFewPeers,
    TopologyOptimizationFailed,
    UpdateTopologyFailed,
    VersionMismatch,
)
from zpccl.master_node import MasterNode
from zpccl.observe.logs import log_as_environment_says
from zpccl.progress import Progress
from zpccl.shared_state import SharedState, TensorInfo
from zpccl.state.offers import Offer
from zpccl.topology import Topology, TopologyLink, TopologyPath, TopologyPeer
from zpccl.types import (
    Algorithm,
    Attribute,
    DataType,
    DeviceType,
    DigestKind,
    DistributionHint,
    GatherResult,
    QuantizationAlgorithm,
    QuantizationOptions,
    QuantizedDataType,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    ScatterResult,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)

log_as_environment_says()

__version__: str

if not TYPE_CHECKING:  # Or else mypy would accept every name.

    def __getattr__(name):
        """`__version__`: the release as installed; "0+unknown" if the folder is not installed."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib.metadata  # Only here: it takes time, and programs start without it.

        try:
            return importlib.metadata.version("zpccl")
        except importlib.metadata.PackageNotFoundError:
            return "0+unknown"


__all__ = [
    "Algorithm",
    "AsyncReduceHandle",
    "Attribute",
    "AuthenticationFailed",
    "CheckpointDamaged",
    "CheckpointFailed",
    "CollectiveMismatch",
    "Communicator",
    "DataType",
    "DeviceType",
    "DigestKind",
    "DistributionHint",
    "GatherResult",
    "HostIncomplete",
    "InternalError",
    "InvalidArgument",
    "InvalidUsage",
    "Kicked",
    "MasterNode",
    "MasterUnreachable",
    "NoSharedState",
    "Offer",
    "OperationTimeout",
    "PCCLError",
    "PeerLost",
    "PeerUnreachable",
    "PendingAsyncOps",
    "Progress",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "QuantizedDataType",
    "ReduceDescriptor",
    "ReduceInfo",
    "ReduceOp",
    "ReduceOpDescriptor",
    "ReduceOperandDescriptor",
    "Result",
    "ResultMismatch",
    "ScatterResult",
    "SharedState",
    "SharedStateSyncInfo",
    "SharedStateSyncStrategy",
    "TensorInfo",
    "TooFewPeers",
    "Topology",
    "TopologyLink",
    "TopologyOptimizationFailed",
    "TopologyPath",
    "TopologyPeer",
    "UpdateTopologyFailed",
    "VersionMismatch",
    "cuda",
]
