"""The machine of the master: well-formed messages of any kind, in any order, on any connection, at any time.

An input is a list of decisions (choices.py): how the master begins, and then the events. Besides the messages of
strangers, peers sometimes send what honest peers would send, so that there are members, attempts and syncs to disturb.
Reports lie about anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.harness import FIRST_ATTEMPT, RUN_ID, entry, offer, said_together, spec, token, topology_vote

from fuzz.choices import Choices
from zpccl import limits
from zpccl.protocol import events
from zpccl.protocol import messages as m
from zpccl.protocol.effects import Broadcast
from zpccl.protocol.identity import SALT_BYTES, is_peer_id_of, make_peer_id
from zpccl.protocol.master import MasterMachine, MasterOptions

NAMES = "abcde"
KEYS = ("", "key one", "key two")
CONNECTIONS = ("a1", "b1", "c1", "d1", "e1", "a2", "b2")
CALLS = (0, 1, 2, 3, 4, 2**64 - 1)
ATTEMPTS = (0, FIRST_ATTEMPT, FIRST_ATTEMPT + 1, FIRST_ATTEMPT + 2, 1 << 32, (1 << 32) + 1, 2**64 - 1)
ENTRIES = [
    (entry("w", "x"),),
    (entry("w", "y"),),
    (entry("v", "x"), entry("w", "x")),
    (entry("w", "x"), entry("a", "x")),
]
TERMS = (0, 0, 1, 2, 5000, limits.TERM_MAX, 2**64 - 1)
TIMES_NS = (0, 0, 0, 1, limits.DISCONNECT_GRACE_NS, limits.RECOVERY_GRACE_NS, 11 * limits.SECOND)
TOGETHER = ("begin", "finish", "offer", "fetched", "update", "hello", "link")
EVENTS_MAX = 200


@dataclass
class World:
    """A master, and observations of it."""

    machine: MasterMachine
    keys: tuple[str, ...]
    now_ns: int = 0
    term: int = 1
    outcomes: dict[int, bool] = field(default_factory=dict)
    epochs: dict[int, Any] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    """The terms in which the master has asked for reports: an answer must promise one of them."""

    def peer_ids(self) -> list[bytes]:
        """The ids of all peers that may take part."""
        salts = [name.encode() * SALT_BYTES for name in NAMES]
        return [make_peer_id(key, salt) if key else salt.ljust(16, b".") for key in self.keys for salt in salts]

    def leaders(self) -> list[bytes]:
        """The ids that the master has drawn for its leaderships, or wants to. Private: no message has all of them."""
        machine = self.machine
        wanted = [machine.candidate.promise.leader] if machine.candidate is not None else []
        return [machine._leader.promise.leader, *wanted]

    def handle(self, event: events.MasterEvent) -> None:
        """Checks S1, S3 and the machine's invariants. A master that has stepped down knows only what reports tell."""
        if self.term != self.machine.generation:
            self.term, self.outcomes = self.machine.generation, {}
        for effect in self.machine.handle(event, self.now_ns):
            if isinstance(effect, Broadcast):
                message = effect.message
                assert m.decode_master_message(m.encode(message)) == message
                if isinstance(message, m.Refused) and message.refusal is m.Refusal.REPORT:
                    self.asked = [*self.asked[-2:], message.term]
                if isinstance(message, m.Decision):
                    known = self.outcomes.setdefault(message.attempt_id, message.committed)
                    assert known == message.committed, "S1: two outcomes of one attempt"
        self.machine.validate()
        members = self.machine.registry.member_list()
        said = (members.epoch, members.members)
        assert self.epochs.setdefault(members.epoch, said) == said, "S3: two member lists of one epoch"


def one_input(data: bytes) -> None:
    """S1, S3, B1: it never raises, keeps its invariants and its bounds, and sends only valid messages."""
    choices = Choices(data)
    keys = choices.one_of((("",), ("",), KEYS[1:]))
    seed = b"" if keys == ("",) else b"seed"
    world = World(MasterMachine(RUN_ID, choices.number(3), options=MasterOptions(link_seed=seed)), keys)
    if choices.number(2):
        world.machine.recover(world.now_ns)
    for _ in range(EVENTS_MAX):
        if not choices:
            break
        world.now_ns += choices.one_of(TIMES_NS)
        for event in _events(world, choices):
            world.handle(event)
    for peer in world.machine.registry.peers.values():
        assert len(peer.answers) <= limits.ANSWERS_KEPT_MAX
        assert len(peer.open_calls) <= limits.CALLS_IN_FLIGHT_MAX


def _events(world: World, choices: Choices) -> list[events.MasterEvent]:
    kind = choices.number(8)
    connection = choices.one_of(CONNECTIONS)
    if kind == 0:
        return [events.ConnectionClosed(connection)]
    if kind == 1:
        return [events.Tick()]
    if kind == 2:
        return [events.MalformedReceived(connection, "nonsense")]
    if kind == 3 and not choices.number(4):
        return [events.KeysRevoked({"key two": "two"})]
    if kind == 4:
        together = said_together(world.machine, choices.one_of(TOGETHER), choices.number(4))
        return [_with_key(world, event) for event in together if _is_well_formed(event)]
    message = MESSAGES[choices.number(len(MESSAGES))](world, choices)
    host = choices.one_of(("", "10.0.0.1", "::1"))
    event = events.PeerMessageReceived(connection, message, host, choices.one_of(world.keys))
    return [event] if _is_well_formed(event) else []


def _is_well_formed(event: events.MasterEvent) -> bool:
    """False for an event that could not come over the wire."""
    if not isinstance(event, events.PeerMessageReceived):
        return True
    try:
        return m.decode_peer_message(m.encode(event.message)) == event.message
    except (OverflowError, m.Malformed):
        return False


