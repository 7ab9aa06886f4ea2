"""A model of the control network: connections between peers and masters, as ROUTER and DEALER sockets provide them.

Messages on one connection arrive in order, each after a random delay. Connections are independent: a message on an old
one may reach the master after the first message on a new one. When a connection breaks, a random tail of the messages
in flight is lost in each direction, and each end learns of the break after a delay of its own. A peer has a new socket
for each connection, which its session opens; the network reports socket events to the session.

A path may stall in one direction or both: messages are held. They arrive late and in order, or are lost with the
connection after the heartbeat timeout. No new connection comes up over a stalled path.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zpccl.limits import CONNECT_TIMEOUT_NS, HEARTBEAT_TIMEOUT_NS, MS, SECOND
from zpccl.protocol import events
from zpccl.protocol.messages import (
    MAGIC,
    Hello,
    MasterMessage,
    PeerMessage,
    RunReport,
    decode_peer_message,
    encode,
)
from zpccl.protocol.session import SessionEvent
from zpccl.sim.clock import Timer
from zpccl.sim.faults import BULK_NS, FAR_HANDSHAKE_NS, FAR_NS, OUTAGE_SPREAD_NS

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import SimulatedMaster, SimulatedPeer


OTHER_VERSION = MAGIC + bytes([99])


class Stream:
    """One direction of a connection."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._flights: deque[Timer] = deque()
        self.last_due_ns = 0
        self._held_until_ns = 0

    def hold(self, duration_ns: int) -> None:
        """Delays everything sent from now on until `duration_ns` have passed."""
        self._held_until_ns = max(self._held_until_ns, self._cluster.clock.now_ns + duration_ns)
        self.last_due_ns = max(self.last_due_ns, self._held_until_ns)

    def send(self, delay_ns: int, deliver: Callable[[], None]) -> None:
        """Calls `deliver` after the delay, and after everything sent before."""

        def arrive() -> None:
            self._flights.popleft()
            deliver()

        clock = self._cluster.clock
        self.last_due_ns = max(self.last_due_ns, clock.now_ns + delay_ns)
        self._flights.append(clock.at(self.last_due_ns, arrive))

    def lose(self, keep: int) -> None:
        """Drops all messages in flight but the first `keep`, and all that are held."""
        is_held = self._cluster.clock.now_ns < self._held_until_ns
        while len(self._flights) > keep or (
            is_held and self._flights and self._flights[-1].time_ns >= self._held_until_ns
        ):
            self._flights.pop().cancel()

    def __len__(self) -> int:
        return len(self._flights)


@dataclass(eq=False)
class Connection:
    """One connection to a master. `node` is None for strangers."""

    name: str
    number: int
    node: SimulatedPeer | None
    master: SimulatedMaster
    latency_ns: int
    to_master: Stream
    to_peer: Stream
    is_broken: bool = False
    is_greeted: bool = False
    """The master has received a Hello on it."""
    stalled_until_ns: int = 0
    """Until then at least one direction holds messages."""


