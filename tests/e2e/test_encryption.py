"""S7 for data: an observer on the path learns nothing, and an attacker who changes data only costs time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.harness import Child, Cluster, Peer, all_of, cluster, until
from e2e.secured import SECRET, connect_behind, log_all, reducing, write_private
from e2e.strangers import raw
from zpccl.control.addresses import format_address

pytestmark = pytest.mark.e2e

PATTERN = np.random.default_rng(1).integers(0, 256, 400_000, np.uint8)
"""A tensor whose bytes do not occur by chance."""
PIECE_BYTES = 1 << 16
"""A full piece lies in the middle of a frame: more follows, so missing bytes are noticed at once."""

Change = Callable[[bytes], bytes]


class Relay:
    """A relay on the path to a peer. It records all bytes, and changes a piece on request."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname())
        self.target = ""
        self.connections = 0
        self.captured = bytearray()
        self.is_capturing = True
        self._change: Change | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def change_next(self, change: Change) -> None:
        """Changes the next whole piece, in either direction."""
        with self._lock:
            self._change = change

    @property
    def has_changed(self) -> bool:
        """True once the change of `change_next` has been made."""
        return self._change is None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # The listener is shut down.
            while True:
                incoming, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(incoming,), daemon=True).start()

    def _relay(self, incoming: socket.socket) -> None:
        with contextlib.suppress(OSError), incoming, raw(self.target) as outgoing:
            outgoing.settimeout(None)
            self.connections += 1
            backwards = threading.Thread(target=self._copy, args=(outgoing, incoming), daemon=True)
            backwards.start()
            self._copy(incoming, outgoing)
            backwards.join()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                with self._lock:
                    if self.is_capturing:
                        self.captured += data
                    if self._change is not None and len(data) == PIECE_BYTES:
                        data, self._change = self._change(data), None
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def relayed(directory: Path, **options: bool) -> Iterator[tuple[Cluster, list[Child], Relay]]:
    """Two members whose data passes through a relay."""
    relay = Relay()
    secret = write_private(directory / "secret", SECRET)
    with contextlib.closing(relay), cluster("--secret-file", secret) as run:
        first = run.child()
        relay.target = first.call(connect_behind, relay.address, run.master.address, secret=SECRET, **options)
        second = run.newcomer([first], secret=SECRET, **options)
        yield run, [first, second], relay


def contribute(peer: Peer, pattern: np.ndarray) -> bool:
    """One all-reduce to which only one peer contributes values other than zero."""
    return bool((peer.comm.all_reduce(pattern) == PATTERN).all())


@pytest.mark.parametrize("encrypt", [True, False])
def test_nothing_of_a_tensor_shows_on_the_way(tmp_path: Path, encrypt: bool) -> None:
    """With `encrypt=False` connections are only authenticated, and the relay sees the tensor."""
    with relayed(tmp_path, **({} if encrypt else {"encrypt": False})) as (_, members, relay):
        before = len(relay.captured)
        members[0].start(contribute, PATTERN)
        members[1].start(contribute, np.zeros_like(PATTERN))
        assert all(member.value() for member in members)
        until(lambda: len(relay.captured) - before >= PATTERN.nbytes, "all of it")
        captured = bytes(relay.captured)
    pieces = [PATTERN[place : place + 24].tobytes() for place in range(0, PATTERN.nbytes - 24, 1000)]
    shown = sum(piece in captured for piece in pieces)
    assert shown == 0 if encrypt else shown > 0.9 * len(pieces)


def sync_pattern(peer: Peer, pattern: np.ndarray) -> bool:
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(pattern, "weights")])
    state.revision = int(pattern.any())
    peer.comm.sync_shared_state(state)
    return bool((pattern == PATTERN).all())


def test_nothing_of_the_shared_state_shows(tmp_path: Path) -> None:
    with relayed(tmp_path) as (_, members, relay):
        before = len(relay.captured)
        members[0].start(sync_pattern, PATTERN)
        members[1].start(sync_pattern, np.zeros_like(PATTERN))
        assert all(member.value() for member in members)
        captured = bytes(relay.captured)
    assert len(captured) - before >= PATTERN.nbytes
    assert not any(PATTERN[place : place + 24].tobytes() in captured for place in range(0, PATTERN.nbytes - 24, 1000))


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


CHANGES: dict[str, Change] = {
    "a bit": flip,
    "a piece twice": lambda data: data + data,
    "a piece left out": lambda data: b"",
    "two pieces exchanged": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
}


def reduce_checked(peer: Peer) -> int:
    """Reduces until any member is told to stop, whatever fails. Each result is right, and no other memory changes."""
    rank, failures = peer.comm.rank, 0
    expected = np.arange(200_000, dtype=np.float64) * (1 + 2)
    peer.note("reducing")
    told = False
    while True:
        told = told or peer.is_told()
        send = np.arange(200_000, dtype=np.float64) * (rank + 1)
        send[0] = told
        before = send.copy()
        try:
            assert peer.comm.all_reduce(send, send) is not None
        except zpccl.PCCLError:
            failures += 1
            assert (send == before).all(), "a failed all-reduce leaves its buffer as it was"
            continue
        assert (send[1:] == expected[1:]).all()
        if send[0]:
            return failures


def test_who_changes_data_ends_a_connection_and_no_more(tmp_path: Path) -> None:
    """S2, L2: no change reaches a buffer; only connections end, and the run goes on over new ones."""
    with relayed(tmp_path, encrypt=True) as (_, members, relay):
        relay.is_capturing = False  # The recording would grow without end.
        for member in members:
            member.start(reduce_checked)
            member.note()
        for name, change in CHANGES.items():
            before = relay.connections
            relay.change_next(change)
            until(lambda: relay.has_changed, f"the change of {name}")
            until(lambda before=before: relay.connections > before, f"a new connection after {name}")  # type: ignore[misc]
        members[0].tell()
        for member in members:
            member.value()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["the members", "the newcomer"])
def test_who_encrypts_is_not_linked_to_who_does_not(tmp_path: Path, who: str) -> None:
    with cluster("--secret-file", write_private(tmp_path / "secret", SECRET)) as run:
        members = run.members(2, secret=SECRET, encrypt=who == "the members")
        other = run.child()
        for child in run.children:
            child.call(log_all)
        other.start(harness.connect, run.master.address, secret=SECRET, encrypt=who != "the members")
        until(lambda: run.master.log.read_text().count("registered for group 0") > 2, "its registration")
        all_of(members, harness.update)
        failure = other.failure()
        assert failure.kind == "PeerUnreachable"
        logs = [child.log.read_text() for child in run.children]
        assert any("one side encrypts" in log for log in logs), logs
        with reducing(members):
            pass
