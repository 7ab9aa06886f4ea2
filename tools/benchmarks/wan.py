"""Times all-reduces over long fat networks, compared with raw TCP and Gloo: throughput by connections, delay and loss.

Each peer, and the master, is on its own host in an emulated wide-area network (the package `wan`). All paths between
peers have the same delay, rate and loss in both directions; those to the master have the delay only. Systems:

  zpccl      `all_reduce`, SUM, out of place, over --connections connections to each other peer; 0: its own choice. It
             requests BBR itself; the others use the congestion control of --congestion or of the system
  encrypted  the same in a run with a secret, everything encrypted; needs PyNaCl, measured only on request
  raw_tcp    the same bytes over as many sockets, in both directions: no votes, no reduction
  gloo       torch.distributed.all_reduce, with one connection per pair; if torch is installed

The tensor has the size that the path's rate carries in --seconds, or an eighth of that if even the eighth takes longer.
So rows are comparable, and slow ones end. `latency_s` is the median time of several all-reduces of 4 KiB: the part of
an all-reduce that does not depend on its bytes. `buckets_s` is the time of 20 all-reduces of 1 MiB that start at once,
as those of the buckets of a training step of DDP do.

`mbit` is the rate at which a peer sends, 2(N-1)/N x bytes / seconds; `share` is the fraction of the path's rate, of
which IP and TCP headers take 3.5 %. `late` and `device_drops` are late and lost packets of the emulator: check them
before you trust a row. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Row, Rows, above_zero, add, bus_bandwidth_gbit, new_file, say, whole
from networks import Namespaces
from wan.emulated import CONGESTION_CONTROLS, EmulatedNetwork
from wan.settings import Settings
from workers import Hosts, call_all

from benchmarks.scenario import Column, Scenario, plain
from benchmarks.systems import SYSTEMS, System, add_systems, check_systems, start_system
from zpccl import limits

WAN_SYSTEMS = (*SYSTEMS, "encrypted")
OWN_SYSTEMS = ("zpccl", "encrypted")
"""Systems that can choose their number of connections."""
LATENCY_BYTES = 4096
LATENCY_CALLS = 9
BUCKETS, BUCKET_BYTES, BUCKET_STEPS = 20, 1 << 20, 7
UNIT_BYTES = 1 << 20
PART, PROBES = 8, 2
"""If each of PROBES probes with an eighth of the tensor takes longer than --seconds, the tensor has only that size."""
TENSOR_BYTES_MAX = 4 << 30


@dataclass(frozen=True)
class Cell:
    """One network, and the number of connections per path."""

    rtt_ms: float
    loss: float
    connections: int


def settings_of(cell: Cell, options: argparse.Namespace) -> Settings:
    """The network of a cell: hosts of the peers first, then the master's."""
    master = options.peers
    lines = [
        f"link * * delay_ms={cell.rtt_ms / 2} rate_mbit={options.rate} loss={cell.loss}",
        f"link {master} * rate_mbit=0 loss=0",
    ]
    return Settings(options.peers + 1).with_lines(lines)


# --- Measuring --------------------------------------------------------------------------------------------------------


def choose_bytes(system: System, options: argparse.Namespace) -> int:
    """Chooses the size of the tensor, in whole MiB. The probes also warm up the connections."""
    whole = rate_bytes(options) * options.seconds / (2 * (options.peers - 1) / options.peers)
    whole = min(TENSOR_BYTES_MAX, max(PART * UNIT_BYTES, whole))
    part = int(whole / PART / UNIT_BYTES) * UNIT_BYTES
    # A single probe may be slow because its last packet was lost, or because congestion windows are still small.
    is_slow = all(once(system, part) > options.seconds for _ in range(PROBES))
    return part if is_slow else int(whole / UNIT_BYTES) * UNIT_BYTES


def rate_bytes(options: argparse.Namespace) -> float:
    """Bytes per second of a path."""
    return float(options.rate) * 1e6 / 8


def once(system: System, size_bytes: int, batch: int = 1) -> float:
    """One checked all-reduce of new tensors, or one batch; returns the seconds."""
    call_all(system.workers, "allocate", size_bytes, "float32", "none", batch)
    system.iterations = 1
    system.repeat()
    return system.seconds[-1]


def measure_system(network: EmulatedNetwork, name: str, cell: Cell, options: argparse.Namespace) -> Row:
    """All repetitions of one system in one cell."""
    connections = 1 if name == "gloo" else cell.connections
    what, encryption = ("zpccl", "encrypted") if name == "encrypted" else (name, "plain")
    with start_system(Hosts(network), what, options.peers, connections, label=name, encryption=encryption) as system:
        latency_s = statistics.median([once(system, LATENCY_BYTES) for _ in range(LATENCY_CALLS)])
        size_bytes = choose_bytes(system, options)
        buckets_s = statistics.median([once(system, BUCKET_BYTES, BUCKETS) for _ in range(BUCKET_STEPS)])
        call_all(system.workers, "allocate", size_bytes, "float32", "none")
        if connections == 0:
            connections = max(call_all(system.workers, "connection_count"))
        system.seconds, system.cpu_seconds = [], []
        network.reset_counts()
        for _ in range(options.reps):
            system.repeat()
        seconds = system.times()
        mbit = bus_bandwidth_gbit(options.peers, size_bytes, seconds["seconds_median"]) * 1e3
        return {
            "system": name,
            "peers": options.peers,
            "rtt_ms": cell.rtt_ms,
            "loss": cell.loss,
            "rate_mbit": options.rate,
            "connections": connections,
            "own_choice": cell.connections == 0 and name in OWN_SYSTEMS,
            "congestion": options.congestion or "default",
            "bytes": size_bytes,
            "reps": options.reps,
            **seconds,
            "latency_s": latency_s,
            "buckets_s": buckets_s,
            "mbit": mbit,
            "share": mbit / options.rate,
            **what_the_emulator_says(network),
        }


