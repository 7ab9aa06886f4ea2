"""Repeatedly kills the master at random times, restarts it, and checks that no call fails.

All peers run a loop: are_peers_pending, an all-reduce, and every few steps a sync of shared state. Meanwhile the master
is killed (SIGKILL) and restarted on the same port after 0 to 5 seconds. No call may fail, all peers must have identical
results, and the revision of the shared state must continue. The cost of a kill is the extra time of the calls that were
in progress.

With --standby the peers know two masters. The leading one is killed and stays down until the other one
has taken over the run. Then it is restarted, as the standby for the next kill.

With --rolling 3 --seconds 300 two masters are killed in turn, one every 3 s, and restarted at once, whether or not the
other one leads by then. Meanwhile an additional peer, the visitor, joins and leaves all the time.

With one address, a new master waits a second for peers that may know more than the present ones. If all masters are
killed sooner than that (--pause 1), no call ends until the last master leads.

With --wan 150,1 the masters are on their own hosts; the paths to them have a one-way delay of 150 ms and lose 1 % of
the packets. This needs Linux and root (tools/wan). All peers are on one host. A take-over takes seconds there, so leave
time for it between two kills, for example with --pause 10: otherwise the master dies before any call has ended.

In all cases the run must have one history: every member list shares a majority with the one before it, peers that know
the same epoch have the same list, no two masters lead in the same term, and no peer changes its run or goes back to an
earlier list. A call that fails breaks a promise and ends the tool.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import Row, Rows, WorkerFailed, above_zero, add, format_bytes, positive, say, spread, zero_or_more
from wan.emulated import EmulatedNetwork
from wan.settings import Settings
from workers import LOOPBACK, Hosts, Master, Peer, Worker, call_all, ended_workers

import zpccl
from benchmarks.scenario import Scenario

STEPS_BETWEEN_SYNCS = 4
PAUSE_S_MIN = 0.2
"""Minimum time from the start of a master to its kill."""
TAKEOVER_TIMEOUT_S = 60
END_S = 90.0
"""Timeout for the peers to finish after the last kill."""
VISITOR = "visitor"
VISITOR_END_S = 15.0
FIRST_VISIT_S = 60.0
"""Timeout for the first visit after the last kill, if the machine was too busy for an earlier one."""
VISIT_INTERVAL_S = 0.05
ROLLING_PAUSE_S = 0.02
VISITOR_PAUSE_S_MAX = 0.5
VISIT_STEPS_MAX = 20
TAKE_OVER = "taking over the run"
MS_NS, NS = 1e6, 1e9


class LoopingPeer(Peer):
    """A peer that runs a training loop until it is told to stop.

    Args:
        address: of the masters.
        number: determines its contribution.
        size_bytes: of the tensor.
        pause_s: pause between steps, which leaves CPU time to starting masters.
    """

    def __init__(self, address: str, number: int, size_bytes: int, pause_s: float) -> None:
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
        self.lists: list[tuple[int, list[str]]] = []
        self.failures: list[str] = []
        self.leaver_failures = 0

    def _call(self, function: Callable[[], Any]) -> Any:
        """Makes a call, with retry on PeerLost, and records its result and the member list after it."""
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
            known = view.epoch, [name for _, _, name in view.members]
            if self.lists[-1:] != [known]:
                self.lists.append(known)
            return value

    def _view(self) -> Any:
        assert self.comm._loop is not None
        return self.comm._loop.view

    def _run_id(self) -> str:
        assert self.comm._loop is not None
        return self.comm._loop._machine.run_id.hex()

    def _step(self, is_over: bool) -> bool:
        """One step of the loop. True if any peer has announced it as the last one."""
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
        """Admits pending peers, and syncs."""
        if self._call(self.comm.are_peers_pending):
            self._call(self.comm.update_topology)
            self._sync()

    def loop(self, stop: str) -> dict[str, Any]:
        """Runs until the file `stop` exists; all peers end with the same step."""
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
        """Repeatedly joins, trains for some steps and leaves, until the file `stop` exists.

        `stop`.visited counts the visits so far: the visitor may still wait for members that have left.
        """
        rng, path, visits, errors = random.Random(seed), Path(stop), 0, []
        while not path.exists():
            self._begin()
            try:
                self.comm.connect()
                if self.comm.world_size > 1:  # Otherwise the others have ended.
                    self._sync()
                    for _ in range(rng.randint(1, VISIT_STEPS_MAX)):
                        if self._step(is_over=False):
                            break
                        self._admit()
                    visits += 1
                    path.with_suffix(".visited").write_text(str(visits), encoding="ascii")
            except zpccl.PCCLError as error:
                errors.append(f"{type(error).__name__}: {error}")
            self.comm.close()
            if not path.exists():
                time.sleep(rng.uniform(0.0, VISITOR_PAUSE_S_MAX))
                Peer.__init__(self, self.address, **self.options)  # type: ignore[arg-type]
        return {"visits": visits, "errors": errors}


def kill_and_replace(masters: list[Master], absence_s: float) -> tuple[int, int]:
    """Kills masters[0], which leads. Returns the times of the kill and of the next leadership (nanoseconds)."""
    leader = masters[0]
    killed_ns = leader.kill()
    if len(masters) == 1:
        time.sleep(absence_s)
        leader.start()
        return killed_ns, time.monotonic_ns()
    masters[1].wait_for_log(TAKE_OVER, TAKEOVER_TIMEOUT_S)
    back_ns = time.monotonic_ns()
    leader.start()
    masters.append(masters.pop(0))
    return killed_ns, back_ns


def kill_often(masters: list[Master], options: argparse.Namespace) -> list[tuple[int, int]]:
    """Kills masters as the options say. Returns the times of each kill and of the next leadership (nanoseconds)."""
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
        time.sleep(rng.uniform(PAUSE_S_MIN, options.pause))  # At a random time.
        killed_ns, back_ns = kill_and_replace(masters, rng.uniform(0.0, options.absence))
        kills.append((killed_ns, back_ns))
        say(f"kill {number + 1}: away for {(back_ns - killed_ns) / MS_NS:.0f} ms")
    return kills


def run_loop(workers: list[Worker], masters: list[Master], options: argparse.Namespace) -> dict[str, Any]:
    """Runs the loops of the peers (with --rolling the last one is the visitor), and kills masters meanwhile."""
    visitor = workers[options.peers] if len(workers) > options.peers else None
    visits: dict[str, Any] = {"visits": 0, "errors": []}
    with tempfile.TemporaryDirectory() as directory:
        stop = Path(directory) / "stop"
        for worker in workers[: options.peers]:
            worker.begin("loop", str(stop))
        if visitor is not None:
            visitor.begin("visit", str(stop), options.seed)
        kills = kill_often(masters, options)
        time.sleep(options.pause)
        if visitor is not None:
            deadline, visited = time.monotonic() + FIRST_VISIT_S, stop.with_suffix(".visited")
            while not visited.exists() and time.monotonic() < deadline:
                time.sleep(VISIT_INTERVAL_S)
        stop.touch()
        results = [worker.result(END_S) for worker in workers[: options.peers]]
        if visitor is not None:
            try:
                visits = visitor.result(VISITOR_END_S)
            except WorkerFailed as error:  # The visitor may wait for members that have left.
                visits["errors"].append(str(error))
                visitor.kill()
                if visited.exists():
                    visits["visits"] = int(visited.read_text(encoding="ascii"))
    return summarise(options, kills, results, visits, [master.terms() for master in masters])


def broken_history(results: list[dict[str, Any]], terms: list[list[int]]) -> list[str]:
    """Evidence from the peers' member lists and the masters' logs that the run has more than one history."""
    problems = []
    lists: dict[int, list[str]] = {}
    for result in results:
        for epoch, names in result["lists"]:
            if sorted(lists.setdefault(epoch, names)) != sorted(names):
                problems.append(f"epoch {epoch} has two lists: {lists[epoch]} and {names}")
        epochs = [epoch for epoch, _ in result["lists"]]
        if epochs != sorted(epochs):
            problems.append("a peer went back in epochs")
        if not result["one_run"]:
            problems.append("a peer changed its run")
    for (epoch, before), (later, after) in itertools.pairwise(sorted(lists.items())):
        if 2 * len(set(before) & set(after)) < len(before):
            problems.append(f"the list of epoch {later} does not descend from that of {epoch}: {before}, {after}")
    numbers = [number for of_master in terms for number in of_master]
    if len(set(numbers)) < len(numbers):
        problems.append(f"two masters led in the same term: {sorted(numbers)}")
    return problems


def summarise(
    options: argparse.Namespace,
    kills: list[tuple[int, int]],
    results: list[dict[str, Any]],
    visits: dict[str, Any],
    terms: list[list[int]],
) -> Row:
    """Summarises the results in one row. A call is affected by a kill if it was in progress before the next answer."""
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
                if not options.rolling:  # With --rolling another one led long before.
                    after.append((ended - back_ns) / MS_NS)
    steps = {result["steps"] for result in results}
    revisions = {result["revision"] for result in results}
    equal = len({result["digest"] for result in results}) == 1 and len(steps) == 1 and len(revisions) == 1
    goes_on = revisions == {step // STEPS_BETWEEN_SYNCS for step in steps}
    problems = [text for result in results for text in result["failures"]] + broken_history(results, terms)
    problems += [] if equal else ["the peers' results differ"]
    problems += [] if goes_on else [f"after {max(steps)} steps the revisions are {sorted(revisions)}"]
    problems += [] if extra else ["no call was under way while a master was away"]
    if options.rolling and not visits["visits"]:
        problems.append(f"no visit came to its end: {'; '.join(visits['errors'][-3:])}")
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
        "member_lists": len({epoch for result in results for epoch, _ in result["lists"]}),
        "takeovers": sum(len(of_master) for of_master in terms),
        "ms_usual_median": usual_ms,
        **spread(extra, "ms_extra"),
        **spread(after, "ms_after_restart"),
        "digests_equal": equal,
        "revision_goes_on": goes_on,
        "problems": problems,
        "promises_kept": not problems,
    }


def parse_wan(text: str) -> str:
    """Parses "delay,loss" from the command line into settings of a network."""
    delay, _, loss = text.partition(",")
    try:
        words = f"delay_ms={float(delay):g} loss={float(loss or 0):g}%"
        Settings(2).with_line(f"link * * {words}")
        return words
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a delay in ms, a comma and a loss in percent") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--peers", 4)
    add(parser, "--kills", 20, "of the master", type=positive)
    add(parser, "--bytes", "1MiB")
    add(parser, "--absence", 5, "seconds without a master, at most", type=zero_or_more)
    add(parser, "--pause", 3, "seconds from the start of a master to its kill, at most", type=above_zero)
    parser.add_argument("--standby", action="store_true", help="peers know two masters, as with --rolling")
    add(parser, "--rolling", 0, "restart two masters in turn, every so many seconds", type=zero_or_more)
    add(parser, "--seconds", 60, "of a rolling restart", type=above_zero)
    parser.add_argument("--wan", type=parse_wan, metavar="MS,PERCENT", help="delay one way and loss to masters")
    add(parser, "--grace", 1, "recovery grace of the master, seconds", type=zero_or_more)
    add(parser, "--seed", 0)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.masters = 2 if options.rolling or options.standby else 1
    if options.rolling and options.seconds < options.rolling:
        parser.error("--seconds: not one restart has room")


@contextlib.contextmanager
def hosts_of(options: argparse.Namespace) -> Iterator[Hosts]:
    """One host per master, and one for all peers; loopback without --wan."""
    if options.wan is None:
        yield LOOPBACK
        return
    settings = Settings(options.masters + 1).with_lines([f"link * * {options.wan}"])
    with EmulatedNetwork(settings, options.seed) as network:
        yield Hosts(network)


def measure(options: argparse.Namespace) -> Rows:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(hosts_of(options))
        masters = [
            stack.enter_context(Master(hosts, number, log=directory / f"master{number}.log", grace_s=options.grace))
            for number in range(options.masters)
        ]
        workers = stack.enter_context(ended_workers())
        address = ",".join(master.address for master in masters)
        what = options.bytes, ROLLING_PAUSE_S if options.rolling else 0.0
        for number in range(options.peers):
            workers.append(hosts.start(options.masters, f"peer {number}", LoopingPeer, address, number, *what))
        call_all(workers, "join", options.peers)
        if options.rolling:
            workers.append(hosts.start(options.masters, VISITOR, LoopingPeer, address, -1, *what))
            workers[-1].call("ready")
        say(f"{options.peers} peers all-reduce {format_bytes(options.bytes)} and sync")
        yield run_loop(workers, masters, options)


SCENARIO = Scenario(__doc__, add_arguments, measure, "The master killed, another in its place", check=check)
