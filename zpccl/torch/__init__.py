"""zpccl in PyTorch. Importing it makes `dist.init_process_group("zpccl")` possible (see docs/pytorch.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zpccl.torch.backend import register
from zpccl.torch.hook import FaultTolerantHook, fault_tolerant_hook
from zpccl.torch.process_group import ProcessGroup
from zpccl.torch.sampler import ElasticSampler
from zpccl.torch.work import Work

if TYPE_CHECKING:
    from zpccl.torch.torchft_group import TorchftProcessGroup as TorchftProcessGroup

# Without TorchftProcessGroup, so that `import *` does not need torchft.
__all__ = ["ElasticSampler", "FaultTolerantHook", "ProcessGroup", "Work", "fault_tolerant_hook"]

register()


def __getattr__(name: str) -> Any:
    """`TorchftProcessGroup`, which needs the package torchft."""
    if name == "TorchftProcessGroup":
        from zpccl.torch.torchft_group import TorchftProcessGroup

        return TorchftProcessGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
