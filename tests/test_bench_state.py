"""The measuring of shared state: its arithmetic, its plain copies, and all of it on something small."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

import bench
import numpy as np
import pytest
import state_contents
from benches import rows_of
from benchmarks import state
from benchmarks.raw_tcp import RawTcp
from common import WorkerFailed
from diloco_text import Model
from wan.settings import HostSettings


def test_all_hosts_have_the_uplink_but_the_masters() -> None:
    settings = state.settings_of(2, argparse.Namespace(uplink=300.0, rtt=8.0))
    assert settings.host_count == 3
    assert settings.hosts[0] == settings.hosts[1] == HostSettings(egress_mbit=300)
    assert settings.hosts[2] == HostSettings()
    assert {path.delay_ms for path in settings.paths.values()} == {4.0}


def row(holders: int, seconds: float, contents: str = "random") -> dict[str, Any]:
    return {"contents": contents, "holders": holders, "joiners": 1, "bytes": 4, "digest": "", "seconds_median": seconds}


def test_rows_are_compared_with_the_fewest_holders_of_their_kind() -> None:
    rows = [row(3, 2.0), row(1, 5.0), row(3, 1.0, "zeros")]
    state.add_speedups(rows)
    assert [found["speedup"] for found in rows] == [2.5, 1.0, 1.0]


class Holding:
    """Stands for a worker."""

    def __init__(self, name: str, digest: str) -> None:
        self.name, self.digest = name, digest

    def begin(self, *_: Any) -> None: ...

    def result(self) -> str:
        return self.digest


def test_a_state_that_is_not_the_holders_is_no_result() -> None:
    workers: list[Any] = [Holding("holder 0", "right"), Holding("joiner 1", "wrong")]
    with pytest.raises(WorkerFailed, match="joiner 1: the state"):
        state.compare(state.Crowd(workers, 1, None), "right")


@pytest.mark.parametrize(("connections", "used", "size"), [(1, 1, 10), (3, 3, 1_000_003), (3, 1, 300_000)])
def test_plain_copies_bring_what_each_sender_has(connections: int, used: int, size: int) -> None:
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
                copies[number].move(dict.fromkeys(receivers, data[number].data), {}, used)
            else:
                copies[number].move({}, {sender: into[number][sender].data for sender in senders}, used)

    threads = [threading.Thread(target=take_part, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for copy in copies:
        copy.close()
    assert all(into[receiver].tobytes() == data[0].tobytes() + data[1].tobytes() for receiver in receivers)


def test_trained_weights_are_kept_and_none_is_there_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(state_contents, "_ROOT", tmp_path)
    monkeypatch.setattr(state_contents, "TRAINING_STEPS", 2)
    path = state_contents.trained_weights(300_000)
    monkeypatch.setattr(state_contents, "load_text", None)  # From here on nothing can be trained.
    assert state_contents.trained_weights(300_000) == path
    weights = np.zeros(300_000, np.float32)
    state_contents.fill(weights, state_contents.TRAINED, path)
    one_model = len(Model(0).parameters)
    assert weights.size > one_model and weights.any()
    assert not np.array_equal(weights[one_model : one_model + 1000], weights[:1000])


@pytest.mark.slow
@pytest.mark.e2e
def test_it_writes_a_row_for_each_crowd_and_contents() -> None:
    """S5: each sync and each copy is checked by the tool itself."""
    options = ["--bytes", "1MiB", "--holders", "2", "--joiners", "2", "--reps", "1", "--tensors", "3"]
    random, zeros, identical = rows_of("state", *options, "--contents", "random", "zeros", "identical")
    for found in (random, zeros, identical):
        assert (found["holders"], found["joiners"], found["bytes"], found["speedup"]) == (2, 2, 2**20, 1.0)
        assert 0 < found["seconds_min"] <= found["seconds_median"] <= found["seconds_max"]
        assert found["digest_seconds_median"] > 0
    assert random["bytes_sent"] > 2**20 and 0.9 < random["ratio"] < 1.5  # A joiner may have it from the other one.
    assert zeros["bytes_sent"] < 2**16 and zeros["ratio"] > 10
    assert identical["bytes_sent"] == 0 and identical["ratio"] is None
    assert random["raw_tcp_seconds_median"] > 0 and random["one_stream_seconds_median"] > 0
    assert identical["raw_tcp_seconds_median"] is None  # There is nothing to copy.
    assert random["uplink_mbit"] is None and "late" not in random


@pytest.mark.slow
@pytest.mark.e2e
def test_uplinks_bound_what_hosts_send() -> None:
    options = ["--bytes", "1MiB", "--holders", "1", "--uplink", "50", "--rtt", "2", "--reps", "1", "--contents"]
    (found,) = rows_of("state", *options, "random", "--beside", "raw_tcp")
    assert (found["uplink_mbit"], found["rtt_ms"]) == (50.0, 2.0)
    assert found["raw_tcp_seconds_median"] * 50e6 >= 0.8 * 2**20 * 8  # A queue's first burst is not held back.
    assert found["one_stream_seconds_median"] is None
    assert found["out"] > 2 * 2**20 / 1500


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--holders", "9", "--joiners", "9"], "at most 15 holders and joiners"),
        (["--bytes", "8", "--tensors", "3"], "an element of 4 bytes for each"),
    ],
)
def test_wrong_arguments_are_said_in_a_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["state", *words])
    assert text in capsys.readouterr().err
