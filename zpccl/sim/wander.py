"""Random programs: any call in any order, legal or not, alone or several at once.

    until the healing:
        collectives of some tags, as a batch or each in its own thread
        a topology call or a sync of any kind
        several of these in threads
        changes of the state: its revision, its values, an additional key
    then the process ends, or continues with the training loop

The call of each time slot is drawn from a seed that all peers share, so that many calls meet others and succeed; a peer
often deviates from it. Collectives have timeouts, because no other peer may ever use that tag. Topology calls and syncs
have none: there the master must detect that peers wait for each other in vain.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from zpccl.errors import InvalidUsage, PCCLError
from zpccl.limits import MS, SECOND
from zpccl.protocol.messages import CollectiveSpec, TopologyKind
from zpccl.protocol.peer import State
from zpccl.sim.dataplane import Buffer
from zpccl.sim.program import (
    Action,
    Answer,
    Batch,
    Collective,
    Connect,
    Fatal,
    Pause,
    Program,
    Script,
    Sync,
    Together,
    Topology,
    is_newest,
    make_spec,
    train,
)
from zpccl.types import CollectiveKind, DataType, ReduceOp, SharedStateSyncStrategy

if TYPE_CHECKING:
    from zpccl.sim.node import SimulatedPeer

SLOT_NS = 400 * MS
"""Length of a time slot."""
OBEDIENCE = 0.7
"""Probability that a peer makes the call of the time slot."""
TAGS = 5
PATIENCE_NS = 3 * SECOND


def live(node: SimulatedPeer, script: Script) -> Program:
    """The whole program of one process."""
    node.shared_state.values.pop("extra", None)  # Otherwise it might refuse all other peers for ever.
    wanders = node.rng.random() < node.faults.wander_chance and node.strikes("wander_chance")
    if wanders and node.rng.random() < 0.2:
        yield from insist_on_refusal(Topology(TopologyKind.UPDATE))
    outcome = yield Connect()
    if isinstance(outcome, PCCLError):
        raise Fatal(outcome)
    if wanders:
        yield from wander(node, script)
    yield from train(node, script)


def wander(node: SimulatedPeer, script: Script) -> Program:
    """Makes random calls until the healing."""
    wanderer = Wanderer(node, script)
    while node.faults.wander_chance > 0:
        yield Pause(node.rng.randrange(1, 60 * MS) * node.slowness)
        yield from wanderer.act()
    node.shared_state.values.pop("extra", None)
    if node.rng.random() < 0.5:
        raise Fatal(InvalidUsage("the program has ended"))


def insist_on_refusal(request: Action) -> Program:
    """Makes a call that must be refused at once."""
    outcome = yield request
    assert isinstance(outcome, PCCLError), f"{request} is not refused but answered with {outcome!r}"


class Wanderer:
    """The random program of one process."""

    def __init__(self, node: SimulatedPeer, script: Script) -> None:
        self._node = node
        self._script = script

    def act(self) -> Program:
        """Makes one random step."""
        own = self._node.rng
        slot = self._node.now_ns() // SLOT_NS
        common = random.Random(self._script.seed << 32 | slot)
        rng = common if own.random() < OBEDIENCE else own
        acts: tuple[Callable[[random.Random], Program], ...] = (
            self._reduce,
            self._reduce,
            self._reduce,
            self._decide,
            self._decide,
            self._sync,
            self._sync,
            self._crowd,
            self._dabble,
        )
        yield from rng.choice(acts)(rng)

    def _reduce(self, rng: random.Random) -> Program:
        """Collectives of some tags, as a batch or in threads. A tag may occur twice."""
        count = rng.choice((1, 1, 2, 3))
        tags = [rng.randrange(TAGS) for _ in range(count)]
        is_batched = rng.random() < 0.5
        is_common = rng.random() < 0.9
        kinds = [rng.choice(list(CollectiveKind)) for _ in tags]
        collectives = [
            Collective(self._spec(tag, kind, is_common), Buffer(self._node.rng.getrandbits(32)))
            for tag, kind in zip(tags, kinds, strict=True)
        ]
        timeout_ns = self._node.rng.randrange(PATIENCE_NS)
        if is_batched:
            yield from self._ask(Batch(tuple(collectives), timeout_ns))
        else:
            yield Together(tuple(self._ask(Batch((one,), timeout_ns)) for one in collectives))

    def _decide(self, rng: random.Random) -> Program:
        """A topology call. PENDING has a timeout, because collectives may run at the same time for long."""
        kind = rng.choice((TopologyKind.UPDATE, TopologyKind.UPDATE, TopologyKind.PENDING, TopologyKind.OPTIMIZE))
        timeout_ns = self._node.rng.randrange(1, PATIENCE_NS) if kind is TopologyKind.PENDING else 0
        yield from self._ask(Topology(kind, timeout_ns))

    def _sync(self, rng: random.Random) -> Program:
        """A sync, with the strategy of the time slot or another one."""
        strategies = list(SharedStateSyncStrategy)
        strategy = rng.choice(strategies)
        if self._node.rng.random() < 0.2:
            strategy = self._node.rng.choice(strategies)
        yield from self._ask(Sync(strategy))

    def _crowd(self, rng: random.Random) -> Program:
        """Several steps at once, few of which are allowed at the same time."""
        acts = [rng.choice((self._reduce, self._decide, self._sync)) for _ in range(rng.choice((2, 3)))]
        yield Together(tuple(act(rng) for act in acts))

    def _dabble(self, rng: random.Random) -> Program:
        """Changes the state as a user may, unless it is being synced."""
        yield Pause(self._node.rng.randrange(200 * MS))
        if self._node.has_open(Sync):
            return
        state, own = self._node.shared_state, self._node.rng
        state.revision = max(0, state.revision + own.choice((-1, 1, 1, 1, 2)))
        state.values["params"] = rng.getrandbits(64)
        state.values["local"] = own.getrandbits(64)
        if own.random() < 0.3:
            state.values["momentum"] = own.getrandbits(64)
        if own.random() < 0.1:
            yield from insist_on_refusal(Connect())
        elif own.random() < 0.2:
            state.values["extra"] = 1
        else:
            state.values.pop("extra", None)

    def _ask(self, request: Action) -> Program:
        """Makes calls and ignores errors, unless the communicator is closed."""
        outcome = yield request
        outcomes: list[Answer] = outcome if isinstance(outcome, list) else [outcome]
        if self._node.machine.state is State.CLOSED:
            errors = [outcome for outcome in outcomes if isinstance(outcome, PCCLError)]
            raise Fatal(errors[0] if errors else InvalidUsage("the communicator is closed"))

    def _spec(self, tag: int, kind: CollectiveKind, is_common: bool) -> CollectiveSpec:
        own, is_root = self._node.rng, is_newest(self._node)
        if is_common:
            return make_spec(tag, 64, kind, is_root=is_root)
        kind, datatype, op = own.choice(list(CollectiveKind)), own.choice(list(DataType)), own.choice(list(ReduceOp))
        is_root = own.random() < 0.5
        return make_spec(tag, 64, kind, is_root=is_root, datatype=datatype, op=op)
