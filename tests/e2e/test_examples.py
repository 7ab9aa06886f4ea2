"""The examples as a user runs them: a real master and real peers, each in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

Record = dict[str, Any]


class Peer:
    """A running diloco_text.py whose JSON lines can be read as they come."""

    def __init__(self, child: subprocess.Popen[str], log: IO[str]) -> None:
        self.child = child
        self._log = log

    def record(self) -> Record:
        """The next JSON line; waits for it."""
        line = self._log.readline()
        assert line.endswith("\n"), "the peer has ended"
        record: Record = json.loads(line)
        return record

    def records(self) -> list[Record]:
        """Waits for the end, which must be a success, and returns all remaining lines."""
        records: list[Record] = [json.loads(line) for line in self._log]
        assert self.child.wait() == 0
        return records


class Run:
    """A master. Starts examples that find it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        master = self.start(
            ["-m", "zpccl.cli.master", "--bind", "127.0.0.1:0", "--recovery-grace", "0.05"], stdout=subprocess.PIPE
        )
        assert master.stdout is not None
        stack.callback(master.stdout.close)
        self.address = master.stdout.readline().split()[-1]

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Starts Python with `command`. The process ends with the test at the latest."""
        child = subprocess.Popen([sys.executable, *command], env=ENVIRONMENT, text=True, **options)
        self._stack.callback(child.wait)
        self._stack.callback(child.kill)
        return child

    def peer(self, *arguments: str) -> Peer:
        """Starts a small diloco_text.py."""
        reading, writing = os.pipe()
        command = [str(EXAMPLES / "diloco_text.py"), "--master", self.address, "--json-log", f"/dev/fd/{writing}"]
        child = self.start([*command, "--inner-steps", "5", *arguments], pass_fds=[writing])
        os.close(writing)
        return Peer(child, self._stack.enter_context(open(reading)))


@pytest.fixture
def run() -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        yield Run(stack)


def test_hello_sums_over_three(run: Run) -> None:
    command = [sys.executable, str(EXAMPLES / "hello.py"), "3"]
    environment = {**ENVIRONMENT, "ZPCCL_MASTER": run.address}
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE))
            for _ in range(3)
        ]
        for child in children:
            stack.callback(child.kill)
        outputs = sorted(child.communicate()[0] for child in children)
        assert [child.returncode for child in children] == [0, 0, 0]
    assert outputs == [f"rank {rank} of 3: [6. 6. 6. 6.]\n" for rank in range(3)]


@pytest.mark.parametrize("quantize", ["none", "minmax", "zps"])
def test_two_peers_end_with_the_same_parameters(run: Run, quantize: str) -> None:
    """S1, S5: the digests are equal, and training has had an effect."""
    peers = [run.peer("--steps", "3", "--quantize", quantize) for _ in range(2)]
    one, other = (peer.records() for peer in peers)
    assert [record["step"] for record in one] == [0, 1, 2, 3, 3]
    assert [record.get("peers") for record in one] == [2, 2, 2, 2, None]
    assert one[-1] == other[-1]
    assert re.fullmatch("[0-9a-f]{64}", one[-1]["sha256"])
    assert [r["validation_loss"] for r in one[:-1]] == [r["validation_loss"] for r in other[:-1]]
    assert one[3]["validation_loss"] < one[0]["validation_loss"] - 0.2
    assert all(record["bytes"] > 0 and record["seconds"] > 0 for record in one[1:-1])


def test_resumes_from_a_checkpoint_and_a_fresh_peer_follows(run: Run, tmp_path: Path) -> None:
    """The same master goes on. All holders of its last revision are gone, and only the checkpoint is left."""
    checkpoint = str(tmp_path / "checkpoint")
    before, _ = [
        peer.records() for peer in [run.peer("--steps", "2", "--checkpoint", checkpoint), run.peer("--steps", "2")]
    ]
    resumed = run.peer("--steps", "4", "--checkpoint", checkpoint, "--resume")
    fresh = run.peer("--steps", "4", "--seed", "1")
    one, other = resumed.records(), fresh.records()
    assert [record["step"] for record in one] == [record["step"] for record in other] == [2, 3, 4, 4]
    assert one[0]["validation_loss"] == other[0]["validation_loss"] == before[-2]["validation_loss"]
    assert one[-1] == other[-1] and one[-1]["sha256"] != before[-1]["sha256"]


def test_resume_without_a_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    child = run.start(
        [str(EXAMPLES / "diloco_text.py"), "--resume", "--checkpoint", str(tmp_path / "nothing")],
        stderr=subprocess.PIPE,
    )
    _, errors = child.communicate()
    assert child.returncode == 2
    assert "--resume needs --checkpoint with a file that exists" in errors


@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_goes_on_when_a_peer_goes_and_another_comes(run: Run, signal_number: int, status: int) -> None:
    """L2: the remaining peer waits for others, and gives its state to the newcomer."""
    survivor, victim = run.peer("--steps", "8"), run.peer("--steps", "8")
    one = [survivor.record()]
    while one[-1]["step"] < 2:
        one.append(survivor.record())
    victim.child.send_signal(signal_number)
    assert victim.child.wait() == status
    newcomer = run.peer("--steps", "8", "--seed", "1")
    came = newcomer.record()
    assert 2 <= came["step"] < 8
    one += survivor.records()
    assert one[-1] == newcomer.records()[-1]
    assert [record["step"] for record in one] == [*range(9), 8]
    assert came["validation_loss"] in [
        record.get("validation_loss") for record in one if record["step"] == came["step"]
    ]


def test_goes_on_alone_if_told_to(run: Run) -> None:
    records = run.peer("--steps", "2", "--min-peers", "1").records()
    assert [record.get("peers") for record in records] == [1, 1, 1, None]


def test_nobody_listens_is_said_in_a_line(tmp_path: Path) -> None:
    """Port 1 of loopback: nobody listens there."""
    command = [sys.executable, str(EXAMPLES / "diloco_text.py"), "--master", "127.0.0.1:1"]
    ended = subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert ended.returncode == 1
    assert "127.0.0.1:1" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_demo_says_at_once_that_it_cannot_write_the_plot(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(tmp_path / "nowhere" / "demo.png")]
    ended = subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2 and f"there is no folder {tmp_path / 'nowhere'}" in ended.stderr


@pytest.mark.alone
def test_demo_shows_a_kill_and_a_join(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    command = [
        sys.executable,
        str(EXAMPLES / "demo.py"),
        "--steps",
        "18",
        "--inner-steps",
        "60",
        "--out",
        str(picture),
    ]
    ended = subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kill, join = ended.stdout.index(">> kill: peer 2"), ended.stdout.index(">> join: peer 4")
    assert kill < join < ended.stdout.index("equal on all 3")
    assert picture.read_bytes().startswith(b"\x89PNG")
