"""The control connection: every cell of the table of session.py, and its footnotes."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.harness import RUN_ID, pid
from zpccl import limits
from zpccl.protocol import events
from zpccl.protocol.effects import AskMechanism, OpenSocket, UseMaster
from zpccl.protocol.messages import MAGIC, Refusal, Refused, Welcome, encode
from zpccl.protocol.session import Session, SocketPhase

MS, SECOND = limits.MS, limits.SECOND
AT_ONCE_NS = 10 * MS
LATE_NS = limits.CONNECT_TIMEOUT_NS
WELCOME = Welcome(RUN_ID, 1)
OTHER_VERSION = MAGIC + bytes([limits.PROTOCOL_VERSION + 1])
UP_EVENTS = [events.DialStarted(), events.TcpConnected(), events.HandshakeDone()]
PATHS: dict[SocketPhase, list[Any]] = {
    SocketPhase.DIALLING: [],
    SocketPhase.HANDSHAKE: UP_EVENTS[:2],
    SocketPhase.ASKING: [*UP_EVENTS[:2], events.HandshakeFailed()],
    SocketPhase.UP: UP_EVENTS,
    SocketPhase.PAUSED: [events.DialFailed()],
}


class Bench:
    """A session that is brought to a phase, with a clock that the test advances."""

    def __init__(self, phase: SocketPhase = SocketPhase.DIALLING, *, has_keys: bool = False, name: str = "a") -> None:
        self.session = Session(pid(name), has_keys=has_keys)
        self.now_ns = 7 * SECOND
        for event in PATHS[phase]:
            self.handle(event)
        assert self.session.phase is phase

    def handle(self, event: Any, after_ns: int = 0) -> list[Any]:
        self.now_ns += after_ns
        done = self.session.handle(event, self.now_ns)
        self.session.validate()
        return done

    def one(self, event: Any, after_ns: int = 0) -> Any:
        """The only effect of an event."""
        (effect,) = self.handle(event, after_ns)
        return effect

    def until_due(self) -> int:
        due_ns = self.session.deadline_ns()
        assert due_ns is not None
        return due_ns - self.now_ns

    def due(self) -> list[Any]:
        """The effects of a Tick at the deadline. A moment before it, nothing happens."""
        assert self.handle(events.Tick(), self.until_due() - 1) == []
        return self.handle(events.Tick(), 1)


UP, DOWN, FAILED = events.ConnectionUp, events.ConnectionDown, events.ConnectionFailed
MESSAGE = events.DataReceived(encode(WELCOME))
CELLS: list[tuple[Any, dict[SocketPhase, tuple[SocketPhase, type]]]] = [
    (events.DialStarted(), {}),
    (events.TcpConnected(), {SocketPhase.DIALLING: (SocketPhase.HANDSHAKE, type(None))}),
    (events.HandshakeDone(), {SocketPhase.HANDSHAKE: (SocketPhase.UP, UP)}),
    (events.DialFailed("no route"), {SocketPhase.DIALLING: (SocketPhase.PAUSED, FAILED)}),
    (events.HandshakeFailed(), {SocketPhase.HANDSHAKE: (SocketPhase.ASKING, AskMechanism)}),
    (events.MechanismTold(0, "", "no answer"), {SocketPhase.ASKING: (SocketPhase.PAUSED, FAILED)}),
    (
        events.SocketBroke(),
        {SocketPhase.HANDSHAKE: (SocketPhase.PAUSED, FAILED), SocketPhase.UP: (SocketPhase.PAUSED, DOWN)},
    ),
    (MESSAGE, {phase: (phase, events.MasterMessageReceived) for phase in SocketPhase}),
    (UseMaster(1), dict.fromkeys(SocketPhase, (SocketPhase.DIALLING, OpenSocket))),
    (events.Tick(), {}),
]


@pytest.mark.parametrize("phase", SocketPhase)
@pytest.mark.parametrize(("event", "cells"), CELLS, ids=[type(event).__name__ for event, _ in CELLS])
def test_every_cell(event: Any, cells: dict[SocketPhase, tuple[SocketPhase, type]], phase: SocketPhase) -> None:
    """An event that is not in `cells` changes neither the phase nor the deadline."""
    bench = Bench(phase)
    due_ns = bench.session.deadline_ns()
    effects = bench.handle(event)
    then, kind = cells.get(phase, (phase, type(None)))
    assert bench.session.phase is then
    assert [type(effect) for effect in effects] == ([] if kind is type(None) else [kind])
    if then is phase and not isinstance(event, UseMaster):
        assert bench.session.deadline_ns() == due_ns


def test_ticks_that_are_due() -> None:
    """L1: a server that keeps sending without a greeting never ends the connection itself."""
    bench = Bench(SocketPhase.HANDSHAKE)
    assert bench.until_due() == limits.REGISTRATION_TIMEOUT_NS
    assert bench.due() == [FAILED("the server there does not speak ZeroMQ")]
    assert bench.due() == [OpenSocket(0)]
    assert bench.session.phase is SocketPhase.DIALLING
    assert bench.session.deadline_ns() is None, "libzmq ends it"


def test_the_time_of_a_handshake_is_that_of_its_own_try() -> None:
    """L2: a master gives far peers more time to come back. Name look-ups and pauses say nothing about the path."""
    bench = Bench(SocketPhase.PAUSED)
    bench.due()
    bench.handle(events.DialStarted(), 3 * SECOND)
    bench.handle(events.TcpConnected(), 100 * MS)
    assert bench.one(events.HandshakeDone(), 300 * MS) == UP(400 * MS)
    bench.handle(UseMaster(1))
    bench.handle(events.TcpConnected(), SECOND)
    assert bench.one(events.HandshakeDone()) == UP(0), "not known"


# --- Handshakes that fail -------------------------------------------------------------------------------------------


def test_a_key_that_is_not_allowed() -> None:
    """S7: the refusal itself says so; the peer asks nothing."""
    bench = Bench(SocketPhase.HANDSHAKE, has_keys=True)
    refused = bench.one(events.HandshakeFailed(is_key_refused=True))
    assert isinstance(refused, events.AuthenticationRefused) and "allow list" in refused.reason
    assert bench.session.phase is SocketPhase.PAUSED


@pytest.mark.parametrize(
    ("has_keys", "mechanism", "text"),
    [
        (False, "CURVE", "the run has a secret and this peer has none"),
        (True, "CURVE", "its secret or key differs"),
        (True, "NULL", "the master there has none"),
    ],
)
def test_another_idea_of_secrets(has_keys: bool, mechanism: str, text: str) -> None:
    """S7, L1: a peer with another secret, or with none, gets an error that says so."""
    bench = Bench(SocketPhase.ASKING, has_keys=has_keys)
    told = events.MechanismTold(0, mechanism, "")
    if (has_keys, mechanism) == (True, "CURVE"):
        assert bench.one(told) == OpenSocket(0)
        for event in PATHS[SocketPhase.ASKING]:
            bench.handle(event)
    refused = bench.one(told)
    assert isinstance(refused, events.AuthenticationRefused) and text in refused.reason


@pytest.mark.parametrize("between", [events.HandshakeDone(), events.SocketBroke(), UseMaster(0)], ids=repr)
def test_a_master_that_ended_within_the_handshake_is_tried_again(between: Any) -> None:
    """L3: a master that is back at once looks like one with another secret. Twice in a row it does not."""
    bench, told = Bench(SocketPhase.ASKING, has_keys=True), events.MechanismTold(0, "CURVE", "")
    assert bench.one(told) == OpenSocket(0)
    for event in [*UP_EVENTS[:2], between, UseMaster(0), *PATHS[SocketPhase.ASKING]]:
        bench.handle(event)
    assert bench.one(told) == OpenSocket(0)


@pytest.mark.parametrize(("mechanism", "reason", "text"), [("NULL", "", "not speak ZeroMQ"), ("", "gone", "gone")])
def test_what_is_no_master_fails_the_try(mechanism: str, reason: str, text: str) -> None:
    failed = Bench(SocketPhase.ASKING).one(events.MechanismTold(0, mechanism, reason))
    assert isinstance(failed, FAILED) and text in failed.reason


def test_who_fails_late_is_not_asked_and_the_try_counts() -> None:
    """L1: libzmq has waited in vain; nothing else would end connect()."""
    bench = Bench(SocketPhase.HANDSHAKE)
    assert isinstance(bench.one(events.HandshakeFailed(), LATE_NS), FAILED)
    assert bench.due() == [OpenSocket(0)]


def test_only_newcomers_ask() -> None:
    """A registered peer knows the secret. A run that waits for its master must not ask something twice a second."""
    bench = Bench(SocketPhase.UP)
    bench.handle(MESSAGE)
    bench.handle(events.SocketBroke())
    bench.due()
    bench.handle(events.TcpConnected())
    assert isinstance(bench.one(events.HandshakeFailed(), AT_ONCE_NS), FAILED)


def test_an_answer_of_another_master_is_too_late() -> None:
    bench = Bench(SocketPhase.ASKING)
    bench.handle(UseMaster(1))
    for event in (*UP_EVENTS[:2], events.HandshakeFailed()):
        bench.handle(event)
    assert bench.handle(events.MechanismTold(0, "CURVE", "")) == []
    assert isinstance(bench.one(events.MechanismTold(1, "CURVE", "")), events.AuthenticationRefused)


# --- Trying again ---------------------------------------------------------------------------------------------------


def pauses(bench: Bench, count: int) -> list[int]:
    """The pauses of this many failing tries, one after the other."""
    found = []
    for _ in range(count):
        bench.handle(events.DialFailed())
        found.append(bench.until_due())
        bench.due()
    return found


def test_pauses_grow_up_to_a_bound() -> None:
    least, most = limits.RECONNECT_INTERVAL_NS, limits.RECONNECT_INTERVAL_MAX_NS
    for place, pause_ns in enumerate(pauses(Bench(), 6)):
        shortest = min(least << place, most)
        assert shortest <= pause_ns < shortest + least


@pytest.mark.parametrize("phase", [SocketPhase.UP, SocketPhase.DIALLING])
def test_pauses_begin_anew(phase: SocketPhase) -> None:
    """After a connection, and at another master. The first pause is so short that the master waits for this peer."""
    bench = Bench()
    pauses(bench, 6)
    for event in PATHS[phase] or [UseMaster(1)]:
        bench.handle(event)
    bench.handle(events.SocketBroke() if phase is SocketPhase.UP else events.DialFailed())
    assert bench.until_due() < 2 * limits.RECONNECT_INTERVAL_NS < limits.DISCONNECT_GRACE_NS


def test_a_broken_connection_is_no_failed_try() -> None:
    """L2: here, too, libzmq reports that it will try again. The peer stays with its master."""
    bench = Bench(SocketPhase.UP)
    assert bench.one(events.SocketBroke()) == DOWN()
    assert bench.handle(events.DialFailed()) == []
    assert bench.due() == [OpenSocket(0)]


def test_peers_do_not_come_back_together() -> None:
    assert len({tuple(pauses(Bench(name=name), 3)) for name in "abcdefgh"}) == 8


# --- Messages -------------------------------------------------------------------------------------------------------


def test_messages_of_a_master() -> None:
    refused = Refused(Refusal.FULL, "full")
    assert Bench(SocketPhase.UP).one(events.DataReceived(encode(refused))) == events.MasterMessageReceived(refused)


@pytest.mark.parametrize(
    ("data", "kind"), [(OTHER_VERSION, events.OtherVersionReceived), (b"GET /", events.NonsenseReceived)]
)
def test_what_is_no_message_counts_once_a_connection(data: bytes, kind: type) -> None:
    bench = Bench(SocketPhase.UP)
    assert isinstance(bench.one(events.DataReceived(data)), kind)
    assert bench.handle(events.DataReceived(data)) == []
    assert isinstance(bench.one(MESSAGE), events.MasterMessageReceived)
    bench.handle(UseMaster(1))
    for event in UP_EVENTS:
        bench.handle(event)
    assert isinstance(bench.one(events.DataReceived(data)), kind)
