"""The collectives of the public API, as methods that `Communicator` inherits, and their handles.

All make the same promises: all survivors have one outcome, a failed call leaves its inputs as they were, and no peer
gets a result that differs from another peer's. `arguments.py` checks the arguments; `Caller` waits.
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
        """The return value of the blocking call; for an all-reduce, the tensor.

        Raises:
            InvalidUsage: there is no result: the collective has not ended, or it failed.
        """
        if not self._has_succeeded():
            raise InvalidUsage("the collective has no result; call wait() and check that it succeeded")
        self._call.store()
        return self._call.result()

    @property
    @public
    def peer_ids(self) -> tuple[str, ...]:
        """The sorted `Communicator.peer_id` of all peers that took part; the same on all of them. Empty for a barrier.

        Raises:
            InvalidUsage: the collective has not ended, or it failed.
        """
        if not self._has_succeeded():
            raise InvalidUsage("the participants are not known yet; call wait() and check that it succeeded")
        return tuple(peer_id.hex() for peer_id, _ in self._call.peers)

    @public
    def wait(self, timeout: float | None = None) -> tuple[bool, int, ReduceInfo]:
        """Waits for the outcome. May be called again, and from any thread.

        Args:
            timeout: seconds after which the collective is given up.

        Returns:
            True if it succeeded, its `Result` as an int, and its statistics. A collective that failed raises nothing.

        Raises:
            InvalidArgument: the timeout is not a number of seconds.
            InvalidUsage: in a child process made by fork; or in the callback of another collective.
        """
        timeout = checked_seconds(timeout)
        self._communicator._check_process()
        if not self.done():
            self._communicator._check_thread(self._loop)
        try:
            with self._communicator._giving_up(self._loop, [self._call]):
                self._communicator._answer(self._loop, self._call, timeout)
        except PCCLError as error:
            return False, int(error.result), self._call.info(len(self._communicator._group_members()))
        return True, int(Result.SUCCESS), self._call.info()

    def done(self) -> bool:
        """True once the collective has succeeded or failed; the caller may then use the tensors again.

        A tensor on a GPU holds the result only after `wait` has returned.
        """
        return self._call.future.done()

    @public
    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once the collective has ended; if it has ended already, at once, in the caller's thread.

        Otherwise the thread that answers all calls of this communicator runs the callback, so it must return at once:
        it may wake another thread, but must not wait; a call that waits raises InvalidUsage there. An exception that it
        raises is logged.

        Raises:
            InvalidArgument: the callback is not callable.
        """
        if not callable(callback):
            raise InvalidArgument(f"a {type(callback).__name__} cannot be called; give a function without arguments")
        loop = self._loop  # The call keeps its callbacks: if they referred to the handle, it would live too long.

        def call(_: object) -> None:
            try:
                callback()
            except BaseException as error:
                if not isinstance(error, Exception) and not loop.is_own_thread():
                    raise
                logger.exception("the callback of a collective failed")  # Other calls need this thread.

        self._call.future.add_done_callback(call)

    def exception(self) -> PCCLError | None:
        """The error of a collective that failed, after `wait`; None if it succeeded or still runs."""
        error = self._call.future.exception() if self._call.future.done() else None
        return error if isinstance(error, PCCLError) else None

    def _has_succeeded(self) -> bool:
        return self._call.future.done() and self._call.future.exception() is None


