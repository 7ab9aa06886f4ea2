"""Times how long members stop for a newcomer, with and without fetching the state ahead.

Processes of a run: members have the state and train, which here is all-reduces; a joiner has something else
everywhere. When members are told that it is pending they admit it and sync, and that is how long they stop. With
fetching ahead they have offered the state before (`offer_state`), the joiner has connected with `prefetch=`, and they
are told of it when it has everything. Without --uplink all are on loopback, with it each is on a host of its own in an
emulated network, as in bench_state.py. What the joiner ends with is checked by BLAKE3.

`stop` is that of the slowest member, admission, digests and votes included; `offer` is the time that offer_state took;
`joined` is the joiner's, from connect() to the end of the sync; `steps` are the all-reduces meanwhile. --uplink needs
Linux and root.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from bench_state import StatePeer, settings_of
from bench_wan import above_zero, on_host, what_the_emulator_says
from cut_paths import Master
from measuring import (
    Row,
    Worker,
    WorkerFailed,
    add_output_arguments,
    call_all,
    close_all,
    connection_count,
    format_bytes,
    parse_bytes,
    positive,
    print_table,
    run_tool,
    running_master,
    say,
    spread,
    write_json,
)
from state_contents import RANDOM
from wan.choose import BACKENDS, make_network
from wan.wide import WideNetwork

import zpccl

STEP_ELEMENTS = 1 << 16
"""Of the all-reduce that stands for a step."""


class TrainingPeer(StatePeer):
    """A member that trains, or the joiner."""

    def offer(self) -> float:
        """Offers the state to who is pending; returns the seconds."""
        assert self.state is not None
        state = self.state
        return self._timed(lambda: self.peer.comm.offer_state(state))

    def train(self) -> int:
        """Makes steps until somebody is pending; returns how many."""
        gradients, steps = np.ones(STEP_ELEMENTS, np.float32), 0
        while not self.peer.comm.are_peers_pending():
            self.peer.comm.all_reduce(gradients, op=zpccl.ReduceOp.AVG)
            steps += 1
        return steps

    def stop(self) -> float:
        """Admits who is pending and syncs; returns the seconds."""

        def both() -> None:
            self.peer.comm.update_topology()
            self.sync()

        return self._timed(both)

    def come(self, ahead: bool) -> dict[str, float]:
        """Connects, fetching the state ahead or not, and syncs; returns the seconds, and the bytes of the sync."""
        began = time.monotonic()
        self.peer.comm.connect(prefetch=self.state if ahead else None)
        connected = time.monotonic() - began
        result = self.sync()
        return {"seconds": time.monotonic() - began, "connected": connected, "received": result["received"]}


@dataclass
class Place:
    """Where processes are started: on loopback, or on hosts of an emulated network."""

    address: str
    network: WideNetwork | None
    options: argparse.Namespace
    workers: list[Worker] = field(default_factory=list)

    def start(self, name: str, number: int) -> Worker:
        """Starts a process; the joiner has the highest number."""
        if self.network is None:
            return Worker(name, TrainingPeer, number, self.address, self.options.connections, "127.0.0.1")
        factory = functools.partial(TrainingPeer, listen=None)
        host = self.network.address(number)
        namespace = self.network.namespace(number)
        return Worker(name, on_host, namespace, factory, number, self.address, self.options.connections, host)


@contextlib.contextmanager
def start_members(options: argparse.Namespace) -> Iterator[Place]:
    """A master and all members."""
    with contextlib.ExitStack() as stack:
        count = options.members + 1
        if options.uplink:
            network = stack.enter_context(make_network(settings_of(count, options), options.backend, options.seed))
            assert network is not None
            timeout_s = zpccl.limits.HEARTBEAT_TIMEOUT_NS / 1e9
            master = Worker("master", Master, network.namespace(count), network.address(count), timeout_s)
            stack.callback(master.close)
            place = Place(master.call("address"), network, options)
        else:
            address, _ = stack.enter_context(running_master())
            place = Place(address, None, options)
        stack.callback(close_all, place.workers)
        for number in range(options.members):
            place.workers.append(place.start(f"member {number}", number))
        call_all(place.workers, "join", options.members)
        yield place


def join_once(place: Place, size_bytes: int, *, ahead: bool) -> dict[str, float]:
    """One newcomer that comes, and goes again.

    Raises:
        WorkerFailed: it ends with something else than the members have.
    """
    members, tensors = place.workers, place.options.tensors
    wanted: str = members[0].call("contents_digest")
    call_all(members, "reset")
    offer_s = max(call_all(members, "offer")) if ahead else 0.0
    joiner = place.start("joiner", len(members))
    try:
        joiner.call("allocate", size_bytes, tensors, RANDOM, None, True)
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


def measure(place: Place, options: argparse.Namespace, size_bytes: int) -> list[Row]:
    """Both rows of one size."""
    call_all(place.workers, "allocate", size_bytes, options.tensors, RANDOM, None, False)
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(options.reps):
        for ahead, results in found.items():
            results.append(join_once(place, size_bytes, ahead=ahead))
    rows: list[Row] = []
    for ahead, results in found.items():
        row: Row = {"ahead": ahead, "members": options.members, "bytes": size_bytes, "uplink_mbit": options.uplink}
        row |= {"rtt_ms": options.rtt if options.uplink else None, "reps": options.reps}
        for name in ("stop", "offer", "joined", "steps", "received"):
            row |= spread([result[name] for result in results], name)
        rows.append(row | (what_the_emulator_says(place.network) if place.network is not None else {}))
    rows[1]["of_plain"] = rows[1]["stop_median"] / rows[0]["stop_median"]
    return rows


COLUMNS = ["bytes", "ahead", "stop s", "min s", "max s", "of plain %", "offer s", "joined s", "steps", "sync MiB"]


def cells_of(row: Row) -> list[str]:
    """The row as text, in COLUMNS."""
    return [
        format_bytes(row["bytes"]),
        "yes" if row["ahead"] else "no",
        *(f"{row[f'stop_{name}']:.3f}" for name in ("median", "min", "max")),
        f"{100 * row['of_plain']:.1f}" if "of_plain" in row else "-",
        f"{row['offer_median']:.3f}",
        f"{row['joined_median']:.2f}",
        f"{row['steps_median']:.0f}",
        f"{row['received_median'] / 2**20:.1f}",
    ]


def measure_all(options: argparse.Namespace) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    with start_members(options) as place:
        for size_bytes in options.bytes:
            rows += measure(place, options, size_bytes)
            write_json(options.json, rows)  # What is measured stays, however long the rest takes.
            for row in rows[-2:]:
                say("  ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells_of(row), strict=True)))
    return rows


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bytes", type=parse_bytes, nargs="+", default=[parse_bytes("256MiB")], help="of the state (default 256MiB)"
    )
    parser.add_argument("--members", type=positive, default=2, help="at least 2 (default 2)")
    parser.add_argument("--uplink", type=above_zero, help="Mbit/s that a host sends, emulated (default: loopback)")
    parser.add_argument("--rtt", type=above_zero, default=10.0, help="ms between emulated hosts (default 10)")
    parser.add_argument("--tensors", type=positive, default=16, help="that the state is made of (default 16)")
    parser.add_argument("--connections", type=connection_count, default=4, help="to each other process (default 4)")
    parser.add_argument("--reps", "--repeat", type=positive, default=3, help="repetitions (default 3)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default auto: netem if the kernel has it")
    parser.add_argument("--seed", type=int, default=0, help="of the emulator (default 0)")
    add_output_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.members < 2:
        parser.error("--members: all-reduces take two")
    if min(options.bytes) < 4 * options.tensors:
        parser.error("--bytes: at least an element of 4 bytes for each of --tensors")
    title = (
        f"Members stop for a newcomer, uplinks of {options.uplink:g} Mbit/s"
        if options.uplink
        else ("Members stop for a newcomer, over loopback")
    )

    def play() -> int:
        rows = measure_all(options)
        print_table(title, COLUMNS, [cells_of(row) for row in rows])
        return 0

    return run_tool(play)


if __name__ == "__main__":
    sys.exit(main())
