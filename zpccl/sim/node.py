"""The simulated processes of masters and peers: shells that perform the effects of the machines.

A process owns its machine and its timer; a peer also owns its connection and the threads of its program. Every event
comes from the clock, so a machine is never re-entered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from zpccl import limits
from zpccl.limits import MS, SECOND
from zpccl.protocol import effects, events
from zpccl.protocol.identity import SALT_BYTES, make_peer_id
from zpccl.protocol.master import MasterMachine
from zpccl.protocol.messages import StateEntry, SyncSpec, TopologySpec, Vote, Welcome
from zpccl.protocol.peer import PeerMachine, PeerOptions, State
from zpccl.protocol.session import Session, SessionEvent
from zpccl.sim.clock import LocalClock, Timer
from zpccl.sim.dataplane import SimulatedState, digest_of
from zpccl.sim.faults import HEALED, Faults
from zpccl.sim.network import Connection
from zpccl.sim.program import (
    Action,
    Answer,
    Batch,
    CallRequest,
    Collective,
    Connect,
    Fatal,
    Pause,
    Program,
    Sync,
    Together,
    Topology,
)
from zpccl.sim.wander import live
from zpccl.types import CollectiveKind, DataType

if TYPE_CHECKING:
    from zpccl.sim.cluster import Cluster


RunKey: TypeAlias = tuple[bytes, int]
"""The run, and a number that is unique within it: an epoch or an attempt id."""
ENGINE_EVENTS = (events.ReduceDone, events.DigestReceived, events.AttemptEnded, events.LinkFailed)
FROM_THREADS, FROM_ENGINE, FROM_SOCKET = range(3)
"""Where events of a peer's loop come from, in the order in which it takes them."""
MASTER_TIMEOUT_NS = 20 * SECOND
"""With several masters: peers of a run that has lost its quorum for good must give up before the simulation ends."""


