"""Offers without a network: lent tensors, and the messages to each peer. tests/test_offers.py tests the whole."""

from __future__ import annotations

import re
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from interpreter import without_collector

from zpccl import limits
from zpccl.engine.engine import Body, Engine
from zpccl.errors import InternalError, InvalidUsage
from zpccl.limits import MIB, SECOND
from zpccl.state import offers as offers_module
from zpccl.state.contents import Contents
from zpccl.state.digests import DIGEST_BYTES
from zpccl.state.offers import (
    CHANNEL,
    Catalog,
    CatalogEntry,
    CopyPool,
    LentRegion,
    MessageKind,
    Offer,
    Offers,
    Prefetch,
)
from zpccl.state.regions import region
from zpccl.state.transfer import OFFER_ENDED, StateTransfer
from zpccl.state.workers import wait_for_end
from zpccl.types import DigestKind

HEAD = struct.Struct(">BQ")
A, B = b"a" * 16, b"b" * 16
WAIT_S = 30


def tensor(value: int, size: int = 3 * MIB) -> np.ndarray[Any, Any]:
    return np.full(size, value, np.uint8)


def lent(array: np.ndarray[Any, Any], pool: CopyPool | None = None) -> LentRegion:
    return LentRegion(region(array, "w"), pool or CopyPool())


def test_a_tensor_is_read_itself_until_it_is_detached() -> None:
    array = tensor(1)
    one = lent(array)
    before = one.read(MIB, 4)
    array[:] = 2
    assert bytes(before) == b"\x01" * 4, "what was read is a copy: the user may write at any time"
    assert bytes(one.read(MIB, 4)) == b"\x02" * 4
    one.detach()
    array[:] = 3
    one.detach()
    assert b"".join(map(bytes, one.pieces(0, one.nbytes, MIB))) == b"\x02" * one.nbytes


def test_memory_of_copies_is_used_again() -> None:
    pool = CopyPool()
    first = lent(tensor(1), pool)
    first.detach()
    first.give_back()
    first.give_back()
    again, another, of_another_size = pool.take(first.nbytes), pool.take(first.nbytes), pool.take(5)
    assert [memory[:2] for memory in (again, another, of_another_size)] == [b"\x01\x01", bytes(2), bytes(2)]


def test_there_is_no_memory_for_a_copy() -> None:
    with pytest.raises(InternalError, match="memory for the copy"):
        CopyPool().take(2**60)


def test_memory_of_copies_may_have_huge_pages() -> None:
    """Shared memory has none, unless the system says so, and a copy to new memory then takes three times as long."""
    memory = CopyPool().take(4 * MIB)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last, rights = re.split("[- ]", line, maxsplit=2)
        if int(first, 16) <= address < int(last, 16):
            assert rights.startswith("rw-p")
            break
    else:
        raise AssertionError("it is not mapped")


