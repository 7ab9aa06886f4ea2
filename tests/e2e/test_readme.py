"""The README is correct: its program runs, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TIMEOUT_S = 60


def blocks(language: str) -> list[str]:
    """The code blocks of a language; "" selects blocks without one."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.e2e
def test_the_program_runs_and_all_peers_end_alike() -> None:
    """S5: two peers run the program to its end and hold equal weights: the average of their ranks."""
    (program,) = blocks("python")
    command = [sys.executable, "-m", "zpccl.cli.master", "--bind", "127.0.0.1:0", "--recovery-grace", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as master:
        assert master.stdout is not None
        try:
            address = master.stdout.readline().split()[-1]
            assert "127.0.0.1:48148" in program
            program = program.replace("127.0.0.1:48148", address).replace("time.sleep(0.1)", "time.sleep(0.01)")
            program += "\nprint(state.revision, weights.min(), weights.max())\n"
            peers = [
                subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
            ]
            outputs = [peer.communicate(timeout=TIMEOUT_S)[0].split() for peer in peers]
        finally:
            master.terminate()
    assert [peer.returncode for peer in peers] == [0, 0]
    assert outputs[0] == outputs[1]
    revision, smallest, largest = map(float, outputs[0])
    assert revision == 100
    assert smallest == largest == pytest.approx(0.5, abs=1e-4)


def test_its_make_targets_exist() -> None:
    """Every `make X` that the README names is a target."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(blocks(""))))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
