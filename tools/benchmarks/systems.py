"""The systems whose all-reduces are measured, each in its own processes: zpccl, torch's Gloo, TCP alone.

Each process is a `Worker` with a `Bench`, which has the tensors, does one all-reduce per request, and checks the
result.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import QUANTIZATIONS, Array, Row, WorkerFailed, say, spread
from workers import Hosts, Master, Peer, Worker, call_all, ended_workers, process_cpu_ns

import zpccl
from benchmarks.pattern import error_bound, fill_with, pattern, worst_error
from benchmarks.raw_tcp import RawTcp
from zpccl.control.keys import new_secret
from zpccl.engine.ciphers import Cipher, available

SYSTEMS = ("zpccl", "gloo", "raw_tcp")
ALGORITHMS = ("auto", "ring", "direct")
PLACES = ("out", "in", "in_no_restore")
"""Where zpccl puts the result: in a second buffer, in place, or in place with `restore=False`."""
TENSORS = ("numpy", "torch", "cuda")
"""What zpccl reduces: numpy arrays, or torch tensors on the CPU or on its GPU."""
ENCRYPTIONS = ("plain", "authenticated", "encrypted", *(cipher.name for cipher in Cipher if cipher))
"""Of zpccl: without a secret; with one, but frames in plain text; encrypted by its own choice, or by this cipher."""
RESET_PEAK = "5"
"""Written to clear_refs, it resets the peak of the resident set to the current size."""
WARM_UPS = 2
REPETITION_S_MIN = 0.25
"""Shorter all-reduces are repeated within a repetition for this time, in which the scheduler spreads processes that
woke on the same CPU."""
ITERATIONS_MAX = 2000


def resident_bytes() -> tuple[int, int]:
    """Peak and current size of this process's resident set.

    Both are from one read of the file, so that the peak is never smaller: a second read would itself need memory.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = {
        key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines) if "Vm" in key
    }
    return found["VmHWM"], found["VmRSS"]