class Net(Engine):
    """Records the messages about offers: (peer, kind, number, the rest)."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[tuple[bytes, MessageKind, int, bytes]] = []
        self.has_offer = threading.Event()
        self.lost: set[bytes] = set()

    def post_message(self, peer: bytes, channel_id: int, head: Any, body: Any, queue_bytes_max: int) -> bool:
        assert channel_id == CHANNEL
        if peer in self.lost:
            raise ConnectionError("no link")
        data = bytes(head) + bytes(body)
        kind, number = HEAD.unpack_from(data)
        self.posted.append((peer, MessageKind(kind), number, data[HEAD.size :]))
        if kind == MessageKind.TOLD and number:
            self.has_offer.set()
        return True


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    net.close()


@pytest.fixture
def offers(net: Net) -> Iterator[Offers]:
    made = Offers(net, 6)
    yield made
    made.close()


class Message(Body):
    """A received message."""

    def __init__(self, data: bytes) -> None:
        self.data: bytes | None = data

    def read(self) -> bytes:
        data, self.data = self.data, None
        assert data is not None, "released twice"
        return data

    def release(self) -> None:
        self.data = None


def message(kind: int, number: int, rest: bytes = b"") -> Message:
    return Message(HEAD.pack(kind, number) + rest)


@pytest.mark.parametrize(
    "junk", [b"", b"short", bytes(9), bytes([1]) + bytes(7) + b"\x01junk", b"\x02" * 9, b"\xff" * 40]
)
def test_nonsense_about_offers(net: Net, junk: bytes) -> None:
    """S6: it is dropped, and the offer stays."""
    offers, body = Offers(net, 6), Message(junk)
    one, array = offer(offers, tensor(1)), tensor(2)
    offers.make_prefetch({"w": region(array, "w")}, (), DigestKind.BLAKE3, time.monotonic_ns() + 60 * SECOND)
    offers.on_message(A, body)
    offers.on_message(B, message(MessageKind.ASK, 0))
    assert net.has_offer.wait(WAIT_S) and body.data is None and one.is_open
    offers.close()
    assert told(net, B) == [(MessageKind.TOLD, one.number), (MessageKind.GONE, one.number)]


def offer(offers: Offers, array: np.ndarray[Any, Any], revision: int = 4) -> Offer:
    return offers.offer(revision, {"w": region(array, "w")}, (), DigestKind.BLAKE3, None, copy=True)


def test_one_name_of_tied_tensors_is_enough_before_a_write(net: Net) -> None:
    """Otherwise the block of the other name would have changed, and the offer would end."""
    offers, array = Offers(net, 6), tensor(1)
    regions = {name: region(array, name) for name in "uv"} | {"w": region(tensor(1), "w")}
    one = offers.offer(4, regions, (), DigestKind.BLAKE3, None, copy=False)
    one.before_write("v")
    array[:] = 2
    assert [bytes(each.read(0, 1)) for each in one._regions.values()] == [b"\x01"] * 3
    assert [bool(each._copy) for each in one._regions.values()] == [True, True, False]
    offers.close()


def ask(net: Net, offers: Offers, peer: bytes = A) -> None:
    """A peer asks, and is told of the offer."""
    offers.on_message(peer, message(MessageKind.ASK, 0))
    assert net.has_offer.wait(WAIT_S)


def told(net: Net, peer: bytes) -> list[tuple[MessageKind, int]]:
    return [(kind, number) for to, kind, number, _ in net.posted if to == peer]


def test_who_asks_is_told_and_hears_of_the_end(net: Net, offers: Offers) -> None:
    question = message(MessageKind.ASK, 0)
    offers.on_message(A, question)
    assert (told(net, A), question.data) == ([(MessageKind.TOLD, 0)], None)
    one = offer(offers, tensor(1))
    ask(net, offers)
    offers.on_message(B, message(MessageKind.ASK, 0))
    offers.lose_link(B)
    net.lost.add(B)
    one.withdraw()
    assert told(net, A) == [(MessageKind.TOLD, 0), (MessageKind.TOLD, one.number), (MessageKind.GONE, one.number)]
    assert told(net, B) == [(MessageKind.TOLD, one.number)]
    offers.close()
    with pytest.raises(InvalidUsage):
        offer(offers, tensor(1))


def test_who_asks_while_an_offer_is_made_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch, net: Net, offers: Offers
) -> None:
    """No peer may conclude that there is no offer while one offer replaces another."""
    first, detach = offer(offers, tensor(1)), LentRegion.detach

    def ask_first(self: LentRegion) -> None:
        offers.on_message(A, message(MessageKind.ASK, 0))
        assert told(net, A) == []
        detach(self)

    monkeypatch.setattr(LentRegion, "detach", ask_first)
    second = offer(offers, tensor(2))
    assert net.has_offer.wait(WAIT_S)
    second.withdraw()
    assert not first.is_open
    assert told(net, A) == [(MessageKind.TOLD, second.number), (MessageKind.GONE, second.number)]


def test_the_end_of_an_offer_overtakes_the_offer(net: Net) -> None:
    """One message may overtake another, and an offer may end before its catalog is sent. A joiner does not wait for an
    ended offer; there may be another one."""
    own = prefetch(net, tensor(1), A)
    own.on_gone(A, 9)
    assert told(net, A) == [(MessageKind.ASK, 0)] * 2
    own.on_told(A, 9, Catalog(4, DigestKind.BLAKE3, ()))
    own.on_told(A, 0, None)
    own.on_gone(A, 10)
    own.on_told(A, 0, None)
    assert own.run() is None
    assert told(net, A) == [(MessageKind.ASK, 0)] * 3


def prefetch(net: Net, array: np.ndarray[Any, Any], *members: bytes) -> Prefetch:
    """A prefetch with links to these members."""
    deadline_ns = time.monotonic_ns() + 60 * SECOND
    made = Prefetch({"w": region(array, "w")}, (), DigestKind.BLAKE3, deadline_ns, net)
    if members:
        made.on_peers(members)
    for member in members:
        made.on_link_up(member)
    return made


def catalog_of(array: np.ndarray[Any, Any], digest: bytes = bytes(DIGEST_BYTES)) -> Catalog:
    """What a member says of an offer of this tensor, at revision 4."""
    memory = region(array, "w")
    entry = CatalogEntry("w", int(memory.datatype), memory.count, False, digest)
    return Catalog(4, DigestKind.BLAKE3, (entry,))


@pytest.mark.parametrize("when", ["serving", "digesting"])
def test_nothing_is_left_of_an_offer_without_a_collection_of_garbage(
    monkeypatch: pytest.MonkeyPatch, net: Net, when: str
) -> None:
    """B1: a descriptor, and the tensors. Programs that collect garbage seldom, or never, make thousands of offers."""
    offers, array, over = Offers(net, 6), tensor(1), threading.Event()

    def make(*arguments: Any, **keywords: Any) -> StateTransfer:
        transfer = StateTransfer(*arguments, **keywords)
        made.append(weakref.ref(transfer))
        assert when == "serving" or over.wait(WAIT_S)
        return transfer

    made: list[weakref.ref[StateTransfer]] = []
    monkeypatch.setattr(offers_module, "StateTransfer", make)
    with without_collector():
        one = offers.offer(4, {"w": region(array, "w")}, (), DigestKind.BLAKE3, None, copy=False)
        if when == "serving":
            ask(net, offers)
        one.end()
        over.set()
        offers.withdraw()
        left: list[weakref.ref[Any]] = [weakref.ref(one), weakref.ref(array), *made]
        del one, array
        assert [each() for each in left] == [None, None, None]


def test_who_offers_the_contents_of_another_tensor_is_no_source(net: Net) -> None:
    """Contents are compared by key. Otherwise peers with the right contents would seem to send wrong bytes."""
    regions = {key: region(tensor(1), key) for key in "vw"}
    own = Prefetch(regions, (), DigestKind.BLAKE3, time.monotonic_ns() + 60 * SECOND, net)
    own.on_peers((A, B))
    for peer, keys in ((A, "vw"), (B, "wv")):
        own.on_link_up(peer)
        entries = [
            CatalogEntry(key, int(regions[key].datatype), regions[key].count, False, bytes([number]) * DIGEST_BYTES)
            for number, key in enumerate(keys)
        ]
        own.on_told(peer, 9, Catalog(4, DigestKind.BLAKE3, tuple(entries)))
    best = own._best()
    assert best is not None and len(best) == 1


def test_a_prefetch_ends_at_once_where_nobody_is_or_offers(net: Net) -> None:
    array = tensor(1)
    alone = prefetch(net, array)
    alone.on_peers(())
    assert alone.run() is None
    other = prefetch(net, array, A, B)
    other.on_told(A, 0, None)
    other.on_peer_gone(B)
    assert other.run() is None
    assert told(net, A) == told(net, B) == [(MessageKind.ASK, 0)]


def joiner(net: Net, monkeypatch: pytest.MonkeyPatch) -> tuple[Prefetch, Catalog]:
    """Asks A, which has not answered in time. Also returns what A may offer: what the joiner has, at revision 4."""
    monkeypatch.setattr(limits, "OFFER_ANSWER_TIMEOUT_NS", 1)
    array = tensor(1)
    own = prefetch(net, array, A)
    return own, catalog_of(array, Contents({"w": region(array, "w")}, DigestKind.BLAKE3).digests["w"])


def test_a_joiner_waits_for_an_offer_that_is_being_made(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: a member that copies a large state answers after that. Without it, all members would wait for the fetch."""
    own, catalog = joiner(net, monkeypatch)

    def wait(seconds: float) -> None:
        assert seconds > 0
        own.on_told(A, 9, catalog)

    monkeypatch.setattr(own._changed, "wait", wait)
    assert own.run() == 4


