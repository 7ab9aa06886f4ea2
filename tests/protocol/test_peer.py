"""The peer: every transition of its state diagram, every call in every phase, links, and connections that break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import (
    CollectiveMismatch,
    InternalError,
    InvalidUsage,
    Kicked,
    MasterUnreachable,
    OperationTimeout,
    PCCLError,
    PeerLost,
    PeerUnreachable,
    PendingAsyncOps,
    Result,
    ResultMismatch,
    TooFewPeers,
    UpdateTopologyFailed,
    VersionMismatch,
)
from zpccl.protocol import events
from zpccl.protocol.calls import CallPhase
from zpccl.protocol.effects import (
    CloseLink,
    EndReduce,
    EndSync,
    FetchAhead,
    Level,
    OpenLink,
    Reject,
    Resolve,
    Send,
    ShowMeasurements,
    StartReduce,
    StartSync,
    UseMaster,
)
from zpccl.protocol.messages import (
    Acknowledgement,
    CheckAnswer,
    Decision,
    Dropped,
    Kick,
    Leave,
    Linked,
    Measurements,
    MeasurementsRequest,
    Neighbours,
    NeighboursChanged,
    Ready,
    Refusal,
    Refused,
    Report,
    TopologyKind,
    Vote,
    Votes,
    Welcome,
    Withdraw,
)
from zpccl.protocol.peer import State

from .harness import (
    CONNECT,
    FIRST_ATTEMPT,
    HELLO,
    HELLO_AGAIN,
    OPTIMIZE,
    PENDING,
    RUN_ID,
    UPDATE,
    PeerBench,
    committed,
    entry,
    fetching,
    member_list,
    neighbour,
    offer,
    pid,
    pids,
    reducing,
    spec,
    sync_plan,
    topology_vote,
)

OK, LOST = Result.SUCCESS, Result.RANK_CONNECTION_LOST
ENTRIES = (entry("w", "1"),)


def begin(call_id: int, *specs: Any, oldest: int | None = None) -> Send:
    """The message with the votes for collectives with call ids from `call_id` on."""
    calls = tuple(Vote(call_id + i, s) for i, s in enumerate(specs or (spec(),)))
    return Send(Votes(call_id if oldest is None else oldest, calls))


def start(call_id: int, attempt_id: int = FIRST_ATTEMPT, names: str = "ab") -> StartReduce:
    return StartReduce(call_id, attempt_id, reducing(names), tells_digest=True)


def done(attempt_id: int = FIRST_ATTEMPT, **changes: Any) -> events.ReduceDone:
    return events.ReduceDone(attempt_id, **{"digest": 7, **changes})


def aborted(call_id: int, attempt_id: int = FIRST_ATTEMPT, **changes: Any) -> Decision:
    facts = {"result": LOST, "value": 2, "reason": "lost b", "attempt_id": attempt_id, "peers": ("b",), **changes}
    return Decision(call_id, **facts)


# --- Connecting -----------------------------------------------------------------------------------------------------


def test_from_new_to_member() -> None:
    """Golden: the whole way."""
    assert PeerBench().machine.state is State.NEW
    peer = PeerBench()
    assert peer.handle(events.ConnectCalled(CONNECT, 2)) == []
    assert peer.machine.state is State.CONNECTING
    assert peer.up() == [Send(HELLO)]
    assert peer.hear(Welcome(RUN_ID, 0)) == []
    assert (peer.machine.state, peer.machine.run_id) == (State.PENDING, RUN_ID)
    assert peer.hear(Neighbours((neighbour("b"),))) == [OpenLink(neighbour("b"))]
    assert peer.handle(events.LinkUp(pid("b"))) == [Send(Linked(pids("b")))]
    assert peer.hear(member_list(2, "ba")) == [Send(Acknowledgement(2)), Resolve(CONNECT, 2)]
    assert (peer.machine.state, peer.machine.epoch) == (State.MEMBER, 2)
    assert [m.name for m in peer.machine.group_members()] == ["b", "a"]
    assert peer.machine.deadline_ns() is None


def test_a_list_without_us_admits_nobody() -> None:
    peer = PeerBench().pending()
    assert peer.hear(member_list(1, "b")) == [Send(Acknowledgement(1))]
    assert peer.machine.state is State.PENDING


def test_tries_run_out() -> None:
    peer = PeerBench()
    peer.handle(events.ConnectCalled(CONNECT, 2))
    assert peer.handle(events.ConnectionFailed("refused")) == []
    error = peer.error(peer.handle(events.ConnectionFailed("refused")))
    assert isinstance(error, MasterUnreachable)
    assert (error.result, error.address) == (Result.MASTER_CONNECTION_FAILED, "m:48148")
    assert "nobody answers (refused)" in str(error)
    assert peer.machine.state is State.CLOSED


def test_a_connection_that_breaks_is_a_failed_try() -> None:
    """L1: an address at which connections come up and break is not tried for ever."""
    peer = PeerBench().connecting()
    assert peer.down() == []
    assert peer.machine.deadline_ns() is None
    peer.up()
    error = peer.error(peer.down())
    assert isinstance(error, MasterUnreachable)
    assert "broke before it answered" in str(error)


def test_a_connection_that_never_stood_fails_once() -> None:
    """The socket reports a failed handshake in both ways. The peer makes as many tries as the user asked for."""
    peer = PeerBench()
    peer.handle(events.ConnectCalled(CONNECT, 2))
    assert peer.handle(events.ConnectionFailed("no handshake")) == []
    assert peer.down() == []
    assert isinstance(peer.error(peer.handle(events.ConnectionFailed("no handshake"))), MasterUnreachable)


def test_failed_tries_to_reconnect_do_not_count() -> None:
    peer = PeerBench().member()
    peer.down()
    for _ in range(10):
        assert peer.handle(events.ConnectionFailed("refused")) == []
    assert peer.machine.state is State.MEMBER


def test_something_listens_that_is_no_master() -> None:
    """L1."""
    peer = PeerBench().connecting()
    assert peer.machine.deadline_ns() == peer.now_ns + limits.REGISTRATION_TIMEOUT_NS
    assert peer.tick(limits.REGISTRATION_TIMEOUT_NS - 1) == []
    error = peer.error(peer.tick(1))
    assert isinstance(error, MasterUnreachable)
    assert "does not answer as a master" in str(error)


def test_a_master_that_looks_for_members_first_is_waited_for() -> None:
    """L3: a master may need up to 30 s to know whether it will lead. A peer with a master waits for a bounded time."""
    peer = PeerBench().connecting()
    assert peer.hear(Refused(Refusal.NO_QUORUM, "this master is looking for members")) == []
    assert peer.machine.deadline_ns() == peer.now_ns + limits.MASTER_TIMEOUT_NS
    peer.hear(Welcome(RUN_ID, 0))
    assert peer.hear(Refused(Refusal.NO_QUORUM, "this master is looking for members")) == []
    assert peer.machine.state is State.PENDING and peer.machine.deadline_ns() is None


def test_a_newcomer_hears_what_the_master_said_that_never_led() -> None:
    """Its error must not say that something other than a master listens there."""
    peer = PeerBench().connecting()
    peer.hear(Refused(Refusal.NO_QUORUM, "this master is looking for members"))
    error = peer.error(peer.tick(limits.MASTER_TIMEOUT_NS))
    assert isinstance(error, MasterUnreachable)
    assert "leads no run: this master is looking for members" in str(error)


def test_what_a_former_master_said_is_not_the_reason() -> None:
    peer = PeerBench().connecting()
    peer.hear(Refused(Refusal.NO_QUORUM, "this master is looking for members"))
    peer.reconnect()
    error = peer.error(peer.tick(limits.REGISTRATION_TIMEOUT_NS))
    assert "does not answer as a master" in str(error)


def test_a_connection_that_breaks_before_the_answer() -> None:
    """The peer says Hello again, and does not claim to be known."""
    peer = PeerBench().connecting()
    assert peer.reconnect() == [Send(replace(HELLO, connection=2))]
    peer.hear(Welcome(RUN_ID, 0))
    assert peer.machine.state is State.PENDING
    assert peer.reconnect() == [Send(replace(HELLO_AGAIN, connection=3, is_member=False)), Send(Linked(()))]


def test_another_version() -> None:
    peer = PeerBench().connecting()
    error = peer.error(peer.handle(events.OtherVersionReceived(10)))
    assert isinstance(error, VersionMismatch)
    assert f"it speaks protocol version 10, this peer {limits.PROTOCOL_VERSION}" in str(error)


@pytest.mark.parametrize("refusal, kind", [(Refusal.FULL, MasterUnreachable), (Refusal.UNKNOWN_SESSION, Kicked)])
def test_refused_at_the_door(refusal: Refusal, kind: type[PCCLError]) -> None:
    peer = PeerBench().connecting()
    error = peer.error(peer.hear(Refused(refusal, "because")))
    assert type(error) is kind
    assert "because" in str(error) and "no master" not in str(error)
    assert peer.machine.state is State.CLOSED


def test_a_joiner_that_cannot_be_reached() -> None:
    peer = PeerBench().pending()
    peer.hear(Neighbours((neighbour("b"), neighbour("c"), neighbour("d"))))
    peer.handle(events.LinkFailed(pid("b"), "b:1: refused"))
    peer.handle(events.LinkUp(pid("d")))
    effects = peer.hear(Kick(Result.RANK_CONNECTION_FAILED, "no data connection to b"))
    error = peer.error(effects)
    assert isinstance(error, PeerUnreachable) and error.peers == ("b", "c")
    message = "no data connection to b (b: b:1: refused; c: still dialled)"
    assert (error.result, error.message) == (Result.RANK_CONNECTION_FAILED, message)
    assert effects[-3:] == [CloseLink(pid(name)) for name in "bcd"]


def test_the_second_welcome_changes_nothing() -> None:
    peer = PeerBench().member()
    assert peer.hear(Welcome(b"another run id..", 2)) == []
    assert (peer.machine.state, peer.machine.run_id) == (State.MEMBER, RUN_ID)


@pytest.mark.parametrize("timed_out", [False, True])
@pytest.mark.parametrize("where", ["connecting", "pending"])
def test_connect_is_interrupted(where: str, timed_out: bool) -> None:
    peer = getattr(PeerBench(), where)()
    effects = peer.handle(events.CallWithdrawn(CONNECT, timed_out))
    assert effects[0] == Send(Leave())
    assert isinstance(peer.error(effects), InvalidUsage)
    assert peer.machine.state is State.CLOSED


# --- Members --------------------------------------------------------------------------------------------------------


def test_member_lists_grow_in_epoch() -> None:
    """S3."""
    peer = PeerBench().member("abc", epoch=5)
    peer.hear(member_list(4, "ab"))
    assert (peer.machine.epoch, peer.machine.members) == (5, member_list(5, "abc").members)
    peer.hear(member_list(6, "ac"))
    assert peer.machine.members == member_list(6, "ac").members


def test_the_group_is_part_of_the_members() -> None:
    peer = PeerBench().member("axby", x=1, y=1)
    assert [m.name for m in peer.machine.group_members()] == ["a", "b"]
    assert len(peer.machine.members) == 4


# --- Links ----------------------------------------------------------------------------------------------------------


def test_neighbours_come_and_go() -> None:
    peer = PeerBench().member("ab")
    assert peer.hear(Neighbours((neighbour("b"), neighbour("c", dial=False)))) == [OpenLink(neighbour("c", dial=False))]
    assert peer.handle(events.LinkUp(pid("c"))) == [Send(Linked(pids("bc")))]
    assert peer.hear(Neighbours((neighbour("c", dial=False),))) == [CloseLink(pid("b")), Send(Linked(pids("c")))]
    assert peer.hear(Neighbours(())) == [CloseLink(pid("c")), Send(Linked(()))]


def test_neighbours_come_and_go_one_by_one() -> None:
    """A repeated message counts once. The whole list, after a broken connection, counts as usual."""
    peer = PeerBench().member("ab")
    c, d = neighbour("c", dial=False), neighbour("d", dial=False)
    assert peer.hear(NeighboursChanged(joined=(c, d))) == [OpenLink(c), OpenLink(d)]
    assert peer.hear(NeighboursChanged(joined=(neighbour("a"), neighbour("b"), c))) == []
    assert peer.handle(events.LinkUp(pid("c"))) == [Send(Linked(pids("bc")))]
    assert peer.hear(NeighboursChanged(gone=pids("cd"))) == [
        CloseLink(pid("c")),
        Send(Linked(pids("b"))),
        CloseLink(pid("d")),
    ]
    assert peer.hear(NeighboursChanged(gone=pids("ce"))) == []
    assert peer.hear(Neighbours((c,))) == [CloseLink(pid("b")), Send(Linked(())), OpenLink(c)]


def test_a_link_that_never_was_up_closes_in_silence() -> None:
    peer = PeerBench().member("ab")
    peer.hear(Neighbours((neighbour("b"), neighbour("c"))))
    assert peer.hear(Neighbours((neighbour("b"),))) == [CloseLink(pid("c"))]


def test_we_are_no_neighbour_of_ours() -> None:
    peer = PeerBench().pending()
    assert peer.hear(Neighbours((neighbour("a"),))) == []


def test_links_are_tried_again_with_growing_pauses() -> None:
    """L2."""
    peer = PeerBench().pending()
    peer.hear(Neighbours((neighbour("b"),)))
    pauses = []
    for _ in range(14):
        assert peer.handle(events.LinkFailed(pid("b"), "refused")) == []
        deadline_ns = peer.machine.deadline_ns()
        assert deadline_ns is not None
        pauses.append((deadline_ns - peer.now_ns) // limits.MS)
        assert peer.tick(deadline_ns - peer.now_ns - 1) == []
        assert peer.tick(1) == [OpenLink(neighbour("b"))]
        assert peer.machine.deadline_ns() is None
    assert pauses == [200, 400, 800, 1600] + [2000] * 10
    peer.handle(events.LinkUp(pid("b")))
    peer.handle(events.LinkFailed(pid("b"), "reset"))
    peer.tick()
    peer.handle(events.LinkFailed(pid("b"), "refused"))
    assert peer.machine.deadline_ns() == peer.now_ns + 400 * limits.MS


def test_a_lost_link_is_told_and_dialled_at_once() -> None:
    peer = PeerBench().member("abc")
    assert peer.handle(events.LinkFailed(pid("b"), "reset")) == [Send(Linked(pids("c")))]
    assert peer.machine.deadline_ns() == peer.now_ns
    assert peer.tick() == [OpenLink(neighbour("b"))]
    assert peer.handle(events.LinkUp(pid("b"))) == [Send(Linked(pids("bc")))]


def test_links_of_strangers_are_ignored() -> None:
    peer = PeerBench().member("ab")
    assert peer.handle(events.LinkUp(pid("x"))) == []
    assert peer.handle(events.LinkFailed(pid("x"), "reset")) == []
    assert peer.machine.deadline_ns() is None


def test_a_neighbour_that_goes_is_tried_no_more() -> None:
    peer = PeerBench().pending()
    peer.hear(Neighbours((neighbour("b"),)))
    peer.handle(events.LinkFailed(pid("b"), "refused"))
    peer.hear(Neighbours(()))
    assert peer.machine.deadline_ns() is None


# --- Collectives ----------------------------------------------------------------------------------------------------


def test_a_collective() -> None:
    """Golden. EndReduce comes before Resolve: when the call returns, the buffer belongs to the caller."""
    peer = PeerBench().member()
    assert peer.reduce(10) == [begin(10)]
    assert peer.plan(10) == [start(10)]
    assert peer.handle(done()) == [Send(Report(10, FIRST_ATTEMPT, True, digest=7, count=2))]
    assert peer.hear(committed(10)) == [EndReduce(FIRST_ATTEMPT, True), Resolve(10, 2)]
    assert peer.machine.calls == {}


def test_a_batch() -> None:
    peer = PeerBench().member()
    assert peer.reduce(10, spec(1), spec(2)) == [begin(10, spec(1), spec(2))]
    assert peer.reduce(12, spec(3)) == [begin(12, spec(3), oldest=10)]
    peer.plan(11)
    peer.plan(10, FIRST_ATTEMPT + 1)
    assert peer.handle(done(FIRST_ATTEMPT + 1)) == [Send(Report(10, FIRST_ATTEMPT + 1, True, digest=7, count=2))]
    peer.hear(committed(10, FIRST_ATTEMPT + 1))
    assert peer.reduce(13, spec(1)) == [begin(13, spec(1), oldest=11)]


def test_an_empty_batch() -> None:
    peer = PeerBench().member()
    assert peer.handle(events.Called(())) == []


@pytest.mark.parametrize("report", [{"error": "reset", "fault": pid("b"), "digest": 3}, {"error": "x" * 9999}])
def test_a_collective_that_fails_here(report: dict[str, Any]) -> None:
    peer = PeerBench().running()
    expected = Report(10, FIRST_ATTEMPT, False, report.get("fault"), report["error"][: limits.TEXT_CHARS_MAX])
    assert peer.handle(done(**report)) == [Send(expected)]


@pytest.mark.parametrize("phase", ["voting", "running", "reported"])
def test_an_abort_gives_the_buffer_back_before_the_call_ends(phase: str) -> None:
    """S2, S4."""
    peer = PeerBench().calling()
    if phase != "voting":
        peer.plan(10)
    if phase == "reported":
        peer.handle(done())
    first, second = peer.hear(aborted(10))
    assert first == EndReduce(FIRST_ATTEMPT, False)
    assert isinstance(second, Reject)
    assert type(second.error) is PeerLost
    assert (second.call_id, second.error.peers, second.error.message) == (10, ("b",), "lost b")
    assert peer.handle(done()) == []  # Later news of the data plane has no effect.
    assert peer.plan(10) == [EndReduce(FIRST_ATTEMPT, False)]  # Nor has a plan after the decision.


def test_results_that_differ() -> None:
    peer = PeerBench().running()
    effects = peer.hear(aborted(10, result=Result.INTERNAL_ERROR, reason="results differ"))
    assert type(peer.error(effects)) is ResultMismatch


def test_answers_without_an_attempt() -> None:
    peer = PeerBench().member()
    peer.reduce(10, spec(1), spec(2), spec(3))
    error = peer.error(peer.hear(Decision(10, Result.INVALID_USAGE, 0, "differ", "count", ("8 from a", "9 from b"))))
    assert isinstance(error, CollectiveMismatch)
    assert (error.tag, error.field, error.values) == (1, "count", ("8 from a", "9 from b"))
    assert type(peer.error(peer.hear(Decision(11, Result.TOO_FEW_PEERS)))) is TooFewPeers
    assert type(peer.error(peer.hear(Decision(12, LOST, reason="no data connection")))) is PeerLost


def test_an_answer_to_a_running_call_gives_the_buffer_back() -> None:
    """S4: whatever the master does, no call ends while its attempt runs."""
    peer = PeerBench().running()
    effects = peer.hear(Decision(10, LOST))
    assert effects[0] == EndReduce(FIRST_ATTEMPT, False)
    assert isinstance(effects[1], Reject)


def test_decisions_may_come_twice() -> None:
    peer = PeerBench().member()
    peer.reduce(10, spec(1), spec(2))
    peer.plan(10)
    peer.handle(done())
    peer.hear(committed(10))
    assert peer.hear(committed(10)) == []
    peer.hear(Decision(11, LOST))
    assert peer.hear(Decision(11, LOST)) == []


def test_plans_may_come_twice() -> None:
    """S4: an attempt starts once."""
    peer = PeerBench().calling()
    assert peer.plan(10) == [start(10)]
    assert peer.plan(10) == []
    peer.handle(done())
    assert peer.plan(10) == []


def test_a_plan_for_nobody_makes_its_frames_stale() -> None:
    """S4."""
    peer = PeerBench().member()
    assert peer.plan(77) == [EndReduce(FIRST_ATTEMPT, False)]


def test_plans_come_in_any_order() -> None:
    """A plan that was lost with a connection comes again after a later one."""
    peer = PeerBench().member()
    peer.reduce(10, spec(1), spec(2))
    peer.plan(11, FIRST_ATTEMPT + 1)
    (start,) = peer.plan(10, FIRST_ATTEMPT)
    assert isinstance(start, StartReduce) and start.attempt_id == FIRST_ATTEMPT
    assert peer.hear(aborted(10))[0] == EndReduce(FIRST_ATTEMPT, False)


def test_reports_of_the_data_plane_count_once() -> None:
    peer = PeerBench().calling()
    assert peer.handle(done()) == []
    peer.plan(10)
    peer.handle(done())
    assert peer.handle(done(error="later")) == []
    assert peer.handle(done(FIRST_ATTEMPT + 5)) == []


# --- Topology and syncs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [UPDATE, OPTIMIZE, PENDING])
def test_topology_calls(kind: Any) -> None:
    peer = PeerBench().member()
    assert peer.topology(10, kind) == [Send(topology_vote(10, 10, kind))]
    assert peer.hear(Decision(10, OK, 1)) == [Resolve(10, 1)]


def test_topology_calls_of_who_is_alone() -> None:
    peer = PeerBench().member("a")
    assert peer.topology(10) == [Send(topology_vote(10, 10, UPDATE))]


def test_a_failed_update_can_be_tried_again() -> None:
    peer = PeerBench().member()
    peer.topology(10)
    assert type(peer.error(peer.hear(Decision(10, Result.UPDATE_TOPOLOGY_FAILED)))) is UpdateTopologyFailed
    assert peer.topology(11) == [Send(topology_vote(11, 11, UPDATE))]


def test_fetching_ahead() -> None:
    """It reports that it is not ready, and from which peers it may fetch; later it reports once that it is ready."""
    peer = PeerBench(is_ready=False).pending()
    hello = replace(HELLO_AGAIN, is_ready=False)
    pending = neighbour("d", is_member=False)  # It may offer anything.
    assert peer.hear(Neighbours((neighbour("b"), neighbour("c"), pending)))[-1] == FetchAhead(pids("bc"))
    assert peer.hear(NeighboursChanged(gone=pids("b"))) == [CloseLink(pid("b"))]
    assert peer.welcome_back()[0] == Send(replace(hello, connection=2, is_member=False))
    assert peer.handle(events.ReadyCalled()) == [Send(Ready())]
    assert peer.handle(events.ReadyCalled()) == []
    assert peer.hear(Neighbours((neighbour("c"), pending))) == []
    assert peer.welcome_back()[0].message.is_ready
    peer.hear(member_list(2, "ac"))
    assert peer.machine.state is State.MEMBER


def test_ready_while_a_master_takes_over() -> None:
    """L2, headless, seed 953: a new master does not hear messages that come before its welcome."""
    peer = PeerBench(is_ready=False).pending()
    (report,) = peer.hear(Refused(Refusal.REPORT, ""))
    assert not report.message.hello.is_ready
    peer.handle(events.ReadyCalled())
    assert Send(Ready()) in peer.hear(Welcome(RUN_ID, 2))


def test_ready_while_a_master_waits_for_an_earlier_run() -> None:
    """L2, headless, seed 2009988: a restarted master held the peer, and then began another run of the same term."""
    peer = PeerBench(is_ready=False).pending()
    peer.reconnect()
    peer.handle(events.ReadyCalled())
    assert Send(Ready()) in peer.hear(Welcome(b"another run's id", 0))


def test_fetching_ahead_where_there_is_nobody() -> None:
    peer = PeerBench(is_ready=False).pending()
    assert peer.hear(Neighbours(())) == [FetchAhead(())]


def test_ready_between_hello_and_welcome() -> None:
    """L1: its Hello has said that it is not ready."""
    peer = PeerBench(is_ready=False).connecting()
    assert peer.handle(events.ReadyCalled()) == []
    assert peer.hear(Welcome(RUN_ID, 1)) == [Send(Ready())]


def test_ready_before_it_is_registered() -> None:
    peer = PeerBench(is_ready=False)
    peer.handle(events.ConnectCalled(CONNECT, attempts=2))
    assert peer.handle(events.ReadyCalled()) == []
    assert peer.up()[0].message.is_ready


def test_admitted_while_it_fetches_ahead() -> None:
    """As the first peer of a run: it is a member, and stays one for the next master."""
    peer = PeerBench(is_ready=False).pending()
    peer.hear(member_list(2, "a"))
    assert peer.handle(events.ReadyCalled()) == []
    assert peer.reconnect()[0].message.is_ready


def test_a_sync() -> None:
    """Golden. EndSync comes before Resolve: when the call returns, the fetched bytes are in place."""
    peer = PeerBench().member()
    assert peer.sync(10, revision=3) == [Send(offer(10, 3, *ENTRIES, oldest=10))]
    plan = sync_plan(10, 4, "b", ("w", "2"))
    assert peer.hear(plan) == [StartSync(10, plan.attempt_id, fetching(plan))]
    assert peer.hear(plan) == []
    assert peer.handle(events.FetchDone(FIRST_ATTEMPT)) == [Send(Report(10, FIRST_ATTEMPT, True))]
    assert peer.handle(events.FetchDone(FIRST_ATTEMPT)) == []
    assert peer.hear(committed(10, value=4)) == [EndSync(10, FIRST_ATTEMPT, True), Resolve(10, 4)]


@pytest.mark.parametrize("reported", [False, True])
def test_a_sync_that_fails(reported: bool) -> None:
    peer = PeerBench().member()
    peer.sync(10)
    peer.hear(sync_plan(10, 4, "b", ("w", "2")))
    if reported:
        report = events.FetchDone(FIRST_ATTEMPT, "b died", pid("b"))
        assert peer.handle(report) == [Send(Report(10, FIRST_ATTEMPT, False, pid("b"), "b died"))]
    effects = peer.hear(aborted(10))
    assert effects[0] == EndSync(10, FIRST_ATTEMPT, False)
    assert type(peer.error(effects)) is PeerLost


def test_a_fetch_that_dropped_sources() -> None:
    """The result names the sources, with texts that fit into a message."""
    peer = PeerBench().member("abc")
    peer.sync(10, revision=3)
    peer.hear(sync_plan(10, 4, "bc", ("w", "2")))
    (said,) = peer.handle(events.FetchDone(FIRST_ATTEMPT, dropped=((pid("b"), "x" * 5000),)))
    named = (Dropped(pid("b"), "x" * limits.OUTCOME_TEXT_CHARS_MAX),)
    assert said == Send(Report(10, FIRST_ATTEMPT, True, dropped=named))


@pytest.mark.parametrize("fetches, has_all", [(False, False), (True, True), (True, False)])
def test_the_state_of_this_peer_has_changed(fetches: bool, has_all: bool) -> None:
    """It reports so once, whatever it reported before. The user gets InvalidUsage, as no peer was lost."""
    peer = PeerBench().member()
    peer.sync(10, revision=4)
    peer.hear(sync_plan(10, 4, "b" if fetches else "ab", *[("w", "2")] * fetches))
    if has_all:
        peer.handle(events.FetchDone(FIRST_ATTEMPT))
    changed = events.FetchDone(FIRST_ATTEMPT, "tensor 'w' has changed", pid("a"))
    assert peer.handle(changed) == [Send(Report(10, FIRST_ATTEMPT, False, pid("a"), "tensor 'w' has changed"))]
    assert peer.handle(changed) == peer.handle(events.FetchDone(FIRST_ATTEMPT)) == []
    error = peer.error(peer.hear(aborted(10, reason="a: tensor 'w' has changed")))
    assert (type(error), error.message) == (InvalidUsage, "a: tensor 'w' has changed")


def test_a_master_that_takes_over_waits_for_who_has_lost_what_it_held() -> None:
    """S5: it must not commit before the peer has reported again that its state has changed."""
    peer = PeerBench().member()
    peer.sync(10, revision=4)
    peer.hear(sync_plan(10, 4, "ab"))
    for is_open in (False, True):
        said = peer.hear(Refused(Refusal.REPORT, "", term=2))
        assert said[0].message.running[0].is_open == is_open
        peer.handle(events.FetchDone(FIRST_ATTEMPT, "tensor 'w' has changed", pid("a")))


def test_a_sync_that_refuses_us() -> None:
    peer = PeerBench().member()
    peer.sync(10)
    error = peer.error(peer.hear(Decision(10, Result.INVALID_USAGE, reason="ahead")))
    assert (type(error), error.message) == (InvalidUsage, "ahead")


def test_a_sync_plan_for_nobody() -> None:
    peer = PeerBench().calling()
    assert peer.hear(sync_plan(10, 4, "b")) == []
    assert peer.hear(sync_plan(77, 4, "b")) == []


def test_a_sync_plan_that_comes_after_a_later_one() -> None:
    peer = PeerBench().member()
    peer.sync(10)
    peer.plan(77, FIRST_ATTEMPT + 1)
    (start,) = peer.hear(sync_plan(10, 4, "b", ("w", "2")))
    assert isinstance(start, StartSync)


def test_reports_go_to_the_call_of_their_kind() -> None:
    peer = PeerBench().running()
    assert peer.handle(events.FetchDone(FIRST_ATTEMPT)) == []
    peer.handle(done())
    peer.hear(committed(10))
    peer.sync(11)
    peer.hear(sync_plan(11, 4, "b", attempt_id=FIRST_ATTEMPT + 1))
    assert peer.handle(done(FIRST_ATTEMPT + 1)) == []


# --- Calls in the wrong phase ---------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[PeerBench], list[Any]]] = {
    "reduce": lambda peer: peer.reduce(50, spec(50)),
    "update": lambda peer: peer.topology(50, UPDATE),
    "optimize": lambda peer: peer.topology(50, OPTIMIZE),
    "pending": lambda peer: peer.topology(50, PENDING),
    "sync": lambda peer: peer.sync(50),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", ["new", "connecting", "pending", "left"])
def test_calls_of_who_is_no_member(where: str, call: str) -> None:
    peer = PeerBench()
    if where in ("connecting", "pending"):
        getattr(peer, where)()
    elif where == "left":
        peer.member()
        peer.handle(events.CloseCalled())
    error = peer.error(CALLS[call](peer))
    assert type(error) is InvalidUsage
    assert ("closed" if where == "left" else "connect()") in error.message


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_who_was_removed_say_why(call: str) -> None:
    peer = PeerBench().member()
    peer.hear(Kick(Result.INVALID_USAGE, "too slow"))
    error = peer.error(CALLS[call](peer))
    assert isinstance(error, Kicked)
    assert error.reason == "too slow"


def answer_of(first: str, second: str) -> type[PCCLError] | None:
    """The error of the second call while the first one waits, by the last row of API.md."""
    if first == "reduce":
        return None if second in ("reduce", "pending") else PendingAsyncOps
    if first == "pending" and second == "reduce":
        return None
    return InvalidUsage


@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize("first", CALLS)
def test_calls_beside_each_other(first: str, second: str) -> None:
    peer = PeerBench().member()
    {
        "reduce": lambda: peer.reduce(10, spec(10)),
        "update": lambda: peer.topology(10, UPDATE),
        "optimize": lambda: peer.topology(10, OPTIMIZE),
        "pending": lambda: peer.topology(10, PENDING),
        "sync": lambda: peer.sync(10),
    }[first]()
    effects = CALLS[second](peer)
    expected = answer_of(first, second)
    if expected is None:
        assert isinstance(effects[0], Send)
        assert set(peer.machine.calls) == {10, 50}
    else:
        assert type(peer.error(effects)) is expected
        assert set(peer.machine.calls) == {10}


def test_all_three_at_once() -> None:
    peer = PeerBench().calling()
    peer.topology(11, PENDING)
    assert isinstance(peer.reduce(12, spec(2))[0], Send)
    assert type(peer.error(peer.topology(13, PENDING))) is InvalidUsage


def test_the_same_tag_twice() -> None:
    peer = PeerBench().member()
    peer.reduce(10, spec(1))
    error = peer.error(peer.reduce(11, spec(1)))
    assert type(error) is InvalidUsage
    assert "same tag" in error.message
    effects = peer.reduce(12, spec(2), spec(3), spec(2))
    assert [type(e.error) for e in effects] == [InvalidUsage] * 3
    peer.hear(Decision(10, LOST))
    assert peer.reduce(15, spec(1)) == [begin(15, spec(1))]


@pytest.mark.parametrize("members", ["a", "ax"])
def test_alone(members: str) -> None:
    """TOO_FEW_PEERS at once, without a message to the master."""
    peer = PeerBench().member(members, x=1)
    for call in ("reduce", "sync"):
        error = peer.error(CALLS[call](peer))
        assert (type(error), error.result) == (TooFewPeers, Result.TOO_FEW_PEERS)


def test_the_bound_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: the master removes a peer that exceeds it, so the peer must refuse first, whatever the calls are."""
    monkeypatch.setattr(limits, "CALLS_IN_FLIGHT_MAX", 3)
    peer = PeerBench().member()
    assert type(peer.error(peer.reduce(1, spec(1), spec(2), spec(3), spec(4))[:1])) is InvalidUsage
    peer.open.clear()
    peer.reduce(10, spec(1), spec(2))
    peer.topology(12, PENDING)
    assert type(peer.error(peer.reduce(13, spec(3)))) is InvalidUsage
    peer.hear(Decision(12, OK))
    peer.reduce(14, spec(3))
    assert type(peer.error(peer.topology(15, PENDING))) is InvalidUsage
    assert len(peer.machine.calls) == 3