class Bench:
    """Times the all-reduces of one process. Subclasses implement them."""

    def __init__(self, rank: int, peers: int) -> None:
        self.rank, self.peers = rank, peers
        self.send: Array = np.empty(0)
        self.recv: Array = np.empty(0)
        self.quantize = "none"
        self.batch = 1
        self._resident_bytes = 0

    def allocate(self, size_bytes: int, dtype: str, quantize: str, batch: int = 1) -> None:
        """Makes the tensors and touches their pages, after freeing the old ones. A batch has slices of one tensor."""
        self.send = self.recv = np.empty(0)
        self.send = np.empty(max(1, size_bytes // np.dtype(dtype).itemsize) * batch, dtype)
        fill_with(self.send, pattern([self.rank], dtype))
        self.recv = np.zeros_like(self.send)
        self.quantize, self.batch = quantize, batch
        self.reset()

    def reset(self) -> None:
        """Prepares the next all-reduce, so that an old result cannot be mistaken for a new one."""
        self.recv.fill(0)

    def address(self) -> Any:
        """The address that the other processes need to connect."""

    def join(self, addresses: Sequence[Any]) -> None:
        """Connects to the others, whose addresses are in order of rank."""
        raise NotImplementedError

    def once(self) -> None:
        """One all-reduce, or one batch."""
        raise NotImplementedError

    def check(self) -> str:
        """Checks the result; returns the problem, or "" if it is right."""
        period = pattern(range(self.peers), self.recv.dtype.name)
        error, bound = worst_error(self.recv, period), error_bound(self.peers, self.quantize)
        return f"rank {self.rank}: a sum is off by {error}, more than {bound}" if error > bound else ""

    def run(self, iterations: int) -> tuple[float, float]:
        """Runs `iterations` all-reduces; returns the seconds and the CPU seconds of one."""
        seconds = cpu_seconds = 0.0
        for iteration in range(iterations):
            if iteration:
                self.reset()
            cpu_began, began = time.process_time(), time.monotonic()
            self.once()
            seconds += time.monotonic() - began
            cpu_seconds += time.process_time() - cpu_began
        return seconds / iterations, cpu_seconds / iterations

    def begin_memory(self) -> None:
        """Resets the peak of the resident set."""
        Path("/proc/self/clear_refs").write_text(RESET_PEAK, encoding="ascii")
        _, self._resident_bytes = resident_bytes()

    def grown_memory(self) -> tuple[int, int]:
        """Growth of the resident set since `begin_memory`: at the peak, and now."""
        peak, now = resident_bytes()
        return peak - self._resident_bytes, now - self._resident_bytes

    def close(self) -> None:
        """Releases all resources."""


class ZpcclBench(Bench):
    """An all-reduce of zpccl.

    Args:
        rank: determines the contribution of this process (its rank in the run may differ).
        peers: number of processes.
        address: of the master.
        connections: to each other peer.
        place: one of PLACES.
        concurrent: tensors of a batch that are reduced at a time; None: all.
        algorithm: one of ALGORITHMS.
        encryption: one of ENCRYPTIONS.
        sockets: "local", or "tcp" also where processes share a host.
        secret: of the run; None: there is none.
    """

    def __init__(
        self,
        rank: int,
        peers: int,
        address: str,
        connections: int,
        place: str = "out",
        concurrent: int | None = None,
        algorithm: str = "auto",
        encryption: str = "plain",
        sockets: str = "local",
        secret: str | None = None,
    ) -> None:
        super().__init__(rank, peers)
        is_encrypted = encryption not in ("plain", "authenticated")
        self.peer = Peer(address, connections, secret=secret, encrypt=is_encrypted, local_sockets=sockets == "local")
        self.place, self.algorithm = place, algorithm
        self.concurrent = concurrent
        self.descriptors: list[zpccl.ReduceOpDescriptor] = []
        if encryption in Cipher.__members__:
            self.peer.comm._ciphers = (Cipher[encryption],)

    def allocate(self, size_bytes: int, dtype: str, quantize: str, batch: int = 1) -> None:
        """Makes the tensors, and descriptors of those of a batch."""
        self.descriptors = []
        super().allocate(size_bytes, dtype, quantize, batch)
        pieces = zip(np.split(self.send, self.batch), np.split(self.recv, self.batch), strict=True)
        operand = zpccl.ReduceOperandDescriptor(zpccl.DataType.from_numpy_dtype(self.recv.dtype))
        for tag, (send, recv) in enumerate(pieces):
            how = zpccl.ReduceDescriptor(recv.size, zpccl.ReduceOp.SUM, tag, operand, QUANTIZATIONS[quantize])
            source = send if self.place == "out" else recv
            self.descriptors.append(zpccl.ReduceOpDescriptor.from_numpy(source, recv, how))

    def join(self, addresses: Sequence[Any]) -> None:
        """Connects and waits for the others."""
        self.peer.join(self.peers)

    def optimize(self) -> None:
        """Lets the run measure its network."""
        self.peer.comm.optimize_topology()

    def connection_count(self) -> int:
        """Connections per link: the maximum over all links."""
        loop = self.peer.comm._loop
        assert loop is not None
        return max(loop.engine.link_state(peer_id).open_count for peer_id in list(loop._links))

    def reset(self) -> None:
        """Restores the input, if in place."""
        if self.place != "out":
            self.recv[:] = self.send
        else:
            super().reset()

    def once(self) -> None:
        """One all-reduce, or one batch."""
        if self.batch > 1:
            self.peer.comm.all_reduce_multiple_with_retry(
                self.descriptors, max_in_flight=self.concurrent or self.batch, algorithm=self.algorithm
            )
            return
        self.reduce(self.send, self.recv)

    def reduce(self, send: Any, recv: Any) -> None:
        """One all-reduce, of tensors of any kind."""
        self.peer.comm.all_reduce(
            send if self.place == "out" else recv,
            recv,
            quantization_options=QUANTIZATIONS[self.quantize],
            restore=self.place != "in_no_restore",
            algorithm=self.algorithm,
        )

    def close(self) -> None:
        """Leaves the run."""
        self.peer.close()


class TorchBench(ZpcclBench):
    """An all-reduce of zpccl with torch tensors.

    Args:
        device: of the tensors: "cpu" or "cuda".
        arguments: of `ZpcclBench`.
        options: of `ZpcclBench`.
    """

    def __init__(self, *arguments: Any, device: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        import torch

        self.torch, self.device = torch, device
        self.tensors: tuple[Any, Any] = None, None

    def allocate(self, size_bytes: int, dtype: str, quantize: str, batch: int = 1) -> None:
        """Makes the tensors on the device, beside those of the host."""
        self.tensors = None, None
        super().allocate(size_bytes, dtype, quantize, batch)

    def reset(self) -> None:
        """Prepares the tensors of the host, and copies them to the device."""
        super().reset()
        self.tensors = tuple(self.torch.from_numpy(array).to(self.device) for array in (self.send, self.recv))
        self.wait()

    def once(self) -> None:
        """Makes one all-reduce. It ends when the result can be used on the device."""
        send, recv = self.tensors
        self.reduce(send, recv)
        self.wait()

    def wait(self) -> None:
        """Waits for all work of the device."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def check(self) -> str:
        """Checks the result on the device."""
        self.recv[:] = self.tensors[1].cpu().numpy()
        return super().check()


class GlooBench(Bench):
    """An all-reduce of torch.distributed with Gloo.

    Args:
        rank: of this process.
        peers: processes.
        store: the file for torch's rendezvous.
        device: the network device to use.
    """

    def __init__(self, rank: int, peers: int, store: str, device: str) -> None:
        super().__init__(rank, peers)
        os.environ["GLOO_SOCKET_IFNAME"] = device
        import torch
        import torch.distributed

        self.torch = torch
        self.store = store
        self.tensors: list[Any] = []

    def join(self, addresses: Sequence[Any]) -> None:
        """Connects to the others."""
        distributed = self.torch.distributed
        store = distributed.FileStore(self.store, self.peers)
        distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.peers)

    def allocate(self, size_bytes: int, dtype: str, quantize: str, batch: int = 1) -> None:
        """Makes the tensors."""
        self.tensors = []
        super().allocate(size_bytes, dtype, quantize, batch)
        self.tensors = [self.torch.from_numpy(part) for part in np.split(self.recv, batch)]

    def reset(self) -> None:
        """Restores the input, which the result has replaced."""
        self.recv[:] = self.send

    def once(self) -> None:
        """One all-reduce, or a batch that is begun at once."""
        all_reduce = self.torch.distributed.all_reduce
        if self.batch == 1:
            all_reduce(self.tensors[0])
            return
        for work in [all_reduce(tensor, async_op=True) for tensor in self.tensors]:
            work.wait()

    def close(self) -> None:
        """Leaves."""
        if self.torch.distributed.is_initialized():
            self.torch.distributed.destroy_process_group()


class RawTcpBench(Bench):
    """The bytes of an all-reduce over TCP, and nothing else.

    Args:
        rank: of this process.
        peers: processes.
        connections: sockets to each neighbour.
        host: the address to listen at.
    """

    def __init__(self, rank: int, peers: int, connections: int, host: str) -> None:
        super().__init__(rank, peers)
        self.sockets = RawTcp(rank, connections, host)

    def address(self) -> tuple[str, int]:
        """Where this process listens."""
        return self.sockets.address

    def join(self, addresses: Sequence[Any]) -> None:
        """Connects to the neighbours."""
        self.sockets.connect_ring(addresses)

    def half_bytes(self) -> int:
        """Bytes that each half of an all-reduce sends."""
        return self.recv.nbytes * (self.peers - 1) // self.peers

    def once(self) -> None:
        """Sends and receives (N-1)/N of the tensor, twice."""
        send, recv = self.send.data.cast("B"), self.recv.data.cast("B")
        self.sockets.exchange(self.peers, send[: self.half_bytes()], recv[: self.half_bytes()], times=2)

    def check(self) -> str:
        """The received bytes must be the neighbour's."""
        got = self.recv[: self.half_bytes() // self.recv.itemsize]
        error = worst_error(got, pattern([(self.rank - 1) % self.peers], self.recv.dtype.name))
        return f"rank {self.rank}: what came is not what was sent" if error else ""

    def close(self) -> None:
        """Closes the sockets."""
        self.sockets.close()


@dataclass
class System:
    """The processes of one system."""

    name: str
    workers: list[Worker]
    connections: int
    master_pid: int | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    iterations: int = 1

    def allocate(self, size_bytes: int, dtype: str, quantize: str, batch: int = 1) -> None:
        """Makes tensors, warms up, and chooses the number of all-reduces per repetition."""
        call_all(self.workers, "allocate", size_bytes, dtype, quantize, batch)
        self.iterations = 1
        for _ in range(WARM_UPS):
            self.repeat()
        self.iterations = min(ITERATIONS_MAX, math.ceil(REPETITION_S_MIN / self.seconds[-1]))
        self.seconds, self.cpu_seconds = [], []

    def repeat(self) -> None:
        """One repetition, checked.

        Raises:
            WorkerFailed: a result is wrong.
        """
        call_all(self.workers, "reset")  # This is the barrier: all have answered.
        master_began_ns = process_cpu_ns(self.master_pid) if self.master_pid else 0
        results = call_all(self.workers, "run", self.iterations)
        master_ns = process_cpu_ns(self.master_pid) - master_began_ns if self.master_pid else 0
        self.check()
        self.seconds.append(max(seconds for seconds, _ in results))
        self.cpu_seconds.append(sum(cpu for _, cpu in results) + master_ns / 1e9 / self.iterations)

    def check(self) -> None:
        """Checks the results.

        Raises:
            WorkerFailed: one is wrong.
        """
        problems = [problem for problem in call_all(self.workers, "check") if problem]
        if problems:
            raise WorkerFailed(f"{self.name}: {'; '.join(problems)}")

    def times(self) -> dict[str, Any]:
        """Median, minimum and maximum of the repetitions, and the median of the CPU time."""
        return {**spread(self.seconds, "seconds"), "cpu_seconds": statistics.median(self.cpu_seconds)}


def take_turns(
    systems: Sequence[System], reps: int, size_bytes: int, dtype: str, quantize: str, batch: int = 1
) -> None:
    """Measures systems in turns, repetition by repetition, so that disturbances of the machine affect all of them."""
    for system in systems:
        system.allocate(size_bytes, dtype, quantize, batch)
    for _ in range(reps):
        for system in systems:
            system.repeat()


def speeds_beside(rows: Sequence[Row], other: str) -> list[float | None]:
    """The speed of each row relative to another system; None if that was not measured."""
    seconds = {row["system"]: row["seconds_median"] for row in rows}
    return [seconds[other] / row["seconds_median"] if other in seconds else None for row in rows]


@contextlib.contextmanager
def start_system(
    hosts: Hosts,
    name: str,
    peers: int,
    connections: int,
    *,
    label: str = "",
    encryption: str = "plain",
    tensors: str = "numpy",
    **options: Any,
) -> Iterator[System]:
    """Starts the connected processes of a system: peers on the first hosts, a master on the next one.

    Args:
        hosts: the hosts.
        name: one of SYSTEMS.
        peers: number of processes.
        connections: per pair; Gloo has one.
        label: of the results; "": the name.
        encryption: of zpccl, one of ENCRYPTIONS.
        tensors: of zpccl, one of TENSORS.
        options: further options of `ZpcclBench`.
    """
    with contextlib.ExitStack() as stack:
        master: Master | None = None
        factory: Callable[..., Bench] = RawTcpBench
        arguments: tuple[Any, ...] = ()
        if name == "zpccl":
            secret = None if encryption == "plain" else new_secret()
            master = stack.enter_context(Master(hosts, peers, secret=secret))
            factory, arguments = ZpcclBench, (master.address, connections)
            options |= {"secret": secret, "encryption": encryption}
            if tensors != "numpy":
                factory = functools.partial(TorchBench, device="cuda" if tensors == "cuda" else "cpu")
        elif name == "gloo":
            store = Path(stack.enter_context(tempfile.TemporaryDirectory()), "store")
            factory, arguments, connections = GlooBench, (str(store), hosts.device), 1
        workers = stack.enter_context(ended_workers())
        for rank in range(peers):
            if name == "raw_tcp":
                arguments = (connections, hosts.address(rank))
            workers.append(hosts.start(rank, f"{name} {rank}", factory, rank, peers, *arguments, **options))
        call_all(workers, "join", call_all(workers, "address"))
        yield System(label or name, workers, connections, master.pid if master is not None else None)


def add_systems(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Adds --systems."""
    text = "what to measure (default all that can be had)"
    parser.add_argument("--systems", choices=names, nargs="+", default=None, help=text)


def check_systems(parser: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Completes --systems, or exits with an error message."""
    if "encrypted" in (options.systems or ()):
        check_encryption(parser)
    has_torch = importlib.util.find_spec("torch") is not None
    if options.systems is None:
        options.systems = [name for name in names if has_torch or name != "gloo"]
        if not has_torch:
            say("torch is not installed: no gloo (`make test-torch` installs it)")
    elif "gloo" in options.systems and not has_torch:
        parser.error("--systems gloo needs torch, which `make test-torch` installs")


def check_encryption(parser: argparse.ArgumentParser) -> None:
    """Exits with an error message if nothing can be encrypted here."""
    if not available():
        parser.error("encryption needs PyNaCl: pip install 'zpccl[secure]'")


def check_tensors(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with an error message if there is no torch, or no GPU, for the tensors of --tensors."""
    if options.tensors == ["numpy"]:
        return
    if importlib.util.find_spec("torch") is None:
        parser.error("--tensors needs torch, which `make test-torch` installs")
    if options.batch > 1:
        parser.error("--tensors: batches are of numpy")
    for tensors in options.tensors:
        check_device(parser, "--tensors", tensors)


def check_device(parser: argparse.ArgumentParser, option: str, device: str) -> None:
    """Exits with an error message if an option names a GPU and torch has none."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error(f"{option} cuda: torch has no GPU here")


def check_quantize(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with an error message if --quantize and --dtype do not match."""
    if options.quantize != ["none"] and not options.dtype.startswith("float"):
        parser.error(f"--quantize: only floating-point tensors can be quantised, not {options.dtype}")
