"""tools/bench.py ddp."""

from __future__ import annotations

import pytest
from benches import rows_of

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.e2e, pytest.mark.slow]


def test_steps_are_timed_beside_gloo() -> None:
    rows = rows_of("ddp", "--bytes", "256KiB", "--reps", "1", "--steps", "2")
    assert [row["system"] for row in rows] == ["alone", "gloo", "zpccl", "zpccl+master"]
    assert all(row["seconds_median"] > 0 for row in rows) and rows[1]["of_gloo"] == 1
