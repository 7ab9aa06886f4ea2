"""The master: the state machine that coordinates a run.

    phase       newcomers  member of another run  quorum of it has reported  higher promise      quorum lost [1]
    Recovering  Begun [2]  asks for its report    Adopted                    a higher term       -
    Begun       registers  Yielding [3]           -                          steps down: Recovering, a higher term
    Yielding    registers  asks for its report    Recovering, then Adopted   steps down: Recovering, a higher term
    Adopted     registers  Yielding [3]           -                          steps down: Recovering, a higher term

    [1] A run with one address needs no quorum. Recovering adopts it without one after MINORITY_WAIT_NS.
    [2] If no member of a run connects. [3] If no master has decided anything in its own run; otherwise it refuses that
        member. After the first decision it leaves Yielding and refuses the members of the other run.

The master holds no tensors and does no I/O. `handle_all(events, now_ns)` returns effects; `deadline_ns()` is the time
of the next Tick. Its parts share a registry of peers and an outbox:

    MasterMachine      registration, loss of peers, dispatch
      Registry         who takes part, epochs, links        (membership.py)
      Losses           when disconnected peers are lost     (losses.py)
      Paths            which rings the links allow          (paths.py)
      Operations       from votes to decisions              (operation.py)
      Collectives      agreement, plans, results            (kinds/collective.py)
      Rounds           topology calls, admission            (kinds/topology.py)
      StateSyncs       election and transfer of state       (kinds/sync.py)
      Stragglers       members that do not vote             (stragglers.py)
      TakeOver         applies the reports of peers         (takeover.py, recovery.py)
      Leader           which master decides                 (leadership.py)

A master recovers when it starts, because it may replace another one. As a candidate (leadership.py) it asks members of
an earlier run for their reports and holds newcomers. Once elected, it adopts the run: the same members in a new epoch
of its term, with their decisions and running attempts. It waits some time longer for members that have not reported
yet. Peers send their open calls after the Welcome, so a candidate keeps only Hellos and reports. A master that steps
down forgets the run and recovers again.

After each batch of events, `_settle` lets each part act on whatever has become complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from zpccl.protocol.leadership import Candidate, Leader, MemberList, Promise, is_new, is_sole
from zpccl.protocol.losses import Losses, NetworkState
from zpccl.protocol.master_list import CommonList
from zpccl.protocol.membership import Outbox, Peer, PeerPhase, Registry, Standing, names
from zpccl.protocol.memory import has_decided
from zpccl.protocol.messages import (
    NO_ID,
    Acknowledgement,
    Hello,
    Kick,
    Leave,
    Linked,
    Measurements,
    MeasurementsRequest,
    Member,
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
from zpccl.protocol.recovery import History, is_plausible
from zpccl.protocol.stragglers import Stragglers
from zpccl.protocol.takeover import PARTED, TakeOver

_YIELDS = "this run has decided nothing and yields to another run"

_LEFT = "left"
"""The reason in the log for the loss of a peer that sent Leave."""
_SENT_ON = "is sent to the next master: its host is incomplete here"
"""The reason in the log for the loss of a pending peer that is sent on."""


@dataclass(frozen=True)
class Recovering:
    """The phase of a master that leads no run: it collects the reports of an earlier one."""

    candidate: Candidate


@dataclass(frozen=True)
class Begun:
    """The phase of a master that leads a run which it began."""


@dataclass(frozen=True)
class Yielding:
    """The phase of a master whose own run has decided nothing, while members of an earlier run report.

    Attributes:
        own: the phase to return to once the own run decides something.
    """

    candidate: Candidate
    own: Begun | Adopted


@dataclass(frozen=True)
class Adopted:
    """The phase of a master that leads a run which it took over."""

    history: History


@dataclass(frozen=True)
class MasterOptions:
    """Timeouts of the master, in nanoseconds, and the seed of the link keys (empty: no secret)."""

    disconnect_grace_ns: int = limits.DISCONNECT_GRACE_NS
    link_wait_ns: int = limits.LINK_WAIT_TIMEOUT_NS
    admission_wait_ns: int = limits.ADMISSION_WAIT_NS
    link_seed: bytes = field(default=b"", repr=False)
    recovery_grace_ns: int = limits.RECOVERY_GRACE_NS
    recovery_wait_ns: int = limits.RECOVERY_WAIT_NS
    straggler_timeout_ns: int | None = None
    """A member is removed when others have waited for its vote for longer than this; None: never."""


class MasterMachine:
    """The protocol of the master.

    Args:
        run_id: 16 random bytes, the id of the run that it may begin.
        term: the term in which it begins a run without recovery; attempt ids and epochs contain it.
        options: its timeouts.
    """

    def __init__(self, run_id: bytes, term: int = 0, options: MasterOptions | None = None) -> None:
        self._own_id = self.run_id = run_id
        self.options = options or MasterOptions()
        self.counts = Counts()
        self._outbox = Outbox(self.counts)
        self._attempt_count = 0
        self.generation = 0
        """Grows each time the master forgets a run."""
        self._leadership_count = 0
        self._yielded: Promise | None = None  # The last leadership whose run yielded here.
        self._complained: set[Hashable] = set()  # Connections whose malformed input is in the log.
        # By group or joiner: when it first and last waited for links once more.
        self._excused_ns: dict[int | bytes | None, tuple[int, int]] = {}
        self._woken_ns = 0  # No Tick counts before: a master that has stood still reads first what has come meanwhile.
        self.malformed_count = 0
        self._forget_run()
        self._set_term(term)

    def _forget_run(self) -> None:
        """Resets everything that the master knows about a run."""
        options = self.options
        self.generation += 1
        self._phase: Recovering | Begun | Yielding | Adopted = Begun()
        self.registry = Registry(options.link_seed)
        self._masters = CommonList()
        # By peer: losses, late reports and removals. All wait until the list that repeats the adopted one is committed.
        # With one address: reports of newcomers, which wait for a member that tells of their admission.
        self._deferred: dict[bytes, Callable[[int], object]] = {}
        self._removals: dict[bytes, Callable[[int], object]] = {}
        self._asked: set[Hashable] = set()  # Connections that were asked for a report, or a Hello, after the take-over.
        self._owing: frozenset[Hashable] = frozenset()  # Those that were asked before it and had not reported by then.
        self._dismissed: dict[Hashable, _Dismissed] = {}  # Removed members, by connection.
        self._announced_epoch = 0
        self._adopted_ns = 0
        self._relinked: set[Peer] = set()  # Peers whose links, or members to link to, may have changed.
        self._losses = Losses(self.registry, options.disconnect_grace_ns, options.recovery_wait_ns)
        self.paths = Paths(self.registry)
        how = (self.registry, self._outbox, self.paths)
        self.operations = Operations(self.registry, self._outbox, self._next_attempt_id, self._kick)
        self.collectives = Collectives(*how, self.operations, options.link_wait_ns)
        unmeasured = self.collectives.planner.unmeasured
        self.rounds = Rounds(*how, self.operations, self._admit, unmeasured, options.admission_wait_ns)
        self.syncs = StateSyncs(*how, self.operations, options.link_wait_ns)
        self._stragglers = Stragglers(self.registry, self._outbox, self.operations)
        self._takeover = TakeOver(self.registry, self._outbox, self.operations, self.rounds, self.syncs, self._kick)

    def _set_term(self, term: int) -> None:
        """Sets the term in which a master without a run would begin one. Epochs contain it."""
        assert not self.registry.peers
        self.term = term
        self._leader = Leader(Promise(term, self._draw_leader()), needs_quorum=False)
        self._undecided = self._decision_count()
        self.registry.epoch = self._announced_epoch = term << limits.EPOCH_BITS

    @property
    def is_alone(self) -> bool:
        """True while the master waits for members that all disconnected at once."""
        return self._losses.network is not NetworkState.UP

    @property
    def is_recovering(self) -> bool:
        """True until the master leads a run."""
        return isinstance(self._phase, Recovering)

    @property
    def candidate(self) -> Candidate | None:
        """Collects reports of an earlier run; None unless this master recovers, or its run may yield to that one."""
        return self._phase.candidate if isinstance(self._phase, (Recovering, Yielding)) else None

    @property
    def _history(self) -> History | None:
        phase = self._phase.own if isinstance(self._phase, Yielding) else self._phase
        return phase.history if isinstance(phase, Adopted) else None

    def recover(self, now_ns: int, begin_ns: int = 0) -> None:
        """Starts to look for peers of an earlier run; a new run may begin only later. No peer may be registered yet."""
        assert not self.registry.peers
        self._phase = Recovering(self._stand(now_ns, begin_ns))

    def _draw_leader(self) -> bytes:
        """Returns the id of a new leadership. Each leadership of this master has a different id."""
        self._leadership_count += 1
        count = self._leadership_count.to_bytes(8, "big")
        return hashlib.blake2b(self._own_id + count, digest_size=16).digest()

    def _stand(self, now_ns: int, begin_ns: int = 0) -> Candidate:
        """Makes a candidate for the next leadership of this master."""
        grace_ns, wait_ns = self.options.recovery_grace_ns, self.options.recovery_wait_ns
        promise = Promise(self._term_after(self.term), self._draw_leader())
        return Candidate(now_ns, grace_ns, wait_ns, promise, self.run_id, begin_ns)

    def handle(self, event: MasterEvent, now_ns: int) -> list[MasterEffect]:
        """Handles one event and returns the effects, in order."""
        return self.handle_all((event,), now_ns)

    def handle_all(self, events: Sequence[MasterEvent], now_ns: int) -> list[MasterEffect]:
        """Handles all queued events and returns the effects, in order.

        Votes are compared after the last event: a vote does not count if its withdrawal is queued behind it.
        """
        self._outbox.now_ns = now_ns
        for event in events:
            self._take(event, now_ns)
        self._settle(now_ns)
        return self._outbox.take()

    def _take(self, event: MasterEvent, now_ns: int) -> None:
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

    def deadline_ns(self) -> int | None:
        """When the next Tick is due, or None."""
        deadlines = [self.candidate.deadline_ns() if self.candidate is not None else None]
        if self.is_recovering:
            return deadlines[0]
        deadlines += [self.operations.deadline_ns(), self._stragglers.deadline_ns()]
        deadlines += [apart_ns + limits.HOST_WAIT_NS for _, apart_ns in self.registry.apart()]
        deadlines += [peer.registered_ns + limits.HOST_NAMESAKE_WAIT_NS for peer in self.registry.namesakes()]
        is_whole = len(self.registry.by_connection) == len(self.registry.peers)  # If so, only pending peers can be due.
        may_lead = is_whole or self._may_lead()
        for peer in self.registry.pending() if is_whole else self.registry.peers.values():
            if peer.disconnected_ns is not None:
                deadlines.append(self._loss_ns(peer, may_lead) if self._may_be_lost(peer) else None)
            elif peer.unlinked_ns is not None:
                deadlines.append(peer.unlinked_ns + self.options.link_wait_ns)
        due_ns = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if due_ns is None else max(due_ns, self._woken_ns)

    def stragglers(self, now_ns: int | None = None) -> tuple[tuple[str, str, int], ...]:
        """Members whose vote others have waited for longer than STRAGGLER_WARNING.

        Args:
            now_ns: the time; None: the time of the last event.

        Returns:
            For each such member and operation: its name, the operation, and how long others have waited (nanoseconds).
        """
        return self._stragglers.stragglers(self._outbox.now_ns if now_ns is None else now_ns)

    def measurements(self, now_ns: int) -> Measurements:
        """What the master knows about the network. The answer is at most MEASUREMENTS_KEPT old."""
        return self.collectives.planner.measurements(now_ns)

    def standing(self, connection: Hashable) -> Standing:
        """What the master knows about the peer at the other end of a connection."""
        peer = self.registry.by_connection.get(connection)
        if peer is not None:
            return Standing.MEMBER if peer.is_member else Standing.PENDING
        is_known = self.candidate is not None and self.candidate.knows(connection)
        is_asked = connection in self._asked or connection in self._owing
        is_expected = is_known or is_asked or connection in self._dismissed
        return Standing.EXPECTED if is_expected else Standing.STRANGER

    def validate(self) -> None:
        """Asserts what always holds between events."""
        self.registry.validate()
        self.operations.validate()
        assert self._announced_epoch == self.registry.epoch
        for peer in self.registry.pending():
            assert (peer.unlinked_ns is not None) == bool(self.paths.missing(peer))
        assert self.registry.order or not self.registry.first_joiners()

    # --- Registration and messages ----------------------------------------------------------------------------------

    def _is_of_its_key(self, event: PeerMessageReceived) -> bool:
        """True if the connection's key fits both the peer registered on it and the peer that the message names."""
        peer = self.registry.by_connection.get(event.connection)
        named = [peer.peer_id] if peer is not None else []
        if isinstance(event.message, (Hello, RunReport)):
            hello = event.message.hello if isinstance(event.message, RunReport) else event.message
            named.append(hello.peer_id)
        return all(is_peer_id_of(peer_id, event.identity) for peer_id in named)

    def _on_message(self, event: PeerMessageReceived, now_ns: int) -> None:
        self._losses.on_message(now_ns)
        if isinstance(event.message, Hello) and self._has_yielded(event.message):
            return self._outbox.reply(event.connection, Refused(Refusal.YIELDED, _YIELDS))
        peer, candidate = self.registry.by_connection.get(event.connection), self.candidate
        if candidate is not None and peer is None and (self.is_recovering or candidate.knows(event.connection)):
            return self._on_early_message(candidate, event, now_ns)
        message = event.message
        if isinstance(message, Hello):
            self._on_hello(event, peer, message, now_ns)
        elif isinstance(message, RunReport):
            self._on_report(event, message, now_ns)
        elif peer is None and event.connection in self._dismissed:
            self._on_dismissed(event.connection, message, now_ns)
        elif peer is None:
            if event.connection not in self._asked:  # An asked peer sends it again after its report.
                self._outbox.reply(event.connection, Refused(Refusal.UNREGISTERED, "send a Hello first"))
        elif isinstance(message, Linked):
            self._on_linked(peer, message, now_ns)
        elif isinstance(message, Ready):
            peer.on_ready()
        elif isinstance(message, Leave):
            self._lose(peer, _LEFT, now_ns, Level.INFO, has_left=True)
        elif isinstance(message, Acknowledgement) and peer.is_member:
            self._on_acknowledgement(peer, message, now_ns)
        elif isinstance(message, MeasurementsRequest) and peer.is_member:
            self._outbox.send(peer, self.measurements(now_ns))
        elif peer.is_member:
            self.operations.on_message(peer, message, now_ns)
        else:  # It was admitted and removed. It registered again before it read of that admission.
            self._refuse_session(event.connection)

    def _on_hello(self, event: PeerMessageReceived, bound: Peer | None, hello: Hello, now_ns: int) -> None:
        connection, known = event.connection, self.registry.peers.get(hello.peer_id)
        if self._is_ahead(known, hello):
            self._step_down(f"{hello.name} has promised to obey another master", now_ns)
            return self._on_message(dataclasses.replace(event, message=hello), now_ns)
        if bound is None and known is None and self._may_yield_to(hello):
            return self._on_earlier(event, now_ns)
        if bound is not None and bound is not known:
            refused = Refused(Refusal.MALFORMED, "this connection belongs to another peer")
            return self._outbox.reply(connection, refused)
        is_itself = known is not None and known.has_reported and known.token == hello.token
        if known is not None and is_itself and hello.connection < known.connection_count:
            return self._outbox.log(Level.DEBUG, f"{known.name} has a newer connection")
        is_unaware = known is not None and self._has_heard_nothing(known, hello)
        if known is not None and (is_unaware or self._has_gone_over(known, connection, hello)):
            if not known.has_reported and self._ask_again(connection):
                return None
            if is_unaware:
                return self._on_unaware(event, known, hello, now_ns)
            return self._on_gone_over(event, known, now_ns)
        if self._owes_report(known, hello):
            return self._expect_report(connection, known, hello, now_ns)
        if known is not None:
            if not is_itself:
                text = f"a connection uses the id of {known.name} without its token"
                self._outbox.log(Level.WARNING, text, of_stranger=True)
                return self._outbox.reply(connection, Refused(Refusal.UNKNOWN_SESSION, "wrong token"))
            self.registry.bind(known, connection)
            known.connection_count = hello.connection
            known.disconnected_ns = None
            self._losses.note_handshake(known, hello.handshake_ms)
            if hello.is_ready:
                known.on_ready()
            known.witnesses.clear()
            known.back_ns = now_ns
            self._welcome(known)
            return self.operations.on_links_changed(now_ns)  # A sync without a source for it waited for it.
        if hello.is_member:
            return self._refuse_session(connection)
        if self._has_other_masters(connection, hello):
            return None
        if len(self.registry.pending()) >= limits.PENDING_PEERS_MAX or len(self.registry.peers) >= limits.PEERS_MAX:
            return self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
        if misfit := self.registry.misfit_of_host(hello.host, hello.host_size):
            return self._outbox.reply(connection, Kick(Result.INVALID_USAGE, misfit))
        peer = self._register(connection, hello, event.host)
        ahead = "" if hello.is_ready else ", and fetches state ahead"
        of_host = ""
        if peer.host:
            count = len(self.registry.pending_of(peer.host))
            of_host = f", {count} of {peer.host_size} of host {peer.host}"
        self._outbox.log(Level.INFO, f"{peer.name} registered for group {peer.group}{of_host}{ahead}")
        self._welcome(peer)
        return self._introduce(peer)

    def _introduce(self, peer: Peer) -> None:
        """Tells the others of its group how to reach a peer. Of a pair the one that registered later dials first."""
        is_later = False
        for other in self.registry.peers.values():
            if other is peer:
                is_later = True
            elif other.group == peer.group:
                neighbour = self.registry.as_neighbour(peer, other, dial=is_later)
                self._outbox.send(other, NeighboursChanged(joined=(neighbour,)))

    def _has_our_promise(self, hello: Hello) -> bool:
        return Promise.of(hello) == self._leader.promise

    def _is_ahead(self, known: Peer | None, hello: Hello) -> bool:
        """True for a peer of this run that has promised another leadership, which may have begun by now.

        It is a member here. Where lists need quorums, it may also be a pending peer: a list may count its promise too.
        """
        needs_quorum = self._leader.needs_quorum
        is_known = known is not None and (known.is_member or needs_quorum) and known.may_have(hello.token)
        has_promised = needs_quorum and not hello.is_member and hello.leader != NO_ID
        is_credible = self.term <= hello.promised <= limits.TERM_MAX - limits.TERM_STEP_MAX
        is_of_run = hello.run_id == self.run_id and (is_known or has_promised)
        return is_of_run and is_credible and not self._has_our_promise(hello)

    def _is_of_other_run(self, hello: Hello) -> bool:
        return hello.is_member and hello.run_id not in (NO_ID, self.run_id)

    def _has_heard_nothing(self, known: Peer, hello: Hello) -> bool:
        """True for a member that the former master admitted, but that does not know that it was ever a member of a run.

        It may be new. Or this master registered it and lost it before it heard of the admission. With one address it
        may also wait in a run that began meanwhile and that nobody leads any more. With several masters this case does
        not count: another master may lead that run, and the peer may have forgotten a promise that it made here.
        """
        was_here = hello.run_id == self.run_id and hello.term == self.term and self._has_our_promise(hello)
        waits_elsewhere = hello.run_id not in (NO_ID, self.run_id) and not self._leader.needs_quorum
        is_known = hello.is_member or hello.is_returning
        is_unaware = not is_known and (is_new(hello) or was_here or waits_elsewhere)
        return is_unaware and not known.has_reported and known.may_have(hello.token)

    def _ask_again(self, connection: Hashable) -> bool:
        """Asks a peer that still has to report for its Hello again. False if it was already asked on this connection.

        The connection may be broken without this master knowing. Then its first Hello may be from before the peer
        heard of its admission elsewhere. A peer that is still there sends the Hello again.
        """
        if connection in self._asked or len(self._asked) >= limits.PEERS_MAX:
            self._asked.discard(connection)
            return False
        self._asked.add(connection)
        self._outbox.reply(connection, Refused(Refusal.UNREGISTERED, "send a Hello again"))
        return True

    def _on_unaware(self, event: PeerMessageReceived, peer: Peer, hello: Hello, now_ns: int) -> None:
        """Welcomes a member that knows nothing of its run. It has nothing to report and hears of its admission now."""
        history = self._history
        assert history is not None
        self._recognise(peer, event, hello)
        self._welcome_late(peer, history, now_ns)

    def _has_gone_over(self, known: Peer, connection: Hashable, hello: Hello) -> bool:
        """True for a peer of this run that is now a member of another run, or waits to be admitted again.

        A waiting peer belongs to another run, or to none because its own run has yielded. Either it has not reported
        and never will, or another of several masters may have led it since, and it has forgotten its promise to that
        master.
        """
        if hello.is_member:
            has_gone_over = self._is_of_other_run(hello)
        elif not known.has_reported:
            has_gone_over = hello.run_id != self.run_id or hello.leader == NO_ID
        else:
            is_back = hello.run_id != NO_ID and connection != known.connection  # Or it has not read its Welcome yet.
            has_forgotten = is_back and not self._has_our_promise(hello)
            has_gone_over = has_forgotten and known.is_member and self._leader.needs_quorum
        return has_gone_over and known.may_have(hello.token)

    def _on_gone_over(self, event: PeerMessageReceived, peer: Peer, now_ns: int) -> None:
        """Removes a peer that has gone over, then handles its Hello like that of an unregistered peer."""
        self._lose(peer, "has joined another run, or waits to be admitted again", now_ns)
        if self.registry.peers.get(peer.peer_id) is peer:  # Its removal waits until the list is committed.
            return self._refuse_session(event.connection)
        return self._on_message(event, now_ns)

    def _owes_report(self, known: Peer | None, hello: Hello) -> bool:
        """True for a peer of the adopted run that another master led last: its report may contain news."""
        if self._history is None or hello.run_id != self.run_id:
            return False
        has_promised = self._has_our_promise(hello)
        if known is None:  # It may have promised to report, and lost its connection before it did.
            return hello.is_member and hello.term < self.term and (has_promised or hello.promised < self.term)
        return not known.has_reported or (hello.is_member and not has_promised)

    def _expect_report(self, connection: Hashable, known: Peer | None, hello: Hello, now_ns: int) -> None:
        if known is not None and not known.may_have(hello.token):
            return self._refuse_session(connection)
        if known is not None and not known.token:  # Its first message: its time to report starts now.
            known.token, known.disconnected_ns = hello.token, now_ns
        if connection in self._asked:
            return None  # This Hello is its answer to the request: it promises nothing.
        if len(self._asked) < limits.PEERS_MAX:
            self._asked.add(connection)
        return self._ask_for_report(connection, self._leader.promise)

    def _has_other_masters(self, connection: Hashable, hello: Hello) -> bool:
        """True for a newcomer whose list of masters differs from that of the others. It is refused."""
        if self.is_recovering or not self.registry.peers:
            self._masters.forget_if_old(self._outbox.now_ns)
        reason = self._masters.difference(hello)
        if not reason:
            return False
        self._outbox.log(Level.WARNING, f"{hello.name} is refused: {reason}", of_stranger=True)
        self._outbox.reply(connection, Refused(Refusal.OTHER_MASTERS, reason[: limits.TEXT_CHARS_MAX]))
        return True

    def _note_masters(self, hello: Hello) -> None:
        """Keeps the list of masters, which all peers of a run share. A run with several masters needs quorums."""
        self._masters.note(hello, self._outbox.now_ns)
        self._leader.needs_quorum = self._masters.given is not None and self._masters.given.count > 1

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
            phase=PeerPhase.READY if hello.is_ready else PeerPhase.PREFETCHING,
            host=hello.host,
            host_size=hello.host_size,
            registered_ns=self._outbox.now_ns,
            apart_ns=self._apart_ns(hello) if hello.host and hello.master_index else None,
        )
        self._losses.note_handshake(peer, hello.handshake_ms)
        self.registry.add(peer)
        self._relinked.add(peer)
        return peer

    def _apart_ns(self, hello: Hello) -> int:
        """From when a peer waits for its host. It differs by peer, so that parts do not switch masters in step."""
        return self._outbox.now_ns + int.from_bytes(hello.peer_id[:4], "big") % limits.HOST_WAIT_NS

    def _refuse_session(self, connection: Hashable) -> None:
        reason = "this master does not know the peer: the peer was removed, or the master came back too late"
        is_final = not self.is_recovering and self.registry.is_committed
        run_id, epoch = (self.run_id, self.registry.epoch) if is_final else (NO_ID, 0)
        self._outbox.reply(connection, Refused(Refusal.UNKNOWN_SESSION, reason, run_id, epoch=epoch))

    def _welcome(self, peer: Peer) -> None:
        welcome = Welcome(self.run_id, *self._leader.promise, self.registry.host_missing(peer))
        self._outbox.send(peer, welcome)
        if peer.is_member:
            self._outbox.send(peer, self.registry.member_list())
        elif peer.host:
            self._outbox.broadcast((p for p in self.registry.pending_of(peer.host) if p is not peer), welcome)
        self._outbox.send(peer, Neighbours(self.registry.neighbours_of(peer)))

    def _on_linked(self, peer: Peer, message: Linked, now_ns: int) -> None:
        linked = self.registry.link_bits(message.peers)
        gone = self.registry.peers_of_bits(peer.linked & ~linked)
        come = self.registry.peers_of_bits(linked & ~peer.linked)
        if peer.is_member:  # Joiners with a new link get more time: many links take longer than one wait.
            for other in come:
                is_waiting = other.group == peer.group and other.unlinked_ns is not None
                if is_waiting and self._may_wait_again(other.peer_id, now_ns):
                    other.unlinked_ns = now_ns
        peer.linked = linked
        peer.witnesses.clear()
        if not peer.is_member:
            self._relinked.add(peer)
        elif any(other.is_member for other in (*gone, *come)):  # Members may have gained or lost a ring.
            self._relinked.update(self.registry.pending())
        else:
            self._relinked.update(gone, come)
        for other in self.registry.peers_of_bits(linked):
            other.witnesses.pop(peer.peer_id, None)
        for other in gone:
            # Only members are witnesses, and only of a link that both ends had reported.
            is_witness = peer.is_member and other.group == peer.group
            if not is_witness or not other.linked >> peer.slot & 1:
                continue
            other.witnesses[peer.peer_id] = now_ns
            if other.disconnected_ns is not None:
                self._lose_if_seen(other, now_ns)
        self.operations.on_links_changed(now_ns)

    def _on_acknowledgement(self, peer: Peer, message: Acknowledgement, now_ns: int) -> None:
        """A member has accepted a list, which may commit it."""
        if message.epoch >> limits.EPOCH_BITS != self.term:
            return
        peer.phase, peer.acknowledged = PeerPhase.FOLLOWING, max(peer.acknowledged, message.epoch)
        self._stragglers.on_acknowledged(peer, message.epoch)
        if self._leader.acknowledge(peer.peer_id, message.epoch):
            self._on_members_committed(now_ns)

    def _on_members_committed(self, now_ns: int) -> None:
        self.registry.old_members = ()
        self.registry.may_have_broken_hosts = True
        deferred, self._deferred = [*self._deferred.values(), *self._removals.values()], {}
        self._removals = {}
        self._outbox.broadcast(self.registry.order, MembersCommitted(self.registry.epoch))
        dismissed, self._dismissed = self._dismissed, {}
        for connection, gone in dismissed.items():
            self._outbox.reply(connection, gone.kick or Refused(Refusal.UNREGISTERED, "send a Hello again"))
        for change in deferred:
            change(now_ns)
        self.operations.on_members_changed(now_ns)
        self._stragglers.on_committed()

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
        if self.candidate is not None:
            self.candidate.on_connection_closed(connection)
        if self.is_recovering:
            return None
        if self._dismissed.pop(connection, None) is not None and not self._may_lead():
            reason = "a removed member has disconnected, and the other members might not form a quorum"
            return self._step_down(reason, now_ns)
        peer = self.registry.by_connection.get(connection)
        if peer is None:
            return self._losses.on_closed(is_anyone_here=self._is_anyone_here())
        self.registry.bind(peer, None)
        peer.disconnected_ns = now_ns
        self._losses.on_closed(is_anyone_here=self._is_anyone_here())
        self._look_for_outage(peer, now_ns)
        self._lose_if_seen(peer, now_ns)

    def _look_for_outage(self, peer: Peer, now_ns: int) -> None:
        """Looks, once a peer is disconnected, whether all members are. Then none is lost before the network is back."""
        # With several masters the members may have switched to another one. Then this master steps down soon.
        is_only = not self._leader.needs_quorum
        if is_only and self._losses.on_disconnected(peer, now_ns, is_anyone_here=self._is_anyone_here()):
            self._outbox.log(Level.WARNING, "all members disconnected at once; the network of this master may be down")

    def _lose_if_seen(self, peer: Peer, now_ns: int) -> None:
        """Removes a disconnected peer if lost links show that it is lost."""
        if not self._losses.is_given_up(peer, may_be_elsewhere=self._is_new_here(peer)):
            return
        witnesses = [other for other in self.registry.members(peer.group) if self._losses.is_witness(other, peer)]
        if witnesses:
            self._lose(peer, f"lost its connections to the master and to {names(witnesses)}", now_ns)

    def _is_anyone_here(self) -> bool:
        """True while any member, pending peer, or member of the run that may be adopted next is connected."""
        earlier = self.candidate.connections() if self.candidate is not None else []
        return bool(self.registry.by_connection or earlier)

    def _on_keys_revoked(self, event: KeysRevoked, now_ns: int) -> None:
        late = [peer_id for peer_id in self._deferred if peer_id not in self.registry.peers]
        for peer_id in late:
            if _why_revoked(peer_id, event.names):
                del self._deferred[peer_id]  # Its report would make it a member.
        if self.candidate is not None:
            for held in self.candidate.revoke(event.names):
                reason = _why_revoked(held.hello.peer_id, event.names)
                self._outbox.reply(held.event.connection, Kick(Result.MASTER_CONNECTION_FAILED, reason))
        self._remove_revoked(event.names, now_ns)

    def _remove_revoked(self, names: Mapping[str, str], now_ns: int) -> None:
        """Removes the peers with these keys. From now on the master takes only Leave and Acknowledgement from them."""
        for peer in list(self.registry.peers.values()):
            if reason := _why_revoked(peer.peer_id, names):
                self._kick(peer, Result.MASTER_CONNECTION_FAILED, reason, now_ns)

    def _has_stood_still(self, now_ns: int) -> bool:
        """True for a Tick so late that messages may not have been read yet. The next one counts."""
        due_ns = None if self.is_recovering else self.deadline_ns()  # A candidate waits longer by itself.
        if due_ns is None:
            return False
        if due_ns > self._woken_ns and now_ns > due_ns + limits.LATE_TICK_NS:
            self._woken_ns = now_ns + limits.LATE_TICK_NS
        return now_ns < self._woken_ns

    def _on_tick(self, now_ns: int) -> None:
        registry = self.registry
        if self._has_stood_still(now_ns):
            return
        for peer in list(self.registry.peers.values()):
            if peer.disconnected_ns is not None:
                loss_ns = self._loss_ns(peer, self._may_lead())
                if loss_ns is not None and now_ns >= loss_ns and self._may_be_lost(peer):
                    what = "lost its connection to the master" if peer.has_reported else "did not find the new master"
                    self._lose(peer, what, now_ns)
                    if self.registry is not registry:
                        return  # The master has stepped down.
            elif peer.unlinked_ns is not None and now_ns - peer.unlinked_ns >= self.options.link_wait_ns:
                unreached = self.paths.missing(peer)
                if not unreached:
                    continue  # They were lost just now.
                if self._were_away([peer, *unreached], now_ns) and self._may_wait_again(peer.peer_id, now_ns):
                    peer.unlinked_ns = now_ns
                else:
                    reason = f"no data connection to {names(unreached)}"
                    self._kick(peer, Result.RANK_CONNECTION_FAILED, reason, now_ns)
        self._send_on(now_ns)
        self._remove_namesakes(now_ns)
        for group in self.operations.tick(now_ns):
            if not self.registry.is_committed:
                break  # The hosts of those removed just now go first, which needs a committed list.
            if self._were_away(self.registry.members(group), now_ns) and self._may_wait_again(group, now_ns):
                self.operations.wait_again(now_ns)
                continue
            for peer, others in self.paths.surplus(self.registry.members(group), now_ns):
                reason = f"no working data connection to {names(others)}"
                if not self._kick(peer, Result.RANK_CONNECTION_FAILED, reason, now_ns):
                    self.operations.wait_again(now_ns)
            self._remove_broken_hosts(now_ns)  # Without these, the rest of the next group may be connected.
        late = self._stragglers.tick(now_ns, self.options.straggler_timeout_ns)
        for peer, reason in late if self._losses.network is NetworkState.UP else ():
            self._kick(peer, Result.RANK_CONNECTION_LOST, reason, now_ns)
        self._announce_epoch(now_ns)

    def _were_away(self, peers: Sequence[Peer], now_ns: int) -> bool:
        """True if one of these members was disconnected during a wait for links: it could not set up or report any."""
        return any(peer.was_away(now_ns - self.options.link_wait_ns) for peer in peers)

    def _may_wait_again(self, who: int | bytes | None, now_ns: int) -> bool:
        """False once a group or joiner has had more time for its links for AWAY_EXCUSE_MAX on end.

        Members or links that come and go must not hold up the others. While the network of all is broken, they wait on.
        """
        if self._losses.network is not NetworkState.UP:
            return True
        oldest_ns = now_ns - 2 * self.options.link_wait_ns
        self._excused_ns = {key: times for key, times in self._excused_ns.items() if times[1] >= oldest_ns}
        first_ns, _ = self._excused_ns.get(who, (now_ns, now_ns))
        self._excused_ns[who] = first_ns, now_ns
        return now_ns - first_ns < limits.AWAY_EXCUSE_MAX_NS

    def _send_on(self, now_ns: int) -> None:
        """Sends peers on to the next master if the rest of their host does not come: it may be pending at another
        master. The first master of the list sends nobody on, so all peers of a host meet there."""
        hosts = {peer.host for peer, apart_ns in self.registry.apart() if now_ns - apart_ns >= limits.HOST_WAIT_NS}
        for peer in [peer for peer in self.registry.connected_pending() if peer.host in hosts]:
            reason = f"some peers of host {peer.host} have not registered at this master"
            self._outbox.send(peer, Refused(Refusal.NO_QUORUM, reason))
            self._lose(peer, _SENT_ON, now_ns, Level.INFO)

    def _remove_namesakes(self, now_ns: int) -> None:
        """Removes pending peers of a second host of one name. They would wait as long as the first one takes part."""
        found = self.registry.namesakes()
        late = {peer.host for peer in found if now_ns - peer.registered_ns >= limits.HOST_NAMESAKE_WAIT_NS}
        for peer in found:
            if peer.host in late:  # All peers of the host hear the reason, also those that registered later.
                reason = f"peers of a host {peer.host} are members; use another host= name for another host"
                self._kick(peer, Result.INVALID_USAGE, reason, now_ns)

    def _may_be_lost(self, peer: Peer) -> bool:
        """False for a member whose loss must wait until the connected members have committed the current list."""
        return not peer.is_member or self._leader.may_change or not self._may_lose(peer)

    def _loss_ns(self, peer: Peer, may_lead: bool) -> int | None:
        # A master that cannot lead steps down soon: the master that can lead waits for the peers connected here.
        return self._losses.loss_ns(peer, may_be_elsewhere=may_lead and self._is_new_here(peer))

    def _is_new_here(self, peer: Peer) -> bool:
        """True for a member that may still be connected to another of several masters, or may go back to it."""
        return self._leader.needs_quorum and peer.phase in (PeerPhase.ABSENT, PeerPhase.REPORTED)

    def _kick(self, peer: Peer, result: Result, reason: str, now_ns: int) -> bool:
        """Removes a peer. False if the others cannot continue without it.

        With several masters, a connected member also acknowledges the list without it. It gets the Kick once that list
        is committed.
        """
        if self.registry.peers.get(peer.peer_id) is not peer:
            return True  # It is gone, or the master has stepped down.
        if peer.is_member and not self._leader.may_change:
            self._removals.setdefault(peer.peer_id, lambda then_ns: self._kick(peer, result, reason, then_ns))
            return True
        connection, kick = peer.connection, Kick(result, reason[: limits.TEXT_CHARS_MAX])
        if self._leader.needs_quorum and connection is not None and peer.is_member and peer.has_reported:
            self._dismissed[connection] = _Dismissed(peer.peer_id, kick)
        elif not self._may_lose(peer):
            text = f"{peer.name} is not removed, because the others might not form a quorum: {reason}"
            self._outbox.log(Level.WARNING, text)
            return False
        else:
            self._outbox.send(peer, kick)
        self._lose(peer, f"removed: {reason}", now_ns)
        return True

    def _may_lose(self, peer: Peer) -> bool:
        """True if the connected members can continue without `peer`."""
        return not peer.is_member or self._may_lead(without=peer)

    def _may_lead(self, without: Peer | None = None) -> bool:
        """True if connected members can commit lists, together with removed ones whose acknowledgement still counts."""
        here = [p.peer_id for p in self.registry.order if p.connection is not None and p is not without]
        return self._leader.may_lead([*here, *(gone.peer_id for gone in self._dismissed.values())])

    def _on_dismissed(self, connection: Hashable, message: PeerMessage, now_ns: int) -> None:
        """A removed member acknowledges the list without it, or leaves. Its other messages are ignored."""
        peer_id = self._dismissed[connection].peer_id
        if isinstance(message, Leave):
            del self._dismissed[connection]
        if (isinstance(message, Leave) and self._leader.on_left(peer_id)) or (
            isinstance(message, Acknowledgement) and self._leader.acknowledge(peer_id, message.epoch)
        ):
            self._on_members_committed(now_ns)

    def _tell_dismissed(self, connection: Hashable) -> None:
        """Sends the new list to a member of the old list that has reported and is not in the adopted one."""
        self._outbox.reply(connection, Welcome(self.run_id, *self._leader.promise))
        self._outbox.reply(connection, self.registry.member_list())

    def _lose(
        self, peer: Peer, reason: str, now_ns: int, level: Level = Level.WARNING, *, has_left: bool = False
    ) -> None:
        """Removes a lost peer. `has_left`: it sent Leave, so it will not take part at another master either."""
        if self.registry.peers.get(peer.peer_id) is not peer:
            return
        if not has_left and not self._may_lose(peer):
            return self._step_down(f"the other members might not form a quorum: {peer.name} {reason}", now_ns)
        if peer.is_member and not self._leader.may_change:
            self.registry.bind(peer, None)
            peer.disconnected_ns = now_ns

            def lose_unless_back(then_ns: int) -> None:
                if peer.disconnected_ns == now_ns:
                    self._lose(peer, reason, then_ns, level, has_left=has_left)

            self._deferred[peer.peer_id] = lose_unless_back
            if has_left and self._leader.on_left(peer.peer_id):
                self._on_members_committed(now_ns)
            return
        self._remove(peer, reason, now_ns, level, has_left=has_left)
        self._announce_epoch(now_ns)
        if has_left and peer.is_member and self._leader.on_left(peer.peer_id):
            self._on_members_committed(now_ns)
        self._outbox.broadcast(self._others_of_group(peer), NeighboursChanged(gone=(peer.peer_id,)))

    def _remove(self, peer: Peer, reason: str, now_ns: int, level: Level, *, has_left: bool = False) -> None:
        """Removes a peer from the registry. The new list is still to be sent."""
        if peer.is_member and not has_left:
            self._losses.on_lost(now_ns)
        self.counts.losses[_loss_reason(peer, reason)] += 1
        was = "member" if peer.is_member else "pending peer"
        self.registry.remove(peer, is_sent_on=reason == _SENT_ON)
        self._outbox.log(level, f"{was} {peer.name} {reason}")

    # --- Settling ---------------------------------------------------------------------------------------------------

    def _settle(self, now_ns: int) -> None:
        if self._deferred and not self._leader.needs_quorum:
            self._take_newcomers(now_ns)  # First: a run that yields forgets their reports.
        if isinstance(self._phase, Yielding):
            self._settle_yielding(self._phase, now_ns)
        if isinstance(self._phase, Recovering):
            candidate = self._phase.candidate
            for held in candidate.due_newcomers(now_ns):
                if self._has_other_masters(held.event.connection, held.hello):
                    candidate.on_connection_closed(held.event.connection)
            if not candidate.is_over(now_ns):
                return self._turn_away(candidate, now_ns)
            self._phase = Begun()
            self._adopt(candidate, now_ns)
            if self.is_recovering:
                return
        self._remove_broken_hosts(now_ns)
        if self.is_recovering:
            return  # It has stepped down.
        if not self.registry.order:
            # An empty run admits at once, ready or not: nobody has state.
            for peer in self.registry.pending():
                peer.unlinked_ns = None  # The members that it had no link to are gone.
            if first := self.registry.first_joiners():
                who = names(first)
                self._outbox.log(Level.INFO, f"epoch {self.registry.epoch + 1}: admitting {who} to an empty run")
                self._admit(first, now_ns)
        if self._losses.settle():  # Links come up again, and members repeat their votes, only from now on.
            self.operations.wait_again(now_ns)
            for peer in self.registry.peers.values():
                peer.answered_ns = now_ns
                peer.unlinked_ns = None if peer.unlinked_ns is None else now_ns
        self.operations.evaluate(now_ns)
        while self.operations.needs_new_list:
            self.registry.renew()
            self._announce_epoch(now_ns)
            self.operations.evaluate(now_ns)
        for peer in self._relinked:
            if peer.is_member or not self.paths.lacks_links(peer):
                peer.unlinked_ns = None
            elif peer.unlinked_ns is None:
                peer.unlinked_ns = now_ns
        self._relinked.clear()
        self._stragglers.settle(now_ns, self.options.straggler_timeout_ns)

    def _remove_broken_hosts(self, now_ns: int) -> None:
        """Removes all peers of a host that has lost one: they may wait for that peer without end.

        With several masters no list without members is proposed, because it would not show that the run has ended. If
        no member would be left, the master sends a Kick to all. The run then ends as if all its members had died.
        """
        registry = self.registry
        if not registry.may_have_broken_hosts:
            return
        registry.may_have_broken_hosts = False
        for peer in registry.pending_of_broken_hosts():
            self._kick(peer, Result.RANK_CONNECTION_LOST, _host_reason(peer), now_ns)
        members = registry.members_of_broken_hosts()
        is_end = self._leader.needs_quorum and len(members) == len(registry.order)
        for peer in [peer for peer in members if peer.connection is not None]:
            if self.registry is not registry:
                return  # The master has stepped down.
            if is_end:
                self._outbox.send(peer, Kick(Result.RANK_CONNECTION_LOST, _host_reason(peer)))
                registry.bind(peer, None)
                peer.disconnected_ns = now_ns
            elif registry.peers.get(peer.peer_id) is peer:
                self._kick(peer, Result.RANK_CONNECTION_LOST, _host_reason(peer), now_ns)

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
        self.operations.answer_withdrawals()  # First: withdrawn calls are not planned.
        self.operations.on_members_changed(now_ns)

    def _propose(self) -> None:
        """Proposes the current member list."""
        self._leader.propose(self.registry.epoch, (peer.peer_id for peer in self.registry.order))
        self.registry.parent = self._leader.list.parent
        self.registry.old_members = tuple(sorted(self._leader.list.old_members))

    def _others_of_group(self, peer: Peer) -> list[Peer]:
        """All other peers of a peer's group, pending ones too."""
        return [other for other in self.registry.peers.values() if other.group == peer.group and other is not peer]

    def _next_attempt_id(self) -> int:
        self._attempt_count += 1
        return (self.term << limits.EPOCH_BITS) + self._attempt_count  # After 2**32 it still grows.

    # --- Taking a run over ------------------------------------------------------------------------------------------

    def _step_down(self, reason: str, now_ns: int) -> None:
        """Stops leading. The connected peers report again, to this master or to another one."""
        self._outbox.log(Level.WARNING, f"stepping down: {reason}")
        peers = self.registry.by_connection.items()
        pending = [connection for connection, peer in peers if not peer.is_member]
        if not self._leader.needs_quorum:
            pending += self._asked  # Their reports may wait for others. With several masters they try the next one.
        members = [connection for connection, peer in peers if peer.is_member]
        members += self._dismissed  # They are still members if the list without them is not committed.
        members += self.candidate.connections() if self.candidate is not None else []  # Of the other run.
        self._begin_anew()
        self.recover(now_ns, now_ns + limits.RUN_MEMORY_NS)
        assert self.candidate is not None
        for connection in members:
            self.candidate.on_greeted(connection, now_ns)
            self._ask_for_report(connection, self.candidate.promise)
        for connection in pending:
            self._outbox.reply(connection, Refused(Refusal.UNREGISTERED, "send a Hello again"))

    def _begin_anew(self) -> None:
        """Resets to the state after a start, but in a higher term."""
        self._forget_run()
        self.run_id = hashlib.blake2b(self._own_id + self.generation.to_bytes(8, "big"), digest_size=16).digest()
        self._set_term(self._term_after(self.term))

    def _term_after(self, term: int) -> int:
        """A higher term. The step differs between masters, because a term that few peers know must not be reused."""
        salt = (int.from_bytes(self._own_id[:2], "big") + self.generation) % limits.TERM_STEP_MAX
        return min(term + 1 + salt, limits.TERM_MAX)

    def _turn_away(self, candidate: Candidate, now_ns: int) -> None:
        for connection, is_run_here in candidate.take_turned_away(now_ns):
            if is_run_here:
                refused = Refused(Refusal.NO_QUORUM, "this master has no quorum of the run's members")
            else:
                refused = Refused(Refusal.NO_RUN, "this master leads no run", self.run_id)
            self._outbox.reply(connection, refused)

    def _ask_for_report(self, connection: Hashable, promise: Promise) -> None:
        reason = "this master takes the run over and needs a run report first"
        self._outbox.reply(connection, Refused(Refusal.REPORT, reason, NO_ID, *promise))

    def _raise_above(self, candidate: Candidate, hello: Hello) -> bool:
        """If a peer has promised another leadership, takes a higher term, asks all again and returns True."""
        if hello.promised > limits.TERM_MAX - limits.TERM_STEP_MAX or not candidate.is_below(hello):
            return False
        for connection in candidate.raise_term(self._term_after(hello.promised)):
            self._ask_for_report(connection, candidate.promise)
        return True

    def _on_early_message(self, candidate: Candidate, event: PeerMessageReceived, now_ns: int) -> None:
        """Handles Hello, RunReport and Leave while reports are collected. Peers repeat the rest after the Welcome."""
        message, connection = event.message, event.connection
        if isinstance(message, Hello):
            self._on_early_hello(candidate, event, message, now_ns)
        elif isinstance(message, RunReport) and not is_plausible(message):
            self._refuse_session(connection)
        elif isinstance(message, RunReport) and Promise.of(message.hello) != candidate.promise:
            if candidate.knows(connection):  # It answers an earlier request.
                self._raise_above(candidate, message.hello)
            else:  # It answers a request of an earlier recovery, and has not heard of a later one.
                self._on_early_hello(candidate, event, message.hello, now_ns)
        elif isinstance(message, RunReport):
            if not candidate.add(event, message, now_ns):
                self._refuse_session(connection)
        elif isinstance(message, Leave):
            candidate.on_left(connection)
        elif not candidate.knows(connection):
            self._outbox.reply(connection, Refused(Refusal.UNREGISTERED, "send a Hello first"))
        for summoned in candidate.summon():
            if is_new(candidate.held[summoned].hello):  # It promises nothing before a run has registered it.
                self._outbox.reply(summoned, Welcome(candidate.chosen or NO_ID, *candidate.promise))
            self._ask_for_report(summoned, candidate.promise)

    def _on_early_hello(self, candidate: Candidate, event: PeerMessageReceived, hello: Hello, now_ns: int) -> None:
        connection = event.connection
        if hello.is_member or candidate.expects_report(connection):
            if candidate.rebind(event, hello):
                return  # It has reported and will be welcomed with the others.
            if hello.is_member:
                candidate.on_greeted(connection, now_ns)
            if not self._raise_above(candidate, hello) and hello.is_member:  # A pending peer refuses by its Hello.
                self._ask_for_report(connection, candidate.promise)
        elif not candidate.hold(event, hello, now_ns):
            self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
        else:
            if self.is_recovering:
                self._masters.forget_if_old(now_ns)
            if not self._masters.difference(hello):  # If it differs, it is refused later: the members' list goes first.
                self._note_masters(hello)
            if candidate.may_count(hello):
                self._raise_above(candidate, hello)  # Otherwise the master would step down for it as soon as it leads.
            if len(hello.masters) <= 1:  # A peer that knows other masters is turned away later.
                reason = "this master is looking for members of an earlier run"
                self._outbox.reply(connection, Refused(Refusal.NO_QUORUM, reason))

    def _may_yield_to(self, hello: Hello) -> bool:
        """True for a member of an earlier run, while the run led here has decided nothing."""
        return self._is_of_other_run(hello) and not self._must_not_yield()

    def _has_yielded(self, hello: Hello) -> bool:
        """True for a member that was away when its run yielded here. No other master has led it since."""
        return hello.is_member and Promise.of(hello) == self._yielded

    def _must_not_yield(self) -> bool:
        """True once this run has decided something: under this master, or, as a report tells, under an earlier one."""
        return self._has_decided() or (self._history is not None and self._history.has_decided)

    def _decision_count(self) -> int:
        counts = self.counts
        ended = counts.commits + sum(counts.aborts.values()) + counts.syncs_committed + counts.syncs_aborted
        return self._attempt_count + ended

    def _has_decided(self) -> bool:
        """True once an attempt has begun or ended in the current run, apart from what the take-over restored."""
        return self._decision_count() > self._undecided

    def _on_earlier(self, event: PeerMessageReceived, now_ns: int) -> None:
        """A member of an earlier run connects: collects its report, while the run led here continues."""
        if isinstance(self._phase, (Begun, Adopted)):
            self._phase = Yielding(self._stand(now_ns), self._phase)
        assert self.candidate is not None
        self._on_early_message(self.candidate, event, now_ns)

    def _settle_yielding(self, phase: Yielding, now_ns: int) -> None:
        """Yields to an earlier run whose quorum is back, or refuses its members once something is decided here."""
        earlier = phase.candidate
        if self._must_not_yield():
            self._phase = phase.own
            for connection in earlier.connections():
                self._refuse_session(connection)
        elif earlier.is_over(now_ns) and self.registry.have_all_reported:  # One still to report may know a decision.
            connections = [*self.registry.by_connection, *self._dismissed]
            self._outbox.log(Level.WARNING, f"{_YIELDS}, whose members are back")
            self._yielded = self._leader.promise
            self._begin_anew()
            self._phase = Recovering(earlier)
            for connection in connections:
                self._outbox.reply(connection, Refused(Refusal.YIELDED, _YIELDS))

    def _adopt(self, candidate: Candidate, now_ns: int) -> None:
        """Ends the recovery: adopts the run of the reports, or begins a new one."""
        if candidate.chosen is not None:
            self._restore(candidate, candidate.chosen, now_ns)
        else:  # No report contains a member list, so these peers are newcomers.
            for event, _ in candidate.reports.values():
                self._outbox.reply(event.connection, Refused(Refusal.UNREGISTERED, "send a Hello again"))
        for held in candidate.held.values():
            self._on_message(held.event, now_ns)  # One of them may have made it step down.
        for peer_id, name in candidate.revoked.items():  # By peer, not by key: the key may be allowed again by now.
            if peer_id in self.registry.peers:
                self._kick(self.registry.peers[peer_id], Result.MASTER_CONNECTION_FAILED, _key_reason(name), now_ns)

    def _restore(self, candidate: Candidate, run_id: bytes, now_ns: int) -> None:
        reports = [report for _, report in candidate.reports.values()]
        history = History(run_id, reports)
        self._phase, self._adopted_ns = Adopted(history), now_ns
        self._owing = candidate.owing()
        self.run_id, self.term = run_id, candidate.promise.term
        self._masters = CommonList()
        self._leader = Leader(candidate.promise, needs_quorum=False, adopted=history.adopted)
        self._note_masters(next(report.hello for report in reports if report.hello.run_id == run_id))
        self.counts.takeovers += 1
        self._admit_former(history.members, now_ns)
        self.registry.old_members = tuple(sorted(history.adopted.old_members))
        self.registry.epoch = self.term << limits.EPOCH_BITS
        self._outbox.log(
            Level.INFO,
            f"taking over the run of {len(history.members)} members from {len(reports)} reports, in term {self.term}",
        )
        for event, report in candidate.reports.values():
            peer = self._accept_report(event, report, now_ns)
            if peer is not None and peer.is_member:
                history.add(report)
        self._announced_epoch = self.registry.epoch
        for peer_id in candidate.left:
            self._leader.on_left(peer_id)
        self._part(self._takeover.apply_round(history, has_one_address=not self._leader.needs_quorum), now_ns)
        self._propose()
        for peer in list(self.registry.peers.values()):
            if peer.has_reported:
                self._welcome(peer)
        for connection in self._dismissed:
            self._tell_dismissed(connection)
        self._takeover.apply(history, now_ns)
        self._announce_epoch(now_ns)
        self._undecided = self._decision_count()
        for peer_id in candidate.left:
            if peer_id in self.registry.peers:
                self._lose(self.registry.peers[peer_id], _LEFT, now_ns, Level.INFO, has_left=True)
        for peer in self.registry.order[:1]:
            self._look_for_outage(peer, now_ns)  # All may have disconnected after they reported.
        self._relinked.update(self.registry.pending())

    def _admit_former(self, members: Sequence[Member], now_ns: int) -> None:
        """Admits members of a former list: those that still have to report, and those that are pending here."""
        known = [self.registry.peers.get(member.peer_id) for member in members]
        pending = [peer for peer in known if peer is not None and not peer.is_member]
        absent = [
            Peer(member.peer_id, member.group, member.name, (), b"", None)
            for member in members
            if member.peer_id not in self.registry.peers
        ][: limits.PEERS_MAX - len(self.registry.peers)]
        for peer in absent:
            self.registry.add(peer)
        self.registry.admit([*absent, *pending])
        for peer in pending:
            peer.unlinked_ns = None
        for peer in absent:
            peer.phase, peer.disconnected_ns = PeerPhase.ABSENT, now_ns
        for member in members:
            if member.peer_id in self.registry.peers:
                self.registry.peers[member.peer_id].since = member.since

    def _on_report(self, event: PeerMessageReceived, report: RunReport, now_ns: int) -> None:
        """Handles a report that comes after the run was adopted."""
        hello, history = report.hello, self._history
        known = self.registry.peers.get(hello.peer_id)
        bound = self.registry.by_connection.get(event.connection)
        if history is None or (known is not None and known.has_reported) or bound is not None:
            return self._on_hello(event, bound, hello, now_ns)
        if not self._has_our_promise(hello):
            return self._on_hello(event, bound, hello, now_ns)
        if hello.run_id != self.run_id or not is_plausible(report):
            return self._refuse_report(event, report, now_ns)
        may_join = hello.peer_id not in self.registry.old_members or self._would_admit(history, report)
        must_wait = may_join and not self._leader.may_change
        if known is None and (must_wait or self._may_be_told_of(history, report)):
            if len(self._deferred) < limits.PEERS_MAX:
                self._asked.add(event.connection)
                self._deferred[hello.peer_id] = lambda then_ns: self._on_late_report(event, report, then_ns)
            return None
        self._asked.discard(event.connection)
        peer = self._accept_report(event, report, now_ns)
        if peer is None:
            return self._tell_dismissed(event.connection) if event.connection in self._dismissed else None
        has_answered = self._outbox.answered_ns >= self._adopted_ns or history.has_told(self.registry.round)
        late = hello.peer_id if self._has_decided() or has_answered else None
        has_one_address = not self._leader.needs_quorum  # With a quorum, the reports had every committed list.
        if peer.is_member:
            history.add(report)
        parted = self._takeover.apply_round(history, has_one_address=has_one_address, late=late)
        self._part(parted, now_ns)
        if self.registry.epoch != self._announced_epoch:
            self._propose()  # Before the list is sent.
            others = [other for other in self.registry.order if other is not peer]
            self._outbox.broadcast(others, self.registry.member_list())  # Before votes of its round are answered.
        self._welcome_late(peer, history, now_ns)
        for gone in parted:
            self._outbox.broadcast(self._others_of_group(gone), NeighboursChanged(gone=(gone.peer_id,)))

    def _part(self, peers: Sequence[Peer], now_ns: int) -> None:
        """Removes peers because the former master had removed them, or the others. It does so before any list is sent.

        Otherwise a member could get a list with both sides, and if this master then died, no report would tell the next
        one of the removal. What their loss means for running attempts follows when the reports have been applied.
        """
        for peer in peers:
            self._outbox.send(peer, Kick(Result.RANK_CONNECTION_LOST, PARTED))
            self._remove(peer, f"removed: {PARTED}", now_ns, Level.WARNING)

    def _would_admit(self, history: History, report: RunReport) -> bool:
        """True for a newcomer whose admission no member has heard of, while members wait in the call that admitted it.

        They no longer wait in that call once they have withdrawn it or made other calls. Then they will not take its
        answer for the answer to the next call.
        """
        have_gone_on = self._has_decided() or self._outbox.refused_ns > self._adopted_ns
        # With one address, the former master may have removed members before it admitted newcomers. If a member reports
        # that, they go (`History.parted`). If a newcomer does, they do not: it may be the only one that has no state.
        may_part = not self._leader.needs_quorum and self._is_member(report.hello.peer_id)
        return history.would_admit(report, self.registry.round, keeps_all=not may_part) and not have_gone_on

    def _may_be_told_of(self, history: History, report: RunReport) -> bool:
        """True for a newcomer that is no member by its report, if a member that is still to report may tell more.

        Otherwise it registers again. If it did that before, its calls would end, and it would be admitted between two.
        """
        if self._leader.needs_quorum or self.registry.have_all_reported or self._would_admit(history, report):
            return False
        return history.would_admit(report, self.registry.round, keeps_all=False)

    def _may_register_again(self, history: History, report: RunReport) -> bool:
        """True for an unknown newcomer that the former master admitted, and that has taken part in nothing.

        With several masters it sees that by itself. A member that was lost here may have made many calls.
        """
        if self._leader.needs_quorum or report.hello.peer_id in history.adopted.members:
            return False
        return history.would_admit(report, -1, keeps_all=False) and not has_decided(report)

    def _take_newcomers(self, now_ns: int) -> None:
        """Handles the reports of newcomers of whose admission a member has told by now, or no member will tell."""
        is_last = self.registry.have_all_reported
        for peer_id in list(self._deferred):
            if is_last or peer_id in self.registry.peers:
                self._deferred.pop(peer_id)(now_ns)

    def _welcome_late(self, peer: Peer, history: History, now_ns: int) -> None:
        """Welcomes a peer of the adopted run that comes after the others, and decides operations that waited for it."""
        if self.registry.peers.get(peer.peer_id) is peer:  # It may have had to go.
            self._welcome(peer)
            self._introduce(peer)  # Its addresses, and which end dials, may be new.
        self._relinked.update(self.registry.pending())
        self._takeover.apply(history, now_ns)
        self.collectives.send_plans(peer)
        self._announce_epoch(now_ns)
        self.operations.on_members_changed(now_ns)

    def _is_member(self, peer_id: bytes) -> bool:
        peer = self.registry.peers.get(peer_id)
        return peer is not None and peer.is_member

    def _recognise(self, peer: Peer, event: PeerMessageReceived, hello: Hello) -> None:
        """Takes what a member of the adopted list says in its Hello, and binds its connection."""
        peer.addresses, peer.token = with_seen_address(hello.addresses, event.host), hello.token
        peer.connection_count, peer.phase, peer.disconnected_ns = hello.connection, PeerPhase.REPORTED, None
        peer.host, peer.host_size, peer.answered_ns = hello.host, hello.host_size, self._outbox.now_ns
        peer.back_ns = self._outbox.now_ns
        self._losses.note_handshake(peer, hello.handshake_ms)
        self.registry.bind(peer, event.connection)

    def _refuse_report(self, event: PeerMessageReceived, report: RunReport, now_ns: int) -> None:
        """Refuses a member of another run. If nothing was decided there, it may register with this one.

        With several masters, another master may lead that run and decide something there without this member. With one
        address the refusal would be final, so this run, if it has decided nothing, may yield as to a later Hello.
        """
        is_whole = not self._leader.needs_quorum or is_sole(report.hello.peer_id, MemberList.of(report))
        if report.hello.run_id != self.run_id and is_whole and not has_decided(report):
            return self._outbox.reply(event.connection, Refused(Refusal.YIELDED, _YIELDS))
        is_here = event.connection is not None and not self._leader.needs_quorum
        if is_here and self._may_yield_to(report.hello):
            return self._on_hello(event, None, report.hello, now_ns)
        return self._refuse_session(event.connection)

    def _on_late_report(self, event: PeerMessageReceived, report: RunReport, now_ns: int) -> None:
        """Handles the report of a peer outside the adopted list once that list is committed. The peer may be gone."""
        if event.connection in self._asked:
            self._on_report(event, report, now_ns)

    def _accept_report(self, event: PeerMessageReceived, report: RunReport, now_ns: int) -> Peer | None:
        """Registers the peer that reports. None if it is refused, or only has to acknowledge its removal."""
        history, hello = self._history, report.hello
        assert history is not None
        peer = self.registry.peers.get(hello.peer_id)
        connection = event.connection
        is_other = peer is not None and not peer.may_have(hello.token)
        if hello.run_id != history.run_id or is_other:
            self._refuse_report(event, report, now_ns)
            return None
        is_admission = self._would_admit(history, report)  # By the former master; no other peer knew it.
        if peer is not None:
            self._recognise(peer, event, hello)
        elif len(self.registry.peers) >= limits.PEERS_MAX:
            self._outbox.reply(connection, Refused(Refusal.FULL, "the run takes no more peers"))
            return None
        elif is_admission:
            peer = self._register(connection, hello, event.host)
        elif connection is not None and hello.peer_id in self.registry.old_members:
            kick = Kick(Result.RANK_CONNECTION_LOST, "removed by the former master") if hello.is_member else None
            self._dismissed[connection] = _Dismissed(hello.peer_id, kick)
            return None
        elif not hello.is_member:
            peer = self._register(connection, hello, event.host)
        elif self._may_register_again(history, report):
            self._outbox.reply(connection, Refused(Refusal.YIELDED, _YIELDS))
            return None
        else:
            self._refuse_session(connection)
            return None
        if is_admission and not (self._leader.needs_quorum and peer.is_member):
            # Peers admitted with it still have to report, or are pending because they have not heard of it. Members of
            # the adopted list are left out: one that was removed since stays removed until it reports itself.
            known = [member for member in history.members if member.peer_id != hello.peer_id]
            admitted = [member for member in report.members if member not in known]
            if any(not self._is_member(member.peer_id) for member in admitted):
                self._admit_former(admitted, now_ns)
        if connection is None:  # It disconnected while others reported.
            peer.disconnected_ns = now_ns
        peer.oldest_call_id = report.oldest_call_id
        return peer


