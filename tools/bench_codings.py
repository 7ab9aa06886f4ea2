"""What the codings of shared state make of data of several kinds, and which is chosen for links of several speeds.

    python tools/bench_codings.py --megabytes 8

Prints two tables in Markdown, as docs/shared_state.md has them: ratio and speed of one thread, and choices.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from zpccl.dataplane.coding_choice import CodingChoice, Group
from zpccl.dataplane.state_codec import CODINGS, RAW, Coding, Sample, measure
from zpccl.limits import MIB, STATE_SAMPLE_BYTES
from zpccl.types import DataType

LINKS = {"10 Mbit/s": 10e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "2.5 Gbit/s": 2.5e9, "10 Gbit/s": 10e9}


def bfloat16(values: Any) -> Any:
    """The bits of values as bfloat16, by truncation."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def data_of(nbytes: int) -> dict[str, Any]:
    """Arrays of about so many bytes, by what they are like."""
    rng = np.random.default_rng(0)
    normal = rng.normal(0, 0.02, nbytes // 2)
    half = normal[: nbytes // 4]
    return {
        "random bytes": rng.integers(0, 256, nbytes, np.uint8).view(np.float32),
        "weights f32 (normal)": half.astype(np.float32),
        "weights bf16": bfloat16(normal),
        "weights f16": normal.astype(np.float16),
        "f32 that were bf16": (bfloat16(half).astype(np.uint32) << 16).view(np.float32),
        "Adam, second moment f32": np.exp(rng.normal(-14, 2, nbytes // 4)).astype(np.float32),
        "f32, 5 % not zero": np.where(rng.random(nbytes // 4) < 0.05, half, 0).astype(np.float32),
        "int64, sorted": np.sort(rng.integers(0, 50_000, nbytes // 8)),
    }


def measure_all(array: Any, coding: Coding) -> Sample:
    """The sum of samples of all its parts; of a long measurement the first part, which warms up, does not count."""
    memory = memoryview(array).cast("B")
    pieces = [memory[at : at + STATE_SAMPLE_BYTES] for at in range(0, len(memory), STATE_SAMPLE_BYTES)]
    samples = [measure(piece, array.itemsize, coding) for piece in pieces[: 8 if coding is CODINGS[-1] else None]]
    return Sample(
        coding,
        STATE_SAMPLE_BYTES,
        int(statistics.mean(sample.packed_bytes for sample in samples)),
        statistics.median(sample.encode_seconds for sample in samples),
        statistics.median(sample.decode_seconds for sample in samples),
    )


def chosen(samples: list[Sample], bits_per_second: float, workers: int) -> str:
    """The coding of the blocks of a GiB."""
    choice, group = CodingChoice(workers), Group(DataType.FLOAT, 0)
    by_coding = {sample.coding: sample for sample in samples}
    while (step := choice.choose(group, MIB, 1024 * MIB, bits_per_second / 8)).sample is not None:
        choice.add(group, by_coding[step.sample])
    return step.coding.name if step.coding is not RAW else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=8, help="of each kind of data")
    parser.add_argument("--workers", type=int, default=2, help="threads that code")
    arguments = parser.parse_args()
    names = [coding.name for coding in CODINGS]
    found = {
        what: [measure_all(array, coding) for coding in CODINGS]
        for what, array in data_of(arguments.megabytes * MIB).items()
    }
    print("| data |", *(f"{name} |" for name in names))
    print("|---|" + "---|" * len(names))
    for what, samples in found.items():
        cells = [
            f"{s.raw_bytes / s.packed_bytes:.2f}, {s.raw_bytes / s.encode_seconds / 1e6:.0f}"
            f" / {s.raw_bytes / s.decode_seconds / 1e6:.0f} |"
            for s in samples
        ]
        print(f"| {what} |", *cells)
    print("\n| data |", *(f"{link} |" for link in LINKS))
    print("|---|" + "---|" * len(LINKS))
    for what, samples in found.items():
        print(f"| {what} |", *(f"{chosen(samples, rate, arguments.workers)} |" for rate in LINKS.values()))


if __name__ == "__main__":
    main()