class SimulatedMaster:
    """The process of a master, and those that restart it at the same address.

    Attributes:
        index: its index in the list of masters.
    """

    def __init__(self, cluster: Cluster, index: int, machine: MasterMachine, clock: LocalClock) -> None:
        self._cluster = cluster
        self.index = index
        self.name = f"master{index}" if index else "master"
        self.is_foreign = False
        """While it is down, a server of another protocol version answers at its address."""
        self._crash_count = 0
        self._waiting: list[events.MasterEvent] | None = None  # What has come while it stands still, or is busy.
        self._still_until_ns = 0
        self._rng = cluster.child_rng()
        self._busy_ns_max = 0
        self.went_on_ns: int | None = None
        """When it last took several events at once."""
        self._run_of: dict[str, bytes] = {}  # By connection.
        self._timer: Timer | None = None
        self.restart(machine, clock)

    def key(self, connection: str, number: int) -> RunKey:
        """The key of an epoch or attempt in a message on a connection: in the run whose Welcome went out on it last.

        Its peer may be a member of another run by then: the master learns later that the connection is broken.
        """
        return self._run_of.get(connection, self.machine.run_id), number

    @property
    def lifetime(self) -> tuple[int, int, int]:
        """Identifies a time in which it keeps its memory; a restart or a new generation of the machine ends it."""
        return self.index, self._crash_count, self.machine.generation

    def crash(self) -> None:
        """Kills the process; its memory is lost."""
        self.is_alive = False
        self._waiting, self._still_until_ns = None, 0
        self._crash_count += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def has_died(self) -> bool:
        """True if it was killed, possibly in the middle of a step."""
        return not self.is_alive

    def restart(self, machine: MasterMachine, clock: LocalClock) -> None:
        """Starts a new process at the same address."""
        self.machine = machine
        self.clock = clock
        self.is_alive = True
        self.started_ns = clock.now_ns()  # By its own clock.
        self.is_foreign = False
        busy = 10 ** self._rng.uniform(-1, 2) * MS if self._rng.random() < self._cluster.faults.busy_chance else 0
        self._busy_ns_max = int(busy) if self._cluster.injector.strikes("busy_chance") else 0
        self._arm()

    def _arm(self) -> None:
        deadline_ns = self.clock.world_ns(self.machine.deadline_ns())
        self._timer = self._cluster.rearm(self._timer, deadline_ns, lambda: self.handle(events.Tick()))

    def handle(self, event: events.MasterEvent) -> None:
        """Takes an event, later if it stands still or is busy. Does nothing in a dead process."""
        if not self.is_alive:
            return
        if self._waiting is None and self._busy_ns_max:
            self._wait(self._rng.randrange(self._busy_ns_max))
        if self._waiting is None:
            self._handle((event,))
        elif not isinstance(event, events.Tick):
            self._waiting.append(event)

    def pause(self, duration_ns: int) -> None:
        """Makes the process stand still. Then it takes all that has come meanwhile at once."""
        self._still_until_ns = max(self._still_until_ns, self._cluster.clock.now_ns + duration_ns)
        if self.is_alive and self._waiting is None:
            self._wait(duration_ns)

    def _wait(self, duration_ns: int) -> None:
        if self._waiting is None:
            self._waiting = []
        self._cluster.clock.after(duration_ns, functools.partial(self._go_on, self._crash_count))

    def _go_on(self, crash_count: int) -> None:
        if crash_count != self._crash_count or self._waiting is None:
            return  # It has died since.
        still_ns = self._still_until_ns - self._cluster.clock.now_ns
        if still_ns > 0:
            return self._wait(still_ns)
        waiting, self._waiting = self._waiting, None
        self.went_on_ns = self._cluster.clock.now_ns
        # The loop takes messages first, though not all at once, then the ends of connections. The end of a connection
        # comes again if the loop takes messages of it later.
        closed = [event for event in waiting if isinstance(event, events.ConnectionClosed)]
        messages = [event for event in waiting if not isinstance(event, events.ConnectionClosed)]
        count = self._rng.randint(0, len(messages)) if self._rng.random() < 0.5 else len(messages)
        for batch in (messages[:count] + closed, messages[count:] + closed if messages[count:] else []):
            deadline_ns = self.clock.world_ns(self.machine.deadline_ns())
            if deadline_ns is not None and deadline_ns <= self._cluster.clock.now_ns:
                batch.append(events.Tick())
            if batch and self.is_alive:
                self._handle(batch)

    def _handle(self, batch: Sequence[events.MasterEvent]) -> None:
        """Passes events to the machine and performs the effects."""
        cluster = self._cluster
        for event in batch:
            cluster.trace(self.name, "<-", event)
            if cluster.coverage is not None:
                cluster.coverage.on_master_event(self.machine, event)
        before, moment = (self.machine.generation, self.machine.is_alone), cluster.nemesis.look(self)
        done = self.machine.handle_all(batch, self.clock.now_ns())
        if before != (
            self.machine.generation,
            self.machine.is_alone,
        ):  # Recent faults are noticed later than usual.
            cluster.prolong(cluster.takeover_ns)
        self.machine.validate()
        sends_left, strike = cluster.nemesis.ambush(self, moment, batch, done)
        for effect in done:
            cluster.trace(self.name, "->", effect)
            if not isinstance(effect, effects.Broadcast):
                continue
            for connection in effect.connections:
                assert connection is not None, f"{effect.message} is for nobody"
                if sends_left == 0:
                    strike()
                    if self.has_died():
                        return
                sends_left -= 1
                if isinstance(effect.message, Welcome):
                    self._run_of[str(connection)] = effect.message.run_id
                cluster.checkers.on_master_message(self, str(connection), effect.message)
                cluster.network.send_to_peer(connection, effect.message)
        cluster.checkers.on_master_step(self)
        if sends_left == 0:
            strike()
            if self.has_died():
                return
        cluster.nemesis.ambush_reporters(self, batch)
        cluster.check_deadline(self.name, batch[-1], self.clock.world_ns(self.machine.deadline_ns()))
        self._arm()
        cluster.nemesis.ambush_peer(self)


