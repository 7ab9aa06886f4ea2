"""A scripted world for the unmodified machines: nothing is random, and only what a scenario says goes wrong.

Messages take 5 ms each way and keep their order on a connection. start_master() starts masters, as it does real ones. A
scenario kills and starts masters, cuts paths, breaks links, and drops or changes messages to peers.

After each event the world checks S3: no two masters lead one run, and no epoch of a run has two member lists.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from zpccl import limits
from zpccl.errors import PCCLError
from zpccl.limits import MS, SECOND
from zpccl.protocol import effects, events
from zpccl.protocol.identity import SALT_BYTES, make_peer_id
from zpccl.protocol.master import MasterMachine, MasterOptions, start_master
from zpccl.protocol.messages import (
    CollectiveSpec,
    MasterMessage,
    PeerMessage,
    RunReport,
    StateEntry,
    SyncSpec,
    TopologyKind,
    TopologySpec,
    Vote,
    decode_master_message,
    decode_peer_message,
    encode,
)
from zpccl.protocol.peer import PeerMachine, PeerOptions, State
from zpccl.types import Algorithm, DataType

ONE = ("m",)
"""The master of `one_master`."""
TWO = ("a", "b")
"""The masters of `two_masters`."""

LATENCY_NS = 5 * MS
NOTICE_NS = 30 * MS
"""How long the ends of a broken connection take to notice."""
ATTEMPT_NS = 20 * MS
"""How long a collective, or the fetch of a sync, takes."""
RETRY_NS = 100 * MS
SETTLE_S = 60.0
"""In a network without faults, every call ends within this time."""
OTHER_VERSION = 99


def reduce_spec(tag: int = 0, count: int = 8) -> CollectiveSpec:
    """An all-reduce."""
    return CollectiveSpec(tag, count, DataType.FLOAT, 0, 0, 0, 256, 0, False, Algorithm.RING)


def state_entry(text: str) -> StateEntry:
    """A tensor of a shared state with these contents."""
    return StateEntry("weights", DataType.FLOAT, 4, False, text.encode().ljust(32, b"-"))


def is_quorum(present: Collection[bytes], members: Collection[bytes]) -> bool:
    """True for a majority of the members, or for half of them if these include the one with the lowest id."""
    count = sum(member in present for member in members)
    return 2 * count > len(members) or (count > 0 and 2 * count == len(members) and min(members) in present)


@dataclass(eq=False)
class Connection:
    """A connection of a peer to the process of a master. `machine` is None if that speaks another version."""

    name: str
    peer: Peer
    address: str
    machine: MasterMachine | None
    is_up: bool = True


@dataclass(eq=False)
class Call:
    """A call of a peer's user."""

    peer: Peer
    call_id: int
    ended_ns: int | None = None
    result: int | PCCLError | None = None
    """What the call returned. For an all-reduce: one bit for each peer in the sum."""

    @property
    def has_ended(self) -> bool:
        return self.ended_ns is not None

    @property
    def is_ok(self) -> bool:
        return self.has_ended and not isinstance(self.result, PCCLError)

    def __repr__(self) -> str:
        return f"{self.peer.name}: {self.result!r}" if self.has_ended else f"{self.peer.name}: STILL WAITING"


