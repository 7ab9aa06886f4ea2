"""Runs scenarios of tools/bench.py as users run them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench
import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `tools/bench.py`. Skips the test if it needs networks and this process cannot create one."""
    command = [sys.executable, bench.__file__, *arguments]
    ended = subprocess.run(command, text=True, capture_output=True, check=False)
    if "cannot make network namespaces" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    return ended


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    """The rows of a scenario that must succeed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rows.json")
        ended = run(*arguments, "--json", str(path))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows
