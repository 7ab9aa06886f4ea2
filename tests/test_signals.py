"""Signal handlers that raise any error in calls that wait. e2e/test_interrupt.py has Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
from e2e.harness import loop_of
from e2e.local import Run, failure, finish, local_run
from interpreter import alarm, handling, raising, tracing, without_collector

import zpccl
from zpccl import limits
from zpccl.caller import wait
from zpccl.control import peer_loop
from zpccl.control.calls import Answer
from zpccl.control.peer_loop import PeerLoop
from zpccl.state import offers, workers
from zpccl.state.contents import Contents
from zpccl.state.transfer import StateTransfer
from zpccl.state.workers import End, Workers, despite_interrupts

pytestmark = pytest.mark.e2e


class Preempted(Exception):
    """Raised by a handler, as in programs that must end soon."""


@pytest.fixture
def run() -> Iterator[Run]:
    with local_run(2) as run:
        yield run


ERRORS = [Preempted(), SystemExit(3), TimeoutError("the job ends")]


def state_of(array: np.ndarray[Any, Any], revision: int = 0) -> zpccl.SharedState:
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(array, "x")])
    state.revision = revision
    return state


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_interrupted_reduce_is_withdrawn(run: Run, error: BaseException) -> None:
    """S4, L1: its memory belongs to the caller, and the tag is free."""
    one, other = run.comms
    array = np.ones(1000, np.float32)
    with pytest.raises(type(error)), raising(error):
        one.all_reduce(array, array, op=zpccl.ReduceOp.SUM, timeout=20)
    late = run.start(other.all_reduce, np.ones(1000, np.float32), op=zpccl.ReduceOp.SUM, timeout=1)
    assert failure(late) is not None
    assert np.array_equal(array, np.ones(1000))
    assert [result[0] for result in run.all(lambda comm: comm.all_reduce(np.ones(4), op=zpccl.ReduceOp.SUM))] == [2, 2]


@pytest.mark.parametrize("error", ERRORS[:1], ids=repr)
@pytest.mark.parametrize("name", ["update_topology", "are_peers_pending", "optimize_topology"])
def test_an_interrupted_topology_call_is_withdrawn(run: Run, name: str, error: BaseException) -> None:
    """L1: it does not block the next call."""
    with pytest.raises(type(error)), raising(error):
        getattr(run.comms[0], name)()
    run.all(lambda comm: getattr(comm, name)())


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_interrupted_sync_is_withdrawn(run: Run, error: BaseException) -> None:
    """L1, S5."""
    arrays = [np.full(1000, number, np.float32) for number in range(2)]
    states = [state_of(array, number) for number, array in enumerate(arrays)]
    with pytest.raises(type(error)), raising(error):
        run.comms[0].sync_shared_state(states[0])
    assert (states[0].revision, arrays[0][0]) == (0, 0)
    for future in [run.start(comm.sync_shared_state, state) for comm, state in zip(run.comms, states, strict=True)]:
        finish(future)
    assert (states[0].revision, arrays[0][0]) == (1, 1)


def test_a_sync_that_fails_here_does_not_hold_up_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: for example for lack of memory."""

    def fail(self: Contents, fetch: Any) -> Any:
        raise MemoryError("no memory for a list")

    monkeypatch.setattr(Contents, "want", fail)
    states = [state_of(np.full(1000, number, np.float32), number) for number in range(2)]
    futures = [run.start(comm.sync_shared_state, state) for comm, state in zip(run.comms, states, strict=True)]
    errors = [failure(future) for future in futures]
    assert [type(error) for error in errors] == [MemoryError, zpccl.PeerLost]
    monkeypatch.undo()
    for future in [run.start(comm.sync_shared_state, state) for comm, state in zip(run.comms, states, strict=True)]:
        finish(future)
    assert states[0].revision == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), *ERRORS], ids=repr)
