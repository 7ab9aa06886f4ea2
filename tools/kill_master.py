"""Kills the master at random moments, again and again, starts another in its place, and checks that nobody notices.

All peers run one loop: a question for newcomers, an all-reduce, and every few steps a sync of shared state. Meanwhile
the master gets SIGKILL and is started again, on the same port, after 0 to 5 seconds. No call may fail, all peers must
have the same results bit for bit, and the revision of the shared state must go on. What a kill costs is the time that
the calls which saw it took longer than others.

With --standby the peers know two masters. The one that leads is killed and stays away: the other one takes the run
over. Only then is the first started again, as the standby of the next kill.

Exit status: 0 if every promise was kept, 1 if not: a call that fails ends the tool.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    END_TIMEOUT_S,
    MASTER_GREETING,
    Peer,
    Worker,
    WorkerFailed,
    add_output_arguments,
    call_all,
    close_all,
    format_bytes,
    parse_bytes,
    peer_count,
    positive,
    print_table,
    run_tool,
    say,
    write_json,
)

import zpccl

STEPS_BETWEEN_SYNCS = 4
PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 1.0
"""How long a new master may work before it is killed."""
TAKEOVER_TIMEOUT_S = 60
LOG_INTERVAL_S = 0.005
MS_NS, NS = 1e6, 1e9


class LoopingPeer(Peer):
    """A peer that runs a training loop until it is told to stop.

    Args:
        address: of the master.
        number: tells what it contributes.
        size_bytes: of the tensor.
    """

    def __init__(self, address: str, number: int, size_bytes: int) -> None:
        super().__init__(address, connections=2)
        self.number = number
        self.send = np.empty(max(2, size_bytes // 4), np.float32)
        self.recv = np.empty_like(self.send)
        self.weights = np.zeros(1024, np.float32)
        self.state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(self.weights, "weights")])

    def loop(self, stop: str) -> dict[str, Any]:
        """Runs until the file `stop` is there; all peers end with the same step."""
        digest, calls, step, is_over = hashlib.blake2b(), [], 0, False
        path = Path(stop)
        while not is_over:
            step += 1
            began_ns = time.monotonic_ns()
            self.comm.are_peers_pending()
            calls.append((began_ns, time.monotonic_ns()))
            self.send[:] = self.number + step % 7
            self.send[0] = 1000.0 if path.exists() else 0.0
            began_ns = time.monotonic_ns()
            self.comm.all_reduce(self.send, self.recv)
            calls.append((began_ns, time.monotonic_ns()))
            is_over = bool(self.recv[0] >= 1000.0)
            digest.update(self.recv.tobytes())
            self.weights += self.recv[1]
            if step % STEPS_BETWEEN_SYNCS == 0:
                began_ns = time.monotonic_ns()
                self.comm.sync_shared_state(self.state)
                calls.append((began_ns, time.monotonic_ns()))
                self.state.push_revision()
        digest.update(self.weights.tobytes())
        return {"steps": step, "calls": calls, "digest": digest.hexdigest(), "revision": self.state.revision}


class MasterProcess:
    """A zpccl-master on a port of its own, which can be killed and started again.

    Args:
        grace_s: seconds that it waits for peers.
        log: file that gets what it logs.
    """

    def __init__(self, grace_s: float, log: Path) -> None:
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._command = [sys.executable, "-m", "zpccl.cli.master", "--bind", self.address, "--log-level", "info"]
        self._command += ["--recovery-grace", str(grace_s)]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        if MASTER_GREETING not in self._process.stdout.readline():
            raise WorkerFailed("the master did not start")

    def wait_until_it_leads(self) -> None:
        """Waits until it has taken the run over, by its log."""
        deadline = time.monotonic() + TAKEOVER_TIMEOUT_S
        while "taking over the run" not in self.log.read_text():
            if time.monotonic() > deadline:
                raise WorkerFailed(f"no standby has taken the run over: {self.log.read_text()}")
            time.sleep(LOG_INTERVAL_S)

    def kill(self) -> int:
        """SIGKILL, which is on its way at the time returned (nanoseconds of `time.monotonic_ns`)."""
        assert self._process is not None
        now_ns = time.monotonic_ns()
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)
        return now_ns


def kill_and_replace(masters: list[MasterProcess], absence_s: float) -> tuple[int, int]:
    """Kills the first of `masters`, which leads. Returns when, and when another one led, or could (nanoseconds)."""
    leader = masters[0]
    killed_ns = leader.kill()
    if len(masters) == 1:
        time.sleep(absence_s)
        leader.start()
        return killed_ns, time.monotonic_ns()
    masters[1].wait_until_it_leads()
    back_ns = time.monotonic_ns()
    leader.start()
    masters.append(masters.pop(0))
    return killed_ns, back_ns


def run_loop(workers: list[Worker], masters: list[MasterProcess], options: argparse.Namespace) -> dict[str, Any]:
    """Lets the peers loop, and kills the master meanwhile."""
    rng = random.Random(options.seed)
    kills: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        stop = Path(directory) / "stop"
        for worker in workers:
            worker.begin("loop", str(stop))
        for number in range(options.kills):
            time.sleep(rng.uniform(PAUSE_S_MIN, PAUSE_S_MAX))  # The moment of a kill is any.
            killed_ns, back_ns = kill_and_replace(masters, rng.uniform(0.0, options.absence))
            kills.append((killed_ns, back_ns))
            say(f"kill {number + 1}: away for {(back_ns - killed_ns) / MS_NS:.0f} ms")
        time.sleep(PAUSE_S_MAX)
        stop.touch()
        results = [worker.result() for worker in workers]
    return summarise(options, kills, results)


def summarise(
    options: argparse.Namespace, kills: list[tuple[int, int]], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """The results as one record. A call saw a kill if it was under way between the kill and the next answer."""
    durations = [(ended - began) / MS_NS for result in results for began, ended in result["calls"]]
    usual_ms = statistics.median(durations)
    extra: list[float] = []
    after: list[float] = []
    for killed_ns, back_ns in kills:
        for result in results:
            seen = [(b, e) for b, e in result["calls"] if e > killed_ns and b < back_ns]
            if seen:
                began, ended = max(seen, key=lambda call: call[1] - call[0])
                extra.append((ended - began) / MS_NS - usual_ms)
                after.append((ended - back_ns) / MS_NS)
    steps = {result["steps"] for result in results}
    revisions = {result["revision"] for result in results}
    equal = len({result["digest"] for result in results}) == 1 and len(steps) == 1 and len(revisions) == 1
    goes_on = revisions == {step // STEPS_BETWEEN_SYNCS for step in steps}
    return {
        "peers": options.peers,
        "bytes": options.bytes,
        "kills": len(kills),
        "masters": 2 if options.standby else 1,
        "seconds_away_max": max((back_ns - killed_ns) / NS for killed_ns, back_ns in kills),
        "steps": max(steps),
        "calls": len(durations),
        "calls_that_saw_a_kill": len(extra),
        "ms_usual_median": usual_ms,
        "ms_extra_median": statistics.median(extra) if extra else 0.0,
        "ms_extra_max": max(extra, default=0.0),
        "ms_after_restart_median": statistics.median(after) if after else 0.0,
        "ms_after_restart_max": max(after, default=0.0),
        "digests_equal": equal,
        "revision_goes_on": goes_on,
        "promises_kept": equal and goes_on and len(extra) > 0,
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=peer_count, default=4, help="peers of the run (default 4)")
    parser.add_argument("--kills", type=positive, default=20, help="of the master (default 20)")
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("1MiB"), help="of the tensor (default 1MiB)")
    parser.add_argument("--absence", type=float, default=5.0, help="seconds without a master, at most (default 5)")
    parser.add_argument("--standby", action="store_true", help="a second master takes over from the one that is killed")
    parser.add_argument("--grace", type=float, default=1.0, help="recovery grace of the master, seconds (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of moments (default 0)")
    add_output_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    options = build_parser().parse_args(arguments)

    def play() -> int:
        with tempfile.TemporaryDirectory() as directory:
            logs = [Path(directory) / f"master{number}.log" for number in range(2 if options.standby else 1)]
            masters = [MasterProcess(options.grace, log) for log in logs]
            address = ",".join(master.address for master in masters)
            for master in masters:
                master.start()
            workers: list[Worker] = []
            try:
                for number in range(options.peers):
                    workers.append(Worker(f"peer {number}", LoopingPeer, address, number, options.bytes))
                call_all(workers, "join", options.peers)
                say(f"{options.peers} peers all-reduce {format_bytes(options.bytes)} and sync")
                summary = run_loop(workers, masters, options)
            finally:
                close_all(workers)
                for master in masters:
                    master.kill()
        write_json(options.json, summary)
        rows = [[key, f"{value:.2f}" if isinstance(value, float) else str(value)] for key, value in summary.items()]
        print_table("The master killed, another in its place", ["what", "value"], rows)
        return 0 if summary["promises_kept"] else 1

    return run_tool(play)


if __name__ == "__main__":
    sys.exit(main())
