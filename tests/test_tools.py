"""The measuring tools: their arithmetic, their children, and a small run of each of them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import unittest
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import algorithm_table
import bench
import common
import compile_sim
import numpy as np
import pytest
import torch_suite
import workers
from benches import rows_of, run
from benchmarks import call, cut_paths, ddp, kill_calls, kill_master, kill_peer, pattern, scenario
from benchmarks.raw_tcp import RawTcp
from benchmarks.systems import RESET_PEAK, resident_bytes

import zpccl
from zpccl import limits

# --- Arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("7B", 7),
        ("4KiB", 4096),
        ("4kib", 4096),
        ("1.5 MiB", 3 * 2**19),
        ("64MiB", 2**26),
        ("1GB", 10**9),
        ("2k", 2000),
    ],
)
def test_parses_sizes(text: str, size: int) -> None:
    assert common.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "0.5", "1.0001KiB", "4 elephants", "1e3", "nan"])
def test_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a size|is not a whole number"):
        common.parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1B"), (1000, "1000B"), (4096, "4KiB"), (2**26, "64MiB"), (2**30, "1GiB")]
)
def test_formats_sizes_that_parse_again(size: int, text: str) -> None:
    assert common.format_bytes(size) == text
    assert common.parse_bytes(text) == size


@pytest.mark.parametrize(
    ("peers", "size", "seconds", "gbit"),
    [(2, 10**9, 1.0, 8.0), (2, 10**9, 0.5, 16.0), (4, 10**9, 1.0, 12.0), (5, 125_000_000, 1.0, 1.6)],
)
def test_bus_bandwidth_is_what_a_peer_sends(peers: int, size: int, seconds: float, gbit: float) -> None:
    """2(N-1)/N times the bytes in one direction: once the tensor for 2 peers, one and a half times for 4."""
    assert common.bus_bandwidth_gbit(peers, size, seconds) == pytest.approx(gbit)


def test_spread_names_median_and_extremes() -> None:
    assert common.spread([3.0, 1.0, 2.0, 10.0], "ms") == {"ms_median": 2.5, "ms_min": 1.0, "ms_max": 10.0}


@pytest.mark.parametrize("dtype", common.DTYPES)
def test_pattern_of_all_is_the_exact_sum_of_the_patterns_of_each(dtype: str) -> None:
    total = np.zeros(pattern.PERIOD_ELEMENTS, dtype)
    for number in range(16):
        total += pattern.pattern([number], dtype)
    assert pattern.pattern(range(16), dtype).tobytes() == total.tobytes()
    if dtype != "int8" and dtype != "uint8":
        assert total.max() == 16 * 96 + 2 * sum(range(8))


@pytest.mark.parametrize("count", [1, 96, 97, 98, pattern.PIECE_ELEMENTS, pattern.PIECE_ELEMENTS + 1])
def test_worst_error_sees_a_single_element(count: int) -> None:
    period = pattern.pattern([3], "float32")
    array = np.empty(count, np.float32)
    pattern.fill_with(array, period)
    assert pattern.worst_error(array, period) == 0.0
    array[-1] += 0.25
    assert pattern.worst_error(array, period) == 0.25
    array[-1] = np.nan
    assert pattern.worst_error(array, period) == np.inf


def test_error_bound_is_zero_unless_quantised() -> None:
    assert pattern.error_bound(4, "none") == 0.0
    assert pattern.error_bound(2, "minmax") == pytest.approx(3 * 103 / 255)
    assert pattern.error_bound(2, "zps-int4") == pytest.approx(3 * 103 / 15)


def test_json_is_written_whole_and_folders_are_made(tmp_path: Path) -> None:
    common.write_json(None, object())  # Without a file it writes nothing.
    path = tmp_path / "new" / "file.json"
    common.write_json(path, [1])
    common.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


def test_a_new_file_replaces_nothing_but_a_file(tmp_path: Path) -> None:
    """As root, --json /dev/null or /dev/stdout would replace the device, or the link."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert common.new_file(str(tmp_path / "link")) == (tmp_path / "file").resolve()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(argparse.ArgumentTypeError, match="exists and is not a regular file"):
        common.new_file(str(tmp_path / "pipe"))


def test_a_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_table("Title", ["name", "n"], [["a", "1"], ["longer", "1000"]])
    assert capsys.readouterr().out == (
        "Title\n\n| name   |    n |\n| ------ | ---: |\n| a      |    1 |\n| longer | 1000 |\n"
    )


# --- Arguments and scenarios ------------------------------------------------------------------------------------------


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    common.add(parser, "--bytes", ["4KiB", "1MB"])
    common.add(parser, "--reps", 7)
    common.add(parser, "--share", "10%", "of it", type=str)
    return parser.parse_args(arguments)