def test_what_was_fetched_is_written_despite_an_interrupt(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """S5: the state is the old or the new one, never a mixture, and its revision likewise."""
    arrays = [np.full(5 * 2**20, number, np.uint8) + np.arange(5 * 2**20, dtype=np.uint8) for number in range(2)]
    states = [state_of(array, number) for number, array in enumerate(arrays)]
    write, main = Contents.write, threading.main_thread()

    def write_slowly(self: Contents) -> None:
        if threading.current_thread() is main and states[0].revision == 0:
            arrays[0][: 2**20] = 7  # A part of the write.
            time.sleep(0.3)  # The write takes longer than the interval between two signals.
        write(self)

    monkeypatch.setattr(Contents, "write", write_slowly)
    other = run.start(run.comms[1].sync_shared_state, states[1])
    begun = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if not begun.is_set() and arrays[0][0] == 7:
            begun.set()
            raise error

    with pytest.raises(type(error)), alarm(handle, 0.05, 0.05):
        run.comms[0].sync_shared_state(states[0])
    finish(other)
    assert np.array_equal(arrays[0], arrays[1])
    assert states[0].revision == 1


def test_a_prefetch_that_cannot_begin_leaves_the_communicator_as_it_was(run: Run) -> None:
    """Otherwise it says "connected already" from then on."""
    array = np.ones(8)
    state = state_of(array)
    del array
    info = state.tensor_infos[0]
    info.tensor, kept = np.ones(9), info.tensor  # As if it had been resized.
    comm = zpccl.Communicator(run.master.address, name="joiner")
    try:
        with pytest.raises(zpccl.InvalidArgument, match="9"):
            comm.connect(prefetch=state)
        info.tensor = kept
        connected = run.start(comm.connect, prefetch=state)
        while not connected.done():
            if any(run.all(lambda member: member.are_peers_pending())):
                run.all(lambda member: member.update_topology())
                break
        finish(connected)
    finally:
        comm.close()


def test_an_action_that_fails_is_not_repeated_for_ever() -> None:
    calls: list[Callable[[], None]] = []

    def fail() -> None:
        calls.append(fail)
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="gone"):
        despite_interrupts(fail)
    assert 2 < len(calls) < 20


def test_an_action_that_is_interrupted_twice_is_done() -> None:
    """S5: schedulers send their signal more than once."""
    calls: list[int] = []

    def act() -> None:
        calls.append(len(calls))
        if len(calls) <= 2:
            raise Preempted

    with pytest.raises(Preempted):
        despite_interrupts(act)
    assert calls == [0, 1, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Preempted()], ids=repr)
def test_workers_have_ended_despite_an_interrupt(error: BaseException) -> None:
    """S4."""
    workers, begun, ended = Workers(1), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(1)  # The interrupt comes during this time.
        ended.set()

    workers.submit(work)
    assert begun.wait(20)
    with pytest.raises(type(error)), raising(error):
        workers.close()
    assert ended.is_set()


def test_a_call_that_has_waited_long_leaves_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: a cycle of frames would keep the caller's tensors. Training often collects garbage rarely, or never."""
    monkeypatch.setattr(limits, "SIGNAL_CHECK_INTERVAL_NS", limits.MS)

    def call() -> weakref.ref[Any]:
        tensor, future = np.ones(1000), Answer[int]()
        timer = threading.Timer(0.1, future.set_result, [1])
        timer.start()
        assert wait(future, None)
        timer.join()
        return weakref.ref(tensor)

    with without_collector():
        assert call()() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Preempted()], ids=repr)
def test_close_waits_again_after_an_interrupt(run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """S4: the thread may be restoring old contents of tensors."""
    comm, ended = run.comms[0], threading.Event()
    restorer = loop_of(comm)._restorer
    finish_jobs = restorer.finish

    def finish_slowly() -> None:
        time.sleep(1)  # The interrupt comes during this time.
        finish_jobs()
        ended.set()

    monkeypatch.setattr(restorer, "finish", finish_slowly)
    with pytest.raises(type(error)), raising(error):
        comm.close()
    assert not ended.is_set()
    comm.close()
    assert ended.is_set()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Preempted()], ids=repr)
@pytest.mark.parametrize("is_by_communicator", [True, False])
def test_withdraw_waits_again_after_an_interrupt(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_by_communicator: bool, error: BaseException
) -> None:
    """S4: the offer's thread may be reading the tensors."""
    comm, begun, ended = run.comms[0], threading.Event(), threading.Event()
    transfer = StateTransfer

    def read_slowly(*arguments: Any, **keywords: Any) -> Any:
        begun.set()
        time.sleep(1)  # The interrupt comes during this time.
        ended.set()
        return transfer(*arguments, **keywords)

    monkeypatch.setattr(offers, "StateTransfer", read_slowly)
    offer = comm.offer_state(state_of(np.ones(8)), copy=False)
    assert offer is not None and begun.wait(20)

    def withdraw() -> None:
        if is_by_communicator:
            comm.offer_state(None)
        else:
            offer.withdraw()

    with pytest.raises(type(error)), raising(error):
        withdraw()
    assert not ended.is_set()
    withdraw()
    assert ended.is_set()