def test_the_bound_of_calls_follows_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """L3, S1: another master must hear of the calls of all members together."""
    monkeypatch.setattr(limits, "CALLS_NAMED_MAX", 6)
    peer = PeerBench().member("abcx", x=1)
    peer.reduce(10, spec(1))
    error = peer.error(peer.reduce(11, spec(2), spec(3))[:1])
    assert type(error) is InvalidUsage
    assert "more than 2 calls in flight, in a group of 3" in str(error)
    peer.open.discard(12)
    peer.reduce(13, spec(2))
    assert "more than 2 calls" in str(peer.error(peer.topology(14, PENDING)))
    peer.hear(member_list(3, "abx", x=1))
    peer.reduce(15, spec(3))
    assert len(peer.machine.calls) == 3


@pytest.mark.parametrize("where", ["connecting", "pending", "member"])
def test_connect_twice(where: str) -> None:
    peer = getattr(PeerBench(), where)()
    error = peer.error(peer.handle(events.ConnectCalled(50, 1)))
    assert type(error) is InvalidUsage
    assert peer.machine.state.value == where


def test_connect_after_close() -> None:
    peer = PeerBench().member()
    peer.handle(events.CloseCalled())
    assert type(peer.error(peer.handle(events.ConnectCalled(50, 1)))) is InvalidUsage


