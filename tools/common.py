"""Helpers of the tools: sizes, arguments, medians, tables, exit status."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from networks import NetworkUnavailable
from numpy.typing import NDArray

import zpccl
from zpccl.cli.output import discard

MIB = 1 << 20

Array: TypeAlias = NDArray[Any]
Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = Generator[Row, None, None]


class WorkerFailed(Exception):
    """A child raised, died, did not answer, or returned a wrong result."""


# --- Sizes and medians ------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<prefix>[KMGT])(?P<binary>i)?)?B?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """The bytes of "4096", "4KiB", "64 MiB" (powers of 1024) or "64MB" (powers of 1000).

    Raises:
        argparse.ArgumentTypeError: the text is not a size, or not a whole number of bytes above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 4KiB, 64MiB or 1GB")
    base = 1024 if match["binary"] else 1000
    power = _UNITS[match["prefix"].upper()] if match["prefix"] else 0
    size = float(match["number"]) * base**power
    if size < 1 or size != math.floor(size):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes above 0")
    return int(size)


def format_bytes(size: int) -> str:
    """The shortest exact text: 65536 is "64KiB", 1000 is "1000B"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return f"{size}B"


def bus_bandwidth_gbit(peers: int, size_bytes: int, seconds: float) -> float:
    """Bus bandwidth in Gbit/s: each peer sends 2(N-1)/N times the tensor in an all-reduce, in one direction.

    Args:
        peers: N, 2 or more.
        size_bytes: of the tensor.
        seconds: of one all-reduce.
    """
    return 2 * (peers - 1) / peers * size_bytes / seconds * 8 / 1e9


def spread(values: Sequence[float], name: str) -> dict[str, float | None]:
    """Median, minimum and maximum as `name`_median and so on; None where there are no values."""
    functions: dict[str, Callable[[Sequence[float]], float]] = {"median": statistics.median, "min": min, "max": max}
    return {f"{name}_{what}": function(values) if values else None for what, function in functions.items()}


# --- Arguments --------------------------------------------------------------------------------------------------------


def whole(first: int, last: int | None = None) -> Callable[[str], int]:
    """Makes a parser for a whole number in a range, for argparse."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < first or (last is not None and int(text) > last):
            allowed = f"of {first} or more" if last is None else f"from {first} to {last}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {allowed}")
        return int(text)

    return parse


positive = whole(1)


def above_zero(text: str) -> float:
    """Parses a number above 0, for argparse.

    Raises:
        argparse.ArgumentTypeError: it is not a number above 0.
    """
    value = _number(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def zero_or_more(text: str) -> float:
    """Parses a number that is not below 0, for argparse.

    Raises:
        argparse.ArgumentTypeError: it is not such a number.
    """
    value = _number(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def new_file(text: str) -> Path:
    """Parses the path of a file to be written, and makes its folder, for argparse. A symbolic link is followed.

    Raises:
        argparse.ArgumentTypeError: there can be no such file, or it would replace something that is no file.
    """
    path = Path(os.path.realpath(text))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_other = path.exists() and not path.is_file()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if is_other:
        raise argparse.ArgumentTypeError(f"{text!r} exists and is not a regular file")
    return path


DTYPES = ("float32", "float64", "float16", "uint8", "int8", "int32", "int64")
QUANTIZATIONS = {
    name: zpccl.QuantizationOptions(zpccl.QuantizedDataType[datatype], zpccl.QuantizationAlgorithm[algorithm])
    for name, datatype, algorithm in (
        ("none", "UINT8", "NONE"),
        ("minmax", "UINT8", "MIN_MAX"),
        ("zps", "UINT8", "ZERO_POINT_SCALE"),
        ("zps-int8", "INT8", "ZERO_POINT_SCALE"),
        ("minmax-uint4", "UINT4", "MIN_MAX"),
        ("zps-uint4", "UINT4", "ZERO_POINT_SCALE"),
        ("zps-int4", "INT4", "ZERO_POINT_SCALE"),
    )
}
"""It has no MIN_MAX of signed types: that differs from MIN_MAX of unsigned types only in the sign bit of the codes."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "--bytes": {"type": parse_bytes, "help": "size of the tensor"},
    "--connections": {"type": whole(1, zpccl.limits.LINK_CONNECTIONS_MAX), "help": "TCP connections per pair of peers"},
    "--dtype": {"choices": DTYPES, "help": "element type of the tensor"},
    "--peers": {"type": whole(2, 64), "help": "number of peers"},
    "--quantize": {"choices": tuple(QUANTIZATIONS), "help": "quantisation by zpccl"},
    "--reps": {"type": positive, "help": "repetitions"},
    "--seed": {"type": int, "help": "seed of the random numbers"},
}
"""Arguments that several tools share, by flag."""


def add(parser: argparse.ArgumentParser, flag: str, default: Any, text: str = "", **settings: Any) -> None:
    """Adds an argument, with the settings of ARGUMENTS unless overridden. If the default is a list it takes several
    values.

    Args:
        parser: the parser to extend.
        flag: such as "--bytes".
        default: as on the command line.
        text: the help, without the default.
        settings: further arguments of `add_argument`.
    """
    settings = ARGUMENTS.get(flag, {}) | ({"help": text} if text else {}) | settings
    parse: Callable[[str], Any] = settings.get("type", str)
    several = isinstance(default, list)
    shown = " ".join(map(str, default)) if several else str(default)
    if several:
        settings["nargs"] = "+"
    value = [parse(str(one)) for one in default] if several else parse(str(default))
    settings["help"] = f"{settings['help']} (default {shown})".replace("%", "%%")
    parser.add_argument(flag, default=value, **settings)


# --- Output -----------------------------------------------------------------------------------------------------------


def write_json(path: Path | None, data: Any) -> None:
    """Writes `data` to the file, if one is given, atomically."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def say(text: str) -> None:
    """Prints a line of progress to standard error; standard output is for results only."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table in Markdown, as in the documentation, with aligned columns."""
    widths = [max(3, *map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(f"{title}\n")
    rules = ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    for row in (columns, rules, *rows):
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
        print(f"| {' | '.join(cells)} |")
    sys.stdout.flush()


# --- The end ----------------------------------------------------------------------------------------------------------


def run_tool(play: Callable[[], int]) -> int:
    """Runs a tool; returns its exit status. Ctrl-C, SIGTERM, the loss of its terminal and a reader that has closed its
    output end its children too and leave no traceback."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # If it is ignored, as under nohup, the tool goes on.
        signal.signal(signal.SIGHUP, lambda number, _: sys.exit(128 + number))
    try:
        return play()
    except KeyboardInterrupt:
        say("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except (WorkerFailed, NetworkUnavailable, zpccl.PCCLError) as error:
        say(f"failed: {error}")
        return 1
