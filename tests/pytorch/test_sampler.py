"""Each sample is assigned once, whichever peers come and go."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from e2e.local import local_run
from hypothesis import given
from hypothesis import strategies as st

import zpccl

pytest.importorskip("torch")
ElasticSampler = pytest.importorskip("zpccl.torch.sampler", exc_type=ImportError).ElasticSampler

pytestmark = pytest.mark.torch

TROUBLE = st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.booleans()), max_size=60)


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 5), st.booleans(), TROUBLE)
def test_each_sample_is_read_once(
    length: int, batch_size: int, size: int, shuffle: bool, trouble: list[tuple[bool, int, bool]]
) -> None:
    """In each step a peer may be lost, before or after its gradients count. After it a peer may join."""

    def new_peer() -> Any:
        sampler = ElasticSampler(length, seed=3, shuffle=shuffle)
        return sampler, zpccl.SharedState(sampler.tensor_infos())

    peers = {f"peer{i}": new_peer() for i in range(size)}
    joined = size
    read: Counter[int] = Counter()
    steps = iter(trouble)
    while next(iter(peers.values()))[0].remaining:
        is_lost, which, joins = next(steps, (False, 0, False))
        members = list(peers)
        batches = {peer: sampler.take(batch_size, members, peer).tolist() for peer, (sampler, _) in peers.items()}
        assert all(len(batch) <= batch_size for batch in batches.values())
        if is_lost and len(peers) > 1:
            del peers[members[which % len(members)]]
        took_part = list(peers)
        read.update(sample for peer in took_part for sample in batches[peer])
        for sampler, _ in peers.values():
            sampler.commit(took_part)
        if joins:
            holder = next(iter(peers.values()))
            newcomer = new_peer()
            for mine, other in zip(newcomer[1].tensor_infos, holder[1].tensor_infos, strict=True):
                mine.tensor[:] = other.tensor
            peers[f"peer{joined}"] = newcomer
            joined += 1
    assert read == Counter(range(length))


def test_epochs_differ_and_are_the_same_on_all_peers() -> None:
    one, other = ElasticSampler(100, seed=1), ElasticSampler(100, seed=1)
    first = one.take(100, ["a"], "a")
    one.commit(["a"])
    assert one.remaining == 0 and len(one.take(5, ["a"], "a")) == 0
    one.next_epoch()
    other.next_epoch()
    second = one.take(100, ["a"], "a")
    assert one.epoch == 1 and one.remaining == 100
    assert second.tolist() == other.take(100, ["a"], "a").tolist() != first.tolist()
    assert second.dtype == np.int64


def test_the_order_is_the_one_of_all_versions_of_numpy() -> None:
    assert ElasticSampler(8, seed=5).take(8, ["a"], "a").tolist() == [3, 1, 5, 4, 6, 7, 2, 0]


def test_what_cannot_be_is_refused() -> None:
    sampler = ElasticSampler(10)
    with pytest.raises(zpccl.InvalidUsage):
        sampler.commit(["a"])
    calls = ((2, ["a"], "b"), (2, ["a", "a"], "a"), (0, ["a"], "a"), ("2", ["a"], "a"), (2.0, ["a"], "a"))
    for wrong in calls:
        with pytest.raises(zpccl.InvalidArgument):
            sampler.take(*wrong)
    assert len(sampler.take(np.uint8(200), ["a", "b"], "a")) == 5  # 2 times 200 are 400.
    sampler.take(2, ["a"], "a")
    with pytest.raises(zpccl.InvalidArgument, match="'b'"):
        sampler.commit(["a", "b"])
    sampler.commit(["a"])
    with pytest.raises(zpccl.InvalidUsage):
        sampler.commit(["a"])
    for length, seed in ((0, 0), (2**40, 0), (5, -1), ("5", 0), (5, 1.0)):
        with pytest.raises(zpccl.InvalidArgument):
            ElasticSampler(length, seed=seed)


@pytest.mark.e2e
def test_a_newcomer_gets_it_with_the_shared_state() -> None:
    """S5."""
    samplers = [ElasticSampler(50, seed=2) for _ in range(2)]
    states = [zpccl.SharedState(sampler.tensor_infos()) for sampler in samplers]
    first = samplers[0].take(20, ["a"], "a")
    samplers[0].commit(["a"])
    states[0].push_revision()
    with local_run(2) as run:
        run.all(lambda comm: comm.sync_shared_state(states[run.comms.index(comm)]))
        ids = run.comms[0].peer_ids
        rest = [sampler.take(20, ids, comm.peer_id) for sampler, comm in zip(samplers, run.comms, strict=True)]
    assert sorted(np.concatenate([first, *rest]).tolist()) == list(range(50))
