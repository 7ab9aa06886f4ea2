"""Snapshots of a master for metrics.

The thread of the master's loop takes them; they are immutable, so that any thread may read them. No other thread reads
the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from zpccl.protocol.counts import AbortReason, LossReason
from zpccl.protocol.master import MasterMachine
from zpccl.protocol.messages import Measurements
from zpccl.protocol.operation import COLLECTIVE, SYNC


@dataclass(slots=True)
class Traffic:
    """Counters of a master's loop. All only grow, except `connections`, the number of open ones."""

    messages_received: int = 0
    received_bytes: int = 0
    messages_sent: int = 0
    sent_bytes: int = 0
    refused_connections: int = 0
    connections: int = 0
    busy_ns: int = 0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A peer that others wait for."""

    peer: str
    operation: str
    """The function and which of its calls, for people."""
    waiting_ns: int
    """How long others had waited when the snapshot was taken."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A master at one moment."""

    taken_ns: int
    """Time of the snapshot, on the clock of `time.monotonic_ns`."""
    epoch: int
    term: int
    is_recovering: bool
    """It does not know yet which run it leads."""
    members: Mapping[int, int]
    """Number of members, by peer group."""
    pending: Mapping[int, int]
    collectives_voting: int
    collectives_running: int
    syncs_running: int
    plans: int
    commits: int
    aborts: Mapping[AbortReason, int]
    syncs_committed: int
    syncs_aborted: int
    sources_dropped: int
    losses: Mapping[LossReason, int]
    takeovers: int
    malformed_messages: int
    stragglers: tuple[Straggler, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)
    measurements: Measurements = field(default_factory=lambda: Measurements(()))
    """Measurements of the network, at most MEASUREMENTS_KEPT old."""


def take_snapshot(machine: MasterMachine, traffic: Traffic, now_ns: int) -> Snapshot:
    """Takes a snapshot. Only for the thread that owns the machine."""
    counts, registry = machine.counts, machine.registry
    return Snapshot(
        taken_ns=now_ns,
        epoch=registry.epoch,
        term=machine.term,
        is_recovering=machine.is_recovering,
        members=Counter(peer.group for peer in registry.order),
        pending=Counter(peer.group for peer in registry.pending()),
        collectives_voting=len(machine.operations.of(COLLECTIVE)),
        collectives_running=len(machine.operations.running_of(COLLECTIVE)),
        syncs_running=len(machine.operations.running_of(SYNC)),
        plans=counts.plans,
        commits=counts.commits,
        aborts=Counter(counts.aborts),
        syncs_committed=counts.syncs_committed,
        syncs_aborted=counts.syncs_aborted,
        sources_dropped=counts.sources_dropped,
        losses=Counter(counts.losses),
        takeovers=counts.takeovers,
        malformed_messages=machine.malformed_count,
        stragglers=tuple(Straggler(*found) for found in machine.stragglers(now_ns)),
        measurements=machine.measurements(now_ns),
        traffic=Traffic(*(getattr(traffic, name) for name in Traffic.__slots__)),
    )
