"""The collectives of the public API, as methods that `Communicator` inherits, and their handles.

All make the same promises: all survivors have one outcome, a failed call leaves its inputs as they were, nobody gets a
result that others have otherwise. `arguments.py` checks what the user gives; `Caller` waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from zpccl import arguments, limits
from zpccl.arguments import Collective
from zpccl.caller import Caller, checked_int, checked_seconds, wait
from zpccl.control.peer_loop import PeerLoop
from zpccl.errors import InvalidArgument, InvalidUsage, PCCLError, PeerLost, Result, TooFewPeers, public
from zpccl.types import (
    GatherResult,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    ScatterResult,
)

logger = logging.getLogger("zpccl.peer")


class AsyncReduceHandle:
    """A collective in flight, from `Communicator.all_reduce_async` and its like."""

    def __init__(self, communicator: Collectives, loop: PeerLoop, call: Collective) -> None:
        self._communicator, self._loop, self._call = communicator, loop, call

    @property
    @public
    def result(self) -> Any:
        """What the blocking call would have returned (of all-reduces: the tensor).

        Raises:
            InvalidUsage: there is none: the collective has not ended, or failed.
        """
        if not self._has_succeeded():
            raise InvalidUsage("there is no result; wait() for it, and look whether it succeeded")
        self._call.store()
        return self._call.result()

    @property
    @public
    def peer_ids(self) -> tuple[str, ...]:
        """The `Communicator.peer_id` of all who took part, in order; the same on all of them.

        Raises:
            InvalidUsage: the collective has not ended, or failed.
        """
        if not self._has_succeeded():
            raise InvalidUsage("nobody has taken part yet; wait() for it, and look whether it succeeded")
        return tuple(peer_id.hex() for peer_id, _ in self._call.peers)

    @public
    def wait(self, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Waits for the outcome. May be called again, and from any thread.

        Args:
            timeout: seconds after which the collective is given up.

        Returns:
            Whether it succeeded, its `Result` as an int, and what it cost. Never raises for a collective that failed.

        Raises:
            InvalidArgument: the timeout is not a number of seconds.
            InvalidUsage: in a child process made by fork.
        """
        timeout = checked_seconds(timeout)
        self._communicator._check_process()
        try:
            with self._communicator._giving_up(self._loop, [self._call]):
                self._communicator._answer(self._loop, self._call, timeout)
        except PCCLError as error:
            return False, int(error.result), self._call.info(len(self._communicator._group_members()))
        return True, int(Result.SUCCESS), self._call.info()

    def done(self) -> bool:
        """True once the collective has ended, with success or not: the tensors are the caller's again.

        A tensor on a GPU has the result once `wait` has returned.
        """
        return self._call.future.done()

    @public
    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Has `callback` called once the collective has ended; at once, by the caller, if it has already.

        Else the thread that answers all calls of this communicator runs it. So it must return at once: it may wake
        another thread, but neither wait nor call the communicator. An exception that it raises is logged.

        Raises:
            InvalidArgument: it cannot be called.
        """
        if not callable(callback):
            raise InvalidArgument(f"a {type(callback).__name__} cannot be called; give a function without arguments")
        loop = self._loop  # The call refers to its callbacks: if they referred to the handle, it would stay for long.

        def call(_: object) -> None:
            try:
                callback()
            except BaseException as error:
                if not isinstance(error, Exception) and not loop.is_own_thread():
                    raise
                logger.exception("the callback of a collective failed")  # Others wait for this thread.

        self._call.future.add_done_callback(call)

    def exception(self) -> PCCLError | None:
        """The error of a collective that failed, after `wait`; None if it succeeded or still runs."""
        error = self._call.future.exception() if self._call.future.done() else None
        return error if isinstance(error, PCCLError) else None

    def _has_succeeded(self) -> bool:
        return self._call.future.done() and self._call.future.exception() is None


class Collectives(Caller):
    """What a communicator can do with tensors: the collectives, and a barrier."""

    @public
    def all_reduce(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        timeout: float | None = None,
        restore: bool = True,
        algorithm: str = "auto",
    ) -> Any:
        """Combines the tensors of all members of the group. All of them must call it with the same `tag`.

        If it fails, `send` is as it was before the call, bit for bit, in place too. The contents of a separate `recv`
        are undefined after a failure.

        Args:
            send: contiguous numpy array or torch tensor of any shape, on the CPU or a GPU.
            recv: receives the result: a tensor of as many elements of the same dtype, `send` itself for in place, or
                None for a new tensor, which is then returned.
            op: how elements are combined.
            tag: tells collectives apart that run at the same time.
            operand_descriptor: what the elements are; taken from the tensor if left out.
            quantization_options: how to make floating-point tensors smaller on the wire.
            timeout: seconds after which the call is given up.
            restore: False leaves a failed in-place buffer undefined, for speed.
            algorithm: "auto", "ring" or "direct" (see `Algorithm`), the same on all peers. Where two peers do not reach
                each other a ring is used all the same; the info says what was.

        Returns:
            `ReduceInfo`; the new tensor if `recv` is None.

        Raises:
            PeerLost: a peer was lost; call again.
            TooFewPeers: alone in the group, or fewer than `min_world_size` are in it.
            CollectiveMismatch: peers gave different arguments.
            OperationTimeout: `timeout` ran out.
            InvalidArgument, InvalidUsage: the arguments, or the moment, do not allow the call; the error says why.
        """
        call = arguments.all_reduce(
            send, recv, op, tag, operand_descriptor, quantization_options, algorithm, restore=restore
        )
        result = self._run(call, timeout)
        return result if recv is None else call.info()

    @public
    def all_reduce_async(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        restore: bool = True,
        algorithm: str = "auto",
    ) -> AsyncReduceHandle:
        """Like `all_reduce`, but returns at once. Many may be in flight, each with its own tag.

        That is 1,024 calls of all kinds in a group of 64 members or less, 65,536 / members in larger ones.

        The tensors must stay untouched until `wait` of the handle has returned. May be called from any thread. Waits
        until a tensor on a GPU is copied to memory of the host.

        Raises:
            TooFewPeers: alone in the group.
            InvalidArgument: the arguments do not allow the call; the error says why.
            InvalidUsage: not connected, or closed. All other errors are those of the handle.
        """
        call = arguments.all_reduce(
            send, recv, op, tag, operand_descriptor, quantization_options, algorithm, restore=restore
        )
        return self._launch(call)

    @public
    def broadcast(
        self, tensor: Any, *, is_root: bool, tag: int = 0, timeout: float | None = None, restore: bool = True
    ) -> ReduceInfo:
        """Sends the root's tensor to all members of the group, in place. All of them must call it with the same `tag`.

        The root says that it is: ranks change with the members, and names need not be unique, so a root that is named
        by others may be somebody else by the time of the call. If just one peer does not say so, all are told. A root
        that is lost is nobody's root: in the next call another peer must say that it is.

        If it fails, the tensors are as they were before the call, bit for bit.

        Args:
            tensor: contiguous numpy array or torch tensor, of as many elements of the same dtype on all peers. Its
                shape is this peer's own business. Read on the root, written on the others.
            is_root: True on the one peer whose tensor is sent.
            tag: tells collectives apart that run at the same time.
            timeout: seconds after which the call is given up.
            restore: False leaves the buffer of a failed broadcast undefined, for speed and memory: else the receivers
                need a workspace of the tensor's size.

        Raises:
            PeerLost: a peer was lost; call again, with another root if that is the one.
            CollectiveMismatch: peers gave different arguments; `field` is "is_root" where not just one is the root.
            PCCLError: others, as by `all_reduce`.
        """
        info: ReduceInfo = self._run(arguments.broadcast(tensor, is_root, tag, restore), timeout)
        return info

    @public
    def broadcast_async(self, tensor: Any, *, is_root: bool, tag: int = 0, restore: bool = True) -> AsyncReduceHandle:
        """Like `broadcast`, but returns at once, as `all_reduce_async` does."""
        return self._launch(arguments.broadcast(tensor, is_root, tag, restore))

    @public
    def all_gather(self, send: Any, recv: Any = None, *, tag: int = 0, timeout: float | None = None) -> GatherResult:
        """Gives everybody the tensors of all members of the group. All of them must call it with the same `tag`.

        Rows are in order of peer ids, not of ranks: ranks change when a path breaks, ids never. So a row stays where it
        is while the same peers take part, all peers get the same bits, and the parts of `reduce_scatter` have the same
        order. The result says whose each row is. `send` is only read.

        Args:
            send: contiguous numpy array or torch tensor, of as many elements of the same dtype on all peers.
            recv: receives the rows, one after the other: a tensor of the same dtype with `world_size` times the
                elements of `send`, or more; of these the first are written. Undefined after a failure. None makes a
                new tensor.
            tag: tells collectives apart that run at the same time.
            timeout: seconds after which the call is given up.

        Returns:
            The rows, as a view of `recv` where that is given, and whose they are.

        Raises:
            PCCLError: as by `all_reduce`.
        """
        result: GatherResult = self._run(arguments.all_gather(send, recv, tag, self._world_size()), timeout)
        return result

    @public
    def all_gather_async(self, send: Any, recv: Any = None, *, tag: int = 0) -> AsyncReduceHandle:
        """Like `all_gather`, but returns at once, as `all_reduce_async` does."""
        return self._launch(arguments.all_gather(send, recv, tag, self._world_size()))

    @public
    def all_to_all(self, send: Any, recv: Any = None, *, tag: int = 0, timeout: float | None = None) -> GatherResult:
        """Sends one row of a tensor to each member of the group. All of them must call it with the same `tag`.

        Rows are in order of peer ids (`Communicator.peer_ids`), as those of `all_gather`: row i of `send` goes to peer
        i, and row i of the result comes from peer i. `send` is only read.

        Where two members have no data connection, the rows go by way of others as in an `all_gather`: each peer gets
        those for all, in memory of `world_size` times the size of `send`, and keeps its own. Each peer has another
        result, so there are no digests to compare: see `reduce_scatter` for what is verified.

        Args:
            send: contiguous numpy array or torch tensor with one row for each member, of shape `(world_size, ...)`;
                as many elements of the same dtype on all peers.
            recv: receives the rows: a tensor of the same dtype with the elements of `send`, or more; of these the first
                are written. Undefined after a failure. None makes a new tensor.
            tag: tells collectives apart that run at the same time.
            timeout: seconds after which the call is given up.

        Returns:
            The rows, in the shape of `send` and as a view of `recv` where that is given, and whose they are.

        Raises:
            PeerLost: a peer was lost, perhaps before all had called; call again with rows for those who are left.
            PCCLError: as by `all_reduce`.
        """
        result: GatherResult = self._run(arguments.all_to_all(send, recv, tag, self._world_size()), timeout)
        return result

    @public
    def all_to_all_async(self, send: Any, recv: Any = None, *, tag: int = 0) -> AsyncReduceHandle:
        """Like `all_to_all`, but returns at once, as `all_reduce_async` does."""
        return self._launch(arguments.all_to_all(send, recv, tag, self._world_size()))

    @public
    def reduce_scatter(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        timeout: float | None = None,
    ) -> ScatterResult:
        """Combines the tensors of all members of the group and gives each of them one part of the result.

        All of them must call it with the same `tag`. The flattened tensor is cut into one part a peer, in order of peer
        ids as the rows of `all_gather`; the first `count % world_size` parts are one element longer. The result says
        which part this peer has. If a peer is lost, all survivors lose the call and try again, and the parts are cut
        anew. `send` is only read.

        Each part is made by the peer that gets it, and by no other: so there is no second copy whose digest could be
        compared with it, as all other collectives do. What is verified: that all gave the same arguments, that what
        travels is undamaged, and that all survivors get their parts or none does. What is not: that a part is right
        where the memory or the arithmetic of a peer is faulty. What passes through on its way to others takes memory,
        with three or more peers up to the size of the tensor; for AVG of 8-bit integers four times that, of wider ones
        but those of 64 bits twice.

        Args:
            send: contiguous numpy array or torch tensor of any shape.
            recv: receives the part: a tensor of the same dtype with the elements of the longest part, or more; of
                these the first are written. Undefined after a failure. None makes a new tensor.
            op: how elements are combined.
            tag: tells collectives apart that run at the same time.
            operand_descriptor: what the elements are; taken from the tensor if left out.
            timeout: seconds after which the call is given up.

        Returns:
            The part, in one dimension and as a view of `recv` where that is given, and where it belongs.

        Raises:
            PCCLError: as by `all_reduce`.
        """
        call = arguments.reduce_scatter(send, recv, op, tag, operand_descriptor, self._world_size())
        result: ScatterResult = self._run(call, timeout)
        return result

    @public
    def reduce_scatter_async(
        self,
        send: Any,
        recv: Any = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
    ) -> AsyncReduceHandle:
        """Like `reduce_scatter`, but returns at once, as `all_reduce_async` does."""
        return self._launch(arguments.reduce_scatter(send, recv, op, tag, operand_descriptor, self._world_size()))

    @public
    def barrier(self, *, tag: int = 0, timeout: float | None = None) -> ReduceInfo:
        """Waits until all members of the group have called it with the same `tag`. No data is moved.

        A member that is lost is waited for no more. Nobody returns from it before all who take part have called it,
        and if one does, all survivors do.

        Args:
            tag: tells collectives apart that run at the same time.
            timeout: seconds after which the call is given up; the others go on waiting for this peer.

        Raises:
            PCCLError: as by `all_reduce`.
        """
        info: ReduceInfo = self._run(arguments.barrier(tag), timeout)
        return info

    @public
    def barrier_async(self, *, tag: int = 0) -> AsyncReduceHandle:
        """Like `barrier`, but returns at once: this peer has come, and learns by the handle when all have."""
        return self._launch(arguments.barrier(tag))

    @public
    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4, algorithm: str = "auto"
    ) -> ReduceInfo:
        """Reduces several tensors and tries again what failed, until all have succeeded. All members must call it.

        Args:
            descriptors: what to reduce; tags must differ.
            max_in_flight: collectives that run at the same time. Tensors of less than 64 KiB do not count: voting for
                each takes longer than reducing it, so all members vote for many of them at once, up to half of the
                calls that a peer may have in flight (1,024 in a group of 64 or less, 65,536 / members in larger ones).
            algorithm: of all of them: "auto", "ring" or "direct", as in `all_reduce`.

        Returns:
            World size of the last, and bytes of all together.

        Raises:
            TooFewPeers: the group is down to one, or to fewer than `min_world_size`.
            CollectiveMismatch: peers gave different arguments.
            InvalidArgument, InvalidUsage: the arguments, or the moment, do not allow the call; the error says why.
        """
        max_in_flight = checked_int(max_in_flight, "max_in_flight", 1)
        if not isinstance(descriptors, Iterable):
            raise InvalidArgument(f"descriptors is a {type(descriptors).__name__}, not a list of ReduceOpDescriptor")
        descriptors = tuple(descriptors)
        loop = self._connected()
        pending = [arguments.all_reduce_of(descriptor, algorithm) for descriptor in descriptors]
        if len({descriptor.reduce_descriptor.tag for descriptor in descriptors}) < len(pending):
            raise InvalidArgument("descriptors must have different tags")
        info = ReduceInfo(len(self._group_members()), 0, 0)
        tx_bytes = rx_bytes = 0
        for calls in _windows(pending, max_in_flight, lambda: limits.calls_in_flight_max(self._world_size()) // 2):
            with self._giving_up(loop, calls):
                loop.call(calls)
                _wait_with_retry(loop, calls)
            for call in calls:
                self._answer(loop, call)
                info = call.info()
                tx_bytes, rx_bytes = tx_bytes + info.tx_bytes, rx_bytes + info.rx_bytes
        return replace(info, tx_bytes=tx_bytes, rx_bytes=rx_bytes)

    def _world_size(self) -> int:
        return max(len(self._group_members()), 1)

    def _launch(self, call: Collective) -> AsyncReduceHandle:
        """Makes a call and returns at once.

        Raises:
            TooFewPeers: in a group of one.
        """
        loop = self._admitted()
        if len(self._group_members()) <= 1:
            raise TooFewPeers("this peer is alone in its group; wait for others")
        with self._giving_up(loop, [call]):
            loop.call([call])
            return AsyncReduceHandle(self, loop, call)


def _wait_with_retry(loop: PeerLoop, calls: list[Collective]) -> None:
    """Waits until all have ended, with anything but the loss of a peer: those are begun again, in their place.

    All members wait for theirs in the same order and pass none that is to be tried again. So they meet at each, though
    their windows may end elsewhere, where the group has shrunk meanwhile.
    """
    for place in range(len(calls)):  # To the last: an error of one must not leave the memory of another in use.
        wait(calls[place].future, None)
        while _is_to_retry(calls[place]):
            again = [i for i in range(place, len(calls)) if _is_to_retry(calls[i])]
            for i in again:
                calls[i] = replace(calls[i])
            loop.call([calls[i] for i in again])
            wait(calls[place].future, None)


def _is_to_retry(call: Collective) -> bool:
    return call.future.done() and isinstance(call.future.exception(), PeerLost)


def _windows(
    calls: Sequence[Collective], max_in_flight: int, window_max: Callable[[], int]
) -> Iterator[list[Collective]]:
    """Splits collectives, in order, into those to begin together: of `window_max` at most.

    That leaves half of the calls that a peer may have to the user's other threads.
    """
    window: list[Collective] = []
    large_count = 0
    for call in calls:
        is_large = call.send.nbytes >= limits.SMALL_TENSOR_BYTES
        if (is_large and large_count == max_in_flight) or len(window) >= window_max():
            yield window
            window, large_count = [], 0
        window.append(call)
        large_count += is_large
    if window:
        yield window
