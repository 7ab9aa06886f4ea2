"""Kills the master at random moments, again and again, starts another in its place, and checks that nobody notices.

All peers run one loop: a question for newcomers, an all-reduce, and every few steps a sync of shared state. Meanwhile
the master gets SIGKILL and is started again, on the same port, after 0 to 5 seconds. No call may fail, all peers must
have the same results bit for bit, and the revision of the shared state must go on. What a kill costs is the time that
the calls which saw it took longer than others.

With --masters 2 (or --standby) the peers know two masters. The one that leads is killed and stays away: the other one
takes the run over. Only then is the first started again, as the standby of the next kill.

With --rolling 3 --seconds 300 two masters are killed in turn, one every 3 s, and started again at once, whether or not
the other leads by then. Beside the others a visitor joins and leaves all the time.

With --wan 150,1 the masters are hosts of their own, and the paths to them have 150 ms of delay each way and lose 1 % of
the packets: needs Linux and root (tools/wan). The peers are one host.

Whatever is done, the run must have one history: every member list shares a majority with the one before it, peers that
know the same epoch know the same list, no two masters lead under one number, and no peer changes its run.

Exit status: 0 if every promise was kept, 1 if not: a call that fails ends the tool.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measuring import (
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
from networks import Namespaces, enter
from wan.choose import make_network
from wan.settings import Settings

import zpccl

STEPS_BETWEEN_SYNCS = 4
PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 1.0
"""How long a new master may work before it is killed."""
TAKEOVER_TIMEOUT_S = 60
LOG_INTERVAL_S = 0.005
END_S = 90.0
"""How long the peers may take to their last step, once no master is killed any more."""
VISITOR = "visitor"
VISITOR_END_S = 15.0
ROLLING_PAUSE_S = 0.02
VISITOR_PAUSE_S_MAX = 0.5
VISIT_STEPS_MAX = 20
TAKE_OVER = b"taking over the run"
MS_NS, NS = 1e6, 1e9


class LoopingPeer(Peer):
    """A peer that runs a training loop until it is told to stop.

    Args:
        namespace: of its host; "": this one.
        address: of the masters.
        number: tells what it contributes.
        size_bytes: of the tensor.
        pause_s: between two steps, for those who need the CPUs: masters that start.
    """

    def __init__(self, namespace: str, address: str, number: int, size_bytes: int, pause_s: float) -> None:
        if namespace:
            enter(namespace)
        self.address = address
        self.options = {"connections": 2, "name": VISITOR if number < 0 else f"peer{number}"}
        super().__init__(address, **self.options)  # type: ignore[arg-type]
        self.number, self.pause_s = number, pause_s
        self.send = np.empty(max(2, size_bytes // 4), np.float32)
        self.recv = np.empty_like(self.send)
        self._begin()

    def _begin(self) -> None:
        self.weights = np.zeros(1024, np.float32)
        self.step = np.zeros(1, np.int64)
        self.state = zpccl.SharedState(
            [zpccl.TensorInfo.from_numpy(self.weights, "weights"), zpccl.TensorInfo.from_numpy(self.step, "step")]
        )
        self.calls: list[tuple[int, int]] = []
        self.lists: dict[int, list[str]] = {}
        self.failures: list[str] = []
        self.leaver_failures = 0

    def _call(self, function: Callable[[], Any]) -> Any:
        """Makes a call, again where a peer was lost, and takes note of how it went and of the member list after it."""
        while True:
            began_ns = time.monotonic_ns()
            try:
                value = function()
            except zpccl.PeerLost as error:
                if VISITOR in error.peers:
                    self.leaver_failures += 1
                else:
                    self.failures.append(str(error))
                continue
            self.calls.append((began_ns, time.monotonic_ns()))
            view = self._view()
            self.lists.setdefault(view.epoch, [name for _, _, name in view.members])
            return value

    def _view(self) -> Any:
        assert self.comm._loop is not None
        return self.comm._loop.view

    def _run_id(self) -> str:
        assert self.comm._loop is not None
        return self.comm._loop._machine.run_id.hex()

    def _step(self, is_over: bool) -> bool:
        """One step of training. True if somebody said that it is the last."""
        time.sleep(self.pause_s)
        self.send[:] = abs(self.number) + int(self.step[0]) % 7
        self.send[0] = 1000.0 if is_over else 0.0
        self._call(lambda: self.comm.all_reduce(self.send, self.recv))
        self.weights += self.recv[1]
        self.step += 1
        if self.step[0] % STEPS_BETWEEN_SYNCS == 0:
            self._sync()
            self.state.push_revision()
        return bool(self.recv[0] >= 1000.0)

    def _sync(self) -> None:
        self._call(lambda: self.comm.sync_shared_state(self.state))

    def _admit(self) -> None:
        """Lets in who waits, and gives it the state."""
        if self._call(self.comm.are_peers_pending):
            self._call(self.comm.update_topology)
            self._sync()

    def loop(self, stop: str) -> dict[str, Any]:
        """Runs until the file `stop` is there; all peers end with the same step."""
        digest, path, run_id, error = hashlib.blake2b(), Path(stop), self._run_id(), ""
        is_over = False
        try:
            while not is_over:
                self._admit()
                is_over = self._step(path.exists())
                digest.update(self.recv.tobytes())
        except zpccl.PCCLError as fatal:
            error = f"{self.options['name']}: {type(fatal).__name__}: {fatal}"
        digest.update(self.weights.tobytes())
        return {
            "steps": int(self.step[0]),
            "calls": self.calls,
            "digest": digest.hexdigest(),
            "revision": self.state.revision,
            "lists": self.lists,
            "failures": self.failures + [error] * bool(error),
            "leaver_failures": self.leaver_failures,
            "one_run": self._run_id() == run_id,
        }

    def visit(self, stop: str, seed: int) -> dict[str, Any]:
        """Joins, trains for some steps and leaves, again and again until the file `stop` is there."""
        rng, path, visits, errors = random.Random(seed), Path(stop), 0, []
        while not path.exists():
            self._begin()
            try:
                self.comm.connect()
                if self.comm.world_size > 1:  # Else the others have just ended.
                    self._sync()
                    for _ in range(rng.randint(1, VISIT_STEPS_MAX)):
                        if self._step(is_over=False):
                            break
                        self._admit()
                    visits += 1
            except zpccl.PCCLError as error:
                errors.append(f"{type(error).__name__}: {error}")
            self.comm.close()
            if not path.exists():
                time.sleep(rng.uniform(0.0, VISITOR_PAUSE_S_MAX))
                Peer.__init__(self, self.address, **self.options)  # type: ignore[arg-type]
        return {"visits": visits, "errors": errors}


class MasterProcess:
    """A zpccl-master on a port of its own, which can be killed and started again.

    Args:
        grace_s: seconds that it waits for peers.
        log: file that gets what it logs, of all its lives.
        place: its host in a network, and that one's address; None: this host.
    """

    def __init__(self, grace_s: float, log: Path, place: tuple[Namespaces, int] | None = None) -> None:
        self.log = log
        self._place = place
        if place is None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        else:
            self.address = f"{place[0].address(place[1])}:{zpccl.limits.MASTER_PORT}"
        self._command = [sys.executable, "-m", "zpccl.cli.master", "--bind", self.address, "--log-level", "info"]
        self._command += ["--recovery-grace", str(grace_s)]
        self._process: subprocess.Popen[str] | None = None
        self._log_bytes = 0  # Of earlier lives.

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        self._log_bytes = self.log.stat().st_size if self.log.exists() else 0
        self._process = self._begin() if self._place is None else self._place[0].run(self._place[1], self._begin)
        assert self._process.stdout is not None
        if MASTER_GREETING not in self._process.stdout.readline():
            raise WorkerFailed("the master did not start")

    def _begin(self) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def wait_until_it_leads(self) -> None:
        """Waits until it has taken the run over, by its log."""
        deadline = time.monotonic() + TAKEOVER_TIMEOUT_S
        while TAKE_OVER not in self.log.read_bytes()[self._log_bytes :]:
            if time.monotonic() > deadline:
                raise WorkerFailed(f"no standby has taken the run over: {self.log.read_text()}")
            time.sleep(LOG_INTERVAL_S)

    def terms(self) -> list[int]:
        """The numbers under which it has led, by its log."""
        return [int(number) for number in re.findall(rb"taking over the run.* in term (\d+)", self.log.read_bytes())]

    def kill(self) -> int:
        """SIGKILL, which is on its way at the time returned (nanoseconds of `time.monotonic_ns`)."""
        now_ns = time.monotonic_ns()
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
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


def kill_often(masters: list[MasterProcess], options: argparse.Namespace) -> list[tuple[int, int]]:
    """Kills masters as the options say. Returns when, and when another one led, or could (nanoseconds)."""
    rng = random.Random(options.seed)
    kills: list[tuple[int, int]] = []
    if options.rolling:
        began = time.monotonic()
        while (next_s := (len(kills) + 1) * options.rolling) <= options.seconds:
            time.sleep(max(0.0, began + next_s - time.monotonic()))
            master = masters[len(kills) % len(masters)]
            killed_ns = master.kill()
            master.start()
            kills.append((killed_ns, time.monotonic_ns()))
        say(f"{len(kills)} restarts in {time.monotonic() - began:.0f} s")
        return kills
    for number in range(options.kills):
        time.sleep(rng.uniform(PAUSE_S_MIN, PAUSE_S_MAX))  # The moment of a kill is any.
        killed_ns, back_ns = kill_and_replace(masters, rng.uniform(0.0, options.absence))
        kills.append((killed_ns, back_ns))
        say(f"kill {number + 1}: away for {(back_ns - killed_ns) / MS_NS:.0f} ms")
    return kills


def run_loop(workers: list[Worker], masters: list[MasterProcess], options: argparse.Namespace) -> dict[str, Any]:
    """Lets the peers loop, the last one as a visitor if there is one, and kills masters meanwhile."""
    visitor = workers[options.peers] if len(workers) > options.peers else None
    visits: dict[str, Any] = {"visits": 0, "errors": []}
    with tempfile.TemporaryDirectory() as directory:
        stop = Path(directory) / "stop"
        for worker in workers[: options.peers]:
            worker.begin("loop", str(stop))
        if visitor is not None:
            visitor.begin("visit", str(stop), options.seed)
        kills = kill_often(masters, options)
        time.sleep(PAUSE_S_MAX)
        stop.touch()
        results = [worker.result(END_S) for worker in workers[: options.peers]]
        if visitor is not None:
            try:
                visits = visitor.result(VISITOR_END_S)
            except WorkerFailed as error:  # It may wait for members that are gone now.
                visits["errors"].append(str(error))
                visitor.kill()
    return summarise(options, kills, results, visits, [master.terms() for master in masters])


def broken_history(results: list[dict[str, Any]], terms: list[list[int]]) -> list[str]:
    """What shows that the run has more than one history, by what peers know of it and by the masters' logs."""
    problems = []
    lists: dict[int, list[str]] = {}
    for result in results:
        for epoch, names in result["lists"].items():
            if sorted(lists.setdefault(epoch, names)) != sorted(names):
                problems.append(f"epoch {epoch} has two lists: {lists[epoch]} and {names}")
        if list(result["lists"]) != sorted(result["lists"]):
            problems.append("a peer went back in epochs")
        if not result["one_run"]:
            problems.append("a peer changed its run")
    for (epoch, before), (later, after) in itertools.pairwise(sorted(lists.items())):
        if 2 * len(set(before) & set(after)) < len(before):
            problems.append(f"the list of epoch {later} does not descend from that of {epoch}: {before}, {after}")
    numbers = [number for of_master in terms for number in of_master]
    if len(set(numbers)) < len(numbers):
        problems.append(f"one number was led under twice: {sorted(numbers)}")
    return problems


