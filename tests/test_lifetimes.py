"""Threads, locks, descriptors and answers when something is interrupted, fails half way, or is garbage-collected."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import pytest
import zmq
from brokers import Broker
from e2e.harness import loop_of, until
from e2e.local import failure, local_run
from interpreter import handling, raising, tracing, without_collector

import zpccl
from zpccl.caller import wait
from zpccl.control import inflow, master_loop
from zpccl.control.calls import Answer
from zpccl.control.peer_loop import PeerLoop
from zpccl.control.waiter import Waiter
from zpccl.engine import engine as engines
from zpccl.engine.engine import Engine, check_rc
from zpccl.observe.logs import RefusalLog
from zpccl.protocol import events
from zpccl.protocol.membership import Standing
from zpccl.state.offers import Prefetch
from zpccl.state.transfer import StateTransfer
from zpccl.types import DigestKind

pytestmark = pytest.mark.e2e
WAIT_S = 10
A, B = b"a" * 16, b"b" * 16


def returns(function: Callable[[], Any]) -> bool:
    """True if a function that runs in a thread returns in time."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return not thread.is_alive()


class Stop(Exception):
    """Raised by a signal handler."""


@contextlib.contextmanager
def interrupting(name: str, event: str, number: int, file: str) -> Iterator[None]:
    """A handler raises Stop at the `number`th event of functions with this name in a file, where Python runs handlers.

    Python runs them when a function begins ("call") and when a built-in one has just returned ("line", "return").
    """
    left = number

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal left
        code: CodeType = frame.f_code
        if code.co_name == name and code.co_filename.endswith(file) and what == event:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Stop
        return trace

    with tracing(trace), contextlib.suppress(Stop):
        yield


def test_an_engine_closes_after_interrupts_of_its_calls() -> None:
    """L1: signals interrupt calls again and again; none leaves the engine marked as in use."""
    engine = Engine()

    def interrupt(*_: object) -> None:
        raise Stop

    with handling(signal.SIGALRM, interrupt):
        for _ in range(200):
            with contextlib.suppress(Stop):
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                while True:
                    engine.poll()
    assert returns(engine.close)


def test_an_engine_whose_close_was_interrupted_closes_the_next_time() -> None:
    """L1: at the latest at the end of the program, which frees memory that its threads may still use."""
    before = thread_count(), descriptor_count()
    for number in range(1, 10):
        engine = Engine()
        with interrupting("close", "line", number, "engine.py"):
            engine.close()
        engine.close()
        gc.collect()  # Since Python 3.12 a frame that `interrupting` has ended is in a cycle.
        assert (thread_count(), descriptor_count()) == before


def test_an_engine_that_is_in_use_stops_and_is_freed_by_its_last_user() -> None:
    """L1: the user may be what the closing signal handler has interrupted. S4: then no thread runs any more."""
    before = thread_count(), descriptor_count()
    engine = Engine()
    with engine._handle.use(), engine._handle.use():
        assert returns(engine.close) and returns(engine.close)
        until(lambda: thread_count() <= before[0], "its threads, or those that closed it, run", WAIT_S)
        with pytest.raises(engines.EngineError, match="closed"):
            engine.poll()
        assert engine.fileno() in map(int, os.listdir("/proc/self/fd")), "the engine is freed though it is in use"
    assert descriptor_count() == before[1]


def test_an_engine_that_is_interrupted_while_it_is_made_ends() -> None:
    """Its threads and descriptors end too, as nobody holds the engine."""
    before = thread_count(), descriptor_count()
    with interrupting("check_rc", "call", 1, "engine.py"):
        Engine()
    gc.collect()  # As above.
    assert (thread_count(), descriptor_count()) == before


def test_asking_whether_a_call_is_done_may_be_interrupted() -> None:
    """L1: the peer's thread can still answer."""
    with local_run(2) as run:
        handle = run.comms[0].all_reduce_async(np.ones(4, np.float32))
        with interrupting("__exit__", "call", 1, "threading.py"):
            handle.done()
        loop = loop_of(run.comms[0])
        assert returns(run.comms[0].close) and not loop._thread.is_alive()
        assert handle.done()


