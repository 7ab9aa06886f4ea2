"""The tensors of one peer in one sync: own blocks, missing blocks, and fetched blocks.

For a key that is not fetched the peer already holds the elected contents. For a fetched key it first knows the elected
digest, then receives the list of block digests, then the blocks that differ. Fetched blocks are staged in memory until
`write`.

Only the user's thread modifies this object; workers read it and call `check`.
"""

from __future__ import annotations

import mmap
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zpccl import limits
from zpccl.state.codec import DamagedBlock, decode_into
from zpccl.state.digests import (
    DIGEST_BYTES,
    block_bytes,
    block_count,
    block_digest,
    digest_regions,
    tensor_digest,
    zero_digest,
)
from zpccl.state.regions import Region
from zpccl.state.serving import MemoryChanged
from zpccl.state.swarm import LIST, Place
from zpccl.state.workers import in_parallel, worker_count
from zpccl.types import DigestKind

_WRITE_BYTES = 8 * limits.MIB
"""Bytes that one worker writes per task."""


@dataclass(frozen=True)
class Arrival:
    """A received block that is to be verified.

    Attributes:
        begin, end: range of its payload in the message.
        memory: staging memory for its contents.
        digest: expected digest; for a tensor of one block, that of the tensor.
    """

    place: Place
    begin: int
    end: int
    memory: memoryview
    digest: bytes