def summarise(
    options: argparse.Namespace,
    kills: list[tuple[int, int]],
    results: list[dict[str, Any]],
    visits: dict[str, Any],
    terms: list[list[int]],
) -> dict[str, Any]:
    """The results as one record. A call saw a kill if it was under way between the kill and the next answer."""
    durations = [(ended - began) / MS_NS for result in results for began, ended in result["calls"]]
    usual_ms = statistics.median(durations) if durations else 0.0
    extra: list[float] = []
    after: list[float] = []
    for killed_ns, back_ns in kills:
        for result in results:
            seen = [(b, e) for b, e in result["calls"] if e > killed_ns and b < back_ns]
            if seen:
                began, ended = max(seen, key=lambda call: call[1] - call[0])
                extra.append((ended - began) / MS_NS - usual_ms)
                if not options.rolling:  # Else another one led long before.
                    after.append((ended - back_ns) / MS_NS)
    steps = {result["steps"] for result in results}
    revisions = {result["revision"] for result in results}
    equal = len({result["digest"] for result in results}) == 1 and len(steps) == 1 and len(revisions) == 1
    goes_on = revisions == {step // STEPS_BETWEEN_SYNCS for step in steps}
    problems = [text for result in results for text in result["failures"]] + broken_history(results, terms)
    return {
        "peers": options.peers,
        "bytes": options.bytes,
        "kills": len(kills),
        "masters": options.masters,
        "seconds_away_max": max((back_ns - killed_ns) / NS for killed_ns, back_ns in kills),
        "steps": max(steps),
        "calls": len(durations),
        "calls_that_saw_a_kill": len(extra),
        "failed_calls": sum(len(result["failures"]) for result in results),
        "calls_failed_by_leavers": sum(result["leaver_failures"] for result in results),
        "visits": visits["visits"],
        "visitor_errors": len(visits["errors"]),
        "member_lists": len({epoch for result in results for epoch in result["lists"]}),
        "takeovers": sum(len(of_master) for of_master in terms),
        "ms_usual_median": usual_ms,
        "ms_extra_median": statistics.median(extra) if extra else 0.0,
        "ms_extra_max": max(extra, default=0.0),
        "ms_after_restart_median": statistics.median(after) if after else 0.0,
        "ms_after_restart_max": max(after, default=0.0),
        "digests_equal": equal,
        "revision_goes_on": goes_on,
        "problems": problems,
        "promises_kept": equal and goes_on and not problems and len(extra) > 0,
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=peer_count, default=4, help="peers of the run (default 4)")
    parser.add_argument("--kills", type=positive, default=20, help="of the master (default 20)")
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("1MiB"), help="of the tensor (default 1MiB)")
    parser.add_argument("--absence", type=float, default=5.0, help="seconds without a master, at most (default 5)")
    parser.add_argument("--masters", type=int, choices=(1, 2), help="that peers know (default 1; 2 with --rolling)")
    parser.add_argument("--standby", dest="masters", action="store_const", const=2, help="the same as --masters 2")
    parser.add_argument(
        "--rolling", type=float, default=0.0, metavar="S", help="restart two masters in turn, every S s"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of a rolling restart (default 60)")
    parser.add_argument("--wan", type=parse_wan, metavar="MS,PERCENT", help="delay one way and loss to masters")
    parser.add_argument("--grace", type=float, default=1.0, help="recovery grace of the master, seconds (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of moments (default 0)")
    add_output_arguments(parser)
    return parser


def parse_wan(text: str) -> str:
    """Delay and loss from the command line, as words of a network's settings."""
    delay, _, loss = text.partition(",")
    try:
        return f"delay_ms={float(delay):g} loss={float(loss or 0):g}%"
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a delay in ms, a comma and a loss in percent") from None


@contextlib.contextmanager
def network_of(options: argparse.Namespace) -> Iterator[Namespaces | None]:
    """A host for each master, and one for all peers; None without --wan."""
    if options.wan is None:
        yield None
        return
    settings = Settings(options.masters + 1).with_lines([f"link * * {options.wan}"])
    with make_network(settings, seed=options.seed) as network:
        yield network


def play(options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything once; the record of it."""
    with tempfile.TemporaryDirectory() as directory, network_of(options) as network:
        masters = []
        for number in range(options.masters):
            place = None if network is None else (network, number)
            masters.append(MasterProcess(options.grace, Path(directory) / f"master{number}.log", place))
        address = ",".join(master.address for master in masters)
        namespace = "" if network is None else network.namespace(options.masters)
        workers: list[Worker] = []
        try:
            for master in masters:
                master.start()
            what = options.bytes, ROLLING_PAUSE_S if options.rolling else 0.0
            for number in range(options.peers):
                workers.append(Worker(f"peer {number}", LoopingPeer, namespace, address, number, *what))
            call_all(workers, "join", options.peers)
            if options.rolling:
                workers.append(Worker(VISITOR, LoopingPeer, namespace, address, -1, *what))
                workers[-1].call("ready")
            say(f"{options.peers} peers all-reduce {format_bytes(options.bytes)} and sync")
            return run_loop(workers, masters, options)
        finally:
            close_all(workers)
            for master in masters:
                master.kill()


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    options.masters = options.masters or (2 if options.rolling else 1)
    if options.rolling and options.seconds < options.rolling:
        parser.error("--seconds: not one restart has room")

    def show() -> int:
        summary = play(options)
        write_json(options.json, summary)
        rows = [[key, f"{value:.2f}" if isinstance(value, float) else str(value)] for key, value in summary.items()]
        print_table("The master killed, another in its place", ["what", "value"], rows)
        verdict = "all promises kept" if summary["promises_kept"] else "A PROMISE IS BROKEN"
        print(
            f"{verdict}: {summary['kills']} kills, {summary['takeovers']} take-overs, {summary['calls']} calls, "
            f"{summary['failed_calls']} failed, {summary['member_lists']} member lists, {summary['visits']} visits; "
            f"a kill cost {summary['ms_extra_median']:.0f} ms, {summary['ms_extra_max']:.0f} at most"
        )
        return 0 if summary["promises_kept"] else 1

    return run_tool(show)


if __name__ == "__main__":
    sys.exit(main())