def test_a_member_that_never_answers_is_given_up(
    net: Net, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """L1. The log says so."""
    own, _ = joiner(net, monkeypatch)
    monkeypatch.setattr(limits, "OFFER_MAKING_TIMEOUT_NS", 1)
    assert own.run() is None
    assert "no member has offered a state in time" in caplog.text


def test_what_came_over_a_lost_link_does_not_end_a_prefetch(net: Net) -> None:
    """The engine tells of the end of a link before the messages that it has brought. It will come up again."""
    array = tensor(1)
    own, catalog = prefetch(net, array, A), catalog_of(array)
    own.lose_link(A)
    own.on_told(A, 9, catalog)
    own._answers_due_ns = own._deadline_ns = time.monotonic_ns() + SECOND // 5
    assert own.run() is None and time.monotonic_ns() >= own._deadline_ns
    own.on_link_up(A)
    own.on_told(A, 10, catalog)
    assert own._best() == {A: catalog}


def test_a_prefetch_that_is_stopped(net: Net) -> None:
    stopped = prefetch(net, tensor(1))
    stopped.stop()
    assert stopped.run() is None


def test_nothing_is_left_of_a_fetch_that_is_stopped_before_it_begins(monkeypatch: pytest.MonkeyPatch, net: Net) -> None:
    """B1: a descriptor, and the tensor."""
    made: list[weakref.ref[StateTransfer]] = []

    def make(*arguments: Any, **keywords: Any) -> StateTransfer:
        transfer = StateTransfer(*arguments, **keywords)
        made.append(weakref.ref(transfer))
        own.stop()
        return transfer

    monkeypatch.setattr(offers_module, "StateTransfer", make)
    own = prefetch(net, tensor(1), A)
    own.on_told(A, 9, catalog_of(tensor(1)))
    with without_collector():
        assert own.run() is None
        assert [each() for each in made] == [None]


def test_what_is_here_already_is_not_fetched(net: Net, offers: Offers) -> None:
    """The contents equal the offered ones: the joiner takes the revision, and asks nobody for anything."""
    array = tensor(1)
    one = offer(offers, array)
    ask(net, offers)
    (catalog,) = (rest for _, kind, _, rest in net.posted if kind is MessageKind.TOLD)
    one.withdraw()
    own = offers.make_prefetch({"w": region(array, "w")}, (), DigestKind.BLAKE3, time.monotonic_ns() + 60 * SECOND)
    own.on_peers((B,))
    own.on_link_up(B)
    offers.on_message(B, message(MessageKind.TOLD, one.number, catalog))
    assert own.run() == 4
    assert told(net, B) == [(MessageKind.ASK, 0)]


@pytest.mark.parametrize("kind", DigestKind)
def test_another_state_does_not_suit(net: Net, kind: DigestKind) -> None:
    """The joiner leaves the state alone: the sync will report the difference."""
    own = prefetch(net, tensor(1), A)
    own.on_told(A, 9, Catalog(4, kind, ()))
    assert own.run() is None


def test_memory_of_copies_of_another_size_is_unmapped(offers: Offers) -> None:
    """B1: a state whose tensors change their sizes is kept once, not once for each former size."""
    for size in (3, 3, 2, 5):
        offer(offers, tensor(1, size * MIB))
        assert not any(offers._pool._free.values())
    regions = {name: region(tensor(1, 5 * MIB), name) for name in "uv"}
    offers.offer(4, regions, (), DigestKind.BLAKE3, None, copy=False)
    assert {size: len(free) for size, free in offers._pool._free.items()} == {5 * MIB: 1}, (
        "the next before_write() uses it"
    )


@pytest.mark.parametrize("is_in_use", [True, False])
def test_memory_of_copies_is_unmapped_when_the_loop_ends(offers: Offers, is_in_use: bool) -> None:
    """B1: a peer that was removed connects again, with another loop, and the next offer makes other copies."""
    one = offer(offers, tensor(1))
    if not is_in_use:
        one.withdraw()
        assert offers._pool._free
    offers.close()
    wait_for_end(one._thread, one._ended)
    assert not offers._pool._free


def test_an_offer_whose_thread_cannot_be_started_is_none(
    monkeypatch: pytest.MonkeyPatch, net: Net, offers: Offers
) -> None:
    """L1: a joiner that asks hears that there is no offer, and does not wait."""

    def refuse(self: Offer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Offer, "start", refuse)
    with pytest.raises(RuntimeError):
        offer(offers, tensor(1))
    offers.on_message(A, message(MessageKind.ASK, 0))
    assert told(net, A) == [(MessageKind.TOLD, 0)]


def test_a_catalog_is_not_decoded_where_nothing_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch, net: Net) -> None:
    """S6: a pending peer may send long ones without end, and the loop answers no call while it decodes one."""
    monkeypatch.setattr(offers_module, "_decoder", None)
    offers, body = Offers(net, 6), message(MessageKind.TOLD, 9, b"long")
    offers.on_message(A, body)
    assert body.data is None
    offers.close()