# --- Connections that break -----------------------------------------------------------------------------------------


def test_everything_is_said_again() -> None:
    peer = PeerBench().member("abc")
    peer.reduce(10, spec(1), spec(2), spec(3), spec(4))
    peer.plan(11, FIRST_ATTEMPT)
    peer.plan(12, FIRST_ATTEMPT + 1)
    peer.handle(done(FIRST_ATTEMPT + 1))
    peer.topology(14, PENDING)
    peer.handle(events.CallWithdrawn(13, timed_out=True))
    assert peer.welcome_back() == [
        Send(HELLO_AGAIN),
        Send(Linked(pids("bc"))),
        begin(10, spec(1)),
        begin(11, spec(2), oldest=10),
        Send(Report(12, FIRST_ATTEMPT + 1, True, digest=7, count=2)),
        Send(Withdraw(13)),  # First, as the vote may be the last one that others wait for.
        begin(13, spec(4), oldest=10),
        Send(topology_vote(10, 14, PENDING)),
    ]
    peer.hear(Decision(10, LOST))
    assert peer.reconnect()[2] == begin(11, spec(2))


def test_syncs_are_said_again() -> None:
    peer = PeerBench().member()
    peer.sync(10, revision=3)
    assert peer.welcome_back()[2:] == [Send(offer(10, 3, *ENTRIES, oldest=10))]
    peer.hear(sync_plan(10, 4, "b", ("w", "2")))
    assert peer.reconnect()[2:] == [Send(offer(10, 3, *ENTRIES, oldest=10))]
    peer.handle(events.FetchDone(FIRST_ATTEMPT))
    finished = Report(10, FIRST_ATTEMPT, True)
    assert peer.reconnect()[2:] == [Send(offer(10, 3, *ENTRIES, oldest=10)), Send(finished)]


