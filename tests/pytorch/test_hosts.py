"""FSDP2 on several hosts: examples/fsdp2_hosts.py as a user runs it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import zpccl

from .programs import ROOT, torchrun

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

EXAMPLE = ROOT / "examples" / "fsdp2_hosts.py"


def test_a_host_that_loses_a_process_comes_back_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    """L1, S1: its other process is removed too, both are started again, and all hosts end with the same weights."""
    usual = ("--hosts", "2", "--steps", "90", "--host")
    with (
        caplog.at_level("INFO", "zpccl"),
        zpccl.MasterNode("127.0.0.1:0", recovery_grace=0) as master,
        ThreadPoolExecutor(2) as threads,
    ):
        one = threads.submit(torchrun, 2, EXAMPLE, *usual, "one", ZPCCL_MASTER=master.address)
        two = threads.submit(
            torchrun, 2, EXAMPLE, *usual, "two", "--die-after", "40", restarts=3, ZPCCL_MASTER=master.address
        )
        ends = [host.result().splitlines()[-1] for host in (one, two)]
    assert ends[0] == ends[1] and ends[0].startswith("weights "), ends
    assert caplog.text.count("2 of 2 of host two") >= 2  # It was complete, and came back.
