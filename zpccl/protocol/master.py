"""The master: one state machine that coordinates a run.

It holds no tensors and does no I/O. `handle(event, now_ns)` returns what to do; `deadline_ns()` says when it wants a
Tick. Its parts share a registry of peers and an outbox:

    MasterMachine      registration, loss of peers, dispatch
      Registry         who takes part, epochs, links        (membership.py)
      Paths            which rings the links allow          (paths.py)
      Collectives      votes, plans, decisions              (collective.py)
      Rounds           topology votes, admission            (rounds.py)
      StateSyncs       election and transfer of state       (statesync.py)
      Stragglers       who does not vote                    (stragglers.py)
      Requests         calls, on their way to the former    (requests.py)
      TakeOver         what the reports of peers tell       (takeover.py, recovery.py)
      Quorum           where there are several masters      (quorum.py)

After every event the master settles: it tells members of a new epoch, then lets each part look at what has become
complete. A peer is lost when its connection broke and it did not come back within the grace period, or at once when
another peer lost its link to it too. When all members are gone at once, rather the master was cut off: it waits for
them until it hears of anybody, and some seconds longer.

A master that may be replacing another one gathers first: it asks peers of an earlier master for their reports, and lets
newcomers wait. Once all members of the newest member list have reported, or the grace period is over, it adopts the
run: the same members in a new epoch, a higher term, what was running and what was decided. Members that have not
reported then are waited for a while longer. A peer that reports says all that stands again when it is welcomed, so
nothing else is kept of what is said before.

    (start) --gather()--> recovery --reports--> adopting --> leading
       |                      `----- nobody, but a newcomer ----^ |
       |                      ^------- the rest is no quorum -----'
       `--------------------------------------------------------^

Where peers know several masters, one that would lose members goes on only if the rest is a quorum (quorum.py). Else
another master may lead the lost ones: this one then forgets everything and gathers again, like one just started.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field

from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import Result
from zpccl.protocol.collective import Collectives
from zpccl.protocol.counts import Counts, LossReason
from zpccl.protocol.effects import Level, MasterEffect
from zpccl.protocol.events import ConnectionClosed, KeysRevoked, MalformedReceived, MasterEvent, PeerMessageReceived
from zpccl.protocol.identity import is_peer_id_of
from zpccl.protocol.membership import Outbox, Peer, Registry, Standing, names
from zpccl.protocol.messages import (
    Acknowledgement,
    Hello,
    Kick,
    Leave,
    Linked,
    MembersCommitted,
    Neighbours,
    NeighboursChanged,
    Ready,
    Refusal,
    Refused,
    Report,
    Welcome,
)
from zpccl.protocol.paths import Paths
from zpccl.protocol.quorum import Quorum
from zpccl.protocol.recovery import History, Recovery, choose_run
from zpccl.protocol.requests import Requests
from zpccl.protocol.rounds import Rounds
from zpccl.protocol.statesync import StateSyncs
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
        self._recovery: Recovery | None = None
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
        self._quorum: Quorum | None = None  # Where peers know other masters.
        self._asked: set[Hashable] = set()  # Connections of peers whose report is due, after it was taken over.
        self._dismissed: dict[
            Hashable, bytes
        ] = {}  # Peers of the old_members that are told that they are members no more.
        self._announced_epoch = 0
        self._last_loss_ns: int | None = None  # Of a member, against its will.
        self._is_alone = False  # All members were gone at once, and not all are back.
        self._heard_ns: int | None = None  # When it heard of anybody after that.
        self._relinked: set[Peer] = set()  # Whose links may have changed, or the members that they shall lead to.
        self.paths = Paths(self.registry)
        how = (self.registry, self._outbox, self.paths)
        self.collectives = Collectives(*how, self._next_attempt_id, options.link_wait_ns)
        self.rounds = Rounds(*how, self.collectives, self._admit, options.admission_wait_ns)
        self.syncs = StateSyncs(*how, self.rounds, self._next_attempt_id, options.link_wait_ns)
        self._stragglers = Stragglers(self.registry, self._outbox, self.collectives, self.rounds)
        parts = (self.registry, self._outbox, self.collectives, self.rounds, self.syncs, self._kick)
        self.requests = Requests(*parts)
        self._takeover = TakeOver(*parts)

    def number(self, term: int) -> None:
        """Sets the term of a master that leads no run yet, should it begin one. Epochs follow it."""
        assert not self.registry.peers
        self.term = term
        self.registry.epoch = self._announced_epoch = term << 32

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
        term = self._term_after(self.term)
        grace_ns, wait_ns = options.recovery_grace_ns, options.recovery_wait_ns
        self._recovery = Recovery(now_ns, grace_ns, wait_ns, term, self.run_id, begin_ns)

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
        deadlines = [self.collectives.deadline_ns(), self.rounds.deadline_ns(), self.syncs.deadline_ns()]
        deadlines.append(self._stragglers.deadline_ns())
        is_whole = len(self.registry.by_connection) == len(self.registry.peers)  # Then only joiners are waited for.
        for peer in self.registry.pending() if is_whole else self.registry.peers.values():
            if peer.disconnected_ns is not None:
                deadlines.append(self._loss_ns(peer))
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
        is_recovering = self._recovery is not None and self._recovery.knows(connection)
        return Standing.EXPECTED if is_recovering or connection in self._asked else Standing.STRANGER

    def validate(self) -> None:
        """States what always holds between events."""
        self.registry.validate()
        self.collectives.validate()
        self.rounds.validate()
        self.syncs.validate()
        assert self._announced_epoch == self.registry.epoch
        for peer in self.registry.pending():
            assert (peer.unlinked_ns is not None) == self._is_unlinked(peer)
        assert not self.registry.pending() or self.registry.order or not self._connected_pending()

    # --- Registration and messages ----------------------------------------------------------------------------------

    def _is_of_its_key(self, event: PeerMessageReceived) -> bool:
        """True if the key of a connection may speak for the peer that the connection and the message name."""
        peer = self.registry.by_connection.get(event.connection)
        named = [peer.peer_id] if peer is not None else []
        if isinstance(event.message, (Hello, Report)):
            hello = event.message.hello if isinstance(event.message, Report) else event.message
            named.append(hello.peer_id)
        return all(is_peer_id_of(peer_id, event.identity) for peer_id in named)

    def _on_message(self, event: PeerMessageReceived, now_ns: int) -> None:
        if self._is_alone and self._heard_ns is None:
            self._heard_ns = now_ns
        if self._recovery is not None:
            return self._on_early_message(self._recovery, event, now_ns)
        peer = self.registry.by_connection.get(event.connection)
        message = event.message
        if isinstance(message, Hello):
            self._on_hello(event.connection, peer, message, event.host, now_ns)
        elif isinstance(message, Report):
            self._on_report(event, message, now_ns)
        elif peer is None and isinstance(message, Leave) and event.connection in self._dismissed:
            if self._quorum is not None and self._quorum.add_consent(self._dismissed.pop(event.connection)):
                self._on_members_committed(now_ns)
        elif peer is None:
            if event.connection not in self._asked:  # Else it says all this again when its report is here.
                self._outbox.reply(event.connection, Refused(Refusal.UNREGISTERED, "say hello first"))
        elif isinstance(message, Linked):
            self._on_linked(peer, message, now_ns)
        elif isinstance(message, Ready):
            peer.is_ready = True
        elif isinstance(message, Leave):
            self._lose(peer, _LEFT, now_ns, Level.INFO, consents=True)
        elif isinstance(message, Acknowledgement) and peer.is_member:
            self._on_acknowledgement(peer, message, now_ns)
        elif peer.is_member:
            self.requests.take(peer, message, now_ns)
        else:  # It was a member, was removed, and registered anew before it read of its first admission.
            self._refuse_session(event.connection)

    def _on_hello(self, connection: Hashable, bound: Peer | None, hello: Hello, host: str, now_ns: int) -> None:
        known = self.registry.peers.get(hello.peer_id)
        if known is not None and self._is_ahead(known, hello):
            self._step_down(f"{hello.name} has promised itself to a newer master", now_ns)
            return self._on_message(PeerMessageReceived(connection, hello, host), now_ns)
        is_unknown = not known.has_reported if known is not None else bound is None
        if hello.was_welcomed and is_unknown and self._history is not None and hello.run_id == self.run_id:
            if known is not None and known.token in (b"", hello.token):
                if not known.token:  # The first sign of life: there is time for its report.
                    known.token, known.disconnected_ns = hello.token, now_ns
            elif known is not None:
                return self._refuse_session(connection)
            if len(self._asked) < limits.PEERS_MAX:
                self._asked.add(connection)
            return self._ask_for_report(connection)
        is_unaware = not hello.was_welcomed and bound is None
        if known is not None and not known.token and not known.has_reported and is_unaware:
            return self._on_unaware(connection, hello, host, now_ns)
        if bound is not None and bound is not known:
            refused = Refused(Refusal.MALFORMED, "this connection belongs to another peer")
            return self._outbox.reply(connection, refused)
        if known is not None:
            if not known.has_reported or known.token != hello.token:
                text = f"a connection claims to be {known.name} without its token"
                self._outbox.log(Level.WARNING, text, of_stranger=True)
                return self._outbox.reply(connection, Refused(Refusal.UNKNOWN_SESSION, "wrong token"))
            if hello.connection < known.connection_count:
                return self._outbox.log(Level.DEBUG, f"{known.name} has a newer connection")
            self.registry.bind(known, connection)
            known.connection_count = hello.connection
            known.disconnected_ns = None
            known.is_ready = known.is_ready or hello.is_ready
            known.witnesses.clear()
            self._note_masters(hello)
            return self._welcome(known)
        if hello.was_welcomed:
            return self._refuse_session(connection)
        if len(self.registry.pending()) >= limits.PENDING_PEERS_MAX or len(self.registry.peers) >= limits.PEERS_MAX:
            return self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
        peer = self._register(connection, hello, host, now_ns)
        ahead = "" if peer.is_ready else ", and fetches state ahead"
        self._outbox.log(Level.INFO, f"{peer.name} registered for group {peer.group}{ahead}")
        self._welcome(peer)
        for other in self._others_of_group(peer):  # Who came later dials.
            newcomer = self.registry.as_neighbour(peer, other, dial=False)
            self._outbox.send(other, NeighboursChanged(joined=(newcomer,)))

    def _is_ahead(self, known: Peer, hello: Hello) -> bool:
        """True for a peer of this master that has promised itself to one that may lead the run by now."""
        is_itself = hello.was_welcomed and known.token in (b"", hello.token) and hello.run_id == self.run_id
        is_credible = self.term < hello.promised <= limits.TERM_MAX - limits.TERM_STEP_MAX
        return self._quorum is not None and is_itself and is_credible

    def _note_masters(self, hello: Hello) -> None:
        """A peer may know other masters: then only a quorum may go on."""
        if hello.master_count > 1 and self._quorum is None:
            self._quorum = Quorum([peer.peer_id for peer in self.registry.order])

    def _on_unaware(self, connection: Hashable, hello: Hello, host: str, now_ns: int) -> None:
        """A newcomer is a member, by the word of others, and has not heard of it: there is nothing to report."""
        hello = replace(hello, run_id=self.run_id)
        report = Report(hello, 0, 0, (), False, 0, 0, None, (), (), None)
        self._on_report(PeerMessageReceived(connection, report, host), report, now_ns)

    def _register(self, connection: Hashable, hello: Hello, host: str, now_ns: int) -> Peer:
        self._note_masters(hello)
        peer = Peer(
            peer_id=hello.peer_id,
            group=hello.group,
            name=hello.name,
            addresses=with_seen_address(hello.addresses, host),
            token=hello.token,
            registered_ns=now_ns,
            connection=connection,
            connection_count=hello.connection,
            is_ready=hello.is_ready,
        )
        self.registry.add(peer)
        self._relinked.add(peer)
        return peer

    def _refuse_session(self, connection: Hashable) -> None:
        reason = "this master does not know the peer: it was removed, or the master was restarted too late"
        is_final = not self.registry.old_members
        refused = Refused(Refusal.UNKNOWN_SESSION, reason, self.run_id if is_final else bytes(16), self.term)
        self._outbox.reply(connection, refused)

    def _welcome(self, peer: Peer) -> None:
        self._outbox.send(peer, Welcome(self.run_id, self.term))
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
            if other.disconnected_ns is not None:
                self._lose(other, f"lost its connections to the master and to {peer.name}", now_ns)
        self.collectives.on_links_changed(now_ns)
        self.syncs.on_links_changed(now_ns)

    def _on_acknowledgement(self, peer: Peer, message: Acknowledgement, now_ns: int) -> None:
        """A member has a list. Once it is established, the members need not report those before it."""
        if self._quorum is None or message.epoch >> 32 != self.term:
            return
        peer.is_following = True
        if message.epoch != self.registry.epoch or not self.registry.old_members:
            return
        if self._quorum.acknowledge(peer.peer_id):
            self._on_members_committed(now_ns)

    def _on_members_committed(self, now_ns: int) -> None:
        self.registry.old_members = ()
        self._outbox.broadcast(self.registry.order, MembersCommitted(self.registry.epoch))
        self.collectives.on_members_changed(now_ns)
        self.syncs.on_members_changed(now_ns)

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
        self._dismissed.pop(connection, None)
        if self._recovery is not None:
            return self._recovery.on_connection_closed(connection)
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
        if witnesses:
            self._lose(peer, f"lost its connections to the master and to {names(witnesses)}", now_ns)

    def _on_keys_revoked(self, event: KeysRevoked, now_ns: int) -> None:
        for peer in list(self.registry.peers.values()):
            for identity, name in event.names.items():
                if is_peer_id_of(peer.peer_id, identity):
                    reason = f"its key, {name}, is no longer allowed"
                    self._kick(peer, Result.MASTER_CONNECTION_FAILED, reason, now_ns, consents=True)
                    break

    def _on_tick(self, now_ns: int) -> None:
        registry = self.registry
        for peer in list(self.registry.peers.values()):
            if peer.disconnected_ns is not None:
                loss_ns = self._loss_ns(peer)
                if loss_ns is not None and now_ns >= loss_ns:
                    what = "lost its connection to the master" if peer.has_reported else "did not find the new master"
                    self._lose(peer, what, now_ns)
                    if self.registry is not registry:
                        return  # It has stepped down.
            elif peer.unlinked_ns is not None and now_ns - peer.unlinked_ns >= self.options.link_wait_ns:
                if not self._is_unlinked(peer):
                    continue  # Whom it could not reach is gone, just now.
                reason = f"no data connection to {names(self._unlinked(peer))}"
                self._kick(peer, Result.RANK_CONNECTION_FAILED, reason, now_ns)
        self.collectives.tick(now_ns)
        for peer, reason in [*self.collectives.unreachable(now_ns), *self.syncs.unreachable(now_ns)]:
            if not self._kick(peer, Result.RANK_CONNECTION_FAILED, reason, now_ns):
                self.collectives.wait_again(now_ns)
                self.syncs.wait_again(now_ns)
        self.rounds.tick(now_ns)
        for peer, reason in self._stragglers.tick(now_ns, self.options.straggler_timeout_ns):
            self._kick(peer, Result.RANK_CONNECTION_LOST, reason, now_ns)

    def _loss_ns(self, peer: Peer) -> int | None:
        """When a peer whose connection broke is lost; None while there is no saying."""
        assert peer.disconnected_ns is not None
        if self._is_alone and peer.is_member:
            return None if self._heard_ns is None else self._heard_ns + self.options.recovery_wait_ns
        if self._quorum is not None and not (peer.has_reported and peer.is_following):
            return peer.disconnected_ns + max(self.options.recovery_wait_ns, limits.QUORUM_WAIT_NS)
        grace_ns = self.options.disconnect_grace_ns if peer.has_reported else self.options.recovery_wait_ns
        return peer.disconnected_ns + grace_ns

    def _kick(self, peer: Peer, result: Result, reason: str, now_ns: int, *, consents: bool = False) -> bool:
        """Removes a peer. False if the others may not go on without it."""
        if not consents and not self._may_lose(peer):
            self._outbox.log(Level.WARNING, f"{peer.name} is not removed, the others are no quorum: {reason}")
            return False
        self._outbox.send(peer, Kick(result, reason[: limits.TEXT_CHARS_MAX]))
        self._lose(peer, f"removed: {reason}", now_ns, consents=consents)
        return True

    def _may_lose(self, peer: Peer) -> bool:
        """True if those who are connected, without `peer`, may go on."""
        if self._quorum is None or not peer.is_member:
            return True
        rest = [p.peer_id for p in self.registry.order if p.connection is not None and p is not peer]
        return self._quorum.may_go_on(rest)

    def _is_cut_off(self, now_ns: int) -> bool:
        """True if nobody is connected of several members, who were lost at about the same time.

        They are waited for then, without end while nobody at all is heard. Where there are other masters, they may have
        gone there, and this one steps down soon.
        """
        if self._quorum is not None or self._is_alone or any(p.connection is not None for p in self.registry.order):
            return False
        last_ns = self._last_loss_ns
        return len(self.registry.order) > 1 or (last_ns is not None and now_ns - last_ns < limits.CUT_OFF_SPREAD_NS)

    def _lose(
        self, peer: Peer, reason: str, now_ns: int, level: Level = Level.WARNING, *, consents: bool = False
    ) -> None:
        """A peer takes part no more. `consents`: by its own will or the administrator's, so it does not elsewhere."""
        if self.registry.peers.get(peer.peer_id) is not peer:
            return
        if not consents and not self._may_lose(peer):
            return self._step_down(f"the rest may be no quorum: {peer.name} {reason}", now_ns)
        if peer.is_member and not consents:
            self._last_loss_ns = now_ns
        self.counts.losses[_loss_reason(peer, reason)] += 1
        was = "member" if peer.is_member else "pending peer"
        self.registry.remove(peer)
        self._outbox.log(level, f"{was} {peer.name} {reason}")
        self._announce_epoch(now_ns)
        if consents and peer.is_member and self._quorum is not None and self._quorum.add_consent(peer.peer_id):
            self._on_members_committed(now_ns)
        self._outbox.broadcast(self._others_of_group(peer), NeighboursChanged(gone=(peer.peer_id,)))

    # --- Settling ---------------------------------------------------------------------------------------------------

    def _settle(self, now_ns: int) -> None:
        if self._recovery is not None:
            if not self._recovery.is_over(now_ns):
                return self._turn_away(self._recovery, now_ns)
            recovery, self._recovery = self._recovery, None
            self._adopt(recovery, now_ns)
            if self.is_recovering:
                return
        self.requests.settle()
        if not self.registry.order:
            for peer in self._connected_pending()[:1]:  # An empty run admits at once, ready or not: nobody has state.
                self._outbox.log(Level.INFO, f"epoch {self.registry.epoch + 1}: admitting {peer.name} to an empty run")
                self._admit([peer], now_ns)
        if self._is_alone and all(peer.connection is not None for peer in self.registry.order):
            self._is_alone = False
        self.rounds.evaluate(now_ns)
        self.syncs.evaluate(now_ns)
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
        self._relinked.update(self.registry.pending())
        self._propose()
        self._outbox.broadcast(self.registry.order, self.registry.member_list())
        self.collectives.on_members_changed(now_ns)
        self.syncs.on_members_changed(now_ns)

    def _propose(self, old_members: tuple[bytes, ...] = ()) -> None:
        """The member list is a new one."""
        if self._quorum is not None:
            self._quorum.propose([peer.peer_id for peer in self.registry.order], old_members)
            self.registry.old_members = tuple(sorted(self._quorum.old_members))

    def _others_of_group(self, peer: Peer) -> list[Peer]:
        """All others of a peer's group, pending ones too."""
        return [other for other in self.registry.peers.values() if other.group == peer.group and other is not peer]

    def _next_attempt_id(self) -> int:
        self._attempt_count += 1
        return (self.term << 32) | self._attempt_count

    # --- Taking a run over ------------------------------------------------------------------------------------------

    def _step_down(self, reason: str, now_ns: int) -> None:
        """Another master may lead the run. Those who are still here report anew, to this one or to another."""
        self._outbox.log(Level.WARNING, f"stepping down: {reason}")
        connections = list(self.registry.by_connection)
        self._forget_run()
        self.run_id = hashlib.blake2b(self._own_id + bytes([self._generation % 256]), digest_size=16).digest()
        self.number(self._term_after(self.term))
        self.recover(now_ns, now_ns + limits.RUN_MEMORY_NS)
        assert self._recovery is not None
        for connection in connections:
            self._recovery.on_greeted(connection, now_ns)
            self._ask_for_report(connection)

    def _term_after(self, term: int) -> int:
        """Numbers of one that hardly anybody heard of must not be given again: so they do not follow closely."""
        salt = (int.from_bytes(self._own_id[:2], "big") + self._generation) % limits.TERM_STEP_MAX
        return min(term + 1 + salt, limits.TERM_MAX)

    def _turn_away(self, recovery: Recovery, now_ns: int) -> None:
        for connection, is_run_here in recovery.take_turned_away(now_ns):
            if is_run_here:
                refused = Refused(Refusal.NO_QUORUM, "too few members of the run have found this master")
            else:
                refused = Refused(Refusal.NO_RUN, "no run is here", self.run_id)
            self._outbox.reply(connection, refused)

    def _ask_for_report(self, connection: Hashable) -> None:
        reason = "another master has taken the run over, and must know first what you know"
        term = self.term if self._recovery is None else self._recovery.term
        self._outbox.reply(connection, Refused(Refusal.REPORT, reason, term=term))

    def _raise_above(self, recovery: Recovery, hello: Hello) -> bool:
        """Another master may lead as what a peer has promised. True if this one now bids more, and asks all again."""
        if hello.promised > limits.TERM_MAX - limits.TERM_STEP_MAX or not recovery.has_higher_promise(hello):
            return False
        for connection in recovery.raise_term(self._term_after(hello.promised)):
            self._ask_for_report(connection)
        return True

    def _on_early_message(self, recovery: Recovery, event: PeerMessageReceived, now_ns: int) -> None:
        """While reports are gathered. What stands is said again to a Welcome, so the rest may be dropped here."""
        message, connection = event.message, event.connection
        if isinstance(message, Hello):
            if message.was_welcomed and not recovery.rebind(event, message):
                recovery.on_greeted(connection, now_ns)
                if not self._raise_above(recovery, message):
                    self._ask_for_report(connection)
            elif message.was_welcomed:
                pass  # Its report is here; it gets its Welcome with the others.
            elif not recovery.hold(event, now_ns):
                self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
        elif isinstance(message, Report) and not is_plausible(message):
            self._refuse_session(connection)
        elif isinstance(message, Report):
            hello = message.hello
            if hello.master_count > 1 and hello.promised != recovery.term:  # It answers an earlier request.
                self._raise_above(recovery, hello)
            elif not recovery.add(event, message, now_ns):
                self._refuse_session(connection)
        elif isinstance(message, Leave):
            recovery.on_left(connection)
        elif not recovery.knows(connection):
            self._outbox.reply(connection, Refused(Refusal.UNREGISTERED, "say hello first"))

    def _adopt(self, recovery: Recovery, now_ns: int) -> None:
        """The reports are here: goes on with the run that they are of. Without any, a new run begins."""
        chosen = choose_run([report for _, report in recovery.reports.values()])
        if chosen is not None:
            self._restore(recovery, chosen, now_ns)
        for event in recovery.held.values():
            assert isinstance(event.message, Hello)
            self._on_hello(event.connection, None, event.message, event.host, now_ns)

    def _restore(self, recovery: Recovery, run_id: bytes, now_ns: int) -> None:
        history = self._history = History(run_id)
        for _, report in recovery.reports.values():
            history.add(report)
        self.run_id = run_id
        self.term = max(recovery.term, self._term_after(history.term))
        if any(report.hello.master_count > 1 for _, report in recovery.reports.values()):
            self._quorum = Quorum([member.peer_id for member in history.members])
            for peer_id in recovery.left:
                self._quorum.add_consent(peer_id)
            self.registry.old_members = history.old_members
        self.counts.takeovers += 1
        for member in history.members:
            absent = Peer(member.peer_id, member.group, member.name, (), b"", now_ns, None)
            absent.has_reported, absent.disconnected_ns = False, now_ns
            self.registry.add(absent)
            self.registry.admit([absent])
        history.adopt()
        self.registry.epoch = max(history.epoch + 1, self.term << 32)
        self._outbox.log(
            Level.INFO,
            f"taking over the run of {len(history.members)} members from {len(recovery.reports)} reports, as "
            f"term {self.term}",
        )
        for event, report in recovery.reports.values():
            self._accept_report(event, report, now_ns)
        self._announced_epoch = self.registry.epoch
        self._propose(history.old_members)
        self._takeover.apply_round(history)
        for peer in list(self.registry.peers.values()):
            if peer.has_reported:
                self._welcome(peer)
        self._takeover.apply(history, now_ns)
        for peer_id in recovery.left:
            if peer_id in self.registry.peers:
                self._lose(self.registry.peers[peer_id], _LEFT, now_ns, Level.INFO, consents=True)
        self._relinked.update(self.registry.pending())

    def _on_report(self, event: PeerMessageReceived, report: Report, now_ns: int) -> None:
        """A peer reports when the run has been taken over already."""
        hello, history = report.hello, self._history
        self._asked.discard(event.connection)
        known = self.registry.peers.get(hello.peer_id)
        bound = self.registry.by_connection.get(event.connection)
        if history is None or (known is not None and known.has_reported) or bound is not None:
            return self._on_hello(event.connection, bound, hello, event.host, now_ns)
        if hello.run_id != self.run_id or hello.term >= self.term:
            return self._refuse_session(event.connection)
        if not is_plausible(report):
            return self._refuse_session(event.connection)
        peer = self._accept_report(event, report, now_ns)
        if peer is None:
            return
        history.add(report)
        self._takeover.apply_round(history)
        if self.registry.epoch != self._announced_epoch:
            self._propose()  # Before anybody hears of the list.
        self._welcome(peer)
        for other in self._others_of_group(peer):  # Where it listens, and who dials, may be news to them.
            self._outbox.send(other, Neighbours(self.registry.neighbours_of(other)))
        self._relinked.update(self.registry.pending())
        self._takeover.apply(history, now_ns)
        self._announce_epoch(now_ns)
        self.collectives.on_members_changed(now_ns)
        self.syncs.on_members_changed(now_ns)

    def _accept_report(self, event: PeerMessageReceived, report: Report, now_ns: int) -> Peer | None:
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
            self.registry.bind(peer, connection)
        elif len(self.registry.peers) >= limits.PEERS_MAX:
            self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
            return None
        elif not report.members or history.would_admit(report, self.registry.round):
            peer = self._register(connection, hello, event.host, now_ns)
            if report.members:  # The last word of the former master, which nobody else has heard.
                self.registry.admit([peer])
        elif connection is not None and hello.peer_id in self.registry.old_members:
            # Its word counts until the list without it is established. So it must confirm that it goes on nowhere.
            self._dismissed[connection] = hello.peer_id
            self._outbox.reply(connection, Kick(Result.RANK_CONNECTION_LOST, "removed by the former master"))
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


def is_plausible(report: Report) -> bool:
    """False where no honest peer would report this: no master gives epochs of another, or a member twice."""
    members = {member.peer_id for member in report.members}
    return report.epoch >> 32 <= report.hello.term and len(members) == len(report.members)


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
