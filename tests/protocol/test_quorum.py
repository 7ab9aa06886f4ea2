"""The quorum rule."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl.protocol.quorum import Quorum, is_quorum

from .harness import pid, pids


@pytest.mark.parametrize(
    ("present", "members", "expected"),
    [
        ("", "", True),
        ("a", "a", True),
        ("", "a", False),
        ("a", "ab", True),
        ("b", "ab", False),
        ("bc", "abc", True),
        ("c", "abc", False),
        ("ad", "abcd", True),
        ("bcd", "abcd", True),
        ("cd", "abcd", False),
        ("cdx", "abcd", False),
    ],
)
def test_who_is_a_quorum(present: str, members: str, expected: bool) -> None:
    """A majority, or half of them with the lowest id; strangers count for nothing."""
    assert is_quorum(pids(present), pids(members)) is expected


@pytest.mark.parametrize("size", range(1, 8))
def test_two_quorums_of_one_list_share_a_member(size: int) -> None:
    """S3: so no two masters, reached by disjoint parts of the members, have one each."""
    members = pids("abcdefg"[:size])
    parts = [set(part) for count in range(size + 1) for part in combinations(members, count)]
    quorums = [part for part in parts if is_quorum(part, members)]
    assert quorums
    assert all(one & other for one in quorums for other in quorums)


def test_the_first_list_is_established_at_once() -> None:
    quorum = Quorum()
    quorum.propose(pids("a"))
    assert quorum.old_members == frozenset()
    assert quorum.may_go_on(pids("a"))


def test_a_list_is_established_by_quorums_of_both() -> None:
    """S3: of the list before, which another master may know alone, and of its own."""
    quorum = Quorum(pids("abcd"))
    quorum.propose(pids("abc"))
    assert quorum.old_members == set(pids("abcd"))
    assert not quorum.acknowledge(pid("b"))
    assert not quorum.acknowledge(pid("c"))  # Half of abcd, without a.
    assert quorum.acknowledge(pid("a"))
    assert quorum.old_members == frozenset()


def test_what_is_not_established_is_not_left() -> None:
    """S3: a, b of the old_members may follow another master, which has not heard of the list without a."""
    quorum = Quorum(pids("abcd"))
    quorum.propose(pids("bcd"))
    assert not quorum.may_go_on(pids("cd"))
    for name in "bcd":
        quorum.acknowledge(pid(name))
    assert quorum.may_go_on(pids("cd"))


def test_a_later_list_has_the_same_base() -> None:
    quorum = Quorum(pids("abcde"))
    quorum.propose(pids("abcd"))
    quorum.acknowledge(pid("a"))
    quorum.propose(pids("abc"))
    assert quorum.old_members == set(pids("abcde"))
    assert not quorum.acknowledge(pid("b"))  # What a had seen was another list.
    quorum.acknowledge(pid("a"))
    assert quorum.acknowledge(pid("c"))


def test_a_list_that_is_taken_over_keeps_its_base() -> None:
    quorum = Quorum(pids("ab"))
    quorum.propose(pids("ab"), old_members=pids("abcd"))
    assert quorum.old_members == set(pids("abcd"))


def test_who_leaves_goes_on_nowhere() -> None:
    """The last but one may leave; the one with the lowest id too."""
    quorum = Quorum(pids("ab"))
    quorum.propose(pids("b"))
    assert not quorum.acknowledge(pid("b"))
    assert quorum.add_consent(pid("a"))
    assert quorum.may_go_on(pids("b"))


names = st.sampled_from("abcdefg")


@given(st.sets(names, min_size=1), st.lists(st.tuples(st.sets(names), st.sets(names)), max_size=5))
def test_no_other_master_has_a_quorum_beside(first: set[str], steps: list[tuple[set[str], set[str]]]) -> None:
    """S3: after any history of one master, those who did not see its established list are no quorum of what they know.

    Each step proposes a list, if those present may go on without the others; some of them see it.
    """
    quorum, known = Quorum(pids(first)), {pid(name): frozenset(pids(first)) for name in first}
    established, members = frozenset(pids(first)), frozenset(pids(first))
    for lost, seeing in steps:
        rest = members - set(pids(lost))
        if not rest or not quorum.may_go_on(rest):
            continue
        members = rest
        quorum.propose(members)
        for peer_id in sorted(members & set(pids(seeing))):
            known[peer_id] = members
            if quorum.acknowledge(peer_id):
                established = members
    older = {peer_id for peer_id, its_list in known.items() if established < its_list}
    lists = {known[p] for p in older}
    assert not any(is_quorum({p for p in older if known[p] >= its_list}, its_list) for its_list in lists)
