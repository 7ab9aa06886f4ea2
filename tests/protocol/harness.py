"""Benches for the machines: feed events, check the invariants after every step, and collect what the machines send.

Peers have one-letter names, so that "ab" names a and b; longer names stand in a list. `pid("a")` is the id of peer a.
Nothing here knows the right answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import msgspec

from zpccl import limits
from zpccl.errors import PCCLError
from zpccl.protocol import events
from zpccl.protocol.effects import Broadcast, Log, Reject, Resolve, Send
from zpccl.protocol.kinds.collective import Reduction
from zpccl.protocol.leadership import Promise
from zpccl.protocol.master import MasterMachine, MasterOptions
from zpccl.protocol.membership import Peer
from zpccl.protocol.messages import (
    NO_ID,
    CollectiveSpec,
    Decision,
    FetchEntry,
    Fetching,
    Hello,
    Leave,
    Linked,
    Member,
    Members,
    Neighbour,
    Neighbours,
    Plan,
    Reducing,
    Refused,
    Report,
    Running,
    RunReport,
    StateEntry,
    SyncSpec,
    TopologyKind,
    TopologySpec,
    Vote,
    Votes,
    Welcome,
    Withdraw,
    decode_master_message,
    decode_peer_message,
    encode,
)
from zpccl.protocol.peer import PeerMachine, PeerOptions
from zpccl.types import Algorithm, CollectiveKind, DataType, ReduceOp

RUN_ID = b"run id of 16 byt"
FIRST_ATTEMPT = 1
FRAME = limits.FRAME_BYTES_DEFAULT
UPDATE, OPTIMIZE, PENDING = TopologyKind.UPDATE, TopologyKind.OPTIMIZE, TopologyKind.PENDING


def pid(name: str) -> bytes:
    """The id of a peer."""
    return name.encode().ljust(16, b".")[:16]


def token(name: str) -> bytes:
    """The token of a peer."""
    return name.upper().encode().ljust(16, b"!")[:16]


def pids(names: Iterable[str]) -> tuple[bytes, ...]:
    """The ids of several peers."""
    return tuple(pid(name) for name in names)


def spec(tag: int = 0, **changes: Any) -> CollectiveSpec:
    """The spec of all_reduce of 8 floats at `tag`. It asks for a ring, as most tests of plans are about rings."""
    plain = {"count": 8, "datatype": 10, "op": 0, "quantization": 0, "quantized_datatype": 0, "block_size": 256}
    plain["algorithm"] = Algorithm.RING
    return CollectiveSpec(tag=tag, **{**plain, **changes})


RING_ONLY: dict[str, Any] = {"kind": CollectiveKind.REDUCE_SCATTER, "op": ReduceOp.AVG, "datatype": DataType.INT8}
"""Fields of a collective whose sums are too wide for most trees. It needs a ring, or links between all."""


def digest(text: str) -> bytes:
    """A readable digest."""
    return text.encode().ljust(32, b"-")


def entry(key: str, contents: str, *, free: bool = False, datatype: int = 10, count: int = 4) -> StateEntry:
    """A tensor of a shared state; with `free` its contents may differ between peers."""
    return StateEntry(key, datatype, count, free, digest(contents))


def sync_spec(revision: int, *entries: StateEntry, strategy: int = 0, digest_kind: int = 0) -> SyncSpec:
    """A call of sync_shared_state; by default one tensor w with contents 1."""
    return SyncSpec(strategy, revision, entries or (entry("w", "1"),), digest_kind)


def offer(
    call_id: int, revision: int, *entries: StateEntry, strategy: int = 0, oldest: int = 0, digest_kind: int = 0
) -> Votes:
    """The vote of sync_shared_state; by default for one tensor w with contents 1."""
    return Votes(oldest, (Vote(call_id, sync_spec(revision, *entries, strategy=strategy, digest_kind=digest_kind)),))


def topology_vote(oldest: int, call_id: int, kind: TopologyKind, after_round: int = 0) -> Votes:
    """A vote for a topology call."""
    return Votes(oldest, (Vote(call_id, TopologySpec(kind, after_round)),))


def sent(effects: Iterable[Any]) -> list[tuple[Hashable, Any]]:
    """The messages sent and their receivers, in order. Fields that only a master that takes over needs are blank."""
    return [(c, plain(e.message)) for e in effects if isinstance(e, Broadcast) for c in e.connections]


def plain(message: Any) -> Any:
    """A message of the master without the fields that peers only keep for another master or for the next call."""
    if isinstance(message, Decision):
        attempt_id = 0 if message.is_refusal else message.attempt_id
        return msgspec.structs.replace(message, round=0, attempt_id=attempt_id, order=(), calls=(), ahead=())
    if isinstance(message, Members):
        return msgspec.structs.replace(message, round=0, round_value=0, parent=0)
    if isinstance(message, Welcome | Refused):
        return msgspec.structs.replace(message, leader=NO_ID)
    return message


def logs(effects: Iterable[Any]) -> list[Log]:
    """The log lines among effects."""
    return [effect for effect in effects if isinstance(effect, Log)]


@dataclass
class MasterBench:
    """A master, and the name of each peer's current connection.

    `copies`: the bench hands the master each message this many times. The result must be the same as with one.
    """

    options: MasterOptions = field(default_factory=MasterOptions)
    copies: int = 1

    def __post_init__(self) -> None:
        self.machine = MasterMachine(RUN_ID, options=self.options)
        self.now_ns = 1_000
        self.connections: dict[str, Hashable] = {}
        self.said: dict[Hashable, list[Any]] = {}  # By connection.
        self.groups: dict[str, int] = {}
        self.epochs: dict[int, Members] = {}
        self.plans: dict[int, Reducing] = {}
        self.verdicts: dict[tuple[Hashable, int], Decision] = {}
        self.ahead = 0  # The last plan ahead that the master handed out.
        self.logged: list[Log] = []
        self.waiting: list[events.MasterEvent] | None = None

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Holds back all events while the block runs, and hands them over in one batch after it."""
        self.waiting = []
        yield
        batch, self.waiting = self.waiting, None
        self.handle(*batch)

    def handle(self, *batch: events.MasterEvent) -> list[Any]:
        """Handles events, and checks every rule that holds for any step."""
        if self.waiting is not None:
            self.waiting += batch
            return []
        effects = self.machine.handle_all(batch, self.now_ns)
        self.machine.validate()
        deadline_ns = self.machine.deadline_ns()
        if isinstance(batch[-1], events.Tick):
            assert deadline_ns is None or deadline_ns > self.now_ns, "a deadline that a Tick does not move: a busy loop"
        self.logged += logs(effects)
        messages = [effect.message for effect in effects if isinstance(effect, Broadcast)]
        self.ahead = next((m.ahead[-1] for m in messages if isinstance(m, Decision | Plan) and m.ahead), self.ahead)
        for connection, message in sent(effects):
            self._check(connection, message)
            self.said.setdefault(connection, []).append(message)
        return effects

    def _check(self, connection: Hashable, message: Any) -> None:
        assert decode_master_message(encode(message)) == message, "the receiver could not read this"
        if isinstance(message, Members):
            listed = msgspec.structs.replace(message, old_members=())
            assert self.epochs.setdefault(message.epoch, listed) == listed, "S3: one member list an epoch"
        elif isinstance(message, Plan) and isinstance(message.how, Reducing):
            how = self.plans.setdefault(message.attempt_id, message.how)
            assert how == message.how, "S3: one plan an attempt"
        elif isinstance(message, Decision):
            name = str(connection).rstrip("0123456789")
            known = self.verdicts.setdefault((name, message.call_id), message)
            assert known == message, "a call has one answer"

    def say(self, names: Iterable[str], message: Any, host: str = "", *, on: str = "") -> list[tuple[Hashable, Any]]:
        """Peers send a message; with `on`, a peer has this connection from now on. The result is for the first copy."""
        if on:
            (name,) = names
            self.connections[name] = on
        return [said for name in names for said in self._say(name, message, host)]

    def _say(self, name: str, message: Any, host: str) -> list[tuple[Hashable, Any]]:
        if isinstance(message, RunReport) and message.hello.leader == NO_ID:
            message = self.promising(message)
        decode_peer_message(encode(message))
        event = events.PeerMessageReceived(self.connections[name], message, host)
        effects = self.handle(event)
        for _ in range(self.copies - 1):
            self.handle(event)
        return sent(effects)

    def promising(self, message: Any, promise: Promise | None = None) -> Any:
        """A Hello or report of a peer with a promise: by default to this master, in its term or its candidacy."""
        candidate = self.machine.candidate
        term, leader = promise or (candidate.promise if candidate is not None else self.machine._leader.promise)
        if isinstance(message, RunReport):
            return msgspec.structs.replace(message, hello=self.promising(message.hello, Promise(term, leader)))
        return msgspec.structs.replace(message, promised=term, leader=leader)

    def tick(self, after_ns: int = 0) -> list[tuple[Hashable, Any]]:
        """Lets time pass, with a Tick at the end and, if the master leads, whenever it asks for one before."""
        end_ns, said = self.now_ns + after_ns, []
        while self.waiting is None and not self.machine.is_recovering:
            due_ns = self.machine.deadline_ns()
            if due_ns is None or due_ns >= end_ns:
                break
            self.now_ns = max(self.now_ns, due_ns)
            said += sent(self.handle(events.Tick()))
        self.now_ns = end_ns
        return said + sent(self.handle(events.Tick()))

    def wake(self, after_ns: int) -> list[tuple[Hashable, Any]]:
        """The master stands still for a while, and gets its Tick before it has read what has come meanwhile."""
        self.now_ns += after_ns
        return sent(self.handle(events.Tick()))

    def recover(self) -> None:
        """Lets time pass until the master leads."""
        while self.machine.is_recovering:
            self.tick_at_deadline()

    def tick_at_deadline(self) -> list[tuple[Hashable, Any]]:
        """Lets time pass until the deadline for which the master asked."""
        deadline_ns = self.machine.deadline_ns()
        assert deadline_ns is not None
        self.now_ns = max(self.now_ns, deadline_ns)
        return self.tick()

    # --- What peers do, one after the other; the result is what the master sends to whom ----------------------------

    def hello(self, names: Iterable[str], *, welcomed: bool = False, **changes: Any) -> list[tuple[Hashable, Any]]:
        """Peers say Hello, each on a new connection."""
        told = []
        for name in names:
            number = sum(str(c).startswith(name) for c in self.said) + 1
            self.connections[name] = f"{name}{number}"
            told += self.hello_again(name, welcomed=welcomed, **changes)
        return told

    def hello_again(self, name: str, *, welcomed: bool = False, **changes: Any) -> list[tuple[Hashable, Any]]:
        """Peer `name` says Hello on the connection it has."""
        plain = Hello(pid(name), token(name), welcomed, self.groups.get(name, 0), name, (f"{name}:1",))
        if welcomed:
            plain = self.promising(msgspec.structs.replace(plain, run_id=self.machine.run_id))
        fields = {f: changes.get(f, getattr(plain, f)) for f in Hello.__struct_fields__}
        return self.say([name], Hello(**fields), changes.get("seen", ""))

    def come_and_go(self, name: str, interval_ns: int, until: Callable[[], bool], most_ns: int) -> int:
        """A member connects again after each interval until something is true. Returns how long that takes."""
        begun_ns = self.now_ns
        while not until():
            self.disconnect(name)
            self.hello(name, welcomed=True, connection=2)
            self.tick(interval_ns)
            assert self.now_ns - begun_ns <= most_ns
        return self.now_ns - begun_ns

    def register(self, names: Iterable[str], group: int = 0) -> None:
        """Peers register."""
        for name in names:
            self.groups[name] = group
            self.hello([name])

    def link(self, names: Collection[str]) -> None:
        """Each of these peers reports links to the others of them, and no other links."""
        for name in names:
            self.say([name], Linked(pids(other for other in names if other != name)))

    def members(self, names: Iterable[str], group: int = 0) -> None:
        """Peers register, and all are admitted and linked. Call it for one group after the other."""
        there = [peer.name for peer in self.machine.registry.order]
        self.register(names, group)
        self.link([*(n for n in there if self.groups[n] == group), *names])
        self.vote([peer.name for peer in self.machine.registry.order], UPDATE, 900 + len(there))
        assert [peer.name for peer in self.machine.registry.order] == [*there, *names]
        self.said = {connection: [] for connection in self.said}
        self.verdicts.clear()
        for peer in self.machine.registry.order:
            peer.answers.clear()  # Drops the answers to the votes above: tests begin with a clean table.

    def begin(
        self, names: Iterable[str], call_id: int, *specs: CollectiveSpec, oldest: int = 0
    ) -> list[tuple[Hashable, Any]]:
        """Peers vote for collectives, with call ids from `call_id` on."""
        calls = tuple(Vote(call_id + i, s) for i, s in enumerate(specs or (spec(),)))
        return self.say(names, Votes(oldest, calls))

    def finish(self, names: Iterable[str], call_id: int, attempt_id: int = FIRST_ATTEMPT, **changes: Any) -> list[Any]:
        """Peers report on an attempt; by default success with digest 7."""
        fields = {"ok": True, "digest": 7, **changes}
        return self.say(names, Report(call_id, attempt_id, **fields))

    def vote(
        self, names: Iterable[str], kind: TopologyKind, call_id: int, oldest: int = 0
    ) -> list[tuple[Hashable, Any]]:
        """Peers make a topology call, all after the same round."""
        return self.say(names, topology_vote(oldest, call_id, kind, self.machine.registry.round))

    def fetched(self, names: Iterable[str], call_id: int, attempt_id: int = FIRST_ATTEMPT, **changes: Any) -> list[Any]:
        """Peers report on a sync."""
        return self.say(names, Report(call_id, attempt_id, **{"ok": True, **changes}))

    def withdraw(self, names: Iterable[str], call_id: int) -> list[tuple[Hashable, Any]]:
        """Peers withdraw a call."""
        return self.say(names, Withdraw(call_id))

    def leave(self, names: Iterable[str]) -> list[tuple[Hashable, Any]]:
        """Peers leave."""
        return self.say(names, Leave())

    def disconnect(self, names: Iterable[str]) -> list[tuple[Hashable, Any]]:
        """The connections of peers break."""
        return [said for name in names for said in sent(self.handle(events.ConnectionClosed(self.connections[name])))]

    def lose(self, name: str) -> list[tuple[Hashable, Any]]:
        """Peer `name` dies without sending anything."""
        return self.disconnect(name) + self.tick(self.options.disconnect_grace_ns)

    # --- What can be seen -------------------------------------------------------------------------------------------

    def names(self) -> str:
        """The members, in ring order."""
        return "".join(peer.name for peer in self.machine.registry.order)

    def pending(self) -> str:
        """The pending peers."""
        return "".join(peer.name for peer in self.machine.registry.pending())

    def peer(self, name: str) -> Any:
        """What the master knows of a peer."""
        return self.machine.registry.peers[pid(name)]

    def verdict(self, name: str, call_id: int) -> Decision | None:
        """The decision on a call, or None while the call is open."""
        return self.verdicts.get((name, call_id))

    def decision(self, name: str, call_id: int) -> Decision:
        """The decision on a call, which is over."""
        assert (name, call_id) in self.verdicts, f"call {call_id} of {name} is open"
        return self.verdicts[name, call_id]

    def snapshot(self) -> dict[str, Any]:
        """Everything that the master holds, except what only counts messages."""
        machine = self.machine
        return {
            "epoch": machine.registry.epoch,
            "order": self.names(),
            "peers": {
                peer.name: (peer.connection, peer.is_member, peer.disconnected_ns, peer.linked, peer.unlinked_ns)
                for peer in machine.registry.peers.values()
            },
            "open": {peer.name: sorted(peer.open_calls) for peer in machine.registry.peers.values()},
            "answers": {
                peer.name: {c: plain(a) for c, a in peer.answers.items()} for peer in machine.registry.peers.values()
            },
            "pending": {
                key: ({p.name: vote for p, vote in operation.votes.items()}, operation.agreed_ns)
                for key, operation in machine.operations.pending.items()
            },
            "attempts": {
                a.attempt_id: (
                    a.group,
                    a.spec,
                    {p.name: c for p, c in a.calls.items()},
                    {p.name: r for p, r in a.reports.items()},
                )
                for a in machine.operations.running.values()
                if isinstance(a, Reduction)
            },
            "transfers": {
                t.group: (t.attempt_id, t.revision, {p.name: c for p, c in t.calls.items()}, {p.name for p in t.done})
                for t in machine.syncs.transfers()
            },
            "revisions": dict(machine.syncs.last_revision),
            "deadline": machine.deadline_ns(),
        }


