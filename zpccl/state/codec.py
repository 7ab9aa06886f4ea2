"""Encoding of a block of state on the wire: plain, as a repeated pattern, or compressed with blosc2.

Compression is ZSTD, level 1, over the byte-shuffled elements; docs/shared_state.md has compression ratios. The first
byte of a payload says which of the three forms follows. Decoding trusts nothing in a payload: the result has exactly
the size of its destination, and only those features of blosc2 chunks are accepted that `encode` uses. The caller
verifies the contents by their digest.

By default blosc2 holds the GIL; importing this module switches that off for the whole process.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import blosc2
import numpy as np

from zpccl.errors import ProtocolViolation

blosc2.set_releasegil(True)

_RAW = b"\0"
_CONSTANT = b"\1"
_BLOSC2 = b"\2"

_PATTERN_BYTES = 16
"""A pattern of 1, 2, 4, 8 or 16 bytes is first repeated to this size."""
_CONSTANT_BYTES_MIN = 2 * _PATTERN_BYTES

_HEADER = struct.Struct("<xxBBiii6sBB6sBB")
"""Header of a blosc2 chunk: flags, element size, uncompressed size, block size, chunk size; filters, codec and its
parameter, parameters of the filters, flags of variable-size blocks and of special chunks."""
_EXTENDED_HEADER = 0x05
_STORED = 0x02
_DELTA = 0x08
_ZSTD_FORMAT = 4
"""Bits of the flags that hold the codec."""
_FILTERS = bytes([blosc2.Filter.SHUFFLE.value, 0, 0, 0, 0, 0])
_ITEM_BYTES_MAX = 16


class DamagedBlock(ProtocolViolation):
    """A block that cannot be decoded, or whose digest is wrong."""


def encode(block: memoryview, itemsize: int, *, compress: bool = True) -> Sequence[Any]:
    """Encodes a block. Returns buffers to send one after the other; one may alias the block, so send before it changes.

    Args:
        block: contiguous bytes, at least one.
        itemsize: size of an element in bytes.
        compress: False: only look for patterns. A block that does not shrink is sent plain in either case.
    """
    if (pattern := _find_pattern(block)) is not None:
        return (_CONSTANT, pattern)
    if compress:
        packed = blosc2.compress2(
            block, typesize=itemsize, codec=blosc2.Codec.ZSTD, clevel=1, filters=[blosc2.Filter.SHUFFLE], nthreads=1
        )
        if len(packed) < len(block) and _is_ours(packed, len(block)):
            return (_BLOSC2, packed)
    return (_RAW, block)


def decode_into(payload: Any, destination: memoryview) -> None:
    """Decodes a block. The caller must still verify its digest.

    Needs at most a few times the memory of the block, whatever the payload contains.

    Args:
        payload: the output of `encode`, concatenated; contiguous bytes.
        destination: contiguous and writable, of the size of the block. Undefined after an error.

    Raises:
        DamagedBlock: the payload does not decode to a block of this size.
    """
    payload = memoryview(payload)
    form, body, size = bytes(payload[:1]), payload[1:], len(destination)
    if form == _RAW:
        if len(body) != size:
            raise DamagedBlock(f"a block of {len(body)} bytes instead of {size}")
        destination[:] = body
    elif form == _CONSTANT:
        if len(body) != _PATTERN_BYTES or size < _CONSTANT_BYTES_MIN:
            raise DamagedBlock(f"a pattern of {len(body)} bytes for a block of {size}")
        _repeat(body, destination)
    elif form == _BLOSC2:
        if not _is_ours(body, size):
            raise DamagedBlock(f"a compressed block whose header does not fit a block of {size} bytes")
        try:
            blosc2.decompress2(body, dst=destination, nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise DamagedBlock(f"a block that cannot be decompressed: {error}") from None
    else:
        raise DamagedBlock("a block in an unknown form")


def _is_ours(chunk: Any, size: int) -> bool:
    """True if the header is one that `encode` makes for a block of `size` bytes.

    blosc2 takes the destination size from the header and supports dictionaries, external codecs and special values.
    Untrusted data must use none of these.
    """
    if len(chunk) < _HEADER.size:
        return False
    flags, itemsize, nbytes, part, own, filters, codec, codec_meta, metas, parts, special = _HEADER.unpack_from(chunk)
    return (
        flags & (_EXTENDED_HEADER | _STORED | _DELTA) == _EXTENDED_HEADER
        and (flags >> 5, codec) == (_ZSTD_FORMAT, blosc2.Codec.ZSTD.value)
        and 1 <= itemsize <= _ITEM_BYTES_MAX
        and nbytes == size
        and 0 < part <= size
        and own == len(chunk)
        and (filters, codec_meta, metas, parts, special) == (_FILTERS, 0, bytes(6), 0, 0)
    )


def _find_pattern(block: memoryview) -> bytes | None:
    """The shortest pattern whose repetition is the block, or None."""
    size = len(block)
    if size < _CONSTANT_BYTES_MIN or block[:_PATTERN_BYTES] != block[_PATTERN_BYTES : 2 * _PATTERN_BYTES]:
        return None  # Almost all blocks end here.
    pattern = bytes(block[:_PATTERN_BYTES])
    whole = size // _PATTERN_BYTES * _PATTERN_BYTES
    words = np.frombuffer(block[:whole], np.uint64)  # It need not be aligned.
    if block[whole:] != pattern[: size - whole] or not np.array_equal(words[2:], words[:-2]):
        return None
    return pattern


def _repeat(pattern: memoryview, destination: memoryview) -> None:
    whole = len(destination) // _PATTERN_BYTES * _PATTERN_BYTES
    rows = np.frombuffer(destination[:whole], np.uint8).reshape(-1, _PATTERN_BYTES)
    rows[:] = np.frombuffer(pattern, np.uint8)
    destination[whole:] = pattern[: len(destination) - whole]
