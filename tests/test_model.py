"""The models: one small configuration holds, broken rules do not (all of it: `make model`)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parent.parent / "tools" / "model" / "check.py"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("spin") is None or shutil.which("cc") is None, reason="needs spin and cc")
def test_rules_hold_and_broken_ones_do_not() -> None:
    done = subprocess.run([sys.executable, str(CHECK), "--quick"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("broken: ") == 3
    assert "all 4 as they must be" in done.stdout