def test_a_master_that_asks_who_we_are() -> None:
    peer = PeerBench().calling()
    effects = peer.hear(Refused(Refusal.UNREGISTERED, "send a Hello first"))
    assert effects == [Send(replace(HELLO_AGAIN, connection=1)), Send(Linked(pids("b"))), begin(10)]


def test_a_master_that_refuses_a_message() -> None:
    peer = PeerBench().member()
    assert peer.hear(Refused(Refusal.MALFORMED, "what")) == []
    assert peer.logged[-1].level is Level.ERROR
    assert peer.machine.state is State.MEMBER


def test_a_master_that_stays_away() -> None:
    """L1."""
    peer = PeerBench().running()
    peer.down()
    assert peer.machine.deadline_ns() == peer.now_ns + limits.MASTER_TIMEOUT_NS
    assert peer.tick(limits.MASTER_TIMEOUT_NS - 1) == []
    effects = peer.tick(1)
    assert effects[0] == EndReduce(FIRST_ATTEMPT, False)
    error = peer.error(effects)
    assert isinstance(error, MasterUnreachable)
    assert "none has led the run for 300 s" in str(error)
    assert effects[-1] == CloseLink(pid("b"))


def test_a_master_that_comes_back() -> None:
    peer = PeerBench().member()
    peer.welcome_back()
    assert peer.machine.deadline_ns() is None


