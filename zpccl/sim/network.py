"""The control network: connections between peers and masters, as ROUTER and DEALER sockets give them.

Messages on one connection come in order, each after a random delay; connections know nothing of each other, so what
was sent on an old one may come to the master after the first message of a new one. When a connection breaks, the tail
of what is in flight is lost in each direction, and each end learns of it in its own time. A peer has a socket for each
connection, which its session opens; the network tells the session what becomes of it.

A path may stall in one direction or in both: what is sent there is held. It comes late, in order, or is lost with the
connection when one end has heard nothing for too long. No new connection is made over a path that stalls.
"""

from __future__ import annotations

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
    decode_peer_message,
    encode,
)
from zpccl.protocol.session import SessionEvent
from zpccl.sim.clock import Timer
from zpccl.sim.faults import FAR_NS

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster
    from zpccl.sim.node import MasterNode, PeerNode


OTHER_VERSION = MAGIC + bytes([99])


class Stream:
    """One direction of a connection."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._flights: deque[Timer] = deque()
        self.last_due_ns = 0
        self._held_until_ns = 0

    def hold(self, duration_ns: int) -> None:
        """What is sent from now on arrives after `duration_ns` at the earliest."""
        self._held_until_ns = max(self._held_until_ns, self._cluster.clock.now_ns + duration_ns)
        self.last_due_ns = max(self.last_due_ns, self._held_until_ns)

    def send(self, delay_ns: int, deliver: Callable[[], None]) -> None:
        """Calls `deliver` after the delay, and after all that was sent before."""

        def arrive() -> None:
            self._flights.popleft()
            deliver()

        clock = self._cluster.clock
        self.last_due_ns = max(self.last_due_ns, clock.now_ns + delay_ns)
        self._flights.append(clock.at(self.last_due_ns, arrive))

    def lose(self, keep: int) -> None:
        """Loses all that is in flight but the first `keep` messages; and what is held."""
        is_held = self._cluster.clock.now_ns < self._held_until_ns
        while len(self._flights) > keep or (
            is_held and self._flights and self._flights[-1].time_ns >= self._held_until_ns
        ):
            self._flights.pop().cancel()

    def __len__(self) -> int:
        return len(self._flights)


@dataclass(eq=False)
class Connection:
    """One connection to the master. `node` is None for strangers."""

    name: str
    number: int
    node: PeerNode | None
    master: MasterNode
    latency_ns: int
    to_master: Stream
    to_peer: Stream
    is_broken: bool = False
    is_greeted: bool = False
    """The master has got a Hello on it."""
    stalled_until_ns: int = 0
    """Until when it holds what is sent on it, in one direction at least."""


class Network:
    """All connections to masters."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.child_rng()
        self._count = 0
        self.connections: dict[str, Connection] = {}  # Those that the master may still send on.
        self._cut: dict[tuple[bytes, int], int] = {}  # Paths that are cut, and how many times: peer and master.
        self._revoked: set[tuple[bytes, int]] = set()  # Whose key a master does not allow any more.

    def open_socket(self, node: PeerNode, index: int) -> None:
        """A peer connects to a master of its list, with a socket in place of the one it had."""
        if node.connection is not None:
            self.close(node.connection)
            node.connection = None
        node.socket_count += 1
        master = self._cluster.masters[node.list[index]]
        node.on_session(events.DialStarted())
        delay_ns = int(10 ** self._rng.uniform(0, 2) * MS)
        self._later(node, max(delay_ns, 4 * FAR_NS if node.is_far else 0), lambda: self._reach(node, master))

    def _reach(self, node: PeerNode, master: MasterNode) -> None:
        """What a peer finds at the address of a master."""
        key, faults = (node.peer_id, master.index), self._cluster.faults
        if key in self._cut or not (master.is_alive or master.is_foreign):
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

    def _refuse(self, node: PeerNode) -> None:
        """Nobody listens; or somebody breaks off the handshake, at once or after a silence, or talks without end."""
        kind = self._rng.choice(("refused", "closed", "silent", "endless"))
        if kind == "refused":
            return node.on_session(events.DialFailed("refused"))
        node.on_session(events.TcpConnected())
        if kind == "closed":
            return node.on_session(events.HandshakeFailed())
        self._cluster.note(f"{kind} handshake", node, is_silent=True)
        return self._tell(node, CONNECT_TIMEOUT_NS, events.HandshakeFailed()) if kind == "silent" else None

    def ask_mechanism(self, node: PeerNode, index: int) -> None:
        """Who broke off a handshake is gone."""
        self._tell(node, self._rng.randrange(100 * MS), events.MechanismTold(index, "", "gone"))

    def _tell(self, node: PeerNode, delay_ns: int, event: SessionEvent) -> None:
        self._later(node, delay_ns, lambda: node.on_session(event))

    def _later(self, node: PeerNode, delay_ns: int, happen: Callable[[], None]) -> None:
        """Something becomes of the socket that a peer has now, if it has that one still."""
        count = node.socket_count
        self._cluster.clock.after(delay_ns, lambda: happen() if node.socket_count == count else None)

    def revoke(self, node: PeerNode, master: MasterNode) -> None:
        """A master allows the key of a peer no more, nor does any that is started in its place."""
        self._revoked.add((node.peer_id, master.index))
        master.handle(events.KeysRevoked({node.identity: node.name}))
        connection = node.connection
        if connection is not None and connection.master is master:  # When what was sent to it has come.
            after_ns = connection.latency_ns + SECOND
            self._cluster.clock.after(after_ns, lambda: self.break_connection(connection, is_silent=False))

    def cut(self, nodes: list[PeerNode], master: MasterNode, *, is_silent: bool) -> None:
        """Cuts the paths between peers and a master until `join`; connections break."""
        for node in nodes:
            key = (node.peer_id, master.index)
            self._cut[key] = self._cut.get(key, 0) + 1
            if node.connection is not None and node.connection.master is master:
                self.break_connection(node.connection, is_silent=is_silent)

    def join(self, nodes: list[PeerNode], master: MasterNode) -> None:
        """Takes a cut back."""
        for node in nodes:
            key = (node.peer_id, master.index)
            self._cut[key] = self._cut.get(key, 1) - 1
            if self._cut[key] <= 0:  # Or it was taken back before, and heal() was first.
                del self._cut[key]

    def stall(self, node: PeerNode, duration_ns: int, *, to_master: bool, to_peer: bool) -> None:
        """The path of a peer to its master carries nothing for a while: in one direction, or in both."""
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
                self._master_learns(connection)  # The peer has closed it, of which the master has not heard.
            else:
                self.break_connection(connection, is_silent=False)

    def heal(self) -> None:
        """No path is cut any more."""
        self._cut.clear()

    def open(self, node: PeerNode | None, name: str, master: MasterNode) -> Connection:
        """A new connection."""
        self._count += 1
        is_congested = self._rng.random() < self._cluster.faults.flap_chance
        latency_ns = int(10 ** self._rng.uniform(0, 3 if is_congested else 2) * MS)
        latency_ns = min(latency_ns * (node.slowness if node is not None else 1), 1000 * MS)
        if node is not None and node.is_far:
            latency_ns = max(latency_ns, FAR_NS)
        connection = Connection(
            name, self._count, node, master, latency_ns, Stream(self._cluster), Stream(self._cluster)
        )
        self.connections[name] = connection
        return connection

    def send_to_master(self, connection: Connection, message: PeerMessage) -> None:
        """Sends what a peer says. Lost if the connection is broken."""
        if connection.is_broken:
            return
        data = encode(message)
        copies = self._copies(connection)

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

    def send_to_peer(self, name: object, message: MasterMessage) -> None:
        """Sends what the master says. Lost if the connection is broken or gone."""
        connection = self.connections.get(str(name))
        if connection is None or connection.is_broken or connection.node is None:
            return
        node, data, copies = connection.node, encode(message), self._copies(connection)

        def deliver() -> None:
            for _ in range(copies):
                if node.connection is connection:
                    node.on_session(events.DataReceived(data))

        connection.to_peer.send(self._delay_ns(connection), deliver)

    def break_connection(self, connection: Connection, *, is_silent: bool) -> None:
        """Breaks a connection: what is in flight is lost in part, and the ends learn of it later."""
        if connection.is_broken:
            return
        connection.is_broken = True
        for stream in (connection.to_master, connection.to_peer):
            stream.lose(self._rng.randint(0, len(stream)))
        self._cluster.clock.after(self._notice_ns(is_silent), lambda: self._master_learns(connection))
        self._cluster.clock.after(self._notice_ns(is_silent), lambda: self._peer_learns(connection))

    def lose_master(self, master: MasterNode) -> None:
        """A master is dead: every connection to it breaks, and what it has not read is lost."""
        for connection in list(self.connections.values()):
            if connection.master is master:
                self.break_connection(connection, is_silent=False)
                connection.to_master.lose(0)
                del self.connections[connection.name]

    def close(self, connection: Connection) -> None:
        """The peer closes a connection: what it has sent arrives before the end does."""
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
        """How long one end takes to notice; of a silent break one end may learn sooner, by a reset."""
        return self._rng.randrange(HEARTBEAT_TIMEOUT_NS if is_silent and self._rng.random() < 0.6 else 50 * MS)

    def _delay_ns(self, connection: Connection) -> int:
        return connection.latency_ns + self._rng.randrange(20 * MS)

    def _copies(self, connection: Connection) -> int:
        is_doubled = self._rng.random() < self._cluster.faults.duplicate_chance
        nodes = () if connection.node is None else (connection.node,)
        return 2 if is_doubled and self._cluster.injector.strikes("duplicate_chance", *nodes) else 1
