"""Injects faults in the middle of a sync of shared state, and reports the outcome and its time.

Each fault gets its own run on loopback: holders have the state, joiners have different contents everywhere, and all
call `sync_shared_state`. When the first joiner has received half of the bytes it pauses until the fault has struck; so
the fault strikes in the middle, however fast the transfer is.

  none             no fault, for comparison
  holder-killed    one holder is killed (SIGKILL): the call of all others must succeed
  holders-killed   all holders are killed: the joiner's call must fail and leave its memory and its revision unchanged
  joiner-killed    the joiner is killed while another one fetches: the call of all others must succeed
  joiners-added    two more peers connect: the sync must continue; they get the state after the next update_topology
  memory-changed   the whole state of one holder is overwritten: nobody may end with those bytes; the same call again,
                   after an error if there was one, must give all peers the bytes of the other holders
  wrong-bytes      a holder sends all blocks with a flipped bit: the joiner must get the right bytes in the same call,
                   and the log of the master must name the sender

Times are those of the slowest surviving process, from the fault to the end of its call.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import blake3
import numpy as np
from common import MIB, Row, Rows, WorkerFailed, add, format_bytes
from workers import REPLY_TIMEOUT_S, Master, Peer, Worker, call_all, close_all

import zpccl
from benchmarks.scenario import Column, Scenario, plain
from benchmarks.state import fill, make_stale
from zpccl.engine.engine import EngineEvent, MessageReceived

CONNECTIONS = 4
TENSORS = 8
BLOCK_BYTES_MIN = 4096
"""Shorter messages contain no block."""
NS = 1e9


class FaultyPeer(Peer):
    """A peer whose shared state is in a memory-mapped file, which other processes can overwrite.

    Args:
        address: of the master.
        name: of the peer.
        path: of the file, which has the size of the state.
        gate: pipe on which the peer reports that it has received half, or has sent wrong bytes. In the first case it
            then waits for the signal to continue.
    """

    def __init__(self, address: str, name: str, path: Path, gate: Connection) -> None:
        super().__init__(address, CONNECTIONS, name=name)
        self.flat = np.memmap(path, np.float32, mode="r+")
        self.gate = gate
        pieces = np.array_split(np.asarray(self.flat), TENSORS)
        self.state = zpccl.SharedState(
            [zpccl.TensorInfo.from_numpy(piece, f"tensor{index}") for index, piece in enumerate(pieces)]
        )

    def prepare(self, revision: int) -> str:
        """Fills the state, for a joiner with different contents, and returns its digest."""
        self.state.revision = revision
        if revision:
            fill(self.flat)
        else:
            make_stale(self.flat)
        return self.digest()

    def digest(self) -> str:
        """BLAKE3 of the state."""
        return blake3.blake3(self.flat.data.cast("B")).hexdigest()

    def stand_still_after(self, size_bytes: int) -> None:
        """Pauses at the gate once `size_bytes` have been received."""
        engine = self._engine()
        poll, left = engine.poll, size_bytes

        def counting_poll(*arguments: Any) -> list[EngineEvent]:
            nonlocal left
            found: list[EngineEvent] = poll(*arguments)
            was_left, left = left, left - sum(len(event.body) for event in found if isinstance(event, MessageReceived))
            if left <= 0 < was_left:
                self.gate.send("half")
                with contextlib.suppress(EOFError):
                    self.gate.recv()
            return found

        engine.poll = counting_poll

    def send_wrong_bytes(self) -> None:
        """Flips a bit in each block that this peer sends from now on. Reports so at the gate after the first one."""
        engine = self._engine()
        post, has_said = engine.post_message, False

        def flipping_post(peer: bytes, channel_id: int, head: Any, body: Any, *arguments: Any) -> Any:
            nonlocal has_said
            is_block = len(body) >= BLOCK_BYTES_MIN
            if is_block:
                body = bytearray(body)
                body[len(body) // 2] ^= 1
            result = post(peer, channel_id, head, body, *arguments)
            if is_block and not has_said:
                has_said = True
                self.gate.send("wrong bytes")
            return result

        engine.post_message = flipping_post

    def sync(self) -> dict[str, Any]:
        """Makes one sync, and returns its outcome, even if it failed."""
        outcome: dict[str, Any] = {"error": "", "error_text": "", "received": 0, "sent": 0}
        try:
            info = self.comm.sync_shared_state(self.state)
        except zpccl.PCCLError as error:
            outcome |= {"error": type(error).__name__, "error_text": str(error)}
        else:
            outcome |= {"received": info.rx_bytes, "sent": info.tx_bytes}
        return outcome | {"ended_ns": time.monotonic_ns(), "digest": self.digest(), "revision": self.state.revision}

    def push_revision(self) -> None:
        """Increments the revision, as after a training step."""
        self.state.push_revision()

    def _engine(self) -> Any:
        loop = self.comm._loop
        assert loop is not None
        return loop.engine


@dataclass
class Scene:
    """One run: its master, and the processes by name."""

    directory: Path
    master: Master
    size_bytes: int
    gate: Connection
    theirs: Connection
    holders: dict[str, Worker] = field(default_factory=dict)
    joiners: dict[str, Worker] = field(default_factory=dict)
    added: dict[str, Worker] = field(default_factory=dict)
    again: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The outcomes of the second sync, if there was one."""

    @property
    def living(self) -> dict[str, Worker]:
        """The participants that were not killed."""
        return {**self.holders, **self.joiners}

    def start(self, name: str) -> Worker:
        """Starts a process with its own state."""
        path = self.state_of(name)
        with path.open("wb") as file:
            file.truncate(self.size_bytes)
        worker = Worker(name, FaultyPeer, self.master.address, name, path, self.theirs)
        worker.begin("ready")
        return worker

    def state_of(self, name: str) -> Path:
        """The file with the state of a process."""
        return self.directory / name

    def kill(self, workers: dict[str, Worker]) -> None:
        """Sends SIGKILL to workers."""
        for worker in workers.values():
            worker.kill()
        for worker in workers.values():
            worker.close()
        workers.clear()

    def sync_again(self) -> None:
        """All survivors sync once more."""
        self.again = dict(zip(self.living, call_all(list(self.living.values()), "sync"), strict=True))

    def log(self) -> str:
        """The log of the master."""
        return self.master.log()

    def close(self) -> None:
        """Ends all processes."""
        close_all([*self.living.values(), *self.added.values()])


