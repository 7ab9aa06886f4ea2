"""Digests of blocks and tensors, by one thread and by several."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import blake3
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zpccl import limits
from zpccl.errors import InvalidArgument
from zpccl.limits import STATE_BLOCK_BYTES
from zpccl.state import digests as module
from zpccl.state.digests import (
    DIGEST_BYTES,
    block_bytes,
    block_count,
    block_digest,
    digest_regions,
    tensor_digest,
    zero_digest,
)
from zpccl.state.regions import Region, region
from zpccl.types import DataType, DigestKind

KINDS = list(DigestKind)


def regions_of(sizes: list[int], seed: int = 0) -> dict[str, Region]:
    rng = np.random.default_rng(seed)
    return {f"t{i:05}": region(rng.integers(0, 256, size, np.uint8), f"t{i}") for i, size in enumerate(sizes)}


def one_by_one(
    regions: dict[str, Region], kind: DigestKind, block: int = STATE_BLOCK_BYTES
) -> dict[str, tuple[bytes, ...]]:
    return {
        key: tuple(
            block_digest(bytes(r.read(i * block, block_bytes(r.nbytes, i))), kind) for i in range(block_count(r.nbytes))
        )
        for key, r in regions.items()
    }


@pytest.mark.parametrize(("nbytes", "count"), [(1, 1), (STATE_BLOCK_BYTES, 1), (STATE_BLOCK_BYTES + 1, 2)])
def test_blocks_cover_the_tensor(nbytes: int, count: int) -> None:
    assert block_count(nbytes) == count
    assert sum(block_bytes(nbytes, index) for index in range(count)) == nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_threads_finds_the_same(kind: DigestKind, workers: int) -> None:
    """A large tensor with an incomplete last block between small ones, and sizes just below and above a block."""
    sizes = [1, 2, 9 * STATE_BLOCK_BYTES + 5, 3, STATE_BLOCK_BYTES, STATE_BLOCK_BYTES + 1, STATE_BLOCK_BYTES - 1, 7]
    regions = regions_of(sizes)
    assert digest_regions(regions, kind, workers) == one_by_one(regions, kind)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 500), st.integers(1, 3)
)
def test_any_division_into_tasks_finds_the_same(sizes: list[int], block: int, task: int, workers: int) -> None:
    """With blocks of a few bytes, so that there are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STATE_BLOCK_BYTES", block)
        patch.setattr(limits, "STATE_RUN_BYTES_MAX", task)
        regions = regions_of(sizes)
        assert digest_regions(regions, DigestKind.BLAKE3, workers) == one_by_one(regions, DigestKind.BLAKE3, block)


def test_many_small_tensors_are_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise handing them to threads would cost more than their digests."""
    tasks: list[int] = []

    def in_parallel(function: Callable[..., None], parts: Iterable[list[object]], count: int) -> None:
        for part in parts:
            tasks.append(len(part))
            function(part)

    monkeypatch.setattr(module, "in_parallel", in_parallel)
    digest_regions(regions_of([100] * 10_000), DigestKind.BLAKE3, 2)
    assert tasks == [10_000]


def test_blake3_is_blake3() -> None:
    """From BLAKE3's own test vectors: the empty input."""
    assert block_digest(b"", DigestKind.BLAKE3).hex() == (
        "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    )
    assert block_digest(b"abc", DigestKind.BLAKE3) == blake3.blake3(b"abc").digest()


def test_xxh3_is_xxh3() -> None:
    """XXH3-128 of the empty input, from its own test suite, in a digest of the usual length."""
    digest = block_digest(b"", DigestKind.XXH3)
    assert digest.hex() == "99aa06d3014798d86001c324468d497f" + "00" * 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 100, STATE_BLOCK_BYTES])
def test_zeros_have_the_digest_of_zeros(kind: DigestKind, size: int) -> None:
    assert zero_digest(size, kind) == block_digest(np.zeros(size, np.uint8), kind)
    assert len(zero_digest(size, kind)) == DIGEST_BYTES


def test_a_digest_is_of_kind_type_size_and_contents() -> None:
    blocks = (bytes(32), bytes(32))
    digests = {
        tensor_digest(DigestKind.BLAKE3, DataType.FLOAT, 5, blocks),
        tensor_digest(DigestKind.XXH3, DataType.FLOAT, 5, blocks),
        tensor_digest(DigestKind.BLAKE3, DataType.INT32, 5, blocks),
        tensor_digest(DigestKind.BLAKE3, DataType.FLOAT, 6, blocks),
        tensor_digest(DigestKind.BLAKE3, DataType.FLOAT, 5, blocks[:1]),
        tensor_digest(DigestKind.BLAKE3, DataType.FLOAT, 5, (bytes(32), b"\1" + bytes(31))),
    }
    assert len(digests) == 6 and all(len(digest) == DIGEST_BYTES for digest in digests)


def test_without_the_package_xxh3_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(InvalidArgument, match=r"zpccl\[xxhash\]"):
        digest_regions(regions_of([5]), DigestKind.XXH3)
    assert digest_regions(regions_of([5]), DigestKind.BLAKE3)
