"""Tensors of a device in collectives: memory of the host in their place, which the engine reads and writes.

What is sent is copied out before the call is made, and a result is copied in once its collective was committed. So a
collective that fails leaves the tensors of its peer as they were, and nothing is to be restored on a device.

The thread that makes a call, and the one that waits for its answer, own the copies; both wait for them, and for nothing
else that the device does.
"""

from __future__ import annotations

import ctypes
from typing import Any

from zpccl.engine.devices import Wait, device_of


class Staged:
    """One tensor. The memory of the host lives as long as this.

    Both copies come after all work that is on the caller's stream now, whichever thread asks for them.

    Args:
        tensor: contiguous, on a device, with at least one element.
        nbytes: its size.
        reads: the tensor is sent: its copy begins now.
    """

    def __init__(self, tensor: Any, nbytes: int, *, reads: bool) -> None:
        self._device = device_of(tensor)
        self._bytes = self._device.bytes_of(tensor)
        self._staging = self._device.staging(nbytes)
        self._mark = self._device.mark()
        self._wait: Wait | None = None
        if reads:
            self._wait = self._device.begin_copy_out(self._bytes, 0, self._staging, nbytes, self._mark)
        self.place = str(tensor.device), int(tensor.data_ptr())
        """The device, and the address there."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._staging.memory))
        """Of the memory of the host."""

    def fetch(self) -> None:
        """Waits until what is sent is in the memory of the host."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def store(self, nbytes: int) -> None:
        """Copies so many bytes in, and waits for that. What the caller's stream was given after the call can go on."""
        self._device.begin_copy_in(self._staging, nbytes, self._bytes, 0, self._mark)()
