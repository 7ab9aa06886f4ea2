"""Kills a peer again and again while all make one small call after another, and checks what the others see.

All peers all-reduce a tensor in place, again and again; each call has other contents. One of them is killed (SIGKILL)
at a random moment: between calls, in the middle of one, or after some peers have returned and before others have. The
others must agree. Either all fail in the same call, with the peer as lost and their buffers restored bit for bit. Or
all succeed in each call with the same sum: of all peers, or from some call on of the remaining ones. The next call must
succeed. Then a new peer replaces the victim.
"""

from __future__ import annotations

import argparse
import collections
import time
from typing import Any

import numpy as np
from common import Row, Rows, add, positive, say, whole

import zpccl
from benchmarks.kill_peer import Experiment, ReducingPeer, measure_with
from benchmarks.pattern import pattern, worst_error
from benchmarks.scenario import Scenario

KILL_AFTER_S_MAX = 0.06
MARKS = 31
"""The last element repeats after this many calls, so that its sums are exact in float16 too."""
REPORTED_EVERY = 100
"""Number of rounds between two lines of progress."""


class CallingPeer(ReducingPeer):
    """A peer that makes the same call again and again. The last element is the number of the call."""

    def call_until_lost(self, everyone: list[int], survivors: list[int]) -> dict[str, Any]:
        """Calls until the sum is that of the survivors, or a call fails; then once more.

        Returns:
            `call` and `end` ("failed", "went on", or the problem) of that call, and `retry`: "right", or the
            problem.
        """
        number = 0
        while (end := self._one_call(number, everyone, survivors)) == "all":
            number += 1
        retry = self._one_call(number + 1, survivors, survivors)
        return {"call": number, "end": end, "retry": "right" if retry == "all" else retry}

    def _one_call(self, number: int, everyone: list[int], survivors: list[int]) -> str:
        self.tensor[:] = self.before
        self.tensor[-1] = self._marks(number, 1)
        given = self.tensor.copy()
        try:
            self.comm.all_reduce(self.tensor, self.tensor)
        except zpccl.PeerLost:
            return "failed" if self.tensor.tobytes() == given.tobytes() else "a buffer was not restored"
        except zpccl.PCCLError as error:
            return f"unexpected error: {error}"
        for end, numbers in (("all", everyone), ("went on", survivors)):
            is_sum = worst_error(self.tensor[:-1], pattern(numbers, self.dtype)) == 0.0
            if is_sum and self.tensor[-1] == self._marks(number, len(numbers)):
                return end
        return "a sum was wrong"

    def _marks(self, number: int, peers: int) -> Any:
        """The sum of the last elements of this many peers in a call; it wraps around in small types, as sums do."""
        return np.int64(number % MARKS * peers).astype(self.dtype)


def judge(reports: list[dict[str, Any]]) -> list[str]:
    """Problems in the reports of the survivors of one kill."""
    problems = []
    if len({(report["call"], report["end"]) for report in reports}) > 1:
        told = sorted(f"call {report['call']}: {report['end']}" for report in reports)
        problems.append(f"survivors disagree: {'; '.join(told)}")
    problems += [report["end"] for report in reports if report["end"] not in ("failed", "went on")]
    return problems + [f"then {report['retry']}" for report in reports if report["retry"] != "right"]


class Calls(Experiment):
    """The peers, and the rounds so far."""

    peer_class = CallingPeer

    def kill_once(self) -> dict[str, Any]:
        """Makes many calls, with a kill among them."""
        everyone = list(self.workers)
        victim_number = self.random.choice(everyone)
        survivors = [number for number in everyone if number != victim_number]
        for worker in self.workers.values():
            worker.begin("call_until_lost", everyone, survivors)
        time.sleep(self.random.uniform(0.0, KILL_AFTER_S_MAX))  # The kill comes at a random moment.
        victim = self.workers.pop(victim_number)
        victim.kill()
        victim.close()
        reports = [worker.result() for worker in self.workers.values()]
        return {"call": reports[0]["call"], "end": reports[0]["end"], "problems": judge(reports)}

    def play(self) -> None:
        """Plays all rounds."""
        for number in range(1, self.options.rounds + 1):
            self.fill_up()
            self.rounds.append(self.kill_once())
            for problem in self.rounds[-1]["problems"]:
                say(f"round {number}: {problem}")
            if number % REPORTED_EVERY == 0:
                say(f"{number} kills: {dict(collections.Counter(outcome['end'] for outcome in self.rounds))}")

    def summary(self) -> Row:
        """Summarises the results in one row."""
        problems = [problem for outcome in self.rounds for problem in outcome["problems"]]
        ends = collections.Counter(outcome["end"] for outcome in self.rounds)
        row: Row = {name: vars(self.options)[name] for name in ("peers", "bytes", "connections", "dtype")}
        row |= {"rounds": len(self.rounds), "calls": sum(outcome["call"] for outcome in self.rounds)}
        row |= {"failed": ends["failed"], "went_on": ends["went on"]}
        return row | {"promises_kept": not problems, "problems": problems}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--peers", 4, type=whole(3, 64))
    add(parser, "--bytes", "4KiB")
    add(parser, "--rounds", 100, "kills", type=positive)
    add(parser, "--connections", 4)
    add(parser, "--dtype", "float32")
    add(parser, "--seed", 0)


def measure(options: argparse.Namespace) -> Rows:
    return measure_with(Calls, options)


SCENARIO = Scenario(__doc__, add_arguments, measure, "Peers killed at any moment of small calls")
