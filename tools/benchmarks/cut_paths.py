"""Silently cuts off hosts and paths, repeatedly, and measures when the others notice and when they continue.

Each round makes a network of namespaces: one host for the master and one per peer. All peers repeatedly all-reduce a
tensor in place. At a random time the router begins to drop packets:

  host   all packets of one peer: the others must continue without it, and it must learn so when it is back;
  path   all packets between two neighbours of the ring, which both reach the master: all must continue, in another
         order;
  idle   the same, but cut before the run's first all-reduce.

There are no RST or ICMP messages. Times are those of the slowest remaining peer, from the cut to the error of the call
in progress, and to the next committed all-reduce with the right sum on all remaining peers.

Needs Linux and root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import time
from typing import Any

from common import Row, Rows, above_zero, add, positive, say, spread, whole
from networks import Network
from workers import Hosts, Master, Worker, call_all, ended_workers

import zpccl
from benchmarks.kill_peer import ReducingPeer
from benchmarks.pattern import pattern
from benchmarks.scenario import Column, Scenario, plain, times

KINDS = ("host", "path", "idle")
CONNECTIONS = 4
WARM_UPS = 3
UNNOTICED_S = 60.0
"""Timeout after which a cut counts as having no effect."""
NS = 1e9


class CutPeer(ReducingPeer):
    """A peer that keeps reducing while hosts and paths are cut."""

    def go_on(self, staying: list[int], must_fail: bool) -> dict[str, Any]:
        """All-reduces until the result is the sum of the remaining peers, after a call has failed if `must_fail`.

        Each call has its own tag, so that no call is planned ahead: a call planned ahead may be planned again around a
        cut, and succeed after the same time.

        Args:
            staying: numbers of the remaining peers.
            must_fail: the same peers took part before the cut, so successful calls count only after a failed one.

        Returns:
            `errors_ns`: when calls failed; `texts`: why; `restored`: whether the tensor was unchanged each time;
            `committed_ns`: when the last call succeeded, or None after UNNOTICED_S. Or instead `removed`: why this peer
            was removed; or `failed`: the other error that ended it.
        """
        errors_ns: list[int] = []
        texts: list[str] = []
        restored, deadline_ns = True, time.monotonic_ns() + int(UNNOTICED_S * NS)
        due = pattern(staying, self.dtype)
        for tag in itertools.count(1):
            if time.monotonic_ns() >= deadline_ns:
                break
            self.refill()
            try:
                self.comm.all_reduce(self.tensor, self.tensor, tag=tag, timeout=UNNOTICED_S)
            except zpccl.PeerLost as error:
                errors_ns.append(time.monotonic_ns())
                texts.append(str(error))
                restored = restored and self.is_restored()
                continue
            except zpccl.PCCLError as error:
                how = "removed" if isinstance(error, zpccl.Kicked) else "failed"
                return {"errors_ns": errors_ns, how: str(error)}
            committed_ns = time.monotonic_ns()
            if (must_fail and not errors_ns) or self.tensor[1] != due[1]:  # Cheap; nearly always in a call.
                continue
            if self.is_sum_of(staying):
                return {"errors_ns": errors_ns, "texts": texts, "restored": restored, "committed_ns": committed_ns}
        return {"errors_ns": errors_ns, "texts": texts, "restored": restored, "committed_ns": None}


def play_round(kind: str, options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """One cut in a new run; returns the results."""
    timeout_s = options.heartbeat_timeout
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(options.peers + 1))
        hosts = Hosts(network)
        master = stack.enter_context(Master(hosts, options.peers, heartbeat_timeout_s=timeout_s))
        workers = stack.enter_context(ended_workers())
        for number in range(options.peers):
            settings = (master.address, CONNECTIONS, number, options.bytes, "float32")
            worker = hosts.start(number, f"peer {number}", CutPeer, *settings, heartbeat_timeout=timeout_s)
            workers.append(worker)
        return cut_once(kind, network, workers, rng)


def cut_once(kind: str, network: Network, workers: list[Worker], rng: random.Random) -> dict[str, Any]:
    """Joins the peers, cuts, and waits for the effects."""
    ranks: list[int] = call_all(workers, "join", len(workers))
    by_rank = sorted(range(len(workers)), key=ranks.__getitem__)
    one, other = by_rank[1], by_rank[2]
    staying = [number for number in range(len(workers)) if number != one or kind != "host"]
    delay_s = 0.0
    if kind != "idle":
        times_ms = []
        for _ in range(WARM_UPS):
            call_all(workers, "refill")
            times_ms.append(max(ms for ms, _ in call_all(workers, "reduce", list(range(len(workers))))))
        delay_s = rng.uniform(1.0, 2.0) * statistics.median(times_ms) / 1e3  # During the second call from now.
        for worker in workers:
            worker.begin("go_on", staying, kind == "path")  # If a host is missing, the sum differs.
        time.sleep(delay_s)
    cut_ns = time.monotonic_ns()
    if kind == "host":
        network.cut_host(one)
    else:
        network.cut(one, other)
    if kind == "idle":
        for worker in workers:
            worker.begin("go_on", staying, False)
    reports = [workers[number].result() for number in staying]
    network.heal()
    removed = workers[one].result().get("removed", "") if kind == "host" else ""
    return judge(kind, cut_ns, reports, removed)


def judge(kind: str, cut_ns: int, reports: list[dict[str, Any]], removed: str) -> dict[str, Any]:
    """The results of a round, in seconds after the cut, and the broken promises."""
    problems = [f"a peer that could have stayed was removed: {r['removed']}" for r in reports if "removed" in r]
    problems += [f"a peer that could have stayed failed: {r['failed']}" for r in reports if "failed" in r]
    whole = [report for report in reports if "committed_ns" in report]
    if not all(report["restored"] for report in whole):
        problems.append("a tensor was not restored")
    commits_ns = [report["committed_ns"] for report in whole if report["committed_ns"] is not None]
    if len(commits_ns) < len(whole):
        why = "; ".join(next((report["texts"] for report in whole if report["committed_ns"] is None), []))
        problems.append(f"no all-reduce with the right sum followed in {UNNOTICED_S:g} s: {why or 'no call failed'}")
    if kind == "host" and not removed:
        problems.append("the host that was cut off was not told so")
    first_errors = [report["errors_ns"][0] for report in whole if report["errors_ns"]]
    return {
        "seconds_to_error": (max(first_errors) - cut_ns) / NS if first_errors else None,
        "seconds_to_commit": (max(commits_ns) - cut_ns) / NS if commits_ns else None,
        "failed_calls": max((len(report["errors_ns"]) for report in whole), default=0),
        "problems": problems,
    }


def summarise(kind: str, options: argparse.Namespace, rounds: list[dict[str, Any]]) -> Row:
    """Summarises the rounds of one kind in one row."""
    row: Row = {"cut": kind, "peers": options.peers, "bytes": options.bytes, "rounds": len(rounds)}
    row["heartbeat_timeout_seconds"] = options.heartbeat_timeout
    for name in ("seconds_to_error", "seconds_to_commit"):
        row |= spread([outcome[name] for outcome in rounds if outcome[name] is not None], name)
    row["failed_calls_max"] = max(outcome["failed_calls"] for outcome in rounds)
    row["problems"] = [text for outcome in rounds for text in outcome["problems"]]
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--cut", list(KINDS), "what to cut", choices=KINDS)
    add(parser, "--peers", 4, "of the run; a ring of three needs every path", type=whole(4, 64))
    add(parser, "--bytes", "64MiB")
    add(parser, "--rounds", 5, "cuts of each kind", type=positive)
    timeout_s = zpccl.limits.HEARTBEAT_TIMEOUT_NS / NS
    add(parser, "--heartbeat-timeout", f"{timeout_s:g}", "of the run, in seconds", type=above_zero)
    add(parser, "--seed", 0)


def measure(options: argparse.Namespace) -> Rows:
    rng = random.Random(options.seed)
    for kind in options.cut:
        rounds = []
        for number in range(options.rounds):
            rounds.append(play_round(kind, options, rng))
            say(f"{kind} {number + 1}: " + ", ".join(f"{name} {value}" for name, value in rounds[-1].items()))
        yield summarise(kind, options, rounds)


COLUMNS = [
    *plain("cut", "peers", "bytes", "rounds"),
    *times("seconds_to_error", ".2f", "s", "to error, "),
    *times("seconds_to_commit", ".2f", "s", "to commit, "),
    Column("failed calls", "failed_calls_max"),
]

SCENARIO = Scenario(__doc__, add_arguments, measure, "Silent cuts while peers all-reduce", COLUMNS)
