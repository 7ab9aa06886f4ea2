"""A device without a GPU. Its copies happen as late as possible, so that code that does not wait finds garbage."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from zpccl.engine.devices import CudaDevice, Staging, Wait


class FakeTensor:
    """Memory of a fake device, which only the device may read."""

    def __init__(self, array: Any, device: str = "fake:0") -> None:
        self.secret = np.ascontiguousarray(array)
        self.device = device

    def numel(self) -> int:
        return int(self.secret.size)

    def data_ptr(self) -> int:
        return int(self.secret.ctypes.data)


class FakeDevice:
    """Attributes: `log`, the copies begun ("out" or "in", offset, size) and waited for ("done", number of the copy)."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.under_way = 0
        self.marks = 0
        self.stagings = 0
        self.fail_at = -1
        self._copies = 0
        self._lock = threading.Lock()

    def bytes_of(self, tensor: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            return tensor.secret.view(np.uint8).data
        torch = sys.modules["torch"]  # A tensor that only claims to be on a device.
        return memoryview(CudaDevice.bytes_of(cast(CudaDevice, SimpleNamespace(_torch=torch)), tensor).numpy())

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        torch = sys.modules["torch"]
        return torch.full(shape, 77, dtype=like.dtype).as_subclass(type(like))

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def wait(self, mark: int) -> None:
        assert 1 <= mark <= self.marks
        self.log.append(("wait", mark))

    @contextlib.contextmanager
    def behind(self, mark: int) -> Iterator[None]:
        assert 1 <= mark <= self.marks
        self.log.append(("behind", mark))
        yield

    def staging(self, size: int) -> Staging:
        with self._lock:
            self.stagings += 1
        memory = memoryview(bytearray(size))
        return Staging(memory, memory)

    def begin_copy_out(self, source: Any, offset: int, staging: Staging, size: int, mark: Any) -> Wait:
        staging.owner[:size] = b"\xee" * size
        return self._begin("out", staging.owner[:size], source[offset : offset + size], offset, mark)

    def begin_copy_in(self, staging: Staging, size: int, target: Any, offset: int, mark: Any) -> Wait:
        return self._begin("in", target[offset : offset + size], staging.owner[:size], offset, mark)

    def _begin(self, way: str, target: memoryview, source: memoryview, offset: int, mark: Any) -> Wait:
        assert 1 <= mark <= self.marks and len(target) == len(source)
        with self._lock:
            number = self._copies
            self._copies += 1
            self.log.append((way, offset, len(source)))
            self.under_way += 1
        waited: list[bool] = []

        def wait() -> None:
            with self._lock:
                if not waited:
                    waited.append(True)
                    self.under_way -= 1
                    self.log.append(("done", number))
                    target[:] = source
            if number == self.fail_at:
                raise RuntimeError("the device fell off the bus")

        return wait