def what_the_emulator_says(network: Namespaces | None) -> Row:
    """Losses on all paths, and the lateness of the emulator; empty on loopback."""
    if not isinstance(network, EmulatedNetwork):
        return {}
    counts = network.counts()
    total = counts.total
    row: Row = {name: sum(path[name] for path in counts.paths.values()) for name in ("out", "lost", "overflown")}
    row["late"] = total["late"] / max(1, total["writes"])
    row["device_drops"] = total["device_drops"]
    row["emulator_cpu"] = total["cpu_ns"] / max(1, total["wall_ns"])
    return row


def measure(options: argparse.Namespace) -> Rows:
    """All cells, in one network that is reconfigured for each. Each cell has new connections."""
    rows: list[Row] = []
    cells = [Cell(rtt, loss, count) for rtt in options.rtt for loss in options.loss for count in options.connections]
    began = time.monotonic()
    with EmulatedNetwork(settings_of(cells[0], options), options.seed) as network:
        say(f"{len(cells)} networks of {options.peers} hosts and the master's")
        if options.congestion:
            network.use_congestion_control(options.congestion)
        for number, cell in enumerate(cells, 1):
            network.configure(settings_of(cell, options))
            for name in options.systems:
                if name == "gloo" and cell.connections != options.connections[0]:
                    continue
                if name == "raw_tcp" and cell.connections == 0:
                    continue
                rows.append(measure_system(network, name, cell, options))
                yield rows[-1]
            say(f"[{number}/{len(cells)}, {(time.monotonic() - began) / 60:.1f} min]")
    if options.plot:
        draw(rows, options.plot)


# --- The plot ---------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plots throughput against connections, one panel per round-trip time.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    delays = sorted({row["rtt_ms"] for row in rows})
    losses = sorted({row["loss"] for row in rows})
    counts = sorted({row["connections"] for row in rows if not row.get("own_choice")})
    systems = [name for name in WAN_SYSTEMS if any(row["system"] == name for row in rows)]
    figure, panels = pyplot.subplots(1, len(delays), figsize=(4 * len(delays), 3.6), sharey=True, squeeze=False)
    for panel, delay in zip(panels[0], delays, strict=True):
        for colour, name in enumerate(systems):
            for loss in losses:
                points = sorted(
                    (row["connections"], row["mbit"])
                    for row in rows
                    if (row["system"], row["rtt_ms"], row["loss"]) == (name, delay, loss) and not row.get("own_choice")
                )
                if points:
                    style = ["-", "--", ":", "-."][losses.index(loss) % 4]
                    label = f"{name}, {loss * 100:g} % loss"
                    panel.plot(*zip(*points, strict=True), style, color=f"C{colour}", marker=".", label=label)
        panel.axhline(rows[0]["rate_mbit"], color="grey", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_ylim(0, rows[0]["rate_mbit"] * 1.05)
        panel.set_title(f"round trip {delay:g} ms")
        panel.set_xlabel("connections")
    panels[0][0].set_ylabel("Mbit/s, one direction")
    figure.tight_layout()
    named = panels[0][0].get_legend_handles_labels()
    figure.legend(*named, fontsize=8, handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=100, bbox_inches="tight")
    pyplot.close(figure)


# --- The scenario -----------------------------------------------------------------------------------------------------


def share(text: str) -> float:
    """Parses a share, 0.001 or 0.1%, for argparse.

    Raises:
        argparse.ArgumentTypeError: not from 0 to below 1.
    """
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 0, 0.001 or 0.1%")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--peers", 2, "hosts", type=whole(2, 4))
    add(parser, "--rtt", [10, 100, 200], "round-trip ms", type=above_zero)
    add(parser, "--loss", ["0", "0.1%", "1%"], "of segments", type=share)
    add(parser, "--rate", 1000, "Mbit/s of each path, one way", type=above_zero)
    text = "a pair; 0: as many as zpccl chooses"
    add(parser, "--connections", [1, 4, 16, 64], text, type=whole(0, limits.LINK_CONNECTIONS_MAX))
    add_systems(parser, WAN_SYSTEMS)
    add(parser, "--seconds", 5, "at the full rate, of a repetition", type=above_zero)
    add(parser, "--reps", 3)
    parser.add_argument("--congestion", choices=CONGESTION_CONTROLS, help="of all connections (default the system's)")
    add(parser, "--seed", 0)
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw it there (PNG); needs matplotlib")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'zpccl[examples]'")
    check_systems(parser, options, SYSTEMS)


COLUMNS = [
    *plain("system", "peers"),
    Column("RTT ms", "rtt_ms", "g"),
    Column("loss %", "loss", "g", 100),
    Column("conns", "connections"),
    Column("own choice", "own_choice"),
    Column("bytes", "bytes"),
    Column("latency s", "latency_s", ".3f"),
    Column("buckets s", "buckets_s", ".3f"),
    Column("median s", "seconds_median", ".3f"),
    Column("Mbit/s", "mbit", ".0f"),
    Column("share", "share", ".3f"),
    Column("late %", "late", ".2f", 100),
]
SCENARIO = Scenario(__doc__, add_arguments, measure, "All-reduce over long fat pipes", COLUMNS, check)
