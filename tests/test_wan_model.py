"""The model of the emulator of wide-area networks (tools/wan/model.c): compiled with its tests, under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
WAN = TESTS.parent / "tools" / "wan"


@pytest.mark.slow
def test_model(tmp_path: Path) -> None:
    """Delays and rates to the nanosecond, losses by seed, queues, cuts, and remainders of super-packets."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "test_model"
    flags = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", f"-I{WAN}"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [TESTS / "wan" / "test_model.c", WAN / "model.c", WAN / "packet.c"]
    subprocess.run([compiler, *flags, "-o", program, *sources, "-lm"], check=True)
    # The pool of packets is never freed, on purpose.
    ran = subprocess.run(
        [program], env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}, text=True, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
