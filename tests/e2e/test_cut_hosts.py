"""Hosts that fall silent without an RST or an ICMP message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Peer, cluster, is_connected, until
from e2e.networks import hosts, wait_for_resends
from e2e.training import end, lines_of_losses, start_training, train, train_anew

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MASTER = 0


def test_a_host_that_is_cut_off() -> None:
    """L1, L2, S5: the others go on without it. When it is back, its error says so, and it can join again."""
    with hosts(5) as network, cluster("--heartbeat-timeout", "2", network=network) as run:
        children = start_training(run, 4, heartbeat_timeout=2)
        lost, others = children[3], children[:3]
        network.cut_host(4)
        assert [child.note() for child in others] == [3] * 3
        assert not lost.is_done()
        network.heal()
        failure = lost.failure()
        assert failure.kind == "Kicked" and failure.attributes["reason"]
        lost.start(train_anew, run.master.address, name=lost.name, heartbeat_timeout=2)
        assert [child.note() for child in children] == [4] * 4
        results = end(children)
        for result in results[:3]:
            assert set(result["failures"]) <= {(lost.name,)}


def test_a_host_that_stays_cut_off() -> None:
    """L1: its calls end once it has not reached the master for master_timeout."""
    with hosts(4) as network, cluster("--heartbeat-timeout", "2", network=network) as run:
        children = start_training(run, 3, heartbeat_timeout=2, master_timeout=3)
        network.cut_host(3)
        assert children[2].failure().kind == "MasterUnreachable"
        assert [child.note() for child in children[:2]] == [2, 2]
        network.heal()
        children[2].start(train_anew, run.master.address, name="again")
        assert [child.note() for child in children] == [3] * 3
        end(children)


def test_the_host_of_the_master_is_cut_off_for_less_than_the_heartbeat_timeout() -> None:
    """L3: no call fails, nobody is lost."""
    with hosts(5) as network, cluster(network=network) as run:
        children = start_training(run, 4)
        network.cut_host(MASTER)
        wait_for_resends(network, MASTER, 4)
        network.heal()
        for result in end(children):
            assert result["failures"] == []
        assert lines_of_losses(run) == []


def train_and_tell_of_absence(peer: Peer) -> dict[str, Any]:
    """Trains, and sends a note when the connection to the master is given up."""
    peer.note_when(lambda: not is_connected(peer.comm), "away")
    return train(peer)


def test_the_host_of_the_master_is_cut_off_for_longer_than_the_heartbeat_timeout() -> None:
    """L3: no call fails, as when the master is killed and started again."""
    with hosts(5) as network, cluster("--heartbeat-timeout", "2", network=network) as run:
        children = run.members(4, heartbeat_timeout=2)
        for child in children:
            child.start(train_and_tell_of_absence)
        assert [child.note() for child in children] == [4] * 4
        network.cut_host(MASTER)
        assert [child.note() for child in children] == ["away"] * 4
        port = int(run.master.address.rpartition(":")[2])
        until(lambda: not network.run(MASTER, lambda: connections_to(port)), "the master to give the peers up")
        network.heal()
        for result in end(children):
            assert result["failures"] == []


def connections_to(port: int) -> int:
    """Number of established connections to a port, in the network of the calling thread."""
    lines = Path("/proc/thread-self/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(int(local.rpartition(":")[2], 16) == port and state == "01" for _, local, _, state, *_ in fields)