def test_a_thread_that_hangs_is_waited_for_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: one wait is long enough."""
    monkeypatch.setattr(limits, "WITHDRAW_TIMEOUT_NS", 0)
    monkeypatch.setattr(limits, "PEER_LOOP_TIMEOUT_NS", limits.SECOND)
    comm, goes_on = run.comms[0], threading.Event()
    monkeypatch.setattr(loop_of(comm), "_take", lambda item, now_ns: goes_on.wait(20))
    began = time.monotonic()
    with pytest.raises(zpccl.InternalError, match="hangs"):
        comm.barrier(timeout=0.1)
    assert time.monotonic() - began < 1.9
    monkeypatch.undo()
    goes_on.set()


@contextmanager
def closing(comm: zpccl.Communicator, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Iterator[None]:
    """A handler of the main thread closes the communicator in the middle of a method, as programs do at SIGTERM."""
    method = getattr(owner, name)

    def method_and_signal(*arguments: Any, **keywords: Any) -> Any:
        result = method(*arguments, **keywords)
        signal.raise_signal(signal.SIGUSR1)
        return result

    monkeypatch.setattr(owner, name, method_and_signal)
    with handling(signal.SIGUSR1, lambda *_: comm.close()):
        yield


def test_a_handler_closes_while_a_state_is_copied(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = run.comms[0]
    with closing(comm, monkeypatch, offers.CopyPool, "take"), pytest.raises(zpccl.InvalidUsage, match="closed"):
        comm.offer_state(state_of(np.zeros(4)))


def test_a_handler_closes_while_a_tensor_of_an_offer_is_copied(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = run.comms[0]
    offer = comm.offer_state(state_of(np.zeros(4)), copy=False)
    assert offer is not None
    with closing(comm, monkeypatch, offers.CopyPool, "take"):
        offer.before_write()
    assert not offer.is_open


def test_a_handler_closes_before_the_peer_has_connected(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = zpccl.Communicator(run.master.address)
    with (
        closing(comm, monkeypatch, zpccl.Communicator, "_make_loop"),
        pytest.raises(zpccl.InvalidUsage, match="closed"),
    ):
        comm.connect()
    assert run.all(lambda member: member.are_peers_pending()) == [False, False]


def test_a_handler_closes_while_a_call_is_made(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's thread takes the call's lock as it ends."""
    comm = run.comms[0]
    with closing(comm, monkeypatch, PeerLoop, "_bounded"), pytest.raises(zpccl.PCCLError):
        comm.all_reduce(np.zeros(4))


@contextmanager
def closing_at(comm: zpccl.Communicator, number: int, *files: str) -> Iterator[Callable[[], bool]]:
    """A handler closes the communicator at the `number`th line that the main thread runs of these files, or of waits.

    Gives a function that returns whether the thread has run so many of them.
    """
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        caller = frame.f_back
        is_of_wait = caller is not None and caller.f_code is End.wait.__code__
        if not is_of_wait and frame.f_code.co_filename not in files:
            return None
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)
        return trace

    with handling(signal.SIGUSR1, lambda *_: comm.close()), tracing(trace):
        yield lambda: left <= 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replace", "withdraw", "before_write"])
def test_a_handler_closes_at_any_line_of_an_offer(name: str) -> None:
    """L1: the threads of the peer and of the offer can end, whatever the main thread was about to do."""
    array, number, has_run, files = np.zeros(4), 0, True, (offers.__file__, workers.__file__)
    with zpccl.MasterNode("127.0.0.1:0", recovery_grace=0) as master:
        while has_run:
            number += 1
            with zpccl.Communicator(master.address) as comm:
                offer = comm.offer_state(state_of(array), copy=False)
                assert offer is not None
                calls = {
                    "replace": lambda comm=comm: comm.offer_state(state_of(array)),
                    "withdraw": lambda comm=comm: comm.offer_state(None),
                    "before_write": offer.before_write,
                }
                with closing_at(comm, number, *files) as is_closed, suppress(zpccl.InvalidUsage):
                    calls[name]()
                has_run = is_closed()
                assert not (has_run and offer.is_open)
    assert number > 20


@pytest.mark.slow
def test_a_handler_closes_at_any_line_of_a_question_to_the_master() -> None:
    """L1: it is answered, and nothing is written to a descriptor that is closed, and may be another file by now."""
    number, has_run = 0, True
    with zpccl.MasterNode("127.0.0.1:0", recovery_grace=0) as master:
        while has_run:
            number += 1
            with zpccl.Communicator(master.address) as comm:
                with closing_at(comm, number, peer_loop.__file__) as is_closed, suppress(zpccl.PCCLError):
                    comm.topology(timeout=1e6)
                has_run = is_closed()
    assert number > 10
