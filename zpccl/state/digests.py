"""Digests of shared state: of blocks, and of tensors.

A tensor is cut into blocks of STATE_BLOCK_BYTES. The digest of a tensor covers its type, its size and the digests of
its blocks (a hash tree of two levels). A peer that knows a tensor's digest can verify the list of block digests, and
each block against that list, whichever peer sends them.

Memory may change unnoticed between two calls, so digests are never kept for a later sync.

Each thread takes some blocks of a large tensor or many small tensors per task; the libraries hash without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import blake3

from zpccl import limits
from zpccl.errors import InvalidArgument
from zpccl.limits import STATE_BLOCK_BYTES
from zpccl.state.regions import Region
from zpccl.state.workers import in_parallel, worker_count
from zpccl.types import DigestKind

DIGEST_BYTES = 32
"""Size of a digest of any kind."""

_Piece: TypeAlias = tuple[str, int, int]
"""Blocks of one region: key, first block, end."""


def block_count(nbytes: int) -> int:
    """Number of blocks of a tensor of `nbytes` bytes."""
    return -(-nbytes // STATE_BLOCK_BYTES)


def block_bytes(nbytes: int, index: int) -> int:
    """Size of block `index` of a tensor of `nbytes` bytes."""
    return min(STATE_BLOCK_BYTES, nbytes - index * STATE_BLOCK_BYTES)


def block_digest(data: Any, kind: DigestKind) -> bytes:
    """The digest of a block, computed in the calling thread.

    Raises:
        InvalidArgument: the package for this kind is not installed.
    """
    return _HASH[kind](data)


def tensor_digest(kind: DigestKind, datatype: int, count: int, block_digests: Sequence[bytes]) -> bytes:
    """The digest of a tensor.

    It is always BLAKE3 over the digests of the blocks, whatever their kind: the input is short.
    """
    head = f"zpccl state {int(kind)} {int(datatype)} {count} {STATE_BLOCK_BYTES}\n".encode()
    return blake3.blake3(head + b"".join(block_digests)).digest()


@lru_cache(maxsize=64)
def zero_digest(size: int, kind: DigestKind) -> bytes:
    """The digest of a block of `size` bytes that are all zero."""
    return block_digest(bytes(size), kind)


def check_kind(kind: DigestKind) -> None:
    """Raises InvalidArgument if the package for this kind is not installed."""
    block_digest(b"", kind)


def digest_regions(
    regions: Mapping[str, Region], kind: DigestKind, workers: int | None = None
) -> dict[str, tuple[bytes, ...]]:
    """The digests of all blocks of all regions.

    Args:
        regions: regions by key.
        kind: kind of the digests.
        workers: number of threads, the calling one included; default: by the CPUs and the amount of work.

    Raises:
        InvalidArgument: the package for this kind is not installed.
    """
    hash_block = _HASH[kind]
    total = sum(region.nbytes for region in regions.values())
    if workers is None:
        workers = worker_count(total)
    found = {key: [b""] * block_count(region.nbytes) for key, region in regions.items()}

    def digest_run(run: list[_Piece]) -> None:
        for key, first, last in run:
            region, digests = regions[key], found[key]
            nbytes = region.nbytes
            if nbytes <= STATE_BLOCK_BYTES:
                digests[0] = hash_block(region.read(0, nbytes))
                continue
            end = min(last * STATE_BLOCK_BYTES, nbytes)
            blocks = region.pieces(first * STATE_BLOCK_BYTES, end, STATE_BLOCK_BYTES)
            for index, block in enumerate(blocks, first):
                digests[index] = hash_block(block)

    in_parallel(digest_run, _runs(regions, total // (workers * 8)), workers)
    return {key: tuple(digests) for key, digests in found.items()}


def _runs(regions: Mapping[str, Region], run_bytes: int) -> Iterator[list[_Piece]]:
    """Groups the blocks of all regions into tasks of about `run_bytes` bytes."""
    run_bytes = max(STATE_BLOCK_BYTES, min(run_bytes, limits.STATE_RUN_BYTES_MAX))
    run: list[_Piece] = []
    room = run_bytes
    for key, region in regions.items():
        first, count = 0, block_count(region.nbytes)
        while first < count:
            last = min(count, first + -(-room // STATE_BLOCK_BYTES))
            run.append((key, first, last))
            room -= region.nbytes if count == 1 else (last - first) * STATE_BLOCK_BYTES
            first = last
            if room <= 0:
                yield run
                run, room = [], run_bytes
    if run:
        yield run


def _hash_blake3(data: Any) -> bytes:
    return blake3.blake3(data).digest()


def _hash_xxh3(data: Any) -> bytes:
    try:
        import xxhash
    except ImportError:
        raise InvalidArgument(
            'digest "xxh3" needs the package xxhash: pip install "zpccl[xxhash]", or use "blake3"'
        ) from None
    return xxhash.xxh3_128_digest(data).ljust(DIGEST_BYTES, b"\0")


_HASH: dict[DigestKind, Callable[[Any], bytes]] = {DigestKind.BLAKE3: _hash_blake3, DigestKind.XXH3: _hash_xxh3}