def test_a_connection_that_stands_but_brings_no_answer() -> None:
    """L1: something else may listen there now; only a Welcome ends the wait."""
    peer = PeerBench().member()
    peer.topology(10)
    peer.down()
    deadline_ns = peer.machine.deadline_ns()
    peer.tick(limits.SECOND)
    peer.up()
    assert peer.machine.deadline_ns() == deadline_ns
    assert isinstance(peer.error(peer.tick(limits.MASTER_TIMEOUT_NS)), MasterUnreachable)


def test_a_connection_that_breaks_again_and_again() -> None:
    """L1: the wait starts again only after the master has answered."""
    peer = PeerBench().member()
    peer.down()
    deadline_ns = peer.machine.deadline_ns()
    for _ in range(5):
        peer.tick(limits.SECOND)
        peer.up()
        peer.down()
    assert peer.machine.deadline_ns() == deadline_ns


@pytest.mark.parametrize("where", ["connecting", "member"])
def test_a_welcome_of_a_connection_that_is_gone(where: str) -> None:
    """L1: it may be read after the break. Then it must not end the wait for the master."""
    peer = getattr(PeerBench(), where)()
    peer.down()
    deadline_ns = peer.machine.deadline_ns()
    assert peer.hear(Welcome(RUN_ID, 1)) == []
    assert (peer.machine.state.value, peer.machine.deadline_ns()) == (where, deadline_ns)
    hello = peer.up()[0].message
    assert hello.is_member is (where == "member")