class Peer:
    """The process of a peer. Its state, epoch and results are those of its machine."""

    def __init__(self, world: World, name: str, masters: tuple[str, ...], identity: str, group: int) -> None:
        self.world = world
        self.name = name
        self.identity = identity
        self.group = group
        salt = name.encode().ljust(SALT_BYTES, b".")
        self.peer_id = make_peer_id(identity, salt) if identity else salt + bytes(8)
        options = PeerOptions(self.peer_id, name.encode().ljust(16, b"!"), name, group, (f"{name}:1",), masters)
        self.machine = PeerMachine(options)
        self.bit = 1 << len(world.peers)
        self.masters = masters
        self.address = masters[0]
        self.connection: Connection | None = None
        self.finishes = True
        """False: an attempt ends only by `finish()`, and a fetch by `finish_sync()`."""
        self.fetching = 0  # The sync that it fetches for, or did last.
        self.running: dict[int, int] = {}  # Attempts that the data plane works on, and the result of each.
        self.sent: list[PeerMessage] = []
        self.log: list[str] = []
        self.is_alive = True
        self._tries = 0  # A timer of an earlier try to connect does nothing.
        self._call_of: dict[int, int] = {}
        self._values: dict[int, int] = {}  # By call: the committed sum.
        self._calls: dict[int, Call] = {}
        self._call_ids = itertools.count(1)

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def member_names(self) -> str:
        return "".join(member.name for member in self.machine.members)

    # --- What users do ----------------------------------------------------------------------------------------------

    def connect(self, attempts: int = 50) -> Call:
        call = self._open()
        self.handle(events.ConnectCalled(call.call_id, attempts))
        self.dial(10 * MS)
        return call

    def reduce(self, spec: CollectiveSpec | None = None) -> Call:
        return self.batch(spec or reduce_spec())[0]

    def batch(self, *specs: CollectiveSpec) -> list[Call]:
        calls = [self._open() for _ in specs]
        self.handle(events.Called(tuple(Vote(c.call_id, spec) for c, spec in zip(calls, specs, strict=True))))
        return calls

    def topology(self, kind: TopologyKind = TopologyKind.UPDATE) -> Call:
        call = self._open()
        self.handle(events.Called((Vote(call.call_id, TopologySpec(kind)),)))
        return call

    def sync(self, revision: int, text: str) -> Call:
        call = self._open()
        self.handle(events.Called((Vote(call.call_id, SyncSpec(0, revision, (state_entry(text),))),)))
        return call

    def _open(self) -> Call:
        call = Call(self, next(self._call_ids))
        self._calls[call.call_id] = call
        return call

    # --- The machine ------------------------------------------------------------------------------------------------

    def handle(self, event: events.PeerEvent) -> None:
        if not self.is_alive:
            return
        todo = self.machine.handle(event, self.world.now_ns)
        if self.world.validates:
            self.machine.validate()
        for effect in todo:
            self._perform(effect)
        if self.state is State.CLOSED:
            self.hang_up()
        self.world.arm(self, self.machine.deadline_ns(), lambda: self.handle(events.Tick()))

    def _perform(self, effect: effects.PeerEffect) -> None:
        if isinstance(effect, effects.Send):
            self.sent.append(effect.message)
            if self.connection is not None:
                self.world.send_to_master(self.connection, effect.message)
        elif isinstance(effect, effects.UseMaster):
            self.hang_up()
            self.address = self.masters[effect.index]
            self.dial(10 * MS)
        elif isinstance(effect, effects.OpenLink):
            self.world.after(LATENCY_NS, lambda: self.world.join_link(self, effect.neighbour.peer_id))
        elif isinstance(effect, effects.StartReduce):
            self._call_of[effect.attempt_id] = effect.call_id
            self.running[effect.attempt_id] = self.world.bits(effect.how.order)
            self.world.after(ATTEMPT_NS, lambda: self.finish(effect.attempt_id) if self.finishes else None)
        elif isinstance(effect, effects.EndReduce):
            value = self.running.pop(effect.attempt_id, 0)
            if effect.commit:
                self._values[self._call_of[effect.attempt_id]] = value
        elif isinstance(effect, effects.StartSync) and effect.how.fetch:
            self.fetching = effect.attempt_id
            self.world.after(ATTEMPT_NS, lambda: self.finish_sync() if self.finishes else None)
        elif isinstance(effect, (effects.Resolve, effects.Reject)):
            is_ok = isinstance(effect, effects.Resolve)
            call = self._calls[effect.call_id]
            assert not call.has_ended, f"{self.name}: a call is answered twice"
            call.ended_ns = self.world.now_ns
            call.result = self._values.get(effect.call_id, effect.value) if is_ok else effect.error  # type: ignore[union-attr]
        elif isinstance(effect, effects.Log):
            self.log.append(effect.text)
            self.world.trace(f"  {self.name}: {effect.text}")

    def finish(self, attempt_id: int | None = None) -> None:
        """The data plane finishes an attempt, or all attempts that run here."""
        for running in list(self.running) if attempt_id is None else [attempt_id]:
            if running in self.running:
                self.handle(events.ReduceDone(running, self.running[running]))

    def finish_sync(self) -> None:
        """The data plane finishes the fetch that was started last."""
        self.handle(events.FetchDone(self.fetching))

    # --- The connection ---------------------------------------------------------------------------------------------

    def dial(self, pause_ns: int) -> None:
        """Tries to connect, after a pause, until it succeeds."""
        self._tries += 1
        this_try, world = self._tries, self.world

        def happen() -> None:
            is_wanted = self.is_alive and self.state not in (State.NEW, State.CLOSED)
            if not is_wanted or self.connection is not None or self._tries != this_try:
                return
            if world.can_reach(self, self.address):
                self.connection = world.open(self)
                self.handle(events.ConnectionUp())
                if self.address in world.foreign:
                    world.after(2 * LATENCY_NS, lambda: self._hear_other_version(this_try))
                return
            if self.identity in world.revoked.get(self.address, ()):
                self.handle(events.AuthenticationRefused("its key is not allowed"))
            else:
                self.handle(events.ConnectionFailed("refused"))
            if self._tries == this_try:
                self.dial(RETRY_NS)

        world.after(pause_ns, happen)

    def _hear_other_version(self, this_try: int) -> None:
        if self._tries == this_try and self.connection is not None:
            self.handle(events.OtherVersionReceived(OTHER_VERSION))

    def lose_connection(self) -> None:
        """The connection breaks."""
        assert self.connection is not None
        self.world.break_connection(self.connection)

    def hang_up(self) -> None:
        """Closes the connection. What was sent on it arrives before the master notices the end."""
        connection, self.connection = self.connection, None
        if connection is not None and connection.is_up:
            self.world.after(LATENCY_NS + 1, lambda: self.world.tell_master(connection))


