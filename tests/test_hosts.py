"""Hosts whose peers come and go together, with real communicators."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import numpy as np
import pytest
from e2e.harness import until
from e2e.local import failure, finish

import zpccl


class Hosts:
    """A master, and hosts of two peers each: one in each of two groups."""

    def __init__(self) -> None:
        self.master = zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05)
        self.master.run()
        self.threads = futures.ThreadPoolExecutor(16)
        self.peers: dict[str, list[zpccl.Communicator]] = {}

    def make(self, host: str) -> list[zpccl.Communicator]:
        """The two communicators of a host, not connected yet."""
        made = [
            zpccl.Communicator(self.master.address, group, host=host, host_size=2, name=f"{host}.{group}")
            for group in range(2)
        ]
        self.peers[host] = made
        return made

    def all(self, *hosts: str) -> list[zpccl.Communicator]:
        """All communicators of some hosts."""
        return [comm for host in hosts for comm in self.peers[host]]

    def join(self, host: str, *members: str) -> None:
        """A new host connects, and the members admit it."""
        calls = [self.threads.submit(comm.connect) for comm in self.make(host)]
        self.admit(*members)
        for call in calls:
            finish(call)

    def admit(self, *members: str) -> None:
        """The members admit a host."""
        while any(comm.world_size == len(members) for comm in self.all(*members)):
            for call in [self.threads.submit(comm.update_topology) for comm in self.all(*members)]:
                finish(call)

    def ask_pending(self, *members: str) -> list[bool]:
        """The answer of are_peers_pending to each."""
        return [finish(call) for call in [self.threads.submit(c.are_peers_pending) for c in self.all(*members)]]

    def sums(self, *hosts: str) -> list[float]:
        """All reduce a one, each in its own group."""
        comms = self.all(*hosts)
        calls = [self.threads.submit(comm.all_reduce, np.ones(4), op=zpccl.ReduceOp.SUM) for comm in comms]
        return [float(finish(call)[0]) for call in calls]

    def close(self) -> None:
        """Closes all communicators, and the master."""
        for comm in self.all(*self.peers):
            comm.close()
        self.master.interrupt()
        self.threads.shutdown()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.close()


def test_a_host_is_admitted_once_all_of_it_is_there(hosts: Hosts) -> None:
    first, second = hosts.make("one")
    begins = hosts.threads.submit(first.connect)
    with pytest.raises(futures.TimeoutError):  # Not the built-in one before Python 3.11.
        begins.result(0.3)
    finish(hosts.threads.submit(second.connect))
    finish(begins)
    assert (first.world_size, second.world_size) == (1, 1)


def test_half_a_host_is_not_waited_for(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    """S6: members see it as pending only once the other half has come."""
    hosts.join("one")
    with caplog.at_level("INFO", "zpccl"):
        early, late = hosts.make("two")
        calls = [hosts.threads.submit(early.connect)]
        until(lambda: "1 of 2 of host two" in caplog.text, "the registration of one of two")
        assert hosts.ask_pending("one") == [False] * 2
        calls.append(hosts.threads.submit(late.connect))
        until(lambda: hosts.ask_pending("one") == [True] * 2, "the other half")
        hosts.admit("one")
    for call in calls:
        finish(call)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_goes_as_a_whole_and_comes_back(hosts: Hosts, victim: int) -> None:
    """L1: the other peer of the host gets an error, whatever it waits for. Both groups go on without the host."""
    hosts.join("one")
    hosts.join("two", "one")
    assert hosts.sums("one", "two") == [2.0] * 4
    gone, left = hosts.peers["two"][victim], hosts.peers["two"][1 - victim]
    waiting = hosts.threads.submit(left.all_reduce, np.ones(4))
    gone.close()
    assert "its host two has lost a peer" in str(failure(waiting))
    until(lambda: {comm.world_size for comm in hosts.peers["one"]} == {1}, "the loss of the whole host")
    left.close()
    hosts.join("two", "one")
    assert hosts.sums("one", "two") == [2.0] * 4
