"""Syncs of shared state at the master: offers, plans, decisions."""

from __future__ import annotations

import pytest

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.effects import Level
from zpccl.protocol.messages import Decision, Dropped, Kick, Linked, Plan, StateEntry

from .harness import (
    FIRST_ATTEMPT,
    MasterBench,
    bench_of,
    entry,
    fetching,
    is_fetching,
    offer,
    pid,
    pids,
    spec,
    sync_plan,
    unlink,
)

LOST = Result.RANK_CONNECTION_LOST


def w(contents: str) -> StateEntry:
    return entry("w", contents)


def committed(call_id: int, revision: int, attempt_id: int = FIRST_ATTEMPT) -> Decision:
    return Decision(call_id, 0, revision, attempt_id=attempt_id)


ALONE = ", and no source is left to fetch from"


def aborted(call_id: int, revision: int, reason: str, *blamed: str) -> Decision:
    return Decision(call_id, LOST, revision, reason, attempt_id=FIRST_ATTEMPT, peers=blamed)


def offers(bench: MasterBench, holders: str, fetchers: str, call_id: int = 1) -> None:
    """Some have the newest state, at revision 1. The others must fetch it: each of them has another, older state."""
    bench.say(holders, offer(call_id, 1, w("new")))
    for name in fetchers:
        bench.say(name, offer(call_id, 0, w(name)))


def running(revision: int = 1) -> MasterBench:
    """a and b hold the state that c, which is behind, must fetch."""
    bench = bench_of("abc")
    bench.say("ab", offer(1, revision, w("x")))
    bench.say("c", offer(1, 0, w("old")))
    return bench


def test_from_offers_to_commit() -> None:
    """S5: golden."""
    bench = bench_of("abc")
    assert bench.say("a", offer(1, 1, w("x"))) == []
    assert bench.say("c", offer(3, 0, w("old"))) == []
    assert bench.say("b", offer(2, 1, w("x"))) == [
        ("a1", sync_plan(1, 1, "ab", a=1, b=2, c=3)),
        ("b1", sync_plan(2, 1, "ab", a=1, b=2, c=3)),
        ("c1", sync_plan(3, 1, "ab", ("w", "x"), sources="ab", a=1, b=2, c=3)),
    ]
    assert bench.fetched("c", 3) == [("a1", committed(1, 1)), ("b1", committed(2, 1)), ("c1", committed(3, 1))]
    assert bench.machine.syncs.last_revision == {0: 1}


def test_equal_states_commit_at_once() -> None:
    bench = bench_of("ab")
    bench.say("a", offer(1, 0))
    assert bench.say("b", offer(1, 0)) == [
        ("a1", sync_plan(1, 0, "ab")),
        ("b1", sync_plan(1, 0, "ab")),
        ("a1", committed(1, 0)),
        ("b1", committed(1, 0)),
    ]


def test_all_fetchers_must_have_it() -> None:
    bench = bench_of("abc")
    offers(bench, "a", "bc")
    assert bench.fetched("b", 1) == []
    assert bench.fetched("a", 1) == []
    assert len(bench.fetched("c", 1)) == 3


def test_revisions_go_on_from_sync_to_sync() -> None:
    bench = bench_of("ab")
    for revision in range(3):
        bench.say("ab", offer(revision + 1, revision))
        assert bench.verdict("a", revision + 1) == committed(revision + 1, revision, FIRST_ATTEMPT + revision)
    bench.say("a", offer(9, 3))
    bench.say("b", offer(9, 4))
    answer = bench.decision("b", 9)
    assert (answer.result, "revision 4 is ahead of the run's 3" in answer.reason) == (Result.INVALID_USAGE, True)
    assert bench.verdict("a", 9) == committed(9, 3, FIRST_ATTEMPT + 3)


def test_members_in_step_may_skip_revisions() -> None:
    """The peers that completed the last sync have the vote; a joiner ahead of them is refused."""
    bench = bench_of("ab")
    bench.say("ab", offer(1, 3))
    bench.members("c")
    for name, revision in (("a", 8), ("b", 8), ("c", 9)):
        bench.say(name, offer(2, revision))
    assert bench.verdict("a", 2) == committed(2, 8, FIRST_ATTEMPT + 1)
    assert bench.decision("c", 2).result == Result.INVALID_USAGE