@pytest.mark.parametrize("number", range(1, 6))
def test_a_handler_may_close_wherever_a_call_waits(number: int) -> None:
    """L1: at the `number`th function that it calls there. The peer's thread can still answer all calls."""
    ends, left = list[bool](), number

    def trace(frame: FrameType, what: str, _: Any) -> None:
        nonlocal left
        if wait.__code__ in {caller.f_code for caller, _ in traceback.walk_stack(frame.f_back)}:
            left -= 1
            if left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)

    with local_run(2) as run:
        comm = run.comms[0]
        close = handling(signal.SIGUSR1, lambda *_: ends.append(returns(comm.close)))
        with close, tracing(trace), pytest.raises(zpccl.PCCLError):
            comm.all_reduce(np.ones(4, np.float32))
    assert ends == [True]


@pytest.mark.parametrize(
    ("caller", "name"),
    [
        (Engine.poll, "check_rc"),
        (Engine.poll, "_take"),
        (Engine.post_message, "_peer"),
        (StateTransfer._on_delivery, "view"),
        (StateTransfer._on_delivery, "has_blocks"),
        (StateTransfer._on_delivery, "_on_blocks"),
    ],
)
def test_a_handler_may_close_while_a_sync_uses_the_engine(caller: FunctionType, name: str) -> None:
    """L1: as the `caller` calls that function, within a block that uses the engine."""
    ends = list[bool]()

    def trace(frame: FrameType, what: str, _: Any) -> None:
        if frame.f_code.co_name == name and frame.f_back is not None and frame.f_back.f_code is caller.__code__:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)

    with local_run(2) as run:
        comm, other = run.comms
        arrays = [np.full(2**16, number, np.float32) for number in range(2)]
        states = [zpccl.SharedState([zpccl.TensorInfo.from_numpy(array, "x")]) for array in arrays]
        states[1].revision = 1
        holds = run.start(other.sync_shared_state, states[1])
        close = handling(signal.SIGUSR1, lambda *_: ends.append(returns(comm.close)))
        with close, tracing(trace), pytest.raises(zpccl.InvalidUsage, match="closed"):
            comm.sync_shared_state(states[0])
        assert ends == [True]
        failure(holds)


@pytest.mark.parametrize("number", range(1, 8))
def test_a_call_is_answered_wherever_its_callback_is_added(number: int) -> None:
    """L1: a handler may wait there for the thread that answers. The callback is called once."""
    answer, called, ends, left = Answer[int](), list[Any](), list[bool](), number

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_name != "add_done_callback":
            return None
        left -= what == "line"
        if left == 0 and what == "line":
            sys.settrace(None)
            ends.append(returns(lambda: answer.set_result(1)))
        return trace

    with tracing(trace):
        answer.add_done_callback(called.append)
    if not ends:
        answer.set_result(1)
    assert all(ends)
    assert called == [answer]


def test_a_prefetch_may_be_interrupted() -> None:
    """L1: the loop can still report its end."""
    with Engine() as engine:
        prefetch = Prefetch({}, (), DigestKind.BLAKE3, time.monotonic_ns() + 10**10, engine)
        with interrupting("__exit__", "call", 1, "threading.py"), contextlib.suppress(ConnectionError):
            prefetch._post(b"", 0, b"", b"", 0)
        assert returns(prefetch.stop)


def test_the_collector_of_failed_dials_runs_no_code_that_takes_an_interrupt() -> None:
    """The main thread may be the one that collects, and an error in code that a weak set runs then is not raised."""

    def tasks() -> set[int]:
        return {id(one) for one in gc.get_objects() if type(one) is asyncio.Task}

    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(f"{frame.f_code.co_filename}: {frame.f_code.co_name}")

    one, other, gone = (Broker(name, 1) for name in ("one", "other", "gone"))
    gone.close()
    with contextlib.closing(one), contextlib.closing(other), without_collector():
        before = tasks()
        other.meet(one)  # Later than `one`, so that its dial is given up.
        one.meet(other, dial=True)
        one.link(), other.link()
        one.meet(gone, dial=True)
        assert "refused" in one.failure()
        found = tasks() - before
        sys.setprofile(note)
        try:
            gc.collect()
        finally:
            sys.setprofile(None)
        assert found - tasks()
        assert [name for name in called if "weakref" in name] == []


