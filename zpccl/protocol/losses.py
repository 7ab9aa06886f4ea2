"""When a disconnected peer is lost, as the master sees it.

A peer is lost when its connection broke and it did not reconnect within its grace period. It is lost at once if members
lost their links to it at about the same time, unless they or the peer had been disconnected shortly before. A far peer
has a longer grace period, because its handshake takes longer. If all members of a run with one address disconnect at
about the same time, the master assumes that its own network is broken. It does so, too, if all are disconnected when it
takes the run over. Lost links are then no sign of a loss: they may have the same cause.

    network   all members disconnect at once   a message   all members are connected   disconnected members are lost
    UP        DOWN [1]                         -           -                           after their grace periods
    DOWN      -                                BACK        UP                          never
    BACK      - [2]                            -           UP                          some time after it came back [3]

    [1] BACK if another peer is connected: a pending peer, or a member of an earlier run that is back. [2] DOWN when a
    connection closes, even a stranger's, and neither members nor such other peers are connected. [3] Or after they
    disconnected again or sent Hello, if that was later.
"""

from __future__ import annotations

import enum

from zpccl import limits
from zpccl.protocol.membership import Peer, Registry


class NetworkState(enum.Enum):
    """What the master assumes about its own network."""

    UP = "up"
    DOWN = "down"
    BACK = "back"


def reconnect_grace_ns(handshake_ms: int, least_ns: int) -> int:
    """How long a peer with handshakes this long may be disconnected before it is lost."""
    needed_ns = limits.RECONNECT_GRACE_HANDSHAKES * handshake_ms * limits.MS
    return max(least_ns, min(needed_ns, limits.RECONNECT_GRACE_MAX_NS))


class Losses:
    """The times after which disconnected peers are lost.

    Args:
        registry: all peers of the run.
        grace_ns: how long a near peer may be disconnected.
        recovery_wait_ns: how long members that have to find the master again may be disconnected.
    """

    def __init__(self, registry: Registry, grace_ns: int, recovery_wait_ns: int) -> None:
        self.network = NetworkState.UP
        self._registry = registry
        self._grace_ns = grace_ns
        self._recovery_wait_ns = recovery_wait_ns
        self._longest_grace_ns = 0
        self._back_ns = 0
        self._last_loss_ns: int | None = None

    def note_handshake(self, peer: Peer, handshake_ms: int) -> None:
        """Peers that are far away get more time to reconnect."""
        peer.handshake_ms = handshake_ms
        self._longest_grace_ns = max(self._longest_grace_ns, self._grace_of(peer))

    def _grace_of(self, peer: Peer) -> int:
        return reconnect_grace_ns(peer.handshake_ms, self._grace_ns)

    def on_message(self, now_ns: int) -> None:
        """A message has come, from any sender."""
        if self.network is NetworkState.DOWN:
            self._enter_back(now_ns)

    def _enter_back(self, now_ns: int) -> None:
        self.network, self._back_ns = NetworkState.BACK, now_ns

    def on_closed(self, *, is_anyone_here: bool) -> None:
        """Any connection has closed: messages that came on it no longer show that the network works."""
        if self.network is NetworkState.BACK and not is_anyone_here:
            self.network = NetworkState.DOWN

    def on_disconnected(self, peer: Peer, now_ns: int, *, is_anyone_here: bool) -> bool:
        """A peer that knows no other master has disconnected. True if all members have, at about the same time."""
        members = self._registry.order
        is_last = peer.is_member and all(member.connection is None for member in members)
        if self.network is not NetworkState.UP or not is_last:
            return False
        last_ns = self._last_loss_ns
        if len(members) <= 1 and (last_ns is None or now_ns - last_ns >= limits.CUT_OFF_SPREAD_NS):
            return False
        self.network = NetworkState.DOWN
        if is_anyone_here:
            self._enter_back(now_ns)
        return True

    def on_lost(self, now_ns: int) -> None:
        """A member that had not sent Leave was lost."""
        self._last_loss_ns = now_ns

    def settle(self) -> bool:
        """To be called after every event. True once after all members have connected again."""
        if self.network is NetworkState.UP or any(peer.connection is None for peer in self._registry.order):
            return False
        self.network = NetworkState.UP
        return True

    def loss_ns(self, peer: Peer, *, may_be_elsewhere: bool) -> int | None:
        """When a disconnected peer is lost; None while that is not known.

        Args:
            may_be_elsewhere: the peer may still be connected to the former master, and come when that one steps down.
        """
        assert peer.disconnected_ns is not None
        recovery_wait_ns = max(self._recovery_wait_ns, self._longest_grace_ns)
        if self.network is not NetworkState.UP and peer.is_member:
            if self.network is NetworkState.DOWN:
                return None
            # A member that is cut off again, or that has sent Hello and must report, gets the whole time for that.
            return max(self._back_ns, peer.disconnected_ns) + recovery_wait_ns
        if may_be_elsewhere:
            wait_ns = limits.CUT_OFF_WAIT_NS if self._is_linked(peer) else limits.QUORUM_WAIT_NS
            return peer.disconnected_ns + max(recovery_wait_ns, wait_ns)
        return peer.disconnected_ns + (self._grace_of(peer) if peer.has_reported else recovery_wait_ns)

    def is_given_up(self, peer: Peer, *, may_be_elsewhere: bool) -> bool:
        """True if lost links show that a disconnected peer is lost. One lost link is enough for a near peer
        that cannot be at another master; otherwise all its links must be lost.

        One link to a far host may break together with its connection to the master. A peer may be disconnected because
        it is at another master. If a process dies, all its links break. False for members while the network is not UP.
        """
        if self.network is not NetworkState.UP and peer.is_member:
            return False
        is_near = self._grace_of(peer) <= self._grace_ns
        return (is_near and not may_be_elsewhere) or not self._is_linked(peer)

    def is_witness(self, peer: Peer, lost: Peer) -> bool:
        """True if a member has lost its link to a disconnected peer, and that is a sign that the peer is lost.

        It is no sign if the link was lost long before, if the member is disconnected itself, or if one of the two had
        been disconnected shortly before: one cause may have broken all connections, and a peer may notice only
        PATH_TIMEOUT later that a link of it broke.
        """
        assert lost.disconnected_ns is not None
        said_ns, spread_ns = lost.witnesses.get(peer.peer_id), limits.CUT_OFF_SPREAD_NS
        if peer.connection is None or said_ns is None or said_ns + spread_ns < lost.disconnected_ns:
            return False
        back_ns = max((each.back_ns for each in (peer, lost) if each.back_ns is not None), default=None)
        return back_ns is None or back_ns + limits.WITNESS_AFTER_NS <= lost.disconnected_ns

    def _is_linked(self, peer: Peer) -> bool:
        """True if another member has a link to this one."""
        others = (other for other in self._registry.members(peer.group) if other is not peer)
        return any(other.linked >> peer.slot & 1 for other in others)
