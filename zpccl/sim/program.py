"""What the users run: the same training loop on every peer, as a script on top of the public API would be.

    connect
    loop:  compute
           are_peers_pending? -> update_topology       (a newcomer begins below this line)
           optimize_topology                           (some scripts)
           sync_shared_state                           (always, or after a newcomer came)
           a collective for each tag, again until done (as a batch, or each from a thread of its own)

Scripts differ from run to run, never within one: whoever takes part makes the same calls in the same order, as often as
they fail. Some processes run anything but that until all is healed: see wander.py. A program is a generator that yields
requests and is sent their outcomes: a number, or the error.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from zpccl.errors import CollectiveMismatch, NoSharedState, PCCLError, PeerLost, TooFewPeers
from zpccl.limits import MS
from zpccl.protocol.messages import CollectiveSpec, TopologyKind
from zpccl.sim.dataplane import Buffer
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm, ReduceOp, SharedStateSyncStrategy

if TYPE_CHECKING:
    from zpccl.sim.node import PeerNode

COUNT = 64


@dataclass(frozen=True)
class Script:
    """What all programs of one run have in common."""

    groups: int
    tags: tuple[int, ...]
    """How many collectives a step has, by group."""
    is_batched: bool
    """One call for all tags; else a thread for each."""
    asks_beside: bool
    """are_peers_pending is asked while the collectives run."""
    optimizes: bool
    syncs_always: bool
    newcomers_receive: bool
    """Newcomers sync as RECEIVE_ONLY."""
    drifts: bool = False
    """What must be equal after a sync comes to differ between peers, so that syncs have something to fetch."""
    seed: int = 0
    """Of what programs drawn at random have in common."""
    varies: bool = True
    """What may differ between peers does."""
    fetches_ahead: bool = False
    """Some newcomers fetch state ahead, and are ready late."""

    def kind_of(self, tag: int) -> CollectiveKind:
        """What the collective of a tag does: often an all-reduce."""
        kinds = (CollectiveKind.ALL_REDUCE,) * 3 + tuple(CollectiveKind)
        return kinds[hash((self.seed, tag)) % len(kinds)]

    @staticmethod
    def draw(rng: random.Random) -> Script:
        """One of the scripts that users may write."""
        groups = rng.choice((1, 1, 2, 3))
        return Script(
            groups=groups,
            tags=tuple(rng.choice((1, 1, 2, 4)) for _ in range(groups)),
            is_batched=rng.random() < 0.5,
            asks_beside=rng.random() < 0.3,
            optimizes=rng.random() < 0.2,
            syncs_always=rng.random() < 0.6,
            newcomers_receive=rng.random() < 0.3,
            drifts=rng.random() < 0.3,
            seed=rng.getrandbits(32),
            varies=rng.random() < 0.5,
            fetches_ahead=rng.random() < 0.4,
        )


# --- Requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """connect()."""

    attempts: int = 3


@dataclass(frozen=True)
class Collective:
    """One collective, in place."""

    spec: CollectiveSpec
    buffer: Buffer


@dataclass(frozen=True)
class Batch:
    """Several at once; the outcomes come as a list, when all have one."""

    collectives: tuple[Collective, ...]
    timeout_ns: int = 0
    """When the user gives all of them up; 0: never."""


@dataclass(frozen=True)
class Topology:
    """A topology call."""

    kind: TopologyKind
    timeout_ns: int = 0


@dataclass(frozen=True)
class Sync:
    """sync_shared_state of the process's state."""

    strategy: SharedStateSyncStrategy
    timeout_ns: int = 0


@dataclass(frozen=True)
class Pause:
    """The program computes."""

    delay_ns: int


@dataclass(frozen=True)
class Together:
    """Programs in threads of their own; their results come as a list, when all have ended."""

    programs: tuple[Program, ...]


Call: TypeAlias = Connect | Collective | Topology | Sync
Request: TypeAlias = Connect | Batch | Topology | Sync | Pause | Together
Program: TypeAlias = Generator[Request, Any, Any]
Outcome: TypeAlias = "int | PCCLError"


class Fatal(Exception):
    """The program gives up: its process ends, and perhaps starts anew."""

    def __init__(self, error: PCCLError) -> None:
        super().__init__(str(error))
        self.error = error


# --- The training loop ------------------------------------------------------------------------------------------------


def train(node: PeerNode, script: Script) -> Program:
    """The program of one process that is connected."""
    loop = Loop(node, script)
    while True:
        yield Pause(node.rng.randrange(10 * MS, 200 * MS) * node.slowness)
        yield from loop.step()