def test_a_run_that_recovers_from_checkpoints_is_warned() -> None:
    bench = bench_of("ab")
    bench.say("ab", offer(1, 9))
    bench.members("cd")
    bench.leave("ab")
    bench.say("c", offer(1, 5, w("c")))
    bench.say("d", offer(1, 3, w("d")))
    bench.fetched("d", 1, FIRST_ATTEMPT + 1)
    assert bench.verdict("d", 1) == committed(1, 5, FIRST_ATTEMPT + 1)
    warnings = [log.text for log in bench.logged if log.level is Level.WARNING]
    assert any("no peer continues from revision 9" in text and "5" in text for text in warnings)


def test_alone() -> None:
    bench = bench_of("a", others="xy")
    assert bench.say("a", offer(1, 0)) == [
        ("a1", Decision(1, Result.TOO_FEW_PEERS, reason="this peer is alone in its group"))
    ]


def test_groups_are_independent() -> None:
    bench = bench_of("ab", others="xy")
    bench.say("a", offer(1, 4, w("a")))
    bench.say("x", offer(1, 9, w("x")))
    bench.say("y", offer(1, 8, w("y")))
    bench.say("b", offer(1, 3, w("b")))
    bench.lose("x")
    assert bench.verdict("y", 1) == aborted(1, 9, f"lost x{ALONE}", "x")
    bench.fetched("b", 1, FIRST_ATTEMPT + 1)
    assert bench.verdict("a", 1) == committed(1, 4, FIRST_ATTEMPT + 1)
    assert bench.machine.syncs.last_revision == {0: 4}


def test_the_refused_are_answered_and_the_rest_go_on() -> None:
    bench = bench_of("abc")
    bench.say("a", offer(1, 1, w("x")))
    bench.say("b", offer(1, 1, entry("v", "x")))
    sent = bench.say("c", offer(1, 0, w("y")))
    told = [("a1", Decision), ("c1", Decision)]  # They remember the refusal, for another master.
    assert [(c, type(m)) for c, m in sent] == [("b1", Decision), *told, ("a1", Plan), ("c1", Plan)]
    assert bench.decision("b", 1).result == Result.INVALID_ARGUMENT
    bench.fetched("c", 1)
    assert bench.verdict("a", 1) == bench.verdict("c", 1) == committed(1, 1)


def test_nobody_to_elect() -> None:
    bench = bench_of("ab")
    bench.say("ab", offer(1, 0, strategy=1))
    answer = Decision(1, Result.NO_SHARED_STATE_AVAILABLE, reason="all peers are RECEIVE_ONLY")
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == answer
    assert bench.machine.syncs.last_revision == {}


def test_offers_out_of_order_are_refused() -> None:
    bench = bench_of("ab")
    problem = "keys 'w' and 'v' are not in order"
    answer = ("a1", Decision(1, Result.INVALID_ARGUMENT, reason=problem))
    for _ in range(2):
        assert bench.say("a", offer(1, 0, w("1"), entry("v", "1"))) == [answer]
    bench.say("b", offer(1, 0))
    assert bench.verdict("b", 1) is None


def test_an_offer_again_gets_what_has_become_of_it() -> None:
    bench = bench_of("ab")
    first = offer(1, 1, w("x"))
    bench.say("a", first)
    assert bench.say("a", first) == []
    bench.say("b", offer(1, 0, w("y")))
    assert bench.say("a", first) == [("a1", sync_plan(1, 1, "a"))]
    bench.fetched("b", 1)
    assert bench.say("a", first) == [("a1", committed(1, 1))]
    assert bench.fetched("b", 1) == [("b1", committed(1, 1))]


def test_a_transfer_that_fails_aborts_for_all() -> None:
    """S1. The revision stays."""
    bench = running()
    decision = aborted(1, 1, "no block came", "b")
    assert bench.fetched("c", 1, ok=False, fault=pid("b"), reason="no block came") == [
        (f"{name}1", decision) for name in "abc"
    ]
    assert bench.machine.syncs.last_revision == {}
    assert bench.fetched("c", 1) == [("c1", decision)]


