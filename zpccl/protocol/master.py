"""The master: one state machine that coordinates a run.

It holds no tensors and does no I/O. `handle(event, now_ns)` returns what to do; `deadline_ns()` says when it wants a
Tick. Its parts share a registry of peers and an outbox:

    MasterMachine      registration, loss of peers, dispatch
      Registry         who takes part, epochs, links        (membership.py)
      Collectives      votes, plans, decisions              (collective.py)
      Rounds           topology votes, admission            (rounds.py)
      StateSyncs       election and transfer of state       (statesync.py)

After every event the master settles: it tells members of a new epoch, then lets each part look at what has become
complete. A peer is lost when its connection broke and it did not come back within the grace period, or at once when
another peer lost its link to it too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.collective import Collectives
from zpccl.protocol.effects import Level, MasterEffect
from zpccl.protocol.election import validate_entries
from zpccl.protocol.events import ConnectionClosed, KeysRevoked, MalformedReceived, MasterEvent, PeerMessageReceived
from zpccl.protocol.identity import is_peer_id_of
from zpccl.protocol.membership import Outbox, Peer, Registry, names
from zpccl.protocol.messages import (
    Answer,
    Begin,
    Finished,
    Hello,
    Kick,
    Leave,
    Linked,
    Neighbours,
    NeighboursChanged,
    PeerMessage,
    Refusal,
    Refused,
    SyncFinished,
    SyncOffer,
    TopologyVote,
    Welcome,
    Withdraw,
)
from zpccl.protocol.rounds import FUNCTION_NAMES, SYNC, Rounds, WaitingCall
from zpccl.protocol.statesync import StateSyncs


@dataclass(frozen=True)
class MasterOptions:
    """Times of the master, in nanoseconds, and what the keys of links are derived from (empty: no secret)."""

    disconnect_grace_ns: int = limits.DISCONNECT_GRACE_NS
    link_wait_ns: int = limits.LINK_WAIT_TIMEOUT_NS
    admission_wait_ns: int = limits.ADMISSION_WAIT_NS
    link_seed: bytes = field(default=b"", repr=False)


class MasterMachine:
    """The protocol of the master.

    Args:
        run_id: 16 random bytes.
        incarnation: number of this master among those of the run; attempt ids of a higher one are higher.
        options: its times.
    """

    def __init__(self, run_id: bytes, incarnation: int = 1, options: MasterOptions | None = None) -> None:
        self.run_id = run_id
        self.incarnation = incarnation
        self.options = options or MasterOptions()
        self.registry = Registry(self.options.link_seed)
        self._outbox = Outbox()
        self._attempt_count = 0
        self._announced_epoch = 0
        self._relinked: set[Peer] = set()  # Whose links may have changed, or the members that they shall lead to.
        self._complained: set[Hashable] = set()  # Connections whose malformed input is in the log.
        self.malformed_count = 0
        self.collectives = Collectives(self.registry, self._outbox, self._next_attempt_id, self.options.link_wait_ns)
        self.rounds = Rounds(self.registry, self._outbox, self.collectives, self._admit, self.options.admission_wait_ns)
        self.syncs = StateSyncs(self.registry, self._outbox, self.rounds, self._next_attempt_id)

    def handle(self, event: MasterEvent, now_ns: int) -> list[MasterEffect]:
        """Takes one event and returns what to do, in order."""
        if isinstance(event, PeerMessageReceived):
            if self._is_of_its_key(event):
                self._on_message(event, now_ns)
            else:
                self._on_malformed(MalformedReceived(event.connection, "its peer id belongs to another key"))
        elif isinstance(event, ConnectionClosed):
            self._on_connection_closed(event.connection, now_ns)
        elif isinstance(event, MalformedReceived):
            self._on_malformed(event)
        elif isinstance(event, KeysRevoked):
            self._on_keys_revoked(event, now_ns)
        else:
            self._on_tick(now_ns)
        self._settle(now_ns)
        return self._outbox.take()

    def deadline_ns(self) -> int | None:
        """When the next Tick is due, or None."""
        deadlines = [self.collectives.deadline_ns(), self.rounds.deadline_ns()]
        is_whole = len(self.registry.by_connection) == len(self.registry.peers)  # Then only joiners are waited for.
        for peer in self.registry.pending() if is_whole else self.registry.peers.values():
            if peer.disconnected_ns is not None:
                deadlines.append(peer.disconnected_ns + self.options.disconnect_grace_ns)
            elif peer.unlinked_ns is not None:
                deadlines.append(peer.unlinked_ns + self.options.link_wait_ns)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def validate(self) -> None:
        """States what always holds between events."""
        self.registry.validate()
        self.collectives.validate()
        self.rounds.validate()
        self.syncs.validate()
        assert self._announced_epoch == self.registry.epoch
        for peer in self.registry.pending():
            assert (peer.unlinked_ns is not None) == bool(self._unlinked(peer))
        assert not self.registry.pending() or self.registry.order or not self._connected_pending()

    # --- Registration and messages ----------------------------------------------------------------------------------

    def _is_of_its_key(self, event: PeerMessageReceived) -> bool:
        """True if the key of a connection may speak for the peer that the connection and the message name."""
        peer = self.registry.by_connection.get(event.connection)
        named = [peer.peer_id] if peer is not None else []
        if isinstance(event.message, Hello):
            named.append(event.message.peer_id)
        return all(is_peer_id_of(peer_id, event.identity) for peer_id in named)

    def _on_message(self, event: PeerMessageReceived, now_ns: int) -> None:
        peer = self.registry.by_connection.get(event.connection)
        message = event.message
        if isinstance(message, Hello):
            self._on_hello(event.connection, peer, message, event.host, now_ns)
        elif peer is None:
            refused = Refused(Refusal.UNREGISTERED, "say hello first")
            self._outbox.reply(event.connection, refused)
        elif isinstance(message, Linked):
            self._on_linked(peer, message, now_ns)
        elif isinstance(message, Leave):
            self._lose(peer, "left", now_ns, Level.INFO)
        elif peer.is_member:
            self._on_call(peer, message, now_ns)
        else:
            self._outbox.send(peer, Refused(Refusal.MALFORMED, f"{type(message).__name__} before admission"))

    def _on_hello(self, connection: Hashable, bound: Peer | None, hello: Hello, host: str, now_ns: int) -> None:
        known = self.registry.peers.get(hello.peer_id)
        if bound is not None and bound is not known:
            refused = Refused(Refusal.MALFORMED, "this connection belongs to another peer")
            return self._outbox.reply(connection, refused)
        if known is not None:
            if known.token != hello.token:
                self._outbox.log(Level.WARNING, f"a connection claims to be {known.name} without its token")
                return self._outbox.reply(connection, Refused(Refusal.UNKNOWN_SESSION, "wrong token"))
            if hello.connection < known.connection_count:
                return self._outbox.log(Level.DEBUG, f"{known.name} has a newer connection")
            self.registry.bind(known, connection)
            known.connection_count = hello.connection
            known.disconnected_ns = None
            known.witnesses.clear()
            return self._welcome(known)
        if hello.was_welcomed:
            reason = "this master does not know the peer: it was removed, or the master was restarted"
            return self._outbox.reply(connection, Refused(Refusal.UNKNOWN_SESSION, reason))
        if len(self.registry.pending()) >= limits.PENDING_PEERS_MAX or len(self.registry.peers) >= limits.PEERS_MAX:
            return self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
        peer = Peer(
            peer_id=hello.peer_id,
            group=hello.group,
            name=hello.name,
            addresses=with_seen_address(hello.addresses, host),
            token=hello.token,
            registered_ns=now_ns,
            connection=connection,
            connection_count=hello.connection,
        )
        self.registry.add(peer)
        self._outbox.log(Level.INFO, f"{peer.name} registered for group {peer.group}")
        self._relinked.add(peer)
        self._welcome(peer)
        for other in self._others_of_group(peer):  # Who came later dials.
            newcomer = self.registry.as_neighbour(peer, other, dial=False)
            self._outbox.send(other, NeighboursChanged(joined=(newcomer,)))

    def _welcome(self, peer: Peer) -> None:
        self._outbox.send(peer, Welcome(self.run_id, self.incarnation))
        if peer.is_member:
            self._outbox.send(peer, self.registry.member_list())
        self._outbox.send(peer, Neighbours(self.registry.neighbours_of(peer)))

    def _on_linked(self, peer: Peer, message: Linked, now_ns: int) -> None:
        linked = self.registry.link_bits(message.peers)
        gone = self.registry.peers_of_bits(peer.linked & ~linked)
        peer.linked = linked
        peer.witnesses.clear()
        self._relinked.update(self.registry.pending() if peer.is_member else (peer,))
        for other in self.registry.peers_of_bits(linked):
            other.witnesses.discard(peer.peer_id)
        for other in gone:
            # Only members bear witness, and only of a link that both ends had.
            if not peer.is_member or other.group != peer.group or not other.linked >> peer.slot & 1:
                continue
            other.witnesses.add(peer.peer_id)
            if other.disconnected_ns is not None:
                self._lose(other, f"lost its connections to the master and to {peer.name}", now_ns)
        self.collectives.on_links_changed(now_ns)

    def _on_call(self, peer: Peer, message: PeerMessage, now_ns: int) -> None:
        if isinstance(message, Begin):
            self._forget_answers(peer, message.oldest_call_id)
            for call in message.calls:
                if self._accept_call(peer, call.call_id, call.spec, now_ns):
                    self.collectives.begin(peer, call.call_id, call.spec, now_ns)
        elif isinstance(message, Finished):
            self.collectives.finished(peer, message)
        elif isinstance(message, TopologyVote):
            self._forget_answers(peer, message.oldest_call_id)
            if self._accept_call(peer, message.call_id, message.kind, now_ns):
                self.rounds.vote(peer, WaitingCall(message.call_id, FUNCTION_NAMES[message.kind]))
        elif isinstance(message, SyncOffer):
            self._on_sync_offer(peer, message, now_ns)
        elif isinstance(message, SyncFinished):
            self.syncs.finished(peer, message)
        elif isinstance(message, Withdraw):
            self._on_withdraw(peer, message)

    def _on_sync_offer(self, peer: Peer, offer: SyncOffer, now_ns: int) -> None:
        self._forget_answers(peer, offer.oldest_call_id)
        if not self._accept_call(peer, offer.call_id, SYNC, now_ns) or self.syncs.is_running(peer, offer.call_id):
            return
        problem = validate_entries(offer.entries)
        if problem and offer.call_id not in peer.answers:
            return self._outbox.answer(
                peer, Answer(offer.call_id, Result.INVALID_ARGUMENT, reason=problem[: limits.TEXT_CHARS_MAX])
            )
        self.rounds.vote(peer, WaitingCall(offer.call_id, SYNC, offer))

    def _on_withdraw(self, peer: Peer, message: Withdraw) -> None:
        call_id = message.call_id
        if call_id in peer.answers:
            self._outbox.send(peer, peer.answers[call_id])
        elif call_id in peer.open_calls:
            found = (
                self.collectives.withdraw(peer, call_id)
                or self.rounds.withdraw(peer, call_id)
                or self.syncs.withdraw(peer, call_id)
            )
            assert found, "an open call that no part knows"
        elif call_id >= peer.oldest_call_id:  # Its vote got lost; it will not be sent again.
            self._outbox.answer(peer, Answer(call_id, Result.RANK_CONNECTION_LOST, reason="withdrawn"))

    def _accept_call(self, peer: Peer, call_id: int, call: Hashable, now_ns: int) -> bool:
        """False for calls that were answered and taken note of, and for peers that break their bounds."""
        if peer.peer_id not in self.registry.peers or call_id < peer.oldest_call_id:
            return False
        if call_id in peer.answers:
            return True
        if call_id not in peer.open_calls and len(peer.open_calls) >= limits.CALLS_IN_FLIGHT_MAX:
            reason = f"more than {limits.CALLS_IN_FLIGHT_MAX} calls without an answer"
        elif peer.open_calls.setdefault(call_id, call) != call:
            reason = f"call id {call_id} was used for two calls"
        else:
            return True
        self._kick(peer, Result.INVALID_USAGE, reason, now_ns)
        return False

    @staticmethod
    def _forget_answers(peer: Peer, oldest_call_id: int) -> None:
        if oldest_call_id > peer.oldest_call_id:
            peer.oldest_call_id = oldest_call_id
            for call_id in [call_id for call_id in peer.answers if call_id < oldest_call_id]:
                del peer.answers[call_id]

    def _on_malformed(self, event: MalformedReceived) -> None:
        self.malformed_count += 1
        if event.connection not in self._complained and len(self._complained) < limits.PEERS_MAX:
            self._complained.add(event.connection)
            peer = self.registry.by_connection.get(event.connection)
            sender = peer.name if peer is not None else "a stranger"
            self._outbox.log(Level.WARNING, f"malformed message from {sender}: {event.reason}")
        self._outbox.reply(event.connection, Refused(Refusal.MALFORMED, event.reason[: limits.TEXT_CHARS_MAX]))

    # --- Loss of peers ----------------------------------------------------------------------------------------------

    def _on_connection_closed(self, connection: Hashable, now_ns: int) -> None:
        self._complained.discard(connection)
        peer = self.registry.by_connection.get(connection)
        if peer is None:
            return
        self.registry.bind(peer, None)
        peer.disconnected_ns = now_ns
        witnesses = [other for other in self.registry.members(peer.group) if other.peer_id in peer.witnesses]
        if witnesses:
            self._lose(peer, f"lost its connections to the master and to {names(witnesses)}", now_ns)

    def _on_keys_revoked(self, event: KeysRevoked, now_ns: int) -> None:
        for peer in list(self.registry.peers.values()):
            for identity, name in event.names.items():
                if is_peer_id_of(peer.peer_id, identity):
                    reason = f"its key, {name}, is no longer allowed"
                    self._kick(peer, Result.MASTER_CONNECTION_FAILED, reason, now_ns)
                    break

    def _on_tick(self, now_ns: int) -> None:
        for peer in list(self.registry.peers.values()):
            if peer.disconnected_ns is not None:
                if now_ns - peer.disconnected_ns >= self.options.disconnect_grace_ns:
                    self._lose(peer, "lost its connection to the master", now_ns)
            elif peer.unlinked_ns is not None and now_ns - peer.unlinked_ns >= self.options.link_wait_ns:
                reason = f"no data connection to {names(self._unlinked(peer))}"
                self._kick(peer, Result.RANK_CONNECTION_FAILED, reason, now_ns)
        self.collectives.tick(now_ns)
        self.rounds.tick(now_ns)

    def _kick(self, peer: Peer, result: Result, reason: str, now_ns: int) -> None:
        self._outbox.send(peer, Kick(result, reason[: limits.TEXT_CHARS_MAX]))
        self._lose(peer, f"removed: {reason}", now_ns)

    def _lose(self, peer: Peer, reason: str, now_ns: int, level: Level = Level.WARNING) -> None:
        was = "member" if peer.is_member else "pending peer"
        self.registry.remove(peer)
        self._outbox.log(level, f"{was} {peer.name} {reason}")
        self._announce_epoch(now_ns)
        self._outbox.broadcast(self._others_of_group(peer), NeighboursChanged(gone=(peer.peer_id,)))

    # --- Settling ---------------------------------------------------------------------------------------------------

    def _settle(self, now_ns: int) -> None:
        if not self.registry.order:
            for peer in self._connected_pending()[:1]:  # An empty run admits at once.
                self._outbox.log(Level.INFO, f"epoch {self.registry.epoch + 1}: admitting {peer.name} to an empty run")
                self._admit([peer], now_ns)
        self.rounds.evaluate(now_ns)
        self.syncs.evaluate()
        for peer in self._relinked:
            if peer.is_member or not self._is_unlinked(peer):
                peer.unlinked_ns = None
            elif peer.unlinked_ns is None:
                peer.unlinked_ns = now_ns
        self._relinked.clear()

    def _connected_pending(self) -> list[Peer]:
        return [peer for peer in self.registry.pending() if peer.connection is not None]

    def _is_unlinked(self, peer: Peer) -> bool:
        """True if the peer lacks a link to a member of its group."""
        return any(
            other.group == peer.group and other is not peer and not self.registry.are_linked(peer, other)
            for other in self.registry.order
        )

    def _unlinked(self, peer: Peer) -> list[Peer]:
        members = self.registry.members(peer.group)
        return [other for other in members if other is not peer and not self.registry.are_linked(peer, other)]

    def _admit(self, peers: list[Peer], now_ns: int) -> None:
        for peer in peers:
            peer.unlinked_ns = None
        self.registry.admit(peers)
        self._announce_epoch(now_ns)

    def _announce_epoch(self, now_ns: int) -> None:
        if self._announced_epoch == self.registry.epoch:
            return
        self._announced_epoch = self.registry.epoch
        self._relinked.update(self.registry.pending())
        self._outbox.broadcast(self.registry.order, self.registry.member_list())
        self.collectives.on_members_changed(now_ns)
        self.syncs.on_members_changed()

    def _others_of_group(self, peer: Peer) -> list[Peer]:
        """All others of a peer's group, pending ones too."""
        return [other for other in self.registry.peers.values() if other.group == peer.group and other is not peer]

    def _next_attempt_id(self) -> int:
        self._attempt_count += 1
        return (self.incarnation << 32) | self._attempt_count


def with_seen_address(addresses: tuple[str, ...], host: str) -> tuple[str, ...]:
    """The peer's own addresses, then the one that the master sees, with the port of the first."""
    if not addresses or not host:
        return addresses
    port = addresses[0].rpartition(":")[2]
    seen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return addresses if seen in addresses else (*addresses[: limits.ADDRESSES_PER_PEER_MAX - 1], seen)