def test_topology_may_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: the next caller that asks for measurements does not wait for an answer to a question that was never sent."""
    post = PeerLoop._post

    def interrupt(loop: PeerLoop, item: Any) -> bool:
        if isinstance(item, events.MeasurementsCalled):
            monkeypatch.setattr(PeerLoop, "_post", post)
            raise KeyboardInterrupt
        return post(loop, item)

    with local_run(1) as run:
        monkeypatch.setattr(PeerLoop, "_post", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.comms[0].topology()
        run.comms[0].topology(WAIT_S)


def test_a_callback_that_ends_its_thread_does_not_end_the_peer() -> None:
    """L1: whatever it raises, all calls get their answers, and the peer stays a member."""
    with local_run(2) as run:
        one, other = run.comms
        handles = [one.all_reduce_async(np.ones(4, np.float32), tag=tag) for tag in range(3)]
        for handle in handles:
            handle.add_done_callback(sys.exit)
        for tag in range(3):
            run.start(other.all_reduce, np.ones(4, np.float32), tag=tag, timeout=WAIT_S)
        assert all(returns(handle.wait) for handle in handles)
        assert [handle.exception() for handle in handles] == [None] * 3
        assert one.world_size == 2


# --- Half made ------------------------------------------------------------------------------------------------------


def no_descriptors(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, "too many open files")


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_peer_that_could_not_be_made_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: the collector would wait for ever for ZeroMQ sockets that it finds later. Descriptors are released."""

    def fail() -> None:
        error = None
        try:
            zpccl.Communicator("127.0.0.1:1", listen="127.0.0.1").connect()
        except OSError as caught:
            error = caught  # The error refers to this frame, which refers to it.
        assert error is not None

    gc.collect()  # Collects what other tests have left.
    before = descriptor_count()
    monkeypatch.setattr(asyncio, "new_event_loop", no_descriptors)
    with without_collector():
        fail()
        assert returns(gc.collect)
    assert descriptor_count() == before


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (zmq.Context, "socket", 1),
        (zmq.Socket, "get_monitor_socket", 1),
        (Waiter, "register", 1),
        (Waiter, "register", 2),
    ],
)
def test_a_peer_without_descriptors_for_a_try_tries_again(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int
) -> None:
    """L2: after the usual pause between tries. Nothing remains of the half-made one."""
    make, take, tries, calls = PeerLoop._make_socket, getattr(owner, name), list[PeerLoop](), list[Any]()

    def take_or_fail(*arguments: Any) -> Any:
        calls.append(arguments)
        return no_descriptors() if len(calls) == number else take(*arguments)

    def make_one(loop: PeerLoop) -> Any:
        tries.append(loop)
        with monkeypatch.context() as patch:
            if len(tries) == 2:
                patch.setattr(owner, name, take_or_fail)
            elif len(tries) == 3:
                master.run()
            return make(loop)

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    master = zpccl.MasterNode(address)
    comm = zpccl.Communicator(address)
    gc.collect()
    before = descriptor_count()
    monkeypatch.setattr(PeerLoop, "_make_socket", make_one)
    with pytest.raises(zpccl.MasterUnreachable, match="too many"):
        comm.connect(2)
    comm.close()
    assert descriptor_count() == before
    tries.clear()
    calls.clear()
    try:
        with zpccl.Communicator(address) as comm:
            assert comm.world_size == 1 and len(calls) == number
    finally:
        master.interrupt()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("what", ["control.peer_loop.Engine", "control.peer_loop.Waiter", "control.links.reachable_at"])
