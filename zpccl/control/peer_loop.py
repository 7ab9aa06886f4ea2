"""The shell of a peer: one thread between the user's calls, the master, the data plane and the link broker.

Two machines decide. The session decides about the DEALER socket, of which there is one at a time; the peer machine
decides about everything else.

Ownership. The thread owns the DEALER socket, its monitor, the machines, the table of calls, and the data plane's event
queue, but not the event queues of transfers. It alone opens and closes links, and starts and ends attempts. Users'
threads put calls into the inbox under the lock and wait on the `Future` of each call. The broker's thread also puts
links and failures there. An eventfd wakes the thread, which alone takes from the inbox. The buffers of a call belong to
the data plane from StartReduce to EndReduce, and to the user otherwise. The thread touches no page of a large buffer,
because it must go on answering other calls: a worker puts the old contents back, and a new tensor for a result is only
allocated here (1 GiB in 30 us).

The thread ends when the machine is closed: then every call has its answer, every buffer is the user's again, and all
sockets are closed.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import io
import logging
import operator
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import zmq
from msgspec import structs

from zpccl import limits
from zpccl.control.addresses import is_name
from zpccl.control.calls import Answer, PendingCall
from zpccl.control.connection_count import places_for, senders_for
from zpccl.control.descriptors import share_of_descriptors
from zpccl.control.forks import Descriptor, closed_in_children
from zpccl.control.keys import PeerKeys
from zpccl.control.link_ends import LinkEnds, ends_of
from zpccl.control.links import LinkBroker, NewConnection, NewLink
from zpccl.control.master_loop import poll_timeout_ms, set_heartbeat
from zpccl.control.monitor import take_event
from zpccl.control.outgoing import Outgoing
from zpccl.control.rates import RateMeter
from zpccl.control.waiter import Waiter, is_readable
from zpccl.engine.ciphers import Cipher
from zpccl.engine.engine import (
    DIGEST_CHANNEL,
    ConnectionLost,
    Engine,
    EngineError,
    EngineEvent,
    LinkLost,
    MessageReceived,
    ReduceDone,
)
from zpccl.errors import InternalError, InvalidArgument, InvalidUsage, PCCLError, PeerLost
from zpccl.observe.logs import BoundedLog
from zpccl.protocol import effects, events
from zpccl.protocol.messages import CollectiveSpec, Hello, Measurements, Member, PathSample, Spec, Vote, encode
from zpccl.protocol.peer import PeerMachine, PeerOptions, State
from zpccl.protocol.rings import neighbours_of
from zpccl.protocol.session import Session, SessionEvent, SocketPhase
from zpccl.state.offers import Offers
from zpccl.state.workers import End, Workers, start_thread, wait_for_end

logger = logging.getLogger("zpccl.peer")


@dataclass
class View:
    """The part of the run's state that users' threads may read; replaced as a whole, never changed."""

    state: State = State.NEW
    epoch: int = 0
    members: tuple[tuple[bytes, int, str], ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class _Link:
    """An open link: the engine's id of it, the broker's number of it, and its ends when it was opened."""

    link_id: int
    number: int
    ends: LinkEnds


@dataclass(frozen=True)
class _NewCalls:
    """Calls of a user, their numbers, and the event that announces them to the machine."""

    event: events.PeerEvent
    calls: Sequence[PendingCall]
    call_ids: Sequence[int]


@dataclass(frozen=True)
class _GivenUp:
    """A user's thread no longer waits for a call."""

    call: PendingCall
    timed_out: bool


@dataclass(frozen=True)
class _Restored:
    """The memory of a call has its old contents again."""

    call: PendingCall


_InboxItem: TypeAlias = (
    "events.PeerEvent | _NewCalls | _GivenUp | _Restored | NewLink | NewConnection | events.MechanismTold"
)


