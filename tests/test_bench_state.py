"""The benchmark of shared state: its arithmetic, its plain copies, and a small run of all of it."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from benches import rows_of
from benchmarks import state
from benchmarks.raw_tcp import RawTcp
from common import WorkerFailed
from wan.settings import HostSettings


def test_all_hosts_have_the_uplink_but_the_masters() -> None:
    settings = state.settings_of(2, argparse.Namespace(uplink=300.0, rtt=8.0))
    assert settings.host_count == 3
    assert settings.hosts[0] == settings.hosts[1] == HostSettings(egress_mbit=300)
    assert settings.hosts[2] == HostSettings()
    assert {path.delay_ms for path in settings.paths.values()} == {4.0}


class Holding:
    """Replaces a worker."""

    def __init__(self, name: str, digest: str) -> None:
        self.name, self.digest = name, digest

    def begin(self, *_: Any) -> None: ...

    def result(self) -> str:
        return self.digest


def test_a_state_that_is_not_the_holders_is_no_result() -> None:
    workers: list[Any] = [Holding("holder 0", "right"), Holding("joiner 1", "wrong")]
    with pytest.raises(WorkerFailed, match="joiner 1: the state"):
        state.compare(state.Crowd(workers, 1, None), "right")


@pytest.mark.parametrize(("connections", "size"), [(1, 10), (3, 1_000_003)])
def test_plain_copies_bring_what_each_sender_has(connections: int, size: int) -> None:
    senders, receivers = [0, 1], [2, 3]
    copies = [RawTcp(number, connections) for number in range(4)]
    addresses = {number: copies[number].address for number in receivers}
    data = [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number in senders]
    into = {number: np.zeros((2, size), np.uint8) for number in receivers}

    def take_part(number: int) -> None:
        copies[number].connect(addresses if number in senders else {})
        copies[number].accept(senders if number in receivers else [])
        for _ in range(2):
            if number in senders:
                copies[number].move(dict.fromkeys(receivers, data[number].data), {})
            else:
                copies[number].move({}, {sender: into[number][sender].data for sender in senders})

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(take_part, range(4)))
    for copy in copies:
        copy.close()
    assert all(into[receiver].tobytes() == data[0].tobytes() + data[1].tobytes() for receiver in receivers)


@pytest.mark.slow
@pytest.mark.e2e
def test_it_writes_a_row_for_each_crowd_and_contents() -> None:
    """S5: the tool itself checks each sync and each copy."""
    options = ["--bytes", "1MiB", "--holders", "2", "--joiners", "2", "--reps", "1", "--tensors", "3"]
    random, zeros, identical = rows_of("state", *options, "--contents", "random", "zeros", "identical")
    for found in (random, zeros, identical):
        assert (found["holders"], found["joiners"], found["bytes"]) == (2, 2, 2**20)
        assert 0 < found["seconds_min"] <= found["seconds_median"] <= found["seconds_max"]
        assert found["digest_seconds_median"] > 0
    assert 2**20 < random["bytes_sent"] < 2.5 * 2**20  # A joiner may get it from the other one.
    assert zeros["bytes_sent"] < 2**16 and identical["bytes_sent"] == 0
    assert random["raw_tcp_seconds_median"] > 0
    assert identical["raw_tcp_seconds_median"] is None  # There is nothing to copy.
    assert random["uplink_mbit"] is None and "late" not in random


@pytest.mark.slow
@pytest.mark.e2e
def test_uplinks_bound_what_hosts_send() -> None:
    options = ["--bytes", "1MiB", "--holders", "1", "--uplink", "50", "--rtt", "2", "--reps", "1", "--contents"]
    (found,) = rows_of("state", *options, "random", "--beside", "raw_tcp")
    assert (found["uplink_mbit"], found["rtt_ms"]) == (50.0, 2.0)
    assert found["raw_tcp_seconds_median"] * 50e6 >= 0.8 * 2**20 * 8  # The first burst of a queue is not delayed.
    assert found["digest_seconds_median"] is None
    assert found["out"] > 2 * 2**20 / 1500
