"""Cuts hosts and paths off silently, again and again, and measures when the others notice and when they go on.

Each round makes a network of namespaces: a host for the master and one for each peer. All peers all-reduce one tensor
in place, over and over, and at a random moment of that the router begins to drop packets, of

  host   all that one peer sends or is sent: the others shall go on without it, and it shall be told so when it is back;
  path   all between two neighbours of the ring, who both reach the master: all shall go on, in another order;
  idle   the same, cut before the run's first all-reduce.

No RST and no ICMP message tells anybody of it. Times are of the slowest peer that stays, from the cut to the error of
the call that was under way, and to the next all-reduce that is committed, with the right sum in all that stay.

Exit status: 0 if every promise was kept, 1 if not. It needs Linux and root.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from typing import Any

import numpy as np
from measuring import (
    Peer,
    Row,
    Worker,
    add_output_arguments,
    call_all,
    close_all,
    fill_with,
    format_bytes,
    parse_bytes,
    pattern,
    peer_count,
    positive,
    print_table,
    run_tool,
    say,
    worst_error,
    write_json,
)
from networks import Network, enter

import zpccl
from zpccl.control.keys import master_keys
from zpccl.control.master_loop import MasterLoop

KINDS = ("host", "path", "idle")
CONNECTIONS = 4
WARM_UPS = 3
UNNOTICED_S = 60.0
"""A cut that has had no effect for so long is taken to have none."""
NS = 1e9


class Master:
    """A master on a host of its own, to be held by a `Worker`."""

    def __init__(self, namespace: str, host: str, heartbeat_timeout_s: float, secret: str | None = None) -> None:
        enter(namespace)
        self._loop = MasterLoop(
            f"{host}:0",
            heartbeat_timeout_ns=int(heartbeat_timeout_s * NS),
            keys=master_keys(secret),
            recovery_grace=0.1,
        )
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()

    def address(self) -> str:
        """Where it listens."""
        return self._loop.address

    def close(self) -> None:
        """Stops it."""
        self._loop.stop()
        self._thread.join()


class HostPeer(Peer):
    """A peer on a host of its own, with one tensor.

    Args:
        namespace: of its host.
        address: of the master.
        number: tells what it contributes.
        size_bytes: of the tensor.
        heartbeat_timeout_s: of the communicator.
    """

    def __init__(self, namespace: str, address: str, number: int, size_bytes: int, heartbeat_timeout_s: float) -> None:
        enter(namespace)
        super().__init__(address, CONNECTIONS, listen=None, heartbeat_timeout=heartbeat_timeout_s)
        self.tensor = np.empty(max(2, size_bytes // 4), np.float32)
        self.before = np.empty_like(self.tensor)
        fill_with(self.before, pattern([number], "float32"))

    def reduce(self) -> float:
        """All-reduces; returns the seconds."""
        self.tensor[:] = self.before
        began_ns = time.monotonic_ns()
        self.comm.all_reduce(self.tensor, self.tensor)
        return (time.monotonic_ns() - began_ns) / NS

    def survive(self, staying: list[int], must_fail: bool) -> dict[str, Any]:
        """All-reduces until the sum is that of those who stay, after a call has failed if `must_fail`.

        Args:
            staying: the numbers of the peers whose sum is due in the end.
            must_fail: the same peers took part before, so calls before the first that fails do not count.

        Returns:
            `errors_ns`: when calls failed; `texts`: why; `restored`: whether the tensor was as before each time;
            `committed_ns`: when the last one had succeeded, or None if it has not in UNNOTICED_S. Or else `removed`:
            why this peer takes part no more.
        """
        errors_ns: list[int] = []
        texts: list[str] = []
        restored, deadline_ns = True, time.monotonic_ns() + int(UNNOTICED_S * NS)
        due = pattern(staying, "float32")
        while time.monotonic_ns() < deadline_ns:
            self.tensor[:] = self.before
            try:
                self.comm.all_reduce(self.tensor, self.tensor, timeout=UNNOTICED_S)
            except zpccl.PeerLost as error:
                errors_ns.append(time.monotonic_ns())
                texts.append(str(error))
                restored = restored and bool(np.array_equal(self.tensor.view(np.uint8), self.before.view(np.uint8)))
                continue
            except zpccl.PCCLError as error:
                return {"errors_ns": errors_ns, "removed": str(error)}
            committed_ns = time.monotonic_ns()
            if (must_fail and not errors_ns) or self.tensor[1] != due[1]:  # Quickly, to be in a call nearly always.
                continue
            if worst_error(self.tensor, due) == 0.0:
                return {"errors_ns": errors_ns, "texts": texts, "restored": restored, "committed_ns": committed_ns}
        return {"errors_ns": errors_ns, "texts": texts, "restored": restored, "committed_ns": None}


def play_round(kind: str, options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """One cut, in a run of its own; returns what it showed."""
    with Network(options.peers + 1) as network:
        master = Worker("master", Master, network.namespace(0), network.address(0), options.heartbeat_timeout)
        workers: list[Worker] = []
        try:
            address = master.call("address")
            for number in range(options.peers):
                settings = (network.namespace(number + 1), address, number, options.bytes, options.heartbeat_timeout)
                workers.append(Worker(f"peer {number}", HostPeer, *settings))
            return cut_once(kind, network, workers, rng)
        finally:
            close_all([*workers, master])


def cut_once(kind: str, network: Network, workers: list[Worker], rng: random.Random) -> dict[str, Any]:
    """Joins, cuts, and waits for what becomes of it."""
    ranks: list[int] = call_all(workers, "join", len(workers))
    by_rank = sorted(range(len(workers)), key=ranks.__getitem__)
    one, other = by_rank[1], by_rank[2]
    staying = [number for number in range(len(workers)) if number != one or kind != "host"]
    delay_s = 0.0
    if kind != "idle":
        seconds = [max(call_all(workers, "reduce")) for _ in range(WARM_UPS)]
        delay_s = rng.uniform(1.0, 2.0) * statistics.median(seconds)  # Somewhere in the second one from now.
        for worker in workers:
            worker.begin("survive", staying, kind == "path")  # Without one host, sums are others.
        time.sleep(delay_s)
    cut_ns = time.monotonic_ns()
    if kind == "host":
        network.cut_host(one + 1)
    else:
        network.cut(one + 1, other + 1)
    if kind == "idle":
        for worker in workers:
            worker.begin("survive", staying, False)
    reports = [workers[number].result() for number in staying]
    network.heal()
    removed = workers[one].result().get("removed", "") if kind == "host" else ""
    return judge(kind, cut_ns, reports, removed)


def judge(kind: str, cut_ns: int, reports: list[dict[str, Any]], removed: str) -> dict[str, Any]:
    """What a round showed, as seconds after the cut, and what was not as promised."""
    problems = [f"a peer that could have stayed was removed: {r['removed']}" for r in reports if "removed" in r]
    whole = [report for report in reports if "removed" not in report]
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
    """The rounds of one kind as one record."""
    row: Row = {"cut": kind, "peers": options.peers, "bytes": options.bytes, "rounds": len(rounds)}
    row["heartbeat_timeout_seconds"] = options.heartbeat_timeout
    for name in ("seconds_to_error", "seconds_to_commit"):
        values = [outcome[name] for outcome in rounds if outcome[name] is not None]
        for what, function in (("median", statistics.median), ("min", min), ("max", max)):
            row[f"{name}_{what}"] = function(values) if values else None
    row["failed_calls_max"] = max(outcome["failed_calls"] for outcome in rounds)
    row["problems"] = [text for outcome in rounds for text in outcome["problems"]]
    return row


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut", choices=KINDS, nargs="+", default=list(KINDS), help="what to cut (default all three)")
    parser.add_argument("--peers", type=peer_count, default=4, help="peers of the run, 4 or more (default 4)")
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("64MiB"), help="of the tensor (default 64MiB)")
    parser.add_argument("--rounds", type=positive, default=5, help="cuts of each kind (default 5)")
    default_s = zpccl.limits.HEARTBEAT_TIMEOUT_NS / NS
    parser.add_argument(
        "--heartbeat-timeout", type=float, default=default_s, help=f"of the run, in seconds (default {default_s:g})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of moments (default 0)")
    add_output_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.peers < 4:
        parser.error("--peers: at least 4, as a ring of three needs every path")
    rng = random.Random(options.seed)

    def play() -> int:
        rows = []
        for kind in options.cut:
            rounds = []
            for number in range(options.rounds):
                outcome = play_round(kind, options, rng)
                rounds.append(outcome)
                say(f"{kind} {number + 1}: " + ", ".join(f"{name} {text(value)}" for name, value in outcome.items()))
            rows.append(summarise(kind, options, rounds))
        write_json(options.json, rows)
        columns = [name for name in rows[0] if name not in ("bytes", "problems")]
        print_table(
            f"Silent cuts while {options.peers} peers all-reduce {format_bytes(options.bytes)}",
            columns,
            [[text(row[name]) for name in columns] for row in rows],
        )
        return 1 if any(row["problems"] for row in rows) else 0

    return run_tool(play)


def text(value: Any) -> str:
    """A value for people."""
    return f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