def test_the_port_of_a_peer_that_could_not_be_made_is_free(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """L2: a caller can try again, even if it still holds the error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    comm = zpccl.Communicator("127.0.0.1:1", listen=f"127.0.0.1:{port}")
    monkeypatch.setattr(f"zpccl.{what}", no_descriptors)
    with pytest.raises(OSError, match="too many") as kept:
        comm.connect()
    socket.create_server(("127.0.0.1", port)).close()
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_peer_whose_links_cannot_begin_ends(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    """No thread is available, or Ctrl-C comes while it starts."""
    start, threads = threading.Thread.start, list[threading.Thread]()

    def fail(thread: threading.Thread) -> None:
        if has_begun:
            start(thread)
        threads.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", fail)
        zpccl.Communicator("127.0.0.1:1").connect()
    assert [thread.name for thread in threads] == ["zpccl-links"]
    assert not threads[0].is_alive()
    gc.collect()  # Warns about an event loop that was not closed.


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("what", ["DialBacks", "Duplicates", "os.pipe2", "open_router"])
def test_a_master_that_could_not_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    gc.collect()
    before = descriptor_count()
    monkeypatch.setattr(f"zpccl.control.master_loop.{what}", no_descriptors)
    with pytest.raises(OSError, match="too many"):
        zpccl.MasterNode("127.0.0.1:0").run()
    gc.collect()
    assert descriptor_count() == before


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_master_whose_start_fails_ends(monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    """No thread is available, or Ctrl-C comes while it starts. Its port is free again."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name != "zpccl-master":
            return start(thread)
        if has_begun:
            start(thread)
        raise KeyboardInterrupt

    master = zpccl.MasterNode("127.0.0.1:0", daemon=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", fail)
        master.run()
    assert master._thread is not None
    if has_begun:
        master._thread.join(WAIT_S)
        assert not master._thread.is_alive()
    with zpccl.MasterNode(master.address):
        pass


@pytest.mark.parametrize("name", ["zpccl-links", "zpccl-peer", "zpccl-master", "zpccl-metrics"])
def test_a_lack_of_threads_is_an_error_of_this_library(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nothing is left of a peer or master that could not begin: the same call succeeds later."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    master = zpccl.MasterNode("127.0.0.1:0", metrics="127.0.0.1:0")
    comm = zpccl.Communicator("127.0.0.1:1", listen="127.0.0.1")
    with monkeypatch.context() as patch, pytest.raises(zpccl.InternalError, match=f"{name} cannot be started"):
        patch.setattr(threading.Thread, "start", refuse)
        master.run() if name in ("zpccl-master", "zpccl-metrics") else comm.connect()
    with pytest.raises(zpccl.MasterUnreachable):
        comm.connect(1)
    comm.close()
    with master:
        pass


def test_interrupting_a_master_waits_again_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then does it report that it has ended."""
    close = master_loop.MasterLoop._close

    def close_late(loop: master_loop.MasterLoop) -> None:
        time.sleep(1)  # The end takes a while, so that a caller that does not wait returns visibly earlier.
        close(loop)

    monkeypatch.setattr(master_loop.MasterLoop, "_close", close_late)
    master = zpccl.MasterNode("127.0.0.1:0")
    master.run()
    with pytest.raises(Stop), raising(Stop()):
        master.interrupt()
    master.interrupt()
    assert master._thread not in threading.enumerate()


# --- Descriptors of others --------------------------------------------------------------------------------------------


def test_a_port_that_is_held_back_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """L2: it could not be ended at once. Nobody can connect, so nothing else wakes the master."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(inflow.Duplicates()) as duplicates:
        port = listener.getsockname()[1]
        refusals = RefusalLog(logging.getLogger("x"))
        bound = inflow.Inflow(port, False, lambda _: Standing.STRANGER, refusals, duplicates)
        bound.listening(listener.fileno())
        bound._hold_back(True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup2", no_descriptors)
            bound.drained()
        assert bound.is_holding_back and bound.deadline_ns() is not None
        now_ns = time.monotonic_ns()
        bound.look(now_ns)
        due_ns = bound.deadline_ns()
        assert due_ns is not None and due_ns > now_ns
        bound.drained()
        assert [bound.is_holding_back, bound.deadline_ns()] == [False, None]


# --- The end of the program -------------------------------------------------------------------------------------------


def test_all_engines_are_closed_at_the_end_though_another_one_is_made() -> None:
    """S4: another thread may make one at any moment."""
    open_engines, resumed = [Engine(), Engine()], 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal resumed
        if event == "call" and frame.f_code.co_name == "__iter__" and "weakref" in frame.f_code.co_filename:
            resumed += 1
            if resumed == 2:
                open_engines.append(Engine())
        return None

    with tracing(trace):
        engines._close_all()
    for engine in open_engines[:2]:
        with pytest.raises(engines.EngineError):
            engine.poll()


KEPT = """
import logging, sys, zpccl
with zpccl.MasterNode("127.0.0.1:0") as master:
    logging.kept = comm = zpccl.Communicator(master.address)
    comm.connect()
    if sys.argv[1] == "closed":
        comm.close()
"""


@pytest.mark.parametrize("state", ["closed", "open"])
def test_a_communicator_that_lives_longer_than_the_modules_is_dropped_in_silence(state: str) -> None:
    """A module that was imported earlier keeps it, as torch keeps the group of a model in DDP."""
    done = subprocess.run([sys.executable, "-c", KEPT, state], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr


FORKING = """
import os, sys, tempfile
from datetime import timedelta
import torch.distributed as dist
from zpccl.torch.process_group import ProcessGroup

store = dist.FileStore(tempfile.mktemp(), -1)
group = ProcessGroup.of_all(store, 0, 1, timedelta(seconds=5))
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(store.check(["left/0"]))
"""


def test_a_forked_child_does_not_leave_for_its_parent() -> None:
    """Rank 0 ends the master once all have left."""
    pytest.importorskip("torch")
    found = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "False\n", found.stderr


@contextlib.contextmanager
def linked_engines() -> Iterator[tuple[Engine, Engine]]:
    """Two engines, A and B, with a link and a channel that hold three messages of 100,000 bytes each."""
    bound = 310_000  # Including the overhead of each message.
    a, b = (Engine(message_bytes_max=100_000, messages_queued_bytes_max=bound) for _ in range(2))
    near, far = socket.socketpair()
    with a, b:
        a.open_link(B, [near.detach()])
        b.open_link(A, [far.detach()])
        for engine in (a, b):
            engine.open_channel(1)
        yield a, b


@pytest.mark.parametrize("name", ["check_rc", "_take", "__init__"])
def test_messages_that_an_interrupt_keeps_from_whoever_polls_are_released(name: str) -> None:
    """B1: otherwise they would count against the bound of received bytes, until nothing more arrives."""
    with linked_engines() as (a, b):
        for _ in range(5):
            assert a.post_message(B, 1, b"", bytes(100_000), 2**30)
            assert select.select([b.fileno()], [], [], WAIT_S)[0], "the bound is reached"
            with interrupting(name, "call", 1, "engine.py"):
                b.poll()


def test_messages_that_were_polled_before_an_interrupt_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: even if the traceback is kept, as Jupyter does."""
    with linked_engines() as (a, b):
        kept: list[BaseException] = []

        def interrupt(rc: int, function: str) -> int:
            if not rc:
                raise Stop
            return check_rc(rc, function)

        for _ in range(2):
            for _ in range(3):
                assert a.post_message(B, 1, b"", bytes(100_000), 2**30)
            until(lambda: not a.link_state(B).message_bytes, "the bound is not reached", WAIT_S)
            with monkeypatch.context() as patch, pytest.raises(Stop) as raised:
                patch.setattr("zpccl.engine.engine.check_rc", interrupt)
                b.poll()
            kept.append(raised.value)
