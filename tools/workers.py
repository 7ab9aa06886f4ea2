"""What the tools share that run several processes: children that are told what to do, masters, peers of a run.

Who owns what: the tool's process owns every child, and ends those that are left by their process id. A worker does one
thing at a time, as told over its pipe, and ends when the pipe does; so none outlives the tool for long, however the
tool ends. Ctrl-C reaches the tool alone: children ignore it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common import WorkerFailed
from networks import DEVICE, Namespaces, enter

import zpccl

REPLY_TIMEOUT_S = 300.0
"""A child that has not answered for so long hangs."""
END_TIMEOUT_S = 5.0
"""What a child gets to close what it has open."""
LOG_INTERVAL_S = 0.005
MASTER_GREETING = "listens on "

T = TypeVar("T")

# --- Workers ----------------------------------------------------------------------------------------------------------


class Held(Protocol):
    """What a worker holds: any object whose methods are called from the tool."""

    def close(self) -> None:
        """Lets go of everything, before the process ends."""


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Ctrl-C in the main thread waits until the block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


class Worker:
    """A child process that holds one object, and calls its methods as told.

    Args:
        name: for messages.
        factory: makes the object, in the child.
        arguments: of the factory.
        namespace: of the host that the child belongs to; "": that of the tool.
        is_forked: whether it is a child of the fork server (`start_fork_server`), or begins anew.
        keywords: of the factory.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[..., Held],
        *arguments: Any,
        namespace: str = "",
        is_forked: bool = False,
        **keywords: Any,
    ) -> None:
        forked, spawned = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        context = forked if is_forked else spawned
        self.name = name
        self.connection, theirs = context.Pipe()
        settings = (theirs, namespace, factory, arguments, keywords)
        self._process = context.Process(target=_serve, args=settings, daemon=True)
        with without_interrupts():  # A child that is told half of what it needs complains of it.
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process id."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def begin(self, method: str, *arguments: Any) -> None:
        """Tells the child to call a method of its object.

        Raises:
            WorkerFailed: the child is gone.
        """
        try:
            self.connection.send((method, arguments))
        except OSError as error:
            raise WorkerFailed(f"{self.name} is gone: {error}") from error

    def result(self, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        """Waits for what the method returned.

        Raises:
            WorkerFailed: it raised, the child died, or the time is over.
        """
        if not self.connection.poll(timeout_s):
            raise WorkerFailed(f"{self.name} has not answered for {timeout_s:g} s")
        try:
            error, value = self.connection.recv()
        except (EOFError, OSError) as gone:
            raise WorkerFailed(f"{self.name} died") from gone
        if error:
            raise WorkerFailed(f"{self.name}: {error}")
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method and waits for what it returns."""
        self.begin(method, *arguments)
        return self.result()

    def kill(self) -> int:
        """SIGKILL, which is on its way at the time returned (nanoseconds of `time.monotonic_ns`)."""
        now_ns = time.monotonic_ns()
        self._process.kill()
        return now_ns

    def close(self) -> None:
        """Ends the child: it closes its object, or else is killed. May be called twice."""
        self.connection.close()
        self._process.join(END_TIMEOUT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def start_fork_server(module: str) -> None:
    """Starts the process that children of "forkserver" contexts are forked from, with a module imported, once.

    Python does not tell it where this process finds modules, and it is silent about those that it does not find.
    Imports start threads, of which ThreadSanitizer does not see that a fork leaves them behind: under it children
    import for themselves.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        if "libtsan" not in os.environ.get("LD_PRELOAD", ""):
            multiprocessing.get_context("forkserver").set_forkserver_preload([module])
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def call_all(workers: Sequence[Worker], method: str, *arguments: Any) -> list[Any]:
    """Calls a method on all at the same time; the results in the order of the workers."""
    for worker in workers:
        worker.begin(method, *arguments)
    return [worker.result() for worker in workers]


def close_all(workers: Sequence[Worker]) -> None:
    """Ends all, at the same time as far as they go by themselves."""
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.close()


@contextlib.contextmanager
def ended_workers() -> Iterator[list[Worker]]:
    """A list of workers, to be filled, all of which end with the block."""
    workers: list[Worker] = []
    try:
        yield workers
    finally:
        close_all(workers)


def _serve(
    connection: Connection,
    namespace: str,
    factory: Callable[..., Held],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> None:
    """The child's main loop. What fails is told to the tool in answer to the next call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if namespace:
        enter(namespace)
    held: Held | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            method, parameters = connection.recv()
            try:
                if held is None:
                    held = factory(*arguments, **keywords)
                answer = ("", getattr(held, method)(*parameters))
            except Exception as error:  # noqa: BLE001 - the tool reports it, whatever it is
                text = str(error) if isinstance(error, zpccl.PCCLError) else traceback.format_exc()
                answer = (text, None)
            connection.send(answer)
    if held is not None:
        held.close()


# --- Hosts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """Where processes run: all on loopback, or each on a host of a network, by its number."""

    network: Namespaces | None = None

    def address(self, number: int) -> str:
        """The IPv4 address of a host."""
        return "127.0.0.1" if self.network is None else self.network.address(number)

    @property
    def device(self) -> str:
        """The network device of each host."""
        return "lo" if self.network is None else DEVICE

    def run(self, number: int, function: Callable[[], T]) -> T:
        """Runs a function on a host: processes that it starts belong there."""
        return function() if self.network is None else self.network.run(number, function)

    def start(self, number: int, name: str, factory: Callable[..., Held], *arguments: Any, **keywords: Any) -> Worker:
        """Starts a worker on a host."""
        namespace = "" if self.network is None else self.network.namespace(number)
        return Worker(name, factory, *arguments, namespace=namespace, **keywords)


LOOPBACK = Hosts()


# --- Masters and peers ------------------------------------------------------------------------------------------------


class Master:
    """A zpccl-master in a process of its own, which can be killed and started again at its address.

    Args:
        hosts: where it runs,
        number: and on which of them.
        log: file that gets all that it logs, in all its lives; None: warnings go to standard error.
        secret: of the run.
        heartbeat_timeout_s: of its peers.
        grace_s: how long it waits for the peers of an earlier one.
    """

    def __init__(
        self,
        hosts: Hosts = LOOPBACK,
        number: int = 0,
        *,
        log: Path | None = None,
        secret: str | None = None,
        heartbeat_timeout_s: float = zpccl.limits.HEARTBEAT_TIMEOUT_NS / 1e9,
        grace_s: float = 0.1,
    ) -> None:
        self.address = f"{hosts.address(number)}:0"
        self._hosts, self._number, self._log = hosts, number, log
        self._environment = os.environ | ({} if secret is None else {"ZPCCL_SECRET": secret})
        self._options = ["--log-level", "warning" if log is None else "info", "--recovery-grace", str(grace_s)]
        self._options += ["--heartbeat-timeout", str(heartbeat_timeout_s)]
        self._process: subprocess.Popen[str] | None = None
        self._earlier_bytes = 0  # Of the log: of earlier lives.

    def __enter__(self) -> Master:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        self.kill()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts it, and waits until it listens.

        Raises:
            WorkerFailed: it did not start.
        """
        self._earlier_bytes = self._log.stat().st_size if self._log is not None and self._log.exists() else 0
        with without_interrupts():  # Else it may be there, and nobody know it.
            self._process = self._hosts.run(self._number, self._begin)
        assert self._process.stdout is not None
        greeting = self._process.stdout.readline()
        if MASTER_GREETING not in greeting:
            raise WorkerFailed("the master did not start")
        self.address = greeting.partition(MASTER_GREETING)[2].strip()

    def _begin(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "zpccl.cli.master", "--bind", self.address, *self._options]
        with contextlib.ExitStack() as stack:
            log = None if self._log is None else stack.enter_context(self._log.open("a"))
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                start_new_session=True,
            )

    def kill(self) -> int:
        """SIGKILL, which is on its way at the time returned (nanoseconds of `time.monotonic_ns`). May be repeated."""
        now_ns = time.monotonic_ns()
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
        return now_ns

    def log(self) -> str:
        """What it has logged, in all its lives."""
        return "" if self._log is None or not self._log.exists() else self._log.read_text(encoding="utf-8")

    def wait_for_log(self, text: str, timeout_s: float) -> None:
        """Waits until it has logged a text, in this life. Nothing tells of a new line in the log of another process.

        Raises:
            WorkerFailed: it has not, for so long.
        """
        deadline = time.monotonic() + timeout_s
        while text not in self.log().encode()[self._earlier_bytes :].decode(errors="replace"):
            if time.monotonic() > deadline:
                raise WorkerFailed(f"the master has not logged {text!r} for {timeout_s:g} s: {self.log()}")
            time.sleep(LOG_INTERVAL_S)

    def terms(self) -> list[int]:
        """The numbers under which it has led, by its log."""
        return [int(number) for number in re.findall(r"taking over the run.* in term (\d+)", self.log())]


def process_cpu_ns(pid: int) -> int:
    """User and system time of a process of ours and all its threads, in nanoseconds (Linux's clock of a process)."""
    return time.clock_gettime_ns(~pid << 3 | 2)


class Peer:
    """A peer of a run, to be held by a `Worker`.

    Args:
        address: of the master; if this is on loopback, the peer listens on loopback only.
        connections: TCP connections to each other peer.
        options: more of the communicator's.
    """

    def __init__(self, address: str, connections: int, **options: Any) -> None:
        if address.startswith("127."):
            first = zpccl.limits.PEER_PORT_FIRST
            options["listen"] = f"127.0.0.1:{first}-{first + zpccl.limits.PEER_PORT_COUNT - 1}"
        self.comm = zpccl.Communicator(address, connections=connections, **options)

    def ready(self) -> None:
        """Answers when the process is up and everything is imported."""

    def join(self, peers: int) -> int:
        """Connects and waits until the run has so many peers; returns the rank."""
        self.comm.connect()
        return self.admit(peers)

    def admit(self, peers: int) -> int:
        """Lets pending peers in until the run has so many; returns the rank."""
        while self.comm.world_size < peers:
            if self.comm.are_peers_pending():
                self.comm.update_topology()
        return self.comm.rank

    def close(self) -> None:
        """Leaves the run."""
        self.comm.close()