def bench_of(names: Iterable[str], others: str = "", copies: int = 1, **options: Any) -> MasterBench:
    """A master with these members, all linked. The others are the members of another group."""
    bench = MasterBench(MasterOptions(**options), copies)
    bench.members(names)
    if others:
        bench.members(others, group=1)
    return bench


def unlink(bench: MasterBench, *pairs: str) -> None:
    """These links are down, all others are up; their ends report so."""
    names = bench.names()
    for name in names:
        bench.say([name], Linked(pids(n for n in names if n != name and {n, name} not in map(set, pairs))))


def committed(call_id: int, attempt_id: int = FIRST_ATTEMPT, value: int = 2) -> Decision:
    """The decision that a call has succeeded; its value is the number of peers, or the revision of a sync."""
    return Decision(call_id, 0, value, attempt_id=attempt_id)


OPTIONS = PeerOptions(peer_id=pid("a"), token=token("a"), name="a", addresses=("a:1",), masters=("m:48148",))
HELLO = Hello(pid("a"), token("a"), False, 0, "a", ("a:1",), 1)
HELLO_AGAIN = Hello(pid("a"), token("a"), True, 0, "a", ("a:1",), 2, RUN_ID)
CONNECT = 1
"""The call id of connect()."""


def neighbour(name: str, *, dial: bool = True, is_member: bool = True) -> Neighbour:
    """A neighbour to which peer a is to have a link."""
    return Neighbour(pid(name), name, (f"{name}:1",), dial, is_member=is_member)


