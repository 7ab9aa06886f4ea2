"""State transfers between peers of one process, with a network that a test can spoil."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from zpccl.dataplane import transfer as module
from zpccl.dataplane.tensors import view
from zpccl.dataplane.transfer import StateTransfer
from zpccl.limits import STATE_BLOCK_BYTES

HOLDER, FETCHER, STRANGER = b"h" * 16, b"f" * 16, b"s" * 16
CHANNEL = 7


class Pair:
    """A holder, a fetcher and the wires between them. `spoil` sees what the holder sends."""

    def __init__(self, holds: dict[str, np.ndarray], has: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
        self.reports: list[tuple[int, str, bytes | None]] = []
        self.reported = threading.Event()
        self.spoil: Callable[[bytes], bytes] = lambda body: body
        self.sent: list[bytes] = []
        self.holder = StateTransfer(
            {k: view(a, k, writable=True) for k, a in holds.items()}, self._to_fetcher, self._no
        )
        self.fetcher = StateTransfer(
            {k: view(a, k, writable=True) for k, a in has.items()}, self._to_holder, self._report
        )
        self._threads = [threading.Thread(target=each.run) for each in (self.holder, self.fetcher)]

    def _to_fetcher(self, peer: bytes, channel: int, body: bytes) -> None:
        assert (peer, channel) == (FETCHER, CHANNEL)
        self.sent.append(body)
        self.fetcher.deliver(HOLDER, self.spoil(body))

    def _to_holder(self, peer: bytes, channel: int, body: bytes) -> None:
        assert (peer, channel) == (HOLDER, CHANNEL)
        self.holder.deliver(FETCHER, body)

    def _report(self, attempt_id: int, error: str, fault: bytes | None) -> None:
        self.reports.append((attempt_id, error, fault))
        self.reported.set()

    def _no(self, *report: object) -> None:
        raise AssertionError(f"a holder reports {report}")

    def start(self) -> None:
        differing = {k: d for k, d in self.holder.digests.items() if self.fetcher.digests[k] != d}
        self.holder.start(CHANNEL, (HOLDER,), {})
        self.fetcher.start(CHANNEL, (HOLDER,), differing)
        for thread in self._threads:
            thread.start()

    def end(self, commit: bool) -> None:
        for each in (self.holder, self.fetcher):
            each.end(commit)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def make() -> tuple[Pair, dict[str, np.ndarray], dict[str, np.ndarray]]:  # type: ignore[type-arg]
    rng = np.random.default_rng(0)
    holds = {
        "big": rng.integers(0, 256, 3 * STATE_BLOCK_BYTES + 5, np.uint8),
        "small": np.arange(7.0),
        "same": np.ones(3),
    }
    has = {key: array.copy() for key, array in holds.items()}
    has["big"][STATE_BLOCK_BYTES + 1] ^= 1
    has["big"][-1] ^= 1
    has["small"][:] = 0
    return Pair(holds, has), holds, has


def test_only_what_differs_travels_and_is_written_at_the_end() -> None:
    """S5"""
    pair, holds, has = make()
    before = {key: array.copy() for key, array in has.items()}
    pair.start()
    assert pair.reported.wait(30) and pair.reports == [(CHANNEL, "", None)]
    assert all(np.array_equal(has[key], before[key]) for key in has), "written before the commit"
    pair.end(commit=True)
    assert all(np.array_equal(has[key], holds[key]) for key in has) and pair.fetcher.is_written
    assert pair.fetcher.rx_bytes == pair.holder.tx_bytes < 1.2 * STATE_BLOCK_BYTES + 4096


def test_nothing_is_written_without_a_commit() -> None:
    """S2 of state"""
    pair, _, has = make()
    before = {key: array.copy() for key, array in has.items()}
    pair.start()
    assert pair.reported.wait(30)
    pair.end(commit=False)
    assert all(np.array_equal(has[key], before[key]) for key in has) and not pair.fetcher.is_written


def damage(kind: type, percent: int) -> Callable[[bytes], bytes]:
    def spoil(body: bytes) -> bytes:
        message = module._decoder.decode(body)
        if not isinstance(message, kind):
            return body
        damaged = bytearray(body)
        damaged[percent * len(body) // 100] ^= 0xFF
        return bytes(damaged)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [damage(module.BlockList, 99), damage(module.Block, 99), damage(module.Block, 50), lambda body: b"\xc1" + body],
    ids=["list", "end of a block", "block", "no message"],
)
def test_what_a_holder_damages_is_noticed(spoil: Callable[[bytes], bytes]) -> None:
    """S5: the fetch fails, the holder is blamed, and a commit (which the master would not send) writes nothing."""
    pair, _, has = make()
    before = {key: array.copy() for key, array in has.items()}
    pair.spoil = spoil
    pair.start()
    assert pair.reported.wait(30)
    ((attempt_id, error, fault),) = pair.reports
    assert attempt_id == CHANNEL and error and fault == HOLDER
    pair.end(commit=False)
    assert all(np.array_equal(has[key], before[key]) for key in has)


def test_strangers_and_senseless_requests_are_ignored() -> None:
    pair, holds, has = make()
    for peer, body in [
        (STRANGER, b"garbage"),
        (STRANGER, module._encode(module.Block("small", 0, b"x"))),
        (HOLDER, module._encode(module.Block("small", 99, b"x"))),
        (HOLDER, module._encode(module.Block("unknown", 0, b"x"))),
        (HOLDER, module._encode(module.BlockList("same", bytes(32)))),
    ]:
        pair.fetcher.deliver(peer, body)
    pair.holder.deliver(STRANGER, module._encode(module.BlockRequest("small", -1)))
    pair.holder.deliver(STRANGER, module._encode(module.BlockRequest("small", 5)))
    pair.holder.deliver(STRANGER, module._encode(module.ListRequest("unknown")))
    pair.start()
    assert pair.reported.wait(30) and pair.reports == [(CHANNEL, "", None)]
    pair.end(commit=True)
    assert all(np.array_equal(has[key], holds[key]) for key in has)


def test_a_holder_that_cannot_be_reached_fails_the_fetch() -> None:
    pair, _, _ = make()

    def broken(peer: bytes, channel: int, body: bytes) -> None:
        raise OSError(107, "no link")

    pair.fetcher._send = broken
    pair.start()
    assert pair.reported.wait(30)
    assert [(a, f) for a, _, f in pair.reports] == [(CHANNEL, HOLDER)] and "no link" in pair.reports[0][1]
    pair.end(commit=False)


# --- Several sources ------------------------------------------------------------------------------------------------

BIG = 6 * STATE_BLOCK_BYTES


class Net:
    """Transfers by name, each in a thread, and links between them that a test can break.

    All bytes of a peer's tensor are the number given for it, but for the first `ones`, which are 1.
    """

    def __init__(self, ones: int = 0, **contents: int) -> None:
        self.arrays = {name: {"w": np.full(BIG, value, np.uint8)} for name, value in contents.items()}
        for arrays in self.arrays.values():
            arrays["w"][:ones] = 1
        self.broken: set[frozenset[str]] = set()
        self.deaf: set[str] = set()
        self.reports: dict[str, list[tuple[str, bytes | None]]] = {name: [] for name in contents}
        self.reported = {name: threading.Event() for name in contents}
        self.sent: dict[str, int] = dict.fromkeys(contents, 0)
        self.on_block: Callable[[str, str], None] = lambda sender, receiver: None
        self.transfers = {
            name: StateTransfer(
                {k: view(a, k, writable=True) for k, a in arrays.items()}, self._sender(name), self._reporter(name)
            )
            for name, arrays in self.arrays.items()
        }
        self._threads = [threading.Thread(target=each.run) for each in self.transfers.values()]

    def _sender(self, name: str) -> Callable[[bytes, int, bytes], None]:
        def send(peer: bytes, channel: int, body: bytes) -> None:
            receiver = peer.decode()
            if {name, receiver} in self.broken:
                raise OSError(107, "no link")
            if isinstance(module._decoder.decode(body), module.Block):
                self.sent[name] += 1
                self.on_block(name, receiver)
            if receiver not in self.deaf:
                self.transfers[receiver].deliver(name.encode(), body)

        return send

    def _reporter(self, name: str) -> Callable[[int, str, bytes | None], None]:
        def report(attempt_id: int, error: str, fault: bytes | None) -> None:
            self.reports[name].append((error, fault))
            self.reported[name].set()

        return report

    def cut(self, one: str, other: str) -> None:
        """The link breaks; both ends notice."""
        self.broken.add(frozenset((one, other)))
        self.transfers[one].lose_link(other.encode())
        self.transfers[other].lose_link(one.encode())

    def start(self, **sources: str) -> None:
        """Who is named fetches what a holds from its sources; the others serve."""
        for name, transfer in self.transfers.items():
            fetch = self.transfers["a"].digests if name in sources else {}
            transfer.start(CHANNEL, tuple(s.encode() for s in sources.get(name, "")), dict(fetch))
        for thread in self._threads:
            thread.start()

    def end(self, commit: bool = True) -> None:
        for transfer in self.transfers.values():
            transfer.end(commit)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def test_a_fetcher_turns_to_a_source_that_it_has_a_link_to() -> None:
    """L2: one that cannot be reached is no reason to fail."""
    net = Net(a=1, b=1, c=0)
    net.broken.add(frozenset("ac"))
    net.start(c="ab")
    assert net.reported["c"].wait(30) and net.reports["c"] == [("", None)]
    net.end()
    assert (net.arrays["c"]["w"] == 1).all() and net.sent["a"] == 0


def test_a_fetcher_goes_on_with_another_source_where_the_first_left_off() -> None:
    net = Net(a=1, b=1, c=0)

    def cut_after_the_first(sender: str, receiver: str) -> None:
        if sender == "a":
            net.cut("a", "c")

    net.on_block = cut_after_the_first
    net.start(c="ab")
    assert net.reported["c"].wait(30) and net.reports["c"] == [("", None)]
    net.end()
    assert (net.arrays["c"]["w"] == 1).all()
    assert net.sent["b"] <= BIG // STATE_BLOCK_BYTES


def test_a_fetcher_leaves_a_source_that_sends_damage() -> None:
    net = Net(a=1, b=2, c=0)  # b holds something else than was elected.
    net.start(c="ba")
    assert net.reported["c"].wait(30) and net.reports["c"] == [("", None)]
    net.end()
    assert (net.arrays["c"]["w"] == 1).all()


def test_a_fetcher_leaves_a_source_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.limits, "STATE_SOURCE_TIMEOUT_NS", 1)
    net = Net(a=1, b=1, c=0)
    net.deaf.add("b")
    net.start(c="ba")
    assert net.reported["c"].wait(30) and net.reports["c"] == [("", None)]
    net.end()
    assert (net.arrays["c"]["w"] == 1).all()


def test_a_fetcher_gives_up_when_no_source_is_left() -> None:
    net = Net(a=1, b=1, c=0)
    net.broken |= {frozenset("ac"), frozenset("bc")}
    net.start(c="ab")
    assert net.reported["c"].wait(30)
    assert [(error, fault) for error, fault in net.reports["c"]] == [("cannot ask for state: no link", b"b")]
    net.end(commit=False)
    assert (net.arrays["c"]["w"] == 0).all()


def test_a_lost_link_to_the_only_source_fails_the_fetch() -> None:
    net = Net(a=1, c=0)
    net.deaf.add("a")
    net.start(c="a")
    net.transfers["c"].lose_link(b"a")
    assert net.reported["c"].wait(30) and net.reports["c"] == [("the link to it was lost", b"a")]
    net.end(commit=False)


def test_who_fetches_serves_those_without_a_link_to_a_holder() -> None:
    """L2, S5: c gets from b what b gets from a, block by block, before it is written anywhere."""
    net = Net(a=1, b=0, c=0)
    net.broken.add(frozenset("ac"))
    net.start(b="a", c="b")
    for name in "bc":
        assert net.reported[name].wait(30) and net.reports[name] == [("", None)]
    assert (net.arrays["b"]["w"] == 0).all()
    net.end()
    assert all((net.arrays[name]["w"] == 1).all() for name in "bc")


def test_who_has_part_of_it_serves_that_too() -> None:
    """Blocks that b need not fetch come from its tensor, the others from what it has fetched."""
    net = Net(2 * STATE_BLOCK_BYTES, a=1, b=0, c=0)
    net.broken.add(frozenset("ac"))
    net.start(b="a", c="b")
    for name in "bc":
        assert net.reported[name].wait(30) and net.reports[name] == [("", None)]
    net.end()
    assert (net.arrays["c"]["w"] == 1).all() and net.sent["a"] == BIG // STATE_BLOCK_BYTES - 2
