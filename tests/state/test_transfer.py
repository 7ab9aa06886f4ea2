"""State transfers between peers of one process, over a network that a test can disturb."""

from __future__ import annotations

import logging
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from interpreter import without_collector

from zpccl import limits
from zpccl.engine.engine import Body, MessageReceived, Writable
from zpccl.limits import STATE_BLOCK_BYTES
from zpccl.state import messages
from zpccl.state.contents import Contents
from zpccl.state.messages import BlockList, Have, Request, Want
from zpccl.state.regions import HostRegion, region
from zpccl.state.transfer import OFFER_ENDED, StateTransfer
from zpccl.state.workers import Workers
from zpccl.types import DigestKind

CHANNEL = 7
COUNT = 6
"""Number of blocks of the tensor `w` of all peers, unless a test says otherwise."""
SIZE = COUNT * STATE_BLOCK_BYTES


class Message:
    """The body of a message, in memory that nobody owns."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.is_released = False

    def __len__(self) -> int:
        return len(self.data)

    @contextmanager
    def held(self) -> Iterator[None]:
        assert not self.is_released
        yield

    def view(self) -> memoryview:
        return memoryview(self.data)

    def release(self) -> None:
        assert not self.is_released, "released twice"
        self.is_released = True


def blocks_in(data: bytes) -> list[tuple[int, int]]:
    """The places of the blocks of a message."""
    view = memoryview(data)
    return [place for place, _, _ in messages.parse_blocks(view)] if messages.has_blocks(view) else []


class Net:
    """Transfers by name, each in a thread, and links between them that a test can break.

    Args:
        arrays: the tensors of each peer by key; or a number: a tensor `w` in which every byte is this number.
    """

    def __init__(self, **arrays: int | dict[str, np.ndarray[Any, Any]]) -> None:
        self.arrays = {
            name: {"w": np.full(SIZE, held, np.uint8)} if isinstance(held, int) else held
            for name, held in arrays.items()
        }
        self.before = {name: {key: array.copy() for key, array in held.items()} for name, held in self.arrays.items()}
        self.broken: set[frozenset[str]] = set()
        self.deaf: set[str] = set()
        self.full: set[str] = set()  # Names of peers whose links have no room.
        self.refused = threading.Event()  # A message was not sent for lack of room.
        self.moved: list[tuple[int, int]] = []  # Bytes done and expected, as the fetcher hears them.
        self.reports: dict[str, list[tuple[str, bytes | None, dict[bytes, str]]]] = {name: [] for name in arrays}
        self.reported = {name: threading.Event() for name in arrays}
        self.sent: dict[str, int] = dict.fromkeys(arrays, 0)
        self.bodies: list[weakref.ref[Message]] = []
        self.spoil: Callable[[str, bytes], bytes] = lambda sender, data: data
        self.before_a: str | None = None  # a sends nothing before blocks or spoiled bytes of this peer have arrived.
        self.may_send_a = threading.Event()
        self.on_block: Callable[[str, str], None] = lambda sender, receiver: None
        self.lock = threading.Lock()
        self.transfers = {
            name: StateTransfer(
                {k: region(a, k) for k, a in held.items()},
                self._sender(name),
                self._reporter(name),
                own_id=name.encode(),
                on_moved=lambda done, expected: self.moved.append((done, expected)),
            )
            for name, held in self.arrays.items()
        }
        self.threads = [threading.Thread(target=each.run) for each in self.transfers.values()]

    def _sender(self, name: str) -> Callable[[bytes, int, Any, Any, int], bool]:
        def post(peer: bytes, channel: int, head: Any, body: Any, queued_max: int) -> bool:
            assert channel == CHANNEL and queued_max > 0
            receiver, data = peer.decode(), bytes(head) + bytes(body)
            if {name, receiver} in self.broken:
                raise OSError(107, "no link")
            count = len(blocks_in(data))
            if count and receiver in self.full:
                self.refused.set()
                return False
            if name == "a" and self.before_a is not None:
                assert self.may_send_a.wait(30)
            with self.lock:
                self.sent[name] += count
            if count:
                self.on_block(name, receiver)
            spoiled = self.spoil(name, data)
            if receiver not in self.deaf:
                self.put(name, receiver, spoiled)
            if name == self.before_a and (count or spoiled != data):
                self.may_send_a.set()
            return True

        return post

    def put(self, sender: str, receiver: str, data: bytes) -> None:
        """Delivers a message."""
        message = Message(data)
        self.bodies.append(weakref.ref(message))
        self.transfers[receiver].mailbox.put(MessageReceived(sender.encode(), CHANNEL, cast(Body, message)))

    def _reporter(self, name: str) -> Callable[[int, str, bytes | None, Any], None]:
        def report(attempt_id: int, error: str, fault: bytes | None, dropped: Any) -> None:
            assert attempt_id == CHANNEL
            self.reports[name].append((error, fault, dict(dropped)))
            self.reported[name].set()

        return report

    def cut(self, one: str, other: str) -> None:
        """The link breaks, and both ends notice."""
        self.broken.add(frozenset((one, other)))
        self.transfers[one].lose_link(other.encode())
        self.transfers[other].lose_link(one.encode())

    def start(self, partial_seeds: str = "", **sources: str) -> None:
        """Each peer named in `sources` fetches a's state from these sources and from the other partial seeds."""
        NETS.append(self)
        for name, each in self.transfers.items():
            fetch = {}
            if name in sources:
                fetch = {key: value for key, value in self.transfers["a"].digests.items() if each.digests[key] != value}
            others = tuple(peer.encode() for peer in partial_seeds if peer != name) if name in sources else ()
            begin = partial_seeds.find(name) / len(partial_seeds) if name in partial_seeds else 0.0
            each.start(CHANNEL, tuple(s.encode() for s in sources.get(name, "")), others, fetch, begin)
        for thread in self.threads:
            thread.start()

    def wait(self, names: str) -> None:
        """Waits until these peers have reported that they have everything."""
        for name in names:
            assert self.reported[name].wait(30), f"{name} does not report"
            assert [error for error, _, _ in self.reports[name]] == [""]

    def end(self, commit: bool = True) -> None:
        NETS.remove(self)
        for each in self.transfers.values():
            each.end(commit)
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        for each in self.transfers.values():
            while each.mailbox.take(0):  # Later messages end with the transfer.
                pass
        kept = [body() for body in self.bodies]
        assert all(body is None or body.is_released for body in kept), "a message is neither released nor dropped"
        assert not [thread for thread in threading.enumerate() if thread.name == "zpccl-state"]

    def sync(self, partial_seeds: str = "", **sources: str) -> None:
        """A sync that is committed: each peer named in `sources` holds a's state then."""
        self.start(partial_seeds, **sources)
        self.wait("".join(sources))
        self.end()
        assert all(self.holds_all(name) for name in sources)

    def fail(self, partial_seeds: str = "", **sources: str) -> list[tuple[str, bytes | None, dict[bytes, str]]]:
        """A sync that fails, and changes nothing. Returns the report of each peer named in `sources`."""
        self.start(partial_seeds, **sources)
        for name in sources:
            assert self.reported[name].wait(30)
        self.end(commit=False)
        assert all(self.is_as_before(name) for name in sources)
        reports = [self.reports[name] for name in sources]
        assert all(len(of_peer) == 1 for of_peer in reports)
        return [report for (report,) in reports]

    def is_as_before(self, name: str) -> bool:
        return all(np.array_equal(array, self.before[name][key]) for key, array in self.arrays[name].items())

    def holds_all(self, name: str) -> bool:
        return all(np.array_equal(array, self.before["a"][key]) for key, array in self.arrays[name].items())


