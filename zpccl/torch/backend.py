"""Registers the backend "zpccl" with torch.distributed, and leaves its process groups when the process ends."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

import torch.distributed as dist

from zpccl.torch.process_group import ProcessGroup
from zpccl.torch.rendezvous import meet

_open_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def register() -> None:
    """Makes "zpccl" a name that `init_process_group` and `new_group` know, for tensors on the CPU."""
    dist.Backend.register_backend("zpccl", _make, extended_api=True, devices=["cpu"])


def _make(options: Any, backend_options: Any) -> ProcessGroup:
    """What torch calls for each new group, on its ranks."""
    del backend_options
    # Of the default group torch does not list the ranks.
    is_default = not options.global_ranks_in_group
    configuration = meet(options.store, options.group_rank, options.group_size, options.timeout, is_default=is_default)
    group = ProcessGroup(configuration, options.timeout)
    _open_groups.add(group)
    return group


@atexit.register
def _leave_at_exit() -> None:
    """Programs that end without destroy_process_group() leave gracefully too."""
    for group in list(_open_groups):
        group.shutdown()
