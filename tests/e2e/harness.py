"""Real masters and peers for tests, each in its own process, controlled over a pipe.

Processes come from a fork server that has already imported everything, so that starting one takes milliseconds. A child
runs one function at a time in its main thread, as a training script would, and returns its value or its exception.
Every wait has a bound; a child that exceeds it prints the stacks of its threads, and the test fails with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from networks import Namespaces, enter
from workers import start_fork_server

import zpccl
from zpccl.cli.master import main as master_main
from zpccl.control.calls import Answer
from zpccl.control.peer_loop import PeerLoop
from zpccl.engine.engine import Engine

T = TypeVar("T")

TESTS = Path(__file__).resolve().parents[1]
HANG_SECONDS = 60.0
"""Default bound of a wait. Under ThreadSanitizer a busy machine may need half of it to start a process."""
_POLL_SECONDS = 0.002

_context = multiprocessing.get_context("forkserver")


def until(condition: Callable[[], Any], what: str = "the condition", seconds: float = HANG_SECONDS) -> Any:
    """Polls until `condition()` is true, and returns its value. Use it for changes in another process that trigger no
    event here, such as a line in its log or a closed socket."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not true within {seconds} s"
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class ChildError:
    """An exception of a child."""

    kind: str
    kinds: tuple[str, ...]
    """Names of its class and its base classes."""
    text: str
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> zpccl.Result | None:
        """Its `Result`, if it is an error of zpccl."""
        return self.attributes.get("result")


class ChildFailed(AssertionError):
    """A function in a child raised instead of returning."""


# --- Inside of a communicator ---------------------------------------------------------------------------------------
#
# Faults have to strike while a call waits or bytes move, and strangers need ids and tokens that no user sees. Only for
# this do tests read private attributes, and only in this section.


def loop_of(comm: zpccl.Communicator) -> PeerLoop:
    """The loop of a connected peer."""
    assert comm._loop is not None
    return comm._loop


def run_id_of(comm: zpccl.Communicator) -> bytes:
    """The id of the peer's run."""
    return loop_of(comm)._run_id


def is_calling(comm: zpccl.Communicator) -> bool:
    """True while a call waits for its answer."""
    return comm._loop is not None and bool(comm._loop._calls)


def is_settled(comm: zpccl.Communicator) -> bool:
    """True if the master has answered all calls, including those that ended without it: such a call could still meet
    the next call of another peer."""
    return not loop_of(comm)._machine.calls


def is_connected(comm: zpccl.Communicator) -> bool:
    """False once the communicator has given the connection to the master up."""
    return loop_of(comm)._machine._is_connected


def is_over(handle: zpccl.AsyncReduceHandle) -> bool:
    """True once the call has its answer."""
    return handle._call.future.done()


def is_waited_for(handle: zpccl.AsyncReduceHandle) -> bool:
    """True while a thread is in `wait`."""
    frames, answer = sys._current_frames().values(), handle._call.future
    return any(frame.f_code is Answer.wait.__code__ and frame.f_locals["self"] is answer for frame in frames)


def link_facts(comm: zpccl.Communicator, ask: Callable[[Engine, bytes], T]) -> list[T]:
    """Asks the engine about each link, and returns the answers."""
    loop, facts = loop_of(comm), []
    for peer_id in list(loop._links):
        with contextlib.suppress(OSError):  # The link is lost.
            facts.append(ask(loop.engine, peer_id))
    return facts


LOCAL_PREFIX = b"\0zpccl/"
"""The prefix of the names of peers' Unix-domain sockets."""


def stream_sockets() -> Iterator[tuple[socket.socket, Any, Any]]:
    """Copies of the connected stream sockets of this process, TCP and Unix-domain ones, each with its two addresses."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
            with contextlib.suppress(OSError):
                if copy.type == socket.SOCK_STREAM:
                    own, other = copy.getsockname(), copy.getpeername()  # Fails once the connection is lost.
                    yield copy, own, other
                    continue
            copy.close()


# --- In the child ---------------------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _begin(namespace: str, target: Callable[..., Any], *arguments: Any) -> None:
    """Runs a child in its namespace. The child dies with the test process, however that ends.

    The fork server ends when the other end of its pipe is closed everywhere, so the child closes its copy. The server
    blocks Ctrl-C, but its child must not.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # Private.
    if namespace:
        enter(namespace)
    target(*arguments)


