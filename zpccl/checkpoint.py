"""Checkpoints: a shared state in a file, whole or not at all.

The file, numbers big-endian, contents as in memory (little-endian):

    head      magic, version, size of the table, digest of all these and the table
    table     MessagePack: the revision, and name, dtype and count of each tensor, sorted by name
    blocks    of all tensors in order of the table: each is cut in CHECKPOINT_BLOCK_BYTES, its last may be shorter
    index     of each block its size in the file and the digest of it as it stands there
    end       digest of head and index

Each byte is under a digest (BLAKE3) that is checked before anybody makes sense of the byte, and each size is bounded by
what the reader's own state needs. So a damaged file is refused, and one that was made to harm allocates no more than a
good one.

Writing goes to `NAME.partial` beside the file, which then takes its name. One process at a time holds the lock of it:
what a killed one left is written over by the next. The descriptors belong to the call, as do the threads that compress
and digest; they have ended when it returns or raises, also by Ctrl-C, because they read the caller's memory.

Reading decompresses into memory of its own, at most the size of the state. Only when all of it is checked are the
tensors written, and then whatever comes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import blake3
import msgspec

from zpccl import limits
from zpccl.dataplane.digests import DIGEST_BYTES, worker_count
from zpccl.dataplane.regions import Region
from zpccl.dataplane.state_codec import ENCODED_EXTRA_BYTES, ZSTD_FAST, DamagedBlock, decode_into, encode
from zpccl.errors import CheckpointDamaged, CheckpointFailed, InvalidArgument, InvalidUsage, PCCLError
from zpccl.types import DataType

_MAGIC = b"\x93zpccl\r\n"  # No text, and damaged by whoever turns line ends.
_HEAD = struct.Struct(">8sII32s")
_SEALED_HEAD = struct.Struct(">8sII")
"""The part of the head that its digest is of."""
_ENTRY = struct.Struct(">I32s")
_BLOCK_BYTES = limits.CHECKPOINT_BLOCK_BYTES
_CODING = ZSTD_FAST
"""Smaller than LZ4 makes them, and with some threads still faster than disks."""

_PartT = TypeVar("_PartT")
_ResultT = TypeVar("_ResultT")
Report: TypeAlias = Callable[[int, int], None]
"""Is told how many bytes of the contents are done, and of how many."""


class _Record(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of what the table is made of."""


class _Tensor(_Record, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=limits.KEY_CHARS_MAX)]
    datatype: Annotated[int, msgspec.Meta(ge=0, le=255)]
    count: Annotated[int, msgspec.Meta(ge=1, le=limits.ELEMENTS_MAX)]


class _Table(_Record, frozen=True):
    revision: Annotated[int, msgspec.Meta(ge=0, le=limits.REVISION_MAX)]
    tensors: Annotated[tuple[_Tensor, ...], msgspec.Meta(min_length=1, max_length=limits.STATE_ENTRIES_MAX)]


_encode_table = msgspec.msgpack.Encoder().encode
_table_decoder = msgspec.msgpack.Decoder(_Table)


@dataclass(frozen=True)
class _Piece:
    """A block: its number in the file, its index in the tensor, and its place in all contents end to end."""

    name: str
    memory: Region
    number: int
    index: int
    size: int
    place: int

    @property
    def offset(self) -> int:
        return self.index * _BLOCK_BYTES


def save(tensors: Mapping[str, Region], revision: int, path: str | os.PathLike[str], report: Report) -> None:
    """Writes a checkpoint. Whatever happens, the file is then the old one or the new one.

    Raises:
        CheckpointFailed: the system refused it.
        InvalidArgument: not a path.
        InvalidUsage: another thread or process is writing it.
    """
    target = _real_path(path)
    with _system_errors(target), _replacing(target) as descriptor:
        _write_file(descriptor, tensors, revision, report)


def load(tensors: Mapping[str, Region], path: str | os.PathLike[str], report: Report) -> Loaded:
    """Reads and checks a checkpoint, and keeps its contents aside.

    Raises:
        CheckpointDamaged: no checkpoint, damaged, or of a newer version.
        CheckpointFailed: the system refused it.
        InvalidArgument: not a path, or a checkpoint of other tensors.
    """
    target = _real_path(path)
    try:
        with _system_errors(target), _open_regular(target) as descriptor:
            return _Reader(descriptor, tensors, report).read()
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{target}: {error.reason}", path=target, reason=error.reason) from error.__cause__


@dataclass(frozen=True)
class Loaded:
    """The contents of a checkpoint, checked and not yet in the tensors."""

    revision: int
    _contents: memoryview
    _pieces: Sequence[_Piece]

    def write(self) -> None:
        """Writes all tensors. May be done again."""
        for piece in self._pieces:
            piece.memory.write(piece.offset, self._contents[piece.place : piece.place + piece.size])


def despite_interrupts(action: Callable[[], None]) -> None:
    """Does what must be done wholly: begins again after a KeyboardInterrupt, and raises it at the end."""
    interrupt: KeyboardInterrupt | None = None
    is_done = False
    while not is_done:
        try:
            action()
            is_done = True
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