class Master:
    """The process of a master."""

    def __init__(self, world: World, address: str, machine: MasterMachine) -> None:
        self.world = world
        self.address = address
        self.machine = machine
        self.log: list[tuple[int, str]] = []
        self.sends_left: int | None = None
        """The master dies when it has sent this many messages."""

    @property
    def member_names(self) -> str:
        return "".join(peer.name for peer in self.machine.registry.order)

    def handle(self, event: events.MasterEvent) -> None:
        world = self.world
        if world.masters.get(self.address) is not self:
            return
        todo = self.machine.handle(event, world.now_ns)
        if world.validates:
            self.machine.validate()
        for effect in todo:
            if isinstance(effect, effects.Log):
                self.log.append((world.now_ns, effect.text))
                world.trace(f"  {self.address}: {effect.text}")
                continue
            for connection in effect.connections:
                if self.sends_left == 0:
                    return world.kill_master(self.address)
                self.sends_left = None if self.sends_left is None else self.sends_left - 1
                assert connection is not None, f"{effect.message} is for nobody"
                world.send_to_peer(str(connection), effect.message)
        world.check(self)
        world.arm(self, self.machine.deadline_ns(), lambda: self.handle(events.Tick()))


@dataclass
class World:
    """All masters, peers, connections and links of a scenario, and the time.

    Attributes:
        masters: the running masters, by address.
        revoked: the keys that are no longer allowed, by address.
        foreign: addresses at which something speaks another version of the protocol.
        filter: returns the message to deliver to a peer, changed or not; None drops it.
        tracer: gets a line for everything that is logged.
        validates: if True, each machine checks its invariants after every event.
    """

    masters: dict[str, Master] = field(default_factory=dict)
    peers: list[Peer] = field(default_factory=list)
    revoked: dict[str, set[str]] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    filter: Callable[[Peer, MasterMessage], MasterMessage | None] = lambda peer, message: message
    tracer: Callable[[str], None] | None = None
    validates: bool = True
    now_ns: int = 1 * SECOND

    def __post_init__(self) -> None:
        self.drop_to_peers: set[str] = set()
        """Names of peers that receive no messages from masters."""
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._connections: dict[str, Connection] = {}
        self._cut: set[tuple[str, str]] = set()
        self._broken_links: set[frozenset[str]] = set()
        self._due: dict[Peer | Master, int] = {}
        self._lists: dict[tuple[bytes, int], tuple[bytes, ...]] = {}
        self._held_back: tuple[type[PeerMessage], str, list[tuple[Connection, PeerMessage]]] | None = None

    # --- Time -------------------------------------------------------------------------------------------------------

    def after(self, delay_ns: int, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_ns + delay_ns, next(self._numbers), happen))

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        self._run_until(lambda: False, seconds)

    def until(self, condition: Callable[[], bool], seconds: float = SETTLE_S, what: str = "it") -> None:
        """Lets time pass until the condition holds. Fails if it does not within `seconds`."""
        assert self._run_until(condition, seconds), f"after {seconds} s {what} has not happened"

    def settle(self, calls: Iterable[Call], seconds: float = SETTLE_S) -> None:
        """L1: all these calls end within `seconds`."""
        calls = list(calls)
        ended = self._run_until(lambda: all(call.has_ended for call in calls), seconds)
        assert ended, f"L1: {seconds} s later, masters {self}: {[call for call in calls if not call.has_ended]}"

    def _run_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end_ns = self.now_ns + int(seconds * SECOND)
        while not condition():
            if not self._queue or self._queue[0][0] > end_ns:
                self.now_ns = end_ns
                return condition()
            self.now_ns, _, happen = heapq.heappop(self._queue)
            happen()
        return True

    def arm(self, who: Peer | Master, deadline_ns: int | None, tick: Callable[[], None]) -> None:
        """Sets the timer for the deadline of a machine, in place of the previous one."""
        if deadline_ns is None:
            self._due.pop(who, None)
            return
        due_ns = max(deadline_ns, self.now_ns)
        if self._due.get(who) == due_ns:
            return
        self._due[who] = due_ns

        def happen() -> None:
            if self._due.get(who) == due_ns:
                del self._due[who]
                tick()

        self.after(due_ns - self.now_ns, happen)

    def trace(self, text: str) -> None:
        if self.tracer is not None:
            self.tracer(f"{(self.now_ns - SECOND) / SECOND:9.3f} {text}")

    # --- Processes --------------------------------------------------------------------------------------------------

    def start_master(self, address: str, salt: int, options: MasterOptions | None = None) -> Master:
        """Starts a master. `salt` gives the first two of its 16 random bytes."""
        own_id = salt.to_bytes(2, "big") + address.encode().ljust(6, b"_")[:6] + next(self._numbers).to_bytes(8, "big")
        master = self.masters[address] = Master(self, address, start_master(own_id, options, self.now_ns))
        self.trace(f"master {address} is started")
        self.arm(master, master.machine.deadline_ns(), lambda: master.handle(events.Tick()))
        return master

    def take_over(self, address: str, salt: int) -> Master:
        """Starts a master, and waits until it leads the run that peers report to it."""
        master = self.start_master(address, salt)
        self.until(lambda: not master.machine.is_recovering, what="the take-over")
        return master

    def kill_master(self, address: str) -> None:
        """Kills the process: all its connections break, and messages in flight on them are lost."""
        self.trace(f"master {address} is killed")
        machine = self.masters.pop(address).machine
        for connection in list(self._connections.values()):
            if connection.machine is machine:
                self.break_connection(connection)

    def peer(self, name: str, masters: tuple[str, ...], identity: str = "", group: int = 0) -> Peer:
        peer = Peer(self, name, masters, identity, group)
        self.peers.append(peer)
        return peer

    def newcomer(self, name: str, masters: tuple[str, ...]) -> Peer:
        """A new peer that waits to be admitted."""
        peer = self.peer(name, masters)
        peer.connect()
        self.until(lambda: peer.state is State.PENDING)
        self.run(0.5)
        return peer

    def begin_run(self, names: str, masters: tuple[str, ...], identities: dict[str, str] | None = None) -> list[Peer]:
        """Starts a run with these members; each name is a letter."""
        peers = [self.peer(name, masters, (identities or {}).get(name, "")) for name in names]
        for peer in peers:
            peer.connect()
            wanted = State.MEMBER if peer is peers[0] else State.PENDING
            self.until(lambda peer=peer, wanted=wanted: peer.state is wanted)  # type: ignore[misc]
        self.run(0.3)
        if len(peers) > 1:
            self.admit(peers[:1], peers[1:])
        return peers

    def admit(self, voters: Iterable[Peer], joiners: Iterable[Peer]) -> None:
        """The members call update_topology, and so do joiners whose run has yielded: the joiners become members."""
        joiners = list(joiners)
        waiting = [joiner.topology() for joiner in joiners if joiner.state is State.RETURNING]
        self.run(0.2 if waiting else 0)
        self.settle([*(voter.topology() for voter in voters), *waiting])
        self.until(lambda: all(joiner.state is State.MEMBER for joiner in joiners), what=f"{joiners} become members")
        self.run(0.3)

    def kill_peer(self, peer: Peer) -> None:
        """Kills the process."""
        peer.is_alive = False
        if peer.connection is not None:
            self.break_connection(peer.connection)
        for other in self.peers:
            if other.machine.wants_link(peer.peer_id):
                other.handle(events.LinkFailed(peer.peer_id, "reset"))

    def revoke(self, address: str, peer: Peer) -> None:
        """Removes the key of a peer from the allow list of one master."""
        self.revoked.setdefault(address, set()).add(peer.identity)
        self.masters[address].handle(events.KeysRevoked({peer.identity: peer.name}))

    # --- Control connections ----------------------------------------------------------------------------------------

    def can_reach(self, peer: Peer, address: str) -> bool:
        is_up = address in self.masters or address in self.foreign
        return is_up and (peer.name, address) not in self._cut and not self._is_revoked(peer, address)

    def _is_revoked(self, peer: Peer, address: str) -> bool:
        return bool(peer.identity) and peer.identity in self.revoked.get(address, ())

    def open(self, peer: Peer) -> Connection:
        master = self.masters.get(peer.address)
        name = f"{peer.name}{next(self._numbers)}"
        connection = Connection(name, peer, peer.address, master.machine if master is not None else None)
        self._connections[name] = connection
        return connection

    def hold_back(self, what: type[PeerMessage], names: str) -> list[tuple[Connection, PeerMessage]]:
        """From now on messages of one type from these peers do not arrive; the returned list keeps them."""
        held: list[tuple[Connection, PeerMessage]] = []
        self._held_back = what, names, held
        return held

    def release(self, held: Iterable[tuple[Connection, PeerMessage]]) -> None:
        """From now on all messages arrive; these are sent now."""
        self._held_back = None
        for connection, message in held:
            self.send_to_master(connection, message)

    def send_to_master(self, connection: Connection, message: PeerMessage) -> None:
        data, peer = encode(message), connection.peer
        if self._held_back is not None:
            what, names, held = self._held_back
            if isinstance(message, what) and peer.name in names:
                return held.append((connection, message))
        if len(data) > limits.MESSAGE_BYTES_MAX:  # As libzmq does.
            self.trace(f"{peer.name} sends too large a message")
            return self.break_connection(connection)

        def arrive() -> None:
            master = self.masters.get(connection.address)
            is_there = master is not None and master.machine is connection.machine and connection.is_up
            if master is not None and is_there and not self._is_revoked(peer, connection.address):
                received = decode_peer_message(data)
                master.handle(events.PeerMessageReceived(connection.name, received, "10.0.0.1", peer.identity))

        self.after(LATENCY_NS, arrive)

    def send_to_peer(self, name: str, message: MasterMessage) -> None:
        connection = self._connections.get(name)
        if connection is None or not connection.is_up or connection.peer.name in self.drop_to_peers:
            return
        changed = self.filter(connection.peer, message)
        if changed is None:
            return
        data, peer = encode(changed), connection.peer

        def arrive() -> None:
            if connection.is_up and peer.connection is connection and peer.name not in self.drop_to_peers:
                peer.handle(events.MasterMessageReceived(decode_master_message(data)))

        self.after(LATENCY_NS, arrive)

    def break_connection(self, connection: Connection) -> None:
        """Messages in flight are lost. Both ends notice a little later, and the peer connects again."""
        connection.is_up = False

        def tell_peer() -> None:
            peer = connection.peer
            if peer.connection is connection:
                peer.connection = None
                peer.handle(events.ConnectionDown())
                if peer.connection is None:
                    peer.dial(RETRY_NS)

        self.after(NOTICE_NS, lambda: self.tell_master(connection))
        self.after(NOTICE_NS, tell_peer)

    def tell_master(self, connection: Connection) -> None:
        """The connection closes, and the master notices."""
        connection.is_up = False
        master = self.masters.get(connection.address)
        is_known = self._connections.pop(connection.name, None) is not None
        if is_known and master is not None and master.machine is connection.machine:
            master.handle(events.ConnectionClosed(connection.name))

    def cut(self, peers: Iterable[Peer], address: str) -> None:
        """Peers can no longer reach a master; their connections to it break."""
        peers = list(peers)
        self.trace(f"{''.join(peer.name for peer in peers)} cut off from {address}")
        for peer in peers:
            self._cut.add((peer.name, address))
            if peer.connection is not None and peer.connection.address == address:
                self.break_connection(peer.connection)

    def join(self, peers: Iterable[Peer], address: str) -> None:
        """The peers can reach the master again."""
        self._cut -= {(peer.name, address) for peer in peers}

    def heal(self) -> None:
        """Repairs all paths to masters, and delivers messages to all peers again."""
        self.trace("all paths are whole")
        self._cut.clear()
        self.drop_to_peers.clear()

    # --- Links ------------------------------------------------------------------------------------------------------

    def join_link(self, peer: Peer, other_id: bytes) -> None:
        """The link of two peers comes up at both ends, unless it is broken."""
        other = next((p for p in self.peers if p.peer_id == other_id and p.is_alive), None)
        if other is None or frozenset((peer.name, other.name)) in self._broken_links:
            return peer.handle(events.LinkFailed(other_id, "refused"))
        for one, far in ((peer, other), (other, peer)):
            if one.machine.wants_link(far.peer_id):
                one.handle(events.LinkUp(far.peer_id))

    def break_link(self, one: Peer, other: Peer) -> None:
        """The path between two peers stops carrying anything."""
        self._broken_links.add(frozenset((one.name, other.name)))
        for peer, far in ((one, other), (other, one)):
            peer.handle(events.LinkFailed(far.peer_id, "reset"))

    def mend_link(self, one: Peer, other: Peer) -> None:
        """The path between two peers works again."""
        self._broken_links.discard(frozenset((one.name, other.name)))
        self.join_link(one, other.peer_id)

    def bits(self, peer_ids: Iterable[bytes]) -> int:
        """One bit for each peer."""
        return sum(peer.bit for peer in self.peers if peer.peer_id in set(peer_ids))

    # --- S3 ---------------------------------------------------------------------------------------------------------

    def leading(self) -> list[Master]:
        """Masters that lead, each as far as it knows: it has a committed member list and is not recovering."""
        machines = ((master, master.machine) for master in self.masters.values())
        return [m for m, one in machines if not one.is_recovering and one.registry.order and one.registry.is_committed]

    def _followers(self, master: Master) -> list[bytes]:
        """Peers that a master leads: each is connected to it, and knows its run and term."""
        facts = master.machine.run_id, master.machine.term
        return [
            connection.peer.peer_id
            for connection in self._connections.values()
            if connection.is_up and connection.machine is master.machine and connection.peer.connection is connection
            if connection.peer.is_alive and (connection.peer.machine.run_id, connection.peer.machine.term) == facts
        ]

    def check(self, master: Master) -> None:
        """S3: no two masters each lead a quorum of a committed list of one run; an epoch has one list."""
        machine = master.machine
        if not machine.is_recovering and machine.registry.order and machine.registry.is_committed:
            order = tuple(peer.peer_id for peer in machine.registry.order)
            known = self._lists.setdefault((machine.run_id, machine.registry.epoch), order)
            assert known == order, f"S3: an epoch has two member lists: {self}"
        leading: dict[bytes, Master] = {}
        for one in self.leading():
            members = [peer.peer_id for peer in one.machine.registry.order]
            if is_quorum(self._followers(one), members):
                other = leading.setdefault(one.machine.run_id, one)
                assert other is one, f"S3: two masters lead one run: {self}"

    def check_one_leads(self) -> Master:
        """S3, once all is quiet: one master leads a run, and no other master believes that it leads it."""
        leading = self.leading()
        assert len({one.machine.run_id for one in leading}) == len(leading), f"S3: two masters lead one run: {self}"
        assert leading, f"L3: no master leads: {self}"
        return leading[0]

    def __str__(self) -> str:
        return "; ".join(
            f"{m.address} "
            + ("recovers" if m.machine.is_recovering else f"leads {m.member_names or 'nobody'}")
            + f" of {m.machine.run_id.hex()[:6]} in term {m.machine.term}"
            + ("" if m.machine.registry.is_committed else " by a list that is not committed")
            for m in self.masters.values()
        )


