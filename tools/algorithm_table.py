"""Prints the table of docs/algorithms.md that shows which algorithm plans choose, and updates that page.

    python tools/algorithm_table.py           prints the table
    python tools/algorithm_table.py --write   puts it into the page

The choices are those of zpccl.protocol.cost, for paths of several kinds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from zpccl import limits
from zpccl.protocol.cost import Speeds, choose
from zpccl.types import Algorithm

PAGE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"
BEGIN, END = "<!-- made by tools/algorithm_table.py -->", "<!-- end -->"
PEERS = (2, 3, 4, 8, 16, 64)
SIZES = tuple(4 * limits.KIB * 2**step for step in range(21))
"""Bytes of float32, 4 KiB to 4 GiB."""
MB = 1_000_000

SITUATIONS: tuple[tuple[str, Callable[[int], Speeds]], ...] = (
    ("nothing is known yet", lambda peers: Speeds()),
    ("one machine: 0.1 ms a hop, ring 1,000 MB/s, direct 800 MB/s", lambda peers: Speeds(100_000, 1000 * MB, 800 * MB)),
    ("RTT 100 ms, every path has 12 MB/s", lambda peers: Speeds(50 * limits.MS, 12 * MB, 12 * MB * (peers - 1))),
    ("RTT 100 ms, all paths cross one line: ring 100 MB/s, direct 40 MB/s", lambda peers: _one_line()),
)


def _one_line() -> Speeds:
    return Speeds(50 * limits.MS, 100 * MB, 40 * MB)


def format_size(size_bytes: int) -> str:
    """The size as text, such as "64 KiB"."""
    for unit, name in ((limits.MIB * 1024, "GiB"), (limits.MIB, "MiB"), (limits.KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def describe(peers: int, speeds: Speeds, *, is_quantised: bool) -> str:
    """The choices for all sizes, as text."""
    element_bytes = 1 if is_quantised else 4
    choices = [choose(peers, size // 4 * element_bytes, is_quantised, speeds) for size in SIZES]
    if len(set(choices)) == 1:
        return choices[0].name.lower()
    change = next(place for place, choice in enumerate(choices) if choice is not choices[0])
    if len(set(choices[change:])) != 1:
        raise ValueError(f"the choice for {peers} peers changes more than once")
    first, then = choices[0].name.lower(), Algorithm(choices[change]).name.lower()
    return f"{first} to {format_size(SIZES[change - 1])}, then {then}"


def make_table() -> str:
    """The table, in Markdown."""
    lines = ["| paths | peers | float32 | float32 as one byte |", "|---|---|---|---|"]
    for name, speeds_of in SITUATIONS:
        rows: dict[str, list[int]] = {}
        for peers in PEERS:
            plain, quantised = (describe(peers, speeds_of(peers), is_quantised=how) for how in (False, True))
            rows.setdefault(f"{plain} | {quantised}", []).append(peers)
        for choices, which in rows.items():
            lines.append(f"| {name} | {', '.join(map(str, which))} | {choices} |")
    return "\n".join(lines) + "\n"


def put_into(page: str) -> str:
    """The page with the current table."""
    before, rest = page.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{make_table()}{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/algorithms.md")
    if parser.parse_args(arguments).write:
        PAGE.write_text(put_into(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(make_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
