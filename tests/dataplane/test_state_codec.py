"""Blocks of state: digests and compression."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zpccl.dataplane.state_codec import (
    DamagedBlock,
    block_count,
    block_digest,
    block_view,
    compress,
    decompress,
    digest_blocks,
    tensor_digest,
)
from zpccl.dataplane.tensors import view
from zpccl.limits import STATE_BLOCK_BYTES
from zpccl.types import DataType


@settings(max_examples=30)
@given(st.binary(min_size=1, max_size=5000), st.sampled_from([1, 2, 4, 8]))
def test_a_block_comes_back_as_it_went(data: bytes, itemsize: int) -> None:
    packed = compress(memoryview(data), itemsize)
    assert decompress(packed, len(data), block_digest(data)) == data


@settings(max_examples=100)
@given(st.binary(max_size=300))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedBlock):
        decompress(data, 100, bytes(32))


def test_every_damaged_byte_is_noticed() -> None:
    block = np.random.default_rng(0).integers(0, 9, 400, np.uint8).tobytes()
    packed = compress(memoryview(block), 1)
    for place in range(len(packed)):
        damaged = bytearray(packed)
        damaged[place] ^= 0x5A
        try:
            assert decompress(bytes(damaged), len(block), block_digest(block)) == block  # A byte without meaning.
        except DamagedBlock:
            pass
    for end in range(len(packed)):
        with pytest.raises(DamagedBlock):
            decompress(packed[:end], len(block), block_digest(block))


def test_a_block_that_says_it_is_huge_is_refused_before_memory_is_taken() -> None:
    bomb = compress(memoryview(bytes(STATE_BLOCK_BYTES)), 1)
    with pytest.raises(DamagedBlock, match="bytes where 100 were due"):
        decompress(bomb, 100, bytes(32))


@pytest.mark.parametrize(("nbytes", "count"), [(1, 1), (STATE_BLOCK_BYTES, 1), (STATE_BLOCK_BYTES + 1, 2)])
def test_blocks_cover_the_tensor(nbytes: int, count: int) -> None:
    tensor = view(np.zeros(nbytes, np.uint8), "x", writable=True)
    assert block_count(nbytes) == count == len(digest_blocks(tensor))
    assert sum(len(block_view(tensor, index)) for index in range(count)) == nbytes


def test_a_digest_is_of_type_size_and_contents() -> None:
    blocks = (bytes(32), bytes(32))
    digests = {
        tensor_digest(DataType.FLOAT, 5, blocks),
        tensor_digest(DataType.INT32, 5, blocks),
        tensor_digest(DataType.FLOAT, 6, blocks),
        tensor_digest(DataType.FLOAT, 5, blocks[:1]),
    }
    assert len(digests) == 4 and all(len(digest) == 32 for digest in digests)
