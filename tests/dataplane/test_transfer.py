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