def test_a_failure_without_facts() -> None:
    bench = running()
    bench.fetched("c", 1, ok=False, fault=pid("c"))
    assert bench.verdict("a", 1) == aborted(1, 1, "c: a transfer failed", "c")


@pytest.mark.parametrize("how", ["leave", "lose"])
def test_a_holder_that_dies_is_missed_by_nobody_while_there_is_another(how: str) -> None:
    """L2: c goes on with b."""
    bench = running()
    getattr(bench, how)("a")
    assert bench.verdict("b", 1) is None
    bench.fetched("c", 1)
    assert bench.verdict("b", 1) == bench.verdict("c", 1) == committed(1, 1)


def test_all_holders_die() -> None:
    bench = running()
    bench.leave("ab")
    assert bench.verdict("c", 1) == aborted(1, 1, f"lost a, b{ALONE}", "a", "b")
    bench.members("d")
    bench.say("cd", offer(2, 0, w("old")))
    assert bench.verdict("c", 2) == committed(2, 0, FIRST_ATTEMPT + 1)


def two_fetchers(*links_down: str) -> MasterBench:
    """a holds the state, b and c fetch it."""
    bench = bench_of("abc")
    unlink(bench, *links_down)
    offers(bench, "a", "bc")
    return bench


def test_who_has_all_stands_in_for_the_holder() -> None:
    """L2: a dies when b has all; c gets the rest from b."""
    bench = two_fetchers()
    bench.fetched("b", 1)
    bench.lose("a")
    assert bench.verdict("b", 1) is None
    bench.fetched("c", 1)
    assert bench.verdict("b", 1) == bench.verdict("c", 1) == committed(1, 1)


@pytest.mark.parametrize("links_down, done", [((), ""), (("bc",), "b")])
def test_nobody_stands_in_for_the_holder(links_down: tuple[str, ...], done: str) -> None:
    """L1: the fetchers would wait for each other, or for a peer that they do not reach."""
    bench = two_fetchers(*links_down)
    bench.fetched(done, 1)
    bench.lose("a")
    assert bench.verdict("b", 1) == bench.verdict("c", 1) == aborted(1, 1, f"lost a{ALONE}", "a")


def test_who_has_all_stands_in_for_the_holder_by_way_of_others() -> None:
    """c does not reach d, which has everything: b passes on what it gets from d."""
    bench = bench_of("abcd")
    unlink(bench, "cd")
    offers(bench, "a", "bcd")
    bench.fetched("d", 1)
    bench.lose("a")
    assert bench.verdict("c", 1) is None
    bench.lose("b")
    assert bench.verdict("c", 1) == aborted(1, 1, f"lost a, b{ALONE}", "a", "b")


def test_a_holder_whose_state_has_changed_ends_the_sync() -> None:
    """S5: it does not hold what the others would end with. The reason names the peer and the tensor."""
    bench = running()
    bench.fetched("a", 1, ok=False, fault=pid("a"), reason="tensor 'w' has changed")
    assert bench.verdict("c", 1) == aborted(1, 1, "a: tensor 'w' has changed", "a")
    bench.fetched("c", 1)
    assert bench.machine.syncs.last_revision == {}


def test_who_had_all_and_finds_its_state_changed_ends_the_sync() -> None:
    bench = two_fetchers()
    bench.fetched("b", 1)
    bench.fetched("b", 1, ok=False, fault=pid("b"), reason="tensor 'v' has changed")
    assert bench.verdict("c", 1) == aborted(1, 1, "b: tensor 'v' has changed", "b")


