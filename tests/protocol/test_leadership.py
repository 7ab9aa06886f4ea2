"""The rules of docs/leadership.md, one by one."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from zpccl.protocol.events import PeerMessageReceived
from zpccl.protocol.leadership import Acceptor, Candidate, Leader, MemberList, Promise, descend, is_quorum

from .harness import pid, pids
from .standby import TWO
from .takeover import hello_of, report_of

TERM = 1 << 32
"""The first epoch of term 1."""


def listed(epoch: int, members: str, parent: int = 0, old: str = "") -> MemberList:
    """A member list. If `old` is given, it is not known to be committed."""
    return MemberList(epoch, frozenset(pids(members)), parent, frozenset(pids(old)))


def leader_of(members: str) -> Leader:
    """A leader with a committed list of its own."""
    leader = Leader(Promise(1, b"l" * 16), needs_quorum=True)
    leader.propose(TERM, pids(members))
    assert leader.list.is_committed
    return leader


def acknowledged(leader: Leader, names: str) -> list[bool]:
    """Members acknowledge the present list. Returns for each whether that committed it."""
    return [leader.acknowledge(pid(name), leader.list.epoch) for name in names]


# --- Quorums ----------------------------------------------------------------------------------------------------------


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
    """A majority, or half of them with the lowest id. Strangers count for nothing."""
    assert is_quorum(pids(present), pids(members)) is expected


@pytest.mark.parametrize("size", range(1, 8))
def test_two_quorums_of_one_list_share_a_member(size: int) -> None:
    """S3: so two masters, reached by disjoint parts of the members, cannot have one each."""
    members = pids("abcdefg"[:size])
    parts = [set(part) for count in range(size + 1) for part in combinations(members, count)]
    quorums = [part for part in parts if is_quorum(part, members)]
    assert quorums
    assert all(one & other for one in quorums for other in quorums)


# --- Promise, obey, accept --------------------------------------------------------------------------------------------

LOW, HIGH, RIVAL = Promise(4, b"l" * 16), Promise(5, b"h" * 16), Promise(5, b"r" * 16)


def test_a_term_is_given_to_one_leadership() -> None:
    """S3: a term never goes down, and never to a rival in the same term. The promised leadership may ask again."""
    acceptor = Acceptor()
    assert acceptor.promise(HIGH)
    assert not acceptor.promise(LOW)
    assert not acceptor.promise(RIVAL)
    assert acceptor.promise(HIGH)
    assert acceptor.promised == HIGH


def test_only_the_promised_leadership_is_obeyed() -> None:
    """S3: the peer does not obey a later leadership either, if that one has not asked."""
    acceptor = Acceptor()
    acceptor.promise(HIGH)
    for other in (LOW, RIVAL, Promise(6, b"h" * 16)):
        assert not acceptor.obey(other)
    assert acceptor.obey(HIGH)
    acceptor.on_disconnected()
    assert not acceptor.is_led


def test_who_has_promised_another_one_is_led_no_more() -> None:
    """S3: messages that the old leader has sent before may still arrive on this connection."""
    acceptor = Acceptor()
    acceptor.register(LOW)
    assert acceptor.is_led
    acceptor.promise(HIGH)
    assert not acceptor.is_led


def test_lists_of_other_terms_are_not_accepted() -> None:
    acceptor = Acceptor()
    acceptor.register(HIGH)
    assert acceptor.accepts(5 << 32, 0)
    assert acceptor.accepts((5 << 32) + 1, (5 << 32) + 1)
    assert not acceptor.accepts(5 << 32, (5 << 32) + 1)
    assert not acceptor.accepts(4 << 32, 0)
    assert not acceptor.accepts(6 << 32, 0)
    acceptor.on_disconnected()
    assert not acceptor.accepts(5 << 32, 0)


# --- Descend ----------------------------------------------------------------------------------------------------------


def test_the_newest_descendant_of_what_is_committed_goes_on() -> None:
    first, proposed = listed(5, "abc"), listed(9, "ab", 5, "abc")
    assert descend([first, proposed]) == proposed
    assert descend([first]) == first


def test_a_larger_number_alone_decides_nothing() -> None:
    """S3: 9 was never committed, as 8 was committed in its place. Nobody who knows that may go on with 9."""
    assert descend([listed(9, "ab", 5, "abc"), listed(8, "bc", 5)]) == listed(8, "bc", 5)
    assert descend([listed(9, "ab", 5, "abc"), listed(12, "bcx", 8, "bc")]) == listed(12, "bcx", 8, "bc")


def test_a_repeat_of_what_is_committed_comes_before_what_followed_it_earlier() -> None:
    """S3. Duel, seed 9401189: 8 was committed, which only its leader heard; that leader then proposed 9. The next
    leader repeated 8 as 12, which was committed too."""
    followed, repeated = listed(9, "abc", 8, "a"), listed(12, "a", 5, "a")
    assert descend([followed, repeated]) == descend([repeated, followed]) == repeated
    assert descend([followed, listed(12, "ab", 5, "a")]) == followed


def test_one_who_knows_that_a_list_is_committed_speaks_for_all() -> None:
    assert descend([listed(9, "ab", 5, "abc"), listed(9, "ab", 5)]) == listed(9, "ab", 5)


# --- Propose and commit -----------------------------------------------------------------------------------------------


def test_the_first_list_is_committed_at_once() -> None:
    leader = leader_of("a")
    assert leader.list.is_committed
    assert leader.may_lead(pids("a"))


def test_a_list_is_committed_by_quorums_of_both() -> None:
    """S3: the quorum of the list before, which may be all that another master knows, and its own quorum."""
    leader = leader_of("abcd")
    leader.propose(TERM + 1, pids("abc"))
    assert leader.list.old_members == set(pids("abcd"))
    assert leader.list.parent == TERM
    assert acknowledged(leader, "bca") == [False, False, True]  # b and c are only half of abcd.
    assert leader.list.is_committed


def test_the_old_quorum_alone_commits_nothing() -> None:
    """S3: the new members may be at another master, to which they are committed."""
    leader = leader_of("ab")
    leader.propose(TERM + 1, pids("abcde"))
    assert acknowledged(leader, "abc") == [False, False, True]


def test_the_new_quorum_alone_commits_nothing() -> None:
    """S3."""
    leader = leader_of("abcde")
    leader.propose(TERM + 1, pids("cde"))
    assert not leader.may_lead(pids("de"))
    leader.propose(TERM + 2, pids("de"))
    assert acknowledged(leader, "de") == [False, False]


def test_an_acknowledgement_is_of_one_epoch() -> None:
    """S3: it does not count for an earlier proposed list, nor for a later number."""
    leader = leader_of("abcde")
    leader.propose(TERM + 1, pids("abcd"))
    assert not leader.acknowledge(pid("a"), TERM + 1)
    leader.propose(TERM + 2, pids("abc"))
    assert leader.list.old_members == set(pids("abcde"))
    assert not leader.acknowledge(pid("b"), TERM + 2)
    assert not leader.acknowledge(pid("c"), TERM + 2)  # a has acknowledged another list.
    for epoch in (TERM, TERM + 1, TERM + 3):
        assert not leader.acknowledge(pid("a"), epoch)
    assert leader.acknowledge(pid("a"), TERM + 2)


def test_what_is_not_committed_is_not_left() -> None:
    """S3: a and b of the old members may follow another master, which does not know the list without a."""
    leader = leader_of("abcd")
    leader.propose(TERM + 1, pids("bcd"))
    assert not leader.may_lead(pids("cd"))
    acknowledged(leader, "bcd")
    assert leader.may_lead(pids("cd"))


def test_who_leaves_goes_on_nowhere() -> None:
    """The last but one may leave, also if it has the lowest id."""
    leader = leader_of("ab")
    leader.propose(TERM + 1, pids("b"))
    assert acknowledged(leader, "b") == [False]
    assert leader.on_left(pid("a"))
    assert leader.may_lead(pids("b"))


def test_an_adopted_list_is_repeated_and_stands_until_it_is_committed() -> None:
    """S3: it may have been committed, and one of its members may know that. Then every later list needs its quorum."""
    adopted = listed(5, "abxyz", 4, "ab")
    leader = Leader(Promise(1, b"l" * 16), needs_quorum=True, adopted=adopted)
    leader.propose(TERM, adopted.members)
    assert (leader.list.parent, leader.list.old_members) == (4, frozenset(pids("ab")))
    assert not leader.may_change
    assert not leader.may_lead(pids("ab"))
    assert leader.may_lead(pids("axy")), "quorums of ab and of abxyz"
    assert acknowledged(leader, "axy") == [False, False, True]
    assert leader.may_change


def test_in_a_run_with_one_address_what_is_proposed_is_committed() -> None:
    leader = Leader(Promise(1, b"l" * 16), needs_quorum=False)
    leader.propose(TERM, pids("abc"))
    leader.propose(TERM + 1, pids("c"))
    assert leader.list.is_committed
    assert leader.may_lead(())
    assert leader.may_change


names = st.sampled_from("abcdefg")


@given(st.sets(names, min_size=1), st.lists(st.tuples(st.sets(names), st.sets(names)), max_size=5))
def test_no_other_master_has_a_quorum_beside(first: set[str], steps: list[tuple[set[str], set[str]]]) -> None:
    """S3: after any history of one leader, the peers that have not accepted its committed list are no quorum of what
    they know.

    Each step proposes a list, if those present may go on without the others. Some of them accept it.
    """
    leader, known = leader_of("".join(sorted(first))), {pid(name): frozenset(pids(first)) for name in first}
    committed, members, epoch = frozenset(pids(first)), frozenset(pids(first)), TERM
    for lost, seeing in steps:
        rest = members - set(pids(lost))
        if not rest or not leader.may_lead(rest):
            continue
        members, epoch = rest, epoch + 1
        leader.propose(epoch, members)
        for peer_id in sorted(members & set(pids(seeing))):
            known[peer_id] = members
            if leader.acknowledge(peer_id, epoch):
                committed = members
    older = {peer_id for peer_id, its_list in known.items() if committed < its_list}
    lists = {known[p] for p in older}
    assert not any(is_quorum({p for p in older if known[p] >= its_list}, its_list) for its_list in lists)


# --- Revoked keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reports", "closed", "reports again"])
def test_a_revoked_key_counts_for_the_report_before_it_alone(how: str) -> None:
    """L3: a standby waits for days. A key that was revoked in the meantime may be allowed again when it leads."""
    candidate = Candidate(0, 1, 1, Promise(1, b"l" * 16), b"the own run.....")
    report = report_of("a", hello=replace(hello_of("a"), **TWO))
    event = PeerMessageReceived("a1", report, identity="key of a")
    candidate.add(event, report, 0)
    candidate.revoke({"key of a": "a", "key of b": "b"})
    if how == "closed":
        candidate.on_connection_closed("a1")
    elif how == "reports again":
        candidate.add(event, report, 0)
    assert candidate.revoked == ({pid("a"): "a"} if how == "reports" else {})
