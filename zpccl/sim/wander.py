"""Programs drawn at random: any call in any order, legal or not, alone or several at once.

    until all is healed:
        collectives of some tags, as a batch or each from a thread of its own
        a topology call or a sync of any kind
        any of these from several threads at once
        the state moves on, or back, or gains a key
    then the process ends, or goes on with the training loop

What all peers would call at a time is drawn from the run's seed, so that many calls meet others and succeed; each peer
often does something else. Calls that others may leave alone for ever, as the tag of a collective that nobody else uses,
have timeouts. Topology calls and syncs have none: there the master must see that peers wait for each other in vain.
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
    Batch,
    Collective,
    Connect,
    Fatal,
    Outcome,
    Pause,
    Program,
    Request,
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
    from zpccl.sim.node import PeerNode

SLOT_NS = 400 * MS
"""How long all peers would make the same call."""
OBEDIENCE = 0.7
"""How often a peer makes it."""
TAGS = 5
PATIENCE_NS = 3 * SECOND


def live(node: PeerNode, script: Script) -> Program:
    """The whole program of one process."""
    node.shared_state.values.pop("extra", None)  # Else all others might be refused for ever.
    wanders = node.rng.random() < node.faults.wander_chance and node.strikes("wander_chance")
    if wanders and node.rng.random() < 0.2:
        yield from insist_on_refusal(Topology(TopologyKind.UPDATE))
    outcome = yield Connect()
    if isinstance(outcome, PCCLError):
        raise Fatal(outcome)
    if wanders:
        yield from wander(node, script)
    yield from train(node, script)


def wander(node: PeerNode, script: Script) -> Program:
    """Does anything, until all is healed."""
    wanderer = Wanderer(node, script)
    while node.faults.wander_chance > 0:
        yield Pause(node.rng.randrange(1, 60 * MS) * node.slowness)
        yield from wanderer.act()
    node.shared_state.values.pop("extra", None)
    if node.rng.random() < 0.5:
        raise Fatal(InvalidUsage("the program has come to its end"))


def insist_on_refusal(request: Request) -> Program:
    """Makes a call that is refused at once."""
    outcome = yield request
    assert isinstance(outcome, PCCLError), f"{request} is not refused but answered with {outcome!r}"


class Wanderer:
    """The random program of one process."""

    def __init__(self, node: PeerNode, script: Script) -> None:
        self._node = node
        self._script = script

    def act(self) -> Program:
        """Does something."""
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
        """Collectives of some tags, together or apart. Some tags may come twice."""
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
        """A topology call. Collectives may run beside the question whether peers are pending: it may wait for long."""
        kind = rng.choice((TopologyKind.UPDATE, TopologyKind.UPDATE, TopologyKind.PENDING, TopologyKind.OPTIMIZE))
        timeout_ns = self._node.rng.randrange(1, PATIENCE_NS) if kind is TopologyKind.PENDING else 0
        yield from self._ask(Topology(kind, timeout_ns))

    def _sync(self, rng: random.Random) -> Program:
        """A sync, of the strategy of all or of another."""
        strategies = list(SharedStateSyncStrategy)
        strategy = rng.choice(strategies)
        if self._node.rng.random() < 0.2:
            strategy = self._node.rng.choice(strategies)
        yield from self._ask(Sync(strategy))

    def _crowd(self, rng: random.Random) -> Program:
        """Several things at once, few of which are allowed beside each other."""
        acts = [rng.choice((self._reduce, self._decide, self._sync)) for _ in range(rng.choice((2, 3)))]
        yield Together(tuple(act(rng) for act in acts))

    def _dabble(self, rng: random.Random) -> Program:
        """The user's own business with its state; not while it is being synced."""
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

    def _ask(self, request: Request) -> Program:
        """Makes calls, whatever comes of them, as long as there is anybody to ask."""
        outcome = yield request
        outcomes: list[Outcome] = outcome if isinstance(outcome, list) else [outcome]
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