def test_dropped_sources_are_named_and_counted_once() -> None:
    bench = running()
    dropped = (Dropped(pid("a"), "wrong bytes"), Dropped(pid("?"), "silence"))
    for _ in range(2):
        bench.fetched("b", 1, dropped=dropped)
    bench.fetched("c", 1, dropped=dropped[:1])
    lines = [log.text for log in bench.logged if "continues without" in log.text]
    assert lines == [
        "group 0: sync: b continues without a: wrong bytes",
        "group 0: sync: b continues without a stranger: silence",
        "group 0: sync: c continues without a: wrong bytes",
    ]
    assert bench.machine.counts.sources_dropped == 3
    assert bench.verdict("c", 1) == committed(1, 1)


def test_a_fetcher_that_dies_is_not_waited_for() -> None:
    bench = running()
    bench.lose("c")
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == committed(1, 1)


def test_one_of_two_fetchers_dies() -> None:
    bench = bench_of("abc")
    for name, revision in (("a", 1), ("b", 0), ("c", 0)):
        bench.say(name, offer(1, revision, w(name)))
    bench.leave("b")
    assert bench.verdict("a", 1) is None
    bench.fetched("c", 1)
    assert bench.verdict("a", 1) == committed(1, 1)


def test_a_member_lost_before_all_have_called_is_not_waited_for() -> None:
    bench = bench_of("abc")
    bench.say("ab", offer(1, 0))
    bench.leave("c")
    assert bench.verdict("a", 1) == committed(1, 0)


def test_the_offer_of_who_is_lost_does_not_count() -> None:
    bench = bench_of("abc")
    bench.say("c", offer(1, 9, w("c")))
    bench.say("a", offer(1, 1))
    bench.lose("c")
    bench.say("b", offer(1, 1))
    assert bench.verdict("a", 1) == committed(1, 1)


def test_the_loss_of_all_others_while_voting() -> None:
    bench = bench_of("ab")
    bench.say("a", offer(1, 0))
    bench.lose("b")
    assert bench.verdict("a", 1) == Decision(1, Result.TOO_FEW_PEERS, reason="this peer is alone in its group")


def test_withdraw_while_voting() -> None:
    bench = bench_of("ab")
    bench.say("a", offer(1, 0))
    assert bench.withdraw("a", 1) == [("a1", Decision(1, LOST, reason="withdrawn"))]
    bench.say("b", offer(1, 0))
    assert bench.verdict("b", 1) is None


@pytest.mark.parametrize("name", ["a", "c"])
def test_withdraw_while_running_aborts_for_all(name: str) -> None:
    bench = running()
    decision = aborted(1, 1, f"{name} withdrew from it", name)
    assert bench.withdraw(name, 1) == [(f"{other}1", decision) for other in "abc"]


def test_reports_on_unknown_syncs_are_ignored() -> None:
    bench = running()
    before = bench.snapshot()
    assert bench.fetched("c", 77) == []
    assert bench.withdraw("c", 1) != []
    assert bench.fetched("b", 77) == []
    bench.begin("b", 2)
    assert bench.fetched("b", 2) == []  # This id is not one of a sync.
    assert before["transfers"] != bench.snapshot()["transfers"] == {}


def test_a_report_on_a_sync_after_it_is_forgotten() -> None:
    bench = running()
    bench.fetched("c", 1)
    bench.begin("c", 2, oldest=2)
    assert bench.fetched("c", 1) == []


def test_who_was_refused_may_call_again_while_the_rest_go_on() -> None:
    bench = bench_of("abc")
    bench.say("a", offer(1, 1, w("x")))
    bench.say("b", offer(1, 1, entry("v", "x")))
    bench.say("c", offer(1, 0, w("y")))
    bench.say("b", offer(2, 1, w("x")))
    assert bench.verdict("b", 2) is None
    bench.fetched("c", 1)
    bench.say("ac", offer(2, 1, w("x")))
    assert bench.verdict("b", 2) == committed(2, 1, FIRST_ATTEMPT + 2)


def test_a_second_sync_waits_for_the_first() -> None:
    """Only a peer that breaks the protocol calls again while its sync runs. The first call is not forgotten."""
    bench = running()
    bench.say("abc", offer(2, 1, w("x")))
    assert bench.verdict("a", 2) is None
    bench.fetched("c", 1)
    assert bench.verdict("a", 1) == committed(1, 1)
    assert bench.verdict("a", 2) == committed(2, 1, FIRST_ATTEMPT + 1)


