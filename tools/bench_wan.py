"""Times all-reduces over long fat pipes, beside raw TCP and Gloo: throughput against connections, delay and loss.

Each peer, and the master, is on a host of its own, in a wide-area network made by the package `wan`: by netem where the
kernel has it, else by an emulator in user space. All paths between peers have the same delay, rate and loss, in either
direction; those to the master have the delay only. What is measured:

  zpccl    `all_reduce`, SUM, out of place, over --connections connections to each other peer; 0: its own choice
  sealed   the same in a run with a secret, everything encrypted; needs PyNaCl, measured only where asked for
  raw_tcp  the same bytes over as many sockets, both ways at once, and nothing else: no vote, no reducing
  gloo     torch.distributed.all_reduce, which has one connection a pair; where torch is there

The tensor is what the path's rate carries in --seconds; an eighth of that, where even the eighth takes longer. So rows
compare, and slow ones do not take for ever. `latency_s` is what an all-reduce of 4 KiB takes: its votes, some round
trips to the master and back, are a part of every all-reduce whatever its size.

`mbit` is what a peer sends in one direction, 2(N-1)/N x bytes / seconds; `share` is its part of the path's rate, of
which IP and TCP headers take 3.5 %. `late`, `device_drops`: what the emulator was late with, and what it missed: look
at these before you believe a row. It needs Linux and root.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_systems import SYSTEMS, GlooBench, RawTcpBench, System, ZpcclBench
from cut_paths import Master
from measuring import (
    Host,
    Row,
    Worker,
    add_output_arguments,
    bus_bandwidth_gbit,
    call_all,
    close_all,
    connection_count,
    format_bytes,
    positive,
    print_table,
    run_tool,
    say,
    spread,
    write_json,
)
from networks import DEVICE, enter
from wan.choose import BACKENDS, make_network
from wan.emulated import EmulatedNetwork
from wan.settings import Settings
from wan.wide import CONGESTION_CONTROLS, WideNetwork

import zpccl
from zpccl.control.keys import new_secret

WAN_SYSTEMS = (*SYSTEMS, "sealed")
OWN_SYSTEMS = ("zpccl", "sealed")
"""Those that can choose their connections."""
LATENCY_BYTES = 4096
UNIT_BYTES = 1 << 20
PART, PROBES = 8, 2
"""Where each of so many probes with this part of the tensor takes longer than the whole should, the part is used."""
TENSOR_BYTES_MAX = 4 << 30


@dataclass(frozen=True)
class Cell:
    """One network, and how many connections go over each of its paths."""

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


# --- Systems in a network ---------------------------------------------------------------------------------------------


def on_host(namespace: str, factory: Callable[..., Host], *arguments: Any) -> Host:
    """Makes an object of a worker whose process belongs to a host from now on."""
    enter(namespace)
    return factory(*arguments)


def start_workers(network: WideNetwork, name: str, factories: Sequence[Callable[..., Host]]) -> list[Worker]:
    """A worker on each of the first hosts."""
    return [
        Worker(f"{name} {host}", on_host, network.namespace(host), factory) for host, factory in enumerate(factories)
    ]


@contextlib.contextmanager
def start_zpccl(network: WideNetwork, peers: int, connections: int, secret: str | None = None) -> Iterator[System]:
    """A master and its peers."""
    timeout_s = zpccl.limits.HEARTBEAT_TIMEOUT_NS / 1e9
    master = Worker("master", Master, network.namespace(peers), network.address(peers), timeout_s, secret)
    encrypt = None if secret is None else True
    workers: list[Worker] = []
    try:
        address = master.call("address")
        workers += start_workers(
            network,
            "zpccl",
            [
                functools.partial(
                    ZpcclBench, address, connections, "out", rank, peers, listen=None, secret=secret, encrypt=encrypt
                )
                for rank in range(peers)
            ],
        )
        call_all(workers, "join")
        yield System("zpccl" if secret is None else "sealed", workers, connections, master.pid)
    finally:
        close_all([*workers, master])


def start_sealed(network: WideNetwork, peers: int, connections: int) -> contextlib.AbstractContextManager[System]:
    """The same with a secret."""
    return start_zpccl(network, peers, connections, new_secret())


@contextlib.contextmanager
def start_gloo(network: WideNetwork, peers: int, connections: int) -> Iterator[System]:
    """Processes with torch."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        workers = start_workers(
            network, "gloo", [functools.partial(GlooBench, store, rank, peers, DEVICE) for rank in range(peers)]
        )
        try:
            call_all(workers, "join")
            yield System("gloo", workers, connections)
        finally:
            close_all(workers)


