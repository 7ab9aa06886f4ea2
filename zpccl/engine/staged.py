"""Tensors of a device in collectives: the engine reads and writes memory of the host in their place.

An input is copied out before the call is made, and a result is copied in once its collective was committed. So a failed
collective leaves the tensors on the device as they were, and nothing has to be restored there.

The thread that makes a call owns the copy of the input, and the one that waits for the answer owns the copy of the
result. Each waits for its copy, and for no other work of the device.
"""

from __future__ import annotations

import ctypes
from typing import Any

from zpccl.engine.devices import Wait, device_of


class Staged:
    """One tensor. Its memory of the host lives as long as this object.

    Both copies come after all work that is on the caller's stream now, whichever thread asks for them.

    Args:
        tensor: a contiguous tensor on a device, with at least one element.
        nbytes: its size in bytes.
        reads: the tensor is an input: its copy begins now.
    """

    def __init__(self, tensor: Any, nbytes: int, *, reads: bool) -> None:
        self._device = device_of(tensor)
        self._bytes = self._device.bytes_of(tensor)
        self._mark = self._device.mark()
        self._staging = self._device.staging(nbytes)
        self._wait: Wait | None = None
        if reads:
            self._wait = self._device.begin_copy_out(self._bytes, 0, self._staging, nbytes, self._mark)
        self.place = str(tensor.device), int(tensor.data_ptr())
        """The device, and the address there."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._staging.memory))
        """Address of the memory of the host."""

    def fetch(self) -> None:
        """Waits until the input is in the memory of the host."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def store(self, nbytes: int) -> None:
        """Copies the first `nbytes` in, and waits for that copy, but not for later work of the caller's stream."""
        self._device.begin_copy_in(self._staging, nbytes, self._bytes, 0, self._mark)()
