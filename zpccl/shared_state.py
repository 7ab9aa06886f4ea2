"""The state that all members of a peer group hold alike: named tensors and a revision."""

from __future__ import annotations

from collections.abc import Sequence
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
        if not 1 <= len(name) <= limits.KEY_CHARS_MAX:
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
        self.tensor_infos = tuple(tensor_infos)
        names = [info.name for info in self.tensor_infos]
        if not 1 <= len(names) <= limits.STATE_ENTRIES_MAX:
            raise InvalidArgument(f"a shared state has 1 to {limits.STATE_ENTRIES_MAX} tensors, not {len(names)}")
        duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if duplicates:
            raise InvalidArgument(f"tensors of a shared state must have different names; twice: {duplicates[:8]}")
        size = sum(len(name.encode()) + limits.STATE_ENTRY_BYTES_MAX for name in names)
        if size > limits.MESSAGE_BYTES_MAX // 2:
            raise InvalidArgument(f"the names of {len(names)} tensors are too long together; use shorter or fewer ones")
        self._revision = 0

    @property
    def revision(self) -> int:
        """Number of this state. It grows by one with every step; peers that are behind receive."""
        return self._revision

    @revision.setter
    def revision(self, revision: int) -> None:
        if not 0 <= revision <= limits.REVISION_MAX:
            raise InvalidArgument(f"revision {revision} is not between 0 and {limits.REVISION_MAX}")
        self._revision = int(revision)

    def push_revision(self) -> None:
        """Adds one to the revision."""
        self.revision += 1
