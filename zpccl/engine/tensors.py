"""Tensors of numpy and torch as plain memory: address, count, dtype. Neither package is imported here.

A tensor on a GPU is represented by memory of the host (staged.py).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from zpccl.engine.devices import device_of
from zpccl.engine.staged import Staged
from zpccl.errors import InvalidArgument
from zpccl.types import DataType


@dataclass(frozen=True)
class TensorView:
    """The memory of a tensor.

    Attributes:
        owner: the tensor, or the `Staged` of one on a device; holding it keeps the memory alive.
        address: address of the first element.
        count: number of elements; also 0 if there is no tensor.
        datatype: datatype of the elements.
    """

    owner: Any
    address: int
    count: int
    datatype: DataType

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.datatype.itemsize

    @property
    def staged(self) -> Staged | None:
        """The host memory of a tensor on a device; None for a tensor of the host."""
        return self.owner if isinstance(self.owner, Staged) else None

    def overlaps(self, other: TensorView) -> bool:
        """True if the two tensors share memory, on any device."""
        device, begin = self.place
        other_device, other_begin = other.place
        return device == other_device and begin < other_begin + other.nbytes and other_begin < begin + self.nbytes

    @property
    def place(self) -> tuple[str, int]:
        """The device of the tensor, and the address there."""
        return ("cpu", self.address) if self.staged is None else self.staged.place


NO_MEMORY = TensorView(None, 0, 0, DataType.UINT8)
"""For a collective without a tensor."""


def is_torch_tensor(tensor: Any) -> bool:
    """True for tensors of torch; False if torch is not loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def local_tensor(tensor: Any) -> Any:
    """The local part of a DTensor of torch; any other tensor as it is."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor.to_local() if module is not None and isinstance(tensor, module.DTensor) else tensor


def view(
    tensor: Any,
    name: str,
    *,
    writable: bool,
    reads: bool = True,
    datatype: DataType | None = None,
    like: TensorView | None = None,
) -> TensorView:
    """The memory of a numpy array or a torch tensor, on the CPU or a GPU.

    Args:
        tensor: C-contiguous; may be empty.
        name: name of the argument, for error messages.
        writable: the memory will be written.
        reads: its contents are used.
        datatype: the caller's datatype of the elements. BFLOAT16 is accepted for uint16 arrays, as numpy has no such
            type.
        like: the view of `send`, whose datatype the tensor must have.

    Raises:
        InvalidArgument: the tensor cannot be used; the text says why and what to do.
    """
    if is_torch_tensor(tensor):
        found = _view_torch(tensor, name, reads)
    elif _is_numpy_array(tensor):
        found = _view_numpy(tensor, name, writable)
    else:
        raise InvalidArgument(f"{name} is a {type(tensor).__name__}; give a numpy array or a torch tensor")
    datatype = like.datatype if like is not None else datatype
    if datatype is None or datatype == found.datatype:
        return found
    if (datatype, found.datatype) == (DataType.BFLOAT16, DataType.UINT16):
        return TensorView(found.owner, found.address, found.count, DataType.BFLOAT16)
    other = "send has" if like is not None else "its descriptor says"
    raise InvalidArgument(f"{name} has elements of {found.datatype.name}, but {other} {datatype.name}")


def new_tensor(like: Any, shape: tuple[int, ...], datatype: DataType) -> tuple[Any, TensorView]:
    """A new tensor of the same kind and dtype as `like`, with undefined contents, and its memory.

    No page of it is touched: in torch's deterministic mode torch.empty would fill it, which takes a second per GiB.
    """
    count = math.prod(shape)
    if is_torch_tensor(like):
        if is_on_gpu(like):
            tensor = device_of(like).empty(like, shape)
            return tensor, _staged(tensor, datatype, reads=False)
        torch = sys.modules["torch"]
        storage = torch.UntypedStorage(count * datatype.itemsize, device="cpu")
        tensor = torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, 0, shape)
        return tensor, TensorView(tensor, tensor.data_ptr(), count, datatype)
    tensor = sys.modules["numpy"].empty(shape, like.dtype)
    return tensor, TensorView(tensor, tensor.ctypes.data, count, datatype)


def first_elements(tensor: Any, count: int, shape: tuple[int, ...]) -> Any:
    """The first `count` elements of a contiguous tensor in a new shape, without a copy."""
    # A subclass of ndarray may restrict shapes: a matrix always has two dimensions.
    tensor = tensor.detach() if is_torch_tensor(tensor) else sys.modules["numpy"].asarray(tensor)
    return tensor.reshape(-1)[:count].reshape(shape)


def _is_numpy_array(tensor: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(tensor, numpy.ndarray)


def _view_numpy(array: Any, name: str, writable: bool) -> TensorView:
    datatype = DataType.from_numpy_dtype(array.dtype)
    # Naming numpy.ma would import it, and an import that Ctrl-C interrupts may keep its lock.
    if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise InvalidArgument(f"{name} is a masked array; use array.filled()")
    if not array.flags.c_contiguous:
        raise InvalidArgument(f"{name} is not contiguous; use numpy.ascontiguousarray and copy the result back")
    if writable and not array.flags.writeable:
        advice = ", or leave recv out to get a new one" if name in ("send", "recv") else ""
        raise InvalidArgument(f"{name} is read-only; pass a writable array{advice}")
    return TensorView(array, array.ctypes.data, array.size, datatype)


def is_on_gpu(tensor: Any) -> bool:
    """True for a torch tensor on a GPU."""
    return is_torch_tensor(tensor) and tensor.device.type == "cuda"


def _view_torch(tensor: Any, name: str, reads: bool) -> TensorView:
    datatype = check_torch(tensor, name)
    if is_on_gpu(tensor):
        return _staged(tensor, datatype, reads=reads)
    # The tensor may get other memory meanwhile; an alias keeps the present memory alive.
    return TensorView(tensor.detach(), tensor.data_ptr(), tensor.numel(), datatype)


def _staged(tensor: Any, datatype: DataType, *, reads: bool) -> TensorView:
    count = tensor.numel()
    if not count:
        return TensorView(tensor, 0, 0, datatype)
    staged = Staged(tensor, count * datatype.itemsize, reads=reads)
    return TensorView(staged, staged.address, count, datatype)


def check_torch(tensor: Any, name: str) -> DataType:
    """The datatype of a torch tensor, after a check that its elements are contiguous in accessible memory.

    Raises:
        InvalidArgument: they are not; the text says why and what to do.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name} is on {tensor.device}; it must be on the CPU or a GPU: use tensor.cpu()")
    if tensor.is_nested:
        raise InvalidArgument(f"{name} is a nested tensor; use tensor.values()")
    if tensor.layout is not sys.modules["torch"].strided:
        raise InvalidArgument(f"{name} has layout {tensor.layout}; use tensor.to_dense()")
    datatype = DataType.from_torch_dtype(tensor.dtype)
    if tensor.is_neg():  # The imaginary part of a conjugate is such a view.
        raise InvalidArgument(f"{name} is a lazily negated view; use tensor.resolve_neg()")
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{name} is not contiguous; use tensor.contiguous() and copy the result back")
    needed = (tensor.storage_offset() + tensor.numel()) * datatype.itemsize
    if tensor.untyped_storage().nbytes() < needed:
        raise InvalidArgument(f"{name} has no memory: its storage was freed or made smaller")
    if tensor.numel() and not tensor.data_ptr():
        raise InvalidArgument(
            f"{name} is a {type(tensor).__name__} without memory of its own; pass the tensor inside it"
        )
    return datatype
