"""Blocks of state: their digests, and how they travel.

A tensor is cut in blocks of STATE_BLOCK_BYTES. The digest of a tensor is the BLAKE3 of its type, its size and the
BLAKE3 digests of its blocks, so whoever knows a tensor's digest can check its list of block digests, and each block
against that list, from whomever they come.
"""

from __future__ import annotations

import ctypes
from typing import Any

import blake3
import blosc2

from zpccl.dataplane.tensors import TensorView
from zpccl.errors import ProtocolViolation
from zpccl.limits import STATE_BLOCK_BYTES

_PARALLEL_BYTES_MIN = 256 * 1024
"""Smaller blocks are digested faster by one thread."""


class DamagedBlock(ProtocolViolation):
    """A block that cannot be decompressed, or whose contents do not have the digest that they should."""


def block_count(nbytes: int) -> int:
    """Blocks of a tensor of so many bytes."""
    return -(-nbytes // STATE_BLOCK_BYTES)


def block_view(tensor: TensorView, index: int) -> memoryview:
    """The memory of one block. Valid while the tensor is alive."""
    begin = index * STATE_BLOCK_BYTES
    size = min(STATE_BLOCK_BYTES, tensor.nbytes - begin)
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.address + begin)).cast("B")


def block_digest(data: Any) -> bytes:
    """BLAKE3 of a block, 32 bytes."""
    threads = blake3.blake3.AUTO if len(data) >= _PARALLEL_BYTES_MIN else 1
    return blake3.blake3(data, max_threads=threads).digest()


def digest_blocks(tensor: TensorView) -> tuple[bytes, ...]:
    """The digests of all blocks."""
    return tuple(block_digest(block_view(tensor, index)) for index in range(block_count(tensor.nbytes)))


def tensor_digest(datatype: int, count: int, block_digests: tuple[bytes, ...]) -> bytes:
    """The digest of a tensor, 32 bytes."""
    head = f"zpccl state {datatype} {count} {STATE_BLOCK_BYTES}\n".encode()
    return blake3.blake3(head + b"".join(block_digests)).digest()


def compress(block: memoryview, itemsize: int) -> bytes:
    """A block as it travels: blosc2, shuffled by element size. Never much longer than the block."""
    return bytes(blosc2.compress2(block, typesize=itemsize, codec=blosc2.Codec.LZ4, clevel=5, nthreads=1))


def decompress(data: bytes, size: int, digest: bytes) -> bytes:
    """The contents of a compressed block of `size` bytes, checked against its digest.

    Raises:
        DamagedBlock: the data is not a block of this size and digest.
    """
    try:
        announced = blosc2.get_cbuffer_sizes(data)[0]
        if announced != size:
            raise DamagedBlock(f"a block of {announced} bytes where {size} were due")
        block = bytes(blosc2.decompress2(data))
    except (RuntimeError, ValueError, TypeError) as error:
        raise DamagedBlock(f"a block that cannot be decompressed: {error}") from None
    if len(block) != size or block_digest(block) != digest:
        raise DamagedBlock("a block whose contents do not have the digest that was elected")
    return block