def check_all_go_on(world: World, peers: list[Peer], run_id: bytes) -> None:
    """L3: nobody was removed, and all of a group can reduce with each other in the old run."""
    for peer in peers:
        assert peer.state is State.MEMBER, f"{peer.name}: {peer.machine.error!r}"
        assert peer.machine.run_id == run_id
    calls = [peer.reduce() for peer in peers]
    world.settle(calls)
    sums = {group: sum(peer.bit for peer in peers if peer.group == group) for group in (peer.group for peer in peers)}
    assert [call.result for call in calls] == [sums[peer.group] for peer in peers]


def check_members(world: World, peers: Collection[Peer]) -> None:
    """L1, L2: all of these are members, and their all-reduces succeed with all of them."""
    for peer in peers:
        assert peer.state is State.MEMBER, f"{peer.name}: {peer.machine.error!r}"
    calls = [peer.reduce() for peer in peers]
    world.settle(calls)
    assert [call.result for call in calls] == [sum(peer.bit for peer in peers)] * len(peers)


def check_agreement(calls: Iterable[Call]) -> None:
    """S1: calls of one operation that succeeded have one result."""
    results = {call.result for call in calls if call.is_ok}
    assert len(results) <= 1, f"S1: one operation has several results: {results}"


def results_of(calls: Iterable[Call]) -> list[Any]:
    return [call.result for call in calls]


