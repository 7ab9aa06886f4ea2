"""The master: one state machine that coordinates a run.

It holds no tensors and does no I/O. `handle(event, now_ns)` returns what to do; `deadline_ns()` says when it wants a
Tick. Its parts share a registry of peers and an outbox:

    MasterMachine      registration, loss of peers, dispatch
      Registry         who takes part, epochs, links        (membership.py)
      Paths            which rings the links allow          (paths.py)
      Operations       from votes to decisions              (operation.py)
      Collectives      agreement, plans, results            (kinds/collective.py)
      Rounds           topology calls, admission            (kinds/topology.py)
      StateSyncs       election and transfer of state       (kinds/sync.py)
      Stragglers       who does not vote                    (stragglers.py)
      TakeOver         what the reports of peers tell       (takeover.py, recovery.py)
      Leader           which master decides                 (leadership.py)

After every event the master settles: it tells members of a new epoch, then lets each part look at what has become
complete. A peer is lost when its connection broke and it did not come back within the grace period, or at once when
another peer lost its link to it too. When all members are gone at once, rather the master was cut off: it waits for
them until it hears of anybody, and some seconds longer.

A master that may be replacing another one recovers first, as a candidate (leadership.py): it asks members of an earlier
run for their reports, and lets newcomers wait. Once it is elected it adopts the run: the same members in a new epoch
of its term, what was running and what was decided. Members that have not reported then are waited for a while longer.
A peer that reports says all that stands again when it is welcomed, so nothing else is kept of what is said before.

    | state      | a quorum reports | a newcomer, nobody else | a higher promise | the rest is no quorum |
    |------------|------------------|-------------------------|------------------|-----------------------|
    | RECOVERING | LEADING          | LEADING, a new run      | RECOVERING       | RECOVERING            |
    | LEADING    | -                | registers it            | RECOVERING       | RECOVERING            |

A master that steps down forgets everything and is like one just started. In a new run that has decided nothing reports
of an earlier one are collected as well: when a quorum of that one is here, the new one yields.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.counts import Counts, LossReason
from zpccl.protocol.effects import Level, MasterEffect
from zpccl.protocol.events import ConnectionClosed, KeysRevoked, MalformedReceived, MasterEvent, PeerMessageReceived
from zpccl.protocol.identity import is_peer_id_of
from zpccl.protocol.kinds.collective import Collectives
from zpccl.protocol.kinds.sync import StateSyncs
from zpccl.protocol.kinds.topology import Rounds
from zpccl.protocol.leadership import Candidate, Leader, MemberList, Promise
from zpccl.protocol.membership import Outbox, Peer, Registry, Standing, names, reconnect_grace_ns
from zpccl.protocol.messages import (
    NO_ID,
    Acknowledgement,
    Hello,
    Kick,
    Leave,
    Linked,
    MembersCommitted,
    Neighbours,
    NeighboursChanged,
    PeerMessage,
    Ready,
    Refusal,
    Refused,
    RunReport,
    Welcome,
)
from zpccl.protocol.operation import Operations
from zpccl.protocol.paths import Paths
from zpccl.protocol.recovery import History
from zpccl.protocol.stragglers import Stragglers
from zpccl.protocol.takeover import TakeOver

_LEFT = "left"
"""The reason of a loss, in the log."""


@dataclass(frozen=True)
class MasterOptions:
    """Times of the master, in nanoseconds, and what the keys of links are derived from (empty: no secret)."""

    disconnect_grace_ns: int = limits.DISCONNECT_GRACE_NS
    link_wait_ns: int = limits.LINK_WAIT_TIMEOUT_NS
    admission_wait_ns: int = limits.ADMISSION_WAIT_NS
    link_seed: bytes = field(default=b"", repr=False)
    recovery_grace_ns: int = limits.RECOVERY_GRACE_NS
    recovery_wait_ns: int = limits.RECOVERY_WAIT_NS
    straggler_timeout_ns: int | None = None
    """A member whose vote others wait for longer than this is removed; None: nobody is, for that."""


class MasterMachine:
    """The protocol of the master.

    Args:
        run_id: 16 random bytes.
        term: number of this master among those of the run; attempt ids and epochs of a higher one are higher.
        options: its times.
    """

    def __init__(self, run_id: bytes, term: int = 0, options: MasterOptions | None = None) -> None:
        self._own_id = self.run_id = run_id
        self.options = options or MasterOptions()
        self.counts = Counts()
        self._outbox = Outbox(self.counts)
        self._attempt_count = 0
        self._generation = 0
        self._leadership_count = 0
        self._recovery: Candidate | None = None
        self._complained: set[Hashable] = set()  # Connections whose malformed input is in the log.
        self.malformed_count = 0
        self._forget_run()
        self.number(term)

    def _forget_run(self) -> None:
        """Knows nothing of any run any more."""
        options = self.options
        self._generation += 1
        self.registry = Registry(options.link_seed)
        self._history: History | None = None  # Of a run that was taken over.
        self._earlier: Candidate | None = None  # Collects reports of an earlier run, while this one may yield to it.
        self._masters: _MasterList | None = None
        self._masters_ns = 0  # When somebody last came with that list.
        # Changes of the member list that must wait until the adopted one is committed, one for each peer.
        self._deferred: dict[bytes, Callable[[int], object]] = {}
        self._asked: set[Hashable] = set()  # Connections of peers whose report is due, after it was taken over.
        self._dismissed: dict[Hashable, _Dismissed] = {}  # By connection.
        self._announced_epoch = 0
        self._longest_grace_ns = 0  # Of the peer that takes longest to connect.
        self._last_loss_ns: int | None = None  # Of a member, against its will.
        self._is_alone = False  # All members were gone at once, and not all are back.
        self._heard_ns: int | None = None  # When it heard of anybody after that.
        self._relinked: set[Peer] = set()  # Whose links may have changed, or the members that they shall lead to.
        self.paths = Paths(self.registry)
        how = (self.registry, self._outbox, self.paths)
        self.operations = Operations(self.registry, self._outbox, self._next_attempt_id, self._kick)
        self.collectives = Collectives(*how, self.operations, options.link_wait_ns)
        self.rounds = Rounds(*how, self.operations, self._admit, options.admission_wait_ns)
        self.syncs = StateSyncs(*how, self.operations, options.link_wait_ns)
        self._stragglers = Stragglers(self.registry, self._outbox, self.operations)
        self._takeover = TakeOver(self.registry, self._outbox, self.operations, self.rounds, self.syncs, self._kick)

    def number(self, term: int) -> None:
        """Sets the term of a master that leads no run yet, should it begin one. Epochs follow it."""
        assert not self.registry.peers
        self.term = term
        self._leader = Leader(Promise(term, self._draw_leader()), needs_quorum=False)
        self._undecided = self._decision_count()
        self.registry.epoch = self._announced_epoch = term << limits.EPOCH_BITS

    @property
    def generation(self) -> int:
        """Grows whenever it forgets what it knew of a run."""
        return self._generation

    @property
    def is_alone(self) -> bool:
        """True while members are waited for who were all gone at once."""
        return self._is_alone

    @property
    def is_recovering(self) -> bool:
        """True until it knows which run it leads."""
        return self._recovery is not None

    def recover(self, now_ns: int, begin_ns: int = 0) -> None:
        """Looks for peers of an earlier master before it begins a new run. To be called before the first event."""
        assert not self.registry.peers
        options = self.options
        grace_ns, wait_ns = options.recovery_grace_ns, options.recovery_wait_ns
        self._recovery = Candidate(now_ns, grace_ns, wait_ns, self._draw_promise(), self.run_id, begin_ns)

    def _draw_leader(self) -> bytes:
        """Another one for each leadership that this master may have."""
        self._leadership_count += 1
        count = self._leadership_count.to_bytes(8, "big")
        return hashlib.blake2b(self._own_id + count, digest_size=16).digest()

    def _draw_promise(self) -> Promise:
        return Promise(self._term_after(self.term), self._draw_leader())

    def handle(self, event: MasterEvent, now_ns: int) -> list[MasterEffect]:
        """Takes one event and returns what to do, in order."""
        self._outbox.now_ns = now_ns
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
        if self._recovery is not None:
            return self._recovery.deadline_ns()
        deadlines = [self.operations.deadline_ns(), self._stragglers.deadline_ns()]
        deadlines.append(self._earlier.deadline_ns() if self._earlier is not None else None)
        is_whole = len(self.registry.by_connection) == len(self.registry.peers)  # Then only joiners are waited for.
        for peer in self.registry.pending() if is_whole else self.registry.peers.values():
            if peer.disconnected_ns is not None:
                deadlines.append(self._loss_ns(peer) if self._may_be_lost(peer) else None)
            elif peer.unlinked_ns is not None:
                deadlines.append(peer.unlinked_ns + self.options.link_wait_ns)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def stragglers(self, now_ns: int | None = None) -> tuple[tuple[str, str, int], ...]:
        """Members whose vote others have waited for longer than STRAGGLER_WARNING.

        Args:
            now_ns: the time; None: that of the last event.

        Returns:
            For each and each operation: its name, the operation, and for how long others have waited, in nanoseconds.
        """
        return self._stragglers.stragglers(self._outbox.now_ns if now_ns is None else now_ns)

    def standing(self, connection: Hashable) -> Standing:
        """Who is at the other end of a connection."""
        peer = self.registry.by_connection.get(connection)
        if peer is not None:
            return Standing.MEMBER if peer.is_member else Standing.PENDING
        is_known = any(c is not None and c.knows(connection) for c in (self._recovery, self._earlier))
        is_expected = is_known or connection in self._asked or connection in self._dismissed
        return Standing.EXPECTED if is_expected else Standing.STRANGER

    def validate(self) -> None:
        """States what always holds between events."""
        self.registry.validate()
        self.operations.validate()
        assert self._announced_epoch == self.registry.epoch
        for peer in self.registry.pending():
            assert (peer.unlinked_ns is not None) == self._is_unlinked(peer)
        assert not self.registry.pending() or self.registry.order or not self._connected_pending()

    # --- Registration and messages ----------------------------------------------------------------------------------

    def _is_of_its_key(self, event: PeerMessageReceived) -> bool:
        """True if the key of a connection may speak for the peer that the connection and the message name."""
        peer = self.registry.by_connection.get(event.connection)
        named = [peer.peer_id] if peer is not None else []
        if isinstance(event.message, (Hello, RunReport)):
            hello = event.message.hello if isinstance(event.message, RunReport) else event.message
            named.append(hello.peer_id)
        return all(is_peer_id_of(peer_id, event.identity) for peer_id in named)

    def _on_message(self, event: PeerMessageReceived, now_ns: int) -> None:
        if self._is_alone and self._heard_ns is None:
            self._heard_ns = now_ns
        if self._recovery is not None:
            return self._on_early_message(self._recovery, event, now_ns)
        peer = self.registry.by_connection.get(event.connection)
        if self._earlier is not None and peer is None and self._earlier.knows(event.connection):
            return self._on_early_message(self._earlier, event, now_ns)
        message = event.message
        if isinstance(message, Hello):
            self._on_hello(event, peer, message, now_ns)
        elif isinstance(message, RunReport):
            self._on_report(event, message, now_ns)
        elif peer is None and event.connection in self._dismissed:
            self._on_dismissed(event.connection, message, now_ns)
        elif peer is None:
            if event.connection not in self._asked:  # Else it says all this again when its report is here.
                self._outbox.reply(event.connection, Refused(Refusal.UNREGISTERED, "say hello first"))
        elif isinstance(message, Linked):
            self._on_linked(peer, message, now_ns)
        elif isinstance(message, Ready):
            peer.is_ready = True
        elif isinstance(message, Leave):
            self._lose(peer, _LEFT, now_ns, Level.INFO, has_left=True)
        elif isinstance(message, Acknowledgement) and peer.is_member:
            self._on_acknowledgement(peer, message, now_ns)
        elif peer.is_member:
            self.operations.on_message(peer, message, now_ns)
        else:  # It was a member, was removed, and registered anew before it read of its first admission.
            self._refuse_session(event.connection)

    def _on_hello(self, event: PeerMessageReceived, bound: Peer | None, hello: Hello, now_ns: int) -> None:
        connection, known = event.connection, self.registry.peers.get(hello.peer_id)
        if known is not None and self._is_ahead(known, hello):
            self._step_down(f"{hello.name} has promised itself to another master", now_ns)
            return self._on_message(dataclasses.replace(event, message=hello), now_ns)
        if bound is None and known is None and self._may_yield_to(hello):
            return self._on_earlier(event, now_ns)
        if bound is not None and bound is not known:
            refused = Refused(Refusal.MALFORMED, "this connection belongs to another peer")
            return self._outbox.reply(connection, refused)
        is_itself = known is not None and known.has_reported and known.token == hello.token
        if known is not None and is_itself and hello.connection < known.connection_count:
            return self._outbox.log(Level.DEBUG, f"{known.name} has a newer connection")
        if self._owes_report(known, hello):
            return self._expect_report(connection, known, hello, now_ns)
        if known is not None:
            if not is_itself:
                text = f"a connection claims to be {known.name} without its token"
                self._outbox.log(Level.WARNING, text, of_stranger=True)
                return self._outbox.reply(connection, Refused(Refusal.UNKNOWN_SESSION, "wrong token"))
            self.registry.bind(known, connection)
            known.connection_count = hello.connection
            known.disconnected_ns = None
            self._note_handshake(known, hello)
            known.is_ready = known.is_ready or hello.is_ready
            known.witnesses.clear()
            return self._welcome(known)
        if hello.is_member:
            return self._refuse_session(connection)
        if self._has_other_masters(connection, hello):
            return None
        if len(self.registry.pending()) >= limits.PENDING_PEERS_MAX or len(self.registry.peers) >= limits.PEERS_MAX:
            return self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
        peer = self._register(connection, hello, event.host)
        ahead = "" if peer.is_ready else ", and fetches state ahead"
        self._outbox.log(Level.INFO, f"{peer.name} registered for group {peer.group}{ahead}")
        self._welcome(peer)
        for other in self._others_of_group(peer):  # Who came later dials.
            newcomer = self.registry.as_neighbour(peer, other, dial=False)
            self._outbox.send(other, NeighboursChanged(joined=(newcomer,)))
        return None

    def _has_our_promise(self, hello: Hello) -> bool:
        return Promise.of(hello) == self._leader.promise

    def _is_ahead(self, known: Peer, hello: Hello) -> bool:
        """True for a member of this master that has promised itself to a leadership which may have begun by now."""
        is_itself = known.is_member and known.token in (b"", hello.token) and hello.run_id == self.run_id
        is_credible = self.term <= hello.promised <= limits.TERM_MAX - limits.TERM_STEP_MAX
        return is_itself and is_credible and not self._has_our_promise(hello)

    def _owes_report(self, known: Peer | None, hello: Hello) -> bool:
        """True for a peer of the run that was led by another master last: what it knows may be news here."""
        if self._history is None or hello.run_id != self.run_id:
            return False
        if known is None:
            return hello.is_member and hello.promised < self.term
        return not known.has_reported or (hello.is_member and not self._has_our_promise(hello))

    def _expect_report(self, connection: Hashable, known: Peer | None, hello: Hello, now_ns: int) -> None:
        if known is not None and known.token not in (b"", hello.token):
            return self._refuse_session(connection)
        if known is not None and not known.token:  # The first sign of life: there is time for its report.
            known.token, known.disconnected_ns = hello.token, now_ns
        if len(self._asked) < limits.PEERS_MAX:
            self._asked.add(connection)
        return self._ask_for_report(connection)

    def _has_other_masters(self, connection: Hashable, hello: Hello) -> bool:
        """True for a newcomer that was given another list of masters than the others. It is told so."""
        theirs = _MasterList(hello.masters, hello.master_index)
        is_old = self._recovery is not None and self._outbox.now_ns - self._masters_ns > limits.RUN_MEMORY_NS
        if self._masters is None or is_old or self._masters.agrees(theirs):
            self._masters = None if is_old else self._masters
            return False
        reason = (
            f"this peer was given {theirs.text}, the others of the run {self._masters.text}; "
            "all peers need the same list of masters in the same order"
        )
        self._outbox.log(Level.WARNING, f"{hello.name} is refused: {reason}", of_stranger=True)
        self._outbox.reply(connection, Refused(Refusal.OTHER_MASTERS, reason[: limits.TEXT_CHARS_MAX]))
        return True

    def _note_masters(self, hello: Hello) -> None:
        """The list of masters belongs to the run: with several, only a quorum may go on."""
        self._masters_ns = self._outbox.now_ns
        if self._masters is None:
            self._masters = _MasterList(hello.masters, hello.master_index)
            self._leader.needs_quorum = self._masters.count > 1

    def _register(self, connection: Hashable, hello: Hello, host: str) -> Peer:
        self._note_masters(hello)
        peer = Peer(
            peer_id=hello.peer_id,
            group=hello.group,
            name=hello.name,
            addresses=with_seen_address(hello.addresses, host),
            token=hello.token,
            connection=connection,
            connection_count=hello.connection,
            is_ready=hello.is_ready,
        )
        self._note_handshake(peer, hello)
        self.registry.add(peer)
        self._relinked.add(peer)
        return peer

    def _note_handshake(self, peer: Peer, hello: Hello) -> None:
        """Who is far away may take long to come back."""
        peer.handshake_ms = hello.handshake_ms
        self._longest_grace_ns = max(self._longest_grace_ns, self._grace_ns(peer))

    def _grace_ns(self, peer: Peer) -> int:
        return reconnect_grace_ns(peer.handshake_ms, self.options.disconnect_grace_ns)

    def _refuse_session(self, connection: Hashable) -> None:
        reason = "this master does not know the peer: it was removed, or the master was restarted too late"
        is_final = self._recovery is None and self.registry.is_committed
        run_id, epoch = (self.run_id, self.registry.epoch) if is_final else (NO_ID, 0)
        self._outbox.reply(connection, Refused(Refusal.UNKNOWN_SESSION, reason, run_id, epoch=epoch))

    def _welcome(self, peer: Peer) -> None:
        self._outbox.send(peer, Welcome(self.run_id, *self._leader.promise))
        if peer.is_member:
            self._outbox.send(peer, self.registry.member_list())
        self._outbox.send(peer, Neighbours(self.registry.neighbours_of(peer)))

    def _on_linked(self, peer: Peer, message: Linked, now_ns: int) -> None:
        linked = self.registry.link_bits(message.peers)
        gone = self.registry.peers_of_bits(peer.linked & ~linked)
        if peer.is_member:  # Of joiners, those who get on have time: in a large group links take longer than one wait.
            for other in self.registry.peers_of_bits(linked & ~peer.linked):
                if other.group == peer.group and other.unlinked_ns is not None:
                    other.unlinked_ns = now_ns
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
            if other.disconnected_ns is not None and self._is_given_up(other):
                self._lose(other, f"lost its connections to the master and to {peer.name}", now_ns)
        self.operations.on_links_changed(now_ns)

    def _on_acknowledgement(self, peer: Peer, message: Acknowledgement, now_ns: int) -> None:
        """A member has accepted a list. Once it is committed, the members need not report those before it."""
        if message.epoch >> limits.EPOCH_BITS != self.term:
            return
        peer.is_following = True
        if self._leader.acknowledge(peer.peer_id, message.epoch):
            self._on_members_committed(now_ns)

    def _on_members_committed(self, now_ns: int) -> None:
        self.registry.old_members = ()
        deferred, self._deferred = self._deferred, {}
        self._outbox.broadcast(self.registry.order, MembersCommitted(self.registry.epoch))
        dismissed, self._dismissed = self._dismissed, {}
        for connection, gone in dismissed.items():
            self._outbox.reply(connection, gone.kick)
        for change in deferred.values():
            change(now_ns)
        self.operations.on_members_changed(now_ns)

    def _on_malformed(self, event: MalformedReceived) -> None:
        self.malformed_count += 1
        if event.connection not in self._complained and len(self._complained) < limits.PEERS_MAX:
            self._complained.add(event.connection)
            peer = self.registry.by_connection.get(event.connection)
            sender = peer.name if peer is not None else "a stranger"
            text = f"malformed message from {sender}: {event.reason}"
            self._outbox.log(Level.WARNING, text, of_stranger=peer is None)
        self._outbox.reply(event.connection, Refused(Refusal.MALFORMED, event.reason[: limits.TEXT_CHARS_MAX]))

    # --- Loss of peers ----------------------------------------------------------------------------------------------

    def _on_connection_closed(self, connection: Hashable, now_ns: int) -> None:
        self._complained.discard(connection)
        self._asked.discard(connection)
        if self._recovery is not None:
            return self._recovery.on_connection_closed(connection)
        if self._earlier is not None:
            self._earlier.on_connection_closed(connection)
        if self._dismissed.pop(connection, None) is not None and not self._may_go_on():
            return self._step_down("one that was removed has not confirmed it, and the rest may be no quorum", now_ns)
        peer = self.registry.by_connection.get(connection)
        if peer is None:
            return
        self.registry.bind(peer, None)
        peer.disconnected_ns = now_ns
        if peer.is_member and self._is_cut_off(now_ns):
            self._outbox.log(Level.WARNING, "all members are gone; rather it is this master that is cut off")
            self._is_alone = True
            self._heard_ns = now_ns if self._connected_pending() else None
        witnesses = [other for other in self.registry.members(peer.group) if other.peer_id in peer.witnesses]
        if witnesses and self._is_given_up(peer):
            self._lose(peer, f"lost its connections to the master and to {names(witnesses)}", now_ns)

    def _is_given_up(self, peer: Peer) -> bool:
        """True if members have lost their links to a peer that is away: to a near one any, to a far one all.

        One link to a far host may break just when the connection to the master does; of a process that died, all break.
        """
        is_near = self._grace_ns(peer) <= self.options.disconnect_grace_ns
        others = (other for other in self.registry.members(peer.group) if other is not peer)
        return is_near or not any(other.linked >> peer.slot & 1 for other in others)

    def _on_keys_revoked(self, event: KeysRevoked, now_ns: int) -> None:
        for peer in list(self.registry.peers.values()):
            for identity, name in event.names.items():
                if is_peer_id_of(peer.peer_id, identity):
                    reason = f"its key, {name}, is no longer allowed"
                    self._kick(peer, Result.MASTER_CONNECTION_FAILED, reason, now_ns)
                    break

    def _on_tick(self, now_ns: int) -> None:
        registry = self.registry
        for peer in list(self.registry.peers.values()):
            if peer.disconnected_ns is not None:
                loss_ns = self._loss_ns(peer)
                if loss_ns is not None and now_ns >= loss_ns and self._may_be_lost(peer):
                    what = "lost its connection to the master" if peer.has_reported else "did not find the new master"
                    self._lose(peer, what, now_ns)
                    if self.registry is not registry:
                        return  # It has stepped down.
            elif peer.unlinked_ns is not None and now_ns - peer.unlinked_ns >= self.options.link_wait_ns:
                if not self._is_unlinked(peer):
                    continue  # Whom it could not reach is gone, just now.
                reason = f"no data connection to {names(self._unlinked(peer))}"
                self._kick(peer, Result.RANK_CONNECTION_FAILED, reason, now_ns)
        for peer, reason in self.operations.tick(now_ns):
            if not self._kick(peer, Result.RANK_CONNECTION_FAILED, reason, now_ns):
                self.operations.wait_again(now_ns)
        for peer, reason in self._stragglers.tick(now_ns, self.options.straggler_timeout_ns):
            self._kick(peer, Result.RANK_CONNECTION_LOST, reason, now_ns)

    def _may_be_lost(self, peer: Peer) -> bool:
        """False for a member whose loss must wait for the list to be committed, as those who are here can do it."""
        return not peer.is_member or self._leader.may_change or not self._may_lose(peer)

    def _loss_ns(self, peer: Peer) -> int | None:
        """When a peer whose connection broke is lost; None while there is no saying."""
        assert peer.disconnected_ns is not None
        recovery_wait_ns = max(self.options.recovery_wait_ns, self._longest_grace_ns)
        if self._is_alone and peer.is_member:
            return None if self._heard_ns is None else self._heard_ns + recovery_wait_ns
        if self._leader.needs_quorum and not (peer.has_reported and peer.is_following):
            return peer.disconnected_ns + max(recovery_wait_ns, limits.QUORUM_WAIT_NS)
        return peer.disconnected_ns + (self._grace_ns(peer) if peer.has_reported else recovery_wait_ns)

    def _kick(self, peer: Peer, result: Result, reason: str, now_ns: int) -> bool:
        """Removes a peer. False if the others may not go on without it.

        A member that is here acknowledges the list without it like others, and is told when that is committed.
        """
        if peer.is_member and not self._leader.may_change:
            self._deferred.setdefault(peer.peer_id, lambda then_ns: self._kick_if_here(peer, result, reason, then_ns))
            return True
        connection, kick = peer.connection, Kick(result, reason[: limits.TEXT_CHARS_MAX])
        if self._leader.needs_quorum and connection is not None and peer.is_member and peer.has_reported:
            self._dismissed[connection] = _Dismissed(peer.peer_id, kick)
        elif not self._may_lose(peer):
            self._outbox.log(Level.WARNING, f"{peer.name} is not removed, the others are no quorum: {reason}")
            return False
        else:
            self._outbox.send(peer, kick)
        self._lose(peer, f"removed: {reason}", now_ns)
        return True

    def _kick_if_here(self, peer: Peer, result: Result, reason: str, now_ns: int) -> None:
        if self.registry.peers.get(peer.peer_id) is peer:
            self._kick(peer, result, reason, now_ns)

    def _may_lose(self, peer: Peer) -> bool:
        """True if those who are connected, without `peer`, may go on."""
        return not peer.is_member or self._may_go_on(without=peer)

    def _may_go_on(self, without: Peer | None = None) -> bool:
        """True if those who are connected may, and those who are to confirm that they are removed."""
        here = [p.peer_id for p in self.registry.order if p.connection is not None and p is not without]
        return self._leader.may_go_on([*here, *(gone.peer_id for gone in self._dismissed.values())])

    def _on_dismissed(self, connection: Hashable, message: PeerMessage, now_ns: int) -> None:
        """One that the list does not name any more acknowledges it, or leaves. All else does not count."""
        peer_id = self._dismissed[connection].peer_id
        if isinstance(message, Leave):
            del self._dismissed[connection]
        if (isinstance(message, Leave) and self._leader.on_left(peer_id)) or (
            isinstance(message, Acknowledgement) and self._leader.acknowledge(peer_id, message.epoch)
        ):
            self._on_members_committed(now_ns)

    def _tell_dismissed(self, connection: Hashable) -> None:
        """Members of the old list that have reported here, and are in the adopted one no more."""
        self._outbox.reply(connection, Welcome(self.run_id, *self._leader.promise))
        self._outbox.reply(connection, self.registry.member_list())

    def _is_cut_off(self, now_ns: int) -> bool:
        """True if nobody is connected of several members, who were lost at about the same time.

        They are waited for then, without end while nobody at all is heard. Where there are other masters, they may have
        gone there, and this one steps down soon.
        """
        if self._leader.needs_quorum or self._is_alone or any(p.connection is not None for p in self.registry.order):
            return False
        last_ns = self._last_loss_ns
        return len(self.registry.order) > 1 or (last_ns is not None and now_ns - last_ns < limits.CUT_OFF_SPREAD_NS)

    def _lose(
        self, peer: Peer, reason: str, now_ns: int, level: Level = Level.WARNING, *, has_left: bool = False
    ) -> None:
        """A peer takes part no more. `has_left`: by its own word, so it takes part nowhere else."""
        if self.registry.peers.get(peer.peer_id) is not peer:
            return
        if not has_left and not self._may_lose(peer):
            return self._step_down(f"the rest may be no quorum: {peer.name} {reason}", now_ns)
        if peer.is_member and not self._leader.may_change:
            self.registry.bind(peer, None)
            peer.disconnected_ns = now_ns
            self._deferred[peer.peer_id] = lambda then_ns: self._lose(peer, reason, then_ns, level, has_left=has_left)
            if has_left and self._leader.on_left(peer.peer_id):
                self._on_members_committed(now_ns)
            return
        if peer.is_member and not has_left:
            self._last_loss_ns = now_ns
        self.counts.losses[_loss_reason(peer, reason)] += 1
        was = "member" if peer.is_member else "pending peer"
        self.registry.remove(peer)
        self._outbox.log(level, f"{was} {peer.name} {reason}")
        self._announce_epoch(now_ns)
        if has_left and peer.is_member and self._leader.on_left(peer.peer_id):
            self._on_members_committed(now_ns)
        self._outbox.broadcast(self._others_of_group(peer), NeighboursChanged(gone=(peer.peer_id,)))

    # --- Settling ---------------------------------------------------------------------------------------------------

    def _settle(self, now_ns: int) -> None:
        if self._earlier is not None:
            self._settle_earlier(self._earlier, now_ns)
        if self._recovery is not None:
            if not self._recovery.is_over(now_ns):
                return self._turn_away(self._recovery, now_ns)
            candidate, self._recovery = self._recovery, None
            self._adopt(candidate, now_ns)
            if self.is_recovering:
                return
        self.operations.answer_withdrawals()
        if not self.registry.order:
            for peer in self._connected_pending()[:1]:  # An empty run admits at once, ready or not: nobody has state.
                self._outbox.log(Level.INFO, f"epoch {self.registry.epoch + 1}: admitting {peer.name} to an empty run")
                self._admit([peer], now_ns)
        if self._is_alone and all(peer.connection is not None for peer in self.registry.order):
            self._is_alone = False
        self.operations.evaluate(now_ns)
        for peer in self._relinked:
            if peer.is_member or not self._is_unlinked(peer):
                peer.unlinked_ns = None
            elif peer.unlinked_ns is None:
                peer.unlinked_ns = now_ns
        self._relinked.clear()
        self._stragglers.settle(now_ns, self.options.straggler_timeout_ns)

    def _connected_pending(self) -> list[Peer]:
        return [peer for peer in self.registry.pending() if peer.connection is not None]

    def _is_unlinked(self, peer: Peer) -> bool:
        """True if the peer lacks a link to a member of its group, and no ring can do without it."""
        lacks_one = any(
            other.group == peer.group and not self.registry.are_linked(peer, other) for other in self.registry.order
        )
        return lacks_one and not self.paths.can_join(self.registry.members(peer.group), peer)

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
        self.operations.forget_lost()
        self._relinked.update(self.registry.pending())
        if self._leader.list.epoch != self.registry.epoch:
            self._propose()
        self._outbox.broadcast(self.registry.order, self.registry.member_list())
        for connection in self._dismissed:
            self._outbox.reply(connection, self.registry.member_list())
        self.operations.on_members_changed(now_ns)

    def _propose(self) -> None:
        """The member list is a new one."""
        self._leader.propose(self.registry.epoch, (peer.peer_id for peer in self.registry.order))
        self.registry.parent = self._leader.list.parent
        self.registry.old_members = tuple(sorted(self._leader.list.old_members))

    def _others_of_group(self, peer: Peer) -> list[Peer]:
        """All others of a peer's group, pending ones too."""
        return [other for other in self.registry.peers.values() if other.group == peer.group and other is not peer]

    def _next_attempt_id(self) -> int:
        self._attempt_count += 1
        return (self.term << limits.EPOCH_BITS) | self._attempt_count

    # --- Taking a run over ------------------------------------------------------------------------------------------

    def _step_down(self, reason: str, now_ns: int) -> None:
        """Another master may lead the run. Those who are still here report anew, to this one or to another."""
        self._outbox.log(Level.WARNING, f"stepping down: {reason}")
        peers = list(self.registry.by_connection.items())
        self._begin_anew()
        self.recover(now_ns, now_ns + limits.RUN_MEMORY_NS)
        assert self._recovery is not None
        for connection, peer in peers:
            if peer.is_member:
                self._recovery.on_greeted(connection, now_ns)
                self._ask_for_report(connection)
            else:
                self._outbox.reply(connection, Refused(Refusal.UNREGISTERED, "say hello again"))

    def _begin_anew(self) -> None:
        """Like a master that was just started, but for its term."""
        self._forget_run()
        self.run_id = hashlib.blake2b(self._own_id + self._generation.to_bytes(8, "big"), digest_size=16).digest()
        self.number(self._term_after(self.term))

    def _term_after(self, term: int) -> int:
        """Numbers of one that hardly anybody heard of must not be given again: so they do not follow closely."""
        salt = (int.from_bytes(self._own_id[:2], "big") + self._generation) % limits.TERM_STEP_MAX
        return min(term + 1 + salt, limits.TERM_MAX)

    def _turn_away(self, candidate: Candidate, now_ns: int) -> None:
        for connection, is_run_here in candidate.take_turned_away(now_ns):
            if is_run_here:
                refused = Refused(Refusal.NO_QUORUM, "too few members of the run have found this master")
            else:
                refused = Refused(Refusal.NO_RUN, "no run is here", self.run_id)
            self._outbox.reply(connection, refused)

    def _ask_for_report(self, connection: Hashable, candidate: Candidate | None = None) -> None:
        reason = "another master has taken the run over, and must know first what you know"
        candidate = candidate or self._recovery
        promise = self._leader.promise if candidate is None else candidate.promise
        self._outbox.reply(connection, Refused(Refusal.REPORT, reason, NO_ID, *promise))

    def _raise_above(self, candidate: Candidate, hello: Hello) -> bool:
        """True if a peer has promised itself to another leadership, so this one takes a higher term and asks all."""
        if hello.promised > limits.TERM_MAX - limits.TERM_STEP_MAX or not candidate.is_below(hello):
            return False
        for connection in candidate.raise_term(self._term_after(hello.promised)):
            self._ask_for_report(connection, candidate)
        return True

    def _on_early_message(self, candidate: Candidate, event: PeerMessageReceived, now_ns: int) -> None:
        """While reports are collected. What stands is said again to a Welcome, so the rest may be dropped here."""
        message, connection = event.message, event.connection
        if isinstance(message, Hello):
            self._on_early_hello(candidate, event, message, now_ns)
        elif isinstance(message, RunReport) and not is_plausible(message):
            self._refuse_session(connection)
        elif isinstance(message, RunReport):
            hello = message.hello
            if Promise.of(hello) != candidate.promise:  # It answers an earlier request.
                self._raise_above(candidate, hello)
            elif not candidate.add(event, message, now_ns):
                self._refuse_session(connection)
        elif isinstance(message, Leave):
            candidate.on_left(connection)
        elif not candidate.knows(connection):
            self._outbox.reply(connection, Refused(Refusal.UNREGISTERED, "say hello first"))
        for summoned in candidate.summon():
            self._ask_for_report(summoned, candidate)

    def _on_early_hello(self, candidate: Candidate, event: PeerMessageReceived, hello: Hello, now_ns: int) -> None:
        connection = event.connection
        if hello.is_member or candidate.is_summoned(connection):
            if candidate.rebind(event, hello):
                return  # Its report is here; it gets its Welcome with the others.
            if hello.is_member:
                candidate.on_greeted(connection, now_ns)
            if not self._raise_above(candidate, hello):
                self._ask_for_report(connection, candidate)
        elif self._has_other_masters(connection, hello):
            return
        elif not candidate.hold(event, now_ns):
            self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
        else:
            self._note_masters(hello)

    def _may_yield_to(self, hello: Hello) -> bool:
        """True for a member of an earlier run, while the one that began here has decided nothing."""
        is_of_other_run = hello.is_member and hello.run_id not in (NO_ID, self.run_id)
        return is_of_other_run and self._history is None and not self._has_decided()

    def _decision_count(self) -> int:
        counts = self.counts
        ended = counts.commits + sum(counts.aborts.values()) + counts.syncs_committed + counts.syncs_aborted
        rounds = self.registry.round - self._history.round if self._history is not None else 0
        return self._attempt_count + ended + rounds

    def _has_decided(self) -> bool:
        """True once anything was decided for members of the run that it leads, beside the end of the run before."""
        return self._decision_count() > self._undecided

    def _on_earlier(self, event: PeerMessageReceived, now_ns: int) -> None:
        """A member of an earlier run comes: its report is collected beside the run that has just begun."""
        if self._earlier is None:
            grace_ns, wait_ns = self.options.recovery_grace_ns, self.options.recovery_wait_ns
            self._earlier = Candidate(now_ns, grace_ns, wait_ns, self._draw_promise(), self.run_id)
        self._on_early_message(self._earlier, event, now_ns)

    def _settle_earlier(self, earlier: Candidate, now_ns: int) -> None:
        """Yields to an earlier run whose quorum is back, or refuses its members once something is decided here."""
        if self._has_decided():
            self._earlier = None
            for connection in earlier.connections():
                self._refuse_session(connection)
        elif earlier.is_over(now_ns):
            connections = list(self.registry.by_connection)
            self._outbox.log(Level.WARNING, "the run that began here yields to an earlier one, whose members are back")
            self._begin_anew()
            self._recovery = earlier
            reason = "the run yields to an earlier one, whose members are back"
            for connection in connections:
                self._outbox.reply(connection, Refused(Refusal.YIELDED, reason))

    def _adopt(self, candidate: Candidate, now_ns: int) -> None:
        """The reports are here: goes on with the run that they are of. Without any, a new run begins."""
        if candidate.chosen is not None:
            self._restore(candidate, candidate.chosen, now_ns)
        else:  # Who was asked as a member of a list, and is left alone, is a newcomer.
            for event, _ in candidate.reports.values():
                self._outbox.reply(event.connection, Refused(Refusal.UNREGISTERED, "say hello again"))
        for event in candidate.held.values():
            assert isinstance(event.message, Hello)
            self._on_hello(event, None, event.message, now_ns)

    def _restore(self, candidate: Candidate, run_id: bytes, now_ns: int) -> None:
        reports = [report for _, report in candidate.reports.values()]
        history = self._history = History(run_id, reports)
        self.run_id, self.term = run_id, candidate.promise.term
        self._masters = None
        self._leader = Leader(candidate.promise, needs_quorum=False, adopted=history.adopted)
        self._note_masters(next(report.hello for report in reports if report.hello.run_id == run_id))
        self.counts.takeovers += 1
        for member in history.members:
            absent = Peer(member.peer_id, member.group, member.name, (), b"", None)
            absent.has_reported, absent.disconnected_ns = False, now_ns
            self.registry.add(absent)
            self.registry.admit([absent])
        self.registry.old_members = tuple(sorted(history.adopted.old_members))
        self.registry.epoch = self.term << limits.EPOCH_BITS
        self._outbox.log(
            Level.INFO,
            f"taking over the run of {len(history.members)} members from {len(reports)} reports, in term {self.term}",
        )
        for event, report in candidate.reports.values():
            self._accept_report(event, report, now_ns)
        self._announced_epoch = self.registry.epoch
        for peer_id in candidate.left:
            self._leader.on_left(peer_id)
        self._propose()
        self._takeover.apply_round(history)
        for peer in list(self.registry.peers.values()):
            if peer.has_reported:
                self._welcome(peer)
        for connection in self._dismissed:
            self._tell_dismissed(connection)
        self._takeover.apply(history, now_ns)
        self._undecided = self._decision_count()
        for peer_id in candidate.left:
            if peer_id in self.registry.peers:
                self._lose(self.registry.peers[peer_id], _LEFT, now_ns, Level.INFO, has_left=True)
        self._relinked.update(self.registry.pending())

    def _on_report(self, event: PeerMessageReceived, report: RunReport, now_ns: int) -> None:
        """A peer reports when the run has been taken over already."""
        hello, history = report.hello, self._history
        known = self.registry.peers.get(hello.peer_id)
        bound = self.registry.by_connection.get(event.connection)
        if history is None or (known is not None and known.has_reported) or bound is not None:
            return self._on_hello(event, bound, hello, now_ns)
        if not self._has_our_promise(hello):
            return self._on_hello(event, bound, hello, now_ns)
        if hello.run_id != self.run_id or not is_plausible(report):
            return self._refuse_session(event.connection)
        if known is None and not self._leader.may_change and event.connection in self._asked:
            if len(self._deferred) < limits.PEERS_MAX:
                self._deferred[hello.peer_id] = lambda then_ns: self._on_late_report(event, report, then_ns)
            return None
        self._asked.discard(event.connection)
        peer = self._accept_report(event, report, now_ns)
        if peer is None:
            return self._tell_dismissed(event.connection) if event.connection in self._dismissed else None
        knows_later = known is not None and self._knows_later(report, history)
        history.add(report)
        self._takeover.apply_round(history)
        if self.registry.epoch != self._announced_epoch:
            self._propose()  # Before anybody hears of the list.
        self._welcome(peer)
        for other in self._others_of_group(peer):  # Where it listens, and who dials, may be news to them.
            self._outbox.send(other, Neighbours(self.registry.neighbours_of(other)))
        self._relinked.update(self.registry.pending())
        self._takeover.apply(history, now_ns)
        if knows_later:
            self._remove_former(report, history, now_ns)
        self._announce_epoch(now_ns)
        self.operations.on_members_changed(now_ns)

    def _knows_later(self, report: RunReport, history: History) -> bool:
        """True if a member knows of a later list than the adopted one, while nothing is decided by that.

        With several masters a quorum would have known of it.
        """
        return not (self._leader.needs_quorum or self._has_decided() or report.epoch <= history.adopted.epoch)

    def _remove_former(self, report: RunReport, history: History, now_ns: int) -> None:
        """The former master had removed members of the adopted list, who came first and did not know of it."""
        history.adopted = MemberList.of(report)
        for peer in [peer for peer in self.registry.order if peer.peer_id not in history.adopted.members]:
            self._kick(peer, Result.RANK_CONNECTION_LOST, "the former master had removed it", now_ns)

    def _on_late_report(self, event: PeerMessageReceived, report: RunReport, now_ns: int) -> None:
        """One who is not in the adopted list has waited for it to be committed. It may be gone."""
        if event.connection in self._asked:
            self._on_report(event, report, now_ns)

    def _accept_report(self, event: PeerMessageReceived, report: RunReport, now_ns: int) -> Peer | None:
        """Takes note of who reports: a member of the adopted list, a pending peer, or one who is neither."""
        history, hello = self._history, report.hello
        assert history is not None
        peer = self.registry.peers.get(hello.peer_id)
        connection = event.connection
        is_other = peer is not None and peer.token not in (b"", hello.token)
        if hello.run_id != history.run_id or is_other:
            self._refuse_session(connection)
            return None
        if peer is not None:
            peer.addresses, peer.token = with_seen_address(hello.addresses, event.host), hello.token
            peer.connection_count, peer.has_reported, peer.disconnected_ns = hello.connection, True, None
            peer.is_following = False
            self._note_handshake(peer, hello)
            self.registry.bind(peer, connection)
        elif len(self.registry.peers) >= limits.PEERS_MAX:
            self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
            return None
        elif not report.members or history.would_admit(report, self.registry.round):
            peer = self._register(connection, hello, event.host)
            if report.members:  # The last word of the former master, which nobody else has heard.
                self.registry.admit([peer])
        elif connection is not None and hello.peer_id in self.registry.old_members:
            kick = Kick(Result.RANK_CONNECTION_LOST, "removed by the former master")
            self._dismissed[connection] = _Dismissed(hello.peer_id, kick)
            return None
        else:
            self._refuse_session(connection)
            return None
        if connection is None:  # It broke again while others reported.
            peer.disconnected_ns = now_ns
        peer.oldest_call_id = report.oldest_call_id
        return peer


