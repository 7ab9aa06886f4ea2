"""L3, S3: several masters, real processes. A quorum of members moves to a standby; two parts never both go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.delays import FarPath
from e2e.harness import Child, Cluster, MasterProcess, all_of, cluster, sums, until
from e2e.restarts import read_notes, train

pytestmark = pytest.mark.e2e


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
    """L3, S1, S5: no call fails and no result differs, whichever of the two masters is killed."""
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


def leave_without_a_master(peer: harness.Peer) -> None:
    """Leaves while no master leads this peer; sends a note just before."""
    loop = peer.comm._loop
    assert loop is not None
    until(lambda: not loop._machine.is_led)
    peer.note("leaving")
    peer.comm.close()


def test_the_next_master_hears_who_has_left_before_it_leads() -> None:
    """L1, S6: otherwise it would wait for that member, which may be at another master."""
    with two_masters() as (run, masters):
        address = ",".join(master.address for master in masters)
        members = start(run, [address] * 3, 3)
        masters[1].freeze()
        masters[0].kill()
        members[0].start(leave_without_a_master)
        members[0].note()
        masters[1].thaw()
        members[0].value()
        assert sums(members[1:]) == [2.0] * 2
        assert f"member {members[0].name} left" in masters[1].log.read_text()


def test_a_newcomer_finds_the_master_that_leads() -> None:
    """L3: this also holds if the first master of the list is back and leads no run."""
    with two_masters() as (run, masters):
        address = ",".join(master.address for master in masters)
        members = start(run, [address] * 3, 3)
        masters[0].kill()
        assert sums(members) == [3.0] * 3
        run.master = MasterProcess(str(masters[0].log.parent), "again", bind=masters[0].address)
        newcomer = run.child()
        newcomer.start(harness.connect, address, name=newcomer.name, n_attempts=50)
        all_of(members, harness.admit, 4)
        newcomer.value()
        assert sums([*members, newcomer]) == [4.0] * 4


def own_id(peer: harness.Peer) -> str:
    return peer.comm.peer_id


def lowest_first(members: list[Child]) -> list[Child]:
    """The members, starting with the one that has the lowest peer id."""
    return sorted(members, key=lambda child: str(child.call(own_id)))


@pytest.mark.slow
def test_two_masters_reached_by_disjoint_halves_never_both_lead() -> None:
    """S3: of four members, the two that include the lowest id go on. The others wait, and rejoin after the heal."""
    with two_masters() as (run, masters):
        paths = [[FarPath(master.address) for master in masters] for _ in range(4)]
        lists = [",".join(path.address for path in both) for both in paths]
        members = start(run, lists, 4, master_timeout=60)
        path_of = dict(zip(members, paths, strict=True))
        ordered = lowest_first(members)
        # The half that may go on reaches the standby only, so it has to move there.
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
            # A peer that joins first votes for the other.
            child.start(harness.join, lists[members.index(child)], 4, name=child.name, n_attempts=50)
        for child in going_on:
            child.start(harness.admit, 4)
        for child in (*going_on, *waiting):
            child.value()
        assert sums(members) == [4.0] * 4
        for child in members:
            child.call(harness.close)
        for both in paths:
            for path in both:
                path.close()


def reduce_until_done(peer: harness.Peer) -> float:
    """All-reduces ones until that succeeds. Returns its world size."""
    while True:
        with contextlib.suppress(zpccl.PeerLost):
            return float(peer.comm.all_reduce(np.ones(10, np.float32))[0])
