"""What the measuring tools share: sizes, medians, tables, child processes that are told what to do, peers of a run.

Who owns what: the tool's process owns every child, and ends those that are left by their process id. A child does one
thing at a time, as told over its pipe, and ends when the pipe does; so no child outlives the tool for long, however
the tool ends. Ctrl-C reaches the tool alone: children ignore it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from networks import NetworkUnavailable
from numpy.typing import NDArray

import zpccl

REPLY_TIMEOUT_S = 300.0
"""A child that has not answered for so long hangs."""
END_TIMEOUT_S = 5.0
"""What a child gets to close what it has open."""
MIB = 1 << 20
MASTER_GREETING = "listens on "
PATTERN_PERIOD_ELEMENTS = 97
"""Period of the test pattern; a prime, so that no chunk or frame begins as another one does."""
CHECK_ELEMENTS = PATTERN_PERIOD_ELEMENTS * 10_000
"""Elements that are compared at a time."""

Array: TypeAlias = NDArray[Any]
Row: TypeAlias = dict[str, Any]

DTYPES = ("float32", "float64", "float16", "uint8", "int8", "int32", "int64")
QUANTIZATIONS = {
    name: zpccl.QuantizationOptions(zpccl.QuantizedDataType[datatype], zpccl.QuantizationAlgorithm[algorithm])
    for name, datatype, algorithm in (
        ("none", "UINT8", "NONE"),
        ("minmax", "UINT8", "MIN_MAX"),
        ("zps", "UINT8", "ZERO_POINT_SCALE"),
        ("zps-int8", "INT8", "ZERO_POINT_SCALE"),
        ("minmax-uint4", "UINT4", "MIN_MAX"),
        ("zps-uint4", "UINT4", "ZERO_POINT_SCALE"),
        ("zps-int4", "INT4", "ZERO_POINT_SCALE"),
    )
}
"""MIN_MAX of signed types is left out: but for the sign bit of the codes it is that of unsigned ones."""

# --- Arithmetic and output --------------------------------------------------------------------------------------------

_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<prefix>[KMGT])(?P<binary>i)?)?B?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """The bytes of "4096", "4KiB", "64 MiB" (powers of 1024) or "64MB" (powers of 1000).

    Raises:
        argparse.ArgumentTypeError: the text is no size, or not a whole number of bytes above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 4KiB, 64MiB or 1GB")
    base = 1024 if match["binary"] else 1000
    power = _UNITS[match["prefix"].upper()] if match["prefix"] else 0
    size = float(match["number"]) * base**power
    if size < 1 or size != math.floor(size):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes above 0")
    return int(size)


def format_bytes(size: int) -> str:
    """The shortest exact text: 65536 is "64KiB", 1000 is "1000B"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return f"{size}B"


def bus_bandwidth_gbit(peers: int, size_bytes: int, seconds: float) -> float:
    """10^9 bits a second that each peer sends in an all-reduce: 2(N-1)/N times the tensor, in one direction.

    Args:
        peers: N, 2 or more.
        size_bytes: of the tensor.
        seconds: of one all-reduce.
    """
    return 2 * (peers - 1) / peers * size_bytes / seconds * 8 / 1e9


STANDARD_OUTPUT = Path("-")


def spread(values: Sequence[float], name: str) -> dict[str, float]:
    """Median, minimum and maximum as `name`_median and so on."""
    return {
        f"{name}_median": statistics.median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def write_json(path: Path | None, data: Any) -> None:
    """Writes `data` to the file, if one is given, as a whole or not at all."""
    if path is None:
        return
    if path == STANDARD_OUTPUT:
        print(json.dumps(data, indent=2))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def say(text: str) -> None:
    """A line of progress, on standard error: standard output has the results only."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: with rich on a terminal where rich is installed, else as aligned text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=title)
            for index, column in enumerate(columns):
                table.add_column(column, justify="left" if index == 0 else "right")
            for row in rows:
                table.add_row(*row)
            return Console().print(table)
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(title)
    for row in (columns, *rows):
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
        print("  ".join(cells).rstrip())
    sys.stdout.flush()


