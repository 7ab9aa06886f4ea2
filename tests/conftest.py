"""Settings of all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from fake_device import FakeDevice

# Tests use some tools too. Python adds the folder by itself only for scripts in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

WORKERS_PER_CPU = 2
WORKERS_MAX = 16
"""A worker and its child processes may take a GiB."""

# Settings of the user's shell must not reach the code under test, nor the processes that tests start.
for _name in [name for name in os.environ if name.startswith("ZPCCL_")]:
    del os.environ[_name]

# A shell lets background processes and their children ignore SIGINT; tests send it to their own children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline would fail on a busy machine. The blob replays a failure: paste it as @reproduce_failure.
settings.register_profile("zpccl", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("zpccl")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The number of workers for `--numprocesses auto`: more than CPUs, as most tests wait for processes or timeouts."""
    return min(WORKERS_PER_CPU * len(os.sched_getaffinity(0)), WORKERS_MAX)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with the long tests, so that none is left for the end, when other workers have nothing to do."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The device of tensors that claim to be on the first GPU (`pytorch.gpu`)."""
    from fake_device import FakeDevice  # tools/mutate_protocol.py copies only the protocol's tests.

    from zpccl.engine import devices

    device = FakeDevice()
    monkeypatch.setitem(devices._devices, "cuda:0", device)
    return device


def pytest_configure(config: pytest.Config) -> None:
    """Gives each worker of pytest-xdist its own network, if run as root. So no other worker takes a port that a test
    releases for a moment, such as the port of a master that is to start again."""
    if hasattr(config, "workerinput"):
        from networks import Alone, NetworkUnavailable, enter  # tools/mutate_protocol.py copies no tools.

        with contextlib.suppress(NetworkUnavailable), Alone() as network:
            enter(network.namespace(0))  # This thread, and everything that it starts from now on.