def test_who_is_not_asked_tells_nothing(monkeypatch: pytest.MonkeyPatch, net: Net, offers: Offers) -> None:
    """A pending peer, so in a run without a secret anybody, could tell of the highest revision."""
    array = tensor(1)
    offer(offers, array, 2**40)
    ask(net, offers)
    ((number, catalog),) = ((number, rest) for _, kind, number, rest in net.posted if kind is MessageKind.TOLD)
    offers.close()
    own = offers.make_prefetch({"w": region(array, "w")}, (), DigestKind.BLAKE3, time.monotonic_ns() + 60 * SECOND)
    offers.on_peers((A,))
    for peer in (A, B):
        offers.on_link_up(peer)
    monkeypatch.setattr(offers_module, "_decoder", None)  # Catalogs are long.
    offers.on_message(B, message(MessageKind.TOLD, number, catalog))
    offers.on_message(A, message(MessageKind.TOLD, 0))
    assert own.run() is None


def test_malformed_messages_are_logged_once_a_sender(offers: Offers, caplog: pytest.LogCaptureFixture) -> None:
    """B2: the log does not grow with what a hostile peer sends."""
    for peer in (A, B, A, B, A):
        offers.on_message(peer, Message(b"junk"))
    assert sum("malformed" in record.message for record in caplog.records) == 2


def test_malformed_messages_of_a_peer_that_comes_back_all_the_time_have_a_bound(
    offers: Offers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: it sends one on each of its links."""
    monkeypatch.setattr(limits, "LOG_LINES_MAX", 8)
    for _ in range(20):
        offers.on_link_up(A)
        offers.on_message(A, Message(b"junk"))
        offers.lose_link(A)
    assert len(caplog.records) == 8


@pytest.mark.parametrize("has_changed", [True, False])
def test_advice_is_given_where_it_helps(
    net: Net, offers: Offers, caplog: pytest.LogCaptureFixture, has_changed: bool
) -> None:
    one = offer(offers, tensor(1))
    offers.on_message(A, message(MessageKind.ASK, 0))
    assert net.has_offer.wait(WAIT_S) and one._transfer is not None
    one._transfer.has_changed = has_changed
    one._report(1, "why")
    assert one.error == "why" and ("before_write" in caplog.text) == has_changed


def test_an_offer_for_which_there_is_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, net: Net, offers: Offers, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no bug, and who asks hears that there is no offer."""
    monkeypatch.setattr(offers_module, "StateTransfer", Mock(side_effect=InternalError("no descriptor")))
    one = offer(offers, tensor(1))
    wait_for_end(one._thread, one._ended)
    assert one.error == "no descriptor" and not one.is_open and "no descriptor" in caplog.text
    assert "bug" not in caplog.text
    offers.on_message(A, message(MessageKind.ASK, 0))
    assert told(net, A) == [(MessageKind.TOLD, 0)]


def test_the_end_of_an_offer_is_no_loss_of_a_link(net: Net) -> None:
    own, transfer = prefetch(net, tensor(1)), Mock()
    own._transfer = transfer
    own.on_gone(A, 9)
    transfer.lose_link.assert_called_once_with(A, OFFER_ENDED)