def test_a_master_that_does_not_know_us() -> None:
    peer = PeerBench().running()
    effects = peer.hear(Refused(Refusal.UNKNOWN_SESSION, "removed"))
    assert effects[0] == EndReduce(FIRST_ATTEMPT, False)
    error = peer.error(effects)
    assert isinstance(error, Kicked)
    assert "connect again" in str(error)


def test_calls_while_the_connection_is_broken() -> None:
    """The peer makes the calls when the connection is up again."""
    peer = PeerBench().member()
    peer.down()
    peer.reduce(10)
    assert peer.up()[2:] == [begin(10)]


FOREIGN: list[events.PeerEvent] = [events.OtherVersionReceived(10), events.NonsenseReceived("5 bytes")]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_newcomer_passes_by_what_is_no_master(foreign: events.PeerEvent) -> None:
    """L3: it logs so, and ends if there is no master left to try."""
    peer = PeerBench(masters=("m:1", "n:1")).connecting()
    assert peer.handle(foreign) == []
    assert len(peer.logged) == 1 and "m:1" in peer.logged[0].text
    assert peer.tick() == [UseMaster(1)]
    peer.up()
    assert peer.hear(Welcome(RUN_ID, 1)) == []
    assert peer.machine.state is State.PENDING


def test_all_masters_are_of_another_version() -> None:
    peer = PeerBench(masters=("m:1", "n:1")).connecting()
    peer.handle(FOREIGN[0])
    peer.tick()
    peer.up()
    assert type(peer.error(peer.handle(FOREIGN[0]))) is VersionMismatch


def test_nonsense_everywhere_is_no_master() -> None:
    peer = PeerBench(masters=("m:1", "n:1")).connecting()
    for _ in range(3):
        assert peer.handle(FOREIGN[1]) == []
        peer.tick(limits.RECONNECT_INTERVAL_MAX_NS)
        peer.up()
    assert type(peer.error(peer.handle(FOREIGN[1]))) is MasterUnreachable


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_member_goes_on_to_the_next_master(foreign: events.PeerEvent) -> None:
    """L3: a standby that was deployed by mistake does not end a run."""
    peer = PeerBench(masters=("m:1", "n:1")).member("abc")
    peer.down()
    peer.handle(events.ConnectionFailed("refused"))
    assert peer.tick() == [UseMaster(1)]
    peer.up()
    assert peer.handle(foreign) == []
    assert "n:1" in peer.logged[-1].text and peer.logged[-1].level is Level.WARNING
    assert peer.tick(limits.RECONNECT_INTERVAL_MAX_NS) == [UseMaster(0)]
    peer.up()
    peer.hear(Welcome(RUN_ID, 0))
    assert peer.machine.state is State.MEMBER
    assert peer.machine.deadline_ns() is None


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_member_waits_for_its_only_master(foreign: events.PeerEvent) -> None:
    """L3: what answers there now may be a mistake; calls wait for `master_timeout`."""
    peer = PeerBench().member()
    peer.reconnect()
    assert peer.handle(foreign) == []
    assert [log.level for log in peer.logged].count(Level.WARNING) == 2  # One warning is about the lost connection.
    assert peer.reconnect()[0] == Send(replace(HELLO_AGAIN, connection=3))
    assert peer.machine.state is State.MEMBER
    assert peer.machine.deadline_ns() == peer.now_ns + limits.MASTER_TIMEOUT_NS


@pytest.mark.parametrize("foreign", FOREIGN)
def test_nonsense_of_the_master_of_the_run(foreign: events.PeerEvent) -> None:
    peer = PeerBench(masters=("m:1", "n:1")).member()
    assert peer.handle(foreign) == []
    assert peer.logged[-1].level is Level.ERROR
    assert peer.machine.deadline_ns() is None


def test_how_long_connecting_takes() -> None:
    """The shortest time counts, separately for each master: a longer one was delayed by something else."""
    peer = PeerBench(masters=("m:1", "n:1")).connecting()

    def said(handshake_ns: int) -> int:
        (effect, *_) = peer.handle(events.ConnectionUp(handshake_ns))
        return int(effect.message.handshake_ms)

    assert [said(ns) for ns in (0, 300 * limits.MS, 1300 * limits.MS, 250 * limits.MS + 1, 0)] == [
        0,
        300,
        300,
        250,
        250,
    ]
    peer.handle(events.ConnectionDown())
    peer.tick()
    assert said(10**18) == limits.HANDSHAKE_MS_MAX


# --- Withdrawing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timed_out, kind", [(True, OperationTimeout), (False, InvalidUsage)])
@pytest.mark.parametrize("phase", ["voting", "running", "topology", "sync"])
def test_a_call_that_is_given_up(phase: str, timed_out: bool, kind: type[PCCLError]) -> None:
    peer = PeerBench().member()
    {"topology": peer.topology, "sync": peer.sync}.get(phase, peer.reduce)(10)
    if phase == "running":
        peer.plan(10)
    assert peer.handle(events.CallWithdrawn(10, timed_out)) == [Send(Withdraw(10))]
    effects = peer.hear(aborted(10) if phase == "running" else Decision(10, LOST, reason="withdrawn"))
    assert type(peer.error(effects)) is kind


def test_a_call_that_succeeds_though_it_was_given_up() -> None:
    """S1: all participants get one outcome, and it is too late to give the call up."""
    peer = PeerBench().running()
    peer.handle(done())
    peer.handle(events.CallWithdrawn(10, timed_out=True))
    assert peer.hear(committed(10)) == [EndReduce(FIRST_ATTEMPT, True), Resolve(10, 2)]


def test_other_errors_of_a_call_that_was_given_up() -> None:
    """The real cause says more than that the user gave up."""
    peer = PeerBench().member()
    peer.reduce(10, spec(1), spec(2))
    peer.handle(events.CallWithdrawn(10, timed_out=True))
    peer.handle(events.CallWithdrawn(11, timed_out=True))
    assert type(peer.error(peer.hear(Decision(10, Result.TOO_FEW_PEERS)))) is TooFewPeers
    assert type(peer.error(peer.hear(aborted(11, result=Result.INTERNAL_ERROR)))) is ResultMismatch


