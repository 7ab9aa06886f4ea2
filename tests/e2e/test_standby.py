"""L3, S3: several masters, real processes. A quorum of the members moves to a standby; two parts never both go on."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.harness import Child, Cluster, MasterProcess, cluster, until
from e2e.restarts import read_notes, train

pytestmark = pytest.mark.e2e


class Path:
    """The way of one peer to one master: a port that leads there until it is cut.

    One thread owns all its sockets; `cut` and `heal` tell it through a pipe.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ours, self._theirs = socket.socketpair()
        self._other_end: dict[socket.socket, socket.socket] = {}
        self._is_cut = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._theirs, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Closes all connections, and every new one."""
        self._tell(b"c")

    def heal(self) -> None:
        """Lets connections through again."""
        self._tell(b"h")

    def close(self) -> None:
        """Ends the thread."""
        self._ours.sendall(b"q")
        self._thread.join()

    def _tell(self, command: bytes) -> None:
        self._ours.sendall(command)
        assert self._ours.recv(1) == command

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self._theirs:
                    command = ready.recv(1)
                    self._is_cut = command != b"h"
                    for one in list(self._other_end) if self._is_cut else ():
                        self._drop(one)
                    if command == b"q":
                        return self._end()
                    ready.sendall(command)
                elif ready is self._listener:
                    self._accept()
                elif ready in self._other_end:
                    self._pass_on(ready)

    def _accept(self) -> None:
        one, _ = self._listener.accept()
        try:
            if self._is_cut:
                raise ConnectionRefusedError
            other = socket.create_connection(self._target)
        except OSError:
            return one.close()
        for a, b in ((one, other), (other, one)):
            self._other_end[a] = b
            self._selector.register(a, selectors.EVENT_READ)
        return None

    def _pass_on(self, one: socket.socket) -> None:
        try:
            data = one.recv(1 << 16)
            if data:
                return self._other_end[one].sendall(data)
        except OSError:
            pass
        return self._drop(one)

    def _drop(self, one: socket.socket) -> None:
        other = self._other_end.pop(one, None)
        if other is not None:
            del self._other_end[other]
            for each in (one, other):
                self._selector.unregister(each)
                each.close()

    def _end(self) -> None:
        self._selector.close()
        for each in (self._listener, self._ours, self._theirs):
            each.close()


@contextlib.contextmanager
def two_masters() -> Iterator[tuple[Cluster, list[MasterProcess]]]:
    """A run that knows two masters; the cluster's own is the first."""
    with cluster("--recovery-grace", "0.5") as run:
        second = MasterProcess(str(run.master.log.parent), "standby", "--recovery-grace", "0.5")
        try:
            yield run, [run.master, second]
        finally:
            second.kill()


def start(run: Cluster, addresses: list[str], count: int, **options: Any) -> list[Child]:
    """Members of a run, each with its own list of masters."""
    children = [run.child() for _ in range(count)]
    for child, address in zip(children, addresses, strict=True):
        child.start(harness.join, address, count, name=child.name, n_attempts=50, **options)
    for child in children:
        child.value()
    return children


def test_a_standby_takes_over_and_hands_back() -> None:
    """L3, S1, S5: no call fails, no result differs, whichever of two masters is killed."""
    with two_masters() as (run, masters):
        address = ",".join(master.address for master in masters)
        members = start(run, [address] * 4, 4)
        for child in members:
            child.start(train, False)
        for number in range(4):
            read_notes(members[:2], 1)
            gone = masters[number % 2]
            gone.kill()
            read_notes(members, 1)
            again = MasterProcess(str(gone.log.parent), f"again{number}", "--recovery-grace", "0.5", bind=gone.address)
            masters[number % 2] = again
            if number % 2 == 0:
                run.master = again
        for child in members:
            child.tell()
        results = [child.value() for child in members]
        masters[1].kill()
        assert len({result["digest"] for result in results}) == 1
        assert len({result["revision"] for result in results}) == 1


def test_a_newcomer_finds_the_master_that_leads() -> None:
    """L3: also where the first of the list is there again, and idle."""
    with two_masters() as (run, masters):
        address = ",".join(master.address for master in masters)
        members = start(run, [address] * 3, 3)
        masters[0].kill()
        for child in members:
            child.start(harness.reduce, np.ones(10, np.float32))
        assert [float(child.value()[0]) for child in members] == [3.0] * 3
        run.master = MasterProcess(str(masters[0].log.parent), "again", bind=masters[0].address)
        newcomer = run.child()
        newcomer.start(harness.connect, address, name=newcomer.name, n_attempts=50)
        for child in members:
            child.start(harness.admit, 4)
        for child in members:
            child.value()
        newcomer.value()
        for child in (*members, newcomer):
            child.start(harness.reduce, np.ones(10, np.float32))
        assert [float(child.value()[0]) for child in (*members, newcomer)] == [4.0] * 4


def lowest_first(members: list[Child]) -> list[Child]:
    """The one with the lowest peer id first."""
    return sorted(members, key=lambda child: child.call(own_id))


def own_id(peer: harness.Peer) -> bytes:
    """The id of a peer."""
    assert peer.comm._loop is not None
    return peer.comm._loop.options.peer_id


@pytest.mark.slow
def test_two_masters_reached_by_disjoint_halves_never_both_lead() -> None:
    """S3: of four members, the two with the lowest id among them go on; the others wait, and rejoin when healed."""
    with two_masters() as (run, masters):
        paths = [[Path(master.address) for master in masters] for _ in range(4)]
        lists = [",".join(path.address for path in both) for both in paths]
        members = start(run, lists, 4, master_timeout=60)
        path_of = dict(zip(members, paths, strict=True))
        ordered = lowest_first(members)
        # The half that may go on is left with the standby only: it has to be moved there.
        going_on, waiting = [ordered[0], ordered[2]], [ordered[1], ordered[3]]
        for child in going_on:
            path_of[child][0].cut()
        for child in waiting:
            path_of[child][1].cut()
        for child in members:
            child.start(reduce_until_done)
        assert [child.value() for child in going_on] == [2.0, 2.0]
        leaders = [master.log.read_text().count("taking over the run") for master in masters]
        assert leaders == [0, 1]
        until(lambda: "stepping down" in masters[0].log.read_text(), "the first master to give way")
        assert not any(child.is_done() for child in waiting)
        for child in members:
            for path in path_of[child]:
                path.heal()
        assert {child.failure().kind for child in waiting} == {"Kicked"}
        assert [master.log.read_text().count("taking over the run") for master in masters] == [0, 1]
        for child in waiting:
            # Who comes first votes for the other.
            child.start(harness.join, lists[members.index(child)], 4, name=child.name, n_attempts=50)
        for child in going_on:
            child.start(harness.admit, 4)
        for child in (*going_on, *waiting):
            child.value()
        for child in members:
            child.start(harness.reduce, np.ones(10, np.float32))
        assert [float(child.value()[0]) for child in members] == [4.0] * 4
        for child in members:
            child.call(harness.close)
        for both in paths:
            for path in both:
                path.close()


def reduce_until_done(peer: harness.Peer) -> float:
    """All-reduces ones until that succeeds; its world size."""
    while True:
        with contextlib.suppress(zpccl.PeerLost):
            return float(peer.comm.all_reduce(np.ones(10, np.float32))[0])
