"""The peer: one state machine between the user's calls, the master and the data plane.

    event                         CONNECTING          PENDING         MEMBER                RETURNING
    Welcome                       PENDING             registered      led [1]               registered
    Members with this peer        -                   MEMBER          takes the list        MEMBER
    Refused: UNREGISTERED         Hello               Hello, links    Hello, links, calls   Hello, links
    Refused: REPORT               Hello               RunReport [2]   RunReport [2]         RunReport [2]
    Refused: YIELDED              Hello               Hello           RETURNING, Hello      Hello
    Refused: UNKNOWN_SESSION      next master [3][4]  CONNECTING [3]  next master [3][7]    Hello if led, else next [3]
    Refused: NO_RUN               next master         next master     next master           next master
    Refused: NO_QUORUM            next master [4][9]  next master     next master           next master
    Refused: FULL, OTHER_MASTERS  CLOSED              CLOSED          CLOSED                CLOSED
    Kick, CloseCalled             CLOSED              CLOSED          CLOSED                CLOSED
    ConnectionUp                  Hello               Hello, links    Hello, links, calls   Hello, links
    ConnectionFailed              next master [4]     next master     next master           next master
    OtherVersion, Nonsense        next master [4]     next master [5] next master [5]       next master [5]
    AuthenticationRefused         CLOSED              next master     next master           next master
    ConnectionDown                next master [4]     - [6]           - [6]                 - [6]
    Tick, no master in time       next master [3][4]  CLOSED          CLOSED                CLOSED
    Tick, host incomplete [8]     -                   CLOSED          -                     CLOSED

    NEW becomes CONNECTING by ConnectCalled, or CLOSED by CloseCalled. CLOSED is final: all calls end with its error.
    [1] If it comes from the promised leadership; else the peer ignores it.
    [2] If the promise is granted; else Hello. A returning peer that no run has registered since sends Hello.
    [3] With one master: CLOSED. A member also closes if a committed list, its own or a later one, has removed it.
        With one master, a returning peer that no run has registered since ignores it: an earlier message is refused.
    [4] CLOSED if no try is left, or if all masters are of other versions. [5] Not while a master leads this peer.
    [6] The session connects again. With only one master, "next master" means the same one.
    [7] As for YIELDED if the peer knows of no planned or decided operation of its run, and if the only master leads
        another run, or a committed list has removed the peer and it does not know that any list that names it was
        committed.
    [8] While a master leads the peer, once masters have reported the host as incomplete for HOST_TIMEOUT_NS, and at
        least HOST_WAIT_NS after the last such report.
    [9] With one master: the peer waits for it up to the master timeout, like a member.

On a new connection the peer sends Hello and repeats its open messages: those of every call without an answer. It does
the same when another master takes the run over. That master first asks for a run report (memory.py), which is also a
promise: a member obeys only the leadership that it promised last (leadership.py). A pending peer obeys the master that
registered it last; with several masters, it obeys a leader of its run only if it has promised this leadership or the
term is higher. Between a promise and the Welcome for it, the peer sends nothing about its calls. Attempt ids never
repeat, and the peer starts or ends each attempt that it hears of, so the data plane can tell stale frames from early
ones.

The master answers a call that the user has withdrawn. The peer releases the call if no answer comes within
WITHDRAW_TIMEOUT_NS, or at once if no master leads the peer and its part is not done. The user then gets an error, and
the peer repeats what the other participants need until a decision comes (calls.py). If the decision is a commit, the
peer leaves the run, since it lacks the result. The peer answers a collective as soon as it knows that all participants
have the same result; the call stays open until the decision comes (commit.py).

With several masters, the peer switches to the next one when one does not answer, or answers but does not lead the run
within some time. A newcomer asks all masters whether they lead a run. Only the first master may begin one, once all
have answered that they lead none. A run that newcomers began, and that has decided nothing, may yield to another run:
its members then register with that run, in state RETURNING. A member whose admission was never committed does the same
[7]. Until such a peer is admitted, its calls are answered as if it were alone; update_topology() waits.

The peer keeps a link to every other peer of its group, as listed in the master's Neighbours. Both ends dial
(../control/links.py), and each tries again, with growing pauses, until the link is up or the neighbour is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import (
    AuthenticationFailed,
    HostIncomplete,
    InvalidUsage,
    Kicked,
    MasterUnreachable,
    OperationTimeout,
    PCCLError,
    PendingAsyncOps,
    Result,
    TooFewPeers,
    VersionMismatch,
)
from zpccl.protocol import events
from zpccl.protocol.calls import (
    Ahead,
    Call,
    CallPhase,
    Released,
    error_of,
    error_of_kick,
    is_barrier,
    is_collective,
    is_question,
    is_sync,
    is_update,
    tag_of,
)
from zpccl.protocol.commit import Digests, Told, tells_digests
from zpccl.protocol.effects import (
    CloseLink,
    EndReduce,
    EndSync,
    FetchAhead,
    Level,
    Log,
    OpenLink,
    PeerEffect,
    Reject,
    Resolve,
    Send,
    ShowMeasurements,
    StartReduce,
    StartSync,
    UseMaster,
)
from zpccl.protocol.leadership import Acceptor, Promise
from zpccl.protocol.master_list import MasterList
from zpccl.protocol.memory import Memory, has_decided
from zpccl.protocol.messages import (
    NO_ID,
    Acknowledgement,
    CollectiveSpec,
    Decision,
    Dropped,
    Fetching,
    Hello,
    Kick,
    Leave,
    Linked,
    MasterMessage,
    Measurements,
    MeasurementsRequest,
    Member,
    Members,
    MembersCommitted,
    Neighbour,
    Neighbours,
    NeighboursChanged,
    PathSample,
    PeerMessage,
    Plan,
    Ready,
    Reducing,
    Refusal,
    Refused,
    Report,
    RunReport,
    Spec,
    TopologyKind,
    TopologySpec,
    Vote,
    Votes,
    Welcome,
    Withdraw,
)
from zpccl.protocol.plans import tensor_of
from zpccl.protocol.rings import neighbours_of
from zpccl.types import Algorithm, CollectiveKind

LEFT_BEHIND = "the others finished a collective without this peer"
"""Why a peer leaves if a collective is committed and it lacks the result."""


SPLIT = "this peer and the others committed a collective that their master does not count as committed"
"""Why a peer leaves if the participants have committed an attempt and a master decides otherwise: one is faulty."""


_WITHDRAWN = "withdrawn"
"""The reported reason for the failure of an attempt whose call was released."""


class State(enum.Enum):
    """Where a peer stands in the run."""

    NEW = "new"
    CONNECTING = "connecting"
    PENDING = "pending"
    MEMBER = "member"
    RETURNING = "returning"
    """It was a member of a run that has yielded to another one, or goes on without it, and waits to be admitted."""
    CLOSED = "closed"


@dataclass(frozen=True)
class PeerOptions:
    """The identity of a peer, and its times in nanoseconds."""

    peer_id: bytes
    token: bytes
    name: str
    group: int = 0
    addresses: tuple[str, ...] = ()
    masters: tuple[str, ...] = ("",)
    """The addresses of the masters, for error messages. The first connection goes to the first one."""
    is_ready: bool = True
    """False: it fetches state ahead, and is not admitted before ReadyCalled."""
    host: str = ""
    """Not empty: it is admitted and removed together with the other peers of this host."""
    host_size: int = 0
    registration_timeout_ns: int = limits.REGISTRATION_TIMEOUT_NS
    master_timeout_ns: int = limits.MASTER_TIMEOUT_NS


@dataclass(slots=True)
class _Link:
    """The link to one neighbour."""

    neighbour: Neighbour
    is_up: bool = False
    retry_ns: int | None = None
    failures: int = 0
    reason: str = "still dialled"
    """Why it is not up."""


class PeerMachine:
    """The protocol of a peer.

    Attributes:
        state: where it stands in the run.
        epoch, members: the latest member list, each group in ring order.
        error: why it is closed; None before.
    """

    def __init__(self, options: PeerOptions) -> None:
        self.options = options
        self.state = State.NEW
        self.epoch = 0
        self.members: tuple[Member, ...] = ()
        self.run_id = NO_ID
        self.term = 0
        self._acceptor = Acceptor()
        self.error: PCCLError | None = None
        self.calls: dict[int, Call] = {}
        self._has_yielded = False
        """Its run has yielded, and no run has registered it since."""
        self._is_ready = options.is_ready
        self._was_unready = not options.is_ready
        self._old_members: tuple[bytes, ...] = ()
        self._parent = 0
        self._connect_call: int | None = None
        self._tries = 0
        self._tries_left = 0
        self._masters = MasterList(options.masters, options.peer_id)
        self._is_connected = False
        self._other_versions: set[int] = set()  # Indexes of masters of another version.
        self._connection_count = 0
        self._handshake_ns: dict[int, int] = {}  # The shortest handshake with each master.
        self._deadline_ns: int | None = None  # The end of the wait to be registered, or to be led again.
        self._why_not_led = ""  # Why the only master does not lead, as it told this newcomer; "": it is silent.
        self._host_missing = 0  # How many peers of its host have not registered, as the master last said.
        self._host_deadline_ns: int | None = None  # The end of the wait for them.
        self._links: dict[bytes, _Link] = {}
        self._next_call_id = 0
        self._release_ns: dict[int, int] = {}  # When withdrawn calls are released, by call id, the earliest first.
        self._memory = Memory()
        self._ahead: dict[int, Ahead] = {}  # By tag, the newest last.
        self._ended_ahead: dict[int, None] = {}  # Attempts that others have ended, the newest last.
        self._attempt_max = 0  # The greatest that it has started or ended by what the master says.
        self._early_bytes = 0  # At most what it has sent to each other peer in attempts ahead that have not ended.
        self._digests = Digests()
        self._given_up: TopologySpec | None = None  # The call that the user gave up, until another call follows it.
        self._wants_measurements = False
        self._now_ns = 0  # When the current event came.
        self._effects: list[PeerEffect] = []

    # --- The view of the run ----------------------------------------------------------------------------------------

    def group_members(self) -> tuple[Member, ...]:
        """The members of this peer's group, in ring order."""
        return tuple(member for member in self.members if member.group == self.options.group)

    @property
    def is_led(self) -> bool:
        """True while a master leads this peer. Otherwise no attempt counts as stalled: others may lack its plan."""
        return self._acceptor.is_led

    @property
    def is_unregistered(self) -> bool:
        """True for a returning peer that no run has registered since: its member list is from its former membership."""
        return self.state is State.RETURNING and self._has_yielded

    def wants_link(self, peer_id: bytes) -> bool:
        """True if the peer is a neighbour. A link may come up after its other end has ceased to be one."""
        return peer_id in self._links

    def neighbour_name(self, peer_id: bytes) -> str:
        """The name of a neighbour, for the log."""
        return self._links[peer_id].neighbour.name

    def deadline_ns(self) -> int | None:
        """When the next Tick is due, or None."""
        host_ns = self._host_deadline_ns if self._acceptor.is_led else None
        release_ns = next(iter(self._release_ns.values()), None)  # In the order in which they are due.
        deadlines = (self._deadline_ns, self._masters.stay_ns, self._masters.switch_ns, host_ns, release_ns)
        due = [deadline_ns for deadline_ns in deadlines if deadline_ns is not None]
        due += [link.retry_ns for link in self._links.values() if link.retry_ns is not None]
        return min(due, default=None)

    def validate(self) -> None:
        """Asserts what always holds between events."""
        assert (self.state is State.CLOSED) == (self.error is not None)
        assert self._is_connected or not self._acceptor.is_led
        assert self.term == self._acceptor.promised.term or not self._acceptor.is_led
        assert self._connect_call is None or self.state in (State.CONNECTING, State.PENDING)
        assert self._host_deadline_ns is None or (self._host_missing and self.state not in (State.MEMBER, State.CLOSED))
        if not self.calls:
            assert not self._release_ns
            return
        assert self.state in (State.MEMBER, State.RETURNING)
        assert all(call.call_id == call_id for call_id, call in self.calls.items())
        calls = list(self.calls.values())
        assert are_compatible([call for call in calls if not call.has_answer]), "open calls exclude each other"
        released = Released(calls)
        for call in calls:
            if call.is_released:
                assert call.withdrawn is not None and call.phase in (CallPhase.VOTING, CallPhase.REPORTED)
            elif call.phase is CallPhase.HELD:
                assert not self._free([call]) and call.withdrawn is None
            elif call.phase is not CallPhase.COMMITTED:
                assert not released.block(call), "released calls block a call that is not held"
        waiting = [call.call_id for call in calls if call.withdrawn is not None and not call.has_answer]
        assert sorted(self._release_ns) == sorted(waiting)

    def handle(self, event: events.PeerEvent, now_ns: int) -> list[PeerEffect]:
        """Takes one event and returns what to do, in order."""
        self._now_ns = now_ns
        if isinstance(event, events.MasterMessageReceived):
            self._on_message(event.message, now_ns)
        elif isinstance(event, events.ReduceDone):
            self._on_reduce_done(event, now_ns)
        elif isinstance(event, events.DigestReceived):
            self._on_digest(event)
        elif isinstance(event, events.AttemptEnded):
            self._on_attempt_ended(event.peer_id, event.attempt_id)
        elif isinstance(event, events.FetchDone):
            self._on_fetch_done(event)
        elif isinstance(event, events.Called):
            self._on_call(event.votes, now_ns)
        elif isinstance(event, events.CallWithdrawn):
            self._on_withdrawn(event, now_ns)
        elif isinstance(event, events.MeasurementsCalled):
            self._on_measurements_called()
        elif isinstance(event, (events.LinkUp, events.LinkFailed)):
            self._on_link(event, now_ns)
        elif isinstance(event, events.Tick):
            self._on_tick(now_ns)
        elif isinstance(event, events.ReadyCalled):
            self._on_ready()
        elif isinstance(event, events.CloseCalled):
            self._on_close()
        else:
            self._on_connection(event, now_ns)
        effects, self._effects = self._effects, []
        return effects

    # --- The connection to the master -------------------------------------------------------------------------------

    def _on_connection(
        self,
        event: events.ConnectCalled
        | events.ConnectionUp
        | events.ConnectionFailed
        | events.AuthenticationRefused
        | events.ConnectionDown
        | events.OtherVersionReceived
        | events.NonsenseReceived,
        now_ns: int,
    ) -> None:
        if isinstance(event, events.ConnectCalled):
            self._on_connect(event)
        elif self.state in (State.NEW, State.CLOSED):
            return
        elif isinstance(event, events.ConnectionUp):
            self._is_connected = True
            self._acceptor.on_disconnected()
            self._other_versions.discard(self._masters.index)
            self._masters.on_connected()
            self._connection_count += 1
            self._note_handshake(event.handshake_ns)
            if self.state is State.CONNECTING:
                self._deadline_ns = now_ns + self.options.registration_timeout_ns
                self._why_not_led = ""
            else:
                self._masters.stay(now_ns)
            self._send_everything()
        elif isinstance(event, events.ConnectionFailed):
            self._on_try_failed(f"nobody answers ({event.reason})", now_ns)
        elif isinstance(event, events.AuthenticationRefused):
            self._on_authentication_refused(event, now_ns)
        elif isinstance(event, events.ConnectionDown):
            if not self._is_connected:
                return  # It was never up: ConnectionFailed has reported that.
            self._is_connected = False
            self._acceptor.on_disconnected()
            self._masters.on_disconnected()
            if self.state is State.CONNECTING:
                self._deadline_ns = None
                return self._on_try_failed("the connection broke before it answered", now_ns)
            self._log(Level.WARNING, "lost the connection to the master; connecting again")
            self._miss_master(now_ns)
        else:
            self._on_foreign(event, now_ns)

    def _on_foreign(self, event: events.OtherVersionReceived | events.NonsenseReceived, now_ns: int) -> None:
        """The server is not a master of this protocol, perhaps by its operator's mistake: the peer tries other masters.

        A newcomer closes once all masters are of other versions; a peer of the run waits for its master.
        """
        master, is_version = self._masters.address, isinstance(event, events.OtherVersionReceived)
        text = (
            f"it sent bytes that are not a message from a master: {event.reason}"
            if isinstance(event, events.NonsenseReceived)
            else (f"it speaks protocol version {event.version}, this peer {limits.PROTOCOL_VERSION}")
        )
        if self._acceptor.is_led:
            return self._log(Level.ERROR, f"{master}: {text}; it leads the run, which continues")
        if self.state is State.CONNECTING and is_version:
            self._other_versions.add(self._masters.index)
            if len(self._other_versions) == len(self._masters.addresses):
                return self._close(VersionMismatch(f"{master}: {text}; install the same zpccl on both sides"))
        goes_on = "switching to the next master" if self._masters.has_others else "waiting for a master there"
        self._log(Level.WARNING, f"{master}: {text}; {goes_on}")
        if self._masters.has_others:
            self._on_try_failed(text, now_ns)

    def _note_handshake(self, handshake_ns: int) -> None:
        """Keeps the shortest handshake with a master: longer ones were delayed by lost packets or a busy host."""
        index = self._masters.index
        if handshake_ns > 0:
            self._handshake_ns[index] = min(handshake_ns, self._handshake_ns.get(index, handshake_ns))

    def _miss_master(self, now_ns: int) -> None:
        """No master leads the run: limits the wait for one, which began when the last one stopped leading."""
        if self._deadline_ns is None:
            self._deadline_ns = now_ns + self.options.master_timeout_ns

    def _on_connect(self, event: events.ConnectCalled) -> None:
        if self.state is not State.NEW:
            error = self.error or InvalidUsage("connect() was called already")
            return self._effects.append(Reject(event.call_id, error))
        self.state = State.CONNECTING
        self._connect_call = event.call_id
        self._next_call_id = event.call_id + 1
        self._tries = self._tries_left = event.attempts * len(self._masters.addresses)

    def _on_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._send_ready()

    def _send_ready(self) -> None:
        """Sends Ready if the peer was not ready at first: its last Hello was perhaps older, or to another master."""
        if self._is_registered() and not self.is_unregistered and self._is_ready and self._was_unready:
            self._send(Ready())

    def _on_try_failed(self, reason: str, now_ns: int) -> None:
        if self.state is State.CONNECTING:
            self._masters.on_no_answer()
            self._tries_left -= 1
            if self._tries_left <= 0:
                return self._close(self._unreachable(reason))
        return self._masters.fail(now_ns)

    def _on_authentication_refused(self, event: events.AuthenticationRefused, now_ns: int) -> None:
        master = self._masters.address
        if self.state is State.CONNECTING:
            return self._close(AuthenticationFailed(f"{master}: {event.reason}", address=master))
        # The refusal itself is not authenticated, so it may be forged: a peer of the run waits for its master.
        self._log(Level.WARNING, f"{master} refuses this peer: {event.reason}; trying again")
        self._masters.fail(now_ns)

    def _is_registered(self) -> bool:
        """True while a run has registered it, but not admitted it."""
        return self.state in (State.PENDING, State.RETURNING)

    def _switch_master(self, now_ns: int) -> None:
        """Switches to the next master. From now on no master leads this peer, though no connection broke."""
        self._is_connected = False
        self._acceptor.on_disconnected()
        if self.state is State.CONNECTING:
            self._deadline_ns = None
        else:
            self._miss_master(now_ns)
        self._effects.append(UseMaster(self._masters.switch()))

    def _unreachable(self, reason: str) -> MasterUnreachable:
        master = ",".join(self.options.masters)
        text = f"no master at {master}: {reason}; is zpccl-master running there, and does a firewall let it through?"
        return MasterUnreachable(text, address=master)

    def _send_everything(self) -> None:
        """Sends Hello, then all that the master may not have received."""
        self._send(self._hello())
        self._send_standing()

    def _hello(self) -> Hello:
        options = self.options
        return Hello(
            options.peer_id,
            options.token,
            self.state is State.MEMBER,
            options.group,
            options.name,
            options.addresses,
            self._connection_count,
            self.run_id,
            self.term,
            *self._acceptor.promised,
            options.masters if self._masters.has_others else (),
            self._masters.index,
            self._masters.begins,
            self._is_ready,
            min(self._handshake_ns.get(self._masters.index, 0) // limits.MS, limits.HANDSHAKE_MS_MAX),
            options.host,
            options.host_size,
            self.state is State.RETURNING,
        )

    def _send_standing(self) -> None:
        """Sends which links are up, and repeats all messages that wait for an answer."""
        self._send_linked()
        self._send_ready()
        if self.state is State.RETURNING:
            return  # Its calls are for the run that is to admit it.
        for call in self.calls.values():
            for message in call.standing(self._oldest_call_id()):
                self._send(message)
        if self._wants_measurements:
            self._send(MeasurementsRequest())

    def _on_measurements_called(self) -> None:
        """Asks the master, unless it was asked already: one answer serves all waiting callers."""
        if not self._wants_measurements and self.state is not State.CLOSED:
            self._wants_measurements = True
            if self.state is State.MEMBER:
                self._send(MeasurementsRequest())

    def _on_measurements(self, message: Measurements) -> None:
        if self._wants_measurements:
            self._wants_measurements = False
            self._effects.append(ShowMeasurements(message))

    def _promise(self, message: Refused, now_ns: int) -> None:
        """A master that takes a run over asks for a promise. A run report grants it, a Hello refuses it.

        The peer repeats its open messages once that master leads.
        """
        asked = Promise(message.term, message.leader)
        if self.state is State.CONNECTING or self.is_unregistered or not self._acceptor.promise(asked):
            return self._send(self._hello())
        self._miss_master(now_ns)
        self._masters.stay(now_ns)
        self._send(self._run_report())
        return None

    def _run_report(self) -> RunReport:
        """What the peer knows of the run. It reports the list that it has acknowledged even while it is no member."""
        members = self.members if self.epoch else ()
        return self._memory.report(
            self._hello(),
            self._oldest_call_id(),
            self.epoch if members else 0,
            members,
            self._old_members if members else (),
            self._parent if members else 0,
            self.calls.values(),
        )

    def _oldest_call_id(self) -> int:
        return min(self.calls, default=self._next_call_id)

    def _on_message(self, message: MasterMessage, now_ns: int) -> None:
        if self.state in (State.NEW, State.CLOSED):
            return
        if not self._acceptor.is_led and not isinstance(message, (Welcome, Refused, Kick)):
            return  # From a master that this peer does not obey, or from a former connection: it will be sent again.
        if isinstance(message, Plan):
            self._on_plan(message)
        elif isinstance(message, Decision):
            self._on_decision(message)
        elif isinstance(message, Members):
            self._on_members(message)
        elif isinstance(message, Measurements):
            self._on_measurements(message)
        elif isinstance(message, Neighbours):
            self._on_neighbours(message)
        elif isinstance(message, NeighboursChanged):
            self._on_neighbours_changed(message)
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Kick):
            unreached = {link.neighbour.name: link.reason for link in self._links.values() if not link.is_up}
            was_member = self.state is State.MEMBER
            error = error_of_kick(message.result, message.reason, was_member=was_member, unreached=unreached)
            if self._host_missing and message.result == Result.RANK_CONNECTION_LOST:
                error = self._incomplete_host(f"are missing: {message.reason}")
            # Leave tells this master that the peer will not switch to another one.
            self._close(error, send_leave=self._masters.has_others)
        elif isinstance(message, MembersCommitted):
            self._on_members_committed(message)
        elif isinstance(message, Refused):
            self._on_refused(message, now_ns)

    def _on_welcome(self, message: Welcome) -> None:
        if not self._is_connected:
            return  # From a former connection: the wait for a master continues.
        leader = Promise(message.term, message.leader)
        is_other_run, is_other_term = message.run_id != self.run_id, message.term != self.term
        if self.state is State.MEMBER:
            if is_other_run or not self._acceptor.obey(leader):
                return self._log(Level.WARNING, "ignoring a master of another run, or one that was replaced")
        elif is_other_run or self.is_unregistered:
            self._register(message.run_id, leader)
        elif self._masters.has_others and not self._acceptor.may_be_registered(leader):
            return self._log(Level.WARNING, "ignoring a master that was replaced")
        else:
            self._acceptor.register(leader)
        self._deadline_ns = None
        self._masters.on_led()
        self.term = message.term
        if self.state is not State.MEMBER:
            self._on_host(message.host_missing)
        if self.state is State.CONNECTING:
            self.state = State.PENDING
            self._send_ready()
            return self._log(Level.INFO, "registered; waiting to be admitted")
        if is_other_run or is_other_term:
            self._log(Level.INFO, "registered with another run" if is_other_run else "another master leads the run")
        if is_other_run or is_other_term or self.state is State.RETURNING:
            self._send_standing()  # Before this master led, or had registered this peer, it ignored these messages.
        return None

    def _on_host(self, missing: int) -> None:
        """The master tells how many peers of this peer's host have not registered.

        One wait covers all masters, since parts of a host may be sent from one master to the next. At each master the
        missing peers get at least HOST_WAIT_NS to come.
        """
        if missing and missing != self._host_missing:
            text = f"waiting for {missing} of {self.options.host_size} peers of host {self.options.host} to register"
            self._log(Level.INFO, text)
        self._host_missing = missing
        due_ns = self._host_deadline_ns
        if due_ns is None:
            due_ns = self._now_ns + limits.HOST_TIMEOUT_NS
        self._host_deadline_ns = max(due_ns, self._now_ns + limits.HOST_WAIT_NS) if missing else None

    def _incomplete_host(self, why: str) -> HostIncomplete:
        host, count = self.options.host, f"{self._host_missing} of {self.options.host_size}"
        text = f"{count} peers of host {host} {why}; start all of them, and connect again"
        return HostIncomplete(text, host=host, missing=self._host_missing)

    def _register(self, run_id: bytes, leader: Promise) -> None:
        """A run has registered this peer, which is not a member of any run, or not any more."""
        self._acceptor.register(leader)
        self._has_yielded, self._given_up = False, None
        self.run_id, self.epoch, self._parent, self._old_members = run_id, 0, 0, ()
        self._memory = Memory()  # Rounds are counted by run, and no operation of a former run was decided.
        self._effects.extend(CloseLink(peer_id) for peer_id in self._links)
        self._links.clear()

    def _on_refused(self, message: Refused, now_ns: int) -> None:
        has_others = self._masters.has_others
        if message.refusal is Refusal.UNREGISTERED:
            if not self._masters.is_leaving:  # If it is, the Hello was refused too, and a switch is due.
                self._send_everything()
        elif message.refusal is Refusal.UNKNOWN_SESSION and has_others and self._may_start_over():
            self._start_over(now_ns)
        elif message.refusal is Refusal.REPORT:
            self._promise(message, now_ns)
        elif message.refusal is Refusal.YIELDED or self._may_join_instead(message):
            self._on_yielded(now_ns)
        elif message.refusal is Refusal.OTHER_MASTERS:
            self._close(InvalidUsage(f"{self._masters.address}: {message.reason}"))
        elif message.refusal is Refusal.UNKNOWN_SESSION and has_others and not self._is_final(message):
            self._log(Level.WARNING, f"{self._masters.address} is not the master of this run: {message.reason}")
            self._on_try_failed(message.reason, now_ns)
        elif message.refusal is Refusal.UNKNOWN_SESSION and self.is_unregistered:
            pass  # It answers a report or Hello from before the run yielded. The Hello since then will be answered.
        elif message.refusal is Refusal.UNKNOWN_SESSION:
            self._close(Kicked(f"{message.reason}; connect again to take part", reason=message.reason))
        elif message.refusal is Refusal.FULL:
            address = self._masters.address
            self._close(MasterUnreachable(f"{address} refuses this peer: {message.reason}", address=address))
        elif message.refusal is Refusal.NO_RUN:
            self._masters.on_no_run(message.run_id, now_ns)
        elif message.refusal is Refusal.NO_QUORUM and not has_others:
            if self.state is State.CONNECTING:  # The master holds the Hello, and answers once it leads.
                self._deadline_ns = now_ns + self.options.master_timeout_ns
                self._why_not_led = message.reason
        elif message.refusal is Refusal.NO_QUORUM:
            self._on_try_failed(message.reason, now_ns)
        else:
            self._log(Level.ERROR, f"the master refused a message: {message.reason}")

    def _may_join_instead(self, message: Refused) -> bool:
        """True for a refused member that may register anew: it knows of nothing planned or decided in its run.

        Either the only master leads another run. Or a committed list of this run has removed the peer, and the peer
        does not know that any list that names it was committed.
        """
        if message.refusal is not Refusal.UNKNOWN_SESSION or self.state is not State.MEMBER:
            return False
        is_of_other_run = message.run_id not in (NO_ID, self.run_id) and not self._masters.has_others
        is_known_member = not self._old_members or self.options.peer_id in self._old_members
        is_passed_over = self._is_final(message) and not is_known_member
        return (is_of_other_run or is_passed_over) and not has_decided(self._run_report())

    def _is_final(self, message: Refused) -> bool:
        """True if a committed list has removed this peer: a later one than its own, or the one that it has accepted."""
        is_listed = any(member.peer_id == self.options.peer_id for member in self.members)
        is_removed = message.epoch > self.epoch or (message.epoch == self.epoch and not is_listed)
        return self.state is State.MEMBER and message.run_id == self.run_id and is_removed

    def _on_yielded(self, now_ns: int) -> None:
        """The run of this peer has decided nothing and yields to an earlier one, or it goes on without this peer."""
        if self.state is State.MEMBER:
            self.state, self._has_yielded = State.RETURNING, True
            for call in list(self.calls.values()):
                self._answer_alone(call)
            # If it were always ready, it could be admitted between two other calls, and call the second of them while
            # the members sync.
            self._is_ready = any(is_update(call) and not call.has_answer for call in self.calls.values())
            self._was_unready = True
            self._miss_master(now_ns)
            text = "this peer's run yields to an earlier run, or goes on without this peer; waiting to be admitted"
            self._log(Level.WARNING, text)
            self._acceptor.release()
        self._acceptor.on_disconnected()
        self._send(self._hello())

    def _may_start_over(self) -> bool:
        """True if a refusal may just mean that the run has forgotten this peer. A second one in a row means more."""
        return self.state is State.PENDING or (self.state is State.RETURNING and self._acceptor.is_led)

    def _start_over(self, now_ns: int) -> None:
        """The run that had registered this peer does not know it: it is a newcomer again, first at this master."""
        if self.state is State.PENDING:
            self.state = State.CONNECTING
            self._deadline_ns = now_ns + self.options.registration_timeout_ns
            self._tries_left = self._tries
        self._acceptor.on_disconnected()
        self._effects.extend(CloseLink(peer_id) for peer_id in self._links)
        self._links.clear()
        self._masters.forget_answers()
        self._masters.clear()
        self._send(self._hello())

    def _on_members(self, message: Members) -> None:
        if not self._acceptor.accepts(message.epoch, self.epoch):
            return
        is_listed = any(member.peer_id == self.options.peer_id for member in message.members)
        if message.epoch != self.epoch:
            self._drop_ahead(*self._ahead)
        self.epoch, self._parent = message.epoch, message.parent
        self.members, self._old_members = message.members, message.old_members
        self._send(Acknowledgement(message.epoch))
        self._memory.on_members(message.members, self.options.group, is_committed=not message.old_members)
        self._memory.on_round(message.round, message.round_value)
        if self._is_registered() and is_listed:
            was_returning, self.state = self.state is State.RETURNING, State.MEMBER
            self._is_ready = True
            self._host_missing, self._host_deadline_ns = 0, None
            self._log(Level.INFO, f"admitted at epoch {self.epoch}, world size {len(self.group_members())}")
            if self._connect_call is not None:
                self._effects.append(Resolve(self._connect_call, self.epoch))
                self._connect_call = None
            if was_returning:
                if not self.calls:  # The user has given update_topology() up: the next such call gets this answer.
                    self._given_up = TopologySpec(TopologyKind.UPDATE, max(0, message.round - 1))
                for call in list(self.calls.values()):  # This is update_topology(), which the members called, too.
                    self._effects.append(Resolve(call.call_id, message.round_value))
                    self._settle(call)
                self._send_standing()

    def _on_members_committed(self, message: MembersCommitted) -> None:
        if message.epoch == self.epoch:
            self._old_members = ()
            self._memory.on_members(self.members, self.options.group, is_committed=True)

    # --- Links ------------------------------------------------------------------------------------------------------

    def _on_neighbours(self, message: Neighbours) -> None:
        wanted = {neighbour.peer_id for neighbour in message.neighbours}
        gone = tuple(peer_id for peer_id in self._links if peer_id not in wanted)
        self._on_neighbours_changed(NeighboursChanged(message.neighbours, gone))
        if self.state is State.PENDING and not self._is_ready:
            self._effects.append(FetchAhead(tuple(each.peer_id for each in message.neighbours if each.is_member)))

    def _on_neighbours_changed(self, message: NeighboursChanged) -> None:
        for peer_id in message.gone:
            link = self._links.pop(peer_id, None)
            self._digests.forget_peer(peer_id)
            if link is not None:
                self._effects.append(CloseLink(peer_id))
                if link.is_up:
                    self._send_linked()
        for neighbour in message.joined:
            peer_id = neighbour.peer_id
            if peer_id == self.options.peer_id:
                continue
            link = self._links.get(peer_id)
            if link is None:
                self._links[peer_id] = _Link(neighbour)
                self._effects.append(OpenLink(neighbour))
                continue
            other_dials = link.neighbour.dial != neighbour.dial  # Registered in another order at another master.
            link.neighbour = neighbour
            if other_dials and not link.is_up:
                link.retry_ns = None
                self._effects += [CloseLink(peer_id), OpenLink(neighbour)]

    def _on_link(self, event: events.LinkUp | events.LinkFailed, now_ns: int) -> None:
        link = self._links.get(event.peer_id)
        if link is None or self.state is State.CLOSED:
            return
        if isinstance(event, events.LinkUp):
            link.is_up, link.failures, link.retry_ns = True, 0, None
            self._log(Level.DEBUG, f"link to {link.neighbour.name} is up")
            return self._send_linked()
        self._log(Level.INFO, f"no link to {link.neighbour.name}: {event.reason}")
        pause_ns = min(limits.LINK_RETRY_INTERVAL_NS << min(link.failures, 8), limits.LINK_RETRY_INTERVAL_MAX_NS)
        link.retry_ns = now_ns + (0 if link.is_up else pause_ns)
        link.failures += 1
        link.reason = event.reason
        if link.is_up:
            link.is_up = False
            self._send_linked()

    def _send_linked(self) -> None:
        if self.state is State.MEMBER or self._is_registered():
            self._send(Linked(tuple(sorted(peer_id for peer_id, link in self._links.items() if link.is_up))))

    def _on_tick(self, now_ns: int) -> None:
        if self.state is State.CLOSED:
            return
        for link in self._links.values():
            if link.retry_ns is not None and now_ns >= link.retry_ns:
                link.retry_ns = None
                self._effects.append(OpenLink(link.neighbour))
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            if self.state is State.CONNECTING:
                self._on_silent_master(now_ns)
            else:
                seconds = self.options.master_timeout_ns // limits.SECOND
                self._close(self._unreachable(f"none has led the run for {seconds} s"))
        if self._acceptor.is_led and self._host_deadline_ns is not None and now_ns >= self._host_deadline_ns:
            seconds = limits.HOST_TIMEOUT_NS // limits.SECOND
            self._close(self._incomplete_host(f"have not registered within {seconds} s"), send_leave=True)
        if self.state in (State.MEMBER, State.RETURNING):
            self._release_due(now_ns)
        if self._masters.is_due(now_ns):
            self._log(Level.INFO, f"{self._masters.address} does not lead the run; switching to the next master")
            self._switch_master(now_ns)

    def _on_silent_master(self, now_ns: int) -> None:
        reason = "a program listens there but does not answer as a master"
        self._deadline_ns = None
        if self._why_not_led:
            master = self._masters.address
            text = (
                f"{master} leads no run: {self._why_not_led}; "
                "are those members running, and can they reach that master?"
            )
            return self._close(MasterUnreachable(text, address=master))
        if not self._masters.has_others:
            return self._close(self._unreachable(reason))
        return self._on_try_failed(reason, now_ns)

    # --- Calls ------------------------------------------------------------------------------------------------------

    def _on_call(self, votes: Sequence[Vote], now_ns: int) -> None:
        if not votes:
            return
        self._next_call_id = max(self._next_call_id, max(vote.call_id for vote in votes) + 1)
        calls = [Call(vote.call_id, vote.spec) for vote in votes]
        error = self._reason_against(calls)
        if error is not None:
            self._effects.extend(Reject(call.call_id, error) for call in calls)
            return
        if not any(self._made_again(call.spec) and not call.has_answer for call in self.calls.values()):
            self._given_up = self._made_again(calls[0].spec)  # After another call, all have gone on.
        free = self._free(calls)
        for call in calls:
            call.phase = CallPhase.HELD
            self.calls[call.call_id] = call
        self._vote(free)

    def _free(self, calls: Sequence[Call]) -> list[Call]:
        """The calls to vote for now: those that no released call blocks, and no decision is about to plan."""
        released = Released(self.calls.values())
        due = {call.spec for call in self._undecided()}

        def awaits_plan(call: Call) -> bool:
            return is_collective(call) and call.spec in due and tag_of(call) not in self._ahead

        return [call for call in calls if not released.block(call) and not awaits_plan(call)]

    def _undecided(self) -> list[Call]:
        """Calls that the peers have committed among themselves, and that the master has yet to decide."""
        return [call for call in self.calls.values() if call.phase is CallPhase.COMMITTED]

    def _after_last_round(self, spec: Spec) -> Spec:
        """The call for the round after the last one. If the user gave the same call up before, it keeps that round."""
        if not isinstance(spec, TopologySpec):
            return spec
        return self._made_again(spec) or replace(spec, after_round=self._memory.round)

    def _made_again(self, spec: Spec) -> TopologySpec | None:
        """The call that the user has given up, if `spec` is the same call again."""
        known = self._given_up
        return known if known is not None and isinstance(spec, TopologySpec) and known.kind == spec.kind else None

    def _note_end(self, call: Call, *, is_success: bool) -> None:
        if isinstance(call.spec, TopologySpec):
            self._given_up = call.spec if call.withdrawn is not None and not is_success else None

    def _vote(self, calls: Sequence[Call]) -> None:
        """Sends the votes of calls, and starts those that are planned ahead."""
        for call in calls:
            call.phase = CallPhase.VOTING
            call.spec = self._after_last_round(call.spec)
            self._start_ahead(call)
        if self.state is State.RETURNING:
            for call in calls:
                self._answer_alone(call)
        elif self.state is State.MEMBER and calls:
            votes = Votes(self._oldest_call_id(), tuple(call.vote for call in calls))
            # Others that have started the same attempts wait for digests, not for votes.
            may_wait = all(call.ahead and self._tells_digest(call) for call in calls)
            self._send(votes, may_wait=may_wait)

    def _reason_against(self, new: Sequence[Call]) -> PCCLError | None:
        """Why calls cannot be made now, or None. Calls other than collectives are made one at a time."""
        if self.state not in (State.MEMBER, State.RETURNING):
            return self.error or InvalidUsage("call connect() first")
        calls = [call for call in self.calls.values() if not call.has_answer]
        exclusive = next((call for call in calls if not is_collective(call)), None)
        if is_collective(new[0]):
            if exclusive is not None and not is_question(exclusive):
                return InvalidUsage("another thread is in a sync or topology call; wait for it before a collective")
            tags = [tag_of(call) for call in [*calls, *new] if is_collective(call)]
            if len(set(tags)) < len(tags):
                return InvalidUsage("a collective with the same tag is in flight; give each one its own tag")
        elif exclusive is not None:
            return InvalidUsage("another thread is in a sync or topology call; only one at a time, wait for it")
        elif calls and not is_question(new[0]):
            return PendingAsyncOps(f"collectives in flight: {len(calls)}; wait for their handles first")
        if len(self.calls) - len(self._undecided()) + len(new) > self._calls_max():
            return self._too_many_calls()
        # While a list is only proposed, another one may replace it: then the master answers.
        is_alone = len(self.group_members()) <= 1 and not self._old_members
        return self._loneliness(new[0]) if is_alone else None

    def _loneliness(self, call: Call) -> TooFewPeers | None:
        """Why a call cannot be made without other members, or None."""
        if is_collective(call):
            return TooFewPeers("this peer is alone in its group; wait for others")
        if is_sync(call):
            return TooFewPeers("this peer is alone in its group; there is nobody to share state with")
        return None

    def _answer_alone(self, call: Call) -> None:
        """Answers a call of a returning peer, as if it were the only member and others were pending.

        Only update_topology() waits: it makes this peer ready, and the members then make the same call to admit it.
        """
        if is_update(call) and call.withdrawn is None:
            return self._on_ready()
        if call.call_id not in self.calls:
            return  # It was held behind an earlier call, and answered together with that.
        error = call.withdrawn or self._loneliness(call)
        if not call.has_answer:
            self._effects.append(Reject(call.call_id, error) if error is not None else Resolve(call.call_id, 1))
        self._settle(call)

    def _calls_max(self) -> int:
        return limits.calls_in_flight_max(len(self.group_members()))

    def _too_many_calls(self) -> InvalidUsage:
        text = f"more than {self._calls_max()} calls in flight, in a group of {len(self.group_members())}"
        return InvalidUsage(f"{text}; wait for some of their handles first")

    def _on_withdrawn(self, event: events.CallWithdrawn, now_ns: int) -> None:
        if event.call_id == self._connect_call:
            return self._close(InvalidUsage("connect() was interrupted"), send_leave=True)
        call = self.calls.get(event.call_id)
        if call is None or call.has_answer:
            return
        call.withdrawn = (
            OperationTimeout("the timeout of the call ran out before all peers took part")
            if event.timed_out
            else InvalidUsage("the call was interrupted")
        )
        if call.phase is CallPhase.HELD or self.state is State.RETURNING:  # It was never sent to the master.
            del self.calls[call.call_id]
            return self._effects.append(Reject(call.call_id, call.withdrawn))
        withdraw = call.withdrawal()
        if withdraw is not None:
            self._send(withdraw)
        self._release_ns.setdefault(call.call_id, now_ns + limits.WITHDRAW_TIMEOUT_NS)
        if not self._acceptor.is_led and not call.may_succeed:
            self._release(call)

    def _release_due(self, now_ns: int) -> None:
        """Releases withdrawn calls that the master has not answered in time."""
        for call_id in [call_id for call_id, due_ns in self._release_ns.items() if now_ns >= due_ns]:
            call = self.calls[call_id]
            if call.has_told and self._acceptor.is_led:
                del self._release_ns[call_id]  # Moved to the end: the earliest come first.
                self._release_ns[call_id] = now_ns + limits.WITHDRAW_TIMEOUT_NS
            else:
                self._release(call)

    def _release(self, call: Call) -> None:
        """The user gets the buffers and an error; the other participants still get this peer's report."""
        assert call.withdrawn is not None
        self._log(Level.WARNING, f"call {call.call_id} ends without an answer from a master; the run continues")
        del self._release_ns[call.call_id]
        is_running = call.phase is CallPhase.RUNNING
        if call.attempt_id is not None:
            self._end(call, call.attempt_id, commit=False)
        call.is_released = True
        self._note_end(call, is_success=False)
        self._effects.append(Reject(call.call_id, call.withdrawn))
        if is_running and call.attempt_id is not None:
            self._report(call, call.attempt_id, _WITHDRAWN)

    def _settle(self, call: Call) -> None:
        """Ends a call that the master has answered, and sends the votes of calls that were held for it."""
        del self.calls[call.call_id]
        self._release_ns.pop(call.call_id, None)
        if call.attempt_id is not None:
            self._digests.forget(call.attempt_id)
        if call.has_answer:
            held = [other for other in self.calls.values() if other.phase is CallPhase.HELD]
            self._vote(self._free(held))

    def _on_plan(self, plan: Plan) -> None:
        if self._call_of_attempt(plan.attempt_id) is not None:
            return None  # Sent again.
        call = self.calls.get(plan.participants.get(self.options.peer_id, -1))
        if call is not None and not call.is_planned_by(plan):
            call = None
        if call is not None:
            self._recall(call)
        if call is not None and call.phase is not CallPhase.VOTING:
            call = None  # It has a plan.
        if call is None and isinstance(plan.how, Fetching):
            return None
        if call is None or call.is_released:
            self._forget_attempts((plan.attempt_id,))
            if call is not None:
                call.plan = plan
                self._report(call, plan.attempt_id, _WITHDRAWN)
            return None
        self._start(call, plan)
        if isinstance(call.spec, CollectiveSpec):
            self._drop_ahead(call.spec.tag)  # The other participants drop theirs, too.
            self._keep_ahead(call.spec, plan.how, plan.ahead)
        return None

    def _start(self, call: Call, plan: Plan) -> None:
        call.phase, call.attempt_id, call.plan, call.begun_ns = CallPhase.RUNNING, plan.attempt_id, plan, self._now_ns
        self._attempt_max = max(self._attempt_max, plan.attempt_id)
        if isinstance(plan.how, Fetching):
            return self._effects.append(StartSync(call.call_id, plan.attempt_id, plan.how))
        tells_digest, is_ahead = self._tells_digest(call), bool(call.ahead)
        return self._effects.append(StartReduce(call.call_id, plan.attempt_id, plan.how, tells_digest, is_ahead))

    @staticmethod
    def _tells_digest(call: Call) -> bool:
        """True if this peer tells the other participants the digest of the attempt that the call runs."""
        if call.plan is None or call.withdrawn is not None or not isinstance(call.spec, CollectiveSpec):
            return False
        return tells_digests(call.spec, len(call.plan.order))

    def _keep_ahead(self, spec: CollectiveSpec, how: Reducing | Fetching, attempt_ids: tuple[int, ...]) -> None:
        """Stores plans ahead: the next calls at this tag may start at once, if they are the same as this one."""
        if not attempt_ids or not isinstance(how, Reducing):
            return
        if not self._ended_ahead.keys().isdisjoint(attempt_ids):  # The message came late.
            return self._forget_attempts(attempt_ids)
        known = self._ahead.pop(spec.tag, None)
        if known is not None and (known.spec, known.how) == (spec, how):
            attempt_ids = (*known.attempt_ids, *attempt_ids)
        elif known is not None:
            self._forget_attempts(known.attempt_ids)
        elif len(self._ahead) >= limits.PLANS_AHEAD_MAX:
            self._drop_ahead(next(iter(self._ahead)))
        self._forget_attempts(attempt_ids[: -limits.PLANS_AHEAD_AT_TAG_MAX])
        self._ahead[spec.tag] = Ahead(spec, how, attempt_ids[-limits.PLANS_AHEAD_AT_TAG_MAX :])

    def _drop_ahead(self, *tags: int) -> None:
        """Drops the plans ahead at some tags."""
        for tag in tags:
            ahead = self._ahead.pop(tag, None)
            if ahead is not None:
                self._forget_attempts(ahead.attempt_ids)

    def _forget_attempts(self, attempt_ids: Sequence[int]) -> None:
        """Ends attempts that this peer will never start. Others may have started them: their frames are stale here."""
        self._attempt_max = max(self._attempt_max, max(attempt_ids, default=0))  # The data plane knows it, too.
        self._effects += [EndReduce(attempt_id, commit=False) for attempt_id in attempt_ids]

    def _on_attempt_ended(self, peer_id: bytes, attempt_id: int) -> None:
        """Another member has ended an attempt that it had started ahead. If this one has not started it, it never will.

        This peer may not know the attempt, if the message that planned it ahead was lost or is still on its way. A
        pending peer has started none: it could end attempts that this peer is about to start.
        """
        is_of_member = any(member.peer_id == peer_id for member in self.group_members())
        # The data plane would take frames of all other attempts for late ones. What others say moves no bound.
        is_far = attempt_id > self._attempt_max + limits.PLAN_AHEAD_AGE_MAX
        is_heard = self.state is State.MEMBER and is_of_member and not is_far
        if not is_heard or self._call_of_attempt(attempt_id) is not None:
            return
        tags = [tag for tag, ahead in self._ahead.items() if attempt_id in ahead.attempt_ids]
        self._drop_ahead(*tags)
        if not tags:
            self._effects.append(EndReduce(attempt_id, commit=False))
            self._ended_ahead[attempt_id] = None
            if len(self._ended_ahead) > limits.PLANS_AHEAD_MAX:
                del self._ended_ahead[next(iter(self._ended_ahead))]
        self._digests.forget(attempt_id)

    def _start_ahead(self, call: Call) -> None:
        """Starts a call by a plan ahead, if there is one for it, and all links that it needs are up."""
        ahead = self._ahead.pop(tag_of(call), None) if is_collective(call) else None
        if ahead is None:
            return
        if not self._may_start_ahead(call, ahead):
            return self._forget_attempts(ahead.attempt_ids)
        call.ahead, *later = ahead.attempt_ids
        if later:
            self._ahead[tag_of(call)] = Ahead(ahead.spec, ahead.how, tuple(later))
        self._start(call, Plan(call.ahead, (), ahead.how))

    def _may_start_ahead(self, call: Call, ahead: Ahead) -> bool:
        if ahead.spec != call.spec or self.state is not State.MEMBER:
            return False
        if ahead.attempt_ids[0] + limits.PLAN_AHEAD_AGE_MAX <= self._attempt_max:
            return False
        beside = neighbours_of(ahead.how, self.options.peer_id)
        are_up = all((link := self._links.get(peer_id)) is not None and link.is_up for peer_id in beside)
        return are_up and self._take_room(call.spec, ahead.how)

    def _take_room(self, spec: CollectiveSpec, how: Reducing) -> bool:
        """True if the other participants can keep the frames of one more attempt ahead: they may begin others first."""
        size = _early_bytes(spec, how)
        most = limits.PLANS_AHEAD_BYTES_MAX // max(1, len(how.order) - 1)
        if self._early_bytes + size > most:  # Counted anew only then.
            started = [call for call in self.calls.values() if call.ahead and call.phase is not CallPhase.COMMITTED]
            self._early_bytes = sum(_early_bytes(call.spec, call.plan.how) for call in started if call.plan is not None)
        self._early_bytes += size
        return self._early_bytes <= most

    def _recall(self, call: Call) -> None:
        """Another plan or decision has come for a call: the attempt that it has started ahead is void."""
        if not call.ahead or call.phase is CallPhase.COMMITTED:
            return
        if not call.is_released:
            self._end(call, call.ahead, commit=False)
        if call.has_told and call.withdrawn is not None:
            self._send(Withdraw(call.call_id))  # Now it is not bound any more.
        call.phase, call.ahead, call.attempt_id, call.plan, call.report = CallPhase.VOTING, 0, None, None, None
        call.has_told = False

    # --- The commit between peers -----------------------------------------------------------------------------------

    def _on_digest(self, event: events.DigestReceived) -> None:
        if event.peer_id in self._links:
            self._digests.add(event.peer_id, event.attempt_id, Told(event.call_id, event.digest))
            call = self._call_of_attempt(event.attempt_id)
            if call is not None:
                self._commit(call)
                self._tell_difference(call)

    def _tell_difference(self, call: Call) -> None:
        """Reports that a participant, which may be lost, has another result. Nobody commits such an attempt."""
        report, plan = call.report, call.plan
        if call.phase is not CallPhase.REPORTED or not call.may_succeed or report is None or plan is None:
            return
        others = (peer_id for peer_id in plan.order if peer_id != self.options.peer_id)
        other = self._digests.other_than(plan.attempt_id, report.digest, others)
        if other is not None and report.other_digest is None:
            call.report = replace(report, other_digest=other)
            self._send(call.report)

    def _commit(self, call: Call) -> None:
        """Commits the attempt of a call, if all participants are known to have the same result."""
        plan, report, own_id = call.plan, call.report, self.options.peer_id
        if call.phase is not CallPhase.REPORTED or not call.has_told or call.is_released:
            return
        assert plan is not None and report is not None
        calls = self._digests.calls_of(plan.attempt_id, report.digest, set(plan.order) - {own_id})
        if calls is None or len(self._undecided()) >= limits.CALLS_UNDECIDED_MAX:
            return
        calls[own_id] = call.call_id
        call.phase = CallPhase.COMMITTED
        self._release_ns.pop(call.call_id, None)
        numbers = tuple(calls[peer_id] for peer_id in plan.order)
        count, number = len(plan.order), plan.attempt_id
        decision = Decision(call.call_id, Result.SUCCESS, count, attempt_id=number, order=plan.order, calls=numbers)
        self._memory.on_decision(decision, call, plan.order)
        self._effects += [EndReduce(number, commit=True), Resolve(call.call_id, count)]

    def _on_late_decision(self, call: Call, decision: Decision) -> None:
        """The master has decided on a call that was committed between the peers."""
        if decision.committed and decision.attempt_id == call.attempt_id:
            return self._settle(call)
        return self._close(Kicked(f"{SPLIT}; connect again", reason=SPLIT), send_leave=True)

    def _on_reduce_done(self, event: events.ReduceDone, now_ns: int) -> None:
        call = self._call_of_attempt(event.attempt_id)
        if call is None or not is_collective(call) or call.phase is not CallPhase.RUNNING:
            return
        call.has_told = event.has_told  # From now on this peer is bound to its result.
        duration_us = max(0, now_ns - call.begun_ns) // limits.US
        self._report(call, event.attempt_id, event.error, event.fault, event.digest, duration_us, paths=event.paths)
        self._commit(call)
        self._tell_difference(call)

    def _on_fetch_done(self, event: events.FetchDone) -> None:
        call = self._call_of_attempt(event.attempt_id)
        if call is None or not is_sync(call) or call.phase is CallPhase.VOTING:
            return
        if call.report is not None and not (call.report.ok and event.error):
            return  # Already reported.
        call.is_at_fault = event.fault == self.options.peer_id
        self._report(call, event.attempt_id, event.error, event.fault, dropped=event.dropped)

    def _report(
        self,
        call: Call,
        attempt_id: int,
        error: str,
        fault: bytes | None = None,
        digest: int = 0,
        duration_us: int = 0,
        dropped: tuple[tuple[bytes, str], ...] = (),
        paths: tuple[PathSample, ...] = (),
    ) -> None:
        call.phase, call.attempt_id = CallPhase.REPORTED, attempt_id
        ok, reason = not error, error[: limits.TEXT_CHARS_MAX]
        named = tuple(Dropped(who, why[: limits.OUTCOME_TEXT_CHARS_MAX]) for who, why in dropped[: limits.PEERS_MAX])
        facts = (digest, duration_us) if ok else (0, 0)
        count = len(call.plan.order) if ok and call.plan is not None and is_collective(call) else 0
        call.report = Report(call.call_id, attempt_id, ok, fault, reason, *facts, named, count, paths)
        self._send(call.report, may_wait=call.has_told)

    def _call_of_attempt(self, attempt_id: int) -> Call | None:
        return next((call for call in self.calls.values() if call.attempt_id == attempt_id), None)

    def _on_decision(self, decision: Decision) -> None:
        call = self.calls.get(decision.call_id)
        self._memory.on_decision(decision, call, {member.peer_id for member in self.members})
        if decision.round:
            self._memory.on_round(decision.round, decision.value)
        if decision.is_refusal:
            self._drop_ahead(*self._ahead)  # The refusal may include calls of others that have started one of these.
        if call is None:
            return  # A repeated decision.
        if decision.is_of_attempt and decision.attempt_id != call.ahead:
            self._recall(call)  # The plan of that attempt got lost.
        lacks_result = is_collective(call) and not (call.report is not None and call.report.ok)
        if decision.committed and (call.is_released or (lacks_result and not is_barrier(call))):
            return self._close(Kicked(f"{LEFT_BEHIND}; connect again", reason=LEFT_BEHIND), send_leave=True)
        if isinstance(call.spec, CollectiveSpec):
            if not decision.committed or decision.is_ahead_void:
                self._drop_ahead(call.spec.tag)
            elif call.plan is not None:
                self._keep_ahead(call.spec, call.plan.how, decision.ahead)
        if call.phase is CallPhase.COMMITTED:
            return self._on_late_decision(call, decision)
        self._settle(call)
        attempt_id = decision.attempt_id if decision.is_of_attempt and not is_barrier(call) else None
        if call.is_released:
            if call.attempt_id is None and attempt_id is not None:  # Its plan got lost; frames may wait for it.
                self._forget_attempts((attempt_id,))
            return
        attempt_id = call.attempt_id if attempt_id is None else attempt_id
        if attempt_id is not None:
            self._end(call, attempt_id, decision.committed)
        self._note_end(call, is_success=decision.result == Result.SUCCESS)
        if decision.result == Result.SUCCESS:
            self._effects.append(Resolve(call.call_id, decision.value))
        else:
            self._effects.append(Reject(call.call_id, error_of(call, decision)))

    def _end(self, call: Call, attempt_id: int, commit: bool) -> None:
        if is_sync(call):
            self._effects.append(EndSync(call.call_id, attempt_id, commit))
        elif not is_barrier(call):
            self._attempt_max = max(self._attempt_max, attempt_id)  # Its plan may have got lost.
            self._effects.append(EndReduce(attempt_id, commit))

    # --- The end ----------------------------------------------------------------------------------------------------

    def _on_close(self) -> None:
        if self.state is State.NEW:
            self.state, self.error = State.CLOSED, InvalidUsage("the communicator is closed")
        elif self.state is not State.CLOSED:
            self._close(InvalidUsage("the communicator is closed"), send_leave=True)

    def _close(self, error: PCCLError, *, send_leave: bool = False) -> None:
        """Closes the peer: restores the buffers, closes the links, ends every call with `error`."""
        if send_leave and self._is_connected:
            self._send(Leave())
        self.state, self.error = State.CLOSED, error
        for call in self._take_calls():
            if call.has_answer:
                continue
            if call.attempt_id is not None:
                self._end(call, call.attempt_id, commit=False)
            self._effects.append(Reject(call.call_id, call.withdrawn or error))
        if self._connect_call is not None:
            self._effects.append(Reject(self._connect_call, error))
            self._connect_call = None
        self._effects.extend(CloseLink(peer_id) for peer_id in self._links)
        self._links.clear()
        self._deadline_ns = self._host_deadline_ns = None
        self._masters.clear()

    def _take_calls(self) -> Iterable[Call]:
        calls, self.calls = self.calls, {}
        self._release_ns.clear()
        return calls.values()

    def _send(self, message: PeerMessage, *, may_wait: bool = False) -> None:
        """Sends a message to the master, unless it is about calls and comes between a promise and the Welcome for it.

        The candidate would drop what comes before it leads and take the rest, and so take a later call for the one
        before it. After the Welcome the peer sends all of these messages, in order.
        """
        awaits_welcome = self._acceptor.promised.term > self.term
        if not (awaits_welcome and isinstance(message, (Votes, Report, Withdraw))):
            self._effects.append(Send(message, may_wait))

    def _log(self, level: Level, text: str) -> None:
        self._effects.append(Log(level, text))


