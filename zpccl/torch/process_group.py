"""`dist.init_process_group("zpccl")`: collectives of torch on a communicator.

`configuration` holds the ranks, and ends collectives when a rank is lost. See docs/pytorch.md.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ErrorType

from zpccl import limits
from zpccl.collectives import AsyncReduceHandle
from zpccl.communicator import Communicator
from zpccl.engine.living import Living
from zpccl.engine.tensors import check_torch
from zpccl.errors import InvalidArgument, InvalidUsage, OperationTimeout, PCCLError, PeerLost
from zpccl.torch.configuration import Configuration, wait_for_late_threads
from zpccl.torch.device_backend import CAN_BE_MADE, DeviceBackend
from zpccl.torch.handle import Handle
from zpccl.torch.rendezvous import Membership, meet
from zpccl.torch.work import Part, Work, tensors_in
from zpccl.types import DataType, ReduceOp

_OPERATIONS = (
    (dist.ReduceOp.SUM, ReduceOp.SUM),
    (dist.ReduceOp.AVG, ReduceOp.AVG),
    (dist.ReduceOp.PRODUCT, ReduceOp.PROD),
    (dist.ReduceOp.MIN, ReduceOp.MIN),
    (dist.ReduceOp.MAX, ReduceOp.MAX),
    (dist.ReduceOp.PREMUL_SUM, ReduceOp.SUM),
)
_OF_BOOL = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.MAX: ReduceOp.MAX, ReduceOp.PROD: ReduceOp.MIN}
_OF_BOOL[ReduceOp.MIN] = ReduceOp.MIN
_DESTROYED = "the process group has been destroyed"


@dataclass(frozen=True)
class _Call:
    """A call that can be made: its tensor has been checked.

    Attributes:
        signature: the values that all ranks must agree on.
        launch: makes the call, at a tag.
        finish: see `Part`.
    """

    signature: tuple[str, int, Any, Hashable]
    launch: Callable[[Communicator, int], AsyncReduceHandle]
    finish: Callable[[Any], object] | None


class ProcessGroup(dist.ProcessGroup):
    """A process group over a communicator. Made by `init_process_group` and `new_group`.

    The methods are torch's own, with the arguments that its functions pass. Users call them through
    `torch.distributed`. Tensors are on the CPU or a GPU.

    Args:
        rank: rank of this process.
        size: number of ranks.
        timeout: see below.
        members: the ranks; None: `reconfigure` sets them, as often as needed.

    Attributes:
        timeout: for meeting, and for collectives that are issued from now on.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, members: Membership | None) -> None:
        super().__init__(rank, size)
        self._name = ""
        self.timeout = timeout
        self._configuration = Configuration.none(rank, size) if members is None else Configuration(members)
        self._handle = Handle() if members is None else None
        self._counts: deque[Work] = deque(maxlen=limits.TORCH_COUNTS_MAX)  # See `allreduce`.
        _open_groups.add(self)

    @classmethod
    def of_all(cls, store: Any, rank: int, size: int, timeout: timedelta, *, is_default: bool = False) -> ProcessGroup:
        """Makes a group of ranks that meet in a store; see `meet`."""
        return cls(rank, size, timeout, meet(store, rank, size, timeout, is_default=is_default))

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "zpccl"

    # torch keeps the name in the backends of a group, and a group written in Python has none.
    def setGroupName(self, name: str) -> None:
        """Takes the name that torch gives to the group."""
        self._name = name

    def getGroupName(self) -> str:
        """The name that torch has given to the group."""
        return self._name

    def getRank(self) -> int:
        """The rank of this process."""
        return self._rank

    def getSize(self) -> int:
        """The number of ranks."""
        return self._size

    # That of torch returns the store of the C++ object, which has none: the store changes with the ranks.
    def get_group_store(self) -> Any:
        """A store of the present ranks alone, for the program."""
        return self._configuration.store_of_program

    @property
    def _rank(self) -> int:
        return self._configuration.rank

    @property
    def _size(self) -> int:
        return self._configuration.size

    @property
    def error(self) -> PCCLError | None:
        """Why the group has ended; None while it works."""
        return self._configuration.error

    @property
    def failure(self) -> PCCLError | None:
        """The same if a collective has failed; None while the group works, and after this rank has left it."""
        return self._configuration.failure

    @property
    def communicator(self) -> Communicator:
        """The communicator of this rank.

        Raises:
            InvalidUsage: the only rank of a group has no communicator.
        """
        return self._configuration.communicator

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of `Work.wait` for collectives that are issued from now on."""
        self.timeout = timeout

    def shutdown(self) -> None:
        """Leaves the run. Collectives in flight fail."""
        self._configuration.leave(InvalidUsage(_DESTROYED), is_orderly=True)
        self._handle = None

    def abort(self) -> None:
        """Leaves the run at once. Collectives in flight fail, here and on all other ranks."""
        self._configuration.leave(InvalidUsage(_DESTROYED), is_orderly=False)

    # --- Other ranks ------------------------------------------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """True if the group was made for `reconfigure`, and has not been destroyed."""
        return self._handle is not None

    def get_reconfigure_handle(self) -> str:
        """The handle of this rank for `reconfigure`, always the same; torch's `_get_reconfigure_handle`.

        Raises:
            InvalidUsage: the group was not made for `reconfigure`, or has been destroyed.
        """
        return self._own_handle().text

    def reconfigure(self, opts: Any) -> Work:
        """Gives the group the ranks that have these handles; torch's `_reconfigure`. All of them must call it.

        Returns once they have met. The earlier ranks end, if they have not ended yet: their collectives in flight fail.

        Args:
            opts: `uuid`: a number that is new each time. `handles`: a list in the order of ranks, or a set. `timeout`:
                None for that of the group.

        Raises:
            InvalidArgument: the handle of this rank is not among the handles, or one is there twice.
            InvalidUsage: the group was not made for `reconfigure`, or the number was used before.
            OperationTimeout: not all ranks came in time. The call may be tried again, with another number.
            PeerLost: a rank was lost while they met. The same applies.
        """
        own = self._own_handle()
        handles = list(opts.handles) if isinstance(opts.handles, list) else sorted(opts.handles)
        if own.text not in handles or len(set(handles)) < len(handles):
            raise InvalidArgument(f"handles must be different and include {own.text}; they are {handles}")
        timeout = opts.timeout or self.timeout
        self._configuration.leave(InvalidUsage("the process group was given other ranks"), is_orderly=True)
        store = own.store(opts.uuid, handles[0], timeout)
        members = meet(store, handles.index(own.text), len(handles), timeout, is_default=False)
        self._configuration = Configuration(members)
        return self._issue([], [])

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> DeviceBackend:
        """A group of the other ranks, in their order, as a backend from which torch's `shrink_group` makes a group.

        All of them must call it. This group stays as it is.

        Raises:
            OperationTimeout, PeerLost: as in `reconfigure`.
            InvalidUsage: this rank has tried it before with the same ranks.
        """
        del shrink_flags, opts_override
        left = [rank for rank in range(self._size) if rank not in ranks_to_exclude]
        store = self._configuration.store_of(left)
        return DeviceBackend(ProcessGroup.of_all(store, left.index(self._rank), len(left), self.timeout))

    def get_backend(self, device: Any) -> ProcessGroup:
        """The group itself. torch asks the result for its features."""
        del device
        return self

    _get_backend = get_backend

    @property
    def _device_types(self) -> list[Any]:
        """The devices whose tensors the group accepts. torch asks for them when it saves or loads checkpoints."""
        return [torch.device("cpu"), torch.device("cuda")]

    supports_shrinking = CAN_BE_MADE
    supports_coalescing = supports_splitting = supports_time_estimate = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """False: the group needs no special memory."""
        del device
        return False

    @property
    def options(self) -> Any:
        """The backend's name and timeout, in torch's form."""
        return Backend.Options(self.getBackendName(), timeout=self.timeout)

    def get_error(self) -> Any:
        """The kind of error that the group failed with, as an `ErrorType` of torch."""
        failure = self.failure
        if failure is None:
            return ErrorType.SUCCESS
        if isinstance(failure, OperationTimeout):
            return ErrorType.TIMEOUT
        return ErrorType.REMOTE_ERROR if isinstance(failure, PeerLost) else ErrorType.COMM_ERROR

    def _own_handle(self) -> Handle:
        if self._handle is None:
            raise InvalidUsage("only a process group made with enable_reconfigure=True can get other ranks")
        return self._handle

    # --- Issuing ----------------------------------------------------------------------------------------------------

    def _call(
        self,
        kind: str,
        tensor: Any,
        detail: Hashable,
        launch: Callable[[Communicator, int], AsyncReduceHandle],
        finish: Callable[[Any], object] | None = None,
    ) -> list[_Call]:
        check_torch(tensor, "the tensor")
        return [_Call((kind, tensor.numel(), tensor.dtype, detail), launch, finish)]

    def _issue(self, calls: Sequence[_Call], outputs: Any, options: Any = None) -> Work:
        """Makes all calls of a collective. All tensors have been checked before, so that a bad one stops all calls."""
        self._configuration.check()
        if any(call.finish is not None for call in calls):
            _check_outputs(outputs)
        issue = self._configuration.issue
        with self._configuration.in_full():
            parts = [Part(issue(call.signature, call.launch, self.timeout), call.finish) for call in calls]
        return self._work(parts, outputs, options)

    def _work(self, parts: Sequence[Part], outputs: Any, options: Any = None, *, size: int | None = None) -> Work:
        timeout = getattr(options, "timeout", timedelta(0))
        seconds = timeout.total_seconds() if timeout > timedelta(0) else self.timeout.total_seconds()
        return Work(self._configuration, parts, outputs, size or self._size, seconds)

    # --- Reductions -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduces a tensor of each rank, in place. It may be in a list, and `opts` may be an operation."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        work = self.allreduce_coalesced(tensors, opts)
        # Under `join`, DDP hands the Work of a count of ranks to C++ code, which does not keep the Python object alive.
        # Once that is freed, C++ calls `wait` of torch's own class, which never returns.
        if getattr(opts, "asyncOp", False) and sum(tensor.numel() for tensor in tensors) == 1:
            self._counts.append(work)
        return work

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Work:
        """Reduces several tensors of each rank, in place, with one call each. `opts` may be an operation."""
        op = getattr(opts, "reduceOp", opts or dist.ReduceOp.SUM)
        calls = [call for tensor in tensors for call in self._reduce(tensor, tensor, op)]
        return self._issue(calls, tensors, opts)

    def reduce(self, tensors: list[Any], opts: Any) -> Work:
        """Reduces a tensor of each rank for the root, with an all-reduce: the other ranks discard the result."""
        (tensor,) = tensors
        output = tensor if self._is_root(opts) else None
        return self._issue(self._reduce(tensor, output, opts.reduceOp), tensors, opts)

    def _reduce(self, tensor: Any, output: Any, op: Any) -> list[_Call]:
        operation, factor = _operation(op, tensor)
        _check_layout(tensor)
        if self._size == 1 and factor is not None:
            output.detach().mul_(factor)
        if self._size == 1 or tensor.numel() == 0:
            return []
        is_in_place = output is tensor and tensor.is_contiguous() and factor is None
        memory = _contiguous(tensor, must_copy=not is_in_place)
        if factor is not None:
            memory.mul_(factor)
        return self._call(
            "all_reduce",
            memory,
            operation,
            lambda comm, tag: comm.all_reduce_async(memory, memory, op=operation, tag=tag),
            None if is_in_place or output is None else lambda _: _copy(output, memory),
        )

    def reduce_scatter(self, output_tensors: list[Any], input_tensors: list[list[Any]], opts: Any = None) -> Work:
        """Reduces a tensor for each rank."""
        opts = opts or dist.ReduceScatterOptions()
        (output,), (inputs,) = output_tensors, input_tensors
        _check_count(len(inputs), self._size, "input tensors")
        _check_alike(inputs, output)
        rows = [_contiguous(inputs[rank]).view(-1) for rank in self._configuration.ranks]
        return self._issue(self._scatter_sums(output, torch.cat(rows), opts.reduceOp), [output], opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Reduces a tensor and gives each rank one part, in order of ranks."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Work:
        """The same for several tensors, with one call each."""
        opts = opts or dist.ReduceScatterOptions()
        calls: list[_Call] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_dtype(tensor, output)
            calls += self._scatter_sums(output, self._in_row_order(tensor), opts.reduceOp)
        return self._issue(calls, outputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sums(self, output: Any, memory: Any, op: Any) -> list[_Call]:
        """Reduces `memory`, whose parts are in order of rows. It has the dtype of `output`, or holds its bytes."""
        operation, factor = _operation(op, output)
        _check_count(memory.numel(), output.numel() * self._size, "input elements")
        if factor is not None:
            memory = memory * factor
        if self._size == 1 or memory.numel() == 0:
            _copy(output, memory)
            return []
        memory = _contiguous(memory)
        return self._call(
            "reduce_scatter",
            memory,
            operation,
            lambda comm, tag: comm.reduce_scatter_async(memory, op=operation, tag=tag),
            lambda result: _copy(output, result.tensor),
        )

    # --- Moving data ------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Any], opts: Any = None) -> Work:
        """Gives all ranks the root's tensor, in place."""
        opts = opts or dist.BroadcastOptions()
        (tensor,) = tensors
        memory = _contiguous(_bytes_if_needed(tensor))
        is_there = self._is_root(opts) or memory.data_ptr() == tensor.data_ptr()
        finish = None if is_there else lambda _: _copy(tensor, memory)
        return self._issue(self._broadcast(memory, opts.rootRank, finish), tensors, opts)

    def _broadcast(self, memory: Any, root: int, finish: Callable[[Any], object] | None) -> list[_Call]:
        if self._size == 1 or memory.numel() == 0:
            if finish is not None:
                finish(None)
            return []
        return self._call(
            "broadcast",
            memory,
            root,
            lambda comm, tag: comm.broadcast_async(memory, is_root=root == self._rank, tag=tag),
            finish,
        )

    def scatter(self, output_tensors: list[Any], input_tensors: list[list[Any]], opts: Any) -> Work:
        """Gives each rank one of the root's tensors. It is a broadcast: each rank receives the tensors of all."""
        (output,) = output_tensors
        if self._is_root(opts):
            (inputs,) = input_tensors
            _check_count(len(inputs), self._size, "input tensors")
            _check_alike(inputs, output)
            memory = torch.cat([_contiguous(_bytes_if_needed(tensor)).view(-1) for tensor in inputs])
        else:
            like = _bytes_if_needed(output)
            memory = like.new_empty(self._size * like.numel())
        row = memory.view(self._size, -1)[self._rank]
        calls = self._broadcast(memory, opts.rootRank, lambda _: _copy(output, row))
        return self._issue(calls, [output], opts)

    def allgather(self, output_tensors: list[list[Any]], input_tensors: list[Any], opts: Any = None) -> Work:
        """Gives all ranks the tensors of all, in order of ranks."""
        (outputs,), (tensor,) = output_tensors, input_tensors
        _check_count(len(outputs), self._size, "output tensors")
        _check_alike(outputs, tensor)
        return self._issue(self._gather(tensor, functools.partial(self._copy_rows, outputs)), output_tensors, opts)

    def allgather_coalesced(self, output_lists: list[list[Any]], inputs: list[Any], opts: Any = None) -> Work:
        """The same for several tensors, with one call each. There is one output list for each rank."""
        _check_count(len(output_lists), self._size, "output lists")
        calls: list[_Call] = []
        for tensor, *outputs in zip(inputs, *output_lists, strict=True):
            _check_alike(outputs, tensor)
            calls += self._gather(tensor, functools.partial(self._copy_rows, outputs))
        return self._issue(calls, output_lists, opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Gives all ranks the tensors of all, one after the other in one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Work:
        """The same for several tensors, with one call each."""
        calls: list[_Call] = []
        for output, tensor in zip(outputs, inputs, strict=True):
            calls += self._gather_into(output, tensor)
        return self._issue(calls, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors: list[list[Any]], input_tensors: list[Any], opts: Any) -> Work:
        """Gives the root the tensors of all. It is an all-gather: each rank receives the tensors of all."""
        (tensor,) = input_tensors
        if not self._is_root(opts):
            return self._issue(self._gather(tensor, None), [], opts)
        (outputs,) = output_tensors
        _check_count(len(outputs), self._size, "output tensors")
        _check_alike(outputs, tensor)
        return self._issue(self._gather(tensor, functools.partial(self._copy_rows, outputs)), outputs, opts)

    def gather_single(self, output: Any, input: Any, opts: Any) -> Work:
        """Gives the root the tensors of all, one after the other in one tensor. It is an all-gather."""
        if not self._is_root(opts):
            return self._issue(self._gather(input, None), [], opts)
        return self._issue(self._gather_into(output, input), [output], opts)

    def _gather_into(self, output: Any, tensor: Any) -> list[_Call]:
        _check_count(output.numel(), tensor.numel() * self._size, "output elements")
        _check_dtype(output, tensor)
        plain = _bytes_if_needed(output)
        is_in_order = self._configuration.is_in_order
        if is_in_order and self._size > 1 and output.is_contiguous() and not _overlap(output, tensor):
            return self._gather(tensor, None, plain)
        # If the output has gaps, torch makes a view where it can; otherwise the rows are copied once more.
        return self._gather(tensor, lambda rows: _copy(output, self._in_rank_order(rows)))

    def _gather(self, tensor: Any, finish: Callable[[Any], object] | None, recv: Any = None) -> list[_Call]:
        """All-gathers. `finish` gets the rows, each flat, in the dtype that travels."""
        memory = _contiguous(_bytes_if_needed(tensor))
        if self._size == 1 or memory.numel() == 0:
            if finish is not None:
                finish(memory.view(1, -1).expand(self._size, -1))
            return []
        return self._call(
            "all_gather",
            memory,
            None,
            lambda comm, tag: comm.all_gather_async(memory, recv, tag=tag),
            None if finish is None else lambda result: finish(result.tensor.view(self._size, -1)),
        )

    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: list[int], input_split_sizes: list[int], opts: Any = None
    ) -> Work:
        """Gives each rank a part of each rank's tensor.

        If all ranks leave out the split sizes, parts are equal. Otherwise every part is padded to the longest one, and
        the call blocks until all ranks have told the lengths of theirs, and raises InvalidArgument on all ranks if a
        rank sends more or less than another one expects.
        """
        _check_dtype(output, input)
        if not output_split_sizes and not input_split_sizes:
            _check_count(output.numel(), input.numel(), "output elements")
            _check_count(input.numel() % self._size, 0, "elements that do not fit into equal parts")
            rows = self._in_row_order(_bytes_if_needed(input)).view(self._size, -1)
            return self._issue(
                self._exchange(rows, lambda rows: _copy(output, self._in_rank_order(rows))), [output], opts
            )
        outputs = list(output.split(output_split_sizes or _even(output, self._size)))
        inputs = list(input.split(input_split_sizes or _even(input, self._size)))
        return self._exchange_uneven(outputs, inputs, [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: list[Any], input_tensors: list[Any], opts: Any = None) -> Work:
        """Sends one tensor to each rank. Like `all_to_all_single` with split sizes."""
        return self._exchange_uneven(output_tensors, input_tensors, output_tensors, opts)

    def _exchange_uneven(self, outputs: list[Any], inputs: list[Any], result: list[Any], opts: Any) -> Work:
        _check_count(len(outputs), self._size, "output tensors")
        _check_count(len(inputs), self._size, "input tensors")
        for tensor in (*outputs, *inputs):
            _check_dtype(tensor, inputs[0])
        _check_outputs(outputs)
        plain = [_contiguous(_bytes_if_needed(tensor)).view(-1) for tensor in inputs]
        with self._configuration.in_full():
            longest = self._longest_part(outputs, inputs) * _travelling_width(inputs[0])
            rows = plain[0].new_zeros(self._size, longest)
            for row, rank in enumerate(self._configuration.ranks):
                rows[row, : plain[rank].numel()] = plain[rank]
            return self._issue(self._exchange(rows, functools.partial(self._copy_rows, outputs)), result, opts)

    def _longest_part(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> int:
        """The elements of the longest part that a rank sends to another one. Blocks until all ranks have told theirs.

        Raises:
            InvalidArgument: a rank sends more or less than the other one expects. All ranks raise it.
        """
        own = [[tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]
        counts = torch.empty(self._size, 2, self._size, dtype=torch.int64, device="cpu")
        self.all_gather_single(counts, torch.tensor(own, device="cpu")).wait()
        sent, expected = counts[:, 0], counts[:, 1].T
        for source, destination in (sent != expected).nonzero()[:1].tolist():
            raise InvalidArgument(
                f"rank {source} sends {sent[source, destination]} elements to rank {destination}, which expects"
                f" {expected[source, destination]}"
            )
        return int(sent.max())

    def _exchange(self, rows: Any, finish: Callable[[Any], object]) -> list[_Call]:
        if self._size == 1 or rows.numel() == 0:
            finish(rows)
            return []
        return self._call(
            "all_to_all",
            rows,
            None,
            lambda comm, tag: comm.all_to_all_async(rows, tag=tag),
            lambda result: finish(result.tensor),
        )

    # --- The rest ---------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        """Waits for all ranks."""
        if self._size == 1:
            return self._issue([], [], opts)
        calls = self._call("barrier", self._configuration.rows, None, lambda comm, tag: comm.barrier_async(tag=tag))
        return self._issue(calls, [], opts)

    def send(self, tensors: list[Any], destination: int, tag: int) -> Work:
        """Sends a tensor to one rank, which must receive it."""
        return self._transfer(tensors, destination, tag, is_sender=True)

    def recv(self, tensors: list[Any], source: int, tag: int) -> Work:
        """Receives a tensor from one rank."""
        return self._transfer(tensors, source, tag, is_sender=False)

    def recv_anysource(self, tensors: list[Any], tag: int) -> Work:
        """Not supported.

        Raises:
            InvalidUsage: always.
        """
        raise InvalidUsage("zpccl cannot receive from an unspecified rank; give recv a source")

    def _transfer(self, tensors: list[Any], other: int, tag: int, *, is_sender: bool) -> Work:
        (tensor,) = tensors
        if other == self._rank or not 0 <= other < self._size:
            raise InvalidArgument(f"rank {other} is not another rank of this group of {self._size}")
        memory = _contiguous(_bytes_if_needed(tensor))
        check_torch(memory, "the tensor")
        if memory.numel() == 0:
            return self._issue([], tensors)
        is_there = is_sender or memory.data_ptr() == tensor.data_ptr()
        if not is_there:
            _check_outputs(tensors)
        pair = self._configuration.pair(other, self.timeout)
        with self._configuration.in_full():
            message = pair.transfer(memory, tag, is_sender=is_sender)
        finish = None if is_there else lambda _: _copy(tensor, memory)
        return self._work([Part(message, finish)], tensors, size=2)

    def _is_root(self, opts: Any) -> bool:
        """True if this rank is the root, which must be a rank of the group."""
        if not 0 <= opts.rootRank < self._size:
            raise InvalidArgument(f"the root, {opts.rootRank}, is not a rank of this group of {self._size}")
        return bool(opts.rootRank == self._rank)

    def _in_row_order(self, tensor: Any) -> Any:
        """The parts of a tensor, one for each rank, in the order of rows. Not always a copy."""
        _check_count(tensor.numel() % self._size, 0, "elements that do not fit into equal parts")
        memory = _contiguous(tensor)
        if self._configuration.is_in_order or memory.numel() == 0:
            return memory
        return memory.view(self._size, -1)[self._configuration.rows]

    def _in_rank_order(self, rows: Any) -> Any:
        """Rows in order of ranks, flat."""
        if self._configuration.is_in_order:
            return rows.reshape(-1)
        # Not by assignment to indices, which torch lacks for unsigned integers.
        return rows[self._configuration.rows.argsort()].view(-1)

    def _copy_rows(self, outputs: Sequence[Any], rows: Any) -> None:
        """Copies rows to the outputs, which are in order of ranks: of each row as much as its output holds."""
        for row, rank in enumerate(self._configuration.ranks):
            _copy(outputs[rank], rows[row][: _travelling_count(outputs[rank])])


_open_groups: Living[ProcessGroup] = Living()
os.register_at_fork(after_in_child=_open_groups.clear)  # The ranks belong to the parent.


@atexit.register
def _leave_at_exit() -> None:
    """Programs that end without destroy_process_group() leave gracefully too."""
    for group in _open_groups.all():
        group.shutdown()
    wait_for_late_threads()


# --- Tensors --------------------------------------------------------------------------------------------------------


def _operation(op: Any, tensor: Any) -> tuple[ReduceOp, Any]:
    """zpccl's operation, and the factor by which each input is multiplied before, or None.

    Raises:
        InvalidArgument: the operation is not supported, or not for this dtype.
    """
    found = next((ours for theirs, ours in _OPERATIONS if op == theirs), None)
    if found is None:
        raise InvalidArgument("bitwise operations are not supported; SUM, AVG, PRODUCT, MIN, MAX and PREMUL_SUM are")
    if op == dist.ReduceOp.PREMUL_SUM:
        return found, op.__getstate__()[1]
    if tensor.dtype is torch.bool:
        if found not in _OF_BOOL:
            raise InvalidArgument("booleans have no average")
        return _OF_BOOL[found], None
    return found, None


def _is_known(dtype: Any) -> bool:
    try:
        DataType.from_torch_dtype(dtype)
    except InvalidArgument:
        return False
    return True


def _travelling_width(tensor: Any) -> int:
    """How many elements of the result of `_bytes_if_needed` make one of the tensor."""
    return 1 if _is_known(tensor.dtype) else int(tensor.element_size())


def _travelling_count(tensor: Any) -> int:
    """The number of elements of the result of `_bytes_if_needed`."""
    return int(tensor.numel() * _travelling_width(tensor))


def _bytes_if_needed(tensor: Any) -> Any:
    """The tensor, or its bytes if zpccl does not know its dtype: a tensor that is only moved may have any dtype."""
    tensor = tensor.detach()
    return tensor if _is_known(tensor.dtype) else _contiguous(tensor).view(-1).view(torch.uint8)


def _contiguous(tensor: Any, *, must_copy: bool = False) -> Any:
    """A contiguous tensor with these elements, in the same memory if possible. Booleans become bytes."""
    _check_layout(tensor)
    tensor = tensor.detach()
    tensor = tensor.clone(memory_format=torch.contiguous_format) if must_copy else tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _copy(output: Any, elements: Any) -> None:
    """Copies elements, or the bytes of elements, to a tensor of any shape."""
    output = output.detach()
    if elements.dtype is torch.uint8 and output.dtype is not torch.uint8:
        elements = elements.contiguous().view(output.dtype)
    output.copy_(elements.reshape(output.shape))


def _overlap(one: Any, other: Any) -> bool:
    """True if the tensors may share memory."""
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def _even(tensor: Any, parts: int) -> list[int]:
    _check_count(tensor.size(0) % parts, 0, "rows that do not fit into equal parts")
    return [tensor.size(0) // parts] * parts


def _check_layout(tensor: Any) -> None:
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"the tensor has layout {tensor.layout}; use tensor.to_dense()")


def _check_outputs(outputs: Any) -> None:
    """Raises InvalidArgument if nothing can be copied to an output."""
    for output in tensors_in(outputs):
        _check_layout(output)
        if any(size > 1 and stride == 0 for size, stride in zip(output.shape, output.stride(), strict=True)):
            raise InvalidArgument("elements of an output share memory, as after expand(); use tensor.contiguous()")


def _check_dtype(tensor: Any, like: Any) -> None:
    if tensor.dtype is not like.dtype:
        raise InvalidArgument(f"there are tensors of {tensor.dtype} and of {like.dtype}; all must have one dtype")


def _check_alike(tensors: Sequence[Any], like: Any) -> None:
    """Raises InvalidArgument unless all tensors have the dtype and number of elements of `like`, in any shape."""
    for tensor in tensors:
        _check_dtype(tensor, like)
        _check_count(tensor.numel(), like.numel(), "elements in a tensor of the list")


def _check_count(count: int, needed: int, what: str) -> None:
    if count != needed:
        raise InvalidArgument(f"there are {count} {what}, and {needed} are needed")
