"""The peers of examples/ray_actors.py, as threads: Ray itself is not needed."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import zpccl

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "ray_actors.py"
TIMEOUT_S = 60


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    spec = importlib.util.spec_from_file_location("ray_actors", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_of_several_that_were_lost_comes_back(example: Any) -> None:
    """It goes on with the remaining peers, although they are fewer than at the start."""
    with zpccl.MasterNode("127.0.0.1:0", recovery_grace=0) as master, ThreadPoolExecutor(3) as pool:

        def start(steps: int, peers: int) -> Future[tuple[int, str]]:
            return pool.submit(example.Peer().train, master.address, None, steps, peers)

        stays, goes = start(40, 2), start(3, 2)
        goes.result(TIMEOUT_S)
        taken, digest = start(40, 3).result(TIMEOUT_S)  # Training begins with 3.
        assert stays.result(TIMEOUT_S) == (40, digest) and taken == 37
