"""The election of key sets and of contents that may differ; properties of any outcome.

Revisions, strategies and contents: test_election_table.py.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpccl.errors import Result
from zpccl.protocol.election import Election, Shape, choose_revision, describe_shape_difference, elect, validate_entries
from zpccl.protocol.messages import FetchEntry, StateEntry, SyncSpec
from zpccl.types import SharedStateSyncStrategy

from .harness import digest, entry, sync_spec


def outcome(election: Election[str]) -> tuple[int, str, str, str]:
    """The revision, the holders, the peers that fetch something, and the peers that are refused."""
    return (
        election.revision,
        "".join(election.holders),
        "".join(peer for peer, entries in election.fetch.items() if entries),
        "".join(election.refused),
    )


def test_a_run_may_begin_at_revision_zero_and_repeat_nothing() -> None:
    assert choose_revision({"a": 0}, None, frozenset()) == (0, False)
    assert choose_revision({"a": 1, "b": 0}, 0, frozenset("ab")) == (1, False)


# --- Key sets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd, words",
    [
        ((entry("v", "1"),), ["keys missing here: ['w']", "keys only here: ['v']"]),
        ((entry("v", "1"), entry("w", "1")), ["keys only here: ['v']"]),
        ((entry("w", "1", datatype=11),), ["tensor 'w'", "datatype DOUBLE here, FLOAT there"]),
        ((entry("w", "1", count=5),), ["tensor 'w'", "count 5 here, 4 there"]),
        ((entry("w", "1", free=True),), ["allow_content_inequality True here, False there"]),
        ((entry("w", "1", free=True, count=9),), ["count 9 here, 4 there", "allow_content_inequality True here"]),
    ],
)
def test_another_key_set_is_refused_and_the_rest_go_on(odd: tuple[StateEntry, ...], words: list[str]) -> None:
    plain = (entry("w", "1"),)
    offers = {"a": sync_spec(0, *plain), "b": sync_spec(0, *odd), "c": sync_spec(0, entry("w", "2"))}
    election = elect(offers, None, frozenset())
    assert outcome(election) == (0, "a", "c", "b")
    result, reason = election.refused["b"]
    assert result is Result.INVALID_ARGUMENT
    assert all(word in reason for word in words), reason


def test_the_key_set_of_most_wins() -> None:
    odd, plain = (entry("v", "1"),), (entry("w", "1"),)
    offers = {"a": sync_spec(0, *odd), "b": sync_spec(0, *plain), "c": sync_spec(0, *plain)}
    assert outcome(elect(offers, None, frozenset())) == (0, "bc", "", "a")
    assert outcome(elect({"a": offers["a"], "b": offers["b"]}, None, frozenset())) == (0, "a", "", "b")


def test_the_key_set_is_that_of_peers_at_the_revision() -> None:
    """Two stale peers with an old model do not outvote the one that holds the current one."""
    old, new = (entry("old", "1"),), (entry("new", "1"),)
    offers = {"a": sync_spec(3, *old), "b": sync_spec(3, *old), "c": sync_spec(4, *new)}
    assert outcome(elect(offers, 3, frozenset("abc"))) == (4, "c", "", "ab")


def test_the_key_set_of_a_sender_wins() -> None:
    mine, theirs = (entry("mine", "1"),), (entry("theirs", "1"),)
    offers = {"a": sync_spec(0, *theirs), "b": sync_spec(0, *theirs), "c": sync_spec(0, *mine, strategy=2)}
    assert outcome(elect(offers, None, frozenset())) == (0, "c", "", "ab")


def test_receivers_do_not_choose_the_key_set() -> None:
    odd = (entry("v", "1"),)
    offers = {"a": sync_spec(0, *odd, strategy=1), "b": sync_spec(0, *odd, strategy=1), "c": sync_spec(0)}
    assert outcome(elect(offers, None, frozenset())) == (0, "c", "", "ab")


def test_digests_of_another_kind_are_refused() -> None:
    """Digests of different kinds cannot be compared, whatever the contents: the kind of most peers wins."""
    offers = {name: sync_spec(0, digest_kind=int(name == "b")) for name in "abc"}
    election = elect(offers, None, frozenset())
    assert outcome(election) == (0, "ac", "", "b")
    result, reason = election.refused["b"]
    assert (result, "xxh3 here, blake3 there" in reason) == (Result.INVALID_ARGUMENT, True)


def test_a_long_difference_is_cut() -> None:
    many, none = Shape(0, tuple((f"k{i:04}", 10, 4, False) for i in range(1000))), Shape(0, ())
    assert len(describe_shape_difference(many, none)) < 200
    assert describe_shape_difference(many, many) == "the shared state is equal"


# --- allow_content_inequality ---------------------------------------------------------------------------------------


def test_free_contents_are_kept_at_the_revision_and_fetched_from_behind() -> None:
    offers = {
        "a": sync_spec(1, entry("rng", "a", free=True), entry("w", "x")),
        "b": sync_spec(1, entry("rng", "b", free=True), entry("w", "y")),
        "c": sync_spec(0, entry("rng", "c", free=True), entry("w", "z")),
        "d": sync_spec(0, entry("rng", "a", free=True), entry("w", "x")),
    }
    election = elect(offers, None, frozenset())
    assert election.holders == ["a"]
    assert election.fetch == {
        "a": (),
        "b": (FetchEntry("w", digest("x")),),
        "c": (FetchEntry("rng", digest("a")), FetchEntry("w", digest("x"))),
        "d": (),
    }


def test_free_contents_do_not_split_the_vote() -> None:
    offers = {
        "a": sync_spec(1, entry("rng", "a", free=True), entry("w", "x")),
        "b": sync_spec(1, entry("rng", "b", free=True), entry("w", "y")),
        "c": sync_spec(1, entry("rng", "c", free=True), entry("w", "y")),
    }
    assert outcome(elect(offers, None, frozenset())) == (1, "bc", "a", "")


def test_holders_hold_the_free_contents_that_are_fetched() -> None:
    """b has the elected w but another rng. c fetches both, so it must not be sent to b."""
    offers = {
        "a": sync_spec(1, entry("rng", "a", free=True), entry("w", "x")),
        "b": sync_spec(1, entry("rng", "b", free=True), entry("w", "x")),
        "c": sync_spec(0, entry("rng", "c", free=True), entry("w", "z")),
    }
    election = elect(offers, None, frozenset())
    assert election.holders == ["a"]
    assert election.fetch["c"] == (FetchEntry("rng", digest("a")), FetchEntry("w", digest("x")))
    assert election.fetch["b"] == ()


# --- Properties -----------------------------------------------------------------------------------------------------

KEY_SETS = [("w",), ("rng", "w"), ("v",)]
offers_strategy = st.lists(
    st.builds(
        lambda revision, keys, contents, strategy: sync_spec(
            revision, *(entry(k, c, free=k == "rng") for k, c in zip(keys, contents, strict=False)), strategy=strategy
        ),
        st.sampled_from([0, 1, 1, 2]),
        st.sampled_from([*KEY_SETS, *[KEY_SETS[1]] * 6]),
        st.tuples(st.sampled_from("xy"), st.sampled_from("xy")),
        st.sampled_from([0, 0, 0, 1, 2]),
    ),
    min_size=1,
    max_size=5,
).map(lambda offers: dict(zip("abcde", offers, strict=False)))
pasts = st.tuples(st.none() | st.integers(0, 1), st.frozensets(st.sampled_from("abcde")))


def contents(o: SyncSpec) -> dict[str, bytes]:
    return {e.key: e.digest for e in o.entries}


@given(offers_strategy, pasts)
def test_any_outcome_is_sound(offers: dict[str, SyncSpec], past: tuple[int | None, frozenset[str]]) -> None:
    """S5: every peer that is not refused ends with the elected contents, from a holder that has them."""
    election = elect(offers, *past)
    assert set(election.fetch) | set(election.refused) == set(offers)
    assert not set(election.fetch) & set(election.refused)
    assert bool(election.why_nobody) == (not election.fetch)
    if not election.fetch:
        assert not election.holders
        return
    assert election.holders
    order = list(offers)
    assert election.holders == sorted(election.holders, key=order.index)
    for holder in election.holders:
        assert offers[holder].revision == election.revision
        assert offers[holder].strategy != SharedStateSyncStrategy.RECEIVE_ONLY
        assert election.fetch[holder] == ()
        for entries in election.fetch.values():
            for wanted in entries:
                assert contents(offers[holder])[wanted.key] == wanted.digest
    ends = set()
    for peer, entries in election.fetch.items():
        assert not entries or offers[peer].strategy != SharedStateSyncStrategy.SEND_ONLY
        end = contents(offers[peer]) | {e.key: e.digest for e in entries}
        ends.add(tuple(end[e.key] for e in offers[peer].entries if not e.allow_content_inequality))
        assert len(end) == len(offers[peer].entries), "fetches a key that it does not have"
    assert len(ends) == 1


@given(offers_strategy, pasts)
def test_only_ties_depend_on_the_order(offers: dict[str, SyncSpec], past: tuple[int | None, frozenset[str]]) -> None:
    """Any order of the ring gives the same revision, and refuses the same peers because of it."""

    def misplaced(election: Election[str]) -> set[str]:
        refused = election.refused.items()
        return {p for p, (result, why) in refused if result is Result.INVALID_USAGE and "the run" in why}

    first = elect(offers, *past)
    assert elect(dict(offers), *past) == first
    for order in itertools.islice(itertools.permutations(offers), 1, 12):
        other = elect({peer: offers[peer] for peer in order}, *past)
        assert other.revision == first.revision
        assert misplaced(other) == misplaced(first)


@given(st.lists(st.sampled_from("xyz"), min_size=1, max_size=7))
def test_no_contents_have_more_votes_than_the_elected(held: list[str]) -> None:
    offers = {chr(ord("a") + i): sync_spec(0, entry("w", text)) for i, text in enumerate(held)}
    election = elect(offers, None, frozenset())
    assert len(election.holders) == max(held.count(text) for text in held)
    assert not election.refused


@given(offers_strategy, pasts)
def test_the_revision_follows_the_rule(offers: dict[str, SyncSpec], past: tuple[int | None, frozenset[str]]) -> None:
    last_revision, completed = past
    offered = {p: o.revision for p, o in offers.items() if o.strategy != SharedStateSyncStrategy.RECEIVE_ONLY}
    if not offered:
        return
    revision, restarted = choose_revision(offered, last_revision, completed)
    assert revision in offered.values()
    if last_revision is not None and last_revision + 1 in [offered[peer] for peer in offered.keys() & completed]:
        assert (revision, restarted) == (last_revision + 1, False)
    elif restarted:
        assert last_revision is not None
        assert revision == max(offered.values())


@pytest.mark.parametrize(
    "keys, words", [(["a", "b"], ""), (["b", "a"], "'b' and 'a'"), (["a", "a"], "'a' and 'a'"), (["a"], ""), ([], "")]
)
def test_entries_are_sorted_and_without_duplicates(keys: list[str], words: str) -> None:
    problem = validate_entries(tuple(entry(key, "1") for key in keys))
    assert words in problem
    assert bool(problem) == bool(words)
