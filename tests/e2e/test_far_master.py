"""L2: the master is far away. A healthy peer whose connection to it breaks stays a member."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

import zpccl
from e2e.delays import FarPath
from e2e.harness import Peer, cluster, is_calling, stream_sockets, until
from e2e.networks import wide
from e2e.training import lines_of_losses
from zpccl.control.keys import new_secret

pytestmark = pytest.mark.e2e

COUNT = 3


class FarPeer(threading.Thread):
    """A peer that joins and reduces until it is closed.

    Attributes:
        errors: errors of its calls.
        count: number of its collectives that have finished.
    """

    def __init__(self, address: str, name: str, secret: str | None) -> None:
        super().__init__()
        self.comm = zpccl.Communicator(address, name=name, secret=secret)
        self.errors: list[zpccl.PCCLError] = []
        self.count = 0

    def run(self) -> None:
        try:
            self.comm.connect()
            while self.comm.world_size < COUNT:
                self.comm.update_topology()
            array = np.ones(100, np.float32)
            while True:  # Until it is closed.
                self.comm.all_reduce(array)
                self.count += 1
        except zpccl.PCCLError as error:
            self.errors.append(error)


@pytest.mark.parametrize("secret", [None, new_secret()], ids=["plain", "secret"])
@pytest.mark.parametrize("round_trip_s", [0.12, pytest.param(0.3, marks=pytest.mark.slow)])
def test_one_connection_breaks(round_trip_s: float, secret: str | None) -> None:
    """The peer comes back after more than DISCONNECT_GRACE. Its handshake has told the master to wait for it."""
    with zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05, secret=secret) as master:
        paths = [FarPath(master.address, round_trip_s) for _ in range(COUNT)]
        peers = [FarPeer(path.address, f"p{i}", secret) for i, path in enumerate(paths)]
        try:
            for peer in peers:
                peer.start()
            until(lambda: all(peer.count > 0 for peer in peers), "the first all-reduce")
            for _ in range(2):
                connections, counts = paths[2].connection_count, [peer.count for peer in peers]
                paths[2].reset()
                until(lambda: paths[2].connection_count > connections, "the next connection")  # noqa: B023
                until(lambda: all(p.count > c + 2 for p, c in zip(peers, counts, strict=True)), "the next")  # noqa: B023
            assert not any(peer.errors for peer in peers)
        finally:
            for peer in peers:
                peer.comm.close()
                peer.join()
            for path in paths:
                path.close()


def sync_many(peer: Peer) -> int:
    """Syncs so many tensors that the vote is large; returns the world size then."""
    arrays = {f"layers.{number}.attention.weight": np.zeros(4, np.float32) for number in range(3000)}
    tensors = [zpccl.TensorInfo.from_numpy(array, name) for name, array in arrays.items()]
    peer.comm.sync_shared_state(zpccl.SharedState(tensors))
    return peer.comm.world_size


def sync_many_and_lose_the_master(peer: Peer, port: int) -> int:
    """The same. The connection to the master breaks while it waits for the others, and then it sends a note."""

    def lose_connection() -> None:
        until(lambda: is_calling(peer.comm), "the call")
        for copy, _, other in stream_sockets():
            with copy:
                if other[1:2] == (port,):
                    copy.shutdown(socket.SHUT_RDWR)
                    peer.note("lost")

    threading.Thread(target=lose_connection, daemon=True).start()
    return sync_many(peer)


@pytest.mark.slow
def test_a_member_with_a_large_vote() -> None:
    """It comes back, although its vote, which it repeats at once, arrives long after its Hello."""
    with wide(3, "link * * delay_ms=40", "host * egress_mbit=20") as network, cluster(network=network) as run:
        members = run.members(2)
        members[0].start(sync_many_and_lose_the_master, int(run.master.address.rpartition(":")[2]))
        assert members[0].note() == "lost"
        members[1].start(sync_many)
        assert [member.value() for member in members] == [2, 2]
        assert lines_of_losses(run) == []