class Contents:
    """The contents of a peer's state. The constructor computes the digests.

    Args:
        regions: the tensors by key.
        kind: kind of the digests.

    Attributes:
        keys: in sorted order; other attributes and messages refer to a key by its index here.
        counts: number of blocks of each key.
        digests: the digest of each tensor by key, at construction.
        wanted: the elected digest of each fetched key, by index.
    """

    def __init__(self, regions: Mapping[str, Region], kind: DigestKind) -> None:
        self.keys = tuple(sorted(regions))
        self._regions = tuple(regions[key] for key in self.keys)
        self._kind = kind
        self.counts = tuple(block_count(region.nbytes) for region in self._regions)
        blocks = digest_regions(regions, kind)
        self._own = tuple(blocks[key] for key in self.keys)
        self.digests = {key: self._tensor_digest(number, self._own[number]) for number, key in enumerate(self.keys)}
        self.wanted: dict[int, bytes] = {}
        self._lists: dict[int, bytes] = {}  # By wanted key: the concatenated digests of all blocks.
        self._staged: dict[Place, memoryview | None] = {}  # Verified blocks; None: all zero.
        self._chunk = memoryview(b"")  # The unused rest of the newest staging chunk.

    def _tensor_digest(self, key: int, digests: Sequence[bytes]) -> bytes:
        region = self._regions[key]
        return tensor_digest(self._kind, region.datatype, region.count, digests)

    def size_of(self, place: Place) -> int:
        """Size of a block or list in bytes."""
        key, index = place
        return self.counts[key] * DIGEST_BYTES if index == LIST else block_bytes(self._regions[key].nbytes, index)

    def name_of(self, place: Place) -> str:
        """A block or list as text for logs."""
        what = "the list of blocks" if place[1] == LIST else f"block {place[1]}"
        return f"{what} of {self.keys[place[0]]!r}"

    # --- Fetching ---------------------------------------------------------------------------------------------------

    def want(self, fetch: Mapping[str, bytes]) -> list[Place]:
        """Sets the elected digests of the keys to fetch. Returns the places to fetch first, none for zeros."""
        self.wanted = {number: fetch[key] for number, key in enumerate(self.keys) if key in fetch}
        places: list[Place] = []
        for number, digest in self.wanted.items():
            if self.counts[number] > 1:
                places.append((number, LIST))
            elif self._tensor_digest(number, [self._zeros((number, 0))]) == digest:
                self._staged[number, 0] = None
            else:
                places.append((number, 0))
        return places

    def _zeros(self, place: Place) -> bytes:
        return zero_digest(self.size_of(place), self._kind)

    def take_list(self, key: int, blob: bytes) -> list[Place] | None:
        """Accepts the list of block digests of a key. Returns the blocks that differ; None if the list is wrong."""
        digests = [blob[begin : begin + DIGEST_BYTES] for begin in range(0, len(blob), DIGEST_BYTES)]
        is_whole = len(blob) == self.counts[key] * DIGEST_BYTES
        if not is_whole or self._tensor_digest(key, digests) != self.wanted[key]:
            return None
        self._lists[key] = blob
        places: list[Place] = []
        for index, (digest, own) in enumerate(zip(digests, self._own[key], strict=True)):
            if digest == self._zeros((key, index)) != own:
                self._staged[key, index] = None
            elif digest != own:
                places.append((key, index))
        return places

    def expect(self, place: Place, begin: int, end: int, missing_bytes: int) -> Arrival:
        """Allocates staging memory for a received block; `missing_bytes` are still to come in total.

        Raises:
            OSError, MemoryError: out of memory.
        """
        size = self.size_of(place)
        if len(self._chunk) < size:
            self._chunk = _new_chunk(max(size, min(missing_bytes, limits.STATE_STAGING_CHUNK_BYTES)))
        memory, self._chunk = self._chunk[:size], self._chunk[size:]
        return Arrival(place, begin, end, memory, self._digest_of(place))

    def _digest_of(self, place: Place) -> bytes:
        key, index = place
        blob = self._lists.get(key)
        return self.wanted[key] if blob is None else blob[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def check(self, arrival: Arrival, message: memoryview) -> None:
        """Decodes a block to its staging memory and verifies it. Called by workers.

        Raises:
            DamagedBlock: it cannot be decoded, or its digest is wrong.
        """
        with message[arrival.begin : arrival.end] as payload:
            decode_into(payload, arrival.memory)
        digest = block_digest(arrival.memory, self._kind)
        if self.counts[arrival.place[0]] == 1:
            digest = self._tensor_digest(arrival.place[0], [digest])
        if digest != arrival.digest:
            raise DamagedBlock("its contents do not have the digest that was elected")

    def keep(self, arrival: Arrival) -> None:
        """Stages a verified block."""
        self._staged[arrival.place] = arrival.memory

    # --- Serving ----------------------------------------------------------------------------------------------------

    def list_of(self, key: int) -> bytes | None:
        """The concatenated digests of all blocks of the elected contents; None if they are not known yet."""
        return self._lists.get(key) if key in self.wanted else b"".join(self._own[key])

    def block_of(self, place: Place) -> tuple[memoryview, int] | None:
        """A verified block of the elected contents, and its element size; None if this peer does not have it yet.

        Raises:
            MemoryChanged: the tensor was modified since it was digested.
        """
        key, index = place
        region = self._regions[key]
        if place in self._staged:
            staged = self._staged[place]
            return memoryview(bytes(self.size_of(place))) if staged is None else staged, region.datatype.itemsize
        if not self._is_own(place):
            return None
        block = region.read(index * limits.STATE_BLOCK_BYTES, self.size_of(place))
        if block_digest(block, self._kind) != self._own[key][index]:
            raise MemoryChanged(f"{self.name_of(place)} changed during the sync")
        return block, region.datatype.itemsize

    def _is_own(self, place: Place) -> bool:
        """True if this peer's block is known to be equal to the elected one."""
        key, index = place
        return key not in self.wanted or (key in self._lists and self._digest_of(place) == self._own[key][index])

    def here(self) -> Iterator[tuple[int, int, int]]:
        """Ranges of the blocks and lists of the elected contents that this peer has."""
        for number, count in enumerate(self.counts):
            is_whole = number not in self.wanted
            if count > 1 and (is_whole or number in self._lists):
                yield number, LIST, 1
            elif count > 1:  # No block is known to be right before the list has come.
                continue
            first = 0
            for index in () if is_whole else range(count):
                if (number, index) in self._staged or self._is_own((number, index)):
                    continue
                if index > first:
                    yield number, first, index - first
                first = index + 1
            if count > first:
                yield number, first, count - first

    # --- The end ----------------------------------------------------------------------------------------------------

    def conflict(self, may_differ: Container[str]) -> str:
        """Names two tensors that have the same memory but different elected contents; "" if none. All must be fetched.

        Args:
            may_differ: keys that have no elected contents unless they are fetched.
        """
        found: dict[tuple[str, int, int], int] = {}
        for key, region in enumerate(self._regions):
            if key not in self.wanted and self.keys[key] in may_differ:
                continue
            other = found.setdefault(region.address_range(), key)
            if not self.wanted.keys() & {key, other} or key == other:
                continue
            if self._elected(key) != self._elected(other):
                names = f"{self.keys[other]!r} and {self.keys[key]!r}"
                return f"tensors {names} are the same memory here, but their elected contents differ"
        return ""

    def _elected(self, key: int) -> bytes:
        """As `list_of`, once all blocks are here: a fetched key of one block gets no list."""
        digests = self.list_of(key)
        if digests is not None:
            return digests
        block = self._staged[key, 0]
        return self._zeros((key, 0)) if block is None else block_digest(block, self._kind)

    def write(self) -> None:
        """Writes the staged blocks to the tensors. May be called again after it has raised.

        Raises:
            Exception: writing to a device failed. The contents of the tensors are then undefined.
        """
        size = sum(self.size_of(place) for place in self._staged)
        in_parallel(self._write_part, self._parts(), worker_count(size))

    def _parts(self) -> Iterator[list[Place]]:
        part: list[Place] = []
        size = 0
        met: set[tuple[tuple[str, int, int], int]] = set()  # Two names may share memory: only one is written.
        for place in self._staged:
            memory = (self._regions[place[0]].address_range(), place[1])
            if memory in met:
                continue
            met.add(memory)
            part.append(place)
            size += self.size_of(place)
            if size >= _WRITE_BYTES:
                yield part
                part, size = [], 0
        yield part

    def _write_part(self, part: list[Place]) -> None:
        for place in part:
            block = self._staged[place]
            data = bytes(self.size_of(place)) if block is None else block
            self._regions[place[0]].write(place[1] * limits.STATE_BLOCK_BYTES, data)

    def forget(self) -> None:
        """Frees the staged blocks."""
        self._staged.clear()
        self._chunk = memoryview(b"")


def _new_chunk(size: int) -> memoryview:
    """Maps memory that is unmapped with the last view of it."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
