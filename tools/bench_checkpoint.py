"""Measures checkpoints: seconds to save and to load, and the size of the file, beside numpy.save and blosc2.

All write to the same directory and wait until what they wrote is on the disk (fsync); all load from the page cache,
into memory that is there already. What is loaded is compared.

  zpccl    SharedState.save_state and load_state: compressed by blosc2, digested, and the old file or the new one
  numpy    numpy.save and numpy.load: neither
  blosc2   blosc2.pack_tensor of the whole array, with the same codec, filter and number of threads, and a plain write
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import blosc2
import numpy as np
from common import (
    Array,
    Row,
    WorkerFailed,
    add_output_arguments,
    format_bytes,
    parse_bytes,
    print_table,
    run_tool,
    spread,
    write_json,
)
from state_contents import RANDOM, TRAINED, ZEROS, fill, make_stale, trained_weights

import zpccl

COLUMNS = ["system", "contents", "bytes", "of it in the file", "save s", "save GB/s", "load s", "load GB/s"]


class System(Protocol):
    """A way to keep an array in a file."""

    def save(self, array: Array, path: Path) -> None:
        """Writes it, to the disk."""

    def load(self, array: Array, path: Path) -> None:
        """Reads it back, into an array of the same size."""


class Zpccl:
    """This package."""

    def save(self, array: Array, path: Path) -> None:
        """As users do."""
        self._state(array).save_state(path)

    def load(self, array: Array, path: Path) -> None:
        """As users do."""
        self._state(array).load_state(path)

    def _state(self, array: Array) -> zpccl.SharedState:
        return zpccl.SharedState([zpccl.TensorInfo.from_numpy(array, "x")])


class Numpy:
    """The plain bytes."""

    def save(self, array: Array, path: Path) -> None:
        """numpy.save."""
        with path.open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())

    def load(self, array: Array, path: Path) -> None:
        """numpy.load."""
        array[:] = np.load(path)


class Blosc2:
    """The whole array compressed at once."""

    def save(self, array: Array, path: Path) -> None:
        """blosc2.pack_tensor."""
        threads = len(os.sched_getaffinity(0))
        options = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "nthreads": threads, "typesize": array.itemsize}
        with path.open("wb") as file:
            file.write(blosc2.pack_tensor(array, cparams=options))
            file.flush()
            os.fsync(file.fileno())

    def load(self, array: Array, path: Path) -> None:
        """blosc2.unpack_tensor."""
        array[:] = blosc2.unpack_tensor(path.read_bytes())


SYSTEMS: dict[str, Callable[[], System]] = {"zpccl": Zpccl, "numpy": Numpy, "blosc2": Blosc2}


def measure(name: str, contents: str, array: Array, path: Path, repeats: int) -> Row:
    """Some saves and loads of one array.

    Raises:
        WorkerFailed: what was loaded is not what was saved.
    """
    system = SYSTEMS[name]()
    loaded = np.empty_like(array)
    saves, loads = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        system.save(array, path)
        saves.append(time.perf_counter() - begin)
        make_stale(loaded)
        begin = time.perf_counter()
        system.load(loaded, path)
        loads.append(time.perf_counter() - begin)
        if not np.array_equal(loaded, array):
            raise WorkerFailed(f"{name} loads something else than it saved")
    size = path.stat().st_size
    path.unlink()
    row = {"system": name, "contents": contents, "bytes": array.nbytes, "file_bytes": size, "repeats": repeats}
    return {**row, "ratio": size / array.nbytes, **spread(saves, "save_seconds"), **spread(loads, "load_seconds")}


def format_row(row: Row) -> list[str]:
    """Of the table."""
    cells = [row["system"], row["contents"], format_bytes(row["bytes"]), f"{row['ratio']:.4f}"]
    for name in ("save_seconds_median", "load_seconds_median"):
        cells += [f"{row[name]:.3f}", f"{row['bytes'] / row[name] / 1e9:.2f}"]
    return cells


def play(options: argparse.Namespace) -> int:
    """Measures everything; returns the exit status."""
    rows = []
    weights = trained_weights(options.bytes // 4) if TRAINED in options.contents else None
    array = np.empty(options.bytes // 4, np.float32)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for contents in options.contents:
            fill(array, contents, weights)
            rows += [
                measure(name, contents, array, Path(directory) / "file", options.repeats) for name in options.systems
            ]
    print_table("checkpoints", COLUMNS, [format_row(row) for row in rows])
    write_json(options.json, rows)
    return 0


def main() -> int:
    """Runs the tool; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = (ZEROS, RANDOM, TRAINED)
    parser.add_argument("--bytes", type=parse_bytes, default=256 * 2**20, help="of the array (default 256MiB)")
    parser.add_argument("--contents", nargs="+", choices=kinds, default=list(kinds), help="default: all")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="default: all")
    parser.add_argument("--directory", type=Path, help="on which disk (default: that of temporary files)")
    parser.add_argument("--repeats", type=int, default=5, help="saves and loads of each (default 5)")
    add_output_arguments(parser)
    options = parser.parse_args()
    if options.bytes < 4:
        parser.error("--bytes: at least 4, one float32")
    return run_tool(lambda: play(options))


if __name__ == "__main__":
    sys.exit(main())
