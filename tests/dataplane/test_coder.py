"""Blocks as one link wants them."""

from __future__ import annotations

import threading

import numpy as np

from zpccl.dataplane.coder import LinkCoder
from zpccl.dataplane.coding_choice import Group
from zpccl.dataplane.state_codec import decode_into
from zpccl.limits import MIB
from zpccl.types import DataType

GROUP = Group(DataType.INT32, 3)


def counting() -> memoryview:
    """A block that shrinks a lot."""
    return memoryview(np.arange(MIB // 4, dtype=np.int32).tobytes())


def size_of(coder: LinkCoder, block: memoryview, rate: float | None) -> int:
    payload = b"".join(coder.encode(GROUP, block, 4, 2**30, rate))
    found = bytearray(len(block))
    decode_into(payload, memoryview(found))
    assert found == block
    return len(payload)


def test_the_first_block_of_which_the_rate_is_known_is_coded() -> None:
    coder = LinkCoder(2)
    assert size_of(coder, counting(), None) == MIB + 1
    assert size_of(coder, counting(), 1e6) < MIB // 2
    assert size_of(LinkCoder(2), counting(), 1e12) == MIB + 1


def test_several_threads_encode_for_one_link() -> None:
    coder = LinkCoder(4)
    sizes: list[int] = []
    threads = [threading.Thread(target=lambda: sizes.append(size_of(coder, counting(), 1e6))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 4 and max(sizes) <= MIB + 1 and size_of(coder, counting(), 1e6) < MIB // 2