@dataclass(eq=False)
class UserCall:
    """An open call of the program."""

    call_id: int
    request: CallRequest
    opened_ns: int
    answer: Callable[[Answer], None]
    value_before: int = 0
    """Collective: the value of the buffer at the call."""
    state_before: tuple[int, dict[str, int]] | None = None
    """Sync: revision and contents at the call."""


class SimulatedPeer:
    """The process of a peer."""

    def __init__(self, cluster: Cluster, name: str, group: int, state: SimulatedState, host: str) -> None:
        self._cluster = cluster
        self.rng = cluster.child_rng()
        self.name = name
        self.group = group
        self.host = host
        """The host, whose peers come and go together; empty: the peer comes and goes by itself."""
        self.identity = f"the key of {name}"
        self.peer_id = make_peer_id(self.identity, self.rng.randbytes(SALT_BYTES))
        # After the healing, a peer that can be dialled may still die of an earlier fault: its successor must be, too.
        is_parted = cluster.script.is_parted and cluster.faults is not HEALED
        self.is_behind_nat = is_parted and self.peer_id[0] % 2 == 0
        """Nobody can dial it."""
        self.is_revoked = False
        is_slow = self.rng.random() < cluster.faults.slow_chance and cluster.injector.strikes("slow_chance")
        self.slowness = 10 if is_slow else 1
        self.is_far = self.rng.random() < cluster.faults.far_chance and cluster.injector.strikes("far_chance")
        self.list = self._draw_list()
        """The masters that it is configured with, by index."""
        options = PeerOptions(
            self.peer_id,
            self.rng.randbytes(16),
            name,
            group,
            (f"10.0.0.1:{len(cluster.nodes)}",),
            tuple(cluster.masters[index].name for index in self.list),
            host=host,
            host_size=cluster.script.host_size,
            is_ready=not (cluster.script.fetches_ahead and self.rng.random() < 0.5),
            master_timeout_ns=limits.MASTER_TIMEOUT_NS if len(cluster.masters) == 1 else MASTER_TIMEOUT_NS,
        )
        self.clock = cluster.draw_clock()
        self.is_ready = options.is_ready
        self.machine: PeerMachine = cluster.make_peer(options)
        self.led_ns = 0
        """When a master last began to lead it."""
        self.session = Session(self.peer_id, has_keys=True)
        self.socket_count = 0
        self.shared_state = state
        self.connection: Connection | None = None
        self.is_alive = True
        self._waiting: list[list[Callable[[], None]]] | None = None
        """What has come for the loop while it stands still: from threads, from the engine, from the socket."""
        self._still_until_ns = 0
        self._woken_ns = 0
        self._is_hung = False
        self._unread: list[Callable[[], None]] = []  # Events of the engine that the loop has yet to take as it goes on.
        self._held: list[Callable[[], None]] = []  # What the threads of a hung program do when it resumes.
        self.calls: dict[int, UserCall] = {}
        self.committed: dict[int, RunKey] = {}  # Calls that were committed, with their attempt.
        self.barriers: set[int] = set()
        """Ids of the calls that were barriers."""
        self._call_of_attempt: dict[int, int] = {}
        self._call_count = 0
        self._timer: Timer | None = None
        self._session_timer: Timer | None = None

    def _draw_list(self) -> tuple[int, ...]:
        """The list of masters: the same for all, except newcomers that a fault gives another one."""
        whole, nodes = tuple(range(len(self._cluster.masters))), self._cluster.live_nodes()
        if len(whole) == 1 or sum(node.machine.state is State.MEMBER for node in nodes) < 2:
            return whole
        other = self.rng.choice((whole[::-1], whole[:-1], (*whole[1:], whole[0])))
        is_other = self.rng.random() < self.faults.list_chance and self._cluster.injector.strikes("list_chance")
        return other if is_other else whole

    @property
    def faults(self) -> Faults:
        """The current profile."""
        return self._cluster.faults

    def strikes(self, kind: str) -> bool:
        """True if a fault of this kind strikes this process now."""
        return self._cluster.injector.strikes(kind, self)

    def key(self, number: int) -> RunKey:
        """The key of an epoch or attempt of its run."""
        return self.machine.run_id, number

    def now_ns(self) -> int:
        """Simulated time."""
        return self._cluster.clock.now_ns

    def has_open(self, kind: type) -> bool:
        """True while a call of this kind has no answer."""
        return any(isinstance(call.request, kind) for call in self.calls.values())

    def note(self, kind: str) -> None:
        """Records a fault of this peer."""
        self._cluster.note(kind, self)

    @property
    def is_running(self) -> bool:
        """True from the first connect() to the end of the communicator."""
        return self.machine.state not in (State.NEW, State.CLOSED)

    def start(self) -> None:
        """Starts its program."""
        self._run(live(self, self._cluster.script), self._on_end)

    # --- The machines -----------------------------------------------------------------------------------------------

    def pause(self, duration_ns: int) -> None:
        """Makes the loop stand still, as code of the user that holds the GIL does. The engine and sockets go on."""
        self._still_until_ns = max(self._still_until_ns, self._cluster.clock.now_ns + duration_ns)
        if self._waiting is None:
            self._waiting = [[], [], []]
            self._cluster.clock.at(self._still_until_ns, self._go_on)

    def _go_on(self) -> None:
        """Takes all that has come, in the order of the real loop."""
        if not self.is_alive or self._waiting is None:
            return
        if self._cluster.clock.now_ns < self._still_until_ns:
            self._cluster.clock.at(self._still_until_ns, self._go_on)
            return
        self._resume()

    def _resume(self) -> None:
        if self._waiting is None:
            return
        (calls, self._unread, messages), self._waiting = self._waiting, None
        self._woken_ns = self._cluster.clock.now_ns + limits.LATE_TICK_NS
        for happen in calls:
            happen()
        self._take_engine_events()
        for happen in messages:
            happen()
        if self.is_alive:
            self._rearm()
            self._rearm_session()

    def _take_engine_events(self) -> None:
        unread, self._unread = self._unread, []
        for happen in unread:
            happen()

    def _put(self, source: int, happen: Callable[[], None]) -> None:
        assert self._waiting is not None
        self._waiting[source].append(happen)

    def handle(self, event: events.PeerEvent, is_current: Callable[[], bool] = lambda: True) -> None:
        """Passes an event to the machine and performs the effects. Does nothing in a dead process.

        If the loop stands still it takes the event later, if `is_current` then.
        """
        if not self.is_alive:
            return
        if self._waiting is not None:
            if not isinstance(event, events.Tick):
                source = FROM_ENGINE if isinstance(event, ENGINE_EVENTS) else FROM_THREADS
                self._put(source, lambda: self.handle(event) if is_current() else None)
            return
        cluster = self._cluster
        cluster.trace(self.name, "<-", event)
        if cluster.coverage is not None:
            cluster.coverage.on_peer_event(self.machine, event)
        was_led = self.machine.is_led
        done = self.machine.handle(event, self.clock.now_ns())
        self.machine.validate()
        if self.machine.is_led and not was_led:
            self.led_ns = cluster.clock.now_ns
        for effect in done:
            cluster.trace(self.name, "->", effect)
            cluster.checkers.on_peer_effect(self, effect)
            self._perform(effect)
        cluster.checkers.on_peer_step(self)
        cluster.check_deadline(self.name, event, self._rearm())

    def _rearm(self) -> int | None:
        """Sets the timer of the machine, and returns its deadline. A Tick that is late by much waits a moment more."""
        deadline_ns = self.clock.world_ns(self.machine.deadline_ns())
        due_ns = None if deadline_ns is None else max(deadline_ns, self._woken_ns)
        self._timer = self._cluster.rearm(self._timer, due_ns, lambda: self.handle(events.Tick()))
        return deadline_ns

    def _rearm_session(self) -> int | None:
        deadline_ns, tick = self.clock.world_ns(self.session.deadline_ns()), events.Tick()
        self._session_timer = self._cluster.rearm(self._session_timer, deadline_ns, lambda: self.on_session(tick))
        return deadline_ns

    def on_session(self, event: SessionEvent) -> None:
        """Passes an event to the session and performs the effects. Does nothing once the peer machine is closed."""
        if not self.is_alive or self.machine.state is State.CLOSED:
            return
        if self._waiting is not None:
            if not isinstance(event, events.Tick):
                count = self.socket_count
                self._put(FROM_SOCKET, lambda: self.on_session(event) if self.socket_count == count else None)
            return
        cluster = self._cluster
        if cluster.coverage is not None:
            cluster.coverage.on_session_event(self.session, event)
        done = self.session.handle(event, self.clock.now_ns())
        self.session.validate()
        cluster.check_deadline(f"the session of {self.name}", event, self._rearm_session())
        for effect in done:
            if isinstance(effect, effects.OpenSocket):
                cluster.network.open_socket(self, effect.index)
            elif isinstance(effect, effects.AskMechanism):
                cluster.network.ask_mechanism(self, effect.index)
            else:
                self.handle(effect)

    def _perform(self, effect: effects.PeerEffect) -> None:
        cluster = self._cluster
        if isinstance(effect, effects.Send):
            if self.connection is not None:
                cluster.network.send_to_master(self.connection, effect.message)
        elif isinstance(effect, effects.UseMaster):
            self.on_session(effect)
        elif isinstance(effect, effects.StartReduce):
            self._start_reduce(effect)
        elif isinstance(effect, effects.EndReduce):
            if effect.commit and effect.attempt_id in self._call_of_attempt:
                self.committed[self._call_of_attempt[effect.attempt_id]] = self.key(effect.attempt_id)
            cluster.dataplane.end_reduce(self, effect.attempt_id, effect.commit)
        elif isinstance(effect, effects.StartSync):
            cluster.dataplane.start_sync(self, effect.attempt_id, effect.how)
        elif isinstance(effect, effects.EndSync):
            if effect.commit:
                self.committed[effect.call_id] = self.key(effect.attempt_id)
            cluster.dataplane.end_sync(self, effect.attempt_id, effect.commit)
        elif isinstance(effect, effects.OpenLink):
            cluster.links.open(self, effect.neighbour)
        elif isinstance(effect, effects.CloseLink):
            cluster.links.close(self, effect.peer_id)
        elif isinstance(effect, effects.FetchAhead):
            self._fetch_ahead()
        elif isinstance(effect, effects.Resolve):
            self._answer(effect.call_id, effect.value)
        elif isinstance(effect, effects.Reject):
            self._answer(effect.call_id, effect.error)

    def _fetch_ahead(self, time_ns: int = 3 * SECOND) -> None:
        """Prefetches state from members. Only the time that it takes, at most `time_ns`, is simulated."""

        def happen() -> None:
            if self.is_alive and not self.is_ready:
                self.is_ready = True
                self.handle(events.ReadyCalled())

        self._cluster.clock.after(self.rng.randrange(time_ns), happen)

    def _start_reduce(self, effect: effects.StartReduce) -> None:
        call = self.calls.get(effect.call_id)
        if call is None or not isinstance(call.request, Collective):
            raise self._cluster.violation("S4", f"{self.name} starts call {effect.call_id}, which is not open")
        self._call_of_attempt[effect.attempt_id] = effect.call_id
        spec, buffer = call.request.spec, call.request.buffer
        self._cluster.dataplane.start_reduce(self, effect, spec, buffer)

    def _answer(self, call_id: int, outcome: Answer) -> None:
        call = self.calls.pop(call_id, None)
        if call is None:
            raise self._cluster.violation("L1", f"{self.name}: call {call_id} is answered, but it is not open")
        if isinstance(call.request, Sync) and isinstance(outcome, int):
            self.shared_state.revision = outcome
        self._cluster.checkers.on_answer(self, call, outcome)
        self._cluster.clock.after(self.rng.randrange(5 * MS), lambda: call.answer(outcome))

    # --- The program ------------------------------------------------------------------------------------------------

    def _run(self, program: Program, on_end: Callable[[Any], None]) -> None:
        """Runs a program in its own thread; `on_end` gets its return value."""

        def resume(value: Any) -> None:
            if not self.is_alive:
                return
            if self._is_hung:
                return self._held.append(lambda: resume(value))
            try:
                request = program.send(value)
            except StopIteration as stop:
                on_end(stop.value)
            except Fatal as fatal:
                self._on_end(fatal.error)
            else:
                self._request(request, resume)

        self._cluster.clock.after(0, lambda: resume(None))

    def hang(self) -> None:
        """Stops the threads of the program; the machine continues."""
        self._is_hung = True

    def wake(self) -> None:
        """Resumes the threads of the program."""
        self._is_hung = False
        held, self._held = self._held, []
        for go_on in held:
            self._cluster.clock.after(0, go_on)

    def _request(self, request: Action, answer: Callable[[Any], None]) -> None:
        if isinstance(request, Pause):
            self._cluster.clock.after(request.delay_ns, lambda: answer(0))
        elif isinstance(request, Together):
            gather = Gather(len(request.programs), answer)
            for place, program in enumerate(request.programs):
                self._run(program, gather.at(place))
        elif isinstance(request, Batch):
            gather = Gather(len(request.collectives), answer)
            calls = [self._open(one, gather.at(place)) for place, one in enumerate(request.collectives)]
            votes = tuple(Vote(call.call_id, one.spec) for call, one in zip(calls, request.collectives, strict=True))
            self._limit(calls, request.timeout_ns)
            self.handle(events.Called(votes))
        else:
            call = self._open(request, answer)
            self._limit([call], 0 if isinstance(request, Connect) else request.timeout_ns)
            if isinstance(request, Connect):
                is_first = self.machine.state is State.NEW
                self.handle(events.ConnectCalled(call.call_id, request.attempts))
                if is_first:
                    self._cluster.network.open_socket(self, 0)
                    if not self.is_ready and self.rng.random() < 0.3:  # The prefetch is given up at once.
                        self._fetch_ahead(100 * MS)
            elif isinstance(request, Topology):
                self.handle(events.Called((Vote(call.call_id, TopologySpec(request.kind)),)))
            else:
                spec = SyncSpec(request.strategy, self.shared_state.revision, self._entries())
                self.handle(events.Called((Vote(call.call_id, spec),)))

    def _open(self, request: CallRequest, answer: Callable[[Answer], None]) -> UserCall:
        self._call_count += 1
        call = UserCall(self._call_count, request, self._cluster.clock.now_ns, answer)
        if isinstance(request, Collective):
            call.value_before = request.buffer.value
            if request.spec.kind == CollectiveKind.BARRIER:
                self.barriers.add(call.call_id)
        elif isinstance(request, Sync):
            call.state_before = (self.shared_state.revision, dict(self.shared_state.values))
        self.calls[call.call_id] = call
        return call

    def _limit(self, calls: list[UserCall], timeout_ns: int) -> None:
        """Sometimes gives calls a timeout. A batch has a single one, or peers would wait for each other's other calls.

        Collectives that need more than two members have none: the master may tell the others that there are too few,
        while this peer times out without its answer and cannot know whether they go on or still wait for it.
        """
        is_impatient = self.rng.random() < self.faults.withdraw_chance
        needs_members = any(isinstance(c.request, Collective) and c.request.spec.min_world_size > 2 for c in calls)
        if (not timeout_ns and not is_impatient) or needs_members:
            return

        def happen() -> None:
            late = [call for call in calls if self.is_alive and call.call_id in self.calls]
            if not late or (not timeout_ns and not self.strikes("withdraw_chance")):
                return
            # A call that is bound by its digest is withdrawn only once it is planned anew, perhaps for lack of a link.
            self._cluster.note("withdrawn", self, duration_ns=limits.LINK_WAIT_TIMEOUT_NS)
            for call in late:
                self._withdraw(call.call_id)

        patience_ns = self.rng.randrange(4 * SECOND if isinstance(calls[0].request, Connect) else SECOND)
        self._cluster.clock.after(timeout_ns or patience_ns, happen)

    def _withdraw(self, call_id: int) -> None:
        if self._waiting is not None:
            return self._put(FROM_THREADS, lambda: self._withdraw(call_id))
        if call_id in self.calls:
            self._take_engine_events()
            self._cluster.dataplane.withhold_digest(self, call_id)
            self.handle(events.CallWithdrawn(call_id, timed_out=True))
        return None

    def _entries(self) -> tuple[StateEntry, ...]:
        return tuple(
            StateEntry(key, DataType.UINT64, 1, key.startswith("local"), digest_of(value))
            for key, value in sorted(self.shared_state.values.items())
        )

    def write_state(self, key: str, value: int) -> None:
        """Writes to the state while a sync of it may run, as a user may."""
        self._cluster.dataplane.change_state(self, key, value)
        for call in self.calls.values():
            if call.state_before is not None:
                call.state_before[1][key] = value

    # --- The end ----------------------------------------------------------------------------------------------------

    def _on_end(self, error: Any) -> None:
        """The program has given up: ends the process, and a supervisor restarts it."""
        self._cluster.trace(self.name, "!!", f"gives up: {error}")
        self.leave()
        self._cluster.restart(self)

    def leave(self) -> None:
        """Closes the communicator, whatever it is doing, and ends the process."""
        if not self.is_alive:
            return
        self._resume()
        self._cluster.note("left", self)
        self.handle(events.CloseCalled())
        self._cluster.checkers.on_closed(self)
        if self.connection is not None:
            self._cluster.network.close(self.connection)
        self._die(is_silent=False)

    def crash(self, *, is_silent: bool) -> None:
        """Kills the process, or (`is_silent`) disconnects its host without a reset."""
        self._cluster.note("crashed", self, is_silent=is_silent)
        self._cluster.trace(self.name, "!!", "silent for ever" if is_silent else "killed")
        if self.connection is not None:
            self._cluster.network.break_connection(self.connection, is_silent=is_silent)
        self._die(is_silent=is_silent)

    def _die(self, *, is_silent: bool) -> None:
        self.is_alive = False
        self.connection = None
        self.calls.clear()
        for timer in (self._timer, self._session_timer):
            if timer is not None:
                timer.cancel()
        self._cluster.dataplane.lose_peer(self)
        self._cluster.links.lose_peer(self.peer_id, is_silent=is_silent)


class Gather:
    """Collects the results of several threads or calls, and passes them on when all are there."""

    def __init__(self, count: int, answer: Callable[[list[Any]], None]) -> None:
        self._results: list[Any] = [None] * count
        self._missing = count
        self._answer = answer

    def at(self, index: int) -> Callable[[Any], None]:
        """The callback for the result with this index."""

        def put(result: Any) -> None:
            self._results[index] = result
            self._missing -= 1
            if self._missing == 0:
                self._answer(self._results)

        return put
