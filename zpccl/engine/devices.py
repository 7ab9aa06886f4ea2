"""Devices that hold tensors: copies to and from page-locked memory of the host.

Copies run asynchronously to the CPU, on two streams of their own, one per direction, in the order in which they are
begun. Like all of torch, they wait for the work that was on the caller's stream when its tensor was looked at.

The memory of the host belongs to torch's allocator of page-locked memory, which reuses memory that is given back.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from zpccl.errors import InvalidArgument

Wait: TypeAlias = Callable[[], None]
"""Waits, without the GIL, until a copy is done."""


@dataclass(frozen=True)
class Staging:
    """Page-locked memory of the host.

    Attributes:
        memory: the memory as bytes; this view keeps it alive.
        owner: the device's own object for it.
    """

    memory: memoryview
    owner: Any


class Device(Protocol):
    """One device. May be used by several threads at a time."""

    def bytes_of(self, tensor: Any) -> Any:
        """The device's own object for the bytes of a contiguous tensor. It keeps the memory alive."""

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """A new tensor with the dtype of another one, and undefined contents."""

    def mark(self) -> Any:
        """A mark after all work that is on the caller's stream now."""

    def wait(self, mark: Any) -> None:
        """Waits until the work before the mark is done."""

    def behind(self, mark: Any) -> AbstractContextManager[None]:
        """In this context, the work of this thread goes to the stream for copies to the device, behind the mark."""

    def staging(self, size: int) -> Staging:
        """New memory of the host for copies."""

    def begin_copy_out(self, source: Any, offset: int, staging: Staging, size: int, mark: Any) -> Wait:
        """Begins a copy from the device, behind the mark, to the front of the staging memory."""

    def begin_copy_in(self, staging: Staging, size: int, target: Any, offset: int, mark: Any) -> Wait:
        """Begins a copy to the device, behind the mark, from the front of the staging memory."""


class CudaDevice:
    """A GPU, by torch.

    Args:
        device: torch's name of the GPU, with its index.
    """

    def __init__(self, device: Any) -> None:
        self._torch = sys.modules["torch"]
        self._device = device
        # Of high priority: torch hands its ordinary streams out again and again, so the user may have the same ones.
        self._to_host, self._to_device = (self._torch.cuda.Stream(device, priority=-1) for _ in range(2))

    def bytes_of(self, tensor: Any) -> Any:
        """An alias of the tensor as bytes in one dimension."""
        # A tensor of one element is contiguous whatever its strides are, and `view` would keep them.
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(self._torch.uint8)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """Allocates it with torch's allocator for the GPU."""
        return self._torch.empty(shape, dtype=like.dtype, device=self._device)

    def mark(self) -> Any:
        """An event on the current stream of this thread.

        Raises:
            InvalidArgument: that stream records a CUDA graph, and does no work meanwhile.
        """
        if self._torch.cuda.is_current_stream_capturing():
            raise InvalidArgument("a tensor's stream is being captured in a CUDA graph; make the call outside of it")
        return self._torch.cuda.current_stream(self._device).record_event(self._event())

    def wait(self, mark: Any) -> None:
        """Waits for the event."""
        mark.synchronize()

    def behind(self, mark: Any) -> AbstractContextManager[None]:
        """Makes the stream for copies to the device the current one."""
        return self._behind(mark, self._to_device)

    def staging(self, size: int) -> Staging:
        """New page-locked memory, which a GPU reads and writes without the CPU."""
        tensor = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
        return Staging(memoryview(tensor.numpy()), tensor)

    def begin_copy_out(self, source: Any, offset: int, staging: Staging, size: int, mark: Any) -> Wait:
        """Begins the copy on its stream."""
        return self._copy(staging.owner[:size], source[offset : offset + size], mark, self._to_host)

    def begin_copy_in(self, staging: Staging, size: int, target: Any, offset: int, mark: Any) -> Wait:
        """Begins the copy on its stream."""
        return self._copy(target[offset : offset + size], staging.owner[:size], mark, self._to_device)

    @contextlib.contextmanager
    def _behind(self, mark: Any, stream: Any) -> Iterator[None]:
        with self._torch.cuda.stream(stream):
            stream.wait_event(mark)
            yield

    def _copy(self, target: Any, source: Any, mark: Any, stream: Any) -> Wait:
        # Tensors made in inference mode may be written only in that mode; it is right for all others, too.
        with self._torch.inference_mode(), self._behind(mark, stream):
            target.copy_(source, non_blocking=True)
            return partial(self.wait, self.mark())

    def _event(self) -> Any:
        return self._torch.cuda.Event(blocking=True)  # A thread that waits for it frees its CPU.


_devices: dict[str, Device] = {}
_devices_lock = threading.Lock()


def device_of(tensor: Any) -> Device:
    """The device of a torch tensor on a GPU."""
    name = str(tensor.device)
    with _devices_lock:
        if name not in _devices:
            _devices[name] = CudaDevice(tensor.device)
        return _devices[name]
