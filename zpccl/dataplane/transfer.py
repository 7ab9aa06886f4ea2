"""Moving shared state: the part of one peer in one sync.

A `StateTransfer` belongs to the thread of the user that called sync_shared_state: that thread runs `run()`, and alone
touches the tensors. The peer's loop only puts things into its mailbox: the plan, messages of others, the end.

A fetcher asks a holder for the list of block digests of a key, checks the list against the elected digest, asks for the
blocks that differ from its own, a few ahead, and checks each. What it got is kept aside and written in place only when
the sync is committed: all or nothing, at the price of memory for the blocks that differ.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping
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
    holders: tuple[bytes, ...]
    fetch: dict[str, bytes]


@dataclass(frozen=True)
class _Delivery:
    peer: bytes
    body: bytes


@dataclass(frozen=True)
class _End:
    commit: bool


@dataclass
class _Fetch:
    """What is being fetched: lists that are due, blocks to ask for, blocks asked for, blocks got."""

    attempt_id: int
    holder: bytes
    wanted: dict[str, bytes]
    lists: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    waiting: deque[tuple[str, int]] = field(default_factory=deque)
    requested: set[tuple[str, int]] = field(default_factory=set)
    staged: dict[tuple[str, int], bytes] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.lists) == len(self.wanted) and not self.waiting and not self.requested


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
        self._mailbox: queue.SimpleQueue[_Start | _Delivery | _End] = queue.SimpleQueue()
        self._plan: _Start | None = None
        self._fetch: _Fetch | None = None
        self.is_written = False
        self.tx_bytes = 0
        self.rx_bytes = 0

    # --- For the peer's loop ----------------------------------------------------------------------------------------

    def start(self, attempt_id: int, holders: tuple[bytes, ...], fetch: dict[str, bytes]) -> None:
        """The plan has come: fetch these tensors, with these digests, from one of the holders; or serve."""
        self._mailbox.put(_Start(attempt_id, holders, fetch))

    def deliver(self, peer: bytes, body: bytes) -> None:
        """A message of another peer has come."""
        self._mailbox.put(_Delivery(peer, body))

    def end(self, commit: bool) -> None:
        """The sync is over: `run()` returns, after writing what was fetched if it is committed."""
        self._mailbox.put(_End(commit))

    # --- For the thread of the user ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Fetches and serves until the sync is over."""
        idle_ns = 0
        while True:
            try:
                item = self._mailbox.get(timeout=limits.SIGNAL_CHECK_INTERVAL_NS / limits.SECOND)
            except queue.Empty:
                idle_ns += limits.SIGNAL_CHECK_INTERVAL_NS
                if idle_ns >= limits.STATE_STALL_TIMEOUT_NS:
                    self._fail("no block has come for too long")
                continue
            idle_ns = 0
            if isinstance(item, _End):
                if item.commit:
                    self._write()
                return
            if isinstance(item, _Start):
                self._begin(item)
            else:
                self._on_delivery(item)

    def _begin(self, plan: _Start) -> None:
        self._plan = plan
        if not plan.fetch:
            return
        fetch = self._fetch = _Fetch(plan.attempt_id, plan.holders[0], plan.fetch)
        for key in plan.fetch:
            if self._fetch is fetch:  # Else it has failed.
                self._ask(fetch, ListRequest(key))

    def _on_delivery(self, delivery: _Delivery) -> None:
        self.rx_bytes += len(delivery.body)
        if self._plan is None:
            return
        try:
            message = _decoder.decode(delivery.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._fail("a malformed message came") if self._is_holder(delivery.peer) else None
        if isinstance(message, (ListRequest, BlockRequest)):
            return self._serve(delivery.peer, message, self._plan.attempt_id)
        fetch = self._fetch
        if fetch is None or not self._is_holder(delivery.peer):
            return None
        try:
            if isinstance(message, BlockList):
                self._on_list(fetch, message)
            else:
                self._on_block(fetch, message)
        except DamagedBlock as error:
            self._fail(error.message)
        return None

    def _is_holder(self, peer: bytes) -> bool:
        return self._fetch is not None and self._fetch.holder == peer

    def _serve(self, peer: bytes, request: ListRequest | BlockRequest, channel: int) -> None:
        blocks = self._blocks.get(request.key)
        if blocks is None:
            return
        answer: BlockList | Block
        if isinstance(request, ListRequest):
            answer = BlockList(request.key, b"".join(blocks))
        elif 0 <= request.index < len(blocks):
            tensor = self._tensors[request.key]
            data = compress(block_view(tensor, request.index), tensor.datatype.itemsize)
            answer = Block(request.key, request.index, data)
        else:
            return
        try:
            self._transmit(peer, channel, answer)
        except OSError:
            pass  # The fetcher is gone; the master decides what that means.

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
        fetch.lists[key] = digests
        own = self._blocks[key]
        fetch.waiting.extend((key, index) for index, digest in enumerate(digests) if digest != own[index])
        self._request_more(fetch)

    def _on_block(self, fetch: _Fetch, message: Block) -> None:
        place = (message.key, message.index)
        if place not in fetch.requested:
            return
        fetch.requested.remove(place)
        size = len(block_view(self._tensors[message.key], message.index))
        fetch.staged[place] = decompress(message.data, size, fetch.lists[message.key][message.index])
        self._request_more(fetch)

    def _request_more(self, fetch: _Fetch) -> None:
        while self._fetch is fetch and fetch.waiting and len(fetch.requested) < limits.STATE_REQUESTS_IN_FLIGHT:
            place = fetch.waiting.popleft()
            fetch.requested.add(place)
            self._ask(fetch, BlockRequest(*place))
        if fetch.is_done:
            self._report(fetch.attempt_id, "", None)

    def _ask(self, fetch: _Fetch, message: ListRequest | BlockRequest) -> None:
        try:
            self._transmit(fetch.holder, fetch.attempt_id, message)
        except OSError as error:
            self._fail(f"cannot ask for state: {error.strerror}")

    def _transmit(self, peer: bytes, channel: int, message: _TransferMessage) -> None:
        body = _encode(message)
        self._send(peer, channel, body)
        self.tx_bytes += len(body)

    def _fail(self, reason: str) -> None:
        """Gives the fetch up, unless it is done and only waits for the decision."""
        fetch = self._fetch
        if fetch is not None and not fetch.is_done:
            self._fetch = None
            self._report(fetch.attempt_id, reason, fetch.holder)

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