def _with_key(world: World, event: events.MasterEvent) -> events.MasterEvent:
    """Adds the key of the connection on which an honest peer would send the message."""
    if not isinstance(event, events.PeerMessageReceived) or world.keys == ("",):
        return event
    peer = world.machine.registry.by_connection.get(event.connection)
    peer_id = (
        event.message.peer_id if isinstance(event.message, m.Hello) else peer.peer_id if peer is not None else None
    )
    key = next((key for key in world.keys if peer_id is not None and is_peer_id_of(peer_id, key)), "")
    return events.PeerMessageReceived(event.connection, event.message, "", key)


# --- Messages ---------------------------------------------------------------------------------------------------------


def _hello(world: World, choices: Choices) -> m.Hello:
    return m.Hello(
        choices.one_of(world.peer_ids()),
        token(choices.one_of("ab")),
        bool(choices.number(2)),
        choices.number(2),
        choices.one_of(NAMES),
        choices.one_of(((), ("h:1",), ("h:1", "[::1]:2"))),
        choices.one_of((0, 0, 1, 2, 2**63)),
        choices.one_of((RUN_ID, world.machine.run_id, bytes(16))),
        choices.one_of(TERMS),
        choices.one_of((*TERMS, *world.asked)),
        choices.one_of((bytes(16), RUN_ID, *world.leaders())),
        choices.one_of(((), ("m:1",), ("m:1", "n:2"))),
        choices.one_of((0, 0, 1)),
        choices.one_of((bytes(16), RUN_ID, world.machine.run_id)),
        not choices.number(4),
        is_returning=not choices.number(4),
    )


def _report(world: World, choices: Choices) -> m.RunReport:
    ids = world.peer_ids()
    members = tuple(m.Member(peer_id, choices.number(2), "m") for peer_id in sorted(set(choices.some_of(ids, 4))))
    last = _outcome(world, choices) if choices.number(2) else None
    return m.RunReport(
        _hello(world, choices),
        choices.one_of(CALLS),
        choices.one_of((0, 1, 2, 1 << 32, limits.EPOCH_MAX, 2**64 - 1)),
        members,
        choices.one_of((0, 1, 2, 3, limits.ROUND_MAX, 2**64 - 1)),
        choices.one_of((0, 1, 2, -1, 2**64 - 1)),
        last,
        tuple(_outcome(world, choices) for _ in range(choices.number(3))),
        tuple(_running(world, choices) for _ in range(choices.number(4))),
        choices.some_of(ids, 3),
    )


def _running(world: World, choices: Choices) -> m.Running:
    order, calls = choices.some_of(world.peer_ids(), 4), choices.some_of(CALLS, 4)
    attempt_id = choices.one_of(ATTEMPTS)
    if choices.number(2):
        how = m.Reducing(order, 1 + choices.number(65536))
        return m.Running(m.Plan(attempt_id, calls, how), spec(choices.number(2)) if choices.number(8) else None)
    fetching = m.Fetching(order, choices.number(4), choices.some_of(world.peer_ids(), 2))
    return m.Running(m.Plan(attempt_id, calls, fetching), is_open=bool(choices.number(2)))


def _outcome(world: World, choices: Choices) -> m.Decision:
    ids = choices.some_of(world.peer_ids())
    attempt_id, committed = choices.one_of(ATTEMPTS), bool(choices.number(2))
    return m.Decision(0, 0 if committed else 8, 2, attempt_id=attempt_id, order=ids, calls=choices.some_of(CALLS))


def _begin(_: World, choices: Choices) -> m.Votes:
    count = 1 + choices.number(3)
    calls = [m.Vote(choices.one_of(CALLS), spec(choices.number(2))) for _ in range(count)]
    return m.Votes(choices.one_of(CALLS), tuple(calls))


MESSAGES: list[Callable[[World, Choices], m.PeerMessage]] = [
    _hello,
    _hello,
    _report,
    _report,
    _begin,
    lambda world, choices: m.Linked(choices.some_of(world.peer_ids(), 5)),
    lambda _, choices: topology_vote(
        choices.one_of(CALLS), choices.one_of(CALLS), choices.one_of(tuple(m.TopologyKind)), choices.number(4)
    ),
    lambda _, choices: offer(
        choices.one_of(CALLS),
        choices.number(4),
        *choices.one_of(ENTRIES),
        strategy=choices.number(3),
        oldest=choices.one_of(CALLS),
    ),
    lambda world, choices: m.Report(
        choices.one_of(CALLS),
        choices.one_of(ATTEMPTS),
        bool(choices.number(2)),
        choices.one_of((None, *world.peer_ids())),
        "",
        choices.number(2),
        0,
        tuple(m.Dropped(peer_id, "") for peer_id in choices.some_of(world.peer_ids(), 2)),
    ),
    lambda _, choices: m.Withdraw(choices.one_of(CALLS)),
    lambda world, choices: m.Acknowledgement(choices.one_of((0, 1, world.machine.registry.epoch))),
    lambda _, choices: m.Leave(),
    lambda _, choices: m.Ready(),
    lambda _, choices: m.MeasurementsRequest(),
]


def seeds() -> list[bytes]:
    """A run that begins, and one that is taken over, both with some calls."""
    register = [0, 5, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    work = [byte for what in range(len(TOGETHER)) for byte in (0, 4, 0, what, 1)]
    return [
        bytes([0, 0, 0, *register, *work, *work]),
        bytes([0, 0, 1, *register, *work, *register]),
        bytes([2, 1, 0, *register, *work, 0, 3, 0, 0]),
        bytes(range(256)),
    ]
