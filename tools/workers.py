"""Child processes of the tools: workers that call methods on request, masters, peers of a run.

Ownership: the tool's process owns every child, and ends remaining ones by their process id. A worker handles one
request at a time from its pipe, and ends when the pipe is closed. So no worker outlives the tool for long, however the
tool ends. Children ignore Ctrl-C; the tool handles it.
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
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common import WorkerFailed
from networks import DEVICE, Namespaces, enter

import zpccl

REPLY_TIMEOUT_S = 300.0
"""Timeout for an answer of a child."""
END_TIMEOUT_S = 5.0
"""Time that a child gets to close its object."""
LOG_INTERVAL_S = 0.005
MASTER_GREETING = "listens on "

T = TypeVar("T")

# --- Workers ----------------------------------------------------------------------------------------------------------


class Held(Protocol):
    """The object in a worker whose methods the tool calls."""

    def close(self) -> None:
        """Releases all resources before the process ends."""


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Defers Ctrl-C, SIGTERM and the loss of the terminal, in the main thread, until the block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    caught = [number for number, handler in before.items() if callable(handler)]
    for each in caught:
        signal.signal(each, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for each in caught:
            signal.signal(each, before[each])
    for number in came:
        signal.raise_signal(number)


class Worker:
    """A child process that holds one object, and calls its methods on request.

    Args:
        name: for messages.
        factory: makes the object, in the child.
        arguments: of the factory.
        namespace: network namespace of the child; "": that of the tool.
        keywords: of the factory.
    """

    def __init__(
        self, name: str, factory: Callable[..., Held], *arguments: Any, namespace: str = "", **keywords: Any
    ) -> None:
        start_fork_server(__name__)
        context = multiprocessing.get_context("forkserver")
        self.name = name
        self.connection, theirs = context.Pipe()
        settings = (theirs, namespace, factory, arguments, keywords)
        self._process = context.Process(target=_serve, args=settings, daemon=True)
        with without_interrupts():  # Otherwise a child that has read half of its arguments would raise.
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process id."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def begin(self, method: str, *arguments: Any) -> None:
        """Makes the child call a method of its object.

        Raises:
            WorkerFailed: the child has ended.
        """
        try:
            self.connection.send((method, arguments))
        except OSError as error:
            raise WorkerFailed(f"{self.name} is gone: {error}") from error

    def result(self, timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        """Waits for the return value of the method.

        Raises:
            WorkerFailed: the method raised, the child died, or the timeout expired.
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
        """Calls a method and waits for its return value."""
        self.begin(method, *arguments)
        return self.result()

    def kill(self) -> int:
        """Sends SIGKILL. Returns the time of the signal (nanoseconds of `time.monotonic_ns`)."""
        now_ns = time.monotonic_ns()
        self._process.kill()
        return now_ns

    def close(self) -> None:
        """Ends the child: it closes its object, or is killed if it does not. May be called twice."""
        self.connection.close()
        self._process.join(END_TIMEOUT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def start_fork_server(module: str) -> None:
    """Starts the fork server of "forkserver" contexts with a module already imported.

    Python does not pass sys.path to the fork server, which silently ignores modules that it cannot import. Under
    ThreadSanitizer nothing is imported in advance: imports start threads, and it does not support a fork then. The
    server and its children inherit a blocked Ctrl-C; otherwise it would end a server that is still importing.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        if "libtsan" not in os.environ.get("LD_PRELOAD", ""):
            multiprocessing.get_context("forkserver").set_forkserver_preload([module])
        resource_tracker.ensure_running()  # It unblocks Ctrl-C again.
        with without_interrupts():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def call_all(workers: Sequence[Worker], method: str, *arguments: Any) -> list[Any]:
    """Calls a method on all workers concurrently; returns the results in the order of the workers."""
    for worker in workers:
        worker.begin(method, *arguments)
    return [worker.result() for worker in workers]


def close_all(workers: Sequence[Worker]) -> None:
    """Ends all workers concurrently."""
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.close()


@contextlib.contextmanager
def ended_workers() -> Iterator[list[Worker]]:
    """Yields an empty list. The workers appended to it are ended at the end of the block."""
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
    """The child's main loop. An error in the factory is reported in the answer to the next call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if namespace:
        try:
            enter(namespace)
        except FileNotFoundError:  # The tool has ended in the meantime.
            return
    held: Held | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            method, parameters = connection.recv()
            try:
                if held is None:
                    held = factory(*arguments, **keywords)
                answer = ("", getattr(held, method)(*parameters))
            except Exception as error:  # noqa: BLE001 - the tool reports it
                text = str(error) if isinstance(error, zpccl.PCCLError) else traceback.format_exc()
                answer = (text, None)
            connection.send(answer)
    if held is not None:
        held.close()


# --- Hosts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """The hosts on which processes run: loopback for all, or the hosts of a network, by number."""

    network: Namespaces | None = None

    def address(self, number: int) -> str:
        """The IPv4 address of a host."""
        return "127.0.0.1" if self.network is None else self.network.address(number)

    @property
    def device(self) -> str:
        """The network device of each host."""
        return "lo" if self.network is None else DEVICE

    def run(self, number: int, function: Callable[[], T]) -> T:
        """Runs a function on a host: processes that it starts belong to that host."""
        return function() if self.network is None else self.network.run(number, function)

    def start(self, number: int, name: str, factory: Callable[..., Held], *arguments: Any, **keywords: Any) -> Worker:
        """Starts a worker on a host."""
        namespace = "" if self.network is None else self.network.namespace(number)
        return Worker(name, factory, *arguments, namespace=namespace, **keywords)


LOOPBACK = Hosts()


# --- Masters and peers ------------------------------------------------------------------------------------------------


class Master:
    """A zpccl-master process that can be killed and restarted at its address.

    Args:
        hosts: the hosts.
        number: number of the host that it runs on.
        log: file for its log, appended to at each restart; None: warnings go to standard error.
        secret: of the run.
        heartbeat_timeout_s: of its peers.
        grace_s: recovery grace: how long it waits for the peers of an earlier master.
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
        self._earlier_bytes = 0  # Size of the log before the last start.

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
        with without_interrupts():  # Otherwise it might run without being recorded here.
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
        """Sends SIGKILL; may be repeated. Returns the time of the signal (nanoseconds of `time.monotonic_ns`)."""
        now_ns = time.monotonic_ns()
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
        return now_ns

    def log(self) -> str:
        """Its log, over all restarts."""
        return "" if self._log is None or not self._log.exists() else self._log.read_text(encoding="utf-8")

    def wait_for_log(self, text: str, timeout_s: float) -> None:
        """Polls its log until a text appears after the last start.

        Raises:
            WorkerFailed: the timeout expired.
        """
        deadline = time.monotonic() + timeout_s
        while text not in self.log().encode()[self._earlier_bytes :].decode(errors="replace"):
            if time.monotonic() > deadline:
                raise WorkerFailed(f"the master has not logged {text!r} for {timeout_s:g} s: {self.log()}")
            time.sleep(LOG_INTERVAL_S)

    def terms(self) -> list[int]:
        """The terms in which it has led, from its log."""
        return [int(number) for number in re.findall(r"taking over the run.* in term (\d+)", self.log())]


def process_cpu_ns(pid: int) -> int:
    """User and system time of a process and all its threads, in nanoseconds (Linux's CPU clock of a process)."""
    return time.clock_gettime_ns(~pid << 3 | 2)


class Peer:
    """A peer of a run, for a `Worker`.

    Args:
        address: of the master; if it is on loopback the peer listens on loopback only.
        connections: TCP connections to each other peer.
        options: further options of the communicator.
    """

    def __init__(self, address: str, connections: int, **options: Any) -> None:
        if address.startswith("127."):
            first = zpccl.limits.PEER_PORT_FIRST
            options["listen"] = f"127.0.0.1:{first}-{first + zpccl.limits.PEER_PORT_COUNT - 1}"
        self.comm = zpccl.Communicator(address, connections=connections, **options)

    def ready(self) -> None:
        """Returns once the process is up and everything is imported."""

    def join(self, peers: int) -> int:
        """Connects and waits until the run has `peers` peers; returns the rank."""
        self.comm.connect()
        return self.admit(peers)

    def admit(self, peers: int) -> int:
        """Admits pending peers until the run has `peers` peers; returns the rank."""
        while self.comm.world_size < peers:
            if self.comm.are_peers_pending():
                self.comm.update_topology()
        return self.comm.rank

    def replace(self, survivors: int, peers: int) -> None:
        """Waits until the run has lost all but the survivors, then admits pending peers until it has `peers` again."""
        while self.comm.world_size > survivors:
            self.comm.are_peers_pending()
        self.admit(peers)

    def close(self) -> None:
        """Leaves the run."""
        self.comm.close()