NETS: list[Net] = []
"""The running nets."""


@pytest.fixture(autouse=True)
def all_end() -> Iterator[None]:
    """A test that fails leaves no threads behind for the next test."""
    yield
    for net in list(NETS):
        net.end(commit=False)


Arrays = dict[str, np.ndarray[Any, Any]]


def mixed() -> tuple[Arrays, Arrays]:
    """A state with a tensor of several blocks, two of which differ, a small one that differs, and an equal one."""
    rng = np.random.default_rng(0)
    holds: Arrays = {
        "big": rng.integers(0, 256, 3 * STATE_BLOCK_BYTES + 5, np.uint8),
        "small": np.arange(7.0),
        "same": np.ones(3),
    }
    has = {key: array.copy() for key, array in holds.items()}
    has["big"][STATE_BLOCK_BYTES + 1] ^= 1
    has["big"][-1] ^= 1
    has["small"][:] = 0
    return holds, has


def test_only_what_differs_travels_and_is_written_at_the_end() -> None:
    """S5"""
    holds, has = mixed()
    net = Net(a=holds, c=has)
    net.start(c="a")
    net.wait("c")
    assert net.is_as_before("c"), "written before the commit"
    assert net.moved[-1] == (STATE_BLOCK_BYTES + 5 + 56,) * 2
    net.end()
    assert net.holds_all("c") and net.transfers["c"].is_written and net.sent["a"] == 3
    assert net.transfers["c"].rx_bytes == net.transfers["a"].tx_bytes < STATE_BLOCK_BYTES + 1024
    assert net.transfers["a"].rx_bytes == net.transfers["c"].tx_bytes


