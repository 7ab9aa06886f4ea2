"""zpccl in PyTorch. Importing it makes `dist.init_process_group("zpccl")` possible (see docs/pytorch.md)."""

from __future__ import annotations

from zpccl.torch.backend import register
from zpccl.torch.hook import FaultTolerantHook, fault_tolerant_hook
from zpccl.torch.process_group import ProcessGroup
from zpccl.torch.sampler import ElasticSampler
from zpccl.torch.work import Work

__all__ = ["ElasticSampler", "FaultTolerantHook", "ProcessGroup", "Work", "fault_tolerant_hook"]

register()