# --- Faults: injected while the joiner pauses; and what follows after the sync ----------------------------------------


def nothing(scene: Scene) -> None:
    """No fault."""


def kill_a_holder(scene: Scene) -> None:
    """Kills one of several holders."""
    name = next(iter(scene.holders))
    scene.kill({name: scene.holders.pop(name)})


def kill_all_holders(scene: Scene) -> None:
    """Kills all holders."""
    scene.kill(scene.holders)


def kill_a_joiner(scene: Scene) -> None:
    """Kills the joiner that pauses."""
    name = next(iter(scene.joiners))
    scene.kill({name: scene.joiners.pop(name)})


def overwrite_a_state(scene: Scene) -> None:
    """Overwrites the memory of a holder, as a faulty thread of its process might."""
    name = next(iter(scene.holders))
    make_stale(np.memmap(scene.state_of(name), np.float32, mode="r+"))


def add_joiners(scene: Scene) -> None:
    """Connects two more peers. They stay pending, since members admit peers between operations only."""
    for name, worker in scene.added.items():
        worker.result()  # It is ready.
        worker.begin("join", len(scene.living) + len(scene.added))
        scene.master.wait_for_log(f"{name} registered", REPLY_TIMEOUT_S)


def admit_added(scene: Scene) -> None:
    """Admits the added joiners, and syncs all again."""
    count = len(scene.living) + len(scene.added)
    for worker in scene.living.values():
        worker.begin("admit", count)
    for worker in (*scene.living.values(), *scene.added.values()):
        worker.result()
    for worker in scene.living.values():
        worker.call("push_revision")
    scene.joiners |= scene.added
    scene.added = {}
    scene.sync_again()


