"""Repeatedly kills a peer in the middle of an all-reduce, and checks the promises to the others.

In each round all peers all-reduce a tensor in place; then they do it again, and one of them is killed (SIGKILL) after a
random part of the usual duration. The call of the others must fail within a second and restore their buffers bit for
bit; the same call, repeated at once, must succeed with the sum of the survivors. Then a new peer replaces the victim.

A kill counts only if it hit the middle: every survivor's call failed, some survivor had bytes of that all-reduce on the
wire, and the victim had not finished. A kill that came too late or too early is counted separately and repeated.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import numpy as np
from common import Row, Rows, WorkerFailed, add, format_bytes, positive, say, spread, whole
from workers import Master, Peer, Worker, call_all, close_all

import zpccl
from benchmarks.pattern import fill_with, pattern, worst_error
from benchmarks.scenario import Scenario

MS_TO_ERROR_MAX = 1000.0
"""The promise: the others' call fails within this time."""
KILL_FRACTION_MIN, KILL_FRACTION_MAX = 0.05, 0.85
"""Range of the time of the kill, as a fraction of the duration of an undisturbed all-reduce."""
WARM_UPS = 3
MISSES_PER_ROUND_MAX = 30
"""Maximum number of successive kills that miss the middle; then the tool fails."""
MS_NS = 1e6