def test_a_plan_for_a_call_that_was_given_up_still_counts() -> None:
    """The master did not know yet that the call was given up. Its decision follows."""
    peer = PeerBench().calling()
    peer.handle(events.CallWithdrawn(10, timed_out=True))
    assert peer.plan(10) == [StartReduce(10, FIRST_ATTEMPT, reducing("ab"))], "without its digest"
    assert peer.hear(aborted(10))[0] == EndReduce(FIRST_ATTEMPT, False)


def test_giving_up_what_has_ended() -> None:
    peer = PeerBench().member()
    assert peer.handle(events.CallWithdrawn(77, timed_out=True)) == []


# --- Releasing ------------------------------------------------------------------------------------------------------


def give_up(peer: PeerBench, call_id: int = 10) -> list[Any]:
    return peer.handle(events.CallWithdrawn(call_id, timed_out=True))


def led_again(peer: PeerBench) -> list[Any]:
    """Connects again, and the same master welcomes the peer. Returns what the peer sent before the welcome."""
    said = peer.up()
    peer.hear(Welcome(RUN_ID, 0))
    return said[2:]


def released(call: str = "reduce") -> PeerBench:
    """A call that ended in an outage, before any other peer had voted."""
    peer = PeerBench().member("ab")
    getattr(peer, call)(10)
    peer.down()
    assert isinstance(peer.error(give_up(peer)), OperationTimeout)
    return peer


@pytest.mark.parametrize("call", ["reduce", "topology", "sync"])
def test_without_a_master_a_call_ends_at_once(call: str) -> None:
    """L3: the member stays. It reports what the other participants need once there is a master."""
    peer = released(call)
    assert peer.machine.state is State.MEMBER
    votes = {
        "reduce": begin(10),
        "topology": Send(topology_vote(10, 10, UPDATE)),
        "sync": Send(offer(10, 0, *ENTRIES, oldest=10)),
    }
    assert led_again(peer) == [Send(Withdraw(10)), votes[call]]
    assert peer.hear(Decision(10, LOST, reason="withdrawn")) == []
    assert peer.machine.calls == {}


def test_before_the_welcome_no_master_leads() -> None:
    peer = PeerBench().calling()
    peer.reconnect()
    assert give_up(peer)[0] == Send(Withdraw(10))
    assert not peer.open


def test_a_master_has_time_for_its_word() -> None:
    """L1: the peer waits for the master's decision, but only for that time."""
    peer = PeerBench().calling()
    assert give_up(peer) == [Send(Withdraw(10))]
    assert peer.machine.deadline_ns() == peer.now_ns + limits.WITHDRAW_TIMEOUT_NS
    assert peer.tick(limits.WITHDRAW_TIMEOUT_NS - 1) == []
    assert give_up(peer) == [Send(Withdraw(10))]  # A second time, as by Ctrl-C: the wait does not start anew.
    (effect,) = peer.tick(1)
    assert isinstance(effect, Reject)
    assert peer.machine.deadline_ns() is None
    assert give_up(peer) == []


def test_an_answer_in_time_ends_the_wait() -> None:
    peer = PeerBench().calling()
    give_up(peer)
    assert type(peer.error(peer.hear(Decision(10, LOST)))) is OperationTimeout
    assert peer.machine.deadline_ns() is None


def test_a_running_attempt_is_released() -> None:
    """S2, S4: the buffers go back before the user hears of it. The others hear that this peer's part failed."""
    peer = PeerBench().running()
    peer.down()
    end, reject, finished = give_up(peer)[1:]
    assert end == EndReduce(FIRST_ATTEMPT, False)
    assert isinstance(reject, Reject)
    assert finished == Send(Report(10, FIRST_ATTEMPT, False, None, "withdrawn"))
    assert peer.handle(done()) == []
    assert led_again(peer) == [Send(Withdraw(10)), finished]
    assert peer.hear(aborted(10)) == []
    assert peer.machine.calls == {}


def test_what_has_been_reported_is_not_taken_back() -> None:
    """S1: the others may have committed it. The peer waits for the master's decision, even if no master leads yet."""
    peer = PeerBench().running()
    peer.handle(done(has_told=True))
    peer.down()
    assert give_up(peer) == []
    report = Send(Report(10, FIRST_ATTEMPT, True, digest=7, count=2))
    assert peer.up()[2:] == [report]
    peer.down()
    assert peer.tick(limits.WITHDRAW_TIMEOUT_NS)[0] == EndReduce(FIRST_ATTEMPT, False)
    assert led_again(peer) == [report]


def reported_and_released() -> PeerBench:
    peer = PeerBench().running()
    peer.handle(done(has_told=True))
    give_up(peer)
    assert peer.tick(limits.WITHDRAW_TIMEOUT_NS) == []  # Once led, the peer needs the master's decision.
    peer.down()
    peer.tick(limits.WITHDRAW_TIMEOUT_NS)
    assert not peer.open
    led_again(peer)
    return peer


def test_a_commit_after_the_release_leaves_the_peer_behind() -> None:
    """S1: all others have a result that this peer has given up."""
    peer = reported_and_released()
    effects = peer.hear(committed(10))
    assert effects[0] == Send(Leave())
    assert not [effect for effect in effects if isinstance(effect, EndReduce | Reject)]
    assert isinstance(peer.machine.error, Kicked)


def test_an_abort_after_the_release_is_no_news() -> None:
    peer = reported_and_released()
    assert peer.hear(aborted(10)) == []
    assert peer.machine.state is State.MEMBER


@pytest.mark.parametrize("call", ["reduce", "sync"])
def test_a_plan_after_the_release_is_not_begun(call: str) -> None:
    """S2: the buffers belong to the user."""
    peer = released(call)
    led_again(peer)
    if call == "reduce":
        effects = peer.plan(10)
        assert effects[1] == Send(Report(10, FIRST_ATTEMPT, False, None, "withdrawn"))
    else:
        effects = peer.hear(sync_plan(10, 4, "b", ("w", "2")))
        assert effects[1] == Send(Report(10, FIRST_ATTEMPT, False, None, "withdrawn"))
    assert effects[0] == EndReduce(FIRST_ATTEMPT, False)
    assert peer.hear(aborted(10)) == []


def test_an_abort_whose_plan_got_lost_after_the_release() -> None:
    """S4: other peers' connections may wait for the attempt."""
    peer = released()
    led_again(peer)
    assert peer.hear(aborted(10)) == [EndReduce(FIRST_ATTEMPT, False)]


def test_a_holder_is_released_from_a_sync() -> None:
    """A holder has nothing to fetch, so it has sent nothing."""
    peer = PeerBench().member("ab")
    peer.sync(10, revision=4)
    peer.hear(sync_plan(10, 4, "a"))
    peer.down()
    end, reject, finished = give_up(peer)[1:]
    assert (end, reject.call_id) == (EndSync(10, FIRST_ATTEMPT, False), 10)
    assert finished == Send(Report(10, FIRST_ATTEMPT, False, None, "withdrawn"))
    assert peer.handle(events.FetchDone(FIRST_ATTEMPT, "changed", pid("a"))) == []


def test_the_same_tag_again_after_the_release() -> None:
    """L2: the master must not take the new call for the old one, so it hears of it when the old one is settled."""
    peer = released()
    assert peer.reduce(11, spec(0), spec(1)) == [begin(12, spec(1), oldest=10)]
    assert type(peer.error(peer.reduce(13, spec(0)))) is InvalidUsage
    assert led_again(peer) == [Send(Withdraw(10)), begin(10), begin(12, spec(1), oldest=10)]
    assert peer.hear(Decision(10, LOST)) == [begin(11, spec(0))]
    assert peer.plan(11) == [start(11)]


def test_a_call_that_is_held_back_is_given_up() -> None:
    peer = released()
    peer.reduce(11)
    (effect,) = give_up(peer, 11)
    assert isinstance(effect, Reject)
    assert peer.hear(Decision(10, LOST)) == []