# --- Judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """The outcome of a sync as text, and the broken promises."""

    outcome: str
    problems: list[str]


Outcomes = dict[str, dict[str, Any]]


def all_have_it(outcomes: Outcomes, wanted: str, revision: int) -> list[str]:
    """Problems of processes that should have the state."""
    problems = [f"{name}: {found['error_text']}" for name, found in outcomes.items() if found["error"]]
    problems += [f"{name} holds something else" for name, found in outcomes.items() if found["digest"] != wanted]
    return problems + [
        f"{name} is at revision {found['revision']}"
        for name, found in outcomes.items()
        if not found["error"] and found["revision"] != revision
    ]


def judge_success(scene: Scene, outcomes: Outcomes, wanted: str, stale: str) -> Judged:
    """All survivors must succeed in the first call and, if there was one, in the second."""
    problems = all_have_it(outcomes, wanted, 1)
    if scene.again:
        problems += all_have_it(scene.again, wanted, 2)
    return Judged("all who are left have the state", problems)


def judge_refetch(scene: Scene, outcomes: Outcomes, wanted: str, stale: str) -> Judged:
    """As `judge_success`; a holder's death may cost only the blocks in flight."""
    judged = judge_success(scene, outcomes, wanted, stale)
    received = max(outcomes[name]["received"] for name in scene.joiners)
    if received > 1.5 * scene.size_bytes:
        judged.problems.append(f"{format_bytes(received)} came for a state of {format_bytes(scene.size_bytes)}")
    return judged


def judge_wrong_bytes(scene: Scene, outcomes: Outcomes, wanted: str, stale: str) -> Judged:
    """As `judge_success`, and the log must name the sender of the wrong bytes."""
    problems = judge_success(scene, outcomes, wanted, stale).problems
    if "continues without holder0" not in scene.log():
        problems.append("the log of the master does not name who sent wrong bytes")
    return Judged("all have the state; the sender is named", problems)


def judge_failure(scene: Scene, outcomes: Outcomes, wanted: str, stale: str) -> Judged:
    """The joiner's call must fail and change nothing."""
    problems = []
    for name, found in outcomes.items():
        if not found["error"]:
            problems.append(f"{name} succeeded")
        if found["digest"] != stale or found["revision"] != 0:
            problems.append(f"{name} changed in a call that failed")
    errors = sorted({found["error"] for found in outcomes.values()})
    return Judged(f"{', '.join(errors)}; memory and revision as before", problems)


def judge_change(scene: Scene, outcomes: Outcomes, wanted: str, stale: str) -> Judged:
    """Nobody may end with mixed contents; errors must name the key and the holder; the next call must make all
    equal."""
    problems = []
    joined = [outcomes[name] for name in scene.joiners]
    if any(found["error"] for found in joined):
        if any(found["digest"] != stale for found in joined):
            problems.append("a joiner changed in a call that failed")
        problems += [
            f"the error of {name} does not say what changed, and where: {found['error_text']}"
            for name, found in outcomes.items()
            if "'tensor" not in found["error_text"] or (name != "holder0" and "holder0" not in found["error_text"])
        ]
    elif any(found["digest"] != wanted for found in joined):
        problems.append("a joiner ended with something else")
    problems += all_have_it(scene.again, wanted, 1)
    return Judged(f"{joined[0]['error'] or 'the state came'}; the next call gives all the same", problems)


@dataclass(frozen=True)
class SyncFault:
    """One fault: the participants, the injection, what follows, and the expected outcome."""

    holders: int
    joiners: int
    strike: Callable[[Scene], None]
    judge: Callable[[Scene, Outcomes, str, str], Judged]
    follow: Callable[[Scene], None] = nothing
    added: int = 0
    is_hostile: bool = False