def two_masters(salts: tuple[int, int] = (77, 1000), addresses: tuple[str, str] = TWO) -> World:
    """A world in which both masters run, before any peers."""
    world = World()
    for address, salt in zip(addresses, salts, strict=True):
        world.start_master(address, salt)
    return world


def run_at_two(names: str, identities: dict[str, str] | None = None) -> tuple[World, list[Peer]]:
    """A run with these members, each named by one letter, that know the addresses of two masters."""
    world = two_masters()
    return world, world.begin_run(names, TWO, identities)


def leave_after_a_report(world: World, peer: Peer) -> None:
    """A member reports to the master that it reaches, and leaves before that one leads."""
    peer.sent.clear()
    world.until(lambda: any(isinstance(message, RunReport) for message in peer.sent), what="the report")
    world.run(0.1)
    peer.handle(events.CloseCalled())


def host_of_two(world: World, names: str) -> tuple[Peer, ...]:
    """The two peers of one host, each in its own group."""
    peers = [world.peer(name, ONE, group=group) for group, name in enumerate(names)]
    for peer in peers:
        peer.machine = PeerMachine(replace(peer.machine.options, host=names, host_size=2))
    return tuple(peers)


def one_master(names: str, kind: type[World] = World) -> tuple[World, list[Peer]]:
    """A run with these members, each named by one letter, that know one address."""
    world = kind()
    world.start_master(*ONE, 77)
    return world, world.begin_run(names, ONE)
