"""The shared state of a peer group: named tensors and a revision, equal on all members after a sync."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from zpccl import limits
from zpccl.caller import checked_int
from zpccl.engine.tensors import is_torch_tensor, local_tensor
from zpccl.errors import InvalidArgument, public
from zpccl.progress import ProgressCallback, ProgressReporter, check_callback
from zpccl.state import checkpoint
from zpccl.state.digests import check_kind
from zpccl.state.regions import Region, region
from zpccl.state.workers import despite_interrupts
from zpccl.types import DigestKind


class TensorInfo:
    """A named tensor of a shared state. Made by `from_torch` or `from_numpy`.

    Attributes:
        name: its key, up to 1,024 characters, unique within the state.
        tensor: the tensor itself; syncs write into it.
        allow_content_inequality: True if peers at the same revision may hold different contents.
    """

    def __init__(self, tensor: Any, name: str, allow_content_inequality: bool) -> None:
        if not _is_name(name):
            raise InvalidArgument(f"the name of a tensor must be a text of 1 to {limits.KEY_CHARS_MAX} characters")
        self.name = name
        self.tensor = tensor
        self.allow_content_inequality = bool(allow_content_inequality)
        memory = region(tensor, f"tensor {name!r}")
        self._elements = (memory.datatype, memory.count)
        if memory.nbytes > limits.STATE_TENSOR_BYTES_MAX:
            raise InvalidArgument(
                f"tensor {name!r} has {memory.nbytes} bytes; at most {limits.STATE_TENSOR_BYTES_MAX} fit"
            )

    @classmethod
    @public
    def from_torch(cls, tensor: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Makes one from a contiguous torch tensor on the host or a CUDA device, or from the local part of a DTensor.

        A host tensor is used in place. A device tensor is copied in pieces through page-locked memory as needed, after
        the work that is on the current stream when the tensor is accessed.

        Raises:
            InvalidArgument: the tensor or its name cannot be used.
        """
        if not is_torch_tensor(tensor):
            raise InvalidArgument(f"{name!r} is a {type(tensor).__name__}, not a torch tensor")
        return cls(local_tensor(tensor), name, allow_content_inequality)

    @classmethod
    @public
    def from_numpy(cls, tensor: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Makes one from a contiguous, writable numpy array.

        Raises:
            InvalidArgument: the array or its name cannot be used.
        """
        if is_torch_tensor(tensor):
            raise InvalidArgument(f"{name!r} is a torch tensor; use TensorInfo.from_torch")
        return cls(tensor, name, allow_content_inequality)

    def region(self) -> Region:
        """The present memory of the tensor. It may have moved since the last call, even to another device.

        Raises:
            InvalidArgument: the tensor was freed, or its size or type has changed.
        """
        found = region(self.tensor, f"tensor {self.name!r}")
        (datatype, count), now = self._elements, (found.datatype, found.count)
        if now != (datatype, count):
            raise InvalidArgument(
                f"tensor {self.name!r} had {count} elements of {datatype.name} when it was made part of the state, and"
                f" has {now[1]} of {now[0].name} now; make a new TensorInfo and SharedState"
            )
        return found


class SharedState:
    """The tensors that `Communicator.sync_shared_state` makes equal on all members of a group.

    Args:
        tensor_infos: at least one; names must differ.
        digest: how contents are compared, the same on all peers: "blake3", or "xxh3" (package xxhash), which is faster
            and sufficient if all peers are trusted.

    Attributes:
        digest_kind: `digest` as a `DigestKind`.

    Raises:
        InvalidArgument: these tensors cannot be shared, or there is no such digest.
    """

    @public
    def __init__(self, tensor_infos: Sequence[TensorInfo], digest: str | DigestKind = DigestKind.BLAKE3) -> None:
        self.digest_kind = DigestKind.parse(digest)
        check_kind(self.digest_kind)
        if not isinstance(tensor_infos, Iterable):
            raise InvalidArgument(f"tensor_infos is a {type(tensor_infos).__name__}, not a list of TensorInfo")
        self.tensor_infos = tuple(tensor_infos)
        for info in self.tensor_infos:
            if not isinstance(info, TensorInfo):
                raise InvalidArgument(f"expected a TensorInfo, got a {type(info).__name__}")
        names = [info.name for info in self.tensor_infos]
        if not 1 <= len(names) <= limits.STATE_ENTRIES_MAX:
            raise InvalidArgument(f"a shared state has 1 to {limits.STATE_ENTRIES_MAX} tensors, not {len(names)}")
        duplicates = [name for name, count in Counter(names).items() if count > 1]
        if duplicates:
            raise InvalidArgument(f"tensors of a shared state must have different names; twice: {duplicates[:8]}")
        size = sum(len(name.encode()) + limits.STATE_ENTRY_BYTES_MAX for name in names)
        if size > limits.MESSAGE_BYTES_MAX // 2:
            raise InvalidArgument(f"the names of {len(names)} tensors are too long in total; use shorter or fewer ones")
        self.regions()
        self._revision = 0

    def regions(self) -> dict[str, Region]:
        """The present memory of all tensors, by name, in the order of names.

        Raises:
            InvalidArgument: a tensor can no longer be used, or shares a part of its memory with another one.
        """
        found = {info.name: info.region() for info in sorted(self.tensor_infos, key=lambda info: info.name)}
        _check_memory(found)
        return found

    @property
    def revision(self) -> int:
        """Revision of this state. The user increments it with every step; a sync updates peers with a lower one."""
        return self._revision

    @revision.setter
    @public
    def revision(self, revision: int) -> None:
        self._revision = checked_int(revision, "revision", 0, limits.REVISION_MAX)

    def push_revision(self) -> None:
        """Adds one to the revision."""
        self.revision += 1

    @public
    def save_state(self, path: str | os.PathLike[str], *, on_progress: ProgressCallback | None = None) -> None:
        """Writes tensors and revision to a safetensors file, with digests.

        The file is replaced atomically, even if the disk is full or the machine crashes: the data is written to
        `PATH.partial` in the same directory first. Do not modify the tensors during the call, or the file may not load.

        Args:
            path: path of the file; a symbolic link is followed.
            on_progress: progress callback, called by this thread.

        Raises:
            CheckpointFailed: the operating system reported an error; `errno` says which.
            InvalidUsage: another thread or process is writing this file.
            InvalidArgument: not a path, an unreadable tensor, or a tensor named `__metadata__`.
        """
        check_callback(on_progress)
        reporter = ProgressReporter("save", on_progress)
        regions = self.regions()
        shapes = {info.name: info.tensor.shape for info in self.tensor_infos}
        checkpoint.save(regions, shapes, self._revision, path, reporter.update)
        reporter.end()

    @public
    def load_state(self, path: str | os.PathLike[str], *, on_progress: ProgressCallback | None = None) -> None:
        """Loads tensors and revision from a file that `save_state` wrote, or that another program copied from one.

        The whole file is read and verified before the first tensor is modified, which needs as much memory as the
        tensors. A call that raises has changed nothing; only KeyboardInterrupt may come after everything was loaded.

        Args:
            path: path of the file. Its tensors must match this state: the same names, dtypes and numbers of elements.
            on_progress: progress callback, called by this thread.

        Raises:
            CheckpointDamaged: not a checkpoint, or a damaged one.
            CheckpointFailed: the operating system reported an error; `errno` says which.
            InvalidArgument: not a path, or a checkpoint of other tensors.
        """
        check_callback(on_progress)
        reporter = ProgressReporter("load", on_progress)
        regions = self.regions()
        loaded = checkpoint.load(regions, path, reporter.update)

        def write() -> None:
            loaded.write()
            self._revision = loaded.revision

        despite_interrupts(write)
        reporter.end()


def _check_memory(regions: dict[str, Region]) -> None:
    """Rejects tensors that overlap in part, since a sync could elect different contents for them. Identical memory is
    allowed."""
    ranges = sorted((memory.address_range(), name) for name, memory in regions.items())
    for (one, its_name), (other, other_name) in pairwise(ranges):
        if one[0] == other[0] and one != other and other[1] < one[2]:
            raise InvalidArgument(f"tensors {its_name!r} and {other_name!r} share a part of their memory")


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or not 1 <= len(name) <= limits.KEY_CHARS_MAX:
        return False
    try:
        return bool(name.encode())
    except UnicodeEncodeError:  # Lone surrogates, which no message can carry.
        return False
