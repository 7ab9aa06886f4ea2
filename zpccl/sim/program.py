"""Simulated user programs: the same training loop on every peer, like a script on top of the public API.

    connect
    loop:  compute
           are_peers_pending? -> update_topology       (a newcomer begins below this line)
           optimize_topology                           (some scripts)
           sync_shared_state                           (always, or after a newcomer was admitted)
           a collective for each tag, with retry       (as a batch, or each in its own thread)

The script differs between runs, but not between the peers of one run: all make the same calls in the same order, and
repeat those that fail. Some processes run a random program until the healing: see wander.py. A program is a generator
that yields actions and receives their answers: a number, or the error.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from zpccl.errors import (
    CollectiveMismatch,
    InvalidUsage,
    NoSharedState,
    OperationTimeout,
    PCCLError,
    PeerLost,
    TooFewPeers,
)
from zpccl.limits import MS
from zpccl.protocol.messages import CollectiveSpec, TopologyKind
from zpccl.sim.dataplane import Buffer
from zpccl.types import Algorithm, CollectiveKind, DataType, QuantizationAlgorithm, ReduceOp, SharedStateSyncStrategy

if TYPE_CHECKING:
    from zpccl.sim.node import SimulatedPeer

COUNT = 64
LARGE_COUNT = 1 << 22
"""Elements of a tensor where paths are uneven, so that plans follow them."""
QUICK_ROUNDS = 8


@dataclass(frozen=True)
class Script:
    """The script of a run: what its programs have in common."""

    groups: int
    tags: tuple[int, ...]
    """Collectives per step, by group."""
    is_batched: bool
    """One batch for all tags; else one thread per tag."""
    asks_beside: bool
    """Calls are_peers_pending while the collectives run."""
    optimizes: bool
    syncs_always: bool
    newcomers_receive: bool
    """Newcomers sync as RECEIVE_ONLY."""
    drifts: bool = False
    """Keys that must be equal after a sync diverge between syncs, so that syncs have something to fetch."""
    seed: int = 0
    """Seed that the random programs of all peers share."""
    varies: bool = True
    """Keys that may differ between peers do differ."""
    fetches_ahead: bool = False
    """Some newcomers prefetch state, and are ready late."""
    is_quick: bool = False
    """Paths are short, and a step makes its collectives several times in a row: peers are calls ahead of the master."""

    is_uneven: bool = False
    """Tensors are large, paths have rates of their own, and these change."""

    is_parted: bool = False
    """Half of the peers that start before the healing are behind a NAT: nobody can dial them, so two of them never have
    a link."""

    def kind_of(self, tag: int) -> CollectiveKind:
        """The kind of the collective with a tag: often an all-reduce."""
        kinds = (CollectiveKind.ALL_REDUCE,) * 3 + tuple(CollectiveKind)
        return kinds[hash((self.seed, tag)) % len(kinds)]

    @property
    def host_size(self) -> int:
        """Peers per host in some worlds with several groups: one of each group, which come and go together. Else 0."""
        return self.groups if self.groups > 1 and self.seed % 4 == 1 else 0

    @property
    def min_world_size(self) -> int:
        """How many members a collective needs: in some worlds more than two."""
        return 3 if self.seed % 8 == 0 else 2

    @staticmethod
    def draw(rng: random.Random) -> Script:
        """Draws a script."""
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
            is_quick=rng.random() < 0.3,
            is_uneven=rng.random() < 0.3,
            is_parted=rng.random() < 0.3,
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
    """Several collectives at once. The answers come as a list, once all are there."""

    collectives: tuple[Collective, ...]
    timeout_ns: int = 0
    """Timeout of the whole batch; 0: none."""


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
    """Runs programs in threads. Their results come as a list, once all have ended."""

    programs: tuple[Program, ...]


CallRequest: TypeAlias = Connect | Collective | Topology | Sync
Action: TypeAlias = Connect | Batch | Topology | Sync | Pause | Together
Program: TypeAlias = Generator[Action, Any, Any]
Answer: TypeAlias = "int | PCCLError"


class Fatal(Exception):
    """The program gives up: its process ends and is restarted."""

    def __init__(self, error: PCCLError) -> None:
        super().__init__(str(error))
        self.error = error


# --- The training loop ------------------------------------------------------------------------------------------------


def train(node: SimulatedPeer, script: Script) -> Program:
    """The training program of one process, after connect()."""
    loop = Loop(node, script)
    while True:
        yield Pause(node.rng.randrange(10 * MS, 200 * MS) * node.slowness)
        yield from loop.step()


@dataclass
class Loop:
    """The training loop of one process."""

    node: SimulatedPeer
    script: Script
    is_new: bool = True
    must_sync: bool = True
    are_pending: bool = False
    syncs_done: int = field(default=0)

    def step(self) -> Program:
        """One outer step."""
        script = self.script
        if self.node.rng.random() < self.node.faults.muddle_chance:
            yield from self._muddle("muddle_chance")
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
        if self.node.faults.cross_chance and self.node.rng.random() < self.node.faults.cross_chance:
            yield from self._cross()
        for _ in range(QUICK_ROUNDS if script.is_quick else 1):
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

    def _muddle(self, kind: str) -> Program:
        """Makes a call that the others do not make. The master must end the calls that now wait for each other."""
        if not self.node.strikes(kind):
            return
        self.node.note("muddled")
        if self.node.rng.random() < 0.5:
            yield from self._sync()
        else:
            yield from self._insist(Topology(self.node.rng.choice((TopologyKind.UPDATE, TopologyKind.OPTIMIZE))))

    def _cross(self) -> Program:
        """Calls an all-reduce that the others do not call. With a timeout of stragglers, the master must end both."""
        if not self.node.strikes("cross_chance"):
            return
        self.node.note("muddled")
        tag = max(self.script.tags)  # That of no collective.
        spec = make_spec(tag, COUNT, CollectiveKind.ALL_REDUCE, is_root=False, needed=self.script.min_world_size)
        (outcome,) = yield Batch((Collective(spec, Buffer(self.node.rng.getrandbits(32))),))
        if isinstance(outcome, PCCLError) and not must_repeat(outcome) and not isinstance(outcome, TooFewPeers):
            raise Fatal(outcome)

    def _insist(self, request: Topology) -> Program:
        """Makes a topology call until it succeeds."""
        while True:
            outcome = yield request
            if not isinstance(outcome, PCCLError):
                return outcome
            if not must_repeat(outcome):
                raise Fatal(outcome)

    def _sync(self) -> Program:
        while True:
            is_newcomer = self.script.newcomers_receive and self.syncs_done == 0
            strategy = SharedStateSyncStrategy.RECEIVE_ONLY if is_newcomer else SharedStateSyncStrategy.ENFORCE_POPULAR
            outcome = yield Sync(strategy)
            if must_repeat(outcome):
                continue
            if isinstance(outcome, PCCLError) and not isinstance(outcome, (TooFewPeers, NoSharedState)):
                raise Fatal(outcome)
            self.syncs_done += 1
            return

    def _reduce_all(self) -> Program:
        """One collective per tag. Returns the results; None where the peer was alone."""
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
        """Repeats collectives until all tags have succeeded or the peer is alone."""
        sums: dict[int, int | None] = {}
        while len(sums) < len(tags):
            missing = tuple(tag for tag in tags if tag not in sums)
            outcomes = yield Batch(tuple(Collective(self._spec(tag), buffers[tag]) for tag in missing))
            for tag, outcome in zip(missing, outcomes, strict=True):
                if not isinstance(outcome, PCCLError):
                    sums[tag] = buffers[tag].value if self.script.kind_of(tag).has_one_result else 1
                elif isinstance(outcome, TooFewPeers):
                    sums[tag] = None
                elif not must_repeat(outcome) and not self._may_differ(outcome):
                    raise Fatal(outcome)
            is_late = any(isinstance(outcome, OperationTimeout) for outcome in outcomes)
            if is_late and self.node.rng.random() < self.node.faults.fickle_chance:
                yield from self._muddle("fickle_chance")
        return [sums[tag] for tag in tags]

    def _may_differ(self, outcome: PCCLError) -> bool:
        """True for a mismatch that programs make: peers differ in who is the root, or one passes something else."""
        faults = self.node.faults
        is_made = faults.mismatch_chance + faults.wander_chance > 0
        return isinstance(outcome, CollectiveMismatch) and (is_made or outcome.field == "is_root")

    def _spec(self, tag: int) -> CollectiveSpec:
        is_wrong = self.node.rng.random() < self.node.faults.mismatch_chance
        usual_count = LARGE_COUNT if self.script.is_uneven else COUNT
        other_count = usual_count + self.node.rng.randrange(1, 3)
        count = other_count if is_wrong and self.node.strikes("mismatch_chance") else usual_count
        kind = self.script.kind_of(tag)
        rows = len(self.node.machine.group_members()) if kind is CollectiveKind.ALL_TO_ALL else 0
        needed = self.script.min_world_size
        return make_spec(tag, count * max(rows, 1), kind, is_root=is_newest(self.node), rows=rows, needed=needed)


def must_repeat(outcome: Answer) -> bool:
    """True if a peer was lost, or if the master has ended calls that waited for each other."""
    is_crosswise = isinstance(outcome, InvalidUsage) and "peers wait for each other: " in str(outcome)
    return is_crosswise or isinstance(outcome, PeerLost)


def is_newest(node: SimulatedPeer) -> bool:
    """True for the newest member of a group. It is the root of broadcasts, since other rings begin with the oldest."""
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
    rows: int = 0,
    needed: int = 2,
) -> CollectiveSpec:
    """The spec that the public API would make for such a tensor, `needed` as the members that it needs."""
    needed = needed if needed > 2 else 0
    is_root = is_root and kind is CollectiveKind.BROADCAST
    algorithm = tag % len(Algorithm) if kind is CollectiveKind.ALL_REDUCE else Algorithm.AUTO
    no_quantization = QuantizationAlgorithm.NONE, DataType.UINT8, 1
    return CollectiveSpec(tag, count, datatype, op, *no_quantization, kind, is_root, algorithm, rows, needed)