@pytest.mark.parametrize(
    "first, second, waits",
    [
        ("reduce", "topology", True),
        ("reduce", "pending", False),
        ("topology", "reduce", True),
        ("topology", "pending", True),
        ("pending", "reduce", False),
        ("pending", "topology", True),
        ("sync", "sync", True),
        ("sync", "reduce", True),
    ],
)
def test_calls_that_may_not_run_beside_a_released_one(first: str, second: str, waits: bool) -> None:
    peer = PeerBench().member("ab")
    calls: dict[str, Callable[[int], list[Any]]]
    calls = {"reduce": peer.reduce, "topology": peer.topology, "sync": peer.sync}
    calls["pending"] = lambda call_id: peer.topology(call_id, PENDING)
    calls[first](10)
    peer.down()
    give_up(peer)
    assert bool(calls[second](11)) is not waits
    assert (peer.machine.calls[11].phase is CallPhase.HELD) is waits
    led_again(peer)
    said = peer.hear(Decision(10, LOST))
    assert bool(said) is waits
    assert peer.machine.calls[11].phase is not CallPhase.HELD


def test_released_calls_count() -> None:
    """B1: the master keeps them too."""
    peer = PeerBench().member("ab")
    count = limits.CALLS_IN_FLIGHT_MAX
    peer.reduce(10, *[spec(tag) for tag in range(count)])
    peer.down()
    for call_id in range(10, 10 + count):
        give_up(peer, call_id)
    assert not peer.open
    assert type(peer.error(peer.reduce(10 + count, spec(count)))) is InvalidUsage
    assert type(peer.error(peer.topology(11 + count))) is InvalidUsage


@pytest.mark.parametrize(("kind", "after_round"), [(UPDATE, 0), (TopologyKind.PENDING, 3)])
def test_a_round_that_ends_after_the_release(kind: TopologyKind, after_round: int) -> None:
    """L1: the others have its answer. The same call, made again, gets that answer too; another call gets the next."""
    peer = released("topology")
    led_again(peer)
    assert peer.hear(Decision(10, OK, round=3)) == []
    assert peer.topology(11, kind) == [Send(topology_vote(11, 11, kind, after_round))]


def test_a_call_that_others_have_made_is_for_the_last_round() -> None:
    """L1: all others have made another call since this one was given up, so they no longer wait for it."""
    peer = released("topology")
    led_again(peer)
    peer.hear(Decision(10, OK, round=3))
    peer.reduce(11)
    peer.hear(Decision(11, LOST))
    assert peer.topology(12) == [Send(topology_vote(12, 12, UPDATE, 3))]


def test_close_with_released_calls() -> None:
    """Nobody waits for these calls: they are answered only once."""
    peer = released()
    peer.reduce(11)
    effects = peer.handle(events.CloseCalled())
    assert [effect.call_id for effect in effects if isinstance(effect, Reject)] == [11]


# --- The end --------------------------------------------------------------------------------------------------------


def test_close_before_connect() -> None:
    peer = PeerBench()
    assert peer.handle(events.CloseCalled()) == []
    assert peer.machine.state is State.CLOSED
    assert type(peer.error(peer.reduce(10))) is InvalidUsage


@pytest.mark.parametrize("where", ["connecting", "pending"])
def test_close_before_admission(where: str) -> None:
    peer = getattr(PeerBench(), where)()
    first, second = peer.handle(events.CloseCalled())
    assert first == Send(Leave())
    assert isinstance(second, Reject)
    assert second.call_id == CONNECT


def test_close_with_calls_in_flight() -> None:
    """S2, S4: each call ends after its buffer was given back, and links close last."""
    peer = PeerBench().member("abc")
    peer.reduce(10, spec(1), spec(2))
    peer.plan(10)
    effects = peer.handle(events.CloseCalled())
    assert effects[:2] == [Send(Leave()), EndReduce(FIRST_ATTEMPT, False)]
    assert [e.call_id for e in effects[2:4]] == [10, 11]
    assert all(type(e.error) is InvalidUsage for e in effects[2:4])
    assert effects[4:] == [CloseLink(pid("b")), CloseLink(pid("c"))]


def test_close_in_a_sync() -> None:
    peer = PeerBench().member()
    peer.sync(10)
    peer.hear(sync_plan(10, 4, "b", ("w", "2")))
    assert peer.handle(events.CloseCalled())[1] == EndSync(10, FIRST_ATTEMPT, False)


def test_close_without_a_connection() -> None:
    peer = PeerBench().member()
    peer.down()
    assert peer.handle(events.CloseCalled()) == [CloseLink(pid("b"))]


FROM_OUTSIDE: list[events.PeerEvent] = [
    events.ConnectionUp(),
    events.ConnectionDown(),
    events.ConnectionFailed("x"),
    events.OtherVersionReceived(10),
    events.LinkUp(pid("b")),
    events.MasterMessageReceived(Welcome(RUN_ID, 1)),
    events.Tick(),
]


def test_closed_is_the_end() -> None:
    """Later events have no effect."""
    peer = PeerBench().member()
    peer.handle(events.CloseCalled())
    for event in (
        *FROM_OUTSIDE,
        events.CloseCalled(),
        events.LinkFailed(pid("b"), "x"),
        events.MasterMessageReceived(Kick(1, "x")),
        events.MasterMessageReceived(Neighbours((neighbour("b"),))),
        done(),
        events.FetchDone(FIRST_ATTEMPT),
        events.CallWithdrawn(10, timed_out=True),
        events.CallWithdrawn(CONNECT, timed_out=True),
    ):
        assert peer.handle(event) == [], event
        assert peer.machine.deadline_ns() is None
        assert type(peer.machine.error) is InvalidUsage


def test_before_connect_nothing_has_any_effect() -> None:
    peer = PeerBench()
    for event in FROM_OUTSIDE:
        assert peer.handle(event) == [], event
    assert peer.machine.state is State.NEW


def test_an_unknown_result_of_a_later_master() -> None:
    peer = PeerBench().member()
    peer.topology(10)
    assert type(peer.error(peer.hear(Decision(10, 99)))) is InternalError


# --- What the master has measured -----------------------------------------------------------------------------------


def asks(effects: list[Any]) -> int:
    """The number of requests for the master's measurements."""
    return effects.count(Send(MeasurementsRequest()))


def test_one_answer_is_for_all_who_ask() -> None:
    bench = PeerBench().member()
    told = Measurements(())
    assert bench.hear(told) == [], "nobody has asked"
    assert asks(bench.handle(events.MeasurementsCalled())) == 1
    assert asks(bench.handle(events.MeasurementsCalled())) == 0
    assert bench.hear(told) == [ShowMeasurements(told)]
    assert bench.hear(told) == []
    assert asks(bench.handle(events.MeasurementsCalled())) == 1


def test_a_request_is_repeated_on_a_new_connection() -> None:
    """L3: it also repeats it at a master that takes the run over, which drops it while it collects reports."""
    bench = PeerBench().member()
    bench.handle(events.MeasurementsCalled())
    bench.down()
    assert asks(bench.up()) == 1
    bench.hear(Measurements(()))
    bench.welcome_back()
    bench.hear(Measurements(()))
    bench.down()
    assert asks(bench.up()) == 0


def test_nobody_asks_without_being_a_member() -> None:
    bench = PeerBench().member()
    bench.hear(Kick(7, "removed"))
    assert bench.handle(events.MeasurementsCalled()) == []


def test_an_answer_to_nobody_is_ignored() -> None:
    """B2: only hosts outside the run ask for this answer, but a master may send it to a peer."""
    assert PeerBench().member().hear(CheckAnswer("10.0.1.2", False, 0)) == []