@contextlib.contextmanager
def start_raw_tcp(network: WideNetwork, peers: int, connections: int) -> Iterator[System]:
    """Processes with sockets."""
    workers = start_workers(
        network,
        "raw_tcp",
        [functools.partial(RawTcpBench, connections, rank, peers, network.address(rank)) for rank in range(peers)],
    )
    try:
        addresses = call_all(workers, "address")
        call_all(workers, "join", addresses)
        yield System("raw_tcp", workers, connections)
    finally:
        close_all(workers)


STARTERS = {"zpccl": start_zpccl, "gloo": start_gloo, "raw_tcp": start_raw_tcp, "sealed": start_sealed}

# --- Measuring --------------------------------------------------------------------------------------------------------


def choose_bytes(system: System, options: argparse.Namespace) -> tuple[int, float]:
    """The size of the tensor, in whole MiB, and the seconds of an all-reduce of next to nothing.

    The probes warm the connections up too.
    """
    whole = rate_bytes(options) * options.seconds / (2 * (options.peers - 1) / options.peers)
    whole = min(TENSOR_BYTES_MAX, max(PART * UNIT_BYTES, whole))
    latency_s = min(once(system, LATENCY_BYTES), once(system, LATENCY_BYTES))
    part = int(whole / PART / UNIT_BYTES) * UNIT_BYTES
    # A single probe may be slow because its last packet was lost, or the connections were cold.
    is_slow = all(once(system, part) > options.seconds for _ in range(PROBES))
    return part if is_slow else int(whole / UNIT_BYTES) * UNIT_BYTES, latency_s


def rate_bytes(options: argparse.Namespace) -> float:
    """What a path carries in a second."""
    return float(options.rate) * 1e6 / 8


def once(system: System, size_bytes: int) -> float:
    """Seconds of one checked all-reduce of new tensors."""
    call_all(system.workers, "allocate", size_bytes, "float32", "none")
    system.iterations = 1
    system.repeat()
    return system.seconds[-1]


def measure(network: WideNetwork, name: str, cell: Cell, options: argparse.Namespace) -> Row:
    """All repetitions of one system in one cell."""
    connections = 1 if name == "gloo" else cell.connections
    with STARTERS[name](network, options.peers, connections) as system:
        size_bytes, latency_s = choose_bytes(system, options)
        call_all(system.workers, "allocate", size_bytes, "float32", "none")
        if connections == 0:
            connections = max(call_all(system.workers, "connection_count"))
        system.seconds, system.cpu_seconds = [], []
        if isinstance(network, EmulatedNetwork):
            network.reset_counts()
        for _ in range(options.reps):
            system.repeat()
        seconds = spread(system.seconds, "seconds")
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
            "mbit": mbit,
            "share": mbit / options.rate,
            **what_the_emulator_says(network),
        }


def what_the_emulator_says(network: WideNetwork) -> Row:
    """Losses on all paths, and whether the emulator kept up; nothing of netem."""
    if not isinstance(network, EmulatedNetwork):
        return {}
    counts = network.counts()
    total = counts.total
    row: Row = {name: sum(path[name] for path in counts.paths.values()) for name in ("out", "lost", "overflown")}
    row["late"] = total["late"] / max(1, total["writes"])
    row["device_drops"] = total["device_drops"]
    row["emulator_cpu"] = total["cpu_ns"] / max(1, total["wall_ns"])
    return row


def measure_all(options: argparse.Namespace) -> list[Row]:
    """All cells, in one network that changes from cell to cell. Connections are new in each."""
    cells = [Cell(rtt, loss, count) for rtt in options.rtt for loss in options.loss for count in options.connections]
    rows: list[Row] = []
    began = time.monotonic()
    with make_network(settings_of(cells[0], options), options.backend, options.seed) as network:
        kind = "the emulator" if isinstance(network, EmulatedNetwork) else "netem"
        say(f"{len(cells)} networks of {options.peers} hosts and the master's, by {kind}")
        if options.congestion:
            network.use_congestion_control(options.congestion)
        for number, cell in enumerate(cells, 1):
            network.configure(settings_of(cell, options))
            for name in options.systems:
                if name == "gloo" and cell.connections != options.connections[0]:
                    continue
                if name == "raw_tcp" and cell.connections == 0:
                    continue
                rows.append(measure(network, name, cell, options))
                write_json(options.json, rows)  # What is measured stays, however long the rest takes.
                minutes = (time.monotonic() - began) / 60
                say(f"[{number}/{len(cells)}, {minutes:.1f} min] " + "  ".join(cells_of(rows[-1])))
    return rows


