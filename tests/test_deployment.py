"""The manifests for Kubernetes and the job for SLURM in examples/: what they ask of zpccl is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "examples" / name for name in ("kubernetes.yaml", "slurm.sh")]


def variables(text: str) -> set[str]:
    return set(re.findall(r"\bZPCCL_[A-Z_]+", text))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_variables_are_those_that_zpccl_reads(file: Path) -> None:
    known = variables("".join(module.read_text() for module in (ROOT / "zpccl").rglob("*.py")))
    used = variables(file.read_text())
    assert "ZPCCL_MASTER" in used and used <= known


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_options_of_the_master_are_known(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if "zpccl-master" in line]
    options = set(re.findall(r"--[a-z-]+", " ".join(line for line in lines if not line.lstrip().startswith("#"))))
    program = "from zpccl.cli.master import main; main(['--help'])"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    assert "--bind" in shown and all(option in shown for option in options)


def test_the_job_is_a_script() -> None:
    subprocess.run(["bash", "-n", FILES[1]], check=True)
    assert FILES[1].stat().st_mode & 0o111