def member_list(epoch: int, names: str, since: Sequence[int] = (), /, **groups: int) -> Members:
    """The members of an epoch, and by which list each was admitted; all in group 0 unless said otherwise."""
    listed = zip(names, since or (0,) * len(names), strict=True)
    return Members(epoch, tuple(Member(pid(name), groups.get(name, 0), name, admitted) for name, admitted in listed))


class PeerBench:
    """The machine of peer a."""

    def __init__(self, **options: Any) -> None:
        self.machine = PeerMachine(replace(OPTIONS, **options))
        self.now_ns = 1_000
        self.logged: list[Log] = []
        self.open: set[int] = set()  # The user's calls without an answer.

    def handle(self, event: events.PeerEvent) -> list[Any]:
        """Handles one event, and returns the effects without log lines."""
        if isinstance(event, events.Called):
            self.open |= {vote.call_id for vote in event.votes}
        elif isinstance(event, events.ConnectCalled):
            self.open.add(event.call_id)
        effects = self.machine.handle(event, self.now_ns)
        self.machine.validate()
        if isinstance(event, events.Tick):
            deadline_ns = self.machine.deadline_ns()
            assert deadline_ns is None or deadline_ns > self.now_ns, "a deadline that a Tick does not move: a busy loop"
        for effect in effects:
            if isinstance(effect, Send):
                assert decode_peer_message(encode(effect.message)) == effect.message
            elif isinstance(effect, Resolve | Reject):
                self.open.remove(effect.call_id)  # KeyError: the call was answered twice, or was never made.
        self.logged += logs(effects)
        return [effect for effect in effects if not isinstance(effect, Log)]

    def hear(self, message: Any) -> list[Any]:
        """The master sends a message."""
        decode_master_message(encode(message))
        return self.handle(events.MasterMessageReceived(message))

    def tick(self, after_ns: int = 0) -> list[Any]:
        """Lets time pass."""
        self.now_ns += after_ns
        return self.handle(events.Tick())

    def up(self) -> list[Any]:
        """The connection to the master comes up."""
        return self.handle(events.ConnectionUp())

    def down(self) -> list[Any]:
        """The connection to the master breaks."""
        return self.handle(events.ConnectionDown())

    def reconnect(self) -> list[Any]:
        """The connection breaks and comes up again. Returns the effects of that."""
        assert self.down() == []
        return self.up()

    def welcome_back(self) -> list[Any]:
        """The connection breaks and comes up again, and the same master still leads. Returns the effects of that."""
        said = self.reconnect()
        return said + self.hear(Welcome(RUN_ID, *self.machine._acceptor.promised))

    # --- To get somewhere -------------------------------------------------------------------------------------------

    def connecting(self) -> PeerBench:
        """connect() was called, and the connection is up."""
        self.handle(events.ConnectCalled(CONNECT, attempts=2))
        self.up()
        return self

    def pending(self) -> PeerBench:
        """The master has registered this peer."""
        self.connecting()
        self.hear(Welcome(RUN_ID, 0))
        return self

    def member(self, names: str = "ab", epoch: int = 2, **groups: int) -> PeerBench:
        """The peer is a member together with others, and linked with all of its group."""
        self.pending()
        others = [name for name in names if name != "a" and groups.get(name, 0) == 0]
        self.hear(Neighbours(tuple(neighbour(name) for name in others)))
        for name in others:
            self.handle(events.LinkUp(pid(name)))
        self.hear(member_list(epoch, names, **groups))
        assert not self.open
        return self

    def calling(self, names: str = "ab") -> PeerBench:
        """The peer, a member, has made call 10: all_reduce."""
        self.member(names)
        self.reduce(10)
        return self

    def running(self, names: str = "ab") -> PeerBench:
        """The peer has the plan of call 10."""
        self.calling(names)
        self.plan(10, names=names)
        return self

    def reduce(self, call_id: int, *specs: CollectiveSpec) -> list[Any]:
        """all_reduce, with call ids from `call_id` on."""
        return self.handle(events.Called(tuple(Vote(call_id + i, s) for i, s in enumerate(specs or (spec(),)))))

    def topology(self, call_id: int, kind: TopologyKind = UPDATE) -> list[Any]:
        """A topology call; by default update_topology."""
        return self.handle(events.Called((Vote(call_id, TopologySpec(kind)),)))

    def sync(self, call_id: int, revision: int = 0) -> list[Any]:
        """sync_shared_state."""
        return self.handle(events.Called((Vote(call_id, sync_spec(revision)),)))

    def plan(self, call_id: int, attempt_id: int = FIRST_ATTEMPT, names: str = "ab") -> list[Any]:
        """The master starts an attempt."""
        return self.hear(plan_of(call_id, attempt_id, names))

    def error(self, effects: list[Any]) -> PCCLError:
        """The one error among effects."""
        (error,) = (effect.error for effect in effects if isinstance(effect, Reject))
        return error


def plan_of(call_id: int, attempt_id: int = FIRST_ATTEMPT, names: str = "ab", calls: tuple[int, ...] = ()) -> Plan:
    """A plan with one lane over `names`, for call `call_id` of each, or for `calls`."""
    return Plan(attempt_id, calls or (call_id,) * len(names), reducing(names))


def sync_plan(
    call_id: int,
    revision: int,
    holders: str,
    *fetch: tuple[str, str],
    attempt_id: int = FIRST_ATTEMPT,
    sources: str = "",
    partial_seeds: str = "",
    **calls: int,
) -> Plan:
    """A sync plan; `fetch` has the key and contents of each tensor to fetch."""
    entries = tuple(FetchEntry(key, digest(text)) for key, text in fetch)
    calls = calls or {"a": call_id, "b": call_id}
    how = Fetching(pids(calls), revision, pids(holders), entries, pids(sources), pids(partial_seeds))
    return Plan(attempt_id, tuple(calls.values()), how)


def reducing(names: str = "ab", algorithm: int = Algorithm.RING, frame_bytes: int = FRAME) -> Reducing:
    """How a collective of `names` runs."""
    return Reducing(pids(names), frame_bytes, algorithm)


def fetching(plan: Plan) -> Fetching:
    """How the sync of a plan runs."""
    assert isinstance(plan.how, Fetching)
    return plan.how


