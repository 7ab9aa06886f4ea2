"""Moving shared state: the part of one peer in one sync.

A `StateTransfer` belongs to the thread of the user that called sync_shared_state: that thread runs `run()`, and alone
touches the tensors. The peer's loop only puts things into its mailbox: the plan, messages of others, the end.

A fetcher asks a source for the list of block digests of a key, checks the list against the elected digest, asks for the
blocks that differ from its own, a few ahead, and checks each. What it got is kept aside and written in place only when
the sync is committed: all or nothing, at the price of memory for the blocks that differ.

Sources are tried in order: a fetcher turns to the next when the link to one is lost, when it sends nothing for a while
or something wrong; what is here already stays. A source may be fetching itself, from one that others have no link to:
it then answers as soon as it has what it is asked for.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from zpccl import limits
from zpccl.dataplane.state_codec import (
    DamagedBlock,
    block_count,
    block_view,
    compress,
    decompress,
    digest_blocks,
    tensor_digest,
)
from zpccl.dataplane.tensors import TensorView


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the messages between fetcher and holder."""


class ListRequest(_Message, tag="list?", frozen=True):
    """Fetcher -> holder: which blocks has the tensor `key`?"""

    key: str


class BlockList(_Message, tag="list", frozen=True):
    """Holder -> fetcher: the digests of all blocks, 32 bytes each, end to end."""

    key: str
    digests: bytes


class BlockRequest(_Message, tag="block?", frozen=True):
    """Fetcher -> holder: send one block."""

    key: str
    index: int


class Block(_Message, tag="block", frozen=True):
    """Holder -> fetcher: the compressed contents of one block."""

    key: str
    index: int
    data: bytes


_TransferMessage: TypeAlias = ListRequest | BlockList | BlockRequest | Block
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[_TransferMessage] = msgspec.msgpack.Decoder(_TransferMessage)

Send: TypeAlias = Callable[[bytes, int, bytes], None]
"""Sends (peer id, channel, body); waits for room; raises OSError when the link is gone."""
Report: TypeAlias = Callable[[int, str, "bytes | None"], None]
"""Tells (attempt id, error or "", the peer at fault) to the machine."""


@dataclass(frozen=True)
class _Start:
    attempt_id: int
    sources: tuple[bytes, ...]
    fetch: dict[str, bytes]


@dataclass(frozen=True)
class _Delivery:
    peer: bytes
    body: bytes


@dataclass(frozen=True)
class _LinkLost:
    peer: bytes


@dataclass(frozen=True)
class _End:
    commit: bool


@dataclass
class _Fetch:
    """What is being fetched: lists that are due, blocks to ask for, blocks asked for, blocks got."""

    attempt_id: int
    sources: deque[bytes]
    wanted: dict[str, bytes]
    moved_ns: int
    """When something came that was asked for, or the first was asked."""
    lists: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    waiting: deque[tuple[str, int]] = field(default_factory=deque)
    requested: set[tuple[str, int]] = field(default_factory=set)
    staged: dict[tuple[str, int], bytes] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.lists) == len(self.wanted) and not self.waiting and not self.requested

    def drop_source(self) -> bytes:
        """The first source is of no use: what it was asked for is to be asked for again."""
        self.waiting.extendleft(sorted(self.requested, reverse=True))
        self.requested.clear()
        return self.sources.popleft()