def test_collectives_and_syncs_share_attempt_ids() -> None:
    """S3."""
    bench = bench_of("ab")
    bench.begin("ab", 1, spec(1))
    bench.say("ab", offer(2, 0))
    assert bench.verdict("a", 2) == committed(2, 0, FIRST_ATTEMPT + 1)


def test_holders_are_in_ring_order() -> None:
    bench = bench_of("cab")
    bench.say("abc", offer(1, 0))
    plans = [message for message in bench.said["a1"] if is_fetching(message)]
    assert fetching(plans[0]).holders == pids("cab")


# --- Links ----------------------------------------------------------------------------------------------------------


def sources_of(bench: MasterBench) -> dict[str, tuple[bytes, ...]]:
    """The sources of each fetcher, by the last plan."""
    return {name: fetching(plan).sources for name, plan in plans_of(bench).items()}


def partial_seeds_of(bench: MasterBench) -> dict[str, tuple[bytes, ...]]:
    """The partial seeds of each fetcher."""
    return {name: fetching(plan).partial_seeds for name, plan in plans_of(bench).items()}


def plans_of(bench: MasterBench) -> dict[str, Plan]:
    """The last plan of each fetcher."""
    plans = {name: [m for m in bench.said[f"{name}1"] if is_fetching(m)] for name in bench.names()}
    return {name: of_peer[-1] for name, of_peer in plans.items() if of_peer and fetching(of_peer[-1]).fetch}


def test_sources_are_holders_with_a_link() -> None:
    """L2: no peer fetches from a peer that it cannot reach."""
    bench = bench_of("abcd")
    unlink(bench, "ad", "bc")
    offers(bench, "ab", "cd")
    assert sources_of(bench) == {"c": pids("a"), "d": pids("b")}
    bench.fetched("cd", 1)
    assert bench.verdict("a", 1) == committed(1, 1)


def test_holders_by_whose_link_something_failed_come_last() -> None:
    bench = running()
    assert sources_of(bench) == {"c": pids("ab")}
    bench.fetched("c", 1, ok=False, fault=pid("a"), reason="no block came")
    offers(bench, "ab", "c", 2)
    assert sources_of(bench) == {"c": pids("ba")}


def test_who_reaches_no_holder_fetches_from_who_does() -> None:
    """L2: through as many others as needed."""
    bench = bench_of("abcd")
    unlink(bench, "ac", "ad", "bd")
    offers(bench, "a", "bcd")
    assert sources_of(bench) == {"b": pids("a"), "c": (), "d": ()}
    assert partial_seeds_of(bench) == {"b": pids("c"), "c": pids("bd"), "d": pids("c")}
    bench.fetched("bcd", 1)
    assert bench.verdict("d", 1) == committed(1, 1)


def fetched_by(bench: MasterBench, name: str) -> dict[str, str]:
    """The keys and contents that a peer must fetch."""
    (plan,) = (m for m in bench.said[f"{name}1"] if is_fetching(m))
    return {entry.key: entry.digest.decode().rstrip("-") for entry in fetching(plan).fetch}


@pytest.mark.parametrize(
    "links_down, source, partial_seed, free",
    [((), "a", "c", "a"), (("ad",), "b", "", "b"), (("ad", "bd"), "", "c", "a"), (("ac", "ad"), "b", "c", "b")],
)
def test_keys_that_may_differ_come_from_the_source(
    links_down: tuple[str, ...], source: str, partial_seed: str, free: str
) -> None:
    """L2, found by the simulator: b holds the elected state, except for a key that may differ. It serves peers that a
    cannot reach.

    Only peers that end with the same contents are partial seeds of each other.
    """
    bench = bench_of("abcd")
    unlink(bench, *links_down)
    for name in "abcd":
        contents = "new" if name in "ab" else name
        bench.say(name, offer(1, int(name in "ab"), entry("free", name, free=True), w(contents)))
    assert (sources_of(bench)["d"], partial_seeds_of(bench)["d"]) == (pids(source), pids(partial_seed))
    assert fetched_by(bench, "d") == {"free": free, "w": "new"}
    bench.fetched("cd", 1)
    assert bench.verdict("d", 1) == committed(1, 1)


