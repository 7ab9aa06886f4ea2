"""What a peer, its log, the metrics, and the log of the master show of a network of several hosts."""

from __future__ import annotations

import signal
import urllib.request

import numpy as np
import pytest
from networks import DEVICE

import zpccl
from e2e.harness import Peer, all_of, cluster, until
from e2e.networks import hosts, wide
from zpccl import limits

pytestmark = pytest.mark.e2e

MBIT = 10**6 / 8


def reduce_large(peer: Peer) -> None:
    peer.comm.all_reduce(np.ones(limits.SPEED_TENSOR_BYTES // 4, np.float32), op=zpccl.ReduceOp.SUM)


def optimize(peer: Peer) -> None:
    peer.comm.optimize_topology()


def own_id(peer: Peer) -> str:
    return peer.comm.peer_id


def topology(peer: Peer) -> tuple[zpccl.Topology, str]:
    found = peer.comm.topology()
    return found, str(found)


def metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def test_paths_have_rates_and_links_interfaces() -> None:
    """Rates come from collectives on large tensors."""
    with hosts(4) as network, cluster(network=network) as run:
        peers = run.members(3)
        all_of(peers, reduce_large)
        all_of(peers, reduce_large)  # With the votes for this one the master has all reports on the first.
        found, text = peers[0].call(topology)
        assert [peer.name for peer in found.peers] and len(found.peers) == 3
        assert found.paths and all(path.age is not None and path.age < 60 for path in found.paths)
        assert any(path.round_trip is not None for path in found.paths)
        assert {link.ends.interface for link in found.links} == {DEVICE}
        assert {link.ends.local_address.rpartition(":")[0] for link in found.links} == {network.address(1)}
        assert {link.ends.remote_address.rpartition(":")[0] for link in found.links} == {"10.0.2.2", "10.0.3.2"}
        assert "paths measured: " in text and DEVICE in text


@pytest.mark.alone
def test_optimize_topology_measures_paths_and_hosts() -> None:
    """Each path by itself, and what each host sends in all. Host 1 has two paths that are faster than its line is.

    Acknowledgements that the emulator holds back while it waits for a processor would raise the rates.
    """
    lines = ["link * * delay_ms=5 rate_mbit=16", "link 2 3 rate_mbit=4", "host 1 egress_mbit=20"]
    with wide(4, *lines, "link 0 * rate_mbit=0") as network, cluster(network=network) as run:
        peers = run.members(3)
        ids = all_of(peers, own_id)
        all_of(peers, optimize)
        found, _ = peers[0].call(topology)
        one, two, three = (next(peer for peer in found.peers if peer.peer_id == own) for own in ids)
        for sender, receiver, mbit in ((one, two, 16), (one, three, 16), (three, one, 16), (two, three, 4)):
            rate = found.path(sender, receiver).bytes_per_second
            assert rate is not None and 0.6 < rate / (mbit * MBIT) < 1.1, (mbit, rate)
        assert [peer.sent_bytes_per_second for peer in (one, two, three)] == [
            pytest.approx(mbit * MBIT, rel=0.35) for mbit in (20, 20, 20)
        ], "the others send as much as their two paths carry"


def test_operators_see_the_rates() -> None:
    """The metrics show the rates, and so does the log of the master after SIGUSR2."""
    with hosts(3) as network, cluster("--metrics", f"{network.address(0)}:9464", network=network) as run:
        peers = run.members(2)
        all_of(peers, reduce_large)
        all_of(peers, reduce_large)

        def shown() -> bool:
            all_of(peers, reduce_large)
            found = network.run(0, lambda: metrics(f"{network.address(0)}:9464"))
            return "zpccl_paths_measured 2.0" in found and "zpccl_path_bytes_per_second" in found

        until(shown, "the paths in the metrics")
        run.master.signal(signal.SIGUSR2)
        until(lambda: "the network: 2 peers; paths measured: 2;" in run.master.log.read_text(), "a line in the log")
