"""Checkpoints: a shared state in a safetensors file, written and loaded atomically.

Any program that reads safetensors can open it. The metadata of the file consists of these text entries:

    format         "pt", without which some programs refuse the file
    revision       revision of the state, in decimal
    blake3:NAME    digest of the bytes of the tensor NAME
    blake3         digest of the rest of the header; see `_header_digest`

A file with a changed bit is refused. A file written by another program is accepted if it has these entries.

Data is written to `NAME.partial` in the same directory, and that file is then renamed. One process at a time holds its
lock; the next save overwrites the file of a killed process. Tensors are written and digested in one pass; the header,
whose size is known before, is written last. The writer of the package safetensors needs all tensors in host memory and
reports no progress, so the header is encoded here. For reading, the package parses and checks the header.

A checkpoint is read into separate memory, of the size of the state. The tensors are written only after everything was
verified, and then completely, even on Ctrl-C.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from zpccl import limits
from zpccl.errors import CheckpointDamaged, CheckpointFailed, InvalidArgument, InvalidUsage, PCCLError
from zpccl.state.regions import Region
from zpccl.types import DataType

_DTYPES = dict(zip(DataType, "U8 I8 U16 I16 U32 I32 U64 I64 F16 BF16 F32 F64".split(), strict=True))
"""Names of dtypes in safetensors."""
_METADATA = "__metadata__"
"""The only entry of the header that is not a tensor."""

Report: TypeAlias = Callable[[int, int], None]
"""Called with the number of bytes done, and the total."""
_Rows: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]
"""Type and shape of each tensor, in the order of the file."""


def save(
    tensors: Mapping[str, Region],
    shapes: Mapping[str, Sequence[int]],
    revision: int,
    path: str | os.PathLike[str],
    report: Report,
) -> None:
    """Writes a checkpoint. The file is replaced atomically.

    Raises:
        CheckpointFailed: the operating system reported an error.
        InvalidArgument: not a path, or a tensor name that safetensors does not allow.
        InvalidUsage: another thread or process is writing it.
    """
    target = _real_path(path)
    if _METADATA in tensors:
        raise InvalidArgument(f"a checkpoint cannot have a tensor named {_METADATA!r}; give it another name")
    with _system_errors(target), _replacing(target) as descriptor:
        _write_file(descriptor, tensors, shapes, revision, report)


def load(tensors: Mapping[str, Region], path: str | os.PathLike[str], report: Report) -> Loaded:
    """Reads and verifies a checkpoint, without writing the tensors yet.

    Raises:
        CheckpointDamaged: not a checkpoint, or a damaged one.
        CheckpointFailed: the operating system reported an error.
        InvalidArgument: not a path, or a checkpoint of other tensors.
    """
    target = _real_path(path)
    with _system_errors(target), _open_regular(target) as file:
        metadata, rows = _read_header(file)
        revision = _check_header(file, metadata, rows)
        _check_tensors(tensors, rows, metadata)
        return Loaded(revision, tensors, _read_contents(file, tensors, metadata, rows, report))


@dataclass(frozen=True)
class Loaded:
    """The verified contents of a checkpoint, not yet written to the tensors."""

    revision: int
    _tensors: Mapping[str, Region]
    _contents: Mapping[str, memoryview]

    def write(self) -> None:
        """Writes all tensors. Idempotent."""
        for name, contents in self._contents.items():
            self._tensors[name].write(0, contents)


# --- Contents ---------------------------------------------------------------------------------------------------------


def _header_digest(metadata: Mapping[str, str], rows: _Rows) -> str:
    """The digest of the other metadata and of the type and shape of each tensor.

    It does not depend on the order of entries, which another program may change when it rewrites the file.
    """
    others = {key: value for key, value in metadata.items() if key != "blake3"}
    return blake3(json.dumps([others, rows], sort_keys=True).encode()).hexdigest()


def _encode_header(tensors: Mapping[str, Region], rows: _Rows, revision: int, digests: Mapping[str, str]) -> bytes:
    """The header, preceded by its length. The length does not depend on the digests."""
    metadata = {"format": "pt", "revision": str(revision)}
    metadata |= {f"blake3:{name}": digest for name, digest in digests.items()}
    metadata["blake3"] = _header_digest(metadata, rows)
    header: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for name, (dtype, shape) in rows.items():
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The first tensor is aligned, and so are the others: see `_write_file`.
    return len(text).to_bytes(8, "little") + text


def _write_file(
    descriptor: int, tensors: Mapping[str, Region], shapes: Mapping[str, Sequence[int]], revision: int, report: Report
) -> None:
    names = sorted(tensors, key=lambda name: (-tensors[name].datatype.itemsize, name))  # Largest elements first.
    rows = {name: (_DTYPES[tensors[name].datatype], shapes[name]) for name in names}
    digests = dict.fromkeys(names, blake3().hexdigest())
    os.lseek(descriptor, len(_encode_header(tensors, rows, revision, digests)), os.SEEK_SET)
    done, total = 0, sum(memory.nbytes for memory in tensors.values())
    report(done, total)
    for name in names:
        hasher = blake3()
        for piece in tensors[name].pieces(0, tensors[name].nbytes, limits.CHECKPOINT_PIECE_BYTES):
            hasher.update(piece)
            _write_all(descriptor, piece)
            done += len(piece)
            report(done, total)
        digests[name] = hasher.hexdigest()
    os.lseek(descriptor, 0, os.SEEK_SET)
    _write_all(descriptor, _encode_header(tensors, rows, revision, digests))


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def _replacing(target: str) -> Iterator[int]:
    """Opens a new file, which replaces the target at the end of the block; it is deleted if the block fails."""
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(errno.EISDIR if os.path.isdir(target) else errno.EINVAL, "it exists and is not a regular file")
    name = target + ".partial"
    descriptor = _create_locked(name)
    try:
        with suppress(FileNotFoundError):
            os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))  # Keep the permissions of the old file.
        yield descriptor
        os.fsync(descriptor)
        os.replace(name, target)
    except BaseException:
        if _is_name_of(descriptor, name):
            os.unlink(name)
        raise
    finally:
        os.close(descriptor)
    _sync_directory(os.path.dirname(target))


def _create_locked(name: str) -> int:
    """Creates or truncates a file, and locks it."""
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it exists and is not a regular file", name)
        # The previous holder of the lock may have renamed the file meanwhile: then it is the checkpoint.
        if not _lock(descriptor) or not _is_name_of(descriptor, name):
            raise InvalidUsage(f"another thread or process is writing {name}; give each one its own file")
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int) -> bool:
    """Tries to lock a file. False: another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # File systems without locks.
            raise
    return True