class Peer:
    """First argument of functions in a child: has a communicator, a store for objects, a channel to the test."""

    def __init__(self, pipe: Connection) -> None:
        self.comm: zpccl.Communicator = None  # type: ignore[assignment]  # The first function creates it.
        self.kept: dict[str, Any] = {}
        self._pipe = pipe
        self._lock = threading.Lock()

    def say(self, kind: str, value: Any) -> None:
        """Sends a note (or the outcome) to the test."""
        with self._lock:
            self._pipe.send((kind, value))

    def note(self, value: Any) -> None:
        """Sends a value to the test while the function runs."""
        self.say("note", value)

    def is_told(self) -> bool:
        """True once the test has called `Child.tell()`."""
        return self._pipe.poll(0) and self._pipe.recv() is None

    def note_when(self, condition: Callable[[], Any], value: Any) -> None:
        """Sends `value` to the test as soon as a condition holds; the function continues meanwhile."""

        def watch() -> None:
            until(condition)
            self.note(value)

        threading.Thread(target=watch, daemon=True).start()

    def note_when_calling(self, value: Any = "calling") -> None:
        """Sends `value` to the test as soon as a call of the communicator waits for its answer."""
        self.note_when(lambda: is_calling(self.comm), value)

    def bytes_moved(self) -> int:
        """Bytes that all links have sent so far."""
        return sum(sum(state.tx_bytes) for state in link_facts(self.comm, Engine.link_state))

    def lost_connections(self) -> int:
        """How many connections of all links were lost so far."""
        return sum(state.lost_count for state in link_facts(self.comm, Engine.link_state))


def _failure(error: BaseException) -> ChildError:
    kinds = tuple(cls.__name__ for cls in type(error).__mro__)
    attributes = {k: v for k, v in vars(error).items() if isinstance(v, (int, str, tuple))}
    return ChildError(kinds[0], kinds, str(error), attributes)


