"""A call of a user, from its start to its answer: its vote, its memory, and the bytes it moved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures._base import FINISHED
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from zpccl.engine.engine import DIGEST_CHANNEL, ReducePlan, TreeLane
from zpccl.engine.tensors import NO_MEMORY, TensorView
from zpccl.errors import PCCLError
from zpccl.protocol.effects import StartReduce
from zpccl.protocol.messages import CollectiveSpec, PathSample, Reducing, Spec
from zpccl.protocol.rings import owners_of
from zpccl.state.transfer import StateTransfer
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

T = TypeVar("T")


class Answer(Future[T]):
    """The answer to a call.

    A thread that waits for it, or adds a callback, holds no lock while Python runs signal handlers. A handler may close
    the peer: it then waits for the peer's thread, which takes the lock of a `Future` to answer.
    """

    _done_callbacks: list[Callable[[Future[T]], object]]  # Of `Future`, which calls all of them once it is done.

    def __init__(self) -> None:
        super().__init__()
        self._is_due = is_due = threading.Lock()  # Locked until the answer is there.
        is_due.acquire()
        self.add_done_callback(lambda _: is_due.release())

    def wait(self, seconds: float) -> bool:
        """Waits at most this long. True once the answer is there."""
        if self._is_due.acquire(timeout=seconds):
            self._is_due.release()  # For other waiters. If Ctrl-C comes here, they see the answer after their timeout.
        return self.done()

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """As in `Future`, but it takes no lock, for the same reason."""
        is_called = threading.Lock()  # By this thread or by the one that answers: locked once and for all.

        def call(answer: Future[T]) -> None:
            if is_called.acquire(blocking=False):
                fn(answer)

        self._done_callbacks.append(call)
        if self.done():
            call(self)

    def done(self) -> bool:
        """True once the answer is there. Unlike `Future.done` it takes no lock: where the main thread polls, Ctrl-C
        could leave the lock held forever, and the peer's thread would wait for it.
        """
        return self._state == FINISHED


@dataclass(eq=False, kw_only=True)
class PendingCall:
    """A call without an answer. `dataclasses.replace` makes the same call again.

    Attributes:
        spec: the operation it votes for; None: connect().
        send: the tensor that a collective reads.
        recv: the tensor that receives its result; see `recv_for`.
        restore: whether old contents are kept, to put them back after a failure.
        transfer: the transfer of a sync.
        future: gets the machine's answer (for collectives the number of peers), or the error.
        call_id: number of the call, once it is made.
        peers: id and name of all participants, in order of ids, once the plan has come.
        place: this peer's index in `peers`.
        error: the answer, while the old contents of its memory are put back.
        fault: why this peer could not start the last attempt, if another one would fail in the same way.
        start: the attempt that begins once they are back, in place of one that was planned ahead.
        measured: what paths have carried before, for the report.
    """

    spec: Spec | None = None
    send: TensorView = NO_MEMORY
    recv: TensorView = NO_MEMORY
    restore: bool = True
    transfer: StateTransfer | None = None
    future: Answer[int] = field(default_factory=Answer, init=False)
    call_id: int | None = field(default=None, init=False)
    peers: tuple[tuple[bytes, str], ...] = field(default=(), init=False)
    place: int = field(default=-1, init=False)
    algorithm: Algorithm = field(default=Algorithm.RING, init=False)
    tx_bytes: int = field(default=0, init=False)
    rx_bytes: int = field(default=0, init=False)
    error: PCCLError | None = field(default=None, init=False)
    fault: str = field(default="", init=False)
    start: StartReduce | None = field(default=None, init=False)
    measured: tuple[PathSample, ...] = field(default=(), init=False)
    _store_lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _is_stored: bool = field(default=False, init=False)

    def result(self) -> Any:
        """The result for the user, of a call that has succeeded."""
        return self.future.result()

    def fetch(self) -> None:
        """Waits until the sent tensor is in host memory. The user's thread calls it, before it makes the call."""
        if self.send.staged is not None:
            self.send.staged.fetch()

    def store(self) -> None:
        """Moves the result to its tensor, once, if it is elsewhere. A thread of the user calls it, after success."""
        with self._store_lock:
            if not self._is_stored:
                self.put()
            self._is_stored = True

    def put(self) -> None:
        """Copies the result to the device whose tensor receives it."""
        staged = self.recv.staged
        if staged is not None and not (isinstance(self.spec, CollectiveSpec) and self.spec.is_root):
            staged.store(self.received_bytes())

    def received_bytes(self) -> int:
        """Size of the result."""
        return self.recv.nbytes

    def recv_for(self, world_size: int, place: int) -> TensorView:
        """The tensor for the result, given the number of participants and this peer's index among them.

        The peer's thread calls it: it may allocate a new tensor, but touches none of its pages.

        Raises:
            PCCLError, MemoryError: there is no room for the result.
        """
        del world_size, place
        return self.recv

    def rows_for(self, world_size: int) -> TensorView:
        """The tensor for the inputs of all peers, in an all-to-all done as an all-gather. See `recv_for`.

        Raises:
            MemoryError: there is no memory for it.
        """
        raise NotImplementedError

    def plan(self, start: StartReduce, own_id: bytes, names: Mapping[bytes, str]) -> ReducePlan:
        """The plan for the engine of the peer `own_id` in an attempt at a collective.

        Raises:
            PCCLError, MemoryError: there is no room for the result.
        """
        spec, how = self.spec, start.how
        order, owners = how.order, owners_of(how.order)
        assert isinstance(spec, CollectiveSpec)
        rank, kind = order.index(own_id), CollectiveKind(spec.kind)
        self.peers = tuple((order[owner], names.get(order[owner], order[owner].hex()[:8])) for owner in owners)
        self.place = owners.index(rank)
        self.algorithm = Algorithm(how.algorithm)
        recv = self.recv_for(len(order), self.place)
        if kind is CollectiveKind.ALL_TO_ALL and self.algorithm is not Algorithm.DIRECT:
            kind, recv = CollectiveKind.ALL_GATHER, self.rows_for(len(order))
        if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL):
            owners = ()
        elif kind is CollectiveKind.BROADCAST:
            owners = (0,)  # The ring begins with the root.
        return ReducePlan(
            attempt_id=start.attempt_id,
            datatype=DataType(spec.datatype),
            op=ReduceOp(spec.op),
            quantization=QuantizationAlgorithm(spec.quantization),
            quantized_datatype=QuantizedDataType(spec.quantized_datatype),
            block_elements=spec.block_size,
            rank=rank,
            peers=order,
            count=spec.count,
            input_address=self.send.address,
            output_address=recv.address,
            frame_bytes=how.frame_bytes,
            restore=self.restore or start.is_ahead,
            kind=kind,
            owners=owners,
            algorithm=Algorithm.DIRECT if how.lanes else self.algorithm,
            lanes=tree_lanes(how, kind, spec.count),
            digest_channel=DIGEST_CHANNEL if start.tells_digest else 0,
            call=start.call_id,
            pace_us=how.pace_us,
        )


def part_of(count: int, world_size: int, index: int) -> slice:
    """The elements of one part of a reduce-scatter: the first `count % world_size` parts are one longer."""
    short, long_count = divmod(count, world_size)
    start = index * short + min(index, long_count)
    return slice(start, start + short + (index < long_count))


def tree_lanes(how: Reducing, kind: CollectiveKind, count: int) -> tuple[TreeLane, ...]:
    """The lanes of a plan: rows in an all-gather, parts in a reduce-scatter, otherwise parts sized by the shares."""
    size, shares = len(how.order), [lane.share for lane in how.lanes]
    ends = [count * end // sum(shares) for end in accumulate(shares)]
    if kind is CollectiveKind.ALL_GATHER:
        ends = [count * row for row in range(1, len(shares) + 1)]
    elif kind is CollectiveKind.REDUCE_SCATTER:
        ends = [part_of(count, size, part).stop for part in range(len(shares))]
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    parents = [lane.parents or (lane.root,) * size for lane in how.lanes]
    return tuple(map(TreeLane, lengths, parents))