def test_defaults_are_parsed_and_may_be_several() -> None:
    assert vars(options_of()) == {"bytes": [4096, 10**6], "reps": 7, "share": "10%"}
    assert vars(options_of("--bytes", "1KiB", "--reps", "2")) == {"bytes": [1024], "reps": 2, "share": "10%"}


@pytest.mark.parametrize("words", [["--reps", "0"], ["--reps", "1", "2"], ["--bytes", "1", "much"]])
def test_arguments_out_of_range_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(*words)
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["kill-master", "--absence", "-1"], "'-1' is not a number of 0 or more"),
        (["kill-master", "--rolling", "nan"], "'nan' is not a number of 0 or more"),
        (["kill-master", "--wan=-1,1"], "'-1,1' is not a delay"),
        (["kill-master", "--wan", "10,200"], "'10,200' is not a delay"),
        (["uneven", "--connections", "-1"], "is not a whole number from 0"),
        (["quantise", "--blocks", "5000"], "is not a whole number from 1 to 4096"),
        (["join", "--members", "15"], "is not a whole number from 2 to 14"),
        (["state", "--holders", "9", "--joiners", "9"], "at most 15 holders and joiners"),
        (["state", "--bytes", "8", "--tensors", "3"], "an element of 4 bytes for each"),
        *(
            (["master", "--peers", count], f"is not a whole number from 2 to {limits.PEERS_MAX}")
            for count in ("1", "0", str(limits.PEERS_MAX + 1), "many")
        ),
        (["allreduce", "--json", "."], "'.' exists and is not a regular file"),
        (["wan", "--plot", f"{__file__}/plot.png"], "File exists"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(words)
    assert problem in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("benchmarks.plans", "benchmarks.plan_bounds"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert bench.main(["plans"]) == 2
    assert capsys.readouterr().err.startswith("plans needs the package scipy.optimize; ")


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (scenario.Column("", "seconds", ".1f", 1e3), "1500.0"),
        (scenario.Column("", "bytes"), "4KiB"),
        (scenario.Column("", "kept"), "no"),
        (scenario.Column("", "none", ".1f"), "-"),
        (scenario.Column("", "missing", ".1f"), "-"),
    ],
)
def test_cells_say_values_in_the_form_of_their_column(column: scenario.Column, text: str) -> None:
    assert column.cell({"seconds": 1.5, "bytes": 4096, "kept": False, "none": None}) == text


def play(*rows: dict[str, Any], columns: Sequence[scenario.Column] = ()) -> int:
    """Runs a scenario that yields these rows. Returns its exit status."""
    found = scenario.Scenario(None, lambda _: None, lambda _: (row for row in rows), "of {options.json}", columns)
    return bench.play(found, argparse.Namespace(json=None))


def test_a_scenario_prints_a_table_of_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert play({"n": 1}, {"n": 2}, columns=[scenario.Column("n", "n")]) == 0
    said = capsys.readouterr()
    assert said.out == "of None\n\n| n   |\n| --- |\n| 1   |\n| 2   |\n"
    assert said.err.splitlines() == ["n 1", "n 2"]


def test_without_columns_each_row_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert play({"found": 0.5, "problems": []}) == 0
    said = capsys.readouterr()
    assert "| found |  0.50 |" in said.out and "all promises kept" in said.out
    assert said.err.splitlines() == ["found 0.50"]


def test_a_broken_promise_is_named_and_the_exit_status_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert play({"n": 1, "problems": []}, {"n": 2, "problems": ["lost it"]}) == 1
    assert "a promise is broken: lost it" in capsys.readouterr().err