def start_master(own_id: bytes, options: MasterOptions | None, now_ns: int) -> MasterMachine:
    """Makes the master with which a process starts, also in the simulator: it first looks for peers of an earlier run.

    Args:
        own_id: 16 random bytes.
        options: its timeouts; None: the defaults.
        now_ns: the time.
    """
    machine = MasterMachine(own_id, options=options)
    machine.recover(now_ns)
    return machine


@dataclass(frozen=True)
class _Dismissed:
    """A removed member: its acknowledgement counts until the list without it is committed."""

    peer_id: bytes
    kick: Kick | None
    """Sent once that list is committed; None: the peer never knew that it was a member, and may register again."""


def _why_revoked(peer_id: bytes, names: Mapping[str, str]) -> str:
    """Why a peer is removed if its key is one of these named keys; otherwise empty."""
    found = (name for identity, name in names.items() if is_peer_id_of(peer_id, identity))
    return next(map(_key_reason, found), "")


def _key_reason(name: str) -> str:
    return f"its key, {name}, is no longer allowed"


def _host_reason(peer: Peer) -> str:
    return f"its host {peer.host} has lost a peer"


def _loss_reason(peer: Peer, reason: str) -> LossReason:
    if reason in (_LEFT, _SENT_ON):
        return LossReason.LEFT
    if not peer.has_reported:
        return LossReason.ABSENT
    return LossReason.KICKED if peer.disconnected_ns is None else LossReason.DISCONNECTED


def with_seen_address(addresses: tuple[str, ...], host: str) -> tuple[str, ...]:
    """Adds the host that the master sees, with the port of the first address, as the second of a peer's addresses.

    The first address is one that the user named, or that of the interface through which the peer reaches the master.
    So it equals the address seen unless a NAT lies between them. The second is also dialled as the address of a NAT.
    """
    if not addresses or not host:
        return addresses
    first, *others = addresses
    port = first.rpartition(":")[2]
    seen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if seen == first:
        return addresses
    return (first, seen, *(address for address in others if address != seen))[: limits.ADDRESSES_PER_PEER_MAX]
