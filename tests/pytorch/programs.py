"""Training programs of several processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 150


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(size: int, *arguments: str | Path, restarts: int = 0, may_abort: bool = False, **environment: str) -> str:
    """Runs a program under torchrun on `size` ranks; returns what they print. Fails unless all end with 0.

    Args:
        size: ranks.
        arguments: the program and its arguments.
        restarts: how often all ranks are started again when one has failed.
        may_abort: whether they may end in another way. What they print as errors is printed then.
        environment: variables beside those of this process.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
    command += ["--max-restarts", str(restarts)]
    # Else Gloo finds addresses of processes of before a restart.
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
    """The ranks of a program, each a process with the variables that torch's launchers set. Lines of input reach it."""

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
        """Gives a rank a line."""
        into = self.ranks[rank].stdin
        assert into is not None
        into.write(line + "\n")
        into.flush()

    def end(self, rank: int) -> str:
        """Waits until a rank has ended, with 0; returns the rest of what it printed."""
        output, _ = self.ranks[rank].communicate(timeout=LONGEST_SECONDS)
        assert self.ranks[rank].returncode == 0
        return output
