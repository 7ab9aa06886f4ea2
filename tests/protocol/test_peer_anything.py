"""Any master, any network, any user: the peer answers every call once, and never keeps or touches a buffer too long."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from zpccl import limits
from zpccl.protocol import events
from zpccl.protocol.calls import CallPhase
from zpccl.protocol.effects import EndReduce, EndSync, Reject, Resolve, Send, StartReduce, StartSync
from zpccl.protocol.messages import (
    Decision,
    Kick,
    Neighbours,
    Refusal,
    Refused,
    Report,
    TopologySpec,
    Vote,
    Votes,
    Welcome,
    Withdraw,
)
from zpccl.protocol.peer import State

from .harness import (
    CONNECT,
    FIRST_ATTEMPT,
    OPTIMIZE,
    PENDING,
    RUN_ID,
    UPDATE,
    PeerBench,
    member_list,
    neighbour,
    pid,
    plan_of,
    spec,
    sync_plan,
    sync_spec,
)

NUMBERS = st.integers(0, 3)
ACTIONS = st.sampled_from(
    "reduce reduce batch update optimize pending sync plan plan sync_plan sync_plan late done done failed fetched"
    " commit commit abort answer refuse withdraw withdraw patience down up failed_try members alone neighbours link"
    " unlink tick welcome unregistered malformed stranger version nonsense".split()
)
LAST_ACTIONS = st.sampled_from(["close", "kick", "unknown", "away"])


class Watch:
    """Follows the effects of one peer."""

    def __init__(self) -> None:
        self.peer = PeerBench().member("abc")
        self.next_call = 10
        self.running: dict[int, int] = {}  # Attempts that use buffers, and their calls.
        self.started: set[int] = set()
        self.attempt_id = FIRST_ATTEMPT
        self.late: dict[int, int] = {}  # The calls of plans that come after plans of later attempts.

    def do(self, event: events.PeerEvent) -> list[Any]:
        effects = self.peer.handle(event)
        for effect in effects:
            if isinstance(effect, StartReduce | StartSync):
                assert effect.attempt_id not in self.started, "S3: an attempt begins once"
                assert effect.call_id not in self.running.values(), "S4: a call has one attempt"
                self.started.add(effect.attempt_id)
                self.running[effect.attempt_id] = effect.call_id
            elif isinstance(effect, EndReduce | EndSync):
                self.running.pop(effect.attempt_id, None)
            elif isinstance(effect, Resolve | Reject):
                assert effect.call_id not in self.running.values(), "S4: a call ends while its buffer is in use"
        return effects

    def step(self, action: str, number: int) -> None:
        calls = sorted(self.peer.machine.calls)
        call_id = calls[number % len(calls)] if calls else 99
        attempt_id = self.peer.machine.calls[call_id].attempt_id if calls else None
        message = self.message(action, call_id, attempt_id or self.attempt_id, number)
        event = events.MasterMessageReceived(message) if message else self.event(action, call_id, attempt_id, number)
        self.do(event)

    def new_calls(self, count: int) -> range:
        self.next_call += count
        return range(self.next_call - count, self.next_call)

    def plan_ahead(self) -> tuple[int, ...]:
        self.attempt_id += 3
        return (self.attempt_id - 1,)

    def message(self, action: str, call_id: int, attempt_id: int, number: int) -> Any:
        """The master's message for an action; None if the action is not the master's."""
        self.attempt_id += 3 * (action in ("plan", "sync_plan"))
        late = self.attempt_id + 1  # Each plan leaves one id for a late plan, and one for a plan ahead.
        return {
            "plan": lambda: plan_of(call_id, self.attempt_id, "abc"),
            "late": lambda: plan_of(self.late.setdefault(late, call_id), late, "abc"),
            "sync_plan": lambda: sync_plan(call_id, 1, "b", ("w", "2"), attempt_id=self.attempt_id),
            "commit": lambda: Decision(call_id, 0, 3, attempt_id=attempt_id, ahead=self.plan_ahead()),
            "abort": lambda: Decision(call_id, 8, 3, "lost b", attempt_id=attempt_id),
            "answer": lambda: Decision(call_id, 0, 1),
            "refuse": lambda: Decision(call_id, 4, reason="no"),
            "members": lambda: member_list(number, "abc"),
            "alone": lambda: member_list(number, "a"),
            "neighbours": lambda: Neighbours(tuple(neighbour(name) for name in "bcd"[number:])),
            "welcome": lambda: Welcome(RUN_ID, number),
            "unregistered": lambda: Refused(Refusal.UNREGISTERED, "who"),
            "malformed": lambda: Refused(Refusal.MALFORMED, "what"),
            "unknown": lambda: Refused(Refusal.UNKNOWN_SESSION, "who"),
            "kick": lambda: Kick(4, "why"),
        }.get(action, lambda: None)()

    def event(self, action: str, call_id: int, attempt_id: int | None, number: int) -> events.PeerEvent:
        """The event of the user, the data plane or the network."""
        attempt = attempt_id or self.attempt_id
        if action in ("reduce", "batch"):
            new = self.new_calls(1 + 2 * (action == "batch"))
            return events.Called(tuple(Vote(c, spec(number + c - new[0])) for c in new))
        if action in ("update", "optimize", "pending"):
            kind = {"update": UPDATE, "optimize": OPTIMIZE, "pending": PENDING}[action]
            return events.Called((Vote(self.new_calls(1)[0], TopologySpec(kind)),))
        if action == "sync":
            return events.Called((Vote(self.new_calls(1)[0], sync_spec(number)),))
        if action == "patience":
            self.peer.now_ns += limits.WITHDRAW_TIMEOUT_NS
        if action == "away":
            self.do(events.ConnectionDown())
            self.peer.now_ns += 10**15
        made: dict[str, events.PeerEvent] = {
            "done": events.ReduceDone(attempt, 7, has_told=number > 1),
            "failed": events.ReduceDone(attempt, 0, "reset", pid("b")),
            "fetched": events.FetchDone(attempt, "" if number else "stalled"),
            "withdraw": events.CallWithdrawn(call_id, number > 1),
            "down": events.ConnectionDown(),
            "up": events.ConnectionUp(),
            "failed_try": events.ConnectionFailed("refused"),
            "link": events.LinkUp(pid("bcd"[number % 3])),
            "unlink": events.LinkFailed(pid("bcd"[number % 3]), "reset"),
            "stranger": events.LinkUp(pid("x")),
            "close": events.CloseCalled(),
            "version": events.OtherVersionReceived(9),
            "nonsense": events.NonsenseReceived("what"),
        }
        return made.get(action, events.Tick())


@settings(max_examples=150)
@given(st.lists(st.tuples(ACTIONS, NUMBERS), min_size=10, max_size=40), LAST_ACTIONS)
def test_buffers_and_calls(steps: list[tuple[str, int]], last: str) -> None:
    """S4, L1: however the peer ends, every call has been answered once, after its buffer was given back."""
    watch = Watch()
    for action, number in steps:
        watch.step(action, number)
        assert watch.peer.open == {c for c, call in watch.peer.machine.calls.items() if not call.is_released}
        assert set(watch.running.values()) <= watch.peer.open
    watch.step(last, 0)
    assert watch.peer.machine.state is State.CLOSED
    assert not watch.peer.open
    assert not watch.running
    assert watch.peer.machine.deadline_ns() is None


@settings(max_examples=80)
@given(st.lists(st.tuples(ACTIONS, NUMBERS), min_size=5, max_size=30))
@example([("reduce", 0), ("reduce", 0), ("late", 0), ("done", 2), ("withdraw", 0)])
def test_a_new_connection_is_told_everything_once(steps: list[tuple[str, int]]) -> None:
    """L3: the calls without an answer, each with its present message, in order.

    A peer that has told its digest to the others is bound to it: it does not withdraw.
    """
    watch = Watch()
    for action, number in steps:
        watch.step(action, number)
    watch.do(events.ConnectionDown())
    said = [effect.message for effect in watch.do(events.ConnectionUp()) if isinstance(effect, Send)]
    standing = said[2:]
    withdrawn = [m for m in standing if isinstance(m, Withdraw)]
    votes = [m for m in standing if isinstance(m, Votes | Report)]
    assert len(votes) + len(withdrawn) == len(standing)
    calls = watch.peer.machine.calls
    told = {call_id for call_id, call in calls.items() if call.phase is not CallPhase.HELD}
    assert {m.votes[0].call_id if isinstance(m, Votes) else m.call_id for m in votes} == told
    assert standing == [message for call in calls.values() for message in call.standing(min(calls))]
    given_up = [call.call_id for call in calls.values() if call.withdrawn is not None and not call.has_told]
    assert [m.call_id for m in withdrawn] == given_up
    assert CONNECT not in calls