class ReducingPeer(Peer):
    """A peer with one tensor, which it all-reduces in place.

    Args:
        address: of the master.
        connections: TCP connections to each other peer.
        number: determines its contribution.
        size_bytes: of the tensor.
        dtype: of the tensor.
        options: further options of the communicator.
    """

    def __init__(
        self, address: str, connections: int, number: int, size_bytes: int, dtype: str, **options: Any
    ) -> None:
        super().__init__(address, connections, **options)
        self.number, self.dtype = number, dtype
        self.tensor = np.empty(max(1, size_bytes // np.dtype(dtype).itemsize), dtype)
        self.before = np.empty_like(self.tensor)
        self.handle: zpccl.AsyncReduceHandle | None = None
        fill_with(self.before, pattern([number], dtype))

    def refill(self) -> None:
        """Puts the contribution into the tensor."""
        self.tensor[:] = self.before

    def reduce(self, numbers: list[int]) -> tuple[float, bool]:
        """All-reduces; returns the milliseconds, and whether the result is the sum of these peers' contributions."""
        began_ns = time.monotonic_ns()
        self.comm.all_reduce(self.tensor, self.tensor)
        ms = (time.monotonic_ns() - began_ns) / MS_NS
        return ms, self.is_sum_of(numbers)

    def is_sum_of(self, numbers: list[int]) -> bool:
        """True if the tensor holds the sum of the contributions of these peers, bit for bit."""
        return worst_error(self.tensor, pattern(numbers, self.dtype)) == 0.0

    def is_restored(self) -> bool:
        """True if the tensor holds this peer's contribution, bit for bit."""
        return bool(np.array_equal(self.tensor.view(np.uint8), self.before.view(np.uint8)))

    def launch(self) -> int:
        """Starts an all-reduce; returns the time of the start (nanoseconds)."""
        self.handle = self.comm.all_reduce_async(self.tensor, self.tensor)
        return time.monotonic_ns()

    def finish(self) -> bool:
        """Waits for the all-reduce started by `launch`; returns True if it succeeded."""
        assert self.handle is not None
        return self.handle.wait()[0]

    def survive(self, survivors: list[int]) -> dict[str, Any]:
        """All-reduces with a peer that will be killed, checks the tensor, and retries.

        Args:
            survivors: numbers of the peers that will survive.

        Returns:
            `failed`, and if so: `error`, `error_ns`, `wire_bytes` of the failed call, `restored`, `retry_ns`, `retries`
            and `right`.
        """
        self.launch()
        assert self.handle is not None
        succeeded, status, info = self.handle.wait()
        error_ns = time.monotonic_ns()
        if succeeded:
            return {"failed": False}
        report: dict[str, Any] = {
            "failed": True,
            "error": zpccl.Result(status).name,
            "error_text": str(self.handle.exception()),
            "error_ns": error_ns,
            "wire_bytes": info.tx_bytes + info.rx_bytes,
            "restored": self.is_restored(),
        }
        try:
            self.comm.all_reduce(self.tensor, self.tensor)
        except zpccl.PCCLError as retry_error:
            return report | {"retry_error": str(retry_error), "retry_ns": time.monotonic_ns(), "right": False}
        retry_ns = time.monotonic_ns()
        return report | {"retry_ns": retry_ns, "right": self.is_sum_of(survivors)}


def judge(reports: list[dict[str, Any]], kill_ns: int, finished: bool, wire_bytes: float) -> dict[str, Any] | None:
    """The results of one kill; times are those of the slowest survivor. None: the kill missed the middle.

    Args:
        reports: of the survivors.
        kill_ns: when the victim was killed.
        finished: the victim's call had succeeded.
        wire_bytes: that a peer sends and receives in an undisturbed all-reduce.
    """
    failed = [report for report in reports if report["failed"]]
    if not failed:
        return None
    problems = []
    if len(failed) < len(reports):
        problems.append("some survivors' calls failed and some succeeded")
    if finished:
        problems.append("the victim's call succeeded and the survivors' failed")
    for report in failed:
        if report["error"] != zpccl.Result.RANK_CONNECTION_LOST.name:
            problems.append(f"unexpected error: {report['error_text']}")
        if "retry_error" in report:
            problems.append(f"the retry failed: {report['retry_error']}")
    moved = max(report["wire_bytes"] for report in failed) / wire_bytes
    if not problems and moved == 0.0:
        return None
    restored = all(report["restored"] for report in failed)
    right = all(report["right"] for report in failed) and not problems
    ms_to_error = max(report["error_ns"] - kill_ns for report in failed) / MS_NS
    problems += [] if restored else ["a buffer was not restored"]
    problems += [] if right else ["a sum was wrong"]
    problems += [] if ms_to_error <= MS_TO_ERROR_MAX else [f"{ms_to_error:.0f} ms to the error"]
    return {
        "moved_fraction": moved,
        "restored": restored,
        "right": right,
        "ms_to_error": ms_to_error,
        "ms_to_retry": max(report["retry_ns"] - kill_ns for report in failed) / MS_NS,
        "problems": problems,
    }


class Experiment:
    """The peers, and the rounds so far."""

    peer_class = ReducingPeer

    def __init__(self, options: argparse.Namespace, address: str) -> None:
        self.options = options
        self.address = address
        self.random = random.Random(options.seed)
        self.workers: dict[int, Worker] = {}
        self.numbers = 0
        self.reduce_ms = 0.0
        self.rounds: list[dict[str, Any]] = []
        self.misses = 0

    def start_peer(self) -> tuple[int, Worker]:
        """Starts a peer, ready to connect."""
        number, self.numbers = self.numbers, self.numbers + 1
        o = self.options
        worker = Worker(f"peer {number}", self.peer_class, self.address, o.connections, number, o.bytes, o.dtype)
        self.workers[number] = worker
        worker.begin("ready")
        return number, worker

    def fill_up(self) -> None:
        """Starts missing peers, and admits them."""
        members = list(self.workers.values())
        newcomers = [self.start_peer()[1] for _ in range(self.options.peers - len(members))]
        for worker in newcomers:
            worker.result()
        for worker in members:
            worker.begin("replace", len(members), self.options.peers)
        for worker in newcomers:
            worker.begin("join", self.options.peers)
        for worker in (*members, *newcomers):
            worker.result()

    def reduce(self) -> float:
        """An undisturbed all-reduce of all peers; returns the milliseconds of the slowest.

        Raises:
            WorkerFailed: it failed, or a result was wrong.
        """
        workers = list(self.workers.values())
        call_all(workers, "refill")
        results: list[tuple[float, bool]] = call_all(workers, "reduce", list(self.workers))
        if not all(right for _, right in results):
            raise WorkerFailed("an all-reduce that nobody disturbed gave a wrong sum")
        call_all(workers, "refill")
        return max(ms for ms, _ in results)

    def kill_once(self) -> dict[str, Any] | None:
        """One all-reduce with a kill. None: the kill missed the middle."""
        victim_number = self.random.choice(list(self.workers))
        victim = self.workers[victim_number]
        survivors = {number: worker for number, worker in self.workers.items() if number != victim_number}
        delay_s = self.random.uniform(KILL_FRACTION_MIN, KILL_FRACTION_MAX) * self.reduce_ms / 1e3
        for worker in survivors.values():
            worker.begin("survive", list(survivors))
        launched_ns = victim.call("launch")
        victim.begin("finish")
        rest_s = launched_ns / 1e9 + delay_s - time.monotonic()
        finished = victim.connection.poll(max(0.0, rest_s))
        kill_ns = victim.kill()
        finished = finished or victim.connection.poll(0)  # End of the pipe, or an answer sent before the kill.
        if finished:
            finished = self._has_answered(victim)
        del self.workers[victim_number]
        victim.close()
        reports = [worker.result() for worker in survivors.values()]
        peers = self.options.peers
        return judge(reports, kill_ns, finished, 2 * 2 * (peers - 1) / peers * self.options.bytes)

    @staticmethod
    def _has_answered(victim: Worker) -> bool:
        try:
            return bool(victim.result(0.0))
        except WorkerFailed:
            return False

    def play(self) -> None:
        """Plays all rounds.

        Raises:
            WorkerFailed: another peer died or hangs, or too many kills missed the middle.
        """
        self.fill_up()
        self.reduce_ms = statistics.median([self.reduce() for _ in range(WARM_UPS)])
        say(f"an all-reduce of {format_bytes(self.options.bytes)} takes {self.reduce_ms:.1f} ms")
        while len(self.rounds) < self.options.rounds:
            outcome = self.kill_once()
            if outcome is None:
                self.misses += 1
                say("  kill not in the middle of the transfer; again")
                if self.misses > MISSES_PER_ROUND_MAX * self.options.rounds:
                    raise WorkerFailed(f"{self.misses} kills missed; use more --bytes")
            else:
                self.rounds.append(outcome)
                say(f"round {len(self.rounds)}: {outcome}")
            self.fill_up()
            self.reduce_ms = self.reduce()

    def summary(self) -> Row:
        """Summarises the results in one row."""
        problems = [problem for outcome in self.rounds for problem in outcome["problems"]]
        row: Row = {name: vars(self.options)[name] for name in ("peers", "bytes", "connections", "dtype")}
        row |= {"rounds": len(self.rounds), "kills_not_in_the_middle": self.misses}
        row["buffers_restored"] = sum(outcome["restored"] for outcome in self.rounds)
        row["sums_right"] = sum(outcome["right"] for outcome in self.rounds)
        for name in ("ms_to_error", "ms_to_retry", "moved_fraction"):
            row |= spread([outcome[name] for outcome in self.rounds], name)
        return row | {"ms_of_reduce": self.reduce_ms, "promises_kept": not problems, "problems": problems}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--peers", 4, type=whole(3, 64))
    add(parser, "--bytes", "64MiB")
    add(parser, "--rounds", 20, "kills in the middle", type=positive)
    add(parser, "--connections", 4)
    add(parser, "--dtype", "float32")
    add(parser, "--seed", 0)


def measure_with(kind: type[Experiment], options: argparse.Namespace) -> Rows:
    """Plays an experiment of this kind, in a run of its own; yields its summary."""
    with Master() as master:
        experiment = kind(options, master.address)
        try:
            experiment.play()
        finally:
            close_all(list(experiment.workers.values()))
    yield experiment.summary()


def measure(options: argparse.Namespace) -> Rows:
    return measure_with(Experiment, options)


SCENARIO = Scenario(__doc__, add_arguments, measure, "Peers killed in the middle of an all-reduce")