class Network:
    """All connections to masters."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.child_rng()
        self._count = 0
        self.is_away = False
        """There is no path between any two processes."""
        self.back_ns = -(10**18)
        """When that last ended."""
        self.connections: dict[str, Connection] = {}  # Those that the master does not know to have ended.
        self._cut: dict[tuple[bytes, int], int] = {}  # By peer and master: number of cuts that are in force.
        self._revoked: set[tuple[bytes, int]] = set()  # Peers, each with a master that no longer admits its key.

    def open_socket(self, node: SimulatedPeer, index: int) -> None:
        """Opens a new socket of a peer to master number `index` of its list, and closes its old one."""
        if node.connection is not None:
            self.close(node.connection)
            node.connection = None
        node.socket_count += 1
        master = self._cluster.masters[node.list[index]]
        node.on_session(events.DialStarted())
        delay_ns = int(10 ** self._rng.uniform(0, 2) * MS)
        self._later(node, max(delay_ns, FAR_HANDSHAKE_NS if node.is_far else 0), lambda: self._reach(node, master))

    def _reach(self, node: SimulatedPeer, master: SimulatedMaster) -> None:
        """A connection attempt of a peer reaches the address of a master."""
        key, faults = (node.peer_id, master.index), self._cluster.faults
        if self.is_away or key in self._cut or not (master.is_alive or master.is_foreign):
            return node.on_session(events.DialFailed("refused"))
        if self._rng.random() < faults.refusal_chance and self._cluster.injector.strikes("refusal_chance", node):
            return self._refuse(node)
        node.on_session(events.TcpConnected())
        if master.is_foreign:
            node.on_session(events.HandshakeDone())
            self._tell(node, 20 * MS, events.DataReceived(OTHER_VERSION))
            return self._tell(node, self._rng.randrange(SECOND, 2 * SECOND), events.SocketBroke())
        if key in self._revoked:
            return node.on_session(events.HandshakeFailed(is_key_refused=True))
        connection = node.connection = self.open(node, f"{node.name}/{self._count}", master)
        node.on_session(events.HandshakeDone())
        flaps = self._rng.random() < faults.flap_chance and not self._cluster.spares(node)
        if flaps and self._cluster.injector.strikes("flap_chance", node):
            is_silent = self._rng.random() < faults.silent_chance
            self._cluster.note("connection broken", node, is_silent=is_silent)
            self.break_connection(connection, is_silent=is_silent)
        return None

    def _refuse(self, node: SimulatedPeer) -> None:
        """Fails a connection attempt: refused, or a handshake that is closed, or silent until a timeout, or endless."""
        kind = self._rng.choice(("refused", "closed", "silent", "endless"))
        if kind == "refused":
            return node.on_session(events.DialFailed("refused"))
        node.on_session(events.TcpConnected())
        if kind == "closed":
            return node.on_session(events.HandshakeFailed())
        self._cluster.note(f"{kind} handshake", node, is_silent=True)
        return self._tell(node, CONNECT_TIMEOUT_NS, events.HandshakeFailed()) if kind == "silent" else None

    def ask_mechanism(self, node: SimulatedPeer, index: int) -> None:
        """Answers that the server which broke off the handshake is gone."""
        self._tell(node, self._rng.randrange(100 * MS), events.MechanismTold(index, "", "gone"))

    def _tell(self, node: SimulatedPeer, delay_ns: int, event: SessionEvent) -> None:
        self._later(node, delay_ns, lambda: node.on_session(event))

    def _later(self, node: SimulatedPeer, delay_ns: int, happen: Callable[[], None]) -> None:
        """Calls `happen` after a delay, unless the peer has opened another socket by then."""
        count = node.socket_count
        self._cluster.clock.after(delay_ns, lambda: happen() if node.socket_count == count else None)

    def revoke(self, node: SimulatedPeer, master: SimulatedMaster) -> None:
        """Revokes the key of a peer at a master, also for restarts of that master."""
        self._revoked.add((node.peer_id, master.index))
        master.handle(events.KeysRevoked({node.identity: node.name}))
        connection = node.connection
        if connection is not None and connection.master is master:  # After what was sent to it has arrived.
            after_ns = connection.latency_ns + SECOND
            self._cluster.clock.after(after_ns, lambda: self.break_connection(connection, is_silent=False))

    def cut(self, nodes: list[SimulatedPeer], master: SimulatedMaster, *, is_silent: bool) -> None:
        """Cuts the paths between peers and a master until `join`; connections break."""
        for node in nodes:
            key = (node.peer_id, master.index)
            self._cut[key] = self._cut.get(key, 0) + 1
            if node.connection is not None and node.connection.master is master:
                self.break_connection(node.connection, is_silent=is_silent)

    def join(self, nodes: list[SimulatedPeer], master: SimulatedMaster) -> None:
        """Ends a cut."""
        for node in nodes:
            key = (node.peer_id, master.index)
            self._cut[key] = self._cut.get(key, 1) - 1
            if self._cut[key] <= 0:  # Below 0 if heal() has ended it before.
                del self._cut[key]

    def stall(self, node: SimulatedPeer, duration_ns: int, *, to_master: bool, to_peer: bool) -> None:
        """Stalls the path of a peer to its master for a while, in one direction or both."""
        connection = node.connection
        if connection is None or connection.is_broken:
            return
        master, clock = connection.master, self._cluster.clock
        for stream, is_held in ((connection.to_master, to_master), (connection.to_peer, to_peer)):
            if is_held:
                stream.hold(duration_ns)
        connection.stalled_until_ns = max(connection.stalled_until_ns, clock.now_ns + duration_ns)
        key = (node.peer_id, master.index)
        self._cut[key] = self._cut.get(key, 0) + 1
        clock.after(duration_ns, lambda: self.join([node], master))
        if duration_ns > HEARTBEAT_TIMEOUT_NS:
            clock.after(self._rng.randrange(HEARTBEAT_TIMEOUT_NS // 2, HEARTBEAT_TIMEOUT_NS), lambda: give_up())

        def give_up() -> None:
            if connection.is_broken:
                self._master_learns(connection)  # The peer has closed it; the master's heartbeat times out.
            else:
                self.break_connection(connection, is_silent=False)

    def is_sound(self, node: SimulatedPeer) -> bool:
        """True if a peer has a connection that neither end will miss soon."""
        connection = node.connection
        if connection is None or connection.is_broken or not connection.is_greeted:
            return False
        return connection.stalled_until_ns <= self._cluster.clock.now_ns

    def go_away(self, notice_ns: int) -> None:
        """Ends all paths until come_back(). All ends of connections notice that later, one soon after the other."""
        self.is_away = True
        for connection in list(self.connections.values()):
            if connection.is_broken:  # Already silent: its heartbeat times out first.
                self._cluster.clock.after(notice_ns, functools.partial(self._master_learns, connection))
            after_ns = notice_ns + self._rng.randrange(OUTAGE_SPREAD_NS)
            self.break_connection(connection, is_silent=False, after_ns=after_ns)

    def come_back(self) -> None:
        """Ends an outage of the whole network, if there is one."""
        if self.is_away:
            self.is_away, self.back_ns = False, self._cluster.clock.now_ns

    def heal(self) -> None:
        """Ends all cuts."""
        self._cut.clear()

    def open(self, node: SimulatedPeer | None, name: str, master: SimulatedMaster) -> Connection:
        """Makes a connection to a master; `node` is None for strangers."""
        self._count += 1
        is_congested = self._rng.random() < self._cluster.faults.flap_chance
        latency_ns = int(10 ** self._rng.uniform(0, 3 if is_congested else 2) * MS)
        if self._rng.random() < 0.7:  # Otherwise peers that are near each other are far from their master.
            latency_ns = self._cluster.distance_ns(latency_ns)
        latency_ns = min(latency_ns * (node.slowness if node is not None else 1), 1000 * MS)
        if node is not None and node.is_far:
            latency_ns = max(latency_ns, FAR_NS)
        connection = Connection(
            name, self._count, node, master, latency_ns, Stream(self._cluster), Stream(self._cluster)
        )
        self.connections[name] = connection
        return connection

    def send_to_master(self, connection: Connection, message: PeerMessage) -> None:
        """Sends a message of a peer; it is lost if the connection is broken."""
        if connection.is_broken:
            return
        data = encode(message)
        copies = self._copies(connection)
        self._slow_down(connection, message)

        def deliver() -> None:
            node = connection.node
            if node is not None and (node.peer_id, connection.master.index) in self._revoked:
                return
            identity = node.identity if node is not None else ""
            connection.is_greeted = connection.is_greeted or isinstance(message, Hello)
            for _ in range(copies):
                event = events.PeerMessageReceived(connection.name, decode_peer_message(data), "10.0.0.1", identity)
                connection.master.handle(event)

        connection.to_master.send(self._delay_ns(connection), deliver)

    def _slow_down(self, connection: Connection, message: PeerMessage) -> None:
        """A report may be so large that it takes seconds."""
        node, is_slow = connection.node, self._rng.random() < self._cluster.faults.bulk_chance
        if not isinstance(message, RunReport) or node is None or not is_slow or self._cluster.spares(node):
            return
        duration_ns = self._rng.randrange(BULK_NS)
        if self._cluster.injector.strikes("bulk_chance", node):
            self._cluster.note("report takes long", node, is_silent=True, duration_ns=duration_ns)
            connection.to_master.hold(duration_ns)
            connection.stalled_until_ns = max(connection.stalled_until_ns, self._cluster.clock.now_ns + duration_ns)

    def send_to_peer(self, name: object, message: MasterMessage) -> None:
        """Sends a message of a master; it is lost if the connection is broken or gone."""
        connection = self.connections.get(str(name))
        if connection is None or connection.is_broken or connection.node is None:
            return
        node, data, copies = connection.node, encode(message), self._copies(connection)

        def deliver() -> None:
            for _ in range(copies):
                if node.connection is connection:
                    node.on_session(events.DataReceived(data))

        connection.to_peer.send(self._delay_ns(connection), deliver)

    def break_connection(self, connection: Connection, *, is_silent: bool, after_ns: int = 0) -> None:
        """Breaks a connection: loses a part of the messages in flight; both ends learn of it `after_ns` or later."""
        if connection.is_broken:
            return
        connection.is_broken = True
        for stream in (connection.to_master, connection.to_peer):
            stream.lose(self._rng.randint(0, len(stream)))
        for learn in (self._master_learns, self._peer_learns):
            self._cluster.clock.after(after_ns + self._notice_ns(is_silent), functools.partial(learn, connection))

    def lose_master(self, master: SimulatedMaster) -> None:
        """Breaks all connections to a dead master; what it has not read is lost."""
        for connection in list(self.connections.values()):
            if connection.master is master:
                self.break_connection(connection, is_silent=False)
                connection.to_master.lose(0)
                del self.connections[connection.name]

    def close(self, connection: Connection) -> None:
        """Closes a connection at the peer's end; messages that it has sent arrive before the end of the connection."""
        if not connection.is_broken:
            connection.is_broken = True
            connection.to_peer.lose(0)
            end_ns = max(connection.to_master.last_due_ns, self._cluster.clock.now_ns + connection.latency_ns)
            self._cluster.clock.at(end_ns, lambda: self._master_learns(connection))

    def _master_learns(self, connection: Connection) -> None:
        connection.to_master.lose(0)
        if self.connections.pop(connection.name, None) is not None:
            connection.master.handle(events.ConnectionClosed(connection.name))

    def _peer_learns(self, connection: Connection) -> None:
        node = connection.node
        if node is not None and node.connection is connection:
            node.connection = None
            node.on_session(events.SocketBroke())

    def _notice_ns(self, is_silent: bool) -> int:
        """How long one end takes to notice a break. Even after a silent one it may learn sooner, by a TCP reset."""
        if is_silent and self._rng.random() < 0.6:
            return self._rng.randrange(HEARTBEAT_TIMEOUT_NS)
        return self._cluster.distance_ns(self._rng.randrange(50 * MS))

    def _delay_ns(self, connection: Connection) -> int:
        return connection.latency_ns + self._cluster.distance_ns(self._rng.randrange(20 * MS))

    def _copies(self, connection: Connection) -> int:
        is_doubled = self._rng.random() < self._cluster.faults.duplicate_chance
        nodes = () if connection.node is None else (connection.node,)
        return 2 if is_doubled and self._cluster.injector.strikes("duplicate_chance", *nodes) else 1