def test_nothing_is_written_without_a_commit() -> None:
    """S2 for state"""
    net = Net(a=1, c=0)
    net.start(c="a")
    net.wait("c")
    net.end(commit=False)
    assert net.is_as_before("c") and not net.transfers["c"].is_written


def test_zeros_do_not_travel() -> None:
    """Fresh optimiser state: only the lists of digests travel."""
    zeros: Arrays = {"large": np.zeros(3 * STATE_BLOCK_BYTES // 4 + 1, np.float32), "small": np.zeros(5)}
    net = Net(a=zeros, c={key: array + 1 for key, array in zeros.items()})
    net.sync(c="a")
    assert net.sent["a"] == 0


def test_small_tensors_travel_together() -> None:
    holds: Arrays = {f"t{n:04}": np.full(25, n + 1, np.int32) for n in range(3000)}
    net = Net(a=holds, c={key: np.zeros(25, np.int32) for key in holds})
    messages = []
    net.on_block = lambda sender, receiver: messages.append(sender)
    net.sync(c="a")
    assert net.sent["a"] == 3000 and len(messages) < 30


def test_progress_is_told() -> None:
    net = Net(a=1, c=0)
    net.sync(c="a")
    assert net.moved[-1] == (SIZE, SIZE) and net.moved == sorted(net.moved)


# --- What is wrong ----------------------------------------------------------------------------------------------------


def is_list(data: bytes) -> bool:
    view = memoryview(data)
    return not messages.has_blocks(view) and isinstance(messages.decode(view), BlockList)


def damage(what: Callable[[bytes], Any], percent: int) -> Callable[[str, bytes], bytes]:
    """Flips bits of one byte in such messages of b."""

    def spoil(sender: str, data: bytes) -> bytes:
        if sender != "b" or not what(data):
            return data
        damaged = bytearray(data)
        damaged[percent * len(data) // 100] ^= 0xFF
        return bytes(damaged)

    return spoil


SPOILS: dict[str, Callable[[str, bytes], bytes]] = {
    "list": damage(is_list, 99),
    "end of a block": damage(blocks_in, 99),
    "head of a block": damage(blocks_in, 0),
    "block": damage(blocks_in, 50),
    "short": lambda sender, data: data[:-1] if sender == "b" else data,
    "long": lambda sender, data: data + b"x" if sender == "b" else data,
    "no message": lambda sender, data: b"\x00" if sender == "b" else data,
    "nothing": lambda sender, data: b"" if sender == "b" else data,
}


@pytest.mark.parametrize("how", SPOILS)
def test_a_holder_that_damages_is_dropped_and_named_and_the_rest_comes_from_another(how: str) -> None:
    """S5"""
    net = Net(a=1, b=1, c=0)
    net.spoil, net.before_a = SPOILS[how], "b"
    net.start(c="ba")
    net.wait("c")
    ((_, _, dropped),) = net.reports["c"]
    assert list(dropped) == [b"b"]
    net.end()
    assert net.holds_all("c")


@pytest.mark.parametrize("how", SPOILS)
def test_a_fetch_fails_with_the_last_holder_and_blames_it(how: str) -> None:
    """S5, S2 for state"""
    net = Net(a=1, b=1, c=0)
    net.spoil = SPOILS[how]
    ((error, fault, dropped),) = net.fail(c="b")
    assert error and fault == b"b" and dropped == {b"b": error}


def test_wrong_bytes_are_named() -> None:
    net = Net(a=1, b=1, c=0)
    net.spoil = SPOILS["end of a block"]
    ((error, _, _),) = net.fail(c="b")
    assert "of 'w'" in error


def test_a_holder_whose_memory_changed_fails_the_sync_and_is_not_dropped() -> None:
    net = Net(a=1, c=0)
    net.arrays["a"]["w"][STATE_BLOCK_BYTES] = 9
    net.start(c="a")
    assert net.reported["a"].wait(30)
    ((error, fault, _),) = net.reports["a"]
    assert "block 1 of 'w'" in error and fault == b"a" and not net.reports["c"]
    net.end(commit=False)
    assert net.is_as_before("c")


def blocks(*entries: tuple[tuple[int, int], bytes]) -> bytes:
    head = messages.blocks_head([(place, len(payload)) for place, payload in entries])
    return head + b"".join(payload for _, payload in entries)


SENSELESS = [
    b"garbage",
    b"",
    b"\xc1",
    struct.pack("<BxH", 0xC1, 65535),
    blocks(((0, 0), b"x")),
    blocks(((0, 99), b"x")),
    blocks(((2**32 - 1, 2**32 - 1), b"")),
    messages.encode(BlockList(0, bytes(32))),
    messages.encode(BlockList(77, bytes(32))),
    messages.encode(Have(True, ())),
    messages.encode(Have(False, ((0, 0, 2**32 - 1),) * limits.STATE_RANGES_MAX)),
    messages.encode(Have(False, ((9, -1, 1), (0, 2**32 - 1, 2**32 - 1)))),
    messages.encode(Want()),
    messages.encode(Request(((0, 99, 1), (99, 0, 5), (0, -1, 1), (0, 0, 2**32 - 1)) * 500)),
]


@pytest.mark.parametrize("data", SENSELESS, ids=range(len(SENSELESS)))
def test_what_strangers_say_is_ignored(data: bytes) -> None:
    net = Net(a=1, c=0, s=0)
    net.start(c="a")
    for receiver in "ac":
        net.put("s", receiver, data)
    net.wait("c")
    net.end()
    assert net.holds_all("c") and not net.reports["a"] and net.is_as_before("s")


# --- Several sources --------------------------------------------------------------------------------------------------


def test_all_sources_are_asked() -> None:
    net = Net(a=1, b=1, c=0)
    net.before_a = "b"
    net.sync(c="ab")
    assert net.sent["a"] > 0 < net.sent["b"]


def test_a_source_that_cannot_be_reached_is_done_without() -> None:
    """L2"""
    net = Net(a=1, b=1, c=0)
    net.broken.add(frozenset("ac"))
    net.sync(c="ab")
    assert net.sent["a"] == 0


def test_the_death_of_a_holder_costs_only_what_it_owed() -> None:
    net = Net(a=1, b=1, c=0)

    def cut_after_the_first(sender: str, receiver: str) -> None:
        if sender == "b":
            net.cut("b", "c")

    net.on_block, net.before_a = cut_after_the_first, "b"
    net.sync(c="ab")
    assert net.sent["a"] <= COUNT and net.reports["c"][0][2] == {b"b": "the link to it was lost"}


def test_a_source_whose_offer_ends_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    net = Net(a=1, b=1, c=0)

    def end_after_the_first(sender: str, receiver: str) -> None:
        if sender == "b":
            net.transfers["c"].lose_link(b"b", OFFER_ENDED)

    net.on_block, net.before_a = end_after_the_first, "b"
    with caplog.at_level(logging.INFO, "zpccl.state"):
        net.sync(c="ab")
        assert net.reports["c"][0][2] == {b"b": OFFER_ENDED}
    assert [record.levelno for record in caplog.records if OFFER_ENDED in record.message] == [logging.INFO]


def test_a_source_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STATE_SOURCE_TIMEOUT_NS", 1)
    net = Net(a=1, b=1, c=0)
    net.deaf.add("b")
    net.sync(c="ba")


def test_a_fetcher_gives_up_when_no_source_is_left() -> None:
    net = Net(a=1, b=1, c=0)
    net.broken |= {frozenset("ac"), frozenset("bc")}
    ((error, fault, dropped),) = net.fail(c="ab")
    assert error == "requests cannot be sent to it" and fault in dropped and set(dropped) == {b"a", b"b"}


def test_a_fetcher_without_memory_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zpccl.state.contents._new_chunk", Mock(side_effect=OSError(12, "out of memory")))
    net = Net(a=1, c=0)
    assert net.fail(c="a") == [("not enough memory for the fetched state", b"c", {})]


def test_a_lost_link_to_the_only_source_fails_the_fetch() -> None:
    net = Net(a=1, c=0)
    net.deaf.add("a")
    net.start(c="a")
    net.transfers["c"].lose_link(b"a")
    assert net.reported["c"].wait(30)
    assert [report[:2] for report in net.reports["c"]] == [("the link to it was lost", b"a")]
    net.end(commit=False)


def test_a_link_that_is_full_is_waited_for() -> None:
    """Messages that did not fit are sent when there is room."""
    net = Net(a=1, c=0)
    net.full.add("c")
    net.start(c="a")
    assert net.refused.wait(30)
    net.full.clear()
    net.transfers["a"].mailbox.put(Writable(CHANNEL))
    net.wait("c")
    net.end()
    assert net.holds_all("c") and net.sent["a"] == COUNT


# --- Partial seeds ----------------------------------------------------------------------------------------------------


def test_who_fetches_serves_those_without_a_link_to_a_holder() -> None:
    """L2, S5: c gets from b what b gets from a, block by block, before anything is written."""
    net = Net(a=1, b=0, c=0)
    net.broken.add(frozenset("ac"))
    net.start("bc", b="a", c="")
    net.wait("bc")
    assert net.is_as_before("b")
    net.end()
    assert net.holds_all("b") and net.holds_all("c") and net.sent["a"] == COUNT


def test_partial_seeds_serve_each_other_what_they_have_checked() -> None:
    """Each of three joiners gets some blocks from the others, and the holder sends less than three times the whole."""
    net = Net(a=1, b=0, c=0, d=0)
    net.sync("bcd", b="a", c="a", d="a")
    assert sum(net.sent.values()) >= 3 * COUNT


def test_who_has_part_of_it_serves_that_too() -> None:
    """b serves blocks that it need not fetch from its tensor, the others from fetched blocks. Nobody sends zeros."""
    whole = np.full(SIZE, 1, np.uint8)
    part = whole.copy()
    part[2 * STATE_BLOCK_BYTES :] = 0
    net = Net(a={"w": whole}, b={"w": part}, c={"w": np.full(SIZE, 2, np.uint8)})
    net.broken.add(frozenset("ac"))
    net.sync("bc", b="a", c="")
    assert net.sent["a"] == COUNT - 2 and net.sent["b"] == COUNT


def test_a_partial_seed_that_lies_is_dropped() -> None:
    net = Net(a=1, b=2, c=0)  # b has other contents, and claims to have everything.
    net.start("bc", c="a")
    net.put("b", "c", messages.encode(Have(True, ())))
    net.wait("c")
    net.end()
    assert net.holds_all("c")


def test_partial_seeds_who_have_nothing_fail_when_their_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: two peers fetch from each other, and neither has the blocks."""
    monkeypatch.setattr(limits, "STATE_STALL_TIMEOUT_NS", limits.MS)
    net = Net(a=1, b=0, c=0)
    assert all(error for error, _, _ in net.fail("bc", b="", c=""))


def test_nobody_is_blamed_who_waits_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """L2: two peers lose their links to the holder and wait for each other. Neither of them is at fault.

    Otherwise the master would count the link between the two as broken, and remove them instead of the holder.
    """
    monkeypatch.setattr(limits, "STATE_STALL_TIMEOUT_NS", 100 * limits.MS)
    net = Net(a=1, b=0, c=0)
    net.broken |= {frozenset("ab"), frozenset("ac")}
    for error, fault, dropped in net.fail("bc", b="a", c="a"):
        assert error and fault is None and dropped[b"a"] == "requests cannot be sent to it"


# --- The user's thread ------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_workers_before_it_goes_on() -> None:
    """S4: nobody uses the tensors after the call."""
    net = Net(a=1, c=0)
    gone_on = threading.Event()
    ended: list[bool] = []

    class Interrupting(Message):
        def held(self) -> Any:
            gone_on.set()
            raise KeyboardInterrupt

    def send_slowly(sender: str, receiver: str) -> None:
        net.transfers["a"].mailbox.put(MessageReceived(b"c", CHANNEL, cast(Body, Interrupting(b""))))
        assert gone_on.wait(30)
        ended.append(True)

    net.on_block = send_slowly
    net.transfers["a"].start(CHANNEL, (), (), {})
    net.put("c", "a", messages.encode(Request(((0, 0, 1),))))
    with pytest.raises(KeyboardInterrupt):
        net.transfers["a"].run()
    assert ended and not [thread for thread in threading.enumerate() if thread.name == "zpccl-state"]


@pytest.mark.parametrize("place", [(HostRegion, "write"), (Workers, "close")])
def test_ctrl_c_does_not_leave_a_mixture(monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]) -> None:
    """S5: it comes when the sync is committed: the fetched blocks are nevertheless written, all of them."""
    net = Net(a=1, c=0)
    original, interrupts = getattr(*place), [KeyboardInterrupt]

    def interrupted(*arguments: Any) -> None:
        if interrupts and (place[0] is HostRegion or arguments[0] is net.transfers["c"]._workers):
            raise interrupts.pop()
        original(*arguments)

    monkeypatch.setattr(*place, interrupted)
    raised: list[BaseException] = []
    run = net.transfers["c"].run

    def caught() -> None:
        try:
            run()
        except KeyboardInterrupt as error:
            raised.append(error)

    net.threads[1] = threading.Thread(target=caught)
    net.start(c="a")
    net.wait("c")
    net.end()
    assert raised and net.holds_all("c") and net.transfers["c"].is_written


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("own", [0, 1, 2])
def test_tensors_of_the_same_memory_whose_elected_contents_differ(count: int, own: int) -> None:
    """S5: they cannot hold both, so the sync fails and changes nothing. `own`: their contents, maybe one of these."""
    size = count * STATE_BLOCK_BYTES - 5
    tied = np.full(size, own, np.uint8)
    net = Net(
        a={"t": np.full(size, 1, np.uint8), "u": np.full(size, 2, np.uint8)},
        b={"t": tied, "u": tied},
    )
    ((error, fault, _),) = net.fail(b="a")
    assert error == "tensors 't' and 'u' are the same memory here, but their elected contents differ" and fault == b"b"


@pytest.mark.parametrize("value", [0, 7])
def test_tensors_of_the_same_memory(value: int) -> None:
    """Tied weights, even if tied on one side only and of another type there."""
    held, tied = np.full(SIZE, value, np.uint8), np.full(SIZE, 1, np.uint8)
    net = Net(
        a={"t": held, "u": held.copy().view(np.float32), "v": np.full(9, value, np.uint8), "w": held[:9].copy()},
        b={"t": tied, "u": tied.view(np.float32), "v": (small := np.full(9, 1, np.uint8)), "w": small},
    )
    net.sync(b="a")


def test_a_tensor_that_may_differ_hides_no_conflict_of_others() -> None:
    tied = np.full(9, 5, np.uint8)
    contents = Contents({key: region(tied, key) for key in "tuv"}, DigestKind.BLAKE3)
    others = Contents({"u": region(np.zeros(9, np.uint8), "u"), "v": region(tied, "v")}, DigestKind.BLAKE3)
    contents.want(others.digests)
    contents._staged[2, 0] = memoryview(bytes(tied))
    assert "'u' and 'v'" in contents.conflict(["t"]) and "'t' and 'u'" in contents.conflict([])


def test_what_was_fetched_is_freed_without_a_collection_of_garbage() -> None:
    """B1: it may be as large as the state."""
    with without_collector():
        net = Net(a=1, b=2)
        net.sync(b="a")
        left = [weakref.ref(each) for each in net.transfers.values()]
        net.transfers.clear()
        net.threads.clear()
        assert [each() for each in left] == [None, None]


def test_what_a_failed_sync_has_fetched_is_freed_at_its_end() -> None:
    """B1: the traceback of its error refers to the transfer, while the program handles the error and syncs again."""
    net = Net(a=1, b=2)
    net.start(b="a")
    net.wait("b")
    contents = net.transfers["b"]._contents
    chunks = {id(block.obj): weakref.ref(block.obj) for block in contents._staged.values() if block is not None}
    net.end(commit=False)
    assert chunks and [chunk() for chunk in chunks.values()] == [None] * len(chunks)
    assert net.is_as_before("b")


def test_who_asks_for_announcements_before_the_plan_is_known_is_ignored() -> None:
    """S6: the channel of an offer opens a moment earlier, and can be guessed."""
    net = Net(a=1, b=2)
    net.put("b", "a", messages.encode(Want()))
    net.sync(b="a")


def test_an_interrupt_while_blocks_are_handed_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: the worker releases the memory of the message, once, as it may still read it."""
    noise = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)  # So that it does not travel as a pattern.
    net, submit = Net(a={"w": noise}, b={"w": np.zeros(SIZE, np.uint8)}), Workers.submit
    raised: list[BaseException] = []

    def interrupt(self: Workers, job: Callable[[], None]) -> None:
        if threading.current_thread() is not net.threads[1]:
            return submit(self, job)
        done = threading.Event()

        def work() -> None:
            try:
                job()
            finally:
                done.set()

        submit(self, work)
        assert done.wait(30)
        raise KeyboardInterrupt

    def run() -> None:
        try:
            net.transfers["b"].run()
        except BaseException as error:  # noqa: BLE001 - looked at below
            raised.append(error)

    net.threads[1] = threading.Thread(target=run)
    monkeypatch.setattr(Workers, "submit", interrupt)
    net.start(b="a")
    net.threads[1].join(30)
    net.end(commit=False)
    assert [type(error) for error in raised] == [KeyboardInterrupt] and net.is_as_before("b")


def test_messages_that_an_interrupt_left_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: even if the traceback is kept, as Jupyter does. Otherwise collectives would wait for room in the engine."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StateTransfer, "_on_message", interrupt)
    left = [Message(messages.encode(Want())) for _ in range(5)]
    transfer = Net(a=1).transfers["a"]
    for message in left:
        transfer.mailbox.put(MessageReceived(b"b", CHANNEL, cast(Body, message)))
    with pytest.raises(KeyboardInterrupt) as raised:
        transfer.run()
    assert raised.traceback and [message.is_released for message in left[1:]] == [True] * 4


def test_a_peer_that_knows_no_list_yet_looks_at_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """All fetchers ask each other at the start, and a large state has 100,000 blocks."""
    size = 3 * STATE_BLOCK_BYTES
    contents = Contents({key: region(np.zeros(size, np.uint8), key) for key in "uv"}, DigestKind.BLAKE3)
    contents.want({"u": bytes(32)})
    monkeypatch.setattr(Contents, "_is_own", None)
    assert list(contents.here()) == [(1, -1, 1), (1, 0, 3)]
