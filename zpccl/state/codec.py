"""How a block of state travels: as it is, as a pattern that repeats, or compressed with blosc2.

Compressed means ZSTD, level 1, over the shuffled bytes of elements; docs/shared_state.md says what that makes of what.
A payload begins with a byte that says which of the three follows. Whoever decodes one trusts nothing in it: the result
has exactly the size of its destination, and of the many features of a blosc2 chunk only those that are made here are
accepted. Whether the contents are right is for the digest to say.

blosc2 holds the GIL unless it is told otherwise, for the whole process; this module tells it when it is imported.
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
ENCODED_EXTRA_BYTES = 1
"""A payload is longer than its block by no more than this."""

_PATTERN_BYTES = 16
"""A pattern of 1, 2, 4, 8 or 16 bytes is repeated to this."""
_CONSTANT_BYTES_MIN = 2 * _PATTERN_BYTES

_HEADER = struct.Struct("<xxBBiii6sBB6sBB")
"""Of a blosc2 chunk: flags, element size, size, size of its parts, its own size; filters, codec, its parameter,
parameters of the filters, flags of chunks with parts of other sizes, and of special chunks."""
_EXTENDED_HEADER = 0x05
_STORED = 0x02
_DELTA = 0x08
_ZSTD_FORMAT = 4
"""In the flags, what the codec is in the header."""
_FILTERS = bytes([blosc2.Filter.SHUFFLE.value, 0, 0, 0, 0, 0])
_ITEM_BYTES_MAX = 16


class DamagedBlock(ProtocolViolation):
    """A block that cannot be decoded, or whose contents do not have the digest that they should."""


def encode(block: memoryview, itemsize: int, *, compress: bool = True) -> Sequence[Any]:
    """A block as it travels: buffers to be sent end to end. One may be the block itself, so send before it changes.

    Args:
        block: contiguous bytes, at least one.
        itemsize: bytes of an element.
        compress: False: only patterns are found. What does not get smaller goes as it is in either case.
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
    """Writes the contents of a block, which are yet to be compared with its digest.

    Takes no more memory than a few times the block, whatever the payload says.

    Args:
        payload: what `encode` made, end to end; contiguous bytes.
        destination: contiguous and writable, of the size that the block must have. Undefined after an error.

    Raises:
        DamagedBlock: the payload is not that of a block of this size.
    """
    payload = memoryview(payload)
    form, body, size = bytes(payload[:1]), payload[1:], len(destination)
    if form == _RAW:
        if len(body) != size:
            raise DamagedBlock(f"a block of {len(body)} bytes where {size} were due")
        destination[:] = body
    elif form == _CONSTANT:
        if len(body) != _PATTERN_BYTES or size < _CONSTANT_BYTES_MIN:
            raise DamagedBlock(f"a pattern of {len(body)} bytes for a block of {size}")
        _repeat(body, destination)
    elif form == _BLOSC2:
        if not _is_ours(body, size):
            raise DamagedBlock(f"a compressed block with a header that no block of {size} bytes has")
        try:
            blosc2.decompress2(body, dst=destination, nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise DamagedBlock(f"a block that cannot be decompressed: {error}") from None
    else:
        raise DamagedBlock("a block in a form that is not known")


def _is_ours(chunk: Any, size: int) -> bool:
    """True if the header is as `encode` makes them for a block of `size` bytes.

    blosc2 takes the size of the destination from the header, and may have dictionaries, codecs in other packages and
    values that are not stored: none of that is for data of strangers.
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
    """The first bytes of a block that are repeated to its end."""
    size = len(block)
    if size < _CONSTANT_BYTES_MIN or block[:_PATTERN_BYTES] != block[_PATTERN_BYTES : 2 * _PATTERN_BYTES]:
        return None  # Nearly all blocks end here.
    pattern = bytes(block[:_PATTERN_BYTES])
    whole = size // _PATTERN_BYTES * _PATTERN_BYTES
    words = np.frombuffer(block[:whole], np.uint64)  # Of any alignment.
    if block[whole:] != pattern[: size - whole] or not np.array_equal(words[2:], words[:-2]):
        return None
    return pattern


def _repeat(pattern: memoryview, destination: memoryview) -> None:
    whole = len(destination) // _PATTERN_BYTES * _PATTERN_BYTES
    rows = np.frombuffer(destination[:whole], np.uint8).reshape(-1, _PATTERN_BYTES)
    rows[:] = np.frombuffer(pattern, np.uint8)
    destination[whole:] = pattern[: len(destination) - whole]
