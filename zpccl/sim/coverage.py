"""Coverage of simulated runs: events handled by state of the machine, and faults by what ran when they struck.

Rows and columns are derived from the code: kinds of events and messages, states of machines, phases of calls, fields of
Faults. A new one appears by itself, as never reached until a run reaches it.

A machine with calls in several phases counts in each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, get_args

from zpccl.protocol import events
from zpccl.protocol.calls import Call, CallPhase
from zpccl.protocol.master import MasterMachine
from zpccl.protocol.membership import have_reported
from zpccl.protocol.messages import (
    CollectiveSpec,
    MasterMessage,
    PeerMessage,
    Refusal,
    Refused,
    SyncSpec,
    TopologyKind,
    TopologySpec,
)
from zpccl.protocol.peer import PeerMachine, State
from zpccl.protocol.session import Session, SessionEvent, SocketPhase
from zpccl.sim.faults import KINDS

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import SimulatedPeer

PEER, SESSION, MASTER, FAULT = "peer", "session", "master", "fault"
TITLES = {
    PEER: "Events of peers, by the state of the peer and the phases of its calls",
    SESSION: "Events of control connections, by the phase of the session",
    MASTER: "Events of masters, by the state of the master or the kind of sender",
    FAULT: "Faults, by what ran when they struck",
}
IDLE = "idle"
GONE = "master away"
RECOVERING = "reports due"
LEADING = "master leading"
SENDERS = ("stranger", "pending peer", "member")


# --- Names of rows and columns ----------------------------------------------------------------------------------------


def name_of(event: object) -> str:
    """The kind of an event; for a received message its kind, and for Refused its reason too."""
    message = getattr(event, "message", None)
    if message is None:
        return type(event).__name__
    if isinstance(message, Refused):
        return f"Refused {message.refusal.name.lower()}"
    return type(message).__name__


def names_of_events(union: Any, received: type, messages: Any) -> list[str]:
    """All names that name_of() can return for the events of one machine."""
    names = [kind.__name__ for kind in get_args(union) if kind is not received]
    for message in get_args(messages):
        names += [f"Refused {r.name.lower()}" for r in Refusal] if message is Refused else [message.__name__]
    return sorted(names)


_NAMES = {CollectiveSpec: "collective", SyncSpec: "sync"}


def name_of_call(call: Call) -> str:
    """The kind of a call, and its phase."""
    if isinstance(call.spec, TopologySpec):
        return f"{call.spec.kind.name.lower()} round"
    return f"{_NAMES[type(call.spec)]} {call.phase.value}"


def names_of_calls() -> list[str]:
    """All names that name_of_call() can return."""
    rounds = [f"{kind.name.lower()} round" for kind in TopologyKind]
    return [f"{name} {phase.value}" for name in _NAMES.values() for phase in CallPhase] + rounds


def states_of_peer(machine: PeerMachine) -> Iterable[str]:
    """The state of a peer; for a member, the names of its calls."""
    if machine.state is not State.MEMBER:
        return (machine.state.value,)
    return {name_of_call(call): None for call in machine.calls.values()} or (IDLE,)


def names_of_peer_states() -> list[str]:
    """All names that states_of_peer() can return."""
    before = [state.value for state in State if state not in (State.MEMBER, State.CLOSED)]
    return [*before, IDLE, *names_of_calls(), State.CLOSED.value]


MASTER_CONDITIONS = tuple(
    name for name, value in vars(MasterMachine).items() if name.startswith("is_") and isinstance(value, property)
)


def conditions_of_master(machine: MasterMachine) -> list[str]:
    """The special conditions of a master; empty if it leads normally."""
    found = [f"master {name[3:].replace('_', ' ')}" for name in MASTER_CONDITIONS if getattr(machine, name)]
    if not found and not have_reported(machine.registry.order):
        found.append(RECOVERING)
    return found


def names_of_conditions() -> list[str]:
    """All names that conditions_of_master() can return."""
    return [f"master {name[3:].replace('_', ' ')}" for name in MASTER_CONDITIONS] + [RECOVERING]


def states_of_master(machine: MasterMachine, event: events.MasterEvent) -> Iterable[str]:
    """The conditions of a master; if it leads normally, the kind of sender."""
    found = conditions_of_master(machine)
    if found:
        return found
    connection = getattr(event, "connection", None)
    if connection is None:
        return (LEADING,)
    peer = machine.registry.by_connection.get(connection)
    if peer is None:
        return (SENDERS[0],)
    return (SENDERS[2 if peer.is_member else 1],)


# --- Tables -----------------------------------------------------------------------------------------------------------


class Coverage:
    """Coverage counts over any number of runs."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[tuple[str, str]]] = {name: Counter() for name in TITLES}

    def on_peer_event(self, machine: PeerMachine, event: events.PeerEvent) -> None:
        """Counts an event that a peer is about to handle."""
        name = name_of(event)
        for state in states_of_peer(machine):
            self.counts[PEER][name, state] += 1

    def on_session_event(self, session: Session, event: SessionEvent) -> None:
        """Counts an event that a session is about to handle."""
        self.counts[SESSION][type(event).__name__, session.phase.value] += 1

    def on_master_event(self, machine: MasterMachine, event: events.MasterEvent) -> None:
        """Counts an event that a master is about to handle."""
        name = name_of(event)
        for state in states_of_master(machine, event):
            self.counts[MASTER][name, state] += 1

    def on_strike(self, cluster: Cluster, kind: str, nodes: Iterable[SimulatedPeer]) -> None:
        """Counts a fault that strikes `nodes`; if empty, something that all need."""
        for node in tuple(nodes) or cluster.live_nodes():
            for state in states_of_peer(node.machine):
                self.counts[FAULT][kind, state] += 1
        if not cluster.masters:
            return  # No master has started yet.
        master = cluster.master
        for state in (conditions_of_master(master.machine) or [LEADING]) if master.is_alive else [GONE]:
            self.counts[FAULT][kind, state] += 1

    def add(self, other: Coverage) -> None:
        """Adds the counts of other runs."""
        for name, counter in other.counts.items():
            self.counts[name].update(counter)

    def axes(self, table: str) -> tuple[list[str], list[str]]:
        """All rows and columns of a table, reached or not."""
        if table == PEER:
            rows = names_of_events(events.PeerEvent, events.MasterMessageReceived, MasterMessage)
            return rows, names_of_peer_states()
        if table == SESSION:
            return sorted(kind.__name__ for kind in get_args(SessionEvent)), [phase.value for phase in SocketPhase]
        if table == MASTER:
            rows = names_of_events(events.MasterEvent, events.PeerMessageReceived, PeerMessage)
            return rows, [*names_of_conditions(), *SENDERS, LEADING]
        return list(KINDS), [*names_of_peer_states(), GONE, *names_of_conditions(), LEADING]

    def as_json(self) -> dict[str, dict[str, dict[str, int]]]:
        """All counts, by table, row and column."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for table in TITLES:
            rows, columns = self.axes(table)
            found[table] = {row: {column: self.counts[table][row, column] for column in columns} for row in rows}
        return found

    def lines(self) -> Iterator[str]:
        """All tables as text."""
        for table, title in TITLES.items():
            rows, columns = self.axes(table)
            counts = self.counts[table]
            reached = sum(counts[row, column] > 0 for row in rows for column in columns)
            yield ""
            yield f"{title}: {reached} of {len(rows) * len(columns)} cells reached, '.' is never"
            yield from draw(rows, columns, counts)


def draw(rows: list[str], columns: list[str], counts: Counter[tuple[str, str]]) -> Iterator[str]:
    """One table as text. The words of a column's name are stacked."""
    words = [column.split() for column in columns]
    height = max(len(parts) for parts in words)
    widths = [max(5, *(len(word) for word in parts)) for parts in words]
    margin = max(len(row) for row in rows)
    for level in range(height):
        cells = ([""] * (height - len(parts)) + parts for parts in words)
        yield " " * margin + "".join(f" {cell[level]:>{width}}" for cell, width in zip(cells, widths, strict=True))
    for row in rows:
        cells_of_row = (shorten(counts[row, column]) for column in columns)
        texts = (f" {cell:>{width}}" for cell, width in zip(cells_of_row, widths, strict=True))
        yield f"{row:<{margin}}" + "".join(texts)


def shorten(count: int) -> str:
    """A count in at most five characters."""
    if count == 0:
        return "."
    for unit in ("", "k", "M", "G"):
        if count < 10_000 or unit == "G":
            return f"{count}{unit}"
        count //= 1000
    raise AssertionError("the last unit takes all")