def is_fetching(message: object) -> TypeGuard[Plan]:
    """True for the plan of a sync."""
    return isinstance(message, Plan) and isinstance(message.how, Fetching)


def running_attempt(
    attempt_id: int,
    names: str,
    calls: tuple[int, ...],
    of: CollectiveSpec,
    algorithm: int = Algorithm.RING,
    frame_bytes: int = FRAME,
) -> Running:
    """A collective that runs, as its peers report it."""
    return Running(Plan(attempt_id, calls, reducing(names, algorithm, frame_bytes)), of)


def running_sync(
    attempt_id: int, revision: int, holders: str, names: str, calls: tuple[int, ...], is_open: bool
) -> Running:
    """A sync that runs, as one of its peers reports it."""
    return Running(Plan(attempt_id, calls, Fetching(pids(names), revision, pids(holders))), is_open=is_open)


def peer(name: str, group: int = 0) -> Peer:
    return Peer(pid(name), group, name, (f"{name}:1",), token(name), name)


def fail_by(bench: MasterBench, one: str, other: str, call_id: int, **changes: Any) -> tuple[bytes, ...]:
    """All make the same call; later `one` reports its link to `other` as broken. Returns the order of the plan."""
    bench.begin(bench.names(), call_id, spec(**(changes or RING_ONLY)))
    attempt_id, how = list(bench.plans.items())[-1]
    bench.tick(limits.PATH_TIMEOUT_NS)
    bench.finish(one, call_id, attempt_id, ok=False, digest=0, fault=pid(other), reason="link broke")
    return how.order


