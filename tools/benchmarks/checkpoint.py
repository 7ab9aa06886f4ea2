"""Measures checkpoints: wall and CPU seconds to save and to load, compared with safetensors and numpy.

All write random float32 to the same directory and wait for fsync; all load from the page cache into existing memory.
The loaded data is compared. The systems take turns.

  zpccl        SharedState.save_state and load_state: with digests, and atomically
  safetensors  save_file and load_file of the package: neither
  numpy        numpy.save and numpy.load: neither
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy
from common import Array, Row, Rows, WorkerFailed, add, spread
from state_contents import RANDOM, fill, make_stale

import zpccl
from benchmarks.scenario import BYTES, Column, Scenario, Table


def _state(array: Array) -> zpccl.SharedState:
    return zpccl.SharedState([zpccl.TensorInfo.from_numpy(array, "x")])


def _save_safetensors(array: Array, path: Path) -> None:
    safetensors.numpy.save_file({"x": array}, path)
    _sync(path)


def _load_safetensors(array: Array, path: Path) -> None:
    array[:] = safetensors.numpy.load_file(path)["x"]


def _save_numpy(array: Array, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, array)
    _sync(path)


def _load_numpy(array: Array, path: Path) -> None:
    array[:] = np.load(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


SaveOrLoad = Callable[[Array, Path], None]
SYSTEMS: dict[str, tuple[SaveOrLoad, SaveOrLoad]] = {
    "zpccl": (lambda array, path: _state(array).save_state(path), lambda array, path: _state(array).load_state(path)),
    "safetensors": (_save_safetensors, _load_safetensors),
    "numpy": (_save_numpy, _load_numpy),
}
"""By system: how it saves an array, and loads it into one of the same size."""


def measure_once(action: SaveOrLoad, array: Array, path: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one action."""
    began, began_cpu = time.perf_counter(), time.process_time()
    action(array, path)
    return time.perf_counter() - began, time.process_time() - began_cpu


def row_of(name: str, size: int, saves: list[tuple[float, float]], loads: list[tuple[float, float]]) -> Row:
    """The row of one system."""
    row: Row = {"system": name, "bytes": size, "reps": len(saves)}
    for action, measured in (("save", saves), ("load", loads)):
        seconds, cpu_seconds = zip(*measured, strict=True)
        row |= spread(seconds, f"{action}_seconds") | spread(cpu_seconds, f"{action}_cpu_seconds")
        row[f"{action}_gbps"] = size / row[f"{action}_seconds_median"] / 1e9
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--bytes", "256MiB", "of the array")
    add(parser, "--systems", list(SYSTEMS), "what to measure", choices=tuple(SYSTEMS))
    parser.add_argument("--directory", type=Path, help="on which disk (default: that of temporary files)")
    add(parser, "--reps", 5)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.bytes < 4:
        parser.error("--bytes: at least 4, one float32")


def measure(options: argparse.Namespace) -> Rows:
    array = np.empty(options.bytes // 4, np.float32)
    fill(array, RANDOM, None)
    loaded = np.empty_like(array)
    saves: dict[str, list[tuple[float, float]]] = {name: [] for name in options.systems}
    loads: dict[str, list[tuple[float, float]]] = {name: [] for name in options.systems}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for _ in range(options.reps):
            for name in options.systems:
                path = Path(directory) / name
                save, load = SYSTEMS[name]
                saves[name].append(measure_once(save, array, path))
                make_stale(loaded)
                loads[name].append(measure_once(load, loaded, path))
                if not np.array_equal(loaded, array):
                    raise WorkerFailed(f"{name} loads something else than it saved")
                path.unlink()
    for name in options.systems:
        yield row_of(name, array.nbytes, saves[name], loads[name])


COLUMNS = [
    Column("system", "system"),
    Column("bytes", "bytes", BYTES),
    *(
        Column(f"{action} {unit}", f"{action}_{key}", form)
        for action in ("save", "load")
        for unit, key, form in (
            ("s", "seconds_median", ".3f"),
            ("GB/s", "gbps", ".2f"),
            ("CPU s", "cpu_seconds_median", ".3f"),
        )
    ),
]

SCENARIO = Scenario(__doc__, add_arguments, measure, [Table("Checkpoints", COLUMNS)], check)
