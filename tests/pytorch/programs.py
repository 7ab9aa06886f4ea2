"""Training programs with several processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 150


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(size: int, *arguments: str | Path, restarts: int = 0, may_abort: bool = False, **environment: str) -> str:
    """Runs a program under torchrun on `size` ranks, and returns their output. Fails unless all end with status 0.

    Args:
        size: number of ranks.
        arguments: the program and its arguments.
        restarts: how often all ranks are restarted after one has failed.
        may_abort: whether they may end with another status. If so, their error output is printed.
        environment: variables in addition to those of this process.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
    command += ["--max-restarts", str(restarts)]
    # Otherwise Gloo finds addresses of processes from before a restart.
    shared = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        env={**os.environ, **shared, **environment},
    )
    if may_abort:
        print(done.stderr)
    else:
        assert done.returncode == 0, done.stderr
    return done.stdout


class Processes:
    """The ranks of a program, each a process with the variables that torch's launchers set. They read input lines."""

    def __init__(self, program: str | Path, size: int, *arguments: str, **environment: str) -> None:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, *([program] if isinstance(program, Path) else ["-c", program]), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **shared, "RANK": str(rank), **environment},
                cwd=ROOT,
            )
            for rank in range(size)
        ]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()

    def line(self, rank: int) -> str:
        """The next line that a rank prints."""
        output = self.ranks[rank].stdout
        assert output is not None
        return output.readline().strip()

    def tell(self, rank: int, line: str = "") -> None:
        """Sends a line to a rank."""
        into = self.ranks[rank].stdin
        assert into is not None
        into.write(line + "\n")
        into.flush()

    def end(self, rank: int) -> str:
        """Waits until a rank has ended with status 0. Returns the rest of its output."""
        output, _ = self.ranks[rank].communicate(timeout=LONGEST_SECONDS)
        assert self.ranks[rank].returncode == 0
        return output
