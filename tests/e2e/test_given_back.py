"""S4: once a call has returned or raised, only the caller uses its memory, whatever the other peers still do.

Each call has its own memory. As soon as the call is over on this peer, this memory becomes inaccessible or is freed. A
thread that touched it later would be killed with its process; a system call that did so would fail and lose its
connection. Calls succeed, time out, are interrupted, or lose a peer that dies, mostly while bytes move.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e.harness import Peer, cluster, is_over, link_facts, until
from e2e.secured import SECRET, write_private
from zpccl.engine.engine import Engine

pytestmark = pytest.mark.e2e

BYTES = 8 << 20
ELEMENTS = BYTES // 4
TRIES = 2
"""How often a peer gives up each kind of call."""
KINDS = ("out of place", "in place", "not restored", "quantised", "broadcast", "all_gather", "reduce_scatter")
_PROT_NONE = 0  # bits/mman-linux.h


class Memory:
    """A region of float32, all of one value."""

    def __init__(self, elements: int, value: float, is_locked: bool) -> None:
        self._region = mmap.mmap(-1, 4 * elements) if is_locked else None
        if self._region is not None:
            self.array: Any = np.frombuffer(self._region, np.float32)
        else:
            self.array = np.empty(elements, np.float32)
        self.array[:] = value
        self._address = self.array.ctypes.data
        self._bytes = self.array.nbytes

    def give_up(self) -> mmap.mmap | None:
        """Forbids further use: frees the memory, or makes it inaccessible while the returned mapping is kept."""
        self.array = None
        if self._region is not None:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mprotect(ctypes.c_void_p(self._address), self._bytes, _PROT_NONE) == 0, ctypes.get_errno()
            libc.madvise(
                ctypes.c_void_p(self._address), self._bytes, mmap.MADV_DONTNEED
            )  # It keeps only its addresses.
        return self._region


def memories(kind: str, size: int, place: int, is_locked: bool) -> list[Memory]:
    """The memory that a call uses, with one bit for each peer. If there are two regions, it writes the second."""
    send = Memory(ELEMENTS, 1 << place, is_locked)
    if kind in ("in place", "not restored", "quantised", "broadcast"):
        return [send]
    rows = {"out of place": ELEMENTS, "all_gather": size * ELEMENTS, "reduce_scatter": ELEMENTS // 2 + 1}
    return [send, Memory(rows[kind], 0, is_locked)]


def start(comm: zpccl.Communicator, kind: str, tag: int, used: list[Memory], is_root: bool) -> zpccl.AsyncReduceHandle:
    """Begins a call."""
    tensors = [memory.array for memory in used]
    if kind == "broadcast":
        return comm.broadcast_async(tensors[0], is_root=is_root, tag=tag)
    if kind == "all_gather":
        return comm.all_gather_async(*tensors, tag=tag)
    if kind == "reduce_scatter":
        return comm.reduce_scatter_async(*tensors, tag=tag)
    quantised = zpccl.QuantizationOptions() if kind == "quantised" else None
    return comm.all_reduce_async(
        tensors[0],
        tensors[-1],
        op=zpccl.ReduceOp.SUM,
        tag=tag,
        quantization_options=quantised,
        restore=kind != "not restored",
    )


def moved_bytes(peer: Peer) -> int:
    """Bytes sent and received."""
    return sum(sum(state.tx_bytes) + sum(state.rx_bytes) for state in link_facts(peer.comm, Engine.link_state))


def when_moving(peer: Peer, handle: zpccl.AsyncReduceHandle, count: int) -> bool:
    """Waits until `count` bytes have moved or the call is over. Returns True if the call still runs."""
    begin = moved_bytes(peer)
    until(lambda: is_over(handle) or moved_bytes(peer) >= begin + count, "the end of a call")
    return not is_over(handle)


def wait_until_interrupted(peer: Peer, handle: zpccl.AsyncReduceHandle, count: int) -> bool:
    """Calls `handle.wait()`, and sends Ctrl-C after `count` bytes."""

    def interrupt() -> None:
        if when_moving(peer, handle, count):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    try:
        watcher.start()
        is_right = handle.wait()[0]
        watcher.join()
    except KeyboardInterrupt:
        watcher.join()
        return handle.wait()[0]
    return is_right


def end(peer: Peer, handle: zpccl.AsyncReduceHandle, how: str, count: int) -> bool:
    """Waits for a call, or makes it end after `count` bytes in the way `how`. Returns True if it succeeded."""
    if how == "interrupted":
        return wait_until_interrupted(peer, handle, count)
    if how == "timed out":
        return handle.wait(0 if when_moving(peer, handle, count) else None)[0]
    if how == "killed" and when_moving(peer, handle, count):
        os.kill(os.getpid(), signal.SIGKILL)
    return handle.wait()[0]


def check(kind: str, used: list[Memory], is_right: bool, place: int) -> int:
    """S1, S2: checks the memory after a call. Returns the participants as bits, or 0 after a failure."""
    if not is_right:
        assert kind == "not restored" or (used[0].array == 1 << place).all(), f"{kind}: not as before"
        return 0
    if kind == "all_gather":
        return int(sum(used[1].array[::ELEMENTS]))
    result = used[-1].array[: ELEMENTS // 8]  # The part of a reduce-scatter has at least this length.
    assert np.ptp(result) < 0.1, f"{kind}: not the same everywhere"
    return round(float(result[0]))


def call_until_it_succeeds(peer: Peer, kind: str, tag: int, place: int, ways: list[str]) -> tuple[int, int]:
    """Ends a call in each of these ways, then repeats it until it succeeds. Returns failures and participants."""
    choose = random.Random(tag)
    for failures in itertools.count():
        is_locked = failures % 3 != 2
        used = memories(kind, peer.comm.world_size, place, is_locked)
        handle = start(peer.comm, kind, tag, used, place == 0)
        is_right = end(peer, handle, ways.pop(0) if ways else "", choose.randrange(1, BYTES // 4))
        took_part = check(kind, used, is_right, place)
        peer.kept.setdefault("locked", []).extend(memory.give_up() for memory in used)
        if is_right:
            return failures, took_part
    raise AssertionError


def give_calls_up(peer: Peer, place: int) -> dict[str, Any]:
    """Makes all kinds of calls; the members take turns to give them up."""
    failures = 0
    for tag, kind in enumerate(KINDS):
        gives_up = tag % peer.comm.world_size == place
        ways = ["timed out", "interrupted"] * (TRIES // 2) if gives_up else []
        failed, took_part = call_until_it_succeeds(peer, kind, tag, place, ways)
        assert took_part == (1 if kind == "broadcast" else 0b111), f"{kind}: {took_part:b}"
        failures += failed
    return {"failures": failures, "lost": peer.lost_connections()}


@pytest.mark.parametrize("is_sealed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_calls_that_are_given_up(is_sealed: bool, tmp_path: Path) -> None:
    """S2, S4, L2."""
    arguments = ("--secret-file", write_private(tmp_path / "secret", SECRET)) if is_sealed else ()
    options: dict[str, Any] = {"secret": SECRET} if is_sealed else {}
    with cluster(*arguments) as run:
        children = run.members(3, **options)
        for place, child in enumerate(children):
            child.start(give_calls_up, place)
        reports = [child.value() for child in children]
    assert [report["lost"] for report in reports] == [0, 0, 0]
    assert all(report["failures"] >= len(KINDS) / 2 for report in reports), reports


def die_in_turn(peer: Peer, place: int, kinds: list[str]) -> dict[str, Any]:
    """In each kind of call one member dies: the last of those that are left."""
    failures = 0
    for tag, kind in enumerate(kinds):
        last = 1 + len(kinds) - tag
        failed, took_part = call_until_it_succeeds(peer, kind, tag, place, ["killed"] if place == last else [])
        if place == last:
            os.kill(os.getpid(), signal.SIGKILL)  # The call ended too early.
        alive = (1 << last) - 1
        assert took_part in ({1} if kind == "broadcast" else {alive, alive | 1 << last}), f"{kind}: {took_part:b}"
        failures += failed
    return {"failures": failures, "lost": peer.lost_connections()}


@pytest.mark.slow
def test_calls_whose_peers_die() -> None:
    """S2, S4, L2."""
    kinds = ["in place", "all_gather"]
    with cluster() as run:
        children = run.members(2 + len(kinds))
        for place, child in enumerate(children):
            child.start(die_in_turn, place, kinds)
        reports = [child.value() for child in children[:2]]
    assert [report["lost"] for report in reports] == [0, 0]
    assert all(report["failures"] for report in reports), reports