def start_master(own_id: bytes, options: MasterOptions | None, now_ns: int) -> MasterMachine:
    """A master as its process starts, here and in every simulated world: it looks for peers of an earlier one first.

    Args:
        own_id: 16 random bytes.
        options: its times; None: the defaults.
        now_ns: the time.
    """
    machine = MasterMachine(own_id, options=options)
    machine.recover(now_ns)
    return machine


def is_plausible(report: RunReport) -> bool:
    """False where no honest peer would report this: no master gives epochs of another, or a member twice."""
    members, hello = {member.peer_id for member in report.members}, report.hello
    is_of_term = report.parent <= report.epoch and report.epoch >> limits.EPOCH_BITS <= hello.term < hello.promised
    return is_of_term and len(members) == len(report.members)


@dataclass(frozen=True)
class _Dismissed:
    """A member of the old list that is not in the new one: what it acknowledges counts until that one is committed."""

    peer_id: bytes
    kick: Kick
    """What it is told then."""


@dataclass(frozen=True)
class _MasterList:
    """The list of masters that a peer was given, and the place of this one in it."""

    addresses: tuple[str, ...]
    index: int

    @property
    def count(self) -> int:
        """How many there are."""
        return max(1, len(self.addresses))

    @property
    def text(self) -> str:
        """For people."""
        if not self.addresses:
            return "the address of this master alone"
        return f'"{",".join(self.addresses)}" (this master is number {self.index + 1} of {self.count})'

    def agrees(self, other: _MasterList) -> bool:
        """True if this master has the same place among as many; names of one address may differ."""
        return (self.count, self.index) == (other.count, other.index)


def _loss_reason(peer: Peer, reason: str) -> LossReason:
    if reason == _LEFT:
        return LossReason.LEFT
    if not peer.has_reported:
        return LossReason.ABSENT
    return LossReason.KICKED if peer.disconnected_ns is None else LossReason.DISCONNECTED


def with_seen_address(addresses: tuple[str, ...], host: str) -> tuple[str, ...]:
    """The peer's own addresses, then the one that the master sees, with the port of the first."""
    if not addresses or not host:
        return addresses
    port = addresses[0].rpartition(":")[2]
    seen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return addresses if seen in addresses else (*addresses[: limits.ADDRESSES_PER_PEER_MAX - 1], seen)
