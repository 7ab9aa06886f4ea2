"""Tags of the collectives of a process group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

Tags = pytest.importorskip("zpccl.torch.tags", exc_type=ImportError).Tags

pytestmark = pytest.mark.torch


def test_a_training_loop_finds_its_tags_again() -> None:
    """So its calls are planned ahead."""
    tags = Tags(64, turns=4)
    step = ["a", "b", "b", "c"]
    first, second, third, fourth = ([tags.next(signature) for signature in step] for _ in range(4))
    assert len(set(first)) == 4
    assert second != first and [fourth[0], fourth[3]] != [first[0], first[3]]
    assert [tags.next(signature) for signature in step] == first
    assert third[1:3] == first[1:3]


@given(st.lists(st.integers(0, 9), max_size=200), st.integers(1, 4), st.integers(4, 16))
def test_tags_are_the_same_on_all_ranks_and_bounded(signatures: list[int], turns: int, count: int) -> None:
    """A tag stays with its signature until all other signatures with tags have been used more recently."""
    one, other = Tags(count, turns), Tags(count, turns)
    given_out = [one.next(signature) for signature in signatures]
    assert given_out == [other.next(signature) for signature in signatures]
    assert all(0 <= tag < count for tag in given_out)
    recent: dict[int, int] = {}
    for signature, tag in zip(signatures, given_out, strict=True):
        block = tag // turns
        if signature in recent:
            assert recent.pop(signature) == block
        elif len(recent) == count // turns:
            assert recent.pop(next(iter(recent))) == block
        else:
            assert block not in recent.values()
        recent[signature] = block
