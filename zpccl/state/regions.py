"""The memory of one tensor of a shared state, as bytes that can be read and written in pieces.

A region keeps the memory of its tensor alive and owns none itself. Reading a host tensor returns its memory; reading a
device tensor returns a copy in page-locked memory, which belongs to the reader. Copies are complete when a call
returns; copies that run ahead of an iterator are complete when it ends. The tensor is not accessed after that.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy

from zpccl.engine.devices import Device, Staging, Wait, device_of
from zpccl.engine.tensors import TensorView, check_torch, is_on_gpu, view
from zpccl.errors import InvalidArgument
from zpccl.limits import STATE_STAGING_BYTES
from zpccl.types import DataType

_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_memory_at.restype = ctypes.py_object
_WRITABLE = 0x200
"""PyBUF_WRITE, of CPython's buffer protocol."""


class Region(ABC):
    """The memory of one tensor. Several threads may read it at the same time.

    Attributes:
        name: name of the tensor, for error messages.
        datatype: type of its elements.
        count: number of its elements, at least 1.
        nbytes: its size.
    """

    def __init__(self, name: str, datatype: DataType, count: int) -> None:
        self.name = name
        self.datatype = datatype
        self.count = count
        self.nbytes = count * datatype.itemsize

    @abstractmethod
    def read(self, offset: int, size: int) -> memoryview:
        """The present bytes `[offset, offset + size)`. The caller must not write to the view."""

    def pieces(self, begin: int, end: int, size: int) -> Iterator[memoryview]:
        """The bytes `[begin, end)` in pieces of `size` bytes, as `read` returns them; the last one may be shorter.

        A piece is valid until the next one is requested.
        """
        for offset in range(begin, end, size):
            yield self.read(offset, min(size, end - offset))

    @abstractmethod
    def write(self, offset: int, data: Any) -> None:
        """Writes bytes at `offset`; they are visible when it returns."""

    @abstractmethod
    def address_range(self) -> tuple[str, int, int]:
        """The memory range: device, address of the first byte, address after the last byte."""


class HostRegion(Region):
    """Memory of this process.

    Args:
        memory: the memory.
        name: for error messages.
    """

    def __init__(self, memory: TensorView, name: str) -> None:
        super().__init__(name, memory.datatype, memory.count)
        self._owner = memory.owner
        self._address = memory.address
        self._memory: memoryview = _memory_at(memory.address, self.nbytes, _WRITABLE)

    def read(self, offset: int, size: int) -> memoryview:
        """The memory itself, not a copy."""
        return self._memory[offset : offset + size]

    def write(self, offset: int, data: Any) -> None:
        """Copies the bytes, without the GIL."""
        target = self._memory[offset : offset + len(data)]
        numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(data, numpy.uint8))

    def address_range(self) -> tuple[str, int, int]:
        """The memory range on the host."""
        return "cpu", self._address, self._address + self.nbytes


class DeviceRegion(Region):
    """Memory of a device.

    Args:
        device: the device.
        tensor: a contiguous tensor on it.
        name: for error messages.
        datatype: type of its elements.
    """

    def __init__(self, device: Device, tensor: Any, name: str, datatype: DataType) -> None:
        super().__init__(name, datatype, tensor.numel())
        self._device = device
        self._place = str(tensor.device)
        self._address: int = tensor.data_ptr()
        self._memory = device.bytes_of(tensor)
        self._mark = device.mark()

    def read(self, offset: int, size: int) -> memoryview:
        """A copy in host memory."""
        staging = self._device.staging(size)
        self._device.begin_copy_out(self._memory, offset, staging, size, self._mark)()
        return staging.memory

    def pieces(self, begin: int, end: int, size: int) -> Iterator[memoryview]:
        """Pieces of copies of STATE_STAGING_BYTES; each copy runs while the pieces of the previous one are in use."""
        step = max(size, STATE_STAGING_BYTES // size * size)
        free = [self._device.staging(min(step, end - begin)) for _ in range(1 + (end - begin > step))]
        begun: list[tuple[Staging, int, Wait]] = []

        def begin_next(offset: int) -> None:
            if offset < end:
                staging, length = free.pop(), min(step, end - offset)
                wait = self._device.begin_copy_out(self._memory, offset, staging, length, self._mark)
                begun.append((staging, length, wait))

        try:
            begin_next(begin)
            for offset in range(begin, end, step):
                staging, length, wait = begun[0]
                wait()
                del begun[0]
                begin_next(offset + step)
                for start in range(0, length, size):
                    yield staging.memory[start : min(start + size, length)]
                free.append(staging)
        finally:
            for _, _, wait in begun:
                wait()

    def write(self, offset: int, data: Any) -> None:
        """Copies the bytes through page-locked memory, with two buffers that alternate."""
        data = memoryview(data)
        if not 0 <= offset <= offset + len(data) <= self.nbytes:
            raise ValueError(f"{len(data)} bytes at {offset} are beyond the {self.nbytes} of {self.name}")
        stagings = [self._device.staging(min(len(data), STATE_STAGING_BYTES)) for _ in range(2)]
        waits: list[Wait] = []
        try:
            for start in range(0, len(data), STATE_STAGING_BYTES):
                if len(waits) == len(stagings):
                    waits.pop(0)()
                part = data[start : start + STATE_STAGING_BYTES]
                staging = stagings[start // STATE_STAGING_BYTES % 2]
                staging.memory[: len(part)] = part
                copied = self._device.begin_copy_in(staging, len(part), self._memory, offset + start, self._mark)
                waits.append(copied)
        finally:
            for wait in waits:
                wait()

    def address_range(self) -> tuple[str, int, int]:
        """The memory range on the device."""
        return self._place, self._address, self._address + self.nbytes


def region(tensor: Any, name: str, *, writable: bool = True) -> Region:
    """Makes the region of a tensor.

    Args:
        tensor: a numpy array or a torch tensor on the host or a CUDA device, contiguous; or the `TensorView` of one.
        name: for error messages.
        writable: the tensor must be writable.

    Raises:
        InvalidArgument: the tensor cannot be used; the text says why and what to do.
    """
    if is_on_gpu(tensor):
        datatype = check_torch(tensor, name)
        _check_count(tensor.numel(), name)
        return DeviceRegion(device_of(tensor), tensor, name, datatype)
    memory = tensor if isinstance(tensor, TensorView) else view(tensor, name, writable=writable)
    _check_count(memory.count, name)
    return HostRegion(memory, name)


def _check_count(count: int, name: str) -> None:
    if count == 0:
        raise InvalidArgument(f"{name} has no elements; at least one is needed")
