"""Times how long a newcomer interrupts the members, with and without prefetching the state.

Members hold the state and train (here: all-reduce); a joiner holds different contents everywhere. When the joiner is
pending, members admit it and sync: that is the interruption. With prefetching they have already offered the state
(`offer_state`), the joiner connects with `prefetch=`, and it is pending only once it has everything. Without --uplink
all processes are on loopback; with it each is on its own host of an emulated network, as in `state`. BLAKE3 verifies
the joiner's state.

`stop` is the interruption of the slowest member, including admission, digests and votes; `offer` is the duration of
offer_state; `joined` is the joiner's time from connect() to the end of the sync; `steps` is the number of all-reduces
meanwhile. --uplink needs Linux and root.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
from common import Row, Rows, WorkerFailed, add, spread, whole
from workers import Hosts, Master, Worker, call_all, ended_workers

import zpccl
from benchmarks.scenario import Column, Scenario, plain, times
from benchmarks.state import PROCESSES_MAX, StatePeer, add_place_arguments, check_place, make_hosts
from benchmarks.wan import what_the_emulator_says

STEP_ELEMENTS = 1 << 16
"""Size of the all-reduce that stands for a training step."""


class TrainingPeer(StatePeer):
    """A training member, or the joiner."""

    def offer(self) -> float:
        """Offers the state to joiners; returns the seconds."""
        assert self.state is not None
        state = self.state
        return self._timed(lambda: self.peer.comm.offer_state(state))

    def train(self) -> int:
        """Trains until a peer is pending; returns the number of steps."""
        gradients, steps = np.ones(STEP_ELEMENTS, np.float32), 0
        while not self.peer.comm.are_peers_pending():
            self.peer.comm.all_reduce(gradients, op=zpccl.ReduceOp.AVG)
            steps += 1
        return steps

    def stop(self) -> float:
        """Admits the pending peers and syncs; returns the seconds."""

        def both() -> None:
            self.peer.comm.update_topology()
            self.sync()

        return self._timed(both)

    def come(self, ahead: bool) -> dict[str, float]:
        """Connects, with a prefetch if `ahead`, and syncs; returns the seconds, and the bytes of the sync."""
        began = time.monotonic()
        self.peer.comm.connect(prefetch=self.state if ahead else None)
        connected = time.monotonic() - began
        result = self.sync()
        return {"seconds": time.monotonic() - began, "connected": connected, "received": result["received"]}


@dataclass(frozen=True)
class Run:
    """A run: its members, and where joiners are started."""

    hosts: Hosts
    master: Master
    members: list[Worker]
    options: argparse.Namespace

    def start(self, number: int) -> Worker:
        """Starts process `number`; the joiner has the highest number."""
        settings = (number, self.master.address, self.options.connections, self.hosts.address(number))
        return self.hosts.start(number, f"process {number}", TrainingPeer, *settings)


def join_once(run: Run, size_bytes: int, *, ahead: bool) -> dict[str, float]:
    """One newcomer joins, and leaves again.

    Raises:
        WorkerFailed: its state differs from that of the members.
    """
    members, options = run.members, run.options
    wanted: str = members[0].call("contents_digest")
    call_all(members, "reset")
    offer_s = max(call_all(members, "offer")) if ahead else 0.0
    joiner = run.start(len(members))
    try:
        joiner.call("allocate", size_bytes, options.tensors, options.members)
        joiner.call("reset")
        joiner.begin("come", ahead)
        steps = max(call_all(members, "train"))
        stop_s = max(call_all(members, "stop"))
        result: dict[str, float] = joiner.result()
        if joiner.call("contents_digest") != wanted:
            raise WorkerFailed("the joiner does not have the state of the members")
    finally:
        joiner.close()
    return {"stop": stop_s, "offer": offer_s, "joined": result["seconds"], "steps": steps, **result}


def measure_size(run: Run, size_bytes: int) -> list[Row]:
    """Both rows of one size."""
    options = run.options
    call_all(run.members, "allocate", size_bytes, options.tensors, options.members)
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(options.reps):
        for ahead, results in found.items():
            results.append(join_once(run, size_bytes, ahead=ahead))
    rows: list[Row] = []
    for ahead, results in found.items():
        row: Row = {"ahead": ahead, "members": options.members, "bytes": size_bytes, "uplink_mbit": options.uplink}
        row |= {"rtt_ms": options.rtt if options.uplink else None, "reps": options.reps}
        for name in ("stop", "offer", "joined", "steps", "received"):
            row |= spread([result[name] for result in results], name)
        rows.append(row | what_the_emulator_says(run.hosts.network))
    rows[1]["of_plain"] = rows[1]["stop_median"] / rows[0]["stop_median"]
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    add(parser, "--members", 2, "of the run; all-reduces take two", type=whole(2, PROCESSES_MAX - 1))


def measure(options: argparse.Namespace) -> Rows:
    with make_hosts(options, options.members + 1) as (hosts, master), ended_workers() as members:
        run = Run(hosts, master, members, options)
        for number in range(options.members):
            members.append(run.start(number))
        call_all(members, "join", options.members)
        for size_bytes in options.bytes:
            yield from measure_size(run, size_bytes)


COLUMNS = [
    *plain("bytes", "ahead"),
    *times("stop", unit="s", title="stop "),
    Column("of plain %", "of_plain", ".1f", 100),
    Column("offer s", "offer_median", ".3f"),
    Column("joined s", "joined_median", ".2f"),
    Column("steps", "steps_median", ".0f"),
    Column("sync MiB", "received_median", ".1f", 2**-20),
]
TITLE = "Members stop for a newcomer {options.place}"

SCENARIO = Scenario(__doc__, add_arguments, measure, TITLE, COLUMNS, check_place)