def said_together(machine: MasterMachine, what: str, number: int) -> list[events.MasterEvent]:
    """The events of all members, or of those concerned, if they send what honest peers would."""
    said: list[tuple[Peer, Any]] = []
    attempts, transfers = machine.operations.running.values(), machine.syncs.transfers()
    if what == "finish":
        said = [(p, Report(c, a.attempt_id, True, digest=number // 3)) for a in attempts for p, c in a.calls.items()]
    elif what == "fetched":
        said = [(p, Report(c, t.attempt_id, True)) for t in transfers for p, c in t.calls.items()]
    elif what == "hello":
        said = [(p, Hello(p.peer_id, p.token, True, p.group, p.name, ())) for p in machine.registry.peers.values()]
    elif what == "link":
        said = [(p, Linked(tuple(machine.registry.peers))) for p in machine.registry.peers.values()]
    for peer in machine.registry.order:
        call_id = max([*peer.open_calls, *peer.answers, 0]) + 1
        vote = {
            "begin": Votes(0, (Vote(call_id, spec(number % 2)),)),
            "offer": offer(call_id, number, entry("w", "xy"[peer.peer_id[0] % 2])),
            "update": topology_vote(0, call_id, TopologyKind.UPDATE),
        }.get(what)
        if vote is not None:
            said.append((peer, vote))
    # A peer that has lost its connection comes back on another one.
    return [events.PeerMessageReceived(p.connection or f"{p.name} again", message) for p, message in said]