class PeerLoop:
    """Runs a peer.

    Args:
        options: who the peer is. The loop fills in its addresses from the listener.
        endpoints: endpoints of the masters, for ZeroMQ ("tcp://host:port").
        listener: a listening socket; the loop owns it from now on.
        connection_count: TCP connections of each link, all of which are used; 0: connection_count.py chooses.
        advertise: an address at which others reach this peer, or None.
        heartbeat_timeout_ns: a master that is silent for this long is considered away.
        keys: prove this peer and the master to each other; None in a run without a secret.
        ciphers: the ciphers that links may use.
        local_listener: listens for peers of this host (`LinkBroker`); None: they use TCP.
    """

    def __init__(
        self,
        options: PeerOptions,
        endpoints: tuple[str, ...],
        listener: socket.socket,
        connection_count: int,
        advertise: str | None,
        heartbeat_timeout_ns: int,
        keys: PeerKeys | None = None,
        ciphers: Sequence[Cipher] = (Cipher.PLAIN,),
        local_listener: socket.socket | None = None,
        min_world_size: int = 0,
    ) -> None:
        self._keys = keys
        self._min_world_size = min_world_size
        self._lock = threading.RLock()  # Garbage collection may close this loop or another while it is held.
        self._ended = End(self._lock)  # Of the thread.
        self._inbox: deque[_InboxItem] = deque()
        self._next_call_id = 1
        self._calls: dict[int, PendingCall] = {}
        self._attempts: dict[int, int] = {}  # Call id of each running attempt, by attempt id.
        self._started_ahead: dict[int, tuple[bytes, ...]] = {}  # By running attempt: its participants.
        self._outgoing: Outgoing[None, bytes] = Outgoing()  # There is one master at a time.
        self._sent_ns = 0  # Time of the last send.
        self._woken_ns = 0  # The machine gets no Tick before: the thread has stood still.
        self._leave_ns: int | None = None  # When a peer leaves that waits for a master to tell. See `_must_wait`.
        self._restoring: list[PendingCall] = []  # Calls whose memory is not the user's yet.
        self._restorer = Workers(1)
        self._links: dict[bytes, _Link] = {}  # The open ones, by peer id.
        self._measurements: Answer[Measurements] | None = None  # One answer for all threads that wait.
        self._has_begun = self._is_closing = self._is_closed = False
        self.is_dropped = False  # Its communicator was garbage-collected.
        self.engine = Engine()
        self.engine.open_channel(DIGEST_CHANNEL)
        self._rates = RateMeter(self.engine)
        self._lines = BoundedLog(logger, "LOG_LINES_MAX")
        self._chooses_senders = connection_count == 0
        self.offers = Offers(self.engine, int.from_bytes(os.urandom(7), "big"), self._lock)
        self._context = zmq.Context()
        self._endpoints = endpoints
        self._endpoint = endpoints[0]  # The one that the socket dials.
        self._prefers_ipv6 = True  # Dial IPv6 first if a name has addresses of both versions.
        self._has_turned = False  # The socket dials the other version now.
        self._heartbeat_timeout_ns = heartbeat_timeout_ns
        self._connection: Descriptor | None = None  # The socket's TCP connection; libzmq owns it.
        with contextlib.ExitStack() as on_failure:  # Ctrl-C, or descriptors or threads ran out.
            on_failure.callback(self.engine.close)
            # Garbage collection may end the context before its sockets, and would wait for them forever.
            on_failure.callback(self._context.destroy, linger=0)
            self._waiter = Waiter()
            on_failure.callback(self._waiter.close)
            self._socket, self._monitor = self._make_socket()
            self._wakeup = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
            on_failure.callback(self._wakeup.close)
            self._broker = LinkBroker(
                options.peer_id,
                listener,
                connection_count,
                advertise,
                self._on_link,
                self._on_link_failed,
                requires_keys=keys is not None,
                ciphers=ciphers,
                on_connection=self._on_new_connection,
                local_listener=local_listener,
                masters=options.masters,
            )
            on_failure.callback(self._broker.close)
            self.options = replace(options, addresses=self._broker.addresses)
            self._machine = PeerMachine(self.options)
            self._session = Session(self.options.peer_id, has_keys=keys is not None)
            self._run_id = b""
            self._is_led = True
            self.view = View()
            self._viewed_members: tuple[Member, ...] = ()  # The members that `view` was made from.
            self._thread = threading.Thread(target=self._run, name="zpccl-peer", daemon=True)
            on_failure.pop_all()

    def _make_socket(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Makes a socket for one connection, and its monitor."""
        with contextlib.ExitStack() as on_failure:
            dealer = self._context.socket(zmq.DEALER)
            on_failure.callback(dealer.close, linger=0)
            dealer.setsockopt(zmq.LINGER, limits.LINGER_MS)
            dealer.setsockopt(zmq.SNDHWM, limits.CONTROL_QUEUE_MESSAGES_MAX)
            dealer.setsockopt(zmq.MAXMSGSIZE, limits.MESSAGE_BYTES_MAX)
            dealer.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, limits.CONNECT_TIMEOUT_NS // limits.MS)
            dealer.setsockopt(zmq.HANDSHAKE_IVL, limits.CONNECT_TIMEOUT_NS // limits.MS)
            is_ipv6 = self._prefers_ipv6 != self._has_turned or not self._dials_name()
            dealer.setsockopt(zmq.IPV6, int(is_ipv6))
            set_heartbeat(dealer, self._heartbeat_timeout_ns)
            if self._keys is not None:
                dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.master_public)
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
                dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keys.private)
            monitor = dealer.get_monitor_socket(functools.reduce(operator.or_, _SOCKET_EVENTS))
            on_failure.callback(monitor.close, linger=0)
            self._waiter.register(dealer)
            on_failure.callback(self._waiter.unregister, dealer)
            self._waiter.register(monitor)
            on_failure.pop_all()
        return dealer, monitor

    def _close_socket(self) -> None:
        self._connection = None
        self._outgoing.clear()  # The machine says all of it again on the next connection.
        if self._socket.closed:
            return
        for source in (self._socket, self._monitor):
            self._waiter.unregister(source)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=limits.LINGER_MS)

    # --- For users' threads -----------------------------------------------------------------------------------------

    def start(self, call: PendingCall, connect_tries: int) -> None:
        """Connects and starts the thread. The call gets its answer on admission.

        Raises:
            InvalidArgument: ZeroMQ rejects the address.
            InternalError: the system has no thread to give.
        """
        try:
            self._socket.connect(self._endpoints[0])
        except zmq.ZMQError as error:
            self._machine.error = InvalidArgument(f"cannot connect to {self._endpoints[0]}: {error.strerror}")
            self.close()
            raise self._machine.error from None
        self.call([call], connect_tries)
        start_thread(self._thread)

    def call(self, calls: Sequence[PendingCall], connect_tries: int = 0) -> None:
        """Makes calls: one or more collectives together, or one other call."""
        for call in calls:
            call.fetch()
        with self._lock:
            call_ids = range(self._next_call_id, self._next_call_id + len(calls))
            self._next_call_id += len(calls)
            votes = tuple(
                Vote(call_id, self._bounded(call.spec))
                for call_id, call in zip(call_ids, calls, strict=True)
                if call.spec is not None
            )
            event = events.Called(votes) if votes else events.ConnectCalled(call_ids[0], connect_tries)
            self._post(_NewCalls(event, calls, call_ids))  # One item: Ctrl-C leaves all of them made, or none.
            is_closed = self._is_closed
        if is_closed:
            self._refuse(calls)

    def _bounded(self, spec: Spec) -> Spec:
        """The spec with this peer's minimum world size, if it is for a collective."""
        if not isinstance(spec, CollectiveSpec) or not self._min_world_size:
            return spec
        return structs.replace(spec, min_world_size=self._min_world_size)

    def withdraw(self, call: PendingCall, *, timed_out: bool) -> None:
        """Gives a call up, whether it was made or not. Its future still gets an answer."""
        with self._lock:
            self._post(_GivenUp(call, timed_out))
            is_closed = self._is_closed
        if call.spec is None and self._begin():  # connect() was interrupted before the thread began.
            self._machine.error = InvalidUsage("the call was interrupted")
            self._shut_down()
        elif is_closed:
            self._refuse([call])

    def ask_measurements(self) -> Answer[Measurements]:
        """Asks the master for its measurements. All callers that ask before they arrive share one future."""
        with self._lock:
            future = self._measurements
            if future is None:
                future = Answer()
                self._post(events.MeasurementsCalled())
                self._measurements = future  # Only now: a thread that finds it waits for an answer.
                if self._is_closed:
                    with contextlib.suppress(InvalidStateError):  # A signal handler has closed it a moment ago.
                        future.set_exception(self._machine.error or InternalError("the peer has ended"))
            return future

    def is_own_thread(self) -> bool:
        """True in the thread that answers all calls."""
        return threading.current_thread() is self._thread

    def link_ends(self) -> dict[bytes, LinkEnds]:
        """The ends of each open link, by peer id."""
        return {peer_id: link.ends for peer_id, link in self._links.copy().items()}

    def close(self, *, timeout_ns: int | None = None) -> None:
        """Leaves the run, and waits until the thread has ended, at most `timeout_ns`."""
        if not self._leave():
            wait_for_end(self._thread, self._ended, timeout_ns)

    def drop(self) -> None:
        """Leaves the run without waiting: garbage may be collected in a thread that the end would wait for."""
        self.is_dropped = True
        if not self._is_closed:  # The interpreter, as it ends, drops some only after it has cleared the modules.
            self._leave()

    def abandon(self) -> None:
        """Ends everything if the thread has not begun."""
        if self._begin():
            self._shut_down()

    def _leave(self) -> bool:
        """Tells the thread to end. If it has not begun, ends everything at once and returns True."""
        if not self._begin():
            self._post(events.CloseCalled())
            return False
        self._shut_down()
        return True

    def _begin(self) -> bool:
        """True for the first caller: the thread, or a thread that ends everything before it has begun."""
        with self._lock:
            has_begun, self._has_begun = self._has_begun, True
        return not has_begun

    @property
    def error(self) -> PCCLError | None:
        """Why the loop has ended, or None."""
        return self._machine.error

    def _post(self, item: _InboxItem) -> bool:
        with self._lock:
            if not self._is_closed:
                self._inbox.append(item)
                with contextlib.suppress(ValueError):  # A signal handler has closed it in between.
                    self._wakeup.write(_ONE)
            return not self._is_closed

    def _refuse(self, pending: Sequence[PendingCall], error: PCCLError | None = None) -> None:
        error = error or self._machine.error or InternalError("the peer has ended")
        for call in pending:
            if call.transfer is not None:
                call.transfer.end(commit=False)
            with contextlib.suppress(InvalidStateError):  # The call has its answer, or another thread gives it.
                call.future.set_exception(copy.copy(call.error or error))  # Many calls may get the same error.

    # --- For the broker's thread ------------------------------------------------------------------------------------

    def _on_link(self, link: NewLink) -> None:
        if not self._post(link):
            for connection in link.sockets:
                connection.close()

    def _on_new_connection(self, new: NewConnection) -> None:
        if not self._post(new):
            new.connection.close()

    def _on_link_failed(self, peer_id: bytes, reason: str) -> None:
        self._post(events.LinkFailed(peer_id, reason))

    # --- In the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._begin():
                self._serve()
        finally:
            self._ended.set()

    def _serve(self) -> None:
        try:
            for descriptor in (self._wakeup.fileno(), self.engine.fileno()):
                self._waiter.register(descriptor)
            while self._machine.state is not State.CLOSED:
                deadline_ns = self._deadline_ns()
                ready = self._waiter.wait(poll_timeout_ms(deadline_ns, time.monotonic_ns()))
                now_ns = time.monotonic_ns()
                self._run_once(ready, now_ns, is_due=self._is_due(deadline_ns, now_ns))
        except BaseException as error:
            logger.critical("the peer's loop failed; this is a bug in zpccl", exc_info=True)
            self._machine.error = self._machine.error or InternalError(f"the peer's loop failed: {error!r}")
        finally:
            self._shut_down()

    def _is_due(self, deadline_ns: int | None, now_ns: int) -> bool:
        """True if a time has run out. If it is late by much, the machine first hears what came meanwhile."""
        if deadline_ns is None or now_ns < deadline_ns:
            return False
        if deadline_ns > self._woken_ns and now_ns > deadline_ns + limits.LATE_TICK_NS:
            self._woken_ns = now_ns + limits.LATE_TICK_NS
        return True

    def _run_once(self, ready: set[Any], now_ns: int, *, is_due: bool = False) -> None:
        if self._wakeup.fileno() in ready:
            self._wakeup.read(len(_ONE))
            for _ in range(len(self._inbox)):  # Without the lock: the thread that woke this one may still hold it.
                self._take(self._inbox.popleft(), now_ns)
        if self._monitor in ready:  # After the inbox: connect() comes before the connection it makes.
            self._take_monitor_events(now_ns)
        if self._socket in ready:
            self._take_messages(now_ns, limits.POLL_EVENTS_MAX)
        if self.engine.fileno() in ready:
            self._take_engine_events(now_ns, limits.ENGINE_MESSAGES_TAKEN_MAX)
        if is_due:
            self._on_session(events.Tick(), now_ns)
            if now_ns >= self._woken_ns:
                self._handle(events.Tick(), now_ns)
            if self._session.phase is SocketPhase.UP and now_ns - self._sent_ns >= limits.PEER_SILENCE_NS:
                self._outgoing.add(None, b"", now_ns, may_wait=False)  # See control/inflow.py.
        if self._leave_ns is not None and (self._machine.is_led or now_ns >= self._leave_ns):
            self._leave_ns = None
            self._handle(events.CloseCalled(), now_ns)
        self._flush(now_ns)

    def _take_messages(self, now_ns: int, count_max: int = limits.CONTROL_QUEUE_MESSAGES_MAX) -> None:
        for _ in range(count_max):
            if not is_readable(self._socket):
                return
            data = self._socket.recv(zmq.NOBLOCK)
            self._take_engine_events(now_ns)  # First: others may have committed a call with a digest told from here.
            self._on_session(events.DataReceived(data), now_ns)

    def _take(self, item: _InboxItem, now_ns: int) -> None:
        if isinstance(item, _NewCalls):
            for call_id, call in zip(item.call_ids, item.calls, strict=True):
                call.call_id = call_id
                self._calls[call_id] = call
            self._handle(item.event, now_ns)
        elif isinstance(item, _GivenUp):
            call = item.call
            if call.call_id in self._calls:
                self._withhold_digest(call, now_ns)
                self._handle(events.CallWithdrawn(call.call_id, item.timed_out), now_ns)
            elif call.call_id is None:  # The user's thread was interrupted before it made the call.
                self._refuse([call], InvalidUsage("the call was interrupted"))
        elif isinstance(item, _Restored):
            self._restoring.remove(item.call)
            start, item.call.start = item.call.start, None
            if item.call.error is not None:
                self._refuse([item.call])
            elif start is not None:
                self._start_reduce(start)
        elif isinstance(item, NewLink):
            self._open_link(item, now_ns)
        elif isinstance(item, NewConnection):
            self._add_connection(item, now_ns)
        elif isinstance(item, events.MechanismTold):
            self._on_session(item, now_ns)
        elif isinstance(item, events.CloseCalled) and self._must_wait():
            self._leave_ns = now_ns + limits.LEAVE_WAIT_NS
        else:
            self._handle(item, now_ns)

    def _must_wait(self) -> bool:
        """True for a member that wants to leave between two of several masters. It waits for the next one to tell it.

        Otherwise that one takes it for a member which may be at another master. A second `close()` ends the wait.
        """
        is_member = self._machine.state is State.MEMBER and len(self._machine.members) > 1
        return is_member and not self._machine.is_led and len(self._endpoints) > 1 and self._leave_ns is None

    def _take_monitor_events(self, now_ns: int) -> None:
        """Handles the monitor's events. Messages that came before the end of the socket are handled before it."""
        while is_readable(self._monitor):
            kind, value = take_event(self._monitor)
            event = _SOCKET_EVENTS[kind]
            if isinstance(event, events.TcpConnected):
                self._connection = closed_in_children(Descriptor(value))
                self._prefers_ipv6, self._has_turned = self._prefers_ipv6 != self._has_turned, False
            elif isinstance(event, events.SocketBroke):
                self._connection = None
                self._take_messages(now_ns)
            elif isinstance(event, events.DialFailed) and self._turn(now_ns):
                continue
            self._on_session(event, now_ns)

    def _on_session(self, event: SessionEvent, now_ns: int) -> None:
        for effect in self._session.handle(event, now_ns):
            if isinstance(effect, effects.OpenSocket):
                self._open_socket(self._endpoints[effect.index], now_ns)
            elif isinstance(effect, effects.AskMechanism):
                self._ask_mechanism(effect.index)
            else:
                self._handle(effect, now_ns)

    def _open_socket(self, endpoint: str, now_ns: int) -> None:
        self._endpoint, self._has_turned = endpoint, False
        self._dial(now_ns)

    def _dials_name(self) -> bool:
        return is_name(self._endpoint.removeprefix("tcp://"))

    def _turn(self, now_ns: int) -> bool:
        """Dials the name of a master again, at its address of the other IP version: libzmq dials only one address.

        From then on the version that answers is dialled first. False: the endpoint has no name, or both versions have
        been dialled.
        """
        is_over = self._has_turned or self._session.phase is not SocketPhase.DIALLING
        if is_over or not self._dials_name():
            return False
        self._has_turned = True
        self._dial(now_ns)
        return True

    def _dial(self, now_ns: int) -> None:
        self._close_socket()
        try:
            self._socket, self._monitor = self._make_socket()
            self._socket.connect(self._endpoint)
        except (OSError, zmq.ZMQError) as error:  # ZeroMQ rejects the address, or descriptors ran out.
            self._on_session(events.DialFailed(str(error.strerror)), now_ns)

    def _ask_mechanism(self, index: int) -> None:
        def on_answer(mechanism: str, reason: str) -> None:
            self._post(events.MechanismTold(index, mechanism, reason))

        self._broker.ask_mechanism(self._endpoints[index].removeprefix("tcp://"), on_answer)

    def _deadline_ns(self) -> int | None:
        silence_ns = self._sent_ns + limits.PEER_SILENCE_NS if self._session.phase is SocketPhase.UP else None
        machine_ns = self._machine.deadline_ns()
        tick_ns = None if machine_ns is None else max(machine_ns, self._woken_ns)
        deadlines = (tick_ns, self._session.deadline_ns(), self._outgoing.deadline_ns, silence_ns, self._leave_ns)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _on_engine_event(self, event: EngineEvent, now_ns: int) -> None:
        if isinstance(event, ReduceDone):
            call = self._calls.get(self._attempts.get(event.attempt_id, -1))
            error = os.strerror(-event.status) if event.status < 0 else ""
            paths = self._rates.end(event.attempt_id)
            self._choose_senders(paths)
            if call is not None:
                call.tx_bytes, call.rx_bytes = event.tx_bytes, event.rx_bytes
                paths += call.measured
            done = events.ReduceDone(event.attempt_id, event.digest, error, event.fault, event.has_told, paths)
            self._handle(done, now_ns)
        elif isinstance(event, MessageReceived):  # Messages of transfers go to the transfers' own mailboxes.
            if event.channel_id == DIGEST_CHANNEL:
                self._on_digest(event, now_ns)
            else:
                self.offers.on_message(event.peer, event.body)
        elif isinstance(event, (ConnectionLost, LinkLost)):
            self._on_lost(event, now_ns)

    def _on_lost(self, event: ConnectionLost | LinkLost, now_ns: int) -> None:
        link, why = self._links.get(event.peer), os.strerror(-event.status)
        if link is None or link.link_id != event.link_id:
            return  # It was closed, or replaced, a moment ago.
        if isinstance(event, ConnectionLost):
            is_one_more = event.index >= link.ends.connections
            text = f"connection {event.index} to peer {event.peer.hex()} was lost ({why}); the link has others"
            self._lines.write(logging.DEBUG if is_one_more else logging.INFO, text, now_ns)
            self._broker.redial(event.peer, link.number, event.index, event.generation)
        else:
            del self._links[event.peer]
            self._broker.lose_link(event.peer, link.number)
            self._tell_transfers(event.peer)
            self._handle(events.LinkFailed(event.peer, why), now_ns)

    def _handle(self, event: events.PeerEvent, now_ns: int) -> None:
        machine = self._machine
        todo = machine.handle(event, now_ns)
        if machine.members is not self._viewed_members or machine.state is not self.view.state:
            self._viewed_members = machine.members  # Before calls are answered, so that users see their effect.
            members = tuple((member.peer_id, member.group, member.name) for member in machine.members)
            self.view = View(machine.state, machine.epoch, members)
        self._perform(todo, now_ns)
        if machine.is_led != self._is_led:
            self._is_led = machine.is_led
            self.engine.hold_stalls(not machine.is_led)
        if machine.run_id != self._run_id:
            self._run_id = machine.run_id
            self._broker.set_run(machine.run_id)

    def _perform(self, todo: list[effects.PeerEffect], now_ns: int) -> None:
        for effect in todo:
            if isinstance(effect, effects.Send):
                self._send(effect, now_ns)
            elif isinstance(effect, effects.UseMaster):
                self._on_session(effect, now_ns)
            elif isinstance(effect, effects.StartReduce):
                self._start_reduce(effect)
            elif isinstance(effect, effects.EndReduce):
                self._end_reduce(effect)
            elif isinstance(effect, effects.StartSync):
                self._start_sync(effect)
            elif isinstance(effect, effects.EndSync):
                self._end_sync(effect)
            elif isinstance(effect, effects.OpenLink):
                self._broker.open(effect.neighbour, is_outsider=self._is_outsider(effect.neighbour.peer_id))
            elif isinstance(effect, effects.CloseLink):
                self._broker.close_link(effect.peer_id)
                self._close_link(effect.peer_id)
                self.offers.lose_link(effect.peer_id, is_gone=True)
            elif isinstance(effect, effects.FetchAhead):
                self.offers.on_peers(effect.peers)
            elif isinstance(effect, effects.ShowMeasurements):
                self._show_measurements(effect.measurements)
            elif isinstance(effect, effects.Log):
                self._lines.write(effect.level, f"{self.options.name}: {effect.text}", now_ns)
            else:
                self._answer(effect)

    def _send(self, effect: effects.Send, now_ns: int) -> None:
        if self._session.phase is not SocketPhase.UP:
            return  # The machine says all of it again on the next connection.
        # Until the master has read a Hello, it takes little from a connection, and the votes after it may be large.
        is_hello = isinstance(effect.message, Hello)
        self._outgoing.add(None, encode(effect.message), now_ns, may_wait=effect.may_wait, alone=is_hello)

    def _flush(self, now_ns: int) -> None:
        try:
            for _, parts in self._outgoing.take(now_ns):
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                self._sent_ns = now_ns
        except zmq.Again:  # The master does not read, or its path is slow. The messages are dropped here.
            logger.warning("the queue to the master is full; connecting again")
            self._close_socket()
            self._on_session(events.SocketBroke(), now_ns)

    def _answer(self, effect: effects.Resolve | effects.Reject) -> None:
        call = self._calls.pop(effect.call_id)
        if isinstance(effect, effects.Resolve):
            future = call.future
            del call  # Its tensors may take long to free: the user's thread does that, once it has the answer.
            return future.set_result(effect.value)
        error = effect.error
        if call.fault and isinstance(error, PeerLost):  # For the others. Here the call would fail again.
            error = InternalError(call.fault)
        if call in self._restoring:
            call.error = error
        else:
            self._refuse([call], error)
        return None

    def _show_measurements(self, measurements: Measurements) -> None:
        with self._lock:
            future, self._measurements = self._measurements, None
        if future is not None:
            future.set_result(measurements)

    def _end_reduce(self, effect: effects.EndReduce) -> None:
        call = self._calls.get(self._attempts.pop(effect.attempt_id, -1))
        order = self._started_ahead.pop(effect.attempt_id, ())
        if not effect.commit:
            self._tell_ended(effect.attempt_id, order)
        self._rates.forget(effect.attempt_id)
        if call is not None and call.start is not None:  # The attempt has not begun.
            call.start = None
            return self.engine.end_reduce(effect.attempt_id, commit=False)
        if effect.commit or call is None or call.send.nbytes < limits.SMALL_TENSOR_BYTES:
            is_empty = call is not None and not call.send.count  # Then the engine learns only the attempt id.
            return self.engine.end_reduce(effect.attempt_id, commit=effect.commit and not is_empty)
        self._restoring.append(call)
        return self._restorer.submit(lambda: self._restore(effect.attempt_id, call))

    def _restore(self, attempt_id: int, call: PendingCall) -> None:
        """Ends an attempt, in a worker."""
        with contextlib.suppress(OSError):  # The engine was closed, which does the same.
            self.engine.end_reduce(attempt_id, commit=False)
        self._post(_Restored(call))

    def _start_reduce(self, effect: effects.StartReduce) -> None:
        self._attempts[effect.attempt_id] = effect.call_id
        if effect.is_ahead:
            self._started_ahead[effect.attempt_id] = effect.how.order
        call = self._calls[effect.call_id]
        if call in self._restoring:  # This attempt replaces one that was planned ahead.
            call.start = effect
            return
        names = {member.peer_id: member.name for member in self._machine.members}
        call.fault = ""
        try:
            plan = call.plan(effect, self.options.peer_id, names)
            if plan.count:
                if call.send.nbytes >= limits.SPEED_TENSOR_BYTES:
                    self._rates.begin(effect.attempt_id, neighbours_of(effect.how, self.options.peer_id))
                self.engine.start_reduce(plan)
            else:
                self._post(events.ReduceDone(effect.attempt_id))
        except (OSError, PCCLError, MemoryError, RuntimeError) as error:  # RuntimeError: torch is out of memory.
            reason = getattr(error, "strerror", None) or getattr(error, "message", None) or error
            if getattr(error, "errno", None) == errno.ENOTCONN:
                text = f"{self.options.name} has just lost a link that the call needs"  # It may come back.
            else:
                text = call.fault = f"{self.options.name} cannot start: {reason}"
            self._post(events.ReduceDone(effect.attempt_id, error=text))

    def _withhold_digest(self, call: PendingCall, now_ns: int) -> None:
        """From now on the digest of a call's result is not sent. The machine learns if it was sent before."""
        if call.start is not None:
            call.start = replace(call.start, tells_digest=False)
        for attempt_id in [attempt_id for attempt_id, call_id in self._attempts.items() if call_id == call.call_id]:
            while self.engine.withhold_digest(attempt_id):
                self._take_engine_events(now_ns)

    def _take_engine_events(self, now_ns: int, messages_max: int = 1) -> None:
        """Takes all events of collectives and links, and then, since they come last, at most `messages_max` messages.

        With more messages in a turn, a peer that sends them all the time would hold up calls that it is no part of.
        """
        is_done = False
        while not is_done:
            taken = self.engine.poll(messages_max)
            is_done = len(taken) < messages_max or isinstance(taken[-1], MessageReceived)
            for event in taken:
                self._on_engine_event(event, now_ns)

    def _on_digest(self, message: MessageReceived, now_ns: int) -> None:
        try:
            attempt_id, call_id, digest = _DIGEST.unpack(message.body.read())
        except struct.error:
            return self._lines.write(logging.WARNING, f"malformed digest from peer {message.peer.hex()}", now_ns)
        if call_id == _ENDED:
            return self._handle(events.AttemptEnded(message.peer, attempt_id), now_ns)
        return self._handle(events.DigestReceived(message.peer, attempt_id, call_id, digest), now_ns)

    def _tell_ended(self, attempt_id: int, order: Iterable[bytes]) -> None:
        """Tells others that this peer has ended an attempt that it had started ahead, without a result.

        They may never start it, and perhaps do not know it. They would keep the frames that have come early.
        """
        body = _DIGEST.pack(attempt_id, _ENDED, 0)
        for peer_id in order:
            if peer_id == self.options.peer_id:
                continue
            with contextlib.suppress(OSError):  # There is no link: its frames are gone, too.
                self.engine.post_message(peer_id, DIGEST_CHANNEL, body, b"", limits.DATA_MESSAGES_QUEUED_BYTES_MAX)

    def _start_sync(self, effect: effects.StartSync) -> None:
        attempt_id, plan = effect.attempt_id, effect.how
        transfer = self._calls[effect.call_id].transfer
        assert transfer is not None
        try:
            self.engine.open_channel(attempt_id, transfer.mailbox.fileno())
        except OSError as error:
            return self.report_fetch(attempt_id, f"{self.options.name} cannot start: {error.strerror}", None, ())
        self._attempts[attempt_id] = effect.call_id
        own_id = self.options.peer_id
        begin = sorted((own_id, *plan.partial_seeds)).index(own_id) / (len(plan.partial_seeds) + 1)
        fetch = {entry.key: entry.digest for entry in plan.fetch}
        transfer.start(attempt_id, plan.sources, plan.partial_seeds, fetch, begin, self.engine)

    def _end_sync(self, effect: effects.EndSync) -> None:
        self._attempts.pop(effect.attempt_id, None)
        self.engine.close_channel(effect.attempt_id)
        transfer = self._calls[effect.call_id].transfer
        assert transfer is not None
        transfer.end(effect.commit)

    def _open_link(self, link: NewLink, now_ns: int) -> None:
        """Takes a complete link from the broker. It replaces an older one, which is broken at its other end."""
        peer_id, sockets = link.peer_id, link.sockets
        self._close_link(peer_id)
        if not self._machine.wants_link(peer_id):
            for connection in sockets:
                connection.close()
            return self._broker.lose_link(peer_id, link.number)
        try:
            if self._is_outsider(peer_id) and not self._has_room_for_outsider(len(sockets)):
                raise OSError(errno.EMFILE, "peers that are no members take too many descriptors; raise `ulimit -n`")
            ends = ends_of(sockets)
            fds = [connection.fileno() for connection in sockets]
            link_id = self.engine.open_link(peer_id, fds, link.cipher_keys, places_for(len(fds)))
        except OSError as error:
            for connection in sockets:
                connection.close()
            self._broker.lose_link(peer_id, link.number)
            return self._handle(events.LinkFailed(peer_id, str(error)), now_ns)
        for connection in sockets:
            connection.detach()
        self._links[peer_id] = _Link(link_id, link.number, ends)
        self._lines.write(logging.INFO, f"link to {self._machine.neighbour_name(peer_id)}: {ends}", now_ns)
        self.offers.on_link_up(peer_id)
        self._handle(events.LinkUp(peer_id), now_ns)

    def _add_connection(self, new: NewConnection, now_ns: int) -> None:
        """Takes a connection from the broker: it replaces a lost one, or the link gets one more."""
        link = self._links.get(new.peer_id)
        try:
            if link is None or link.number != new.number:
                raise OSError(errno.ENOTCONN, "its link is gone")
            is_one_more = new.index >= link.ends.connections
            if is_one_more and not self._may_open(1):  # No redial: it would be refused again.
                new.connection.close()
                return
            fd = new.connection.fileno()
            self.engine.add_connection(new.peer_id, link.link_id, new.index, new.generation, fd, new.ready, new.keys)
        except OSError as error:
            new.connection.close()
            logger.debug("connection %d to peer %s is not taken: %s", new.index, new.peer_id.hex(), error)
            if link is not None:  # For the side that dialled. The other one sees the connection end.
                self._broker.redial(new.peer_id, new.number, new.index, new.generation)
            return
        new.connection.detach()
        level = logging.DEBUG if is_one_more else logging.INFO
        self._lines.write(level, f"connection {new.index} to peer {new.peer_id.hex()} is open", now_ns)

    def _choose_senders(self, paths: Iterable[PathSample]) -> None:
        """Sets how many connections of each link are used, from what its path has carried."""
        for path in paths:
            link = self._links.get(path.peer_id)
            if not self._chooses_senders or link is None:
                continue
            ends = link.ends
            with contextlib.suppress(EngineError):  # The link was lost a moment ago.
                state = self.engine.link_state(path.peer_id)
                used, queued_us = min(state.senders, state.open_count), self._rates.queued_us.get(path.peer_id, 0)
                senders = senders_for(path, queued_us, used, ends.connections, ends.congestion_control)
                if senders != used:
                    self.engine.set_senders(path.peer_id, senders)
                missing = [i for i in range(ends.connections, senders) if not state.generations[i]]
                if missing and self._may_open(len(missing)):
                    for index in missing:  # Only the end that dialled the link dials.
                        self._broker.redial(path.peer_id, link.number, index, -1)

    def _may_open(self, count: int) -> bool:
        """Whether the links may have `count` more connections: half of the descriptors are kept for other uses."""
        open_count = sum(self.engine.link_state(peer_id).open_count for peer_id in self._links)
        return open_count + count <= share_of_descriptors(2)

    def _is_outsider(self, peer_id: bytes) -> bool:
        """True if this peer is a member and the other one is not. Without a secret anybody may come so far."""
        is_known = self._keys is not None or self._machine.state is not State.MEMBER
        return not is_known and all(member.peer_id != peer_id for member in self._machine.members)

    def _has_room_for_outsider(self, count: int) -> bool:
        """Whether an outsider may have a link of `count` connections.

        Outsiders may take a quarter of the descriptors, and more as long as another quarter stays free. A single one
        may always have its link.
        """
        quarter = share_of_descriptors(4)
        outside = [link.ends.connections for peer_id, link in self._links.items() if self._is_outsider(peer_id)]
        open_count = sum(link.ends.connections for link in self._links.values())
        return not outside or sum(outside) + count <= quarter or open_count + count <= 3 * quarter

    def _close_link(self, peer_id: bytes) -> None:
        self._rates.queued_us.pop(peer_id, None)
        if self._links.pop(peer_id, None) is not None:
            with contextlib.suppress(OSError):  # The link was lost a moment ago: its event is on the way.
                self.engine.close_link(peer_id)
            self._tell_transfers(peer_id)

    def _tell_transfers(self, peer_id: bytes) -> None:
        """Tells syncs that a link is gone: data that they wait for on it will not come."""
        for call in self._calls.values():
            if call.transfer is not None:
                call.transfer.lose_link(peer_id)
        self.offers.lose_link(peer_id)

    def be_ready(self) -> None:
        """The state to fetch ahead is here, or was given up. The user's thread calls this."""
        self._post(events.ReadyCalled())

    def report_fetch(
        self, attempt_id: int, error: str, fault: bytes | None, dropped: tuple[tuple[bytes, str], ...]
    ) -> None:
        """Tells the machine that a fetch is done or failed. The user's thread calls this."""
        self._post(events.FetchDone(attempt_id, error, fault, dropped))

    def _shut_down(self) -> None:
        """Ends everything. Calls that still wait get the machine's error."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        self.offers.close()
        self._broker.close()
        self._restorer.finish()
        self.engine.close()  # Before any user is told that its memory is free again.
        with self._lock:
            self._is_closed = True
            calls = [*self._calls.values(), *self._restoring]
            self._calls = {}
            inbox, self._inbox = self._inbox, deque()
            measurements = self._measurements
        for item in inbox:
            if isinstance(item, _NewCalls):
                calls += item.calls
            elif isinstance(item, _GivenUp):
                calls.append(item.call)
            elif isinstance(item, NewLink):
                for connection in item.sockets:
                    connection.close()
            elif isinstance(item, NewConnection):
                item.connection.close()
        self.view = View(State.CLOSED, self.view.epoch, self.view.members)
        self._refuse(calls)
        if measurements is not None and not measurements.done():
            measurements.set_exception(self._machine.error or InternalError("the peer has ended"))
        self._close_socket()
        self._waiter.close()
        self._context.destroy(linger=0)  # Also closes a half-made socket, on which it would wait forever.
        self._wakeup.close()


_ONE = (1).to_bytes(8, sys.byteorder)
"""What an eventfd is written."""
_DIGEST = struct.Struct(">QQQ")
"""Attempt, the sender's call, the digest of its result."""
_ENDED = 0
"""In place of a call: the sender has ended the attempt, which it had started ahead. Calls have numbers from 1."""
_NEVER_MS = 2**30
"""libzmq never reconnects by itself, but reports that it will: that report tells the session that a dial failed."""
_SOCKET_EVENTS: dict[int, SessionEvent] = {
    zmq.EVENT_CONNECT_DELAYED: events.DialStarted(),
    zmq.EVENT_CONNECT_RETRIED: events.DialFailed(),
    zmq.EVENT_CONNECTED: events.TcpConnected(),
    zmq.EVENT_HANDSHAKE_SUCCEEDED: events.HandshakeDone(),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: events.HandshakeFailed(),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: events.HandshakeFailed(),
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: events.HandshakeFailed(is_key_refused=True),
    zmq.EVENT_DISCONNECTED: events.SocketBroke(),
}
