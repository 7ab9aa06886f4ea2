"""`Work`, the result of a collective of a process group: one or more calls of a communicator."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zpccl.collectives import AsyncReduceHandle
from zpccl.engine.devices import device_of
from zpccl.engine.tensors import is_on_gpu
from zpccl.errors import InternalError, PCCLError, PeerLost, TooFewPeers
from zpccl.torch.configuration import Configuration, interruption
from zpccl.torch.pairs import Message, as_own


@dataclass(frozen=True)
class Part:
    """One call of a collective.

    Attributes:
        handle: handle of the call.
        finish: makes the user's output from the call's result; None: the call writes the output itself.
    """

    handle: AsyncReduceHandle | Message
    finish: Callable[[Any], object] | None = None


class Work(dist.Work):
    """A collective that has been issued.

    Its tensors must stay untouched until `wait` has returned, `is_completed` has returned True, or the future is done.
    A Work that fails ends its configuration: all other Works fail too, and no collective can be issued any more. The
    inputs of the failed call are unchanged; other calls of the same collective may have succeeded. Outputs that are not
    inputs are undefined.

    Outputs on GPUs are written after the work that was on the caller's stream when the collective was issued,
    whichever thread waits. They are complete when `wait` returns.

    Args:
        configuration: the ranks that have issued it.
        parts: the calls.
        outputs: the value of `result` and of the future.
        size: number of ranks that must have taken part.
        timeout: default timeout of `wait`, in seconds.
    """

    def __init__(
        self, configuration: Configuration, parts: Sequence[Part], outputs: Any, size: int, timeout: float
    ) -> None:
        super().__init__()
        self._configuration, self._parts, self._outputs = configuration, tuple(parts), outputs
        self._size, self._timeout = size, timeout
        # A call that writes its outputs itself also waits for the copy. A rank that is alone makes no call.
        is_left = not parts or any(part.finish is not None for part in parts)
        gpus = map(device_of, tensors_on_gpus(outputs if is_left else []))
        self._marks = [(device, device.mark()) for device in gpus]
        self._lock = threading.Lock()  # Guards error and future. The peer's thread takes it too, so never for long.
        self._finishing = threading.Lock()
        self._is_finished = False
        self._error: PCCLError | None = None
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the outputs are there.

        Args:
            timeout: time after which the collective is given up and the configuration ends; 0: the timeout of the call.

        Returns:
            True.

        Raises:
            PeerLost: a rank was lost, or the configuration had ended before.
            OperationTimeout: the timeout ran out.
            CollectiveMismatch: the ranks issued different collectives; if tags differ too, the timeout runs out
                instead.
            PCCLError: other errors, as in `Communicator.all_reduce`.

        Ctrl-C, or another exception of a signal handler, gives the collective up like the timeout.
        """
        seconds = timeout.total_seconds()
        deadline = time.monotonic() + (seconds if seconds > 0 else self._timeout)
        for part in self._parts:
            try:
                is_success, _, info = part.handle.wait(max(deadline - time.monotonic(), 0))
            except PCCLError:
                raise
            except BaseException:
                if not part.handle.done() or part.handle.exception() is not None:
                    self._configuration.fail(interruption())
                raise
            if not is_success:
                error = part.handle.exception() or InternalError("the collective failed without an error")
                self._fail(PeerLost(error.message) if isinstance(error, TooFewPeers) else error)
            elif info is not None and info.local_world_size != self._size:
                text = f"only {info.local_world_size} of {self._size} ranks took part in the collective"
                self._fail(PeerLost(text))
        try:
            with self._finishing:
                if self._error is not None:
                    raise copy.copy(self._error)  # Raising modifies the error, and several threads may raise it.
                if not self._is_finished:
                    self._finish()
                    self._is_finished = True
        except PCCLError:
            raise
        except (RuntimeError, MemoryError) as error:  # Of torch: no memory for a copy, or an output that takes none.
            self._fail(as_own(error))
        return True

    def _finish(self) -> None:
        """Makes the outputs from the results and waits for the copies. A rank that is alone made them at the start."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            for device, mark in self._marks:
                stack.enter_context(device.behind(mark))
            for part in self._parts:
                if part.finish is not None:
                    part.finish(part.handle.result)
            done = [(device, device.mark()) for device, _ in self._marks]
        for device, mark in done:
            device.wait(mark)

    def _fail(self, error: PCCLError) -> NoReturn:
        """Raises the error of this Work: the first one, for every thread that waits."""
        error = self._configuration.fail(error)
        with self._lock:
            self._error = error = self._error or error
        raise copy.copy(error)

    def is_completed(self) -> bool:
        """True once the collective has succeeded or failed. Copies results to GPUs before it returns True."""
        if not all(part.handle.done() for part in self._parts):
            return False
        with contextlib.suppress(PCCLError):
            self.wait()
        return True

    def is_success(self) -> bool:
        """True once the outputs are there."""
        return self.is_completed() and self._error is None

    def exception(self) -> PCCLError | None:
        """The error of a collective that failed; None if it succeeded or still runs."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Any]:
        """The output tensors."""
        self.wait()
        return list(self._outputs)

    def synchronize(self) -> None:
        """The same as `wait`, after which outputs on GPUs are complete, too: there is no stream to synchronise."""
        self.wait()

    def get_future(self) -> Any:
        """A `torch.futures.Future` that gets the output tensors, or the error.

        torch passes on a RuntimeError with the text of the error; `ProcessGroup.error` has the error itself. Callbacks
        run in threads of the configuration, several at a time, in any order, and may wait for other collectives. If the
        collective has ended already, a callback runs in the thread that adds it.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            # Only an error that a callback raises is an error for the C++ side of torch, too.
            begun = new_future(self._outputs)
            self._future = begun.then(lambda _: self._delivered())
        if all(part.handle.done() for part in self._parts):
            begun.set_result(None)  # As in other backends: after `wait` a callback runs in the thread that adds it.
        else:
            _complete_after(self._parts, self._configuration, begun)
        return self._future

    def _delivered(self) -> Any:
        self.wait()
        return self._outputs


def _complete_after(parts: Sequence[Part], configuration: Configuration, future: Any) -> None:
    """Lets a thread of the configuration complete a future once all parts are done.

    The calls keep references to their callbacks, so these must not refer to the Work: otherwise it would live, with its
    tensors, until the garbage collector runs.
    """
    lock, left = threading.Lock(), len(parts)

    def part_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            configuration.run_later(lambda: future.set_result(None))

    for part in parts:
        part.handle.add_done_callback(part_done)


def new_future(value: Any) -> Any:
    """A `torch.futures.Future` for a tensor, or lists of tensors. torch must know on which GPUs they are."""
    return torch.futures.Future(devices=[tensor.device for tensor in tensors_on_gpus(value)])


def tensors_on_gpus(value: Any) -> list[Any]:
    """One tensor on each GPU, from a tensor or lists of tensors, in order of the GPUs' names."""
    found = {str(tensor.device): tensor for tensor in tensors_in(value) if is_on_gpu(tensor)}
    return [found[name] for name in sorted(found)]


def tensors_in(value: Any) -> Iterator[Any]:
    """All tensors of a tensor or of lists of tensors."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    else:
        yield value