def test_nothing_measured_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert play(columns=[scenario.Column("n", "n")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "nothing was measured" in said.err


@pytest.mark.slow
def test_all_scenarios_can_be_had_and_say_what_they_do() -> None:
    for name in bench.SCENARIOS:
        assert bench.load(name).text
    listed = run()
    assert listed.returncode == 0 and all(name in listed.stdout for name in bench.SCENARIOS)
    assert run("nonsense").returncode == 2


def test_the_documentation_lists_the_scenarios() -> None:
    page = Path(bench.__file__).parents[1].joinpath("docs", "benchmarks.md").read_text(encoding="utf-8")
    rows = [f"| `{name}` | {question} |" for name, question in bench.SCENARIOS.items()]
    assert "\n".join(rows) in page


# --- Children ---------------------------------------------------------------------------------------------------------


class Echo:
    """An object in a child."""

    def say(self, text: str) -> str:
        return text

    def fail(self) -> None:
        raise ValueError("as told")

    def die(self) -> None:
        raise SystemExit(3)

    def close(self) -> None: ...


@pytest.mark.slow
def test_worker_answers_reports_errors_and_goes_on() -> None:
    worker = workers.Worker("echo", Echo)
    try:
        assert worker.call("say", "hello") == "hello"
        with pytest.raises(common.WorkerFailed, match="as told"):
            worker.call("fail")
        assert workers.call_all([worker], "say", "again") == ["again"]
    finally:
        worker.close()
    worker.close()
    with pytest.raises(common.WorkerFailed, match="gone"):
        worker.begin("say", "late")


@pytest.mark.slow
def test_worker_that_dies_is_noticed() -> None:
    worker = workers.Worker("echo", Echo)
    try:
        with pytest.raises(common.WorkerFailed, match="died"):
            worker.call("die")
    finally:
        worker.close()


@pytest.mark.slow
def test_ctrl_c_does_not_end_a_fork_server_that_is_importing(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to all processes of its group."""
    (tmp_path / "slow.py").write_text("import os, signal\nos.killpg(os.getpgrp(), signal.SIGINT)\n", encoding="utf-8")
    script = (
        "import multiprocessing, signal\nfrom workers import start_fork_server\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\nstart_fork_server('slow')\n"
        "child = multiprocessing.get_context('forkserver').Process(target=print, args=('lives',))\n"
        "child.start()\nchild.join()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *filter(None, sys.path)))}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        start_new_session=True,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "lives\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_master_starts_leaves_none(number: signal.Signals) -> None:
    started: list[subprocess.Popen[str]] = []

    class Interrupted(workers.Hosts):
        def run(self, _: int, function: Any) -> Any:
            started.append(function())
            signal.raise_signal(number)
            return started[0]

    before = signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit, match=str(128 + number)), workers.Master(Interrupted()):
            pass
        assert started[0].poll() == -signal.SIGKILL
    finally:
        signal.signal(number, before)
        started[0].kill()
        started[0].wait()


@pytest.mark.slow
def test_a_worker_whose_network_has_gone_ends_without_a_word() -> None:
    """It ends together with the tool, which was interrupted."""
    worker = workers.Worker("echo", Echo, namespace="/proc/0/fd/0")
    try:
        with pytest.raises(common.WorkerFailed, match="died"):
            worker.call("say", "hello")
    finally:
        worker.close()
    assert worker._process.exitcode == 0


@pytest.mark.parametrize(
    ("peers", "connections", "size"), [(2, 1, 10), (2, 3, 1_000_003), (3, 4, 1_000_003), (4, 2, 1), (3, 2, 0)]
)
def test_raw_tcp_ring_brings_the_neighbours_bytes(peers: int, connections: int, size: int) -> None:
    rings = [RawTcp(rank, connections) for rank in range(peers)]
    addresses = [ring.address for ring in rings]
    out = [np.random.default_rng(rank).integers(0, 256, size, np.uint8) for rank in range(peers)]
    into = [np.zeros(size, np.uint8) for _ in range(peers)]

    def take_part(rank: int) -> None:
        rings[rank].connect_ring(addresses)
        for _ in range(3):
            rings[rank].exchange(peers, out[rank].data, into[rank].data, times=2)

    with ThreadPoolExecutor(peers) as executor:
        list(executor.map(take_part, range(peers)))
    for ring in rings:
        ring.close()
    assert all(into[rank].tobytes() == out[rank - 1].tobytes() for rank in range(peers))


# --- Judging a kill ---------------------------------------------------------------------------------------------------


def judge(reports: list[dict[str, Any]], finished: bool = False) -> dict[str, Any] | None:
    return kill_peer.judge(reports, 1_000_000, finished, wire_bytes=8000)


def report(**changes: Any) -> dict[str, Any]:
    usual = {
        "failed": True,
        "error": "RANK_CONNECTION_LOST",
        "error_text": "",
        "error_ns": 3_000_000,
        "wire_bytes": 2000,
        "restored": True,
        "retry_ns": 9_000_000,
        "right": True,
    }
    return usual | changes


def test_kill_in_the_middle_is_judged_by_the_slowest_survivor() -> None:
    outcome = judge([report(), report(error_ns=4_000_000, wire_bytes=0)])
    assert outcome is not None
    assert (outcome["moved_fraction"], outcome["ms_to_error"], outcome["ms_to_retry"]) == (0.25, 3.0, 8.0)
    assert (outcome["restored"], outcome["right"], outcome["problems"]) == (True, True, [])


@pytest.mark.parametrize("reports", [[{"failed": False}] * 2, [report(wire_bytes=0)] * 2])
def test_kill_after_the_end_or_before_the_first_byte_does_not_count(reports: list[dict[str, Any]]) -> None:
    assert judge(reports) is None


@pytest.mark.parametrize(
    ("reports", "finished"),
    [
        ([report(), {"failed": False}], False),
        ([report(), report()], True),
        ([report(), report(error="INTERNAL_ERROR")], False),
        ([report(), report(retry_error="no", right=False)], False),
        ([report(), report(right=False)], False),
        ([report(), report(restored=False)], False),
        ([report(), report(error_ns=2_000_000_000)], False),
    ],
)
def test_broken_promise_is_a_problem(reports: list[dict[str, Any]], finished: bool) -> None:
    outcome = judge(reports, finished)
    assert outcome is not None and outcome["problems"]


# --- Silent cuts ------------------------------------------------------------------------------------------------------


def cut_report(errors_s: list[float], committed_s: float | None, restored: bool = True) -> dict[str, Any]:
    errors_ns = [int(seconds * 1e9) for seconds in errors_s]
    committed_ns = None if committed_s is None else int(committed_s * 1e9)
    texts = ["lost"] * len(errors_ns)
    return {"errors_ns": errors_ns, "texts": texts, "restored": restored, "committed_ns": committed_ns}


def test_a_cut_counts_from_its_begin_to_the_slowest_peer() -> None:
    reports = [cut_report([5.0, 6.0], 8.0), cut_report([5.5], 7.0), cut_report([], 7.5)]
    outcome = cut_paths.judge("path", 1_000_000_000, reports, "")
    assert (outcome["seconds_to_error"], outcome["seconds_to_commit"]) == (4.5, 7.0)
    assert (outcome["failed_calls"], outcome["problems"]) == (2, [])


def test_a_cut_that_is_never_felt_has_no_time_to_error() -> None:
    outcome = cut_paths.judge("idle", 0, [cut_report([], 0.5), cut_report([], 1.0)], "")
    assert (outcome["seconds_to_error"], outcome["seconds_to_commit"]) == (None, 1.0)


@pytest.mark.parametrize(
    ("kind", "report", "removed", "problem"),
    [
        ("path", {"errors_ns": [1], "removed": "Kicked"}, "", "could have stayed"),
        ("path", {"errors_ns": [1], "failed": "no master"}, "", "could have stayed failed: no master"),
        ("path", cut_report([1.0], None), "", "no all-reduce with the right sum"),
        ("path", cut_report([1.0], 2.0, restored=False), "", "not restored"),
        ("host", cut_report([1.0], 2.0), "", "was not told"),
    ],
)
def test_broken_promises_of_cuts_are_named(kind: str, report: dict[str, Any], removed: str, problem: str) -> None:
    outcome = cut_paths.judge(kind, 0, [report, cut_report([1.0], 2.0)], removed)
    assert len(outcome["problems"]) == 1 and problem in outcome["problems"][0]


class Failing:
    """Replaces a communicator. Its calls fail."""

    def __init__(self, error: zpccl.PCCLError) -> None:
        self.error = error

    def all_reduce(self, *_: Any, **__: Any) -> None:
        raise self.error


@pytest.mark.parametrize(("error", "how"), [(zpccl.Kicked, "removed"), (zpccl.MasterUnreachable, "failed")])
def test_a_cut_off_host_is_told_so_by_nothing_but_its_removal(error: type[zpccl.PCCLError], how: str) -> None:
    peer = object.__new__(cut_paths.CutPeer)
    peer.dtype, peer.tensor, peer.before = "float32", np.zeros(4, np.float32), np.zeros(4, np.float32)
    peer.comm = Failing(error("why"))  # type: ignore[assignment]
    report = peer.go_on([0, 1], must_fail=False)
    assert how in report and "why" in report[how]


# --- Killed masters ---------------------------------------------------------------------------------------------------


def knowing(*lists: tuple[int, list[str]]) -> dict[str, Any]:
    """The report of a peer that has seen these member lists, in this order."""
    return {"lists": list(lists), "one_run": True}


def test_one_history_is_no_problem() -> None:
    two, three = ["a", "b"], ["a", "b", "c"]
    assert kill_master.broken_history([knowing((1, two), (2, three), (2, three[::-1])), knowing((2, three))], []) == []


@pytest.mark.parametrize(
    ("results", "terms", "problem"),
    [
        ([knowing((1, ["a"])), knowing((1, ["b"]))], [], "epoch 1 has two lists"),
        ([knowing((1, ["a"]), (2, ["a"]), (1, ["a"]))], [], "went back in epochs"),
        ([knowing((1, ["a"]), (1, ["a", "b"]))], [], "epoch 1 has two lists"),
        ([knowing((1, ["a", "b", "c"]), (2, ["c", "d"]))], [], "does not descend"),
        ([knowing() | {"one_run": False}], [], "changed its run"),
        ([], [[1, 3], [2, 3]], "in the same term"),
    ],
)
def test_more_than_one_history_is_a_problem(
    results: list[dict[str, Any]], terms: list[list[int]], problem: str
) -> None:
    (found,) = kill_master.broken_history(results, terms)
    assert problem in found


def test_a_visitor_that_never_comes_is_a_problem() -> None:
    result = knowing((1, ["a"])) | {"steps": 8, "calls": [(0, 10)], "digest": "", "revision": 2, "failures": []}
    options = argparse.Namespace(peers=2, bytes=8, masters=2, rolling=3.0)
    for visits, problems in ((1, []), (0, ["no visit came to its end: refused"])):
        row = kill_master.summarise(
            options, [(5, 6)], [result | {"leaver_failures": 0}] * 2, {"visits": visits, "errors": ["refused"]}, [[1]]
        )
        assert row["problems"] == problems


# --- DDP --------------------------------------------------------------------------------------------------------------


class Trained:
    """Replaces a worker that has trained."""

    def __init__(self, digest: str) -> None:
        self.answers = {"run": (1.0, 2.0), "digest": digest}

    def begin(self, method: str, *_: Any) -> None:
        self.method = method

    def result(self) -> Any:
        return self.answers[self.method]


@pytest.mark.parametrize(
    ("gloo", "ours", "problems"),
    [
        ("aa", "aa", []),
        ("aa", "bb", ["the weights of systems differ"]),
        ("aa", "ab", ["the weights of the ranks of zpccl differ"]),
        ("aaa", "bbb", []),  # A sum of three depends on the order.
        ("aaa", "aab", ["the weights of the ranks of zpccl differ"]),
    ],
)
def test_ranks_that_end_with_other_weights_are_a_problem(gloo: str, ours: str, problems: list[str]) -> None:
    trainers: dict[str, Any] = {
        "alone": [Trained(letter) for letter in "xyz"],
        "gloo": [Trained(letter) for letter in gloo],
        "zpccl": [Trained(letter) for letter in ours],
    }
    options = argparse.Namespace(reps=2, steps=1, batch=1)
    rows = list(ddp.measure_systems(trainers, options, len(ours), 8))
    assert rows[-1]["problems"] == problems
    assert [row["cpu_seconds"] for row in rows] == [2 * len(trainers[row["system"]]) for row in rows]


# --- torch's suite ----------------------------------------------------------------------------------------------------


def test_a_part_that_fails_is_a_failed_test(capsys: pytest.CaptureFixture[str]) -> None:
    class Parts(unittest.TestCase):
        def test_parts(self) -> None:
            with self.subTest("of it"):
                raise AssertionError("as told")

    outcomes = torch_suite.Outcomes()
    Parts("test_parts").run(outcomes)
    ((_, outcome, why),) = outcomes.rows
    assert outcome == "failed" and "as told" in why
    assert "failed" in capsys.readouterr().out


def test_words_that_no_test_has_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch_suite, "load_suite", lambda ranks: unittest.TestCase)
    assert torch_suite.main(["nothing"]) == 1
    assert "no test name contains any of: nothing" in capsys.readouterr().err


def test_the_suite_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        torch_suite.main([])
    assert "needs torch and expecttest" in capsys.readouterr().err


# --- The tools, small -------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.e2e
def test_kill_peer_keeps_the_promises() -> None:
    """S1, S2, L1, L2."""
    options = ["--peers", "3", "--bytes", "64MiB", "--rounds", "1"]
    (found,) = rows_of("kill-peer", *options)
    assert (found["rounds"], found["buffers_restored"], found["sums_right"]) == (1, 1, 1)
    assert 0 < found["ms_to_error_median"] <= found["ms_to_error_max"] <= kill_peer.MS_TO_ERROR_MAX
    assert found["ms_to_error_max"] < found["ms_to_retry_median"] <= found["ms_to_retry_max"]
    assert found["promises_kept"] is True


@pytest.mark.slow
@pytest.mark.e2e
def test_kill_master_keeps_the_promises() -> None:
    """L3, S1, S5."""
    options = ["--peers", "2", "--bytes", "64KiB", "--kills", "1", "--absence", "0.1"]
    (found,) = rows_of("kill-master", *options)
    assert (found["kills"], found["digests_equal"], found["revision_goes_on"]) == (1, True, True)
    assert found["calls_that_saw_a_kill"] == 2
    assert found["promises_kept"] is True


@pytest.mark.e2e
@pytest.mark.slow
def test_a_rolling_restart_keeps_the_promises(tmp_path: Path) -> None:
    """L3, S1, S3, S5, S6."""
    path = tmp_path / "rolling.json"
    options = ["--peers", "3", "--bytes", "64KiB", "--rolling", "3", "--seconds", "6"]
    ended = run("kill-master", *options, "--json", str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = json.loads(path.read_text())
    assert (found["kills"], found["failed_calls"], found["problems"]) == (2, 0, [])
    assert found["visits"] > 0
    assert "all promises kept" in ended.stdout


@pytest.mark.e2e
@pytest.mark.slow
def test_cut_paths_keeps_the_promises() -> None:
    """L1, L2, S1, S2."""
    options = ["--cut", "host", "path", "--bytes", "16MiB", "--rounds", "1", "--heartbeat-timeout", "2"]
    rows = rows_of("cut-paths", *options)
    assert [(row["cut"], row["rounds"], row["problems"]) for row in rows] == [("host", 1, []), ("path", 1, [])]
    assert 0 < rows[1]["seconds_to_error_median"] < rows[1]["seconds_to_commit_median"]
    assert rows[0]["seconds_to_commit_median"] > 0  # Between two calls, maybe nobody notices that a host is cut off.


@pytest.mark.slow
def test_plans_are_compared_with_what_no_plan_can_beat() -> None:
    rows = rows_of("plans", "--peers", "3", "5", "--bytes", "64MiB", "--seeds", "2")
    assert len(rows) == 10
    for row in rows:
        assert 0.999 < row["plan_median"] <= row["plan_p95"] < 3
        assert row["direct_median"] is None or row["plan_median"] <= row["direct_median"]
        assert row["cpu_s_max"] >= row["cpu_s_median"] > 0


@pytest.mark.slow
def test_quantise_measures_each_format() -> None:
    copied, *rows = rows_of("quantise", "--dtypes", "float64", "bfloat16", "--reps", "1")
    assert copied["format"] == "memcpy" and len(rows) == 2 * (len(common.QUANTIZATIONS) - 1)
    for row in rows:
        assert row["quantise"] > 0 and row["fold"] > 0 and row["dequantise"] > 0
        assert row["bits"] < 9 and (row["rms"] is None) == (row["dtype"] == "bfloat16")


SUMMARY = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.000012          12       340         1 read
100.00    0.000020          12       345{errors} total
"""


@pytest.mark.parametrize("errors", ["", "         2"])
def test_the_total_of_a_summary_of_strace_is_found(errors: str) -> None:
    assert call.total_of(SUMMARY.format(errors=errors)) == 345
    with pytest.raises(common.WorkerFailed, match="not a summary"):
        call.total_of("strace: attach: Operation not permitted\n")


@pytest.mark.slow
@pytest.mark.e2e
def test_call_counts_what_peers_and_master_do() -> None:
    (row,) = rows_of("call", "--peers", "2", "--bytes", "4KiB", "--reps", "1", "--systems", "zpccl")
    assert row["seconds_median"] > 0
    assert row["peer_wake_ups"] > 1  # A peer can only take part if a message wakes it.
    assert row["master_wake_ups"] > 0  # It hears of many calls at once if peers commit them.
    for who in ("peer", "master"):
        assert 0 < row[f"{who}_cpu_seconds"] < 1
        calls = row[f"{who}_system_calls"]
        assert calls is None or calls > row[f"{who}_wake_ups"] / 2  # None if there is no strace.


@pytest.mark.slow
@pytest.mark.e2e
def test_allreduce_writes_a_row_for_each_system_and_size() -> None:
    sizes = ["--peers", "2", "--bytes", "4KiB", "100KiB", "--connections", "2", "--reps", "2"]
    systems = ["--quantize", "none", "zps", "--systems", "zpccl", "raw_tcp"]
    rows = rows_of("allreduce", *sizes, *systems)
    assert [(row["system"], row["bytes"], row["quantize"]) for row in rows] == [
        ("zpccl", 4096, "none"),
        ("raw_tcp", 4096, "none"),
        ("zpccl", 102_400, "none"),
        ("raw_tcp", 102_400, "none"),
        ("zpccl", 4096, "zps"),
        ("zpccl", 102_400, "zps"),
    ]
    for row in rows:
        assert (row["peers"], row["connections"], row["dtype"]) == (2, 2, "float32")
        assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
        assert row["busbw_gbit"] == pytest.approx(row["bytes"] * 8 / 1e9 / row["seconds_median"])
        assert row["cpu_seconds"] > 0
        assert row["cpu_seconds_per_gib"] == pytest.approx(row["cpu_seconds"] * 2**30 / row["bytes"])
        assert row["of_gloo"] is None
    first, raw = rows[0], rows[1]
    assert first["of_raw_tcp"] == pytest.approx(raw["seconds_median"] / first["seconds_median"])
    assert raw["of_raw_tcp"] == 1 and rows[4]["of_raw_tcp"] is None


def test_the_peak_of_a_resident_set_is_never_less_than_what_is_resident() -> None:
    """This holds while the process grows, for example through other threads."""
    grown = []
    for count in range(300):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK, encoding="ascii")
        grown.append(np.ones(300 + count))
        peak, now = resident_bytes()
        assert peak >= now > 0


@pytest.mark.slow
@pytest.mark.e2e
def test_memory_sees_the_workspace_of_in_place() -> None:
    """B1: out of place needs no copy, in place one workspace of the size of the tensor."""
    options = ["--bytes", "32MiB", "--places", "out", "in", "--systems", "zpccl"]
    out, in_place = rows_of("memory", *options)
    assert (out["place"], in_place["place"]) == ("out", "in")
    assert out["extra_bytes"] < 2**23
    assert 2**24 < in_place["extra_bytes"] < 2**25 + 2**23
    assert out["kept_bytes"] < 2**23 and in_place["kept_bytes"] <= in_place["extra_bytes"]  # For the next call.


@pytest.mark.slow
@pytest.mark.e2e
def test_allreduce_compares_algorithms() -> None:
    options = ["--peers", "3", "--reps", "1", "--bytes", "64KiB", "--connections", "1", "--systems", "zpccl"]
    rows = rows_of("allreduce", *options, "--algorithm", "ring", "direct")
    assert [row["system"] for row in rows] == ["zpccl ring", "zpccl direct"]


@pytest.mark.slow
@pytest.mark.e2e
def test_allreduce_compares_encryptions_with_plain() -> None:
    pytest.importorskip("nacl")
    options = ["--peers", "2", "--reps", "1", "--bytes", "64KiB", "--systems", "zpccl"]
    rows = rows_of("allreduce", *options, "--encryption", "plain", "authenticated", "CHACHA20_POLY1305")
    assert [row["system"] for row in rows] == ["zpccl", "zpccl authenticated", "zpccl CHACHA20_POLY1305"]
    assert [row["of_plain"] for row in rows] == [rows[0]["seconds_median"] / row["seconds_median"] for row in rows]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("place", ["out", "in"])
def test_allreduce_compares_tensors(place: str) -> None:
    pytest.importorskip("torch")
    options = ["--peers", "2", "--reps", "1", "--bytes", "64KiB", "--systems", "zpccl", "--place", place]
    rows = rows_of("allreduce", *options, "--tensors", "numpy", "torch")
    assert [row["system"] for row in rows] == ["zpccl", "zpccl torch"]


def test_the_table_of_algorithms_is_up_to_date() -> None:
    """python tools/algorithm_table.py updates it."""
    page = algorithm_table.PAGE.read_text(encoding="utf-8")
    assert algorithm_table.put_into(page) == page


@pytest.mark.slow
@pytest.mark.e2e
def test_allreduce_times_a_batch_as_a_whole() -> None:
    options = ["--peers", "2", "--bytes", "4KiB", "--batch", "20", "--concurrent", "20", "--reps", "2"]
    systems = ["zpccl", "raw_tcp"]
    rows = rows_of("allreduce", *options, "--systems", *systems)
    assert [(row["system"], row["bytes"], row["batch"]) for row in rows] == [(name, 4096, 20) for name in systems]
    for row in rows:
        assert row["busbw_gbit"] == pytest.approx(20 * 4096 * 8 / 1e9 / row["seconds_median"])


@pytest.mark.slow
@pytest.mark.e2e
def test_master_writes_a_row_for_each_size() -> None:
    options = ["--peers", "2", "9", "--batch", "1", "3", "--rounds", "2"]
    rows = rows_of("master", *options)
    assert [(row["peers"], row["batch"]) for row in rows] == [(2, 1), (2, 3), (9, 1), (9, 3)]
    for row in rows:
        assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
        assert row["master_cpu_seconds_median"] > 0
        assert row["messages_per_second"] > 0
        assert row["resident_kib_per_peer"] > 0 and row["greeted_kib_per_peer"] > 0
        own = row["resident_kib_per_peer"] - row["bare_kib_per_peer"]
        assert row["own_kib_per_peer"] == pytest.approx(own)


@pytest.mark.slow
@pytest.mark.e2e
def test_join_writes_a_row_with_and_one_without_what_is_fetched_ahead() -> None:
    """The sync does not fetch again what was fetched ahead."""
    plain, ahead = rows_of("join", "--bytes", "2MiB", "--reps", "1")
    assert (plain["ahead"], ahead["ahead"]) == (False, True)
    assert plain["received_median"] > 2**21 > ahead["received_median"]
    assert ahead["of_plain"] == ahead["stop_median"] / plain["stop_median"]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.e2e
def test_ddp_times_steps_beside_gloo() -> None:
    pytest.importorskip("torch")
    rows = rows_of("ddp", "--bytes", "256KiB", "--reps", "1", "--steps", "2")
    assert [row["system"] for row in rows] == ["alone", "gloo", "zpccl", "zpccl+master"]
    assert all(row["seconds_median"] > 0 for row in rows) and rows[1]["of_gloo"] == 1


@pytest.mark.e2e
@pytest.mark.torch
def test_gloo_is_measured_beside() -> None:
    options = ["--peers", "2", "--bytes", "64KiB", "--reps", "1", "--systems", "gloo"]
    (row,) = rows_of("allreduce", *options)
    assert (row["system"], row["place"], row["connections"]) == ("gloo", "in", 1)


@pytest.mark.e2e
def test_kill_calls_keeps_the_promises() -> None:
    """S1, S2, L1, L2."""
    (found,) = rows_of("kill-calls", "--peers", "3", "--rounds", "5")
    assert found["rounds"] == found["failed"] + found["went_on"] == 5
    assert found["promises_kept"] is True


class Summing:
    """Replaces a communicator whose peers all have the same last element."""

    def __init__(self, numbers: list[int], dtype: str) -> None:
        self.numbers, self.dtype = numbers, dtype

    def all_reduce(self, _: Any, tensor: Any) -> None:
        tensor[:-1] = np.resize(pattern.pattern(self.numbers, self.dtype), tensor.size - 1)
        tensor[-1:] *= np.array([len(self.numbers)], self.dtype)


@pytest.mark.parametrize("dtype", common.DTYPES)
@pytest.mark.parametrize("number", [0, 1, 127, 200, 1000])
def test_a_sum_is_right_in_every_type_whatever_the_number_of_the_call(number: int, dtype: str) -> None:
    numbers = [0, 1, 2, 3]
    peer = object.__new__(kill_calls.CallingPeer)
    peer.dtype, peer.tensor, peer.before = dtype, np.zeros(1000, dtype), np.zeros(1000, dtype)
    peer.comm = Summing(numbers, dtype)  # type: ignore[assignment]
    assert peer._one_call(number, numbers, numbers[1:]) == "all"


def ended(call: int = 7, end: str = "failed", retry: str = "right") -> dict[str, Any]:
    return {"call": call, "end": end, "retry": retry}


def test_survivors_of_a_kill_must_agree() -> None:
    assert kill_calls.judge([ended(), ended()]) == kill_calls.judge([ended(end="went on")] * 2) == []
    (problem,) = kill_calls.judge([ended(), ended(end="went on")])
    assert problem == "survivors disagree: call 7: failed; call 7: went on"
    (problem,) = kill_calls.judge([ended(), ended(call=8)])
    assert problem == "survivors disagree: call 7: failed; call 8: failed"


def test_what_is_wrong_after_a_kill_is_named() -> None:
    assert kill_calls.judge([ended(end="a sum was wrong")] * 2) == ["a sum was wrong"] * 2
    assert kill_calls.judge([ended(), ended(retry="failed")]) == ["then failed"]


@pytest.mark.parametrize("name", ["allreduce", "memory", "kill-peer", "cut-paths", "kill-master", "state-faults"])
def test_wrong_arguments_are_said_in_a_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main([name, "--bytes", "much"])
    assert f"tools/bench.py {name}: error: argument --bytes: 'much' is not a size" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        bench.main([name, "--help"])
    assert "--json" in capsys.readouterr().out


# --- The compiled simulator -------------------------------------------------------------------------------------------


def test_what_the_compiled_simulator_changes_is_there(tmp_path: Path) -> None:
    modules = compile_sim.copy(tmp_path / "copy")
    texts = {module: (tmp_path / "copy" / module).read_text(encoding="utf-8") for module in modules}
    assert {"zpccl/protocol/master.py", "zpccl/protocol/kinds/sync.py", "zpccl/sim/checkers.py"} <= set(texts)
    for module, text in texts.items():
        compile(text, module, "exec")
        assert "slots=True" not in text


def test_only_older_copies_of_the_simulator_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other folders stay, even if they also contain built files."""
    (tmp_path / "build.log").touch()
    options = argparse.Namespace(folder=tmp_path, seeds="0:1")
    with pytest.raises(compile_sim.CannotCompile, match="no copy"):
        compile_sim.play(options)
    assert (tmp_path / "build.log").exists()
    options.folder = tmp_path / "copy"
    monkeypatch.setitem(compile_sim.CHANGES, "protocol/routes.py", (("not there", ""),))
    for _ in range(2):  # A copy that could not be made is replaced.
        with pytest.raises(compile_sim.CannotCompile, match="not there"):
            compile_sim.play(options)


def test_the_compiled_simulator_has_constructors_of_its_own() -> None:
    """In compiled code, constructors that Python makes for a data class take ten times as long."""
    text = (
        "@dataclass(unsafe_hash=True, kw_only=True)\nclass Pair:\n    one: int\n    other: int = 2\n\n"
        "    def __post_init__(self) -> None:\n        assert self.one < self.other\n\n\n"
        "@dataclass\nclass Kept:\n    made: list[int] = field(default_factory=list)\n"
    )
    names: dict[str, Any] = {"dataclass": dataclasses.dataclass, "field": dataclasses.field}
    written = compile_sim.with_constructors(text)
    exec(compile(written, "text", "exec"), names)
    assert written.count("def __init__(self, *, one: int, other: int = 2) -> None:") == written.count("__init__") == 1
    assert names["Pair"](one=1) == names["Pair"](one=1, other=2)
    assert hash(names["Pair"](one=1)) == hash(names["Pair"](one=1))
    with pytest.raises(AssertionError):
        names["Pair"](one=2)


def test_a_change_that_finds_nothing_is_an_error() -> None:
    with pytest.raises(compile_sim.CannotCompile, match=r"protocol/routes\.py"):
        compile_sim.changed("protocol/routes.py", "nothing = 1\n")
