"""The models: one small configuration holds, and broken rules fail (`make model` runs all)."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.harness import until

CHECK = Path(__file__).resolve().parent.parent / "tools" / "model" / "check.py"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("spin") is None or shutil.which("cc") is None, reason="needs spin and cc")
def test_rules_hold_and_broken_ones_do_not() -> None:
    done = subprocess.run([sys.executable, str(CHECK), "--quick"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("broken: ") == 3
    assert "all 4 as they must be" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("spin") is None or shutil.which("cc") is None, reason="needs spin and cc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    command, environment = [sys.executable, str(CHECK), "--only", "deep"], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([*command, "--deep"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(list(tmp_path.glob("*/pan"))) == 2, "two searches")
        process.send_signal(number)
        _, said = process.communicate()
    assert (process.returncode, said) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []


def test_a_word_that_no_configuration_has_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, str(CHECK), "--only", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no configuration has 'nothing' in its name" in done.stderr or "not found" in done.stderr