def _early_bytes(spec: Spec, how: Reducing | Fetching) -> int:
    """What a peer sends to another one in an attempt that this one may not have begun.

    In a ring a peer receives from one other only, which also passes on what the rest send: then it is a part of that.
    """
    if not isinstance(spec, CollectiveSpec) or not isinstance(how, Reducing):
        return 0
    tensor, is_ring = tensor_of(spec), how.algorithm == Algorithm.RING
    size = tensor.wire_bytes
    if size > limits.PLAN_AHEAD_SMALL_BYTES:
        return 0
    if tensor.is_quantised:
        size += -(-spec.count // spec.block_size) * limits.QUANTIZATION_PARAMETER_BYTES_MAX
    if tensor.are_sums_wide and is_ring:
        size *= limits.WIDE_SUM_FACTOR_MAX
    is_whole = how.lanes or how.algorithm == Algorithm.ONE_SHOT
    is_whole = is_whole or spec.kind in (CollectiveKind.BROADCAST, CollectiveKind.ALL_GATHER)
    is_whole = is_whole or (spec.kind == CollectiveKind.ALL_TO_ALL and is_ring)  # It is done as an all-gather.
    return max(size if is_whole else size // len(how.order), limits.PLAN_AHEAD_CHARGE_BYTES)


def are_compatible(calls: Sequence[Call]) -> bool:
    """True if one user may wait for all these calls at the same time."""
    tags = [tag_of(call) for call in calls if is_collective(call)]
    return len(calls) - len(tags) <= 1 and len(set(tags)) == len(tags)