class StateTransfer:
    """One sync of one peer.

    Args:
        tensors: the shared state by key.
        send: how messages leave.
        report: who is told when the fetch is done or failed.

    Attributes:
        digests: the digest of each tensor, computed now.
        is_written: the sync was committed, and the tensors hold what was elected.
        tx_bytes, rx_bytes: what was sent and received.
    """

    def __init__(self, tensors: Mapping[str, TensorView], send: Send, report: Report) -> None:
        self._tensors = dict(tensors)
        self._send = send
        self._report = report
        self._blocks = {key: digest_blocks(tensor) for key, tensor in self._tensors.items()}
        self.digests = {
            key: tensor_digest(tensor.datatype, tensor.count, self._blocks[key])
            for key, tensor in self._tensors.items()
        }
        self._mailbox: queue.SimpleQueue[_Start | _Delivery | _LinkLost | _End] = queue.SimpleQueue()
        self._plan: _Start | None = None
        self._fetch: _Fetch | None = None
        self._deferred: list[tuple[bytes, ListRequest | BlockRequest]] = []  # Of others, for what is not here yet.
        self.is_written = False
        self.tx_bytes = 0
        self.rx_bytes = 0

    # --- For the peer's loop ----------------------------------------------------------------------------------------

    def start(self, attempt_id: int, sources: tuple[bytes, ...], fetch: dict[str, bytes]) -> None:
        """The plan has come: fetch these tensors, with these digests, from the first source that can; and serve."""
        self._mailbox.put(_Start(attempt_id, sources, fetch))

    def deliver(self, peer: bytes, body: bytes) -> None:
        """A message of another peer has come."""
        self._mailbox.put(_Delivery(peer, body))

    def lose_link(self, peer: bytes) -> None:
        """The link to another peer is gone: what was asked for on it will not come."""
        self._mailbox.put(_LinkLost(peer))

    def end(self, commit: bool) -> None:
        """The sync is over: `run()` returns, after writing what was fetched if it is committed."""
        self._mailbox.put(_End(commit))

    # --- For the thread of the user ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Fetches and serves until the sync is over."""
        while True:
            try:
                item = self._mailbox.get(timeout=limits.SIGNAL_CHECK_INTERVAL_NS / limits.SECOND)
            except queue.Empty:
                item = None
            if isinstance(item, _End):
                if item.commit:
                    self._write()
                return
            if isinstance(item, _Start):
                self._begin(item)
            elif isinstance(item, _Delivery):
                self._on_delivery(item)
            elif isinstance(item, _LinkLost) and self._is_source(item.peer):
                self._turn_away("the link to it was lost")
            self._check_source(time.monotonic_ns())

    def _begin(self, plan: _Start) -> None:
        self._plan = plan
        if plan.fetch:
            fetch = _Fetch(plan.attempt_id, deque(plan.sources), plan.fetch, time.monotonic_ns())
            self._fetch = fetch
            self._ask_source(fetch, b"", "nobody has it")

    def _check_source(self, now_ns: int) -> None:
        fetch = self._fetch
        if fetch is not None and not fetch.is_done:
            is_last = len(fetch.sources) == 1
            timeout_ns = limits.STATE_STALL_TIMEOUT_NS if is_last else limits.STATE_SOURCE_TIMEOUT_NS
            if now_ns - fetch.moved_ns >= timeout_ns:
                self._turn_away("no block has come for too long")

    def _on_delivery(self, delivery: _Delivery) -> None:
        self.rx_bytes += len(delivery.body)
        if self._plan is None:
            return
        try:
            message = _decoder.decode(delivery.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._turn_away("a malformed message came") if self._is_source(delivery.peer) else None
        if isinstance(message, (ListRequest, BlockRequest)):
            return self._serve(delivery.peer, message)
        fetch = self._fetch
        if fetch is None or not self._is_source(delivery.peer):
            return None
        try:
            if isinstance(message, BlockList):
                self._on_list(fetch, message)
            else:
                self._on_block(fetch, message)
        except DamagedBlock as error:
            return self._turn_away(error.message)
        deferred, self._deferred = self._deferred, []
        for peer, request in deferred:
            self._serve(peer, request)
        return None

    def _is_source(self, peer: bytes) -> bool:
        """True for the peer that was asked for what is missing."""
        fetch = self._fetch
        return fetch is not None and not fetch.is_done and fetch.sources[0] == peer

    # --- Serving ----------------------------------------------------------------------------------------------------

    def _serve(self, peer: bytes, request: ListRequest | BlockRequest) -> None:
        assert self._plan is not None
        digests = self._digests_to_serve(request.key)
        if digests is None:
            if self._fetch is not None and request.key in self._fetch.wanted:
                self._deferred.append((peer, request))
            return
        answer: BlockList | Block
        if isinstance(request, ListRequest):
            answer = BlockList(request.key, b"".join(digests))
        elif 0 <= request.index < len(digests):
            block = self._block_to_serve(request, digests)
            if block is None:
                return self._deferred.append((peer, request))
            data = compress(block, self._tensors[request.key].datatype.itemsize)
            answer = Block(request.key, request.index, data)
        else:
            return
        try:
            self._transmit(peer, self._plan.attempt_id, answer)
        except OSError:
            pass  # The fetcher is gone, or turns to another.

    def _digests_to_serve(self, key: str) -> Sequence[bytes] | None:
        """Those of the elected contents; None if they are not here, or not yet."""
        fetch = self._fetch
        return fetch.lists.get(key) if fetch is not None and key in fetch.wanted else self._blocks.get(key)

    def _block_to_serve(self, request: BlockRequest, digests: Sequence[bytes]) -> memoryview | None:
        key, index = request.key, request.index
        if digests[index] == self._blocks[key][index]:
            return block_view(self._tensors[key], index)
        staged = self._fetch.staged.get((key, index)) if self._fetch is not None else None
        return memoryview(staged) if staged is not None else None

    # --- Fetching ---------------------------------------------------------------------------------------------------

    def _on_list(self, fetch: _Fetch, message: BlockList) -> None:
        key = message.key
        if key not in fetch.wanted or key in fetch.lists:
            return
        tensor = self._tensors[key]
        digests = tuple(message.digests[i : i + 32] for i in range(0, len(message.digests), 32))
        if (
            len(digests) != block_count(tensor.nbytes)
            or tensor_digest(tensor.datatype, tensor.count, digests) != fetch.wanted[key]
        ):
            raise DamagedBlock(f"the block digests of {key!r} do not match the digest that was elected")
        fetch.moved_ns = time.monotonic_ns()
        fetch.lists[key] = digests
        own = self._blocks[key]
        fetch.waiting.extend((key, index) for index, digest in enumerate(digests) if digest != own[index])
        self._request_more(fetch)

    def _on_block(self, fetch: _Fetch, message: Block) -> None:
        place = (message.key, message.index)
        if place not in fetch.requested:
            return
        size = len(block_view(self._tensors[message.key], message.index))
        fetch.staged[place] = decompress(message.data, size, fetch.lists[message.key][message.index])
        fetch.moved_ns = time.monotonic_ns()
        fetch.requested.remove(place)
        self._request_more(fetch)

    def _request_more(self, fetch: _Fetch) -> None:
        try:
            self._request_blocks(fetch)
        except OSError as error:
            return self._turn_away(f"cannot ask for state: {error.strerror}")
        if fetch.is_done:
            self._report(fetch.attempt_id, "", None)

    def _request_blocks(self, fetch: _Fetch) -> None:
        while fetch.waiting and len(fetch.requested) < limits.STATE_REQUESTS_IN_FLIGHT:
            place = fetch.waiting.popleft()
            fetch.requested.add(place)
            self._transmit(fetch.sources[0], fetch.attempt_id, BlockRequest(*place))

    def _turn_away(self, reason: str) -> None:
        """The source is of no use: asks the next one."""
        fetch = self._fetch
        assert fetch is not None and not fetch.is_done
        self._ask_source(fetch, fetch.drop_source(), reason)

    def _ask_source(self, fetch: _Fetch, blamed: bytes, reason: str) -> None:
        """Asks a source for all that is missing. Gives the fetch up where there is none that can be asked."""
        while fetch.sources:
            fetch.moved_ns = time.monotonic_ns()
            try:
                for key in fetch.wanted:
                    if key not in fetch.lists:
                        self._transmit(fetch.sources[0], fetch.attempt_id, ListRequest(key))
                return self._request_blocks(fetch)
            except OSError as error:
                blamed, reason = fetch.drop_source(), f"cannot ask for state: {error.strerror}"
        self._fetch = None
        self._report(fetch.attempt_id, reason, blamed or None)

    def _transmit(self, peer: bytes, channel: int, message: _TransferMessage) -> None:
        body = _encode(message)
        self._send(peer, channel, body)
        self.tx_bytes += len(body)

    def _write(self) -> None:
        """Writes what was fetched: all of it, also when Ctrl-C comes in between."""
        staged = self._fetch.staged if self._fetch is not None else {}
        interrupt: KeyboardInterrupt | None = None
        while not self.is_written:
            try:
                for (key, index), block in staged.items():
                    block_view(self._tensors[key], index)[:] = block
                self.is_written = True
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