def test_a_sync_waits_for_links_where_nobody_can_send() -> None:
    bench = bench_of("abc")
    unlink(bench, "ac", "bc")
    offers(bench, "a", "bc")
    assert sources_of(bench) == {}
    assert bench.machine.deadline_ns() == bench.now_ns + limits.LINK_WAIT_TIMEOUT_NS
    assert bench.say("c", offer(1, 0, w("c"))) == []
    unlink(bench, "ac")
    assert sources_of(bench) == {"b": pids("a"), "c": ()}
    assert partial_seeds_of(bench) == {"b": pids("c"), "c": pids("b")}
    assert bench.machine.deadline_ns() is None


def test_a_sync_that_has_waited_has_the_greatest_id() -> None:
    """S4, paths, seed 2214: peers drop frames of ids that they first hear of after a greater one."""
    bench = bench_of("ab", others="xy")
    bench.say("a", Linked(()))
    offers(bench, "a", "b")
    bench.begin("xy", 1)
    bench.say("a", Linked(pids("b")))
    (plan,) = (m for m in bench.said["b1"] if is_fetching(m))
    assert plan.attempt_id > max(bench.plans)
    bench.fetched("b", 1, plan.attempt_id)
    assert bench.verdict("a", 1) == committed(1, 1, plan.attempt_id)


def test_who_stays_without_a_source_is_removed() -> None:
    """L1, L2."""
    bench = bench_of("abc")
    unlink(bench, "ac", "bc")
    offers(bench, "a", "bc")
    kick = bench.tick_at_deadline()[0]
    reason = "no working data connection to a, b"
    assert kick == ("c1", Kick(Result.RANK_CONNECTION_FAILED, reason))
    assert (bench.names(), sources_of(bench)) == ("ab", {"b": pids("a")})
    bench.fetched("b", 1, FIRST_ATTEMPT + 1)
    assert bench.verdict("a", 1) == committed(1, 1, FIRST_ATTEMPT + 1)


def test_nobody_is_removed_because_whoever_is_between_two_peers_was_refused() -> None:
    """L1, L2: links connect all three, but b, which has other tensors, takes no part."""
    bench = bench_of("abc")
    unlink(bench, "ac")
    bench.say("a", offer(1, 1, w("a")))
    bench.say("b", offer(1, 0, entry("v", "b")))
    bench.say("c", offer(1, 0, w("c")))
    assert bench.verdict("b", 1) is None, "it would go on, and seem to wait for the others at another master"
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.decision("b", 1).result == Result.INVALID_ARGUMENT
    assert bench.names() == "abc"
    for name in "ac":
        verdict = bench.decision(name, 1)
        assert verdict.result == Result.RANK_CONNECTION_LOST
        assert verdict.reason == "c: no data connection to a peer that can send it the shared state"


@pytest.mark.parametrize("how", ["leave", "withdraw"])
def test_what_ends_a_sync_that_waits_for_links(how: str) -> None:
    bench = bench_of("ab")
    unlink(bench, "ab")
    offers(bench, "a", "b")
    if how == "leave":
        bench.leave("a")
        assert bench.verdict("b", 1) == aborted(1, 1, f"lost a{ALONE}", "a")
    else:
        bench.withdraw("b", 1)
        assert bench.verdict("a", 1) == aborted(1, 1, "b withdrew from it", "b")
    assert bench.snapshot()["transfers"] == {}


def test_who_was_refused_gets_no_plan_of_a_sync_that_has_waited_for_links() -> None:
    """S5. Paths, seed 9485216: after a loss the master looked at all offers again, even at refused ones."""
    bench = bench_of("abcd")
    bench.machine.syncs.restore_last(0, 0, frozenset(bench.peer(name) for name in "abcd"))
    unlink(bench, "ab", "bc", "bd")
    for name, revision in zip("abcd", (1, 0, 4, 4), strict=True):
        bench.say(name, offer(1, revision, w(name)))
    told = bench.leave("d")
    assert not any(isinstance(message, Plan) for _, message in told)
    assert bench.snapshot()["transfers"] and bench.verdict("c", 1) is None
    unlink(bench, "bc")
    assert "ahead of the run's" in bench.decision("c", 1).reason
    assert sources_of(bench) == {"b": pids("a")}