def _obey(pipe: Connection, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    peer = Peer(pipe)
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            break
        function, arguments, keywords = command
        try:
            value = function(peer, *arguments, **keywords)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # The test judges it.
            peer.say("error", _failure(error))
        else:
            peer.say("value", value)
    if peer.comm is not None:
        peer.comm.close()


def _run_master(arguments: list[str], log: str, ready: Connection) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.dup2(ready.fileno(), 1)  # The line with the master's address goes to the pipe.
    ready.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # Open until the process ends.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.exit(master_main(arguments))


# --- In the test ----------------------------------------------------------------------------------------------------


class Process:
    """A process of a run, on this host or in a namespace."""

    def __init__(
        self, target: Callable[..., Any], arguments: tuple[Any, ...], directory: str, name: str, namespace: str = ""
    ) -> None:
        self.name = name
        self.log = Path(directory) / f"{name}.log"
        whole = (namespace, target, *arguments, str(self.log))
        start_fork_server("e2e.harness")
        self.process = _context.Process(target=_begin, args=whole, name=name, daemon=True)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL and waits until it has ended."""
        self.process.kill()
        self.process.join()

    def freeze(self) -> None:
        """Sends SIGSTOP, which makes it a silent host, and waits until it is stopped."""
        self.signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "a stop")

    def thaw(self) -> None:
        """Sends SIGCONT."""
        self.signal(signal.SIGCONT)

    def join(self, seconds: float = HANG_SECONDS) -> int:
        """Waits for its end and returns its exit status."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise AssertionError(f"{self.name} does not end\n{self.stacks()}")
        return self.process.exitcode

    def stacks(self) -> str:
        """The stacks of all threads and the log, for messages about hangs."""
        if not self.log.exists():
            return f"--- {self.name} has not begun ---\n"
        with contextlib.suppress(ProcessLookupError):
            size = self.log.stat().st_size
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGUSR1)
            with contextlib.suppress(AssertionError):
                until(lambda: self.log.stat().st_size > size, seconds=2)
        return f"--- {self.name} ---\n" + self.log.read_text(errors="replace")

    def descriptors(self) -> int:
        """Number of its open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_bytes(self) -> int:
        """Its resident set size."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Child(Process):
    """A peer's process, as the test sees it."""

    def __init__(self, directory: str, name: str, namespace: str = "") -> None:
        self._pipe, theirs = _context.Pipe()
        super().__init__(_obey, (theirs,), directory, name, namespace)
        self.process.start()
        theirs.close()
        self._notes: list[Any] = []

    def start(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Child:
        """Starts a function; `value()` or `failure()` waits for its end."""
        self._pipe.send((function, arguments, keywords))
        return self

    def note(self, seconds: float = HANG_SECONDS) -> Any:
        """The next note of the function that runs."""
        if self._notes:
            return self._notes.pop(0)
        kind, value = self._next(seconds)
        assert kind == "note", f"{self.name} ended with {value} instead of sending a note\n{self.stacks()}"
        return value

    def value(self, seconds: float = HANG_SECONDS) -> Any:
        """Waits for the return value of the function."""
        kind, value = self._outcome(seconds)
        if kind == "error":
            raise ChildFailed(f"{self.name}: {value.kind}: {value.text}\n{self.stacks()}")
        return value

    def failure(self, seconds: float = HANG_SECONDS) -> ChildError:
        """Waits for the exception of the function, which must raise."""
        kind, value = self._outcome(seconds)
        assert kind == "error", f"{self.name} returned {value!r} instead of raising"
        failure: ChildError = value
        return failure

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Runs a function and returns its value."""
        return self.start(function, *arguments, **keywords).value()

    def fails(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> ChildError:
        """Runs a function that must raise."""
        return self.start(function, *arguments, **keywords).failure()

    def tell(self) -> None:
        """Signals the running function: `Peer.is_told` becomes true."""
        self._pipe.send(None)

    def is_done(self) -> bool:
        """True if its outcome or a note can be read."""
        return self._pipe.poll(0)

    def _outcome(self, seconds: float) -> tuple[str, Any]:
        while True:
            kind, value = self._next(seconds)
            if kind != "note":
                return kind, value
            self._notes.append(value)

    def _next(self, seconds: float) -> tuple[str, Any]:
        if not self._pipe.poll(seconds):
            raise AssertionError(f"{self.name} hangs: nothing in {seconds} s\n{self.stacks()}")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"{self.name} has died\n{self.stacks()}") from None
        return kind, value

    def hang_up(self) -> None:
        """Lets the process end after its function, as a program does: the process closes nothing itself."""
        self._pipe.close()

    def dispose(self) -> None:
        """Kills it and releases its resources."""
        self._pipe.close()
        self.kill()


class MasterProcess(Process):
    """zpccl-master in a process."""

    def __init__(
        self, directory: str, name: str, *arguments: str, bind: str = "127.0.0.1:0", namespace: str = ""
    ) -> None:
        ours, theirs = os.pipe()
        reading, writing = Connection(ours, writable=False), Connection(theirs, readable=False)
        command = ["--bind", bind, "--log-level", "debug", "--recovery-grace", "0.1", *arguments]
        super().__init__(_start_master, (command, writing), directory, name, namespace)
        self.process.start()
        writing.close()
        with os.fdopen(os.dup(reading.fileno())) as lines:
            self.line = lines.readline()
        reading.close()
        self.address = self.line.split()[-1] if self.line else ""


def _start_master(arguments: list[str], ready: Connection, log: str) -> None:
    _run_master(arguments, log, ready)


class Cluster:
    """The master and the peers of a test, which end with it. In a network the master is on host 0, peer n on host n."""

    def __init__(self, directory: str, *master_arguments: str, network: Namespaces | None = None) -> None:
        self._directory = directory
        self._count = 0
        self._network = network
        self.children: list[Child] = []
        address = network.address(0) if network is not None else "127.0.0.1"
        self.master = MasterProcess(
            directory, "master", *master_arguments, bind=f"{address}:0", namespace=self._namespace(0)
        )

    def _namespace(self, host: int) -> str:
        return self._network.namespace(host) if self._network is not None else ""

    def child(self) -> Child:
        """Starts a process, which does not connect yet."""
        self._count += 1
        child = Child(self._directory, f"peer{self._count}", self._namespace(self._count))
        self.children.append(child)
        return child

    def members(self, count: int, groups: list[int] | None = None, **options: Any) -> list[Child]:
        """Starts processes and makes all of them members."""
        children = [self.child() for _ in range(count)]
        for index, child in enumerate(children):
            group = groups[index] if groups else 0
            child.start(join, self.master.address, count, peer_group=group, name=child.name, **options)
        for child in children:
            child.value()
        return children

    def newcomer(self, members: list[Child], **options: Any) -> Child:
        """Starts one more process; the members admit it."""
        child = self.child()
        child.start(connect, self.master.address, name=child.name, **options)
        all_of(members, admit, len(members) + 1)
        child.value()
        return child

    def close(self) -> None:
        """Kills all processes."""
        for child in self.children:
            child.dispose()
        self.master.kill()


@contextlib.contextmanager
def cluster(*master_arguments: str, network: Namespaces | None = None) -> Iterator[Cluster]:
    """A master without peers."""
    with tempfile.TemporaryDirectory() as directory:
        run = Cluster(directory, *master_arguments, network=network)
        try:
            yield run
        finally:
            run.close()


def all_of(children: Iterable[Child], function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
    """Runs a function in several children at the same time, and returns their values."""
    begun = [child.start(function, *arguments, **keywords) for child in children]
    return [child.value() for child in begun]


def sums(children: Iterable[Child]) -> list[float]:
    """All children reduce an array of ones. Returns the first element of each result."""
    return [float(result[0]) for result in all_of(children, reduce, np.ones(1000, np.float32))]


# --- Functions for children -----------------------------------------------------------------------------------------


def connect(peer: Peer, address: str, n_attempts: int = 5, **options: Any) -> int:
    """Connects, and returns the epoch of its admission. Peers use TCP, as between hosts, unless `options` differ."""
    peer.comm = zpccl.Communicator(address, **{"local_sockets": False, **options})
    peer.comm.connect(n_attempts)
    return peer.comm.epoch


def join(peer: Peer, address: str, world_size: int, **options: Any) -> None:
    """Connects, and admits others until the run has `world_size` members."""
    connect(peer, address, **options)
    admit(peer, world_size)


def admit(peer: Peer, world_size: int) -> None:
    """Admits others until the run has `world_size` members."""
    while peer.comm.get_attribute(zpccl.Attribute.GLOBAL_WORLD_SIZE) < world_size:
        peer.comm.update_topology()


def attributes(peer: Peer) -> tuple[int, ...]:
    """All attributes, in order."""
    return tuple(peer.comm.get_attribute(attribute) for attribute in zpccl.Attribute)


def view(peer: Peer) -> tuple[int, int, int, tuple[str, ...]]:
    """Epoch, world size, rank and members."""
    return peer.comm.epoch, peer.comm.world_size, peer.comm.rank, peer.comm.members


def reduce(peer: Peer, array: np.ndarray[Any, Any], **keywords: Any) -> np.ndarray[Any, Any]:
    """All-reduces an array out of place."""
    result: np.ndarray[Any, Any] = peer.comm.all_reduce(array, **keywords)
    return result


def reduce_until_told(peer: Peer, tag: int = 0) -> int:
    """All-reduces until the test has called any member's `tell()`. Returns how many there were; none may fail."""
    rounds = 0
    while True:
        send = np.full(100_000, float(peer.is_told()), np.float32)
        rounds += 1
        if rounds == 1:
            peer.note("reducing")
        if peer.comm.all_reduce(send, op=zpccl.ReduceOp.MAX, tag=tag)[0]:
            return rounds


def close(peer: Peer) -> None:
    """Leaves the run."""
    peer.comm.close()


def update(peer: Peer) -> None:
    """Calls update_topology."""
    peer.comm.update_topology()


def state_of(peer: Peer) -> str:
    """The state of the peer in the run."""
    return str(loop_of(peer.comm).view.state.value)
