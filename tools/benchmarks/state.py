"""Times how newcomers get the shared state, compared with plain copies of the same bytes, and a sync without transfer.

Holders have the state; joiners have different contents everywhere (or, with `identical`, the same). All call
`sync_shared_state` at the same time; BLAKE3 verifies that joiners end with the holders' bytes. The time is that of the
slowest process, including digests and votes. Without --uplink all processes are on loopback. With it each is on its own
host of an emulated network (the package `wan`), in which the total send rate of a host is limited and its receive rate
is not. Measured in turns, in the same processes:

  zpccl       `sync_shared_state` over --connections connections to each other peer
  raw TCP     each holder sends its share of the bytes to each joiner, over as many sockets, and nothing else
  one stream  each joiner gets all bytes from one holder over one socket, like scp without encryption
  digest      all processes digest the state with the same --digest and as many threads as CPUs, and send nothing

`bytes_sent` is the sum over all processes, `bytes_sent_most` the maximum; `ratio` is the bytes that all joiners lack
divided by that sum. `speedup` is relative to the row with the fewest holders. `late`, `device_drops`, `emulator_cpu`
are the late packets, lost packets and CPU load of the emulator, over all systems of a row: check them before you trust
a row. --uplink needs Linux and root.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import numpy as np
from common import MIB, Row, Rows, WorkerFailed, above_zero, add, positive, spread
from networks import Namespaces
from state_contents import CONTENTS, IDENTICAL, RANDOM, TRAINED, fill, make_stale, trained_weights
from wan.emulated import EmulatedNetwork
from wan.settings import Settings
from workers import Hosts, Master, Peer, Worker, call_all, ended_workers

import zpccl
from benchmarks.raw_tcp import RawTcp
from benchmarks.scenario import BYTES, Column, Scenario, Table
from benchmarks.wan import what_the_emulator_says

RAW_TCP, ONE_STREAM, DIGEST = "raw_tcp", "one_stream", "digest"
SYSTEMS = (RAW_TCP, ONE_STREAM, DIGEST)
"""The systems that zpccl is compared with."""
DIGESTS = tuple(kind.name.lower() for kind in zpccl.DigestKind)
PROCESSES_MAX = 15


class StatePeer:
    """A process that has or gets the shared state: as a peer, or as one end of a plain copy.

    Args:
        number: of this process.
        address: of the master.
        connections: to each other process.
        host: address for the sockets of plain copies.
        options: further options of the communicator.
    """

    def __init__(self, number: int, address: str, connections: int, host: str, **options: Any) -> None:
        self.number = number
        self.peer = Peer(address, connections, **options)
        self.copy = RawTcp(number, connections, host)
        self.flat = np.empty(0, np.float32)
        self.state: zpccl.SharedState | None = None
        self.is_behind = False
        self._revision = 0

    def join(self, peers: int) -> None:
        """Becomes a member, and waits for the others."""
        self.peer.join(peers)

    def copy_address(self) -> tuple[str, int]:
        """The address at which this process receives plain copies."""
        return self.copy.address

    def connect_copies(self, receivers: Mapping[int, tuple[str, int]], senders: Sequence[int]) -> None:
        """Sets the sockets of plain copies up: to receivers, or from senders."""
        self.copy.connect(receivers)
        self.copy.accept(senders)

    def allocate(
        self,
        size_bytes: int,
        tensors: int,
        contents: str,
        weights: Path | None,
        is_behind: bool,
        digest: str = "blake3",
    ) -> None:
        """Makes the state, after freeing the old one. A process that is behind holds other contents, and only
        receives."""
        self.state = None
        self.flat = np.empty(0, np.float32)
        self.flat = np.empty(size_bytes // 4, np.float32)
        self.is_behind = is_behind
        if not is_behind:
            fill(self.flat, contents, weights)
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

    def send(self, shares: Mapping[int, tuple[float, float]], connections: int) -> float:
        """Sends parts of the state to receivers, by number; returns the seconds."""
        return self._timed(lambda: self.copy.move(self._parts(shares), {}, connections))

    def receive(self, shares: Mapping[int, tuple[float, float]], connections: int) -> float:
        """Receives parts of the state from senders, by number; returns the seconds."""
        return self._timed(lambda: self.copy.move({}, self._parts(shares), connections))

    def digest(self, kind: str) -> float:
        """Digests the state; returns the seconds."""
        return self._timed(self.contents_digest if kind == "blake3" else self._digest_by_xxh3)

    def contents_digest(self) -> str:
        """BLAKE3 of the state."""
        return blake3.blake3(self.flat.data.cast("B"), max_threads=blake3.blake3.AUTO).hexdigest()

    def _digest_by_xxh3(self) -> None:
        """Digests one part of the state per CPU, because XXH3 is single-threaded."""
        import xxhash

        memory, count = self.flat.data.cast("B"), len(os.sched_getaffinity(0))
        bounds = [len(memory) * part // count for part in range(count + 1)]
        with ThreadPoolExecutor(count) as threads:
            parts = (memory[begin:end] for begin, end in itertools.pairwise(bounds))
            list(threads.map(xxhash.xxh3_128_digest, parts))

    def close(self) -> None:
        """Leaves the run."""
        self.copy.close()
        self.peer.close()

    def _parts(self, shares: Mapping[int, tuple[float, float]]) -> dict[int, memoryview]:
        memory = self.flat.data.cast("B")
        return {
            number: memory[int(begin * len(memory)) : int(end * len(memory))] for number, (begin, end) in shares.items()
        }

    @staticmethod
    def _timed(function: Callable[[], Any]) -> float:
        began = time.monotonic()
        function()
        return time.monotonic() - began


# --- Processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateKind:
    """The kind of a state: contents, sizes, who differs."""

    size_bytes: int
    tensors: int
    digest: str
    contents: str
    weights: Path | None

    def arguments(self, *, is_behind: bool) -> tuple[Any, ...]:
        """The arguments of `StatePeer.allocate`."""
        return self.size_bytes, self.tensors, self.contents, self.weights, is_behind, self.digest


@dataclass(frozen=True)
class Crowd:
    """The processes for a number of holders and joiners; holders come first."""

    workers: list[Worker]
    holders: int
    network: Namespaces | None

    @property
    def joiners(self) -> int:
        """Number of joiners."""
        return len(self.workers) - self.holders

    def connect(self) -> None:
        """Makes all processes members, and connects holders to joiners for plain copies."""
        call_all(self.workers, "join", len(self.workers))
        addresses = dict(enumerate(call_all(self.workers, "copy_address")))
        receivers = {number: addresses[number] for number in range(self.holders, len(self.workers))}
        for number, worker in enumerate(self.workers):
            arguments = (receivers, []) if number < self.holders else ({}, list(range(self.holders)))
            worker.begin("connect_copies", *arguments)
        for worker in self.workers:
            worker.result()

    def allocate(self, kind: StateKind) -> None:
        """Makes the state of all processes."""
        for number, worker in enumerate(self.workers):
            is_behind = number >= self.holders and kind.contents != IDENTICAL
            worker.begin("allocate", *kind.arguments(is_behind=is_behind))
        for worker in self.workers:
            worker.result()

    def plain_copy(self, connections: int, share: Callable[[int, int], tuple[float, float]]) -> float:
        """Copies the state to all joiners; returns the seconds of the slowest.

        Args:
            connections: of each pair.
            share: range of the state, from 0 to 1, that a holder sends to a joiner (numbered from 0).
        """
        call_all(self.workers, "reset")
        for number, worker in enumerate(self.workers):
            if number < self.holders:
                shares = {self.holders + joiner: share(number, joiner) for joiner in range(self.joiners)}
                worker.begin("send", _not_empty(shares), connections)
            else:
                shares = {holder: share(holder, number - self.holders) for holder in range(self.holders)}
                worker.begin("receive", _not_empty(shares), connections)
        seconds: list[float] = [worker.result() for worker in self.workers]
        return max(seconds)


def _not_empty(shares: dict[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
    return {number: (begin, end) for number, (begin, end) in shares.items() if end > begin}


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
            settings = settings_of(processes, options)
            hosts = Hosts(stack.enter_context(EmulatedNetwork(settings, options.seed)))
        yield hosts, stack.enter_context(Master(hosts, processes))


@contextlib.contextmanager
def start_crowd(options: argparse.Namespace, holders: int, joiners: int) -> Iterator[Crowd]:
    """A master and its peers, all members."""
    with make_hosts(options, holders + joiners) as (hosts, master), ended_workers() as workers:
        for number in range(holders + joiners):
            name = f"{'holder' if number < holders else 'joiner'} {number}"
            settings = (number, master.address, options.connections, hosts.address(number))
            workers.append(hosts.start(number, name, StatePeer, *settings))
        crowd = Crowd(workers, holders, hosts.network)
        crowd.connect()
        yield crowd


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
    most = max(result["sent"] for result in results)
    return {"seconds": max(result["seconds"] for result in results), "sent_most": most, **total}


def compare(crowd: Crowd, wanted: str) -> None:
    """Compares the digests of all processes with the expected one.

    Raises:
        WorkerFailed: a process has other contents.
    """
    digests = call_all(crowd.workers, "contents_digest")
    wrong = [worker.name for worker, digest in zip(crowd.workers, digests, strict=True) if digest != wanted]
    if wrong:
        raise WorkerFailed(f"{', '.join(wrong)}: the state is not what the holders had")


def beside(crowd: Crowd, system: str, connections: int, digest: str, wanted: str) -> float:
    """One checked repetition of one of SYSTEMS; returns the seconds."""
    if system == DIGEST:
        alone: list[float] = call_all(crowd.workers, "digest", digest)
        return max(alone)
    if system == RAW_TCP:
        seconds = crowd.plain_copy(
            connections, lambda holder, _: (holder / crowd.holders, (holder + 1) / crowd.holders)
        )
    else:
        seconds = crowd.plain_copy(1, lambda holder, joiner: (0.0, float(holder == joiner % crowd.holders)))
    compare(crowd, wanted)
    return seconds


def measure_kind(crowd: Crowd, options: argparse.Namespace, kind: StateKind) -> Row:
    """All repetitions of one kind of state."""
    crowd.allocate(kind)
    contents, size_bytes = kind.contents, kind.size_bytes
    wanted: str = crowd.workers[0].call("contents_digest")
    syncs: list[dict[str, float]] = []
    others: dict[str, list[float]] = {system: [] for system in options.beside}
    if contents == IDENTICAL:
        others = {system: [] for system in options.beside if system == DIGEST}
    if isinstance(crowd.network, EmulatedNetwork):
        crowd.network.reset_counts()
    for _ in range(options.reps):
        syncs.append(sync_once(crowd, wanted))
        for system, seconds in others.items():
            seconds.append(beside(crowd, system, options.connections, kind.digest, wanted))
    bytes_sent = round(statistics.median(sync["sent"] for sync in syncs))
    lacking = 0 if contents == IDENTICAL else size_bytes * crowd.joiners
    median_s = statistics.median(sync["seconds"] for sync in syncs)
    row: Row = {
        "contents": contents,
        "holders": crowd.holders,
        "joiners": crowd.joiners,
        "bytes": size_bytes,
        "tensors": kind.tensors,
        "digest": kind.digest,
        "connections": options.connections,
        "uplink_mbit": options.uplink,
        "rtt_ms": options.rtt if options.uplink else None,
        "reps": options.reps,
        "bytes_sent": bytes_sent,
        "bytes_sent_most": round(statistics.median(sync["sent_most"] for sync in syncs)),
        "ratio": lacking / bytes_sent if lacking and bytes_sent else None,
        **spread([sync["seconds"] for sync in syncs], "seconds"),
        "cpu_seconds": statistics.median(sync["cpu_seconds"] for sync in syncs),
        "gbit": lacking * 8 / 1e9 / median_s if lacking else None,
    }
    for system in SYSTEMS:
        row |= spread(others.get(system, []), f"{system}_seconds")
    return row | what_the_emulator_says(crowd.network)


def kinds_of(options: argparse.Namespace) -> list[StateKind]:
    """All requested kinds of states."""
    weights = trained_weights(max(options.bytes) // 4) if TRAINED in options.contents else None
    return [
        StateKind(size_bytes, options.tensors, digest, contents, weights)
        for size_bytes, contents, digest in itertools.product(options.bytes, options.contents, options.digest)
    ]


def add_speedups(rows: Sequence[Row]) -> None:
    """Compares each row with the otherwise equal one that has the fewest holders."""
    kinds = ("contents", "joiners", "bytes", "digest")
    for row in rows:
        alike = [other for other in rows if all(other[kind] == row[kind] for kind in kinds)]
        fewest = min(alike, key=lambda other: int(other["holders"]))
        row["speedup"] = fewest["seconds_median"] / row["seconds_median"]


def measure(options: argparse.Namespace) -> Rows:
    rows: list[Row] = []
    kinds = kinds_of(options)
    for joiners, holders in itertools.product(options.joiners, options.holders):
        with start_crowd(options, holders, joiners) as crowd:
            for kind in kinds:
                rows.append(measure_kind(crowd, options, kind))
                add_speedups(rows)
                yield rows[-1]


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
    Column("contents", "contents"),
    Column("bytes", "bytes", BYTES),
    Column("by", "digest"),
    Column("holders", "holders"),
    Column("joiners", "joiners"),
    *(Column(f"{what} s", f"seconds_{what}", ".4f") for what in ("median", "min", "max")),
    Column("speedup", "speedup", ".2f"),
    Column("Gbit/s", "gbit", ".2f"),
    Column("sent MiB", "bytes_sent", ".1f", 1 / MIB),
    Column("ratio", "ratio", ".2f"),
    Column("CPU s", "cpu_seconds", ".3f"),
    *(Column(f"{system} s", f"{system}_seconds_median", ".4f") for system in SYSTEMS),
    Column("late %", "late", ".2f", 100),
]

SCENARIO = Scenario(__doc__, add_arguments, measure, [Table("Shared state {options.place}", COLUMNS)], check)
