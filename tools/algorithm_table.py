"""Puts a table of the algorithms that plans choose (zpccl.protocol.routes) into docs/algorithms.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from common import format_bytes

from zpccl import limits
from zpccl.protocol.network import Network, Speeds, Tensor
from zpccl.protocol.routes import plan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"
BEGIN, END = "<!-- made by tools/algorithm_table.py -->", "<!-- end -->"
PEERS = (2, 3, 4, 8, 16, 64)
SIZES = tuple(4 * limits.KIB * 2**step for step in range(21))
"""Bytes of float32, 4 KiB to 4 GiB."""
MB = 1_000_000
RTT_NS = 100 * limits.MS


def network_of(peers: int, path: int | None, host: int | None) -> Network:
    """A network of far peers in which all paths and all hosts have these rates."""
    rates, delays = ((rate,) * peers for rate in (path, RTT_NS))
    return Network((rates,) * peers, (delays,) * peers, (host,) * peers)


SITUATIONS: dict[str, Callable[[int], tuple[Network, Speeds]]] = {
    "nothing is known yet": lambda peers: (Network.unknown(peers), Speeds()),
    "one machine: 0.1 ms a hop, ring 1,000 MB/s, direct 800 MB/s": lambda peers: (
        Network.unknown(peers),
        Speeds(100_000, 1000 * MB, 800 * MB),
    ),
    "RTT 100 ms, every path has 12 MB/s": lambda peers: (network_of(peers, 12 * MB, None), Speeds()),
    "RTT 100 ms, every host sends and receives 100 MB/s": lambda peers: (network_of(peers, None, 100 * MB), Speeds()),
}


def choose(network: Network, size: int, speeds: Speeds, *, is_quantised: bool) -> str:
    """The algorithm for this number of bytes on the wire, as text."""
    route = plan(network, Tensor(size, is_quantised), speeds)
    assert route is not None, "all paths work"
    return route.algorithm.name.lower().replace("_", "-")


def describe(network: Network, speeds: Speeds, *, is_quantised: bool) -> str:
    """The choices for all sizes, as text."""
    divisor = 4 if is_quantised else 1
    choices = groupby(SIZES, lambda size: choose(network, size // divisor, speeds, is_quantised=is_quantised))
    parts = [(name, re.sub(r"(?=[KMG]iB)", " ", format_bytes(max(sizes)))) for name, sizes in choices]
    return ", then ".join([*(f"{name} to {size}" for name, size in parts[:-1]), parts[-1][0]])


def make_table() -> str:
    """The table, in Markdown."""
    lines = ["| paths | peers | float32 | float32 as one byte |", "|---|---|---|---|"]
    for name, situation in SITUATIONS.items():
        rows: dict[str, list[str]] = {}
        for peers in PEERS:
            plain, quantised = (describe(*situation(peers), is_quantised=how) for how in (False, True))
            rows.setdefault(f"{plain} | {quantised}", []).append(str(peers))
        lines += [f"| {name} | {', '.join(which)} | {choices} |" for choices, which in rows.items()]
    return "\n".join(lines) + "\n"


def put_into(page: str) -> str:
    """The page with the current table."""
    before, rest = page.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{make_table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(put_into(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
