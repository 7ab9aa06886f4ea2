"""A process group as torch's backend for one device, beside other backends for other devices. From torch 2.14 on.

torch uses a process group written in Python for all devices. A backend is called through C++, and Works that return
through C++ offer `wait` and `get_future`, but neither `is_completed` nor `exception`. So zpccl makes a backend only
where torch needs one: for `"cpu:zpccl,cuda:nccl"`, and for `shrink_group`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Backend

if TYPE_CHECKING:
    from zpccl.torch.process_group import ProcessGroup

CAN_BE_MADE = hasattr(Backend, "supports_reconfigure")
_OF_GROUP = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "send", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single", "alltoall"),
    *("getBackendName", "get_error", "set_timeout", "shrink", "shutdown", "abort"),
)


class DeviceBackend(Backend):
    """Forwards all calls of torch to a process group.

    Attributes:
        group: the process group.
    """

    # torch looks for a missing attribute in the C++ class, which would ask for it here again.
    supports_coalescing = supports_splitting = supports_reconfigure = supports_time_estimate = supports_window = False
    supports_shrinking = True

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    @property
    def options(self) -> Any:
        """The options of the group."""
        return self.group.options


def _handing_on(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: getattr(self.group, name)(*arguments)


for _name in _OF_GROUP:
    setattr(DeviceBackend, _name, _handing_on(_name))
