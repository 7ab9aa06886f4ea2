"""Tensors as regions of memory."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from fake_device import FakeDevice, FakeTensor

from zpccl.engine.tensors import view
from zpccl.errors import InvalidArgument
from zpccl.limits import MIB
from zpccl.state import regions
from zpccl.state.digests import digest_regions
from zpccl.state.regions import DeviceRegion, Region, region
from zpccl.types import DataType, DigestKind


def test_memory_of_the_host_is_read_and_written_in_place() -> None:
    array = np.arange(100, dtype=np.float32).reshape(10, 10)
    found = region(array, "x")
    assert (found.datatype, found.count, found.nbytes) == (DataType.FLOAT, 100, 400)
    piece = found.read(4, 8)
    assert np.frombuffer(piece, np.float32).tolist() == [1.0, 2.0]
    found.write(4, np.array([7.0, 8.0], np.float32).tobytes())
    assert array[0, :4].tolist() == [0.0, 7.0, 8.0, 3.0] and np.frombuffer(piece, np.float32).tolist() == [7.0, 8.0]


def test_pieces_cover_what_is_asked_for() -> None:
    array = np.arange(100, dtype=np.uint8)
    pieces = [bytes(piece) for piece in region(array, "x").pieces(5, 98, 10)]
    assert b"".join(pieces) == bytes(range(5, 98)) and [len(piece) for piece in pieces] == [10] * 9 + [3]


def test_a_region_keeps_its_tensor() -> None:
    array = np.zeros(1000, np.uint8)
    gone = weakref.ref(array)
    found = region(view(array, "x", writable=True), "x")
    del array
    gc.collect()
    assert gone() is not None and bytes(found.read(0, 1000)) == bytes(1000)


def test_a_write_beyond_the_end_is_refused() -> None:
    array = np.zeros(10, np.uint8)
    with pytest.raises(ValueError):
        region(array, "x").write(5, bytes(6))
    assert not array.any()


def test_what_cannot_be_written_is_refused() -> None:
    array = np.zeros(10, np.uint8)
    array.flags.writeable = False
    with pytest.raises(InvalidArgument, match="'weights' is read-only"):
        region(array, "tensor 'weights'")
    assert region(array, "weights", writable=False).nbytes == 10


# --- Devices --------------------------------------------------------------------------------------------------------

STEP = 40
"""The size of the staging memory in these tests."""


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "STATE_STAGING_BYTES", STEP)


def on_device(nbytes: int) -> tuple[FakeDevice, FakeTensor, DeviceRegion]:
    device = FakeDevice()
    tensor = FakeTensor(np.arange(nbytes, dtype=np.uint8))
    return device, tensor, DeviceRegion(device, tensor, "x", DataType.UINT8)


def test_memory_of_a_device_is_read_by_a_copy() -> None:
    device, tensor, found = on_device(100)
    assert (found.nbytes, found.count) == (100, 100)
    piece = found.read(10, 20)
    tensor.secret[:] = 0
    assert bytes(piece) == bytes(range(10, 30)) and device.under_way == 0


@pytest.mark.parametrize(("begin", "end", "size"), [(0, 250, 10), (3, 248, 10), (0, 40, 10), (5, 6, 10), (0, 250, 33)])
def test_pieces_of_a_device_are_all_there(small_steps: None, begin: int, end: int, size: int) -> None:
    """Each piece is compared before the next one is requested, as that may overwrite it."""
    device, _, found = on_device(250)
    offset = begin
    for piece in found.pieces(begin, end, size):
        assert bytes(piece) == bytes(range(offset, min(offset + size, end)))
        offset += len(piece)
    assert offset == end and device.under_way == 0 and device.stagings <= 2


def test_the_next_copy_runs_while_a_piece_is_in_use(small_steps: None) -> None:
    device, _, found = on_device(250)
    pieces = found.pieces(0, 250, STEP)
    for count in range(1, 7):
        next(pieces)
        assert device.under_way == 1, "the copy after this one was not begun"
        assert [entry for entry in device.log if entry[0] == "out"][-1] == (
            "out",
            STEP * count,
            min(STEP, 250 - STEP * count),
        )
    next(pieces)
    assert device.under_way == 0


def test_no_copy_is_left_when_a_reader_stops(small_steps: None) -> None:
    """S4"""
    device, _, found = on_device(250)
    pieces = found.pieces(0, 250, 10)
    next(pieces)
    assert device.under_way == 1
    pieces.close()  # type: ignore[attr-defined]
    assert device.under_way == 0


def test_no_copy_is_left_when_one_fails(small_steps: None) -> None:
    """S4"""
    device, _, found = on_device(250)
    device.fail_at = 2
    with pytest.raises(RuntimeError, match="bus"):
        for _ in found.pieces(0, 250, 10):
            pass
    with pytest.raises(RuntimeError, match="bus"):
        device.fail_at = len([entry for entry in device.log if entry[0] != "done"]) + 1
        found.write(0, bytes(250))
    assert device.under_way == 0


@pytest.mark.parametrize(("offset", "size"), [(0, 250), (7, 200), (0, 1), (249, 1), (10, STEP), (10, STEP + 1), (0, 0)])
def test_a_device_is_written_in_parts_that_overlap(small_steps: None, offset: int, size: int) -> None:
    device, tensor, found = on_device(250)
    data = np.random.default_rng(0).bytes(size)
    found.write(offset, data)
    expected = bytearray(range(250))
    expected[offset : offset + size] = data
    assert bytes(tensor.secret) == bytes(expected) and device.under_way == 0
    if size > 2 * STEP:
        assert [entry[0] for entry in device.log[:4]] == ["in", "in", "done", "in"]


def test_a_write_beyond_the_end_of_a_device_is_refused() -> None:
    device, _, found = on_device(10)
    for offset, size in [(5, 6), (-1, 2), (11, 0)]:
        with pytest.raises(ValueError, match="beyond"):
            found.write(offset, bytes(size))
    assert not device.log


@pytest.mark.parametrize("workers", [1, 3])
def test_digests_of_a_device_are_those_of_the_host(workers: int) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"t{size}": rng.integers(0, 256, size, np.uint8) for size in (1, 100, 9 * MIB + 5, MIB, 13 * MIB)}
    device = FakeDevice()
    there: dict[str, Region] = {
        name: DeviceRegion(device, FakeTensor(array), name, DataType.UINT8) for name, array in arrays.items()
    }
    here = {name: region(array, name) for name, array in arrays.items()}
    assert digest_regions(there, DigestKind.BLAKE3, workers) == digest_regions(here, DigestKind.BLAKE3)
    assert device.under_way == 0


def test_devices_have_addresses_of_their_own() -> None:
    array = np.zeros(10, np.uint8)
    ranges = {
        DeviceRegion(FakeDevice(), FakeTensor(array, place), "x", DataType.UINT8).address_range()[0]
        for place in ("cuda:0", "cuda:1")
    }
    assert ranges == {"cuda:0", "cuda:1"} and region(array, "x").address_range()[0] == "cpu"
