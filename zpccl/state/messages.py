"""Messages between peers during a state transfer.

Keys are identified by their index in sorted order, which is the same on all participants. A message with blocks is laid
out so that it can be parsed without copying: a header with one entry per block, then the concatenated payloads. All
other messages are MessagePack; a message with blocks begins with a byte that MessagePack never uses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from zpccl import limits
from zpccl.errors import ProtocolViolation
from zpccl.state.swarm import LIST, Place

_Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_First: TypeAlias = Annotated[int, Meta(ge=LIST, le=2**32 - 1)]
Ranges: TypeAlias = Annotated[tuple[tuple[_Number, _First, _Number], ...], Meta(max_length=limits.STATE_RANGES_MAX)]
"""Key, first block or LIST, number of blocks."""


class MalformedMessage(ProtocolViolation):
    """Bytes that are not a valid message."""


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the messages."""


class Want(_Message, tag=0, frozen=True):
    """Fetcher -> partial seed: announce the blocks that you have, now and whenever you get more."""


class Have(_Message, tag=1, frozen=True):
    """Partial seed -> fetcher: I also have these blocks; `is_complete`: all of them."""

    is_complete: bool
    ranges: Ranges


class Request(_Message, tag=2, frozen=True):
    """Fetcher -> source: send these blocks and lists."""

    ranges: Ranges


class BlockList(_Message, tag=3, frozen=True):
    """Source -> fetcher: the concatenated digests of all blocks of a key."""

    key: _Number
    digests: bytes


Message: TypeAlias = Want | Have | Request | BlockList
encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

_BLOCKS = 0xC1
"""The only byte that MessagePack never uses."""
_HEAD = struct.Struct("<BxH")
_ENTRY = struct.Struct("<III")
BLOCKS_PER_MESSAGE_MAX = 1024


def blocks_head(entries: Sequence[tuple[Place, int]]) -> bytes:
    """The header of a message with blocks: key, block and payload size of each."""
    assert 1 <= len(entries) <= BLOCKS_PER_MESSAGE_MAX
    return _HEAD.pack(_BLOCKS, len(entries)) + b"".join(_ENTRY.pack(*place, size) for place, size in entries)


def has_blocks(body: memoryview) -> bool:
    """True: parse the message with parse_blocks(); False: with decode()."""
    return len(body) > 0 and body[0] == _BLOCKS


def parse_blocks(body: memoryview) -> list[tuple[Place, int, int]]:
    """Parses a message with blocks. Returns key and block, begin and end of the payload, for each.

    Raises:
        MalformedMessage: the header is invalid.
    """
    try:
        _, count = _HEAD.unpack_from(body)
        entries = [_ENTRY.unpack_from(body, _HEAD.size + index * _ENTRY.size) for index in range(count)]
    except struct.error:
        raise MalformedMessage("a message with blocks that was cut short") from None
    begin = _HEAD.size + count * _ENTRY.size
    found = []
    for key, index, size in entries:
        found.append(((key, index), begin, begin + size))
        begin += size
    if begin != len(body):
        raise MalformedMessage(f"a message with blocks of {begin} bytes that has {len(body)}")
    return found


def decode(body: memoryview) -> Message:
    """Decodes a message without blocks.

    Raises:
        MalformedMessage: it is invalid.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"a malformed message: {error}") from None


def ranges_of(places: Iterable[Place]) -> list[tuple[int, int, int]]:
    """Merges consecutive blocks into ranges, in the same order."""
    ranges: list[tuple[int, int, int]] = []
    for key, index in places:
        if ranges and index != LIST:
            last_key, first, count = ranges[-1]
            if last_key == key and first + count == index:
                ranges[-1] = (key, first, count + 1)
                continue
        ranges.append((key, index, 1))
    return ranges


def places_in(ranges: Ranges, block_counts: Sequence[int]) -> Iterator[Place]:
    """The existing blocks and lists in ranges; `block_counts` by key."""
    for key, first, count in ranges:
        if key >= len(block_counts):
            continue
        if first == LIST:
            yield key, LIST
        else:
            for index in range(first, min(first + count, block_counts[key])):
                yield key, index


def in_messages(ranges: Sequence[tuple[int, int, int]]) -> Iterator[Ranges]:
    """Splits ranges into groups that fit into one message each."""
    for begin in range(0, len(ranges), limits.STATE_RANGES_MAX):
        yield tuple(ranges[begin : begin + limits.STATE_RANGES_MAX])
