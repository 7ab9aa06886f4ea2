"""Demonstrates fault tolerance: three peers train a language model, one is killed, a new one joins, training continues.

Starts a master and three peers (diloco_text.py) as processes on this machine. Prints one line per outer step, as
reported by peer 1. Succeeds (exit status 0) if the loss fell and all surviving peers ended with the same parameters.
Also plots loss and number of peers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).with_name("diloco_text.py")
SILENCE_SECONDS_MAX = 60
"""Timeout: the demo fails if no peer reports anything for this long."""
MASTER_GREETING = "listens on "

Record = dict[str, Any]


class DemoFailed(Exception):
    """The demo did not have the expected outcome."""


@contextlib.contextmanager
def child_process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs Python with `command` on one thread; the process does not outlive the block."""
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **one_thread}
    child = subprocess.Popen(
        [sys.executable, *command], env=environment, stdin=subprocess.DEVNULL, text=True, **options
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


@dataclass
class Peer:
    """One training process and what it has reported so far."""

    name: str
    child: subprocess.Popen[str]
    records: list[Record] = field(default_factory=list)


class Demo:
    """The processes, and the recorded events."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, args: argparse.Namespace) -> None:
        self.stack = stack
        self.folder = folder
        self.args = args
        self.events: queue.SimpleQueue[tuple[Peer, Record | None]] = queue.SimpleQueue()
        self.peers: list[Peer] = []
        self.marks: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self.address = self._start_master()

    def _start_master(self) -> str:
        """Starts a master on a free port; returns its address."""
        command = ["-m", "zpccl.cli.master", "--bind", "127.0.0.1:0", "--recovery-grace", "0.1"]
        with (self.folder / "master.txt").open("w") as log:
            master = self.stack.enter_context(child_process(command, stdout=subprocess.PIPE, stderr=log))
        assert master.stdout is not None
        greeting = master.stdout.readline()
        if MASTER_GREETING not in greeting:
            raise DemoFailed(f"the master did not start\n{self.outputs()}")
        return greeting.partition(MASTER_GREETING)[2].strip()

    def start_peer(self) -> Peer:
        """Starts one more peer. Its records are put into `events` as they come, and None when it ends."""
        name = f"peer {len(self.peers) + 1}"
        reading, writing = os.pipe()
        command = [str(EXAMPLE), "--master", self.address, "--json-log", f"/dev/fd/{writing}", "--min-peers", "2"]
        command += ["--steps", str(self.args.steps), "--inner-steps", str(self.args.inner_steps)]
        with (self.folder / f"{name}.txt").open("w") as file:
            options = {"stdout": file, "stderr": file, "pass_fds": [writing]}
            child = self.stack.enter_context(child_process(command, **options))
        os.close(writing)
        peer = Peer(name, child)
        self.peers.append(peer)
        threading.Thread(target=self._pass_on, args=(peer, reading), daemon=True).start()
        return peer

    def _pass_on(self, peer: Peer, reading: int) -> None:
        with open(reading) as lines:
            for line in lines:
                if line.endswith("\n"):  # A killed peer may leave half a line.
                    self.events.put((peer, {**json.loads(line), "time": self.elapsed()}))
        self.events.put((peer, None))

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def mark(self, what: str, text: str) -> None:
        """Records and prints an event."""
        self.marks.append((self.elapsed(), what))
        print(f"  >> {what}: {text}", flush=True)

    def play(self) -> None:
        """Trains to the end. Peer 2 is killed after a third of the steps; a new peer starts two steps later."""
        kill_step = self.args.steps // 3
        narrator, victim, _ = (self.start_peer() for _ in range(3))
        newcomer: Peer | None = None
        running = len(self.peers)
        print(f"{'step':>6}{'peers':>7}{'train loss':>12}{'val loss':>10}{'MB moved':>10}{'seconds':>9}", flush=True)
        while running:
            peer, record = self._next_event()
            if record is None:
                running -= 1
                if peer.child.wait() != 0 and peer is not victim:
                    raise DemoFailed(f"{peer.name} ended with status {peer.child.returncode}\n{self.outputs()}")
                continue
            peer.records.append(record)
            if peer is narrator and "peers" in record:
                print_row(record)
                if record["step"] == kill_step:
                    self.mark("kill", f"{victim.name} (pid {victim.child.pid}) gets SIGKILL in the middle of its work")
                    victim.child.kill()
                if record["step"] == kill_step + 2:
                    newcomer = self.start_peer()
                    running += 1
                    print(f"  >> {newcomer.name} starts (pid {newcomer.child.pid})", flush=True)
            if peer is newcomer and len(peer.records) == 1:
                self.mark("join", f"{peer.name} is in: has step {record['step']}, loss {record['validation_loss']:.3f}")

    def _next_event(self) -> tuple[Peer, Record | None]:
        try:
            return self.events.get(timeout=SILENCE_SECONDS_MAX)
        except queue.Empty:
            raise DemoFailed(f"nothing happened for {SILENCE_SECONDS_MAX} s\n{self.outputs()}") from None

    def outputs(self) -> str:
        """The output of the children."""
        return "\n".join(f"--- {file.stem}\n{file.read_text()}" for file in sorted(self.folder.iterdir()))

    def judge(self) -> None:
        """Prints the outcome. Raises DemoFailed if the loss did not fall or the peers differ."""
        losses = [record["validation_loss"] for record in self.peers[0].records if "validation_loss" in record]
        digests = {peer.name: record["sha256"] for peer in self.peers for record in peer.records if "sha256" in record}
        print(f"loss on held-out text: {losses[0]:.3f} before, {losses[-1]:.3f} after (nats per character)")
        for name, digest in digests.items():
            print(f"parameters of {name}: {digest}")
        if len(digests) != len(self.peers) - 1 or len(set(digests.values())) != 1:
            raise DemoFailed("all peers but the killed one must end with the same parameters")
        if losses[-1] >= losses[0]:
            raise DemoFailed("the loss did not fall")
        print(f"equal on all {len(digests)}; {self.elapsed():.0f} s in all", flush=True)

    def draw(self, path: Path) -> None:
        """Plots loss and number of peers over time."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        records = [record for record in self.peers[0].records if "peers" in record]
        seconds = [record["time"] for record in records]
        figure, (upper, lower) = plt.subplots(
            2, 1, sharex=True, figsize=(9, 6), height_ratios=[3, 1], layout="constrained"
        )
        upper.plot(seconds[1:], [record["train_loss"] for record in records[1:]], ".-", label="peer 1's shard")
        upper.plot(seconds, [record["validation_loss"] for record in records], ".-", label="held-out files")
        upper.set(title="DiLoCo with peers that come and go", ylabel="loss, nats per character")
        upper.legend()
        lower.step(seconds, [record["peers"] for record in records], where="pre", color="black")
        lower.set(xlabel="time, s", ylabel="peers", ylim=(0, 3.5), yticks=range(4))
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
            for time_seconds, what in self.marks:
                axes.axvline(time_seconds, color="tab:red" if what == "kill" else "tab:green", linestyle="--")
        for time_seconds, what in self.marks:
            upper.annotate(f" {what}", (time_seconds, 0.6), xycoords=("data", "axes fraction"), fontsize="large")
        figure.savefig(path, dpi=120)
        print(f"drawn in {path}")


def print_row(record: Record) -> None:
    """Prints the row of an outer step; the first record describes the initial state."""
    train_loss = f"{record['train_loss']:.3f}" if "train_loss" in record else "-"
    print(
        f"{record['step']:>6}{record['peers']:>7}{train_loss:>12}{record['validation_loss']:>10.3f}"
        f"{record.get('bytes', 0) / 1e6:>10.1f}{record.get('seconds', 0):>9.2f}",
        flush=True,
    )


def main() -> int:
    """Plays the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="outer steps, 12 or more (default 30)")
    parser.add_argument(
        "--inner-steps",
        type=int,
        default=150,
        help="inner steps of each; with few of them the run may end before the newcomer is in (default 150)",
    )
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the plot (default demo.png)")
    args = parser.parse_args()
    if args.steps < 12:
        parser.error("--steps: the story needs at least 12")
    if not args.out.parent.is_dir():  # Not only after a minute of training.
        parser.error(f"--out: there is no folder {args.out.parent}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Ends the children, too.
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            demo = Demo(stack, Path(folder), args)
            demo.play()
        demo.judge()
        demo.draw(args.out)
    except DemoFailed as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
