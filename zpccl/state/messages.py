"""What peers say to each other while state moves.

Keys go by their number in sorted order, which all who take part have alike. Blocks are laid out so that their bytes
need not be copied to be found: a head, one entry for each block, and then the payloads, end to end. All other messages
are MessagePack, in which no message begins with the byte that blocks begin with.
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
"""Key, first block or LIST, and how many blocks."""


class MalformedMessage(ProtocolViolation):
    """Bytes that are no message."""


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the messages."""


class Want(_Message, tag=0, frozen=True):
    """Fetcher -> fellow: tell me what you have, now and as you get it."""


class Have(_Message, tag=1, frozen=True):
    """Fellow -> fetcher: I have this too; or, if `is_complete`, all."""

    is_complete: bool
    ranges: Ranges


class Request(_Message, tag=2, frozen=True):
    """Fetcher -> source: send these blocks and lists."""

    ranges: Ranges


class BlockList(_Message, tag=3, frozen=True):
    """Source -> fetcher: the digests of all blocks of a key, end to end."""

    key: _Number
    digests: bytes


Message: TypeAlias = Want | Have | Request | BlockList
encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

_BLOCKS = 0xC1
"""The one byte that MessagePack never uses."""
_HEAD = struct.Struct("<BxH")
_ENTRY = struct.Struct("<III")
BLOCKS_PER_MESSAGE_MAX = 1024


def blocks_head(entries: Sequence[tuple[Place, int]]) -> bytes:
    """What stands before the payloads of blocks: their places and the sizes of the payloads."""
    assert 1 <= len(entries) <= BLOCKS_PER_MESSAGE_MAX
    return _HEAD.pack(_BLOCKS, len(entries)) + b"".join(_ENTRY.pack(*place, size) for place, size in entries)


def has_blocks(body: memoryview) -> bool:
    """True if a message has blocks: then parse_blocks() is to be used, else decode()."""
    return len(body) > 0 and body[0] == _BLOCKS


def parse_blocks(body: memoryview) -> list[tuple[Place, int, int]]:
    """The blocks of a message: place, and begin and end of the payload in it.

    Raises:
        MalformedMessage: it is not what blocks_head() makes.
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
    """A message without blocks.

    Raises:
        MalformedMessage: it is none.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"a malformed message: {error}") from None


def ranges_of(places: Iterable[Place]) -> list[tuple[int, int, int]]:
    """Ranges of the same places in the same order."""
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
    """The places that ranges name and that are there, given the number of blocks of each key."""
    for key, first, count in ranges:
        if key >= len(block_counts):
            continue
        if first == LIST:
            yield key, LIST
        else:
            for index in range(first, min(first + count, block_counts[key])):
                yield key, index


def in_messages(ranges: Sequence[tuple[int, int, int]]) -> Iterator[Ranges]:
    """Ranges, so many at a time as a message may have."""
    for begin in range(0, len(ranges), limits.STATE_RANGES_MAX):
        yield tuple(ranges[begin : begin + limits.STATE_RANGES_MAX])