def _is_name_of(descriptor: int, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(name))
    except FileNotFoundError:
        return False


def _sync_directory(directory: str) -> None:
    """Waits until the new name is on the disk, if the file system can do that. The file exists in either case."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # Files may be made in it, but not listed.
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Unsupported, as on some network file systems.
            raise
    finally:
        os.close(descriptor)


# --- Reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def _open_regular(target: str) -> Iterator[BufferedReader]:
    # O_NONBLOCK: opening a pipe would wait for its writer.
    with open(target, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        yield file


def _read_header(file: BufferedReader) -> tuple[dict[str, str], _Rows]:
    """Reads the metadata and the list of tensors in the order of the file; leaves the file at their first byte."""
    try:
        # By its descriptor, since the name may refer to another file by now.
        with safe_open(f"/proc/self/fd/{file.fileno()}", "numpy") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.offset_keys()}
            rows = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in tensors.items()}
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise _damaged(file, f"it is not a safetensors file, or it is damaged: {error}") from error
    file.seek(8 + int.from_bytes(file.read(8), "little"))  # Skip the length of the header and the header.
    return metadata, rows


def _check_header(file: BufferedReader, metadata: Mapping[str, str], rows: _Rows) -> int:
    """Verifies the header; returns the revision."""
    if "blake3" not in metadata:
        raise _damaged(file, "its metadata has no digest, so save_state did not write it")
    if metadata["blake3"] != _header_digest(metadata, rows):
        raise _damaged(file, "its header does not match the digest in the metadata")
    try:
        revision = int(metadata["revision"])
    except (KeyError, ValueError):
        revision = -1
    if not 0 <= revision <= limits.REVISION_MAX:
        raise _damaged(file, f"its metadata has no revision from 0 to {limits.REVISION_MAX}")
    return revision


def _check_tensors(tensors: Mapping[str, Region], rows: _Rows, metadata: Mapping[str, str]) -> None:
    """Raises InvalidArgument unless names, dtypes and counts in the file match `tensors`, and tensors that share memory
    have the same contents."""
    missing, extra = sorted(tensors.keys() - rows.keys()), sorted(rows.keys() - tensors.keys())
    if missing or extra:
        raise InvalidArgument(
            f"the checkpoint has other tensors; missing in the file: {missing[:8]}, only in the file: {extra[:8]}"
        )
    for name, (dtype, shape) in rows.items():
        wanted, count, found = _DTYPES[tensors[name].datatype], tensors[name].count, math.prod(shape)
        if (dtype, found) != (wanted, count):
            raise InvalidArgument(
                f"tensor {name!r} has {count} elements of {wanted}, in the checkpoint {found} of {dtype}"
            )
    tied: dict[tuple[str, int, int], str] = {}
    for name in sorted(tensors):
        other = tied.setdefault(tensors[name].address_range(), name)
        if metadata.get(f"blake3:{name}") != metadata.get(f"blake3:{other}"):
            raise InvalidArgument(
                f"tensors {other!r} and {name!r} are the same memory, but their contents in the checkpoint differ"
            )


def _read_contents(
    file: BufferedReader,
    tensors: Mapping[str, Region],
    metadata: Mapping[str, str],
    names: Iterable[str],
    report: Report,
) -> dict[str, memoryview]:
    """Reads the bytes of all tensors and verifies their digests."""
    contents = {}
    done, total = 0, sum(memory.nbytes for memory in tensors.values())
    report(done, total)
    for name in names:
        contents[name] = np.empty(tensors[name].nbytes, np.uint8).data
        hasher = blake3()
        for begin in range(0, len(contents[name]), limits.CHECKPOINT_PIECE_BYTES):
            piece = contents[name][begin : begin + limits.CHECKPOINT_PIECE_BYTES]
            file.readinto(piece)  # If the file was truncated meanwhile the digest is wrong.
            hasher.update(piece)
            done += len(piece)
            report(done, total)
        found, wanted = hasher.hexdigest(), metadata.get(f"blake3:{name}")
        if found != wanted:
            reason = f"tensor {name!r} does not match its digest: it has {found}, the metadata says {wanted}"
            raise _damaged(file, reason, name)
    return contents


def _damaged(file: BufferedReader, reason: str, tensor: str = "") -> CheckpointDamaged:
    return CheckpointDamaged(f"{file.name}: {reason}", path=file.name, reason=reason, tensor=tensor)


# --- Paths and errors -------------------------------------------------------------------------------------------------


def _real_path(path: str | os.PathLike[str]) -> str:
    """The path with symbolic links resolved."""
    try:
        text = os.fsdecode(path)
        os.fsencode(text)
    except TypeError:
        raise InvalidArgument(f"a path is a text or an os.PathLike, not a {type(path).__name__}") from None
    except UnicodeError:  # A lone surrogate.
        raise InvalidArgument(f"{path!a} is not the path of a file") from None
    if not text or "\0" in text:
        raise InvalidArgument(f"{text!r} is not the path of a file")
    with _system_errors(text):  # The working directory may have been removed.
        return os.path.realpath(text)


@contextmanager
def _system_errors(target: str) -> Iterator[None]:
    """Converts OSError to CheckpointFailed."""
    try:
        yield
    except PCCLError:
        raise
    except OSError as error:
        found = error.filename2 or error.filename  # The partial file, perhaps; of a rename, the new name.
        place = found if isinstance(found, str) else target
        raise CheckpointFailed(f"{place}: {error.strerror or error}", path=target, errno=error.errno or 0) from error
