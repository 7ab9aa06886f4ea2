"""The state that all members of a peer group hold alike: named tensors and a revision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from zpccl import limits
from zpccl.dataplane.tensors import TensorView, is_torch_tensor, view
from zpccl.errors import InvalidArgument


class TensorInfo:
    """A named tensor of a shared state. Made by `from_torch` or `from_numpy`.

    Attributes:
        name: its key, up to 1,024 characters, unique within the state.
        tensor: the tensor itself; syncs write into it.
        allow_content_inequality: peers at the same revision may hold different contents.
    """

    def __init__(self, tensor: Any, name: str, allow_content_inequality: bool) -> None:
        if not _is_name(name):
            raise InvalidArgument(f"the name of a tensor must be a text of 1 to {limits.KEY_CHARS_MAX} characters")
        self.name = name
        self.tensor = tensor
        self.allow_content_inequality = bool(allow_content_inequality)
        self.view()

    @classmethod
    def from_torch(cls, tensor: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Of a contiguous torch CPU tensor.

        Raises:
            InvalidArgument: the tensor or its name cannot be used.
        """
        if not is_torch_tensor(tensor):
            raise InvalidArgument(f"{name!r} is a {type(tensor).__name__}, not a torch tensor")
        return cls(tensor, name, allow_content_inequality)

    @classmethod
    def from_numpy(cls, tensor: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Of a contiguous, writable numpy array.

        Raises:
            InvalidArgument: the array or its name cannot be used.
        """
        if is_torch_tensor(tensor):
            raise InvalidArgument(f"{name!r} is a torch tensor; use TensorInfo.from_torch")
        return cls(tensor, name, allow_content_inequality)

    def view(self) -> TensorView:
        """The memory of the tensor as it is now."""
        return view(self.tensor, f"tensor {self.name!r}", writable=True)


class SharedState:
    """The tensors that `Communicator.sync_shared_state` makes equal on all members of a group.

    Args:
        tensor_infos: at least one; names must differ.
    """

    def __init__(self, tensor_infos: Sequence[TensorInfo]) -> None:
        if not isinstance(tensor_infos, Iterable):
            raise InvalidArgument(f"tensor_infos is a {type(tensor_infos).__name__}, not a list of TensorInfo")
        self.tensor_infos = tuple(tensor_infos)
        for info in self.tensor_infos:
            if not isinstance(info, TensorInfo):
                raise InvalidArgument(f"a {type(info).__name__} where a TensorInfo is due")
        names = [info.name for info in self.tensor_infos]
        if not 1 <= len(names) <= limits.STATE_ENTRIES_MAX:
            raise InvalidArgument(f"a shared state has 1 to {limits.STATE_ENTRIES_MAX} tensors, not {len(names)}")
        duplicates = [name for name, count in Counter(names).items() if count > 1]
        if duplicates:
            raise InvalidArgument(f"tensors of a shared state must have different names; twice: {duplicates[:8]}")
        size = sum(len(name.encode()) + limits.STATE_ENTRY_BYTES_MAX for name in names)
        if size > limits.MESSAGE_BYTES_MAX // 2:
            raise InvalidArgument(f"the names of {len(names)} tensors are too long together; use shorter or fewer ones")
        self._check_memory()
        self._revision = 0

    def _check_memory(self) -> None:
        """Two keys that share a part of their memory could be elected with different contents; all of it, never."""
        views = sorted(((info.view(), info.name) for info in self.tensor_infos), key=lambda pair: pair[0].address)
        for (one, its_name), (other, other_name) in pairwise(views):
            if one.overlaps(other) and (one.address, one.nbytes) != (other.address, other.nbytes):
                raise InvalidArgument(f"tensors {its_name!r} and {other_name!r} share a part of their memory")

    @property
    def revision(self) -> int:
        """Number of this state. It grows by one with every step; peers that are behind receive."""
        return self._revision

    @revision.setter
    def revision(self, revision: int) -> None:
        is_integer = hasattr(revision, "__index__") and not isinstance(revision, bool)
        if not is_integer or not 0 <= revision <= limits.REVISION_MAX:
            raise InvalidArgument(f"revision {revision!r} is not an integer from 0 to {limits.REVISION_MAX}")
        self._revision = int(revision)

    def push_revision(self) -> None:
        """Adds one to the revision."""
        self.revision += 1


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or not 1 <= len(name) <= limits.KEY_CHARS_MAX:
        return False
    try:
        return bool(name.encode())
    except UnicodeEncodeError:  # Lone surrogates, which no message can carry.
        return False
