"""The measuring of how long members stop for a newcomer, on something small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_join
import pytest

TOOL = Path(bench_join.__file__)


@pytest.mark.e2e
def test_it_writes_a_row_with_and_one_without(tmp_path: Path) -> None:
    """What was fetched ahead is not fetched by the sync."""
    file = tmp_path / "rows.json"
    command = [sys.executable, str(TOOL), "--bytes", "2MiB", "--reps", "1", "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    plain, ahead = json.loads(file.read_text())
    assert (plain["ahead"], ahead["ahead"]) == (False, True)
    assert plain["received_median"] > 2**21 > ahead["received_median"]
    assert ahead["of_plain"] == ahead["stop_median"] / plain["stop_median"]
