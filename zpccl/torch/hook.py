"""A communication hook of DistributedDataParallel that outlives the loss of peers.

DDP divides the gradients into buckets, and forms new buckets after the first step, in the order in which gradients
became ready. A peer that joins later is in its first step when others are not, so buckets do not match between peers.
The hook collects the buckets and reduces all gradients at once, in the order of the model's parameters. This gives up
the overlap with the backward pass. In return a step is averaged over the same peers for all parameters of a dtype.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zpccl.communicator import Communicator
from zpccl.errors import InvalidArgument, InvalidUsage, PCCLError, PeerLost, TooFewPeers
from zpccl.torch.work import new_future
from zpccl.types import ReduceOp


def fault_tolerant_hook(
    communicator: Communicator,
    parameters: Iterable[Any],
    *,
    samples: Callable[[], float] | None = None,
    tag: int = 0,
) -> FaultTolerantHook:
    """Makes a hook that averages gradients over the present members of the communicator's group.

    Register it with `model.register_comm_hook(None, hook)`. DDP itself needs a process group of this process alone, for
    example `dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)`.

    If a peer is lost, the hook tries again with the remaining peers. Either all of them get the same gradients, bit for
    bit, or none does. A peer that is alone goes on with its own gradients. Any other error ends the backward pass, as a
    RuntimeError with its text. This peer may then lack gradients that others have used: sync its state with them.

    Args:
        communicator: a connected communicator. Peers join between steps, by `update_topology`.
        parameters: the parameters of the model, in the same order on all peers: `model.parameters()`. On the CPU or
            one GPU, of dtypes that can be reduced.
        samples: called at the end of each backward pass; returns the number of samples that this peer's gradients are
            the mean of, which is their weight. Zero is allowed; if all peers return zero, the gradients are zero. With
            it 16-bit gradients travel as float32. None: all peers have the same weight.
        tag: tag of the first all-reduce. There is one all-reduce for each dtype, and each takes the next tag.

    Raises:
        InvalidArgument: no parameter has a gradient, the parameters are on several devices, or `communicator` is not a
            Communicator.
    """
    return FaultTolerantHook(communicator, parameters, samples, tag)


class FaultTolerantHook:
    """The hook that `fault_tolerant_hook` makes.

    Attributes:
        peer_ids: sorted `Communicator.peer_id` of the peers whose gradients the last step averaged.
    """

    def __init__(
        self, communicator: Communicator, parameters: Iterable[Any], samples: Callable[[], float] | None, tag: int
    ) -> None:
        if not isinstance(communicator, Communicator):
            raise InvalidArgument(f"communicator is a {type(communicator).__name__}, not a Communicator")
        self.__name__ = self.__qualname__ = "fault_tolerant_hook"  # DDP logs it.
        self.peer_ids: tuple[str, ...] = ()
        self._communicator, self._samples, self._tag = communicator, samples, tag
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            raise InvalidArgument("no parameter has a gradient")
        if len({parameter.device for parameter in trained}) > 1:
            raise InvalidArgument("the parameters are on several devices; the hook is for those on one")
        self._places = {id(parameter): place for place, parameter in enumerate(trained)}
        self._parameters = trained  # Keeps them alive, so that their ids stay unique.
        self._used: set[int] = set()  # Places of parameters that have got a gradient in this step.
        for place, parameter in enumerate(trained):
            noting = parameter.register_post_accumulate_grad_hook(_noter(self._used, place))
            weakref.finalize(self, noting.remove)
        self._gradients: dict[int, Any] = {}
        self._buckets: list[tuple[Any, Any]] = []
        self._memory: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, state: object, bucket: Any) -> Any:
        """Takes a bucket from DDP; after the last one, reduces all gradients."""
        if bucket.index() == 0:  # Also after a backward pass that failed in the middle.
            self._gradients, self._buckets = {}, []
        if bucket.buffer().layout is not torch.strided:
            raise InvalidArgument("a gradient is sparse; make its layer with sparse=False")
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            place = self._places.get(id(parameter))
            if place is None:
                raise InvalidUsage("the hook was made with parameters of another model; give model.parameters()")
            self._gradients[place] = gradient
        future = new_future(bucket.buffer())
        self._buckets.append((future, bucket.buffer()))
        if bucket.is_last():
            try:
                self._reduce()
            finally:  # Also after an error: then a new DDP object is made, for which no parameter has been used.
                self._used.clear()
        return future

    def _reduce(self) -> None:
        if len(self._gradients) < len(self._parameters):
            raise InvalidUsage(
                f"DDP reduces {len(self._gradients)} gradients, the hook was made for {len(self._parameters)}; give the"
                " parameters of the model that DDP wraps"
            )
        weight = float(self._samples()) if self._samples is not None else None
        if weight is not None and not 0 <= weight < math.inf:
            raise InvalidArgument(f"samples() has returned {weight}; it must be a finite number that is not negative")
        places: dict[Any, list[int]] = {}  # By dtype.
        for place in range(len(self._parameters)):
            places.setdefault(self._gradients[place].dtype, []).append(place)
        for i, dtype in enumerate(sorted(places, key=str)):
            self._average(places[dtype], dtype, weight, self._tag + i)
        for future, buffer in self._buckets:
            future.set_result(buffer)
        self._gradients, self._buckets = {}, []

    def _average(self, places: list[int], dtype: Any, weight: float | None, tag: int) -> None:
        """Averages gradients of one dtype, in place. A flag for each, sent with them, says if this peer has used it."""
        gradients = [self._gradients[place] for place in places]
        count = sum(gradient.numel() for gradient in gradients)
        flags = slice(count, count + len(places))
        wire = torch.float32 if weight is not None and dtype.itemsize < torch.float32.itemsize else dtype
        if dtype not in self._memory:
            size = flags.stop + (weight is not None)
            self._memory[dtype] = tuple(gradients[0].new_empty(size, dtype=wire) for _ in range(2))
        send, recv = self._memory[dtype]
        torch.cat([gradient.reshape(-1).to(wire) for gradient in gradients], out=send[:count])
        send[flags].copy_(torch.tensor([place in self._used for place in places], device="cpu"))
        if weight is None:
            self._all_reduce(send, recv, ReduceOp.AVG, tag)
        else:
            if weight > 0:
                send[:count] *= weight
            else:
                send[:count] = 0  # Not a product: the mean of no samples may not be finite.
            send[-1] = weight
            self._all_reduce(send, recv, ReduceOp.SUM, tag)
            if recv[-1] > 0:
                recv[:count] /= recv[-1].clone()
        for gradient, part in zip(gradients, recv[:count].split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        if not self._used.issuperset(places):
            self._give_to_unused(places, recv[flags].tolist())

    def _give_to_unused(self, places: list[int], used: list[float]) -> None:
        """Sets the gradients of parameters that this peer has not used, but others have (`used` is above 0).

        DDP leaves them out: it asks its own process group, which is this process alone, whether others have used them.
        """
        for place, flag in zip(places, used, strict=True):
            if place in self._used or not flag > 0:
                continue
            parameter, gradient = self._parameters[place], self._gradients[place]
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)

    def _all_reduce(self, send: Any, recv: Any, op: ReduceOp, tag: int) -> None:
        """All-reduces among the present members. Each try that fails has lost a peer, so there are not many."""
        while True:
            try:
                handle = self._communicator.all_reduce_async(send, recv, op=op, tag=tag)
            except TooFewPeers as error:
                failed: PCCLError | None = copy.copy(error)  # Its traceback refers to this frame, and to the callers'.
            else:
                handle.wait()
                failed = handle.exception()
            if failed is None:
                self.peer_ids = handle.peer_ids
                return
            if isinstance(failed, TooFewPeers) and self._communicator.min_world_size <= 2:
                recv.copy_(send)
                self.peer_ids = (self._communicator.peer_id,)
                return
            if not isinstance(failed, PeerLost):
                raise failed


def _noter(used: set[int], place: int) -> Callable[[Any], None]:
    return lambda _: used.add(place)


FaultTolerantHook.__call__.__annotations__.clear()  # DDP compares annotations with its own classes; these are strings.