FAULTS = {
    "none": SyncFault(3, 1, nothing, judge_success),
    "holder-killed": SyncFault(3, 1, kill_a_holder, judge_refetch),
    "holders-killed": SyncFault(2, 1, kill_all_holders, judge_failure),
    "joiner-killed": SyncFault(2, 2, kill_a_joiner, judge_success),
    "joiners-added": SyncFault(2, 1, add_joiners, judge_success, admit_added, added=2),
    "memory-changed": SyncFault(3, 1, overwrite_a_state, judge_change, Scene.sync_again),
    "wrong-bytes": SyncFault(3, 1, nothing, judge_wrong_bytes, is_hostile=True),
}


@contextlib.contextmanager
def set_up(fault: SyncFault, size_bytes: int) -> Iterator[Scene]:
    """Starts the run of a fault; all holders and joiners are members."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        master = stack.enter_context(Master(log=directory / "master.log"))
        gate, theirs = multiprocessing.Pipe()
        scene = Scene(directory, master, size_bytes, gate, theirs)
        try:
            scene.holders = {name: scene.start(name) for name in (f"holder{n}" for n in range(fault.holders))}
            scene.joiners = {name: scene.start(name) for name in (f"joiner{n}" for n in range(fault.joiners))}
            scene.added = {name: scene.start(name) for name in (f"added{n}" for n in range(fault.added))}
            for worker in scene.living.values():
                worker.result()
            call_all(list(scene.living.values()), "join", len(scene.living))
            yield scene
        finally:
            scene.close()
            gate.close()
            theirs.close()


def play(name: str, size_bytes: int) -> Row:
    """Injects one fault; returns its row."""
    fault = FAULTS[name]
    with set_up(fault, size_bytes) as scene:
        wanted = call_all(list(scene.holders.values()), "prepare", 1)[0]
        stale = call_all(list(scene.joiners.values()), "prepare", 0)[0]
        first = next(iter(scene.joiners.values()))
        first.call("stand_still_after", size_bytes // 2)
        if fault.is_hostile:
            scene.holders["holder0"].call("send_wrong_bytes")
        began_ns = time.monotonic_ns()
        for worker in scene.living.values():
            worker.begin("sync")
        awaited = {"half", "wrong bytes"} if fault.is_hostile else {"half"}
        while awaited:  # Otherwise the others may send everything before a slow process has sent a wrong block.
            if not scene.gate.poll(REPLY_TIMEOUT_S):
                raise WorkerFailed(f"{name}: {' and '.join(sorted(awaited))} did not report")
            awaited.discard(scene.gate.recv())
        fault_ns = time.monotonic_ns()
        fault.strike(scene)
        scene.gate.send("go on")
        outcomes = {member: worker.result() for member, worker in scene.living.items()}
        ended_ns = max(found["ended_ns"] for found in outcomes.values())
        fault.follow(scene)
        judged = fault.judge(scene, outcomes, wanted, stale)
    return {
        "fault": name,
        "holders": fault.holders,
        "joiners": fault.joiners,
        "bytes": size_bytes,
        "outcome": judged.outcome,
        "seconds_to_end": (ended_ns - fault_ns) / NS,
        "seconds": (ended_ns - began_ns) / NS,
        "bytes_received": max(found["received"] for found in outcomes.values()),
        "errors": {member: found["error_text"] for member, found in outcomes.items() if found["error"]},
        "problems": judged.problems,
        "promises_kept": not judged.problems,
    }


# --- The scenario -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--faults", list(FAULTS), "what strikes", choices=FAULTS)
    add(parser, "--bytes", "64MiB", "of the state")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.bytes < TENSORS * MIB:
        parser.error(f"--bytes: at least {TENSORS} MiB, so that there is a middle")


def measure(options: argparse.Namespace) -> Rows:
    for name in options.faults:
        yield play(name, options.bytes)


COLUMNS = [
    *plain("fault", "holders", "joiners", "bytes"),
    Column("s to end", "seconds_to_end", ".3f"),
    Column("s in all", "seconds", ".3f"),
    Column("MiB received", "bytes_received", ".1f", 1 / MIB),
    Column("kept", "promises_kept"),
    Column("outcome", "outcome"),
]

SCENARIO = Scenario(__doc__, add_arguments, measure, "Faults in the middle of syncs", COLUMNS, check)