@pytest.mark.parametrize("gone", ["a", "b", "ab"])
def test_who_is_refused_in_a_sync_that_waits_for_links_does_not_wait_when_the_others_leave(gone: str) -> None:
    """L1: nothing is left to fetch, or nobody to fetch from. It hears why it was refused, not who is lost."""
    bench = bench_of("abc")
    unlink(bench, "ab")
    bench.say("a", offer(1, 1, w("a")))
    bench.say("b", offer(1, 0, w("b")))
    bench.say("c", offer(1, 0, entry("v", "c")))
    assert bench.verdict("c", 1) is None
    bench.leave(gone)
    assert bench.decision("c", 1).result == Result.INVALID_ARGUMENT
    assert bench.snapshot()["transfers"] == {}


def test_a_holder_leaves_a_sync_that_waits_for_links_while_somebody_is_to_be_refused() -> None:
    """L2: b has everything that d fetches. c is refused and has no part in it."""
    bench = bench_of("abcd")
    unlink(bench, "ad", "bd")
    for name, own in (("a", "1"), ("b", "2")):
        bench.say(name, offer(1, 1, entry("own", own, free=True), w("x")))
    bench.say("c", offer(1, 0, entry("v", "c")))
    bench.say("d", offer(1, 0, entry("own", "4", free=True), w("d")))
    bench.leave("a")
    assert bench.verdict("b", 1) is None and bench.verdict("d", 1) is None
    unlink(bench)
    assert bench.decision("c", 1).result == Result.INVALID_ARGUMENT
    assert sources_of(bench) == {"d": pids("b")}
    attempt_id = plans_of(bench)["d"].attempt_id
    bench.fetched("d", 1, attempt_id)
    assert bench.verdict("b", 1) == bench.verdict("d", 1) == committed(1, 1, attempt_id)


@pytest.mark.parametrize("is_back", [False, True])
def test_two_are_lost_one_after_the_other_of_whom_one_fetches_from_the_other(is_back: bool) -> None:
    """L2. Impatient, seed 19633862: the loss of b ended the sync because of c, which was gone too."""
    bench = bench_of("abcd")
    unlink(bench, "ac", "cd")
    for name, own in (("a", "1"), ("b", "2")):
        bench.say(name, offer(1, 1, entry("own", own, free=True), w("x")))
    bench.say("cd", offer(1, 0, entry("own", "4", free=True), w("x")))
    assert sources_of(bench) == {"c": pids("b"), "d": pids("a")}
    bench.disconnect("c")
    bench.leave("b")
    assert bench.verdict("a", 1) is None
    if is_back:
        bench.hello("c", welcomed=True)
        assert bench.verdict("a", 1) == bench.verdict("c", 1) == aborted(1, 1, f"lost b{ALONE}", "b")
        return
    bench.tick(bench.options.disconnect_grace_ns)
    bench.fetched("d", 1)
    assert bench.verdict("a", 1) == bench.verdict("d", 1) == committed(1, 1)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_call_that_is_to_be_refused_may_be_withdrawn_while_the_others_wait_for_links(name: str) -> None:
    """L1: the withdrawal ends the sync, as any does. Whoever withdraws, c hears why it was refused."""
    bench = bench_of("abc")
    unlink(bench, "ab")
    bench.say("a", offer(1, 1, w("a")))
    bench.say("b", offer(1, 0, w("b")))
    bench.say("c", offer(1, 0, entry("v", "c")))
    bench.withdraw(name, 1)
    expected = [Result.RANK_CONNECTION_LOST, Result.RANK_CONNECTION_LOST, Result.INVALID_ARGUMENT]
    assert [bench.decision(each, 1).result for each in "abc"] == expected


