"""Paths between two hosts fall silent while both reach the master. Nobody is evicted if an order avoids the paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zpccl
from e2e import harness
from e2e.harness import Child, Cluster, Peer, cluster, sums
from e2e.networks import hosts
from e2e.training import again, end, lines_of_losses, start_training, train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ELEMENTS = 16 << 20


def by_rank(children: list[Child]) -> list[int]:
    """The hosts of members, in the order in which they were admitted."""
    ranks = {child.call(harness.view)[2]: host for host, child in enumerate(children, 1)}
    return [ranks[rank] for rank in range(len(children))]


def reduce_over_a_cut(peer: Peer, seed: int, in_place: bool) -> dict[str, Any]:
    """Reduces until one call has failed and a later one has succeeded. Returns what happened on the way."""
    original = np.random.default_rng(seed).standard_normal(ELEMENTS, np.float32)
    send = original.copy()
    recv = send if in_place else np.empty_like(send)
    moved = peer.bytes_moved()
    peer.note_when(lambda: peer.bytes_moved() > moved + (1 << 20), "moving")
    failures: list[tuple[str, ...]] = []
    restored: list[bool] = []
    done, is_over = 0, False
    while not is_over:
        send[:] = original
        try:
            peer.comm.all_reduce(send, recv)
        except zpccl.PeerLost as error:
            failures.append(error.peers)
            restored.append(bool((send.view(np.uint32) == original.view(np.uint32)).all()))
        else:
            done, is_over = done + 1, bool(failures)
    facts = {"failures": failures, "restored": restored, "done": done, "sum": recv[:: ELEMENTS // 64].copy()}
    return facts | {"view": harness.view(peer)}


def check_reduces(run: Cluster, facts: list[dict[str, Any]], epoch: int) -> None:
    """S1, S2, L2: the same calls failed on all members, the last sum includes all of them, and nobody was evicted."""
    inputs = [np.random.default_rng(seed).standard_normal(ELEMENTS, np.float32) for seed in range(len(facts))]
    expected = sum(values[:: ELEMENTS // 64] for values in inputs)
    for fact in facts:
        assert all(fact["restored"]), "S2"
        assert len(fact["failures"]) == len(facts[0]["failures"]) and fact["done"] == facts[0]["done"], "S1"
        assert np.array_equal(fact["sum"], facts[0]["sum"]), "S1"
        assert np.allclose(fact["sum"], expected, rtol=1e-5, atol=1e-5), "L2"
        assert fact["view"][:2] == (epoch, len(facts)), "L2"
    assert lines_of_losses(run) == []


@pytest.mark.parametrize(("in_place", "both_ways"), [(True, True), (False, True), (True, False)])
def test_a_path_that_is_cut_in_a_transfer(in_place: bool, both_ways: bool) -> None:
    """L2: the call fails, the next one succeeds with all four, in an order that avoids the path."""
    with hosts(5) as network, cluster(network=network) as run:
        children = run.members(4)
        order, epoch = by_rank(children), children[0].call(harness.view)[0]
        for seed, child in enumerate(children):
            child.start(reduce_over_a_cut, seed, in_place)
        assert [child.note() for child in children] == ["moving"] * 4
        if both_ways:
            network.cut(order[1], order[2])
        else:
            network.cut_one_way(order[2], order[1])  # The way of acknowledgements: data goes the other way.
        facts = [child.value(60) for child in children]
        check_reduces(run, facts, epoch)
        assert len(facts[0]["failures"]) == 1 or not both_ways
        network.heal()
        assert sums(children) == [4.0] * 4


def test_a_path_that_is_cut_while_nothing_is_sent() -> None:
    """L2: before the run's first reduce. Calls may fail at first; then all four take part."""
    with hosts(5) as network, cluster(network=network) as run:
        children = run.members(4)
        order, epoch = by_rank(children), children[0].call(harness.view)[0]
        network.cut(order[0], order[1])
        for seed, child in enumerate(children):
            child.start(reduce_until_it_works, seed)
        facts = [child.value(60) for child in children]
        assert len(facts[0]["failures"]) <= 1
        check_reduces(run, facts, epoch)
        network.heal()
        for child in children:
            child.start(train)
        assert [child.note() for child in children] == [4] * 4
        end(children)


def reduce_until_it_works(peer: Peer, seed: int) -> dict[str, Any]:
    """Makes one reduce, and repeats it while it fails."""
    send = np.random.default_rng(seed).standard_normal(ELEMENTS, np.float32)
    failures: list[tuple[str, ...]] = []
    recv = again(failures, lambda: peer.comm.all_reduce(send))
    facts = {"failures": failures, "restored": [], "done": 1, "sum": recv[:: ELEMENTS // 64].copy()}
    return facts | {"view": harness.view(peer)}


def test_a_path_that_is_cut_while_all_train() -> None:
    """L2, S5: reduces, votes and syncs go on with all four, while the path is cut and after it is back."""
    with hosts(5) as network, cluster(network=network) as run:
        children = run.members(4)
        order = by_rank(children)
        for child in children:
            child.start(train)
        assert [child.note() for child in children] == [4] * 4
        network.cut(order[1], order[2])
        for result in end(children):
            assert result["view"][1] == 4
        assert lines_of_losses(run) == []


# --- Joining over a cut path ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [1, 2, 3])
def test_a_joiner_without_a_path_to_one_member(other: int) -> None:
    """L2, S5: the joiner is admitted, as an order avoids the path, and gets the state from the members it reaches."""
    with hosts(5) as network, cluster(network=network) as run:
        children = start_training(run, 3)
        network.cut(other, 4)
        joiner = run.child()
        joiner.start(harness.connect, run.master.address, name=joiner.name)
        joiner.value()
        joiner.start(train, is_newcomer=True)
        children.append(joiner)
        assert [child.note() for child in children] == [4] * 4
        for result in end(children):
            assert result["failures"] == []
        assert lines_of_losses(run) == []


def test_a_joiner_without_a_path_to_any_member_disturbs_nobody() -> None:
    """S6: the joiner gets an error that says so; the others go on."""
    with hosts(4) as network, cluster(network=network) as run:
        children = start_training(run, 2)
        for member in (1, 2):
            network.cut(member, 3)
        joiner = run.child()
        failure = joiner.fails(harness.connect, run.master.address, name=joiner.name)
        assert failure.kind == "PeerUnreachable"
        for member in (1, 2):  # The error names each attempt and its outcome.
            assert f"{network.address(member)}:48149: no answer in time" in failure.text
        for result in end(children):
            assert result["failures"] == [] and result["view"][1] == 2
        assert lines_of_losses(run) == []