# --- Output -----------------------------------------------------------------------------------------------------------

COLUMNS = [
    "system",
    "peers",
    "RTT ms",
    "loss %",
    "conns",
    "bytes",
    "latency s",
    "median s",
    "Mbit/s",
    "share",
    "late %",
]


def cells_of(row: Row) -> list[str]:
    """The row as text, in COLUMNS."""
    return [
        row["system"],
        str(row["peers"]),
        f"{row['rtt_ms']:g}",
        f"{row['loss'] * 100:g}",
        f"{row['connections']}*" if row.get("own_choice") else str(row["connections"]),
        format_bytes(row["bytes"]),
        f"{row['latency_s']:.3f}",
        f"{row['seconds_median']:.3f}",
        f"{row['mbit']:.0f}",
        f"{row['share']:.3f}",
        f"{row['late'] * 100:.2f}" if "late" in row else "-",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Throughput against connections, a panel for each round-trip time.

    Raises:
        ImportError: no matplotlib.
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
    named: dict[str, Any] = {}
    for panel in panels[0]:
        named |= {label: line for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.tight_layout()
    figure.legend(named.values(), named.keys(), fontsize=8, handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=100, bbox_inches="tight")
    pyplot.close(figure)


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Writes and prints what was asked for."""
    if options.read:
        write_json(options.json, list(rows))
    if options.plot:
        draw(rows, options.plot)
    title = f"All-reduce over paths of {rows[0]['rate_mbit']:g} Mbit/s (*: zpccl's own choice of connections)"
    print_table(title, COLUMNS, [cells_of(row) for row in rows])


# --- Command line -----------------------------------------------------------------------------------------------------


def share(text: str) -> float:
    """A share from the command line: 0.001 or 0.1%.

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


def connections(text: str) -> int:
    """A number of connections from the command line; 0: zpccl's own choice.

    Raises:
        argparse.ArgumentTypeError: not from 0 to the maximum.
    """
    return 0 if text == "0" else connection_count(text)


def above_zero(text: str) -> float:
    """A number above 0 from the command line.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, choices=(2, 3, 4), default=2, help="2 to 4 hosts (default 2)")
    parser.add_argument(
        "--rtt", type=above_zero, nargs="+", default=[10.0, 100.0, 200.0], help="round-trip ms (default 10 100 200)"
    )
    parser.add_argument(
        "--loss", type=share, nargs="+", default=[0.0, 0.001, 0.01], help="of segments (default 0 0.1%% 1%%)"
    )
    parser.add_argument("--rate", type=above_zero, default=1000.0, help="Mbit/s of each path, one way (default 1000)")
    parser.add_argument(
        "--connections",
        type=connections,
        nargs="+",
        default=[1, 4, 16, 64],
        help="a pair; 0: as many as zpccl chooses (default 1 4 16 64)",
    )
    parser.add_argument(
        "--systems", choices=WAN_SYSTEMS, nargs="+", default=None, help="default: all that can be had, but for sealed"
    )
    parser.add_argument("--seconds", type=above_zero, default=5.0, help="at the full rate, of a repetition (default 5)")
    parser.add_argument("--reps", type=positive, default=3, help="repetitions (default 3)")
    parser.add_argument("--congestion", choices=CONGESTION_CONTROLS, help="of all connections (default the system's)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default auto: netem if the kernel has it")
    parser.add_argument("--seed", type=int, default=0, help="of the losses (default 0)")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE", help="measure nothing: show what these JSON files have"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it there (PNG); needs matplotlib")
    add_output_arguments(parser)
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Completes the options, or ends the program with what is wrong."""
    has_torch = importlib.util.find_spec("torch") is not None
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'zpccl[examples]'")
    if options.systems is None:
        options.systems = [system for system in SYSTEMS if has_torch or system != "gloo"]
        if not has_torch and not options.read:
            say("torch is not installed: no gloo (`make test-torch` installs it)")
    elif "gloo" in options.systems and not has_torch:
        parser.error("--systems gloo needs torch, which `make test-torch` installs")
    if "sealed" in (options.systems or ()) and importlib.util.find_spec("nacl") is None:
        parser.error("--systems sealed needs PyNaCl: pip install 'zpccl[secure]'")


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    check_options(parser, options)

    def play() -> int:
        if options.read:
            rows = [row for path in options.read for row in json.loads(path.read_text(encoding="utf-8"))]
        else:
            rows = measure_all(options)
        show(rows, options)
        return 0

    return run_tool(play)


if __name__ == "__main__":
    sys.exit(main())