def run_tool(play: Callable[[], int]) -> int:
    """Runs a tool; returns its exit status. Ctrl-C and SIGTERM end its children too and leave no traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return play()
    except KeyboardInterrupt:
        say("interrupted")
        return 128 + signal.SIGINT
    except (WorkerFailed, NetworkUnavailable, zpccl.PCCLError) as error:
        say(f"failed: {error}")
        return 1


# --- The test pattern -------------------------------------------------------------------------------------------------


def pattern(numbers: Sequence[int], dtype: str) -> Array:
    """One period of the sum of what the peers of these numbers contribute, exact in every dtype for small sums.

    Peer n contributes n + 0, n + 1, ..., n + 96, over and over; n is taken modulo 8, to stay exact in float16 too.
    """
    steps = np.arange(PATTERN_PERIOD_ELEMENTS, dtype=np.int64)
    total = sum((steps + number % 8 for number in numbers), np.zeros_like(steps))
    return total.astype(dtype)


def fill_with(array: Array, period: Array) -> None:
    """Repeats `period` over `array`."""
    block = np.resize(period, min(CHECK_ELEMENTS, array.size))
    for begin in range(0, array.size, CHECK_ELEMENTS):
        piece = array[begin : begin + CHECK_ELEMENTS]
        piece[:] = block[: piece.size]


def worst_error(array: Array, period: Array) -> float:
    """The greatest difference between `array` and `period` repeated; 0.0 when they are equal bit for bit."""
    block = np.resize(period, min(CHECK_ELEMENTS, array.size))
    worst = 0.0
    for begin in range(0, array.size, CHECK_ELEMENTS):
        piece = array[begin : begin + CHECK_ELEMENTS]
        wanted = block[: piece.size]
        if piece.tobytes() != wanted.tobytes():
            difference = float(np.abs(piece.astype(np.float64) - wanted.astype(np.float64)).max())
            worst = max(worst, difference if difference > 0 else math.inf)
    return worst


# --- Child processes --------------------------------------------------------------------------------------------------


class WorkerFailed(Exception):
    """A child raised, died or did not answer."""


class Host(Protocol):
    """What runs in a child: any object whose methods are called from the tool."""

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
    """

    is_forked = False
    """Whether it is a child of the fork server (`start_fork_server`), or begins anew."""

    def __init__(self, name: str, factory: Callable[..., Host], *arguments: Any) -> None:
        forked, spawned = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        context = forked if self.is_forked else spawned
        self.name = name
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, arguments), daemon=True)
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


def _serve(connection: Connection, factory: Callable[..., Host], arguments: tuple[Any, ...]) -> None:
    """The child's main loop. What fails is told to the tool in answer to the next call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    host: Host | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            method, parameters = connection.recv()
            try:
                if host is None:
                    host = factory(*arguments)
                answer = ("", getattr(host, method)(*parameters))
            except Exception as error:  # noqa: BLE001 - the tool reports it, whatever it is
                text = str(error) if isinstance(error, zpccl.PCCLError) else traceback.format_exc()
                answer = (text, None)
            connection.send(answer)
    if host is not None:
        host.close()


@contextlib.contextmanager
def running_master() -> Iterator[tuple[str, int]]:
    """Runs a zpccl-master on a free port of loopback; gives its address and process id.

    Raises:
        WorkerFailed: it did not start.
    """
    command = [sys.executable, "-m", "zpccl.cli.master", "--bind", "127.0.0.1:0", "--log-level", "warning"]
    command += ["--recovery-grace", "0.1"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            greeting = process.stdout.readline()
            if MASTER_GREETING not in greeting:
                raise WorkerFailed("the master did not start")
            yield greeting.partition(MASTER_GREETING)[2].strip(), process.pid
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def process_cpu_ns(pid: int) -> int:
    """User and system time of a process of ours and all its threads, in nanoseconds (Linux's clock of a process)."""
    return time.clock_gettime_ns(~pid << 3 | 2)


class Peer:
    """A peer of a run, to be held by a `Worker`.

    Args:
        address: of the master.
        connections: TCP connections to each other peer.
        options: more of the communicator's; without `listen` it listens on loopback only.
    """

    def __init__(self, address: str, connections: int, **options: Any) -> None:
        ports = f"127.0.0.1:{zpccl.limits.PEER_PORT_FIRST}"
        last = zpccl.limits.PEER_PORT_FIRST + zpccl.limits.PEER_PORT_COUNT - 1
        options.setdefault("listen", f"{ports}-{last}")
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


def quantization_options(name: str) -> zpccl.QuantizationOptions:
    """The options of a name of QUANTIZATIONS."""
    return QUANTIZATIONS[name]


def error_bound(peers: int, quantize: str) -> float:
    """The greatest difference from the exact sum of `pattern` that an all-reduce may have.

    The partial sum of k peers spans at most k times the span of one, is quantised to 255 or 15 steps (of a type with a
    code for 0, one less), and is off by less than a step; the errors of all partial sums add up.
    """
    if quantize == "none":
        return 0.0
    largest = PATTERN_PERIOD_ELEMENTS - 1 + 7
    bits = zpccl.QuantizedDataType(QUANTIZATIONS[quantize].quantized_datatype).bits
    steps = (1 << bits) - 1
    return sum(k * largest / steps for k in range(1, peers + 1))


# --- Arguments --------------------------------------------------------------------------------------------------------


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help="write the results there (or here) too",
    )


def peer_count(text: str) -> int:
    """A number of peers from the command line.

    Raises:
        argparse.ArgumentTypeError: not a number from 2 to 64.
    """
    if not text.isdigit() or not 2 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of peers from 2 to 64")
    return int(text)


def positive(text: str) -> int:
    """A number above 0 from the command line.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def connection_count(text: str) -> int:
    """A number of connections from the command line.

    Raises:
        argparse.ArgumentTypeError: not from 1 to the maximum.
    """
    if not text.isdigit() or not 1 <= int(text) <= zpccl.limits.LINK_CONNECTIONS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to {zpccl.limits.LINK_CONNECTIONS_MAX}")
    return int(text)
