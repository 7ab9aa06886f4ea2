"""Faults in the middle of a sync of shared state, and their effects: all of `tools/bench.py state-faults`.

Real processes, real SIGKILL. The tool checks what all peers hold; the tests look at its findings.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import bench
import pytest
from benchmarks import state_faults
from common import MIB

pytestmark = pytest.mark.e2e

SIZE_BYTES = 32 * MIB


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The tool's findings, by fault."""
    path = tmp_path_factory.mktemp("faults") / "rows.json"
    command = [sys.executable, bench.__file__, "state-faults", "--bytes", str(SIZE_BYTES), "--json", str(path)]
    ended = subprocess.run(command, text=True, capture_output=True, check=False)
    assert ended.returncode in (0, 1) and path.exists(), ended.stdout + ended.stderr
    return {row["fault"]: row for row in json.loads(path.read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("fault", state_faults.FAULTS)
def test_what_is_promised_is_kept(rows: dict[str, dict[str, Any]], fault: str) -> None:
    """S2, S5, S6, L1: the state and revision of each peer at the end, and the texts of errors and log."""
    assert rows[fault]["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "holder-killed", "joiner-killed", "joiners-added", "wrong-bytes"])
def test_it_takes_no_second_call(rows: dict[str, dict[str, Any]], fault: str) -> None:
    """No survivor gets an error."""
    assert rows[fault]["errors"] == {}


@pytest.mark.slow
def test_a_dead_holder_costs_what_was_under_way(rows: dict[str, dict[str, Any]]) -> None:
    assert SIZE_BYTES * 0.8 < rows["none"]["bytes_received"] < SIZE_BYTES * 1.1
    assert SIZE_BYTES * 0.8 < rows["holder-killed"]["bytes_received"] < SIZE_BYTES * 1.5


@pytest.mark.slow
def test_without_holders_there_is_an_error(rows: dict[str, dict[str, Any]]) -> None:
    """The joiner's state has not changed: that is one of the promises above."""
    assert list(rows["holders-killed"]["errors"]) == ["joiner0"]


# --- The tool itself --------------------------------------------------------------------------------------------------


def outcome(**changes: Any) -> dict[str, Any]:
    usual = {"error": "", "error_text": "", "received": MIB, "sent": 0, "digest": "wanted", "revision": 1}
    return usual | changes


class Log:
    """Replaces a scene whose members have names."""

    size_bytes = MIB
    joiners = ("joiner0",)

    def __init__(self, text: str = "", **again: dict[str, Any]) -> None:
        self.text, self.again = text, again

    def log(self) -> str:
        return self.text


FAILED = outcome(error="PeerLost", error_text="'tensor1' of holder0 has changed", digest="stale", revision=0)


@pytest.mark.parametrize(
    ("fault", "scene", "joiner"),
    [
        ("none", Log(), outcome(digest="stale")),
        ("none", Log(), outcome(revision=0)),
        ("none", Log(), FAILED),
        ("holder-killed", Log(), outcome(received=2 * MIB)),
        ("holders-killed", Log(), outcome()),
        ("holders-killed", Log(), FAILED | {"digest": "a mixture"}),
        ("holders-killed", Log(), FAILED | {"revision": 1}),
        ("joiners-added", Log(joiner0=outcome(digest="stale", revision=2)), outcome()),
        ("memory-changed", Log(joiner0=outcome(revision=0)), FAILED),
        ("memory-changed", Log(joiner0=outcome()), FAILED | {"error_text": "something has changed"}),
        ("memory-changed", Log(joiner0=outcome()), FAILED | {"digest": "a mixture"}),
        ("memory-changed", Log(joiner0=outcome()), outcome(digest="a mixture")),
        ("wrong-bytes", Log("joiner0 continues without holder1"), outcome()),
    ],
)
def test_broken_promises_are_named(fault: str, scene: Any, joiner: dict[str, Any]) -> None:
    assert state_faults.FAULTS[fault].judge(scene, {"joiner0": joiner}, "wanted", "stale").problems


@pytest.mark.parametrize(
    ("fault", "scene", "joiner"),
    [
        ("none", Log(), outcome()),
        ("holder-killed", Log(), outcome()),
        ("holders-killed", Log(), FAILED),
        ("joiners-added", Log(joiner0=outcome(revision=2)), outcome()),
        ("memory-changed", Log(joiner0=outcome()), FAILED),
        ("memory-changed", Log(joiner0=outcome()), outcome()),
        ("wrong-bytes", Log("joiner0 continues without holder0"), outcome()),
    ],
)
def test_kept_promises_are_no_problem(fault: str, scene: Any, joiner: dict[str, Any]) -> None:
    assert state_faults.FAULTS[fault].judge(scene, {"joiner0": joiner}, "wanted", "stale").problems == []