def test_the_last_fetcher_leaves_a_sync_that_waits_for_links() -> None:
    """The remaining peers hold the state, so the sync has succeeded."""
    bench = bench_of("abc")
    unlink(bench, "ac", "bc")
    offers(bench, "ab", "c")
    bench.leave("c")
    assert bench.verdict("a", 1) == bench.verdict("b", 1) == committed(1, 1)


def test_a_link_over_which_a_sync_has_come_after_all_does_not_count_as_down() -> None:
    """L2: two syncs fail because of it, each after a while. The third one continues where they ended."""
    bench = bench_of("ab")
    for call_id in (1, 2, 3):
        bench.say("a", offer(call_id, 5))
        bench.say("b", offer(call_id, 0, entry("w", "2")))
        bench.tick(limits.STALL_TIMEOUT_NS)
        fault = None if call_id == 3 else pid("a")
        bench.fetched("b", call_id, call_id, ok=fault is None, fault=fault)
    bench.begin("ab", 4)
    assert bench.machine.operations.running and not bench.machine.operations.pending


@pytest.mark.parametrize("is_other_linked", [True, False])
def test_a_sync_goes_round_a_path_that_carries_nothing_large(is_other_linked: bool) -> None:
    """L2: only a has the elected value of r, of which each peer has another one. So c first fetches all from a."""
    bench = bench_of("abc")
    if not is_other_linked:
        unlink(bench, "bc")
    found = []
    for call_id in (1, 2, 3):
        for name in "abc":
            revision, contents = (0, "old") if name == "c" else (5, "new")
            bench.say(name, offer(call_id, revision, entry("r", name, free=True), w(contents)))
        plan = next(m for m in reversed(bench.said[bench.connections["c"]]) if is_fetching(m))
        found.append(fetching(plan).sources)
        bench.tick(limits.STATE_SOURCE_TIMEOUT_NS)
        is_broken = fetching(plan).sources == pids("a")
        fault = pid("a") if is_broken else None
        bench.fetched("c", call_id, plan.attempt_id, ok=not is_broken, fault=fault)
    assert found == [pids("a"), *[pids("b" if is_other_linked else "a")] * 2]


@pytest.mark.parametrize("outages", [0, 1, 2])
def test_a_link_that_breaks_once_late_in_a_long_sync_removes_nobody(outages: int) -> None:
    """L2: two peers. The link is back when they call again. Outages of all may break more than one sync."""
    bench = bench_of("ab")
    for call_id in range(1, 1 + max(outages, 1)):
        bench.say("a", offer(call_id, 5))
        bench.say("b", offer(call_id, 0, entry("w", "2")))
        bench.tick(limits.LINK_FAILING_MAX_NS)
        if outages:
            bench.disconnect("ab")
            bench.hello("ab", welcomed=True, connection=1 + call_id)
        bench.fetched("b", call_id, call_id, ok=False, fault=pid("a"), reason="link broke")
    bench.begin("ab", 9)
    assert bench.machine.operations.running and not bench.machine.operations.pending


@pytest.mark.parametrize("holders", ["a", "ab", "abde"])
def test_who_can_fetch_over_none_of_its_links_is_removed(holders: str) -> None:
    """L2: all links of c come up again and again, and carry nothing large. Otherwise the others would never sync."""
    bench = bench_of("ac" + holders[1:])
    for call_id in range(1, 20):
        begun_ns, plans = bench.now_ns, plans_of(bench)
        offers(bench, holders, "c", call_id)
        if plans_of(bench) == plans:
            break
        sources = fetching(plans_of(bench)["c"]).sources
        bench.tick(limits.PATH_TIMEOUT_NS)
        dropped = tuple(Dropped(source, "the link to it was lost") for source in sources)
        number = plans_of(bench)["c"].attempt_id
        bench.fetched("c", call_id, number, ok=False, fault=sources[-1], reason="lost", dropped=dropped)
    assert begun_ns <= 2 * limits.LINK_FAILING_SYNCS_MAX_NS
    bench.tick(limits.LINK_WAIT_TIMEOUT_NS)
    assert bench.names() == holders
    assert bench.decision("a", call_id).committed or holders == "a"
