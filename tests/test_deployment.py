"""The manifests for Kubernetes and the SLURM job in examples/: zpccl has everything that they use."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("master", ["exec sleep 60", "exit 2"], ids=["runs", "has failed"])
def test_the_job_leaves_no_secret(tmp_path: Path, master: str) -> None:
    """This holds even if its master has ended earlier, for example because the port is taken."""
    wait = "until [ -s pid ]; do sleep 0.1; done"
    if master == "exit 2":
        wait += "; while kill -0 $(cat pid) 2>&-; do sleep 0.1; done"
    programs = {
        "hostname": "echo node1",
        "srun": f'{wait}; cat options "$ZPCCL_SECRET_FILE"; echo "$ZPCCL_MASTER"',
        "zpccl": "echo secret",
        "zpccl-master": f'echo "$@" >options; echo $$ >pid; {master}',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "123456"}
    command = ["bash", str(FILES[1]), "train.py"]
    job = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert (job.returncode, job.stdout) == (0, "--bind 0.0.0.0:23456\nsecret\nnode1:23456\n"), job.stderr
    assert not list(tmp_path.glob("zpccl.*.secret"))