# --- Contents ---------------------------------------------------------------------------------------------------------


def _pieces_of(tensors: Mapping[str, Region]) -> list[_Piece]:
    """All blocks, in the order of the file."""
    pieces: list[_Piece] = []
    place = 0
    for name in sorted(tensors):
        memory = tensors[name]
        for index, offset in enumerate(range(0, memory.nbytes, _BLOCK_BYTES)):
            size = min(_BLOCK_BYTES, memory.nbytes - offset)
            pieces.append(_Piece(name, memory, len(pieces), index, size, place))
            place += size
    return pieces


def _table_of(tensors: Mapping[str, Region], revision: int) -> _Table:
    rows = tuple(_Tensor(name, int(tensors[name].datatype), tensors[name].count) for name in sorted(tensors))
    return _Table(revision, rows)


def _batches(pieces: Sequence[_Piece]) -> Iterator[Sequence[_Piece]]:
    """Blocks for one thread at a time: many small ones, or one of full size."""
    first, size = 0, 0
    for number, piece in enumerate(pieces):
        if first < number and size + piece.size > _BLOCK_BYTES:
            yield pieces[first:number]
            first, size = number, 0
        size += piece.size
    yield pieces[first:]


def _in_order(
    function: Callable[[_PartT], _ResultT], parts: Iterable[_PartT], workers: int
) -> Generator[_ResultT, None, None]:
    """The results of parts that threads work on, a few ahead. The threads have ended when this is closed."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="zpccl-checkpoint")
    waiting: deque[Future[_ResultT]] = deque()
    try:
        for part in parts:
            waiting.append(pool.submit(function, part))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        despite_interrupts(lambda: pool.shutdown(wait=True, cancel_futures=True))


# --- Blocks -----------------------------------------------------------------------------------------------------------


def _digest(*parts: bytes | bytearray) -> bytes:
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


# --- Writing ----------------------------------------------------------------------------------------------------------


def _encode_batch(batch: Sequence[_Piece]) -> tuple[bytes, list[bytes], int]:
    """Index entries, payloads, and the size of the contents."""
    payloads = [
        b"".join(encode(piece.memory.read(piece.offset, piece.size), piece.memory.datatype.itemsize, _CODING))
        for piece in batch
    ]
    entries = b"".join(_ENTRY.pack(len(payload), _digest(payload)) for payload in payloads)
    return entries, payloads, sum(piece.size for piece in batch)


def _write_file(descriptor: int, tensors: Mapping[str, Region], revision: int, report: Report) -> None:
    table = _encode_table(_table_of(tensors, revision))
    sealed = _SEALED_HEAD.pack(_MAGIC, limits.CHECKPOINT_VERSION, len(table))
    head = sealed + _digest(sealed, table)
    _write_all(descriptor, head + table)
    pieces = _pieces_of(tensors)
    done, total = 0, sum(piece.size for piece in pieces)
    report(done, total)
    index = bytearray()
    with closing(_in_order(_encode_batch, _batches(pieces), worker_count(total))) as encoded:
        for entries, payloads, size in encoded:
            index += entries
            _write_all(descriptor, b"".join(payloads) if len(payloads) > 1 else payloads[0])
            done += size
            report(done, total)
    _write_all(descriptor, bytes(index) + _digest(head, index))


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def _replacing(target: str) -> Iterator[int]:
    """A new file, which takes the name of the target at the end of the block; if that fails, it leaves no trace."""
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(errno.EISDIR if os.path.isdir(target) else errno.EINVAL, "it is there, and no regular file")
    name = target + ".partial"
    descriptor = _create_locked(name)
    try:
        with suppress(FileNotFoundError):
            os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))  # Who keeps it secret wants that kept.
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
    """An empty file that no other process has, whatever was there."""
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidUsage(f"another thread or process is writing {name}") from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # A file system without locks.
                    raise
            if _is_name_of(descriptor, name):
                os.ftruncate(descriptor, 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # Who had the lock has finished it meanwhile.


def _is_name_of(descriptor: int, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(name))
    except FileNotFoundError:
        return False


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Reading ----------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads one file, of which it makes sense only as far as it is checked."""

    def __init__(self, descriptor: int, tensors: Mapping[str, Region], report: Report) -> None:
        self._descriptor = descriptor
        self._tensors = tensors
        self._report = report
        self._size = os.fstat(descriptor).st_size

    def read(self) -> Loaded:
        """Everything.

        Raises:
            CheckpointDamaged: with a reason, and no path.
        """
        head, table = self._read_head()
        _check_tensors(_table_of(self._tensors, 0).tensors, table.tensors)
        pieces = _pieces_of(self._tensors)
        total = sum(piece.size for piece in pieces)
        places = self._read_index(head, pieces)
        self._report(0, total)
        contents = memoryview(mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

        def decode_batch(batch: Sequence[_Piece]) -> int:
            for piece in batch:
                offset, size, digest = places[piece.number]
                data = self._read_at(offset, size)
                if _digest(data) != digest:
                    raise _damaged(piece, "does not have its digest")
                try:
                    decode_into(data, contents[piece.place : piece.place + piece.size])
                except DamagedBlock as error:
                    raise _damaged(piece, error.message) from error
            return sum(piece.size for piece in batch)

        done = 0
        with closing(_in_order(decode_batch, _batches(pieces), worker_count(total))) as sizes:
            for size in sizes:
                done += size
                self._report(done, total)
        return Loaded(table.revision, contents, pieces)

    def _read_head(self) -> tuple[bytes, _Table]:
        """The head, and what the table says."""
        if self._read_at(0, min(self._size, len(_MAGIC))) != _MAGIC:
            raise CheckpointDamaged(reason="it is no checkpoint of a shared state")
        head = self._read_at(0, _HEAD.size)
        _, version, table_bytes, digest = _HEAD.unpack(head)
        if version != limits.CHECKPOINT_VERSION:
            known = limits.CHECKPOINT_VERSION
            advice = "; a newer zpccl may know it" if version > known else ""
            raise CheckpointDamaged(reason=f"it is of version {version}, and this zpccl knows {known}{advice}")
        if table_bytes > limits.MESSAGE_BYTES_MAX:
            raise CheckpointDamaged(reason=f"its table of tensors has {table_bytes} bytes, which is too long")
        table = self._read_at(_HEAD.size, table_bytes)
        if _digest(head[: _SEALED_HEAD.size], table) != digest:
            raise CheckpointDamaged(reason="its table of tensors does not have its digest")
        try:
            return head, _table_decoder.decode(table)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointDamaged(reason=f"its table of tensors is malformed: {error}") from error

    def _read_index(self, head: bytes, pieces: Sequence[_Piece]) -> list[tuple[int, int, bytes]]:
        """Of each block its offset and size in the file, and its digest."""
        begin = _HEAD.size + _HEAD.unpack(head)[2]
        end = self._size - _ENTRY.size * len(pieces) - DIGEST_BYTES
        if end < begin:
            raise CheckpointDamaged(reason="it is cut short")
        index = self._read_at(end, _ENTRY.size * len(pieces))
        if _digest(head, index) != self._read_at(self._size - DIGEST_BYTES, DIGEST_BYTES):
            raise CheckpointDamaged(reason="its index does not have its digest; it may be cut short")
        places = []
        offset = begin
        for piece, (size, digest) in zip(pieces, _ENTRY.iter_unpack(index), strict=True):
            if size > piece.size + ENCODED_EXTRA_BYTES:
                raise _damaged(piece, f"takes {size} bytes, more than it can need")
            places.append((offset, size, digest))
            offset += size
        if offset != end:
            raise CheckpointDamaged(reason=f"its blocks end at byte {offset}, and its index begins at {end}")
        return places

    def _read_at(self, offset: int, size: int) -> bytes:
        """So many bytes from a place of the file."""
        parts = []
        while size:
            part = os.pread(self._descriptor, size, offset)
            if not part:
                raise CheckpointDamaged(reason="it is cut short")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _damaged(piece: _Piece, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(reason=f"block {piece.index} of tensor {piece.name!r} {what}")


def _check_tensors(wanted: Sequence[_Tensor], found: Sequence[_Tensor]) -> None:
    """Raises InvalidArgument unless the file is of the tensors that are to be loaded."""
    here, there = {row.name: row for row in wanted}, {row.name: row for row in found}
    missing, extra = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    if missing or extra:
        texts = [f"missing in the file: {missing[:8]}"] * bool(missing)
        texts += [f"only in the file: {extra[:8]}"] * bool(extra)
        raise InvalidArgument("the checkpoint is of other tensors; " + "; ".join(texts))
    for name, row in here.items():
        if row != there[name]:
            raise InvalidArgument(
                f"tensor {name!r} has {row.count} elements of {_type_name(row.datatype)}, "
                f"in the checkpoint {there[name].count} of {_type_name(there[name].datatype)}"
            )
    if list(found) != list(wanted):
        raise CheckpointDamaged(reason="its tensors are not in order")


def _type_name(datatype: int) -> str:
    return DataType(datatype).name if datatype in tuple(DataType) else f"type {datatype}"


@contextmanager
def _open_regular(target: str) -> Iterator[int]:
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # A pipe would wait for its writer.
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


# --- Paths and errors -------------------------------------------------------------------------------------------------


def _real_path(path: str | os.PathLike[str]) -> str:
    """The file itself, where the path is a symbolic link to it."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise InvalidArgument(f"a path is a text or an os.PathLike, not a {type(path).__name__}") from None
    if not text or "\0" in text:
        raise InvalidArgument(f"{text!r} is no path of a file")
    return os.path.realpath(text)


@contextmanager
def _system_errors(target: str) -> Iterator[None]:
    """What the system refuses becomes an error of ours."""
    try:
        yield
    except PCCLError:
        raise
    except OSError as error:
        raise CheckpointFailed(f"{target}: {error.strerror}", path=target, errno=error.errno or 0) from error
