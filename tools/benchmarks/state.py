"""Times how newcomers get the shared state, compared with plain copies of the same bytes, and a sync without transfer.

Holders have the state, float32; joiners have other contents everywhere (or, with `identical`, the same). All call
`sync_shared_state` at the same time; BLAKE3 verifies that joiners end with the holders' bytes. The time is that of the
slowest process, including digests and votes. Without --uplink all processes are on loopback. With it each is on its own
host of an emulated network (the package `wan`), in which the total send rate of a host is limited and its receive rate
is not. Measured in turns, in the same processes:

  zpccl    `sync_shared_state` over --connections connections to each other peer
  raw TCP  each holder sends its share of the bytes to each joiner, over as many sockets, and nothing else
  digest   all processes digest the state, and send nothing

`bytes_sent` is the sum over all processes. `late`, `device_drops`, `emulator_cpu` are the late packets, lost packets
and CPU load of the emulator, over all systems of a row: check them before you trust a row. --uplink needs Linux and
root.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import blake3
import numpy as np
from common import MIB, Array, Row, Rows, WorkerFailed, above_zero, add, positive, spread
from networks import Namespaces
from wan.emulated import EmulatedNetwork
from wan.settings import Settings
from workers import Hosts, Master, Peer, Worker, call_all, ended_workers

import zpccl
from benchmarks.raw_tcp import RawTcp
from benchmarks.scenario import Column, Scenario, plain, times
from benchmarks.wan import what_the_emulator_says
from zpccl.state.digests import digest_regions

RANDOM, ZEROS, IDENTICAL = CONTENTS = ("random", "zeros", "identical")
_, DIGEST = SYSTEMS = ("raw_tcp", "digest")
"""The systems to which zpccl is compared."""
DIGESTS = tuple(kind.name.lower() for kind in zpccl.DigestKind)
PROCESSES_MAX = 15


# --- In the processes -------------------------------------------------------------------------------------------------


def fill(flat: Array, contents: str = RANDOM) -> None:
    """Fills the state of holders, with the same contents in every process."""
    if contents == ZEROS:
        flat.fill(0)
    else:
        np.random.default_rng(0).standard_normal(out=flat, dtype=np.float32)


def make_stale(flat: Array) -> None:
    """Fills the state of joiners before a sync: different from `fill` everywhere, and cheap."""
    flat.fill(1)


class StatePeer:
    """A process that has or gets the shared state: as a peer, or as one end of a plain copy. Holders have the lowest
    numbers.

    Args:
        number: of this process.
        address: of the master.
        connections: to each other process.
        host: address for the sockets of plain copies.
    """

    def __init__(self, number: int, address: str, connections: int, host: str) -> None:
        self.number = number
        self.peer = Peer(address, connections)
        self.sockets = RawTcp(number, connections, host)
        self.flat = np.empty(0, np.float32)
        self.state: zpccl.SharedState | None = None
        self.is_behind = False
        self._revision = 0

    def join(self, peers: int) -> None:
        """Becomes a member, and waits for the others."""
        self.peer.join(peers)

    def copy_address(self) -> tuple[str, int]:
        """The address at which this process receives plain copies."""
        return self.sockets.address

    def connect_copies(self, addresses: Sequence[tuple[str, int]], holders: int) -> None:
        """Connects holders to joiners for plain copies."""
        if self.number < holders:
            self.sockets.connect({number: addresses[number] for number in range(holders, len(addresses))})
        else:
            self.sockets.accept(range(holders))

    def allocate(
        self, size_bytes: int, tensors: int, holders: int, contents: str = RANDOM, digest: str = "blake3"
    ) -> None:
        """Makes the state, after freeing the old one. A process that is behind has different contents, and only
        receives."""
        self.state = None
        self.flat = np.empty(0, np.float32)
        self.flat = np.empty(size_bytes // 4, np.float32)
        self.is_behind = self.number >= holders and contents != IDENTICAL
        if not self.is_behind:
            fill(self.flat, contents)
        pieces = np.array_split(self.flat, tensors)
        self.state = zpccl.SharedState(
            [zpccl.TensorInfo.from_numpy(piece, f"tensor{index:05}") for index, piece in enumerate(pieces)], digest
        )
        self.state.revision = self._revision

    def reset(self) -> None:
        """Prepares the next sync or copy."""
        assert self.state is not None
        if self.is_behind:
            make_stale(self.flat)
        else:
            self.state.revision = self._revision + 1

    def sync(self) -> dict[str, float]:
        """One sync: seconds, CPU seconds, bytes sent and received."""
        assert self.state is not None
        strategies = zpccl.SharedStateSyncStrategy
        strategy = strategies.RECEIVE_ONLY if self.is_behind else strategies.ENFORCE_POPULAR
        cpu_began, began = time.process_time(), time.monotonic()
        info = self.peer.comm.sync_shared_state(self.state, strategy)
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
        self._revision = self.state.revision
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "sent": info.tx_bytes, "received": info.rx_bytes}

    def copy(self, processes: int, holders: int) -> float:
        """Sends this process's share of the state to each joiner, or receives all shares; returns the seconds."""
        memory = self.flat.data.cast("B")
        bounds = [len(memory) * holder // holders for holder in range(holders + 1)]
        shares = [memory[begin:end] for begin, end in itertools.pairwise(bounds)]
        if self.number < holders:
            out = dict.fromkeys(range(holders, processes), shares[self.number])
            return self._timed(lambda: self.sockets.move(out, {}))
        return self._timed(lambda: self.sockets.move({}, dict(enumerate(shares))))

    def digest(self) -> float:
        """Digests the state; returns the seconds."""
        assert self.state is not None
        state = self.state
        return self._timed(lambda: digest_regions(state.regions(), state.digest_kind))

    def contents_digest(self) -> str:
        """BLAKE3 of the state."""
        return blake3.blake3(self.flat.data.cast("B"), max_threads=blake3.blake3.AUTO).hexdigest()

    def close(self) -> None:
        """Leaves the run."""
        self.sockets.close()
        self.peer.close()

    @staticmethod
    def _timed(function: Callable[[], Any]) -> float:
        began = time.monotonic()
        function()
        return time.monotonic() - began


# --- Processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crowd:
    """The processes for a number of holders and joiners; holders come first."""

    workers: list[Worker]
    holders: int
    network: Namespaces | None


def settings_of(processes: int, options: argparse.Namespace) -> Settings:
    """The network: one host per process, and one for the master without a rate limit."""
    lines = [
        f"host * egress_mbit={options.uplink}",
        f"host {processes} egress_mbit=0",
        f"link * * delay_ms={options.rtt / 2}",
    ]
    return Settings(processes + 1).with_lines(lines)


@contextlib.contextmanager
def make_hosts(options: argparse.Namespace, processes: int) -> Iterator[tuple[Hosts, Master]]:
    """Hosts for `processes` processes, on loopback or in a network, and a running master."""
    with contextlib.ExitStack() as stack:
        hosts = Hosts()
        if options.uplink:
            hosts = Hosts(stack.enter_context(EmulatedNetwork(settings_of(processes, options), options.seed)))
        yield hosts, stack.enter_context(Master(hosts, processes))


@contextlib.contextmanager
def start_crowd(options: argparse.Namespace, holders: int, joiners: int) -> Iterator[Crowd]:
    """A master and its peers, all members and connected for plain copies."""
    with make_hosts(options, holders + joiners) as (hosts, master), ended_workers() as workers:
        for number in range(holders + joiners):
            name = f"{'holder' if number < holders else 'joiner'} {number}"
            settings = (number, master.address, options.connections, hosts.address(number))
            workers.append(hosts.start(number, name, StatePeer, *settings))
        call_all(workers, "join", len(workers))
        call_all(workers, "connect_copies", call_all(workers, "copy_address"), holders)
        yield Crowd(workers, holders, hosts.network)


# --- Measuring --------------------------------------------------------------------------------------------------------


def sync_once(crowd: Crowd, wanted: str) -> dict[str, float]:
    """One checked sync: seconds of the slowest process, and sums of the other figures.

    Args:
        crowd: the processes.
        wanted: the digest that all must have afterwards.

    Raises:
        WorkerFailed: a process has other contents.
    """
    call_all(crowd.workers, "reset")
    results: list[dict[str, float]] = call_all(crowd.workers, "sync")
    compare(crowd, wanted)
    total = {name: sum(result[name] for result in results) for name in ("cpu_seconds", "sent")}
    return {"seconds": max(result["seconds"] for result in results), **total}


def compare(crowd: Crowd, wanted: str) -> None:
    """Compares the digests of all processes with the expected one.

    Raises:
        WorkerFailed: a process has other contents.
    """
    digests = call_all(crowd.workers, "contents_digest")
    wrong = [worker.name for worker, digest in zip(crowd.workers, digests, strict=True) if digest != wanted]
    if wrong:
        raise WorkerFailed(f"{', '.join(wrong)}: the state is not what the holders had")


def beside(crowd: Crowd, system: str, wanted: str) -> float:
    """One checked repetition of one of SYSTEMS; returns the seconds of the slowest process."""
    if system == DIGEST:
        return float(max(call_all(crowd.workers, "digest")))
    call_all(crowd.workers, "reset")
    seconds = max(call_all(crowd.workers, "copy", len(crowd.workers), crowd.holders))
    compare(crowd, wanted)
    return float(seconds)


def measure_kind(crowd: Crowd, options: argparse.Namespace, size_bytes: int, contents: str, digest: str) -> Row:
    """All repetitions of one kind of state."""
    call_all(crowd.workers, "allocate", size_bytes, options.tensors, crowd.holders, contents, digest)
    wanted: str = crowd.workers[0].call("contents_digest")
    syncs: list[dict[str, float]] = []
    others: dict[str, list[float]] = {
        system: [] for system in options.beside if system == DIGEST or contents != IDENTICAL
    }
    if isinstance(crowd.network, EmulatedNetwork):
        crowd.network.reset_counts()
    for _ in range(options.reps):
        syncs.append(sync_once(crowd, wanted))
        for system, seconds in others.items():
            seconds.append(beside(crowd, system, wanted))
    row: Row = {
        "contents": contents,
        "holders": crowd.holders,
        "joiners": len(crowd.workers) - crowd.holders,
        "bytes": size_bytes,
        "tensors": options.tensors,
        "digest": digest,
        "connections": options.connections,
        "uplink_mbit": options.uplink,
        "rtt_ms": options.rtt if options.uplink else None,
        "reps": options.reps,
        "bytes_sent": round(statistics.median(sync["sent"] for sync in syncs)),
        **spread([sync["seconds"] for sync in syncs], "seconds"),
        "cpu_seconds": statistics.median(sync["cpu_seconds"] for sync in syncs),
    }
    for system in SYSTEMS:
        row |= spread(others.get(system, []), f"{system}_seconds")
    return row | what_the_emulator_says(crowd.network)


def measure(options: argparse.Namespace) -> Rows:
    for joiners, holders in itertools.product(options.joiners, options.holders):
        with start_crowd(options, holders, joiners) as crowd:
            for size_bytes, contents, digest in itertools.product(options.bytes, options.contents, options.digest):
                yield measure_kind(crowd, options, size_bytes, contents, digest)


# --- The scenario -----------------------------------------------------------------------------------------------------


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that the benchmarks of shared state have in common."""
    add(parser, "--bytes", ["256MiB"], "of the state")
    parser.add_argument("--uplink", type=above_zero, help="Mbit/s that a host sends, emulated (default: loopback)")
    add(parser, "--rtt", 10, "ms between emulated hosts", type=above_zero)
    add(parser, "--tensors", 16, "that the state is made of", type=positive)
    add(parser, "--connections", 4)
    add(parser, "--reps", 3)
    add(parser, "--seed", 0)


def check_place(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks them, or exits with an error message; sets `place` for headings."""
    if min(options.bytes) < 4 * options.tensors:
        parser.error("--bytes: at least an element of 4 bytes for each of --tensors")
    options.place = "over loopback"
    if options.uplink:
        options.place = f"from hosts whose uplinks carry {options.uplink:g} Mbit/s, {options.rtt:g} ms round trip"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    add(parser, "--contents", [RANDOM], "what the holders hold", choices=CONTENTS)
    add(parser, "--digest", [DIGESTS[0]], "of contents", choices=DIGESTS)
    add(parser, "--holders", [1, 3], "who have it", type=positive)
    add(parser, "--joiners", [1], "who get it", type=positive)
    text = "measured beside zpccl (default all)"
    parser.add_argument("--beside", choices=SYSTEMS, nargs="*", default=list(SYSTEMS), help=text)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if "xxh3" in options.digest and importlib.util.find_spec("xxhash") is None:
        parser.error("--digest xxh3 needs the package xxhash: pip install 'zpccl[xxhash]'")
    check_place(parser, options)
    if max(options.holders) + max(options.joiners) > PROCESSES_MAX:
        parser.error(f"at most {PROCESSES_MAX} holders and joiners together")


COLUMNS = [
    *plain("contents", "bytes"),
    Column("by", "digest"),
    *plain("holders", "joiners"),
    *times("seconds", ".4f", "s"),
    Column("sent MiB", "bytes_sent", ".1f", 1 / MIB),
    Column("CPU s", "cpu_seconds", ".3f"),
    *(Column(f"{system} s", f"{system}_seconds_median", ".4f") for system in SYSTEMS),
    Column("late %", "late", ".2f", 100),
]

SCENARIO = Scenario(__doc__, add_arguments, measure, "Shared state {options.place}", COLUMNS, check)
