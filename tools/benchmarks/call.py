"""Counts wake-ups, system calls and CPU time of a peer and the master in one all-reduce, beside torch's Gloo.

A wake-up is a voluntary context switch: a thread waited and something woke it, which is slow on many virtual machines.
strace counts system calls in separate repetitions, because it slows them down. The columns stay empty if strace is not
installed or may not attach.

All counts are for one all-reduce. Those of `peer` are the mean over all peers; the master is that of zpccl. Counts of
large all-reduces depend on how the kernel cuts transfers.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import Row, Rows, WorkerFailed, add, say, spread
from workers import LOOPBACK, call_all, process_cpu_ns

from benchmarks.scenario import Column, Scenario, plain
from benchmarks.systems import System, add_systems, check_systems, start_system

SYSTEMS = ("zpccl", "gloo")
ITERATIONS_MIN = 20
"""The cost of a repetition's request and answer is spread over at least this many all-reduces."""
STRACE_TIMEOUT_S = 10.0
ATTACHED = "attached"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--peers", [2, 4], "processes")
    add(parser, "--bytes", ["4KiB", "64KiB", "1MiB"])
    add(parser, "--connections", 4)
    add(parser, "--reps", 7)
    add_systems(parser, SYSTEMS)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    check_systems(parser, options, SYSTEMS)
    if shutil.which("strace") is None:
        say("system calls are not counted: strace is not installed")


def wake_ups(pid: int) -> int:
    """How often the present threads of a process have waited."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended.
            lines = status.read_text(encoding="ascii", errors="replace").splitlines()
            count += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return count


def counted(system: System, iterations: int) -> tuple[float, list[float], list[float]]:
    """Runs all-reduces. Returns the seconds of one, and the wake-ups and CPU seconds of one for each process."""
    pids = pids_of(system)
    call_all(system.workers, "reset")
    before = [(wake_ups(pid), process_cpu_ns(pid)) for pid in pids]
    results = call_all(system.workers, "run", iterations)
    after = [(wake_ups(pid), process_cpu_ns(pid)) for pid in pids]
    system.check()
    woken = [(now - then) / iterations for (now, _), (then, _) in zip(after, before, strict=True)]
    busy = [(now - then) / iterations / 1e9 for (_, now), (_, then) in zip(after, before, strict=True)]
    return max(seconds for seconds, _ in results), woken, busy


def pids_of(system: System) -> list[int]:
    """The processes of a system: its peers, and its master if it has one."""
    master = [] if system.master_pid is None else [system.master_pid]
    return [*(worker.pid for worker in system.workers), *master]


@contextlib.contextmanager
def traced(pids: Sequence[int], summaries: Sequence[Path]) -> Iterator[None]:
    """Counts the system calls of processes while the block runs.

    Raises:
        WorkerFailed: strace may not attach.
    """
    tracers: list[subprocess.Popen[str]] = []
    try:
        for pid, summary in zip(pids, summaries, strict=True):
            command = ["strace", "--follow-forks", "--summary-only", f"--output={summary}", f"--attach={pid}"]
            tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
            tracers.append(tracer)
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            if ATTACHED not in said:
                raise WorkerFailed(said.strip() or "strace does not start")
        yield
    finally:
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)  # It detaches and writes its summary.
            try:
                tracer.communicate(timeout=STRACE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                tracer.kill()
                tracer.communicate()


def count_system_calls(system: System, iterations: int) -> list[float | None]:
    """System calls of one all-reduce in each process; None if strace is missing or may not attach."""
    pids = pids_of(system)
    if shutil.which("strace") is None:
        return [None] * len(pids)
    with tempfile.TemporaryDirectory() as directory:
        summaries = [Path(directory, str(pid)) for pid in pids]
        try:
            with traced(pids, summaries):
                call_all(system.workers, "run", iterations)
        except WorkerFailed as error:
            say(f"system calls are not counted: {error}")
            return [None] * len(pids)
        return [total_of(summary.read_text(encoding="utf-8")) / iterations for summary in summaries]


def total_of(summary: str) -> int:
    """The number of calls in a summary of strace: it is in the last line, before the number of errors, if any."""
    *_, last = (line.split() for line in summary.splitlines() if line.strip())
    if last[-1] != "total":
        raise WorkerFailed(f"not a summary of strace: {summary[-200:]!r}")
    return int(last[3])


def measure_size(system: System, options: argparse.Namespace, peers: int, size_bytes: int) -> Row:
    """One row."""
    system.allocate(size_bytes, "float32", "none")
    iterations = max(ITERATIONS_MIN, system.iterations)
    found = [counted(system, iterations) for _ in range(options.reps)]
    calls = count_system_calls(system, iterations)
    row: Row = {"system": system.name, "peers": peers, "bytes": size_bytes, "iterations": iterations}
    row |= {"reps": options.reps, **spread([seconds for seconds, _, _ in found], "seconds")}
    woken = [statistics.median(values) for values in zip(*(one for _, one, _ in found), strict=True)]
    busy = [statistics.median(values) for values in zip(*(one for _, _, one in found), strict=True)]
    for name, values in (("wake_ups", woken), ("cpu_seconds", busy), ("system_calls", calls)):
        of_peers, of_master = values[:peers], values[peers:]
        known = [value for value in of_peers if value is not None]
        row[f"peer_{name}"] = statistics.mean(known) if known else None
        row[f"master_{name}"] = of_master[0] if of_master else None
    return row


def measure(options: argparse.Namespace) -> Rows:
    for peers in options.peers:
        for name in options.systems:
            with start_system(LOOPBACK, name, peers, options.connections) as system:
                for size_bytes in options.bytes:
                    yield measure_size(system, options, peers, size_bytes)


SCENARIO = Scenario(
    __doc__,
    add_arguments,
    measure,
    "One all-reduce: what each peer and the master do, medians of {options.reps}",
    [
        *plain("system", "peers", "bytes"),
        Column("median ms", "seconds_median", ".3f", 1e3),
        Column("peer: wake-ups", "peer_wake_ups", ".1f"),
        Column("system calls", "peer_system_calls", ".1f"),
        Column("CPU us", "peer_cpu_seconds", ".0f", 1e6),
        Column("master: wake-ups", "master_wake_ups", ".1f"),
        Column("system calls", "master_system_calls", ".1f"),
        Column("CPU us", "master_cpu_seconds", ".0f", 1e6),
    ],
    check,
)