class Collectives(Caller):
    """The operations of a communicator on tensors: the collectives, and a barrier."""

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

        If it fails, `send` is as it was before the call, bit for bit, also in place. The contents of a separate `recv`
        are undefined after a failure.

        Args:
            send: contiguous numpy array or torch tensor of any shape, on the CPU or a GPU.
            recv: receives the result: a tensor with the same dtype and number of elements, `send` itself to reduce in
                place, or None for a new tensor, which is then returned.
            op: how elements are combined.
            tag: tells apart collectives that run at the same time.
            operand_descriptor: type of the elements; taken from the tensor if left out.
            quantization_options: how to make floating-point tensors smaller on the wire.
            timeout: seconds after which the call is given up.
            restore: False leaves the buffer of a failed in-place call undefined, for speed.
            algorithm: "auto", "ring" or "direct" (see `Algorithm`), the same on all peers. If the links do not allow
                it, the master plans another algorithm; the info names the one that ran.

        Returns:
            `ReduceInfo`; the new tensor if `recv` is None.

        Raises:
            PeerLost: a peer was lost; call again.
            TooFewPeers: alone in the group, or the group has fewer members than `min_world_size`.
            CollectiveMismatch: peers gave different arguments.
            OperationTimeout: `timeout` ran out.
            InvalidArgument, InvalidUsage: the call is not allowed with these arguments, or now; the error says why.
            InternalError: this peer cannot start, for lack of memory for instance. All others get PeerLost.
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

        The limit is 1,024 calls of all kinds in a group of up to 64 members, and 65,536 / members in a larger group.

        The tensors must stay untouched until `wait` of the handle has returned, also by other calls: calls in flight
        run at the same time, whatever their order. May be called from any thread. If `send` is on a GPU, the call waits
        until it is copied to host memory.

        Raises:
            TooFewPeers: alone in the group.
            InvalidArgument: the call is not allowed with these arguments; the error says why.
            InvalidUsage: not connected, or closed. The handle reports all other errors.
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

        The root declares itself, because the others cannot name it reliably: ranks change with the members, and names
        need not be unique. If not exactly one peer is the root, the call fails on all. When the root is lost, another
        peer must be the root of the next call.

        If it fails, the tensors are as they were before the call, bit for bit.

        Args:
            tensor: contiguous numpy array or torch tensor, with the same dtype and number of elements on all peers.
                Shapes may differ between peers. The root's is read, the others' are written.
            is_root: True on the one peer whose tensor is sent.
            tag: tells apart collectives that run at the same time.
            timeout: seconds after which the call is given up.
            restore: False leaves the buffer of a failed broadcast undefined, for speed and memory: with True the
                receivers need a workspace of the tensor's size.

        Raises:
            PeerLost: a peer was lost; call again, with another root if the root was lost.
            CollectiveMismatch: peers gave different arguments; `field` is "is_root" if not exactly one is the root.
            PCCLError: other errors, as in `all_reduce`.
        """
        info: ReduceInfo = self._run(arguments.broadcast(tensor, is_root, tag, restore), timeout)
        return info

    @public
    def broadcast_async(self, tensor: Any, *, is_root: bool, tag: int = 0, restore: bool = True) -> AsyncReduceHandle:
        """Like `broadcast`, but returns at once, as `all_reduce_async` does."""
        return self._launch(arguments.broadcast(tensor, is_root, tag, restore))

    @public
    def all_gather(self, send: Any, recv: Any = None, *, tag: int = 0, timeout: float | None = None) -> GatherResult:
        """Gives every member the tensors of all members of the group. All of them must call it with the same `tag`.

        Rows are in order of peer ids, not of ranks: ranks change when a path breaks, ids never do. So the order of rows
        stays the same while the same peers take part, all peers get the same bits, and the parts of `reduce_scatter`
        have the same order. The result names the peer of each row. `send` is only read.

        Args:
            send: contiguous numpy array or torch tensor, with the same dtype and number of elements on all peers.
            recv: receives the rows, one after the other: a tensor of the same dtype with at least `world_size` times
                the elements of `send`; the rows fill its first elements. Undefined after a failure. None makes a new
                tensor.
            tag: tells apart collectives that run at the same time.
            timeout: seconds after which the call is given up.

        Returns:
            The rows, as a view of `recv` if that is given, and the peer of each row.

        Raises:
            PCCLError: as in `all_reduce`.
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

        Rows are in order of peer ids (`Communicator.peer_ids`), as in `all_gather`: row i of `send` goes to peer i, and
        row i of the result comes from peer i. `send` is only read.

        If two members have no data connection, the rows travel through other members, as in an `all_gather`: each peer
        receives all rows, in memory of `world_size` times the size of `send`, and keeps its own. Each peer has a
        different result, so there are no digests to compare: `reduce_scatter` says what is verified.

        Args:
            send: contiguous numpy array or torch tensor with one row for each member, of shape `(world_size, ...)`,
                with the same dtype and number of elements on all peers.
            recv: receives the rows: a tensor of the same dtype with at least the elements of `send`; the rows fill its
                first elements. Undefined after a failure. None makes a new tensor.
            tag: tells apart collectives that run at the same time.
            timeout: seconds after which the call is given up.

        Returns:
            The rows, in the shape of `send` and as a view of `recv` if that is given, and the peer of each row.

        Raises:
            PeerLost: a peer was lost, perhaps before all had called; call again with rows for the remaining members.
            PCCLError: as in `all_reduce`.
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
        """Combines the tensors of all members of the group and gives each member one part of the result.

        All of them must call it with the same `tag`. The flattened tensor is cut into one part per peer, in order of
        peer ids like the rows of `all_gather`; the first `count % world_size` parts are one element longer. The result
        says which part this peer has. If a peer is lost, the call fails on all survivors; when they call again, the
        tensor is cut into new parts. `send` is only read.

        Only the peer that gets a part computes it, so there is no second copy to compare digests with, as in other
        collectives. It is verified that all peers gave the same arguments, that the data arrived undamaged, and that
        either all survivors get their parts or none does. It is not verified that a part is right: a peer's memory or
        arithmetic may be faulty. Data on its way to other peers takes memory: with three or more peers, up to the size
        of the tensor; for AVG of 8-bit integers four times that, of 16-bit and 32-bit integers twice.

        Args:
            send: contiguous numpy array or torch tensor of any shape.
            recv: receives the part: a tensor of the same dtype with at least the elements of the longest part; the part
                fills its first elements. Undefined after a failure. None makes a new tensor.
            op: how elements are combined.
            tag: tells apart collectives that run at the same time.
            operand_descriptor: type of the elements; taken from the tensor if left out.
            timeout: seconds after which the call is given up.

        Returns:
            The part, in one dimension and as a view of `recv` if that is given, and its place in the tensor.

        Raises:
            PCCLError: as in `all_reduce`.
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
        """Waits until all members of the group have called it with the same `tag`. Moves no data.

        It does not wait for lost members. No peer returns from it before all that take part have called it, and if one
        returns, all survivors do.

        Args:
            tag: tells apart collectives that run at the same time.
            timeout: seconds after which the call is given up; the others go on waiting for this peer.

        Raises:
            PCCLError: as in `all_reduce`.
        """
        info: ReduceInfo = self._run(arguments.barrier(tag), timeout)
        return info

    @public
    def barrier_async(self, *, tag: int = 0) -> AsyncReduceHandle:
        """Like `barrier`, but returns at once: this peer has called, and the handle is done when all others have."""
        return self._launch(arguments.barrier(tag))

    @public
    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4, algorithm: str = "auto"
    ) -> ReduceInfo:
        """Reduces several tensors, and retries those that lost a peer until all succeed. All members must call it.

        Args:
            descriptors: the tensors to reduce; tags must differ, and none may write memory that another one uses.
            max_in_flight: collectives that run at the same time. Tensors of less than 64 KiB do not count: voting for
                each takes longer than reducing it, so all members vote for many of them at once, up to half of the
                calls that a peer may have in flight (see `all_reduce_async`).
            algorithm: the algorithm of all of them: "auto", "ring" or "direct", as in `all_reduce`.

        Returns:
            World size of the last one, and the bytes of all together.

        Raises:
            TooFewPeers: the group has shrunk to one member, or to fewer than `min_world_size`.
            CollectiveMismatch: peers gave different arguments.
            InvalidArgument, InvalidUsage: the call is not allowed with these arguments, or now; the error says why.
            InternalError: this peer cannot start, for lack of memory for instance. The others try again.
        """
        max_in_flight = checked_int(max_in_flight, "max_in_flight", 1)
        if not isinstance(descriptors, Iterable):
            raise InvalidArgument(f"descriptors is a {type(descriptors).__name__}, not a list of ReduceOpDescriptor")
        descriptors = tuple(descriptors)
        loop = self._connected()
        self._check_thread(loop)
        pending = [arguments.all_reduce_of(descriptor, algorithm) for descriptor in descriptors]
        if len({descriptor.reduce_descriptor.tag for descriptor in descriptors}) < len(pending):
            raise InvalidArgument("descriptors must have different tags")
        arguments.check_apart(pending)
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
        self._admitted()
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
    """Waits until all calls have ended, and begins a call again, in its place, as often as it loses a peer.

    All members wait for their calls in the same order and pass none that must be repeated. So they meet at each call,
    even if their windows end at different calls because the group has shrunk meanwhile.
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
    """Splits collectives, in order, into windows of at most `window_max` that begin together.

    Half of the calls that a peer may have in flight stay free for the user's other threads.
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