@dataclass
class Loop:
    """The training loop of one process."""

    node: PeerNode
    script: Script
    is_new: bool = True
    must_sync: bool = True
    are_pending: bool = False
    syncs_done: int = field(default=0)

    def step(self) -> Program:
        """One outer step."""
        script = self.script
        if self.node.rng.random() < self.node.faults.muddle_chance and self.node.strikes("muddle_chance"):
            yield from self._muddle()
        if not self.is_new:
            if not script.asks_beside:
                self.are_pending = bool((yield from self._insist(Topology(TopologyKind.PENDING))))
            if self.are_pending:
                admitted = yield from self._insist(Topology(TopologyKind.UPDATE))
                self.must_sync = self.must_sync or admitted > 0
        self.is_new = False
        if script.optimizes:
            yield from self._insist(Topology(TopologyKind.OPTIMIZE))
        if self.must_sync or script.syncs_always:
            yield from self._sync()
            self.must_sync = False
        sums = yield from self._reduce_all()
        if all(value is not None for value in sums):
            state = self.node.shared_state
            state.values["params"] = (state.values["params"] * 31 + sum(sums)) % 2**64
            state.values["momentum"] = (state.values["momentum"] * 3 + sum(sums)) % 2**64
            if script.varies:
                state.values["local"] = self.node.rng.getrandbits(64)
            if script.drifts and self.node.rng.random() < 0.3:
                state.values["momentum"] = self.node.rng.getrandbits(64)
        self.node.shared_state.revision += 1

    def _muddle(self) -> Program:
        """A call that the others do not make. They cannot know, so the master must tell all who then wait in vain."""
        self.node.note("muddled")
        if self.node.rng.random() < 0.5:
            yield from self._sync()
        else:
            yield from self._insist(Topology(self.node.rng.choice((TopologyKind.UPDATE, TopologyKind.OPTIMIZE))))

    def _insist(self, request: Topology) -> Program:
        """Makes a topology call until it succeeds."""
        while True:
            outcome = yield request
            if not isinstance(outcome, PCCLError):
                return outcome
            if not isinstance(outcome, PeerLost):
                raise Fatal(outcome)

    def _sync(self) -> Program:
        while True:
            is_newcomer = self.script.newcomers_receive and self.syncs_done == 0
            strategy = SharedStateSyncStrategy.RECEIVE_ONLY if is_newcomer else SharedStateSyncStrategy.ENFORCE_POPULAR
            outcome = yield Sync(strategy)
            if isinstance(outcome, PCCLError) and not isinstance(outcome, (PeerLost, TooFewPeers, NoSharedState)):
                raise Fatal(outcome)
            if not isinstance(outcome, PeerLost):
                self.syncs_done += 1
                return

    def _reduce_all(self) -> Program:
        """One collective for each tag; the sums, None where the peer was alone."""
        rng = self.node.rng
        buffers = {tag: Buffer(rng.getrandbits(32)) for tag in range(self.script.tags[self.node.group])}
        if self.script.is_batched:
            programs: list[Program] = [self._reduce(tuple(buffers), buffers)]
        else:
            programs = [self._reduce((tag,), buffers) for tag in buffers]
        if self.script.asks_beside:
            programs.append(self._insist(Topology(TopologyKind.PENDING)))
        results = yield Together(tuple(programs))
        if self.script.asks_beside:
            self.are_pending = bool(results.pop())
        return [value for values in results for value in values]

    def _reduce(self, tags: tuple[int, ...], buffers: dict[int, Buffer]) -> Program:
        """Collectives until all tags are done or the peer is alone."""
        sums: dict[int, int | None] = {}
        while len(sums) < len(tags):
            missing = tuple(tag for tag in tags if tag not in sums)
            outcomes = yield Batch(tuple(Collective(self._spec(tag), buffers[tag]) for tag in missing))
            for tag, outcome in zip(missing, outcomes, strict=True):
                if not isinstance(outcome, PCCLError):
                    is_shared = self.script.kind_of(tag) is not CollectiveKind.REDUCE_SCATTER
                    sums[tag] = buffers[tag].value if is_shared else 1
                elif isinstance(outcome, TooFewPeers):
                    sums[tag] = None
                elif not isinstance(outcome, (PeerLost, CollectiveMismatch)):
                    raise Fatal(outcome)
        return [sums[tag] for tag in tags]

    def _spec(self, tag: int) -> CollectiveSpec:
        is_wrong = self.node.rng.random() < self.node.faults.mismatch_chance
        other_count = COUNT + self.node.rng.randrange(1, 3)
        count = other_count if is_wrong and self.node.strikes("mismatch_chance") else COUNT
        kind = self.script.kind_of(tag)
        return make_spec(tag, count, kind, is_root=is_newest(self.node))


def is_newest(node: PeerNode) -> bool:
    """True for the newest member of a group, the root of broadcasts: other rings begin with the oldest."""
    members = node.machine.group_members()
    return bool(members) and members[-1].peer_id == node.peer_id


def make_spec(
    tag: int,
    count: int,
    kind: CollectiveKind,
    *,
    is_root: bool,
    datatype: DataType = DataType.UINT64,
    op: ReduceOp = ReduceOp.SUM,
) -> CollectiveSpec:
    """What the public API would say of a tensor of integers."""
    is_root = is_root and kind is CollectiveKind.BROADCAST
    algorithm = tag % len(Algorithm) if kind is CollectiveKind.ALL_REDUCE else Algorithm.AUTO
    no_quantization = QuantizationAlgorithm.NONE, DataType.UINT8, 1
    return CollectiveSpec(tag, count, datatype, op, *no_quantization, kind, is_root, algorithm)
