"""Times training steps of DistributedDataParallel on the backend of zpccl, beside Gloo, on this machine.

A step is a forward and a backward pass of a stack of linear layers, with --bytes of float32 parameters in all, on
--batch samples, and one step of SGD. Each process has one thread for torch. The systems take turns, repetition by
repetition, in one run, so that disturbances of the machine affect all of them. A repetition has --steps steps, and its
time is that of the slowest process; the first one does not count.

  alone   each process trains for itself: the time of a step without DDP
  gloo    DDP on torch's Gloo
  zpccl   DDP on zpccl, with the master in the process of rank 0, as `init_process_group("zpccl")` starts it
  zpccl+master  the same with a master in its own process

All ranks must end with the same weights, bit for bit. With two peers, all systems with DDP must end with the same
weights: a sum of two has no order. `of_gloo` is the speed relative to Gloo; `cpu_seconds` is user and system time of
one step, of all processes but the master.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Row, Rows, add, positive, say, spread
from workers import LOOPBACK, Master, Worker, call_all, ended_workers

from benchmarks.scenario import Column, Scenario, plain, times
from benchmarks.systems import check_device, speeds_beside

SYSTEMS = ("alone", "gloo", "zpccl", "zpccl+master")
LAYERS = 8
ITEM_BYTES = 4


class Trainer:
    """One rank.

    Args:
        system: one of SYSTEMS.
        rank: of this process.
        peers: processes.
        master: address of a master, or "".
        device: of the model: "cpu" or "cuda".
    """

    def __init__(self, system: str, rank: int, peers: int, master: str, device: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ.update(MASTER_ADDR="127.0.0.1")
        if master:
            os.environ["ZPCCL_MASTER"] = master
        import torch

        self.torch: Any = torch
        self.system, self.rank, self.peers, self.device = system, rank, peers, device
        torch.set_num_threads(1)

    def join(self, store: str, size_bytes: int, batch: int) -> None:
        """Makes the model, and connects to the others unless the system is "alone"."""
        torch = self.torch
        width = round((size_bytes / ITEM_BYTES / LAYERS) ** 0.5)
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers).to(self.device)
        torch.manual_seed(self.rank)
        self.samples = torch.randn(batch, width).to(self.device)
        if self.system != "alone":
            from torch.nn.parallel import DistributedDataParallel

            import zpccl.torch  # noqa: F401, makes the backend known.

            name = self.system.partition("+")[0]
            distributed = torch.distributed
            distributed.init_process_group(
                name, store=distributed.FileStore(store, self.peers), rank=self.rank, world_size=self.peers
            )
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def run(self, steps: int) -> tuple[float, float]:
        """Trains; returns the seconds and the CPU seconds of a step."""
        cpu_began, began = time.process_time(), time.monotonic()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.samples).square().mean().backward()
            self.optimizer.step()
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return (time.monotonic() - began) / steps, (time.process_time() - cpu_began) / steps

    def digest(self) -> str:
        """A digest of the weights."""
        weights = b"".join(parameter.numpy(force=True).tobytes() for parameter in self.model.parameters())
        return hashlib.sha256(weights).hexdigest()

    def close(self) -> None:
        """Leaves."""
        if self.torch.distributed.is_initialized():
            self.torch.distributed.destroy_process_group()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--peers", [2], "processes")
    add(parser, "--bytes", ["25MiB"], "of parameters")
    add(parser, "--batch", 64, "samples of each process in a step", type=positive)
    add(parser, "--steps", 10, "steps of a repetition", type=positive)
    add(parser, "--reps", 7)
    add(parser, "--systems", list(SYSTEMS), "what is measured", choices=SYSTEMS)
    add(parser, "--device", "cpu", "of the model; all processes share the first GPU", choices=("cpu", "cuda"))


def measure_systems(
    trainers: dict[str, Sequence[Worker]], options: argparse.Namespace, peers: int, size_bytes: int
) -> Rows:
    found: dict[str, list[list[tuple[float, float]]]] = {system: [] for system in trainers}
    for repetition in range(options.reps + 1):
        for system, workers in trainers.items():
            results = call_all(workers, "run", options.steps)
            if repetition:
                found[system].append(results)
    digests = {system: set(call_all(trainers[system], "digest")) for system in trainers if system != "alone"}
    problems = [f"the weights of the ranks of {system} differ" for system, found in digests.items() if len(found) > 1]
    if peers == 2 and len(set().union(*digests.values())) > max(map(len, digests.values()), default=1):
        problems.append("the weights of systems differ")
    rows: list[Row] = []
    for system, repetitions in found.items():
        seconds = [max(step for step, _ in results) for results in repetitions]
        cpu_seconds = statistics.median(sum(cpu for _, cpu in results) for results in repetitions)
        rows.append({"system": system, "peers": peers, "bytes": size_bytes, "batch": options.batch})
        rows[-1].update(**spread(seconds, "seconds"), cpu_seconds=cpu_seconds, reps=options.reps)
    for row, speed in zip(rows, speeds_beside(rows, "gloo"), strict=True):
        row["of_gloo"] = speed
    rows[-1]["problems"] = problems
    yield from rows


def measure(options: argparse.Namespace) -> Rows:
    for peers in options.peers:
        for size_bytes in options.bytes:
            say(f"{peers} peers, {size_bytes} bytes")
            with contextlib.ExitStack() as stack:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                trainers: dict[str, Sequence[Worker]] = {}
                for system in options.systems:
                    master = ""
                    if system == "zpccl+master":
                        master = stack.enter_context(Master(LOOPBACK)).address
                    workers = stack.enter_context(ended_workers())
                    trainers[system] = workers
                    for rank in range(peers):
                        trainer = (system, rank, peers, master, options.device)
                        workers.append(Worker(f"{system} {rank}", Trainer, *trainer))
                    call_all(workers, "join", str(directory / system), size_bytes, options.batch)
                yield from measure_systems(trainers, options, peers, size_bytes)


COLUMNS = [
    *plain("system", "peers", "bytes"),
    *times("seconds", ".2f"),
    Column("CPU ms", "cpu_seconds", ".2f", 1e3),
    Column("of Gloo", "of_gloo", ".2f"),
]


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if importlib.util.find_spec("torch") is None:
        parser.error("DDP needs torch, which `make test-torch` installs")
    check_device(parser, "--device", options.device)


SCENARIO = Scenario(__doc__, add_arguments, measure, "Training steps of DDP", COLUMNS, check)
