"""Registers the backend "zpccl" with torch.distributed, and makes its process groups."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist

from zpccl.torch.device_backend import CAN_BE_MADE, DeviceBackend
from zpccl.torch.process_group import ProcessGroup
from zpccl.torch.work import Work


def register() -> None:
    """Registers "zpccl" for `init_process_group` and `new_group`, for tensors on the CPU and on GPUs."""
    dist.Backend.register_backend("zpccl", _make, extended_api=True, devices=["cpu", "cuda"])
    for each in (ProcessGroup, DeviceBackend, Work):
        _keep_from_compiler(each)


def _keep_from_compiler(owner: type) -> None:
    """Makes torch.compile run the methods of a class as they are. Otherwise it tries to trace them, and fails.

    `torch.compiler.disable` would do the same, but it imports torch._dynamo, which takes seconds.
    """
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "_FrameExecStrategy"):  # An earlier torch.
        return
    never = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for value in vars(owner).values():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            frames.set_code_exec_strategy(function.__code__, never)


def _make(options: Any, backend_options: Any) -> ProcessGroup | DeviceBackend:
    """Makes a new group. torch calls it on each rank of the group."""
    del backend_options
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    if getattr(options, "enable_reconfigure", False):  # Of torch 2.14.
        group = ProcessGroup(rank, size, timeout, None)
    else:
        # torch does not list the ranks of the default group.
        is_default = not options.global_ranks_in_group
        group = ProcessGroup.of_all(options.store, rank, size, timeout, is_default=is_default)
    if CAN_BE_MADE and options.process_group.name() != "custom":  # The group's first backend is for another device.
        return DeviceBackend(group)
    return group
