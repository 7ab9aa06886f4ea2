"""Blocks of state as they travel."""

from __future__ import annotations

from collections.abc import Callable

import blosc2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zpccl.limits import STATE_BLOCK_BYTES
from zpccl.state.codec import DamagedBlock, decode_into, encode

CANARY = b"\xa5" * 4096


def pack(block: bytes, itemsize: int = 4, *, compress: bool = True) -> bytes:
    return b"".join(encode(memoryview(block), itemsize, compress=compress))


def unpack(payload: bytes, size: int) -> bytes:
    """The decoded block. The bytes around it must not change."""
    memory = bytearray(CANARY + b"\xee" * size + CANARY)
    try:
        decode_into(payload, memoryview(memory)[len(CANARY) : len(CANARY) + size])
    finally:
        assert memory[: len(CANARY)] == CANARY and memory[len(CANARY) + size :] == CANARY
    return bytes(memory[len(CANARY) : len(CANARY) + size])


def floats(count: int) -> bytes:
    """Like trained weights: compression makes them smaller, but not by much."""
    return np.random.default_rng(0).normal(0, 0.02, count).astype(np.float32).tobytes()


@settings(max_examples=150)
@given(st.binary(min_size=1, max_size=3000), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_block_comes_back_as_it_went(block: bytes, itemsize: int, compress: bool) -> None:
    payload = pack(block, itemsize, compress=compress)
    assert unpack(payload, len(block)) == block and len(payload) <= len(block) + 1, "longer than the block and its form"


@settings(max_examples=150)
@given(st.binary(min_size=1, max_size=20), st.integers(1, 200), st.integers(0, 19), st.booleans())
def test_blocks_that_repeat_come_back(pattern: bytes, times: int, rest: int, compress: bool) -> None:
    block = pattern * times + pattern[:rest]
    assert unpack(pack(block, 1, compress=compress), len(block)) == block


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64, np.int64, np.complex128])
def test_whole_blocks_of_numbers_shrink_and_come_back(dtype: type) -> None:
    count = STATE_BLOCK_BYTES // np.dtype(dtype).itemsize
    block = (np.random.default_rng(0).normal(0, 20, count)).astype(np.int8).astype(dtype).tobytes()
    payload = pack(block, np.dtype(dtype).itemsize)
    assert len(payload) < len(block) and unpack(payload, len(block)) == block


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [32, 33, 1000, STATE_BLOCK_BYTES - 3])
def test_a_pattern_is_all_that_travels(width: int, size: int) -> None:
    block = (bytes(range(width)) * size)[:size]
    assert len(pack(block, 1, compress=False)) == 17
    for place in (0, 17, size // 2, size - 1):
        other = bytearray(block)
        other[place] ^= 1
        payload = pack(bytes(other), 1, compress=False)
        assert len(payload) == size + 1 and unpack(payload, size) == other


def test_a_block_that_goes_as_it_is_is_not_copied() -> None:
    memory = bytearray(floats(100))
    head, body = encode(memoryview(memory), 4, compress=False)
    assert len(head) == 1 and body.obj is memory
    incompressible = bytearray(np.random.default_rng(0).bytes(5000))
    assert encode(memoryview(incompressible), 4)[1].obj is incompressible


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(1, 200))
def test_other_bytes_are_refused_or_fill_the_block(payload: bytes, size: int) -> None:
    try:
        unpack(payload, size)
    except DamagedBlock:
        return
    assert payload[0] == 0 or (payload[0] == 1 and len(payload) == 17)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_damaged_chunks_never_write_elsewhere(data: st.DataObject) -> None:
    """Bytes of a chunk are changed, mostly those with positions, and some are cut off or added."""
    block = np.arange(1000, dtype=np.int32).tobytes()[: data.draw(st.integers(3000, 4000))]
    payload = bytearray(pack(block))
    assert payload[0] == 2
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, min(80, len(payload) - 1)), st.integers(0, len(payload) - 1)))
        payload[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(payload)), st.integers(0, len(payload))))
    try:
        unpack(bytes(payload[:end]), len(block))
    except DamagedBlock:
        pass


Change = Callable[[bytearray], object]


def put(place: int, *values: int) -> Change:
    return lambda chunk: chunk.__setitem__(slice(place, place + len(values)), bytes(values))


HOSTILE: dict[str, Change] = {
    "it is larger than its place": put(4, 0xFF, 0xFF, 0xFF, 0x7F),
    "it is smaller than its place": put(4, 0x10, 0, 0, 0),
    "parts larger than all of it": put(8, 0, 0, 0, 0x40),
    "parts of no size": put(8, 0, 0, 0, 0),
    "another size of its own": put(12, 0, 1, 0, 0),
    "a filter of a plugin": put(16, 160),
    "two filters": put(16, 1, 2),
    "another filter": put(16, 2),
    "a parameter of a filter": put(24, 9),
    "a codec of a plugin": put(22, 38),
    "another codec": put(22, 1),
    "another format": lambda chunk: chunk.__setitem__(2, 0x20 | chunk[2] & 0x1F),
    "a parameter of the codec": put(23, 3),
    "zeros that are not there": put(31, 0x10),
    "memory as it happens to be": put(31, 0x40),
    "a dictionary": put(31, 1),
    "parts of different sizes": put(30, 1),
    "elements of no size": put(3, 0),
    "elements of 255 bytes": put(3, 255),
    "stored": lambda chunk: chunk.__setitem__(2, chunk[2] | 2),
    "the short header": lambda chunk: chunk.__setitem__(2, chunk[2] & ~4),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_encoder_makes_is_refused_before_blosc2_sees_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = floats(1000)
    chunk = bytearray(pack(block)[1:])
    HOSTILE[what](chunk)
    monkeypatch.setattr(blosc2, "decompress2", None)
    with pytest.raises(DamagedBlock, match="header"):
        unpack(b"\2" + bytes(chunk), len(block))


@pytest.mark.parametrize("payload", [b"", b"\3", b"\2", b"\0", b"\1", b"\1" + bytes(15), b"\1" + bytes(17), b"\0ab"])
def test_payloads_of_a_wrong_length_are_refused(payload: bytes) -> None:
    with pytest.raises(DamagedBlock):
        unpack(payload, 100)


def test_blosc2_works_without_the_gil() -> None:
    """blosc2 returns the previous setting."""
    assert blosc2.set_releasegil(True)
