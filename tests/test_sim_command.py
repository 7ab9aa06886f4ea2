"""`python -m zpccl.sim`: many seeds, several processes, and its reports about failing seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mutants import MUTANTS
from mutation import Mutant
from planting import JOINERS_NEVER_ADMITTED, fault, plant

from zpccl.sim import Violation
from zpccl.sim.__main__ import main
from zpccl.sim.coverage import Coverage
from zpccl.sim.faults import KINDS
from zpccl.sim.runs import Setup, run_seed, run_seeds
from zpccl.sim.shrink import TRACE_LINE_CHARS_MAX, shrink

SHORT_RUNS = 300
"""Some runs for each profile; `make sim ARGS='--steps 150'` runs more."""
PROCESS_TIMEOUT_S = 200


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False
    )


def lines_of(seed: int, **options: Any) -> list[str]:
    lines: list[str] = []
    run_seed(seed, tracer=lines.append, **options)
    return lines


@pytest.mark.slow
def test_short_runs_keep_all_promises() -> None:
    """S1 to S6, B1, L1 to L3: the faults of every profile, in quick succession."""
    done = run_python("-m", "zpccl.sim", "--seeds", str(SHORT_RUNS), "--steps", "150", "--jobs", "0", "--keep-going")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(f"{SHORT_RUNS} seeds, 0 failed; ")


PLANTED = f"""
import sys
sys.path += {sys.path!r}
from mutation import loaded
from planting import JOINERS_NEVER_ADMITTED
from zpccl.sim.__main__ import main
function, code = loaded(JOINERS_NEVER_ADMITTED)
function.__code__ = code
sys.exit(main(sys.argv[1:]))
"""


def failed_seeds(*arguments: str) -> list[int]:
    done = run_python("-c", PLANTED, *arguments, "--no-shrink")
    assert done.returncode == 1
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("seed ")]


@pytest.mark.slow
def test_processes_change_nothing() -> None:
    """The same seeds fail in the same order, whatever the number of processes."""
    arguments = ["--seeds", "3:27", "--steps", "150", "--faults", "churn", "--keep-going"]
    alone = failed_seeds(*arguments)
    assert len(alone) > 10
    assert alone == sorted(alone) == failed_seeds(*arguments, "--jobs", "3")


@pytest.mark.slow
def test_the_first_failing_seed_ends_the_run() -> None:
    arguments = ["--seeds", "3:27", "--steps", "150", "--faults", "churn"]
    assert len(failed_seeds(*arguments)) == 1
    assert failed_seeds(*arguments) == failed_seeds(*arguments, "--jobs", "3")


def test_command_counts_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3:6", "--steps", "200", "--faults", "churn"]) == 0
    assert capsys.readouterr().out.startswith("3 seeds, 0 failed; ")


@pytest.mark.slow
def test_coverage_counts_what_was_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything possible has a row or a column, reached or not. Several processes count together what one counts."""
    file = tmp_path / "coverage.json"
    assert main(["--seeds", "12", "--steps", "300", "--coverage", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(file.read_text())
    assert found["seeds"] == 12
    assert found["peer"]["Plan"]["collective voting"] > 10
    assert found["peer"]["Plan"]["new"] == 0
    assert found["master"]["Votes"]["member"] > found["master"]["Votes"]["stranger"]
    assert found["fault"].keys() == set(KINDS)
    assert sum(found["fault"]["crashes"].values()) > 10
    assert any(line.startswith("Plan ") and " . " in line for line in lines)
    assert any(line.startswith("crashes ") for line in lines)
    done = run_python("-m", "zpccl.sim", "--seeds", "12", "--steps", "300", "--json", str(file), "--jobs", "2")
    assert done.returncode == 0
    assert json.loads(file.read_text()) == found


def test_every_message_and_state_has_its_place_in_the_tables() -> None:
    rows, columns = Coverage().axes("peer")
    assert {"Plan", "Refused report", "Tick", "Called"} <= set(rows)
    assert {"new", "idle", "collective running", "sync reported", "update round", "closed"} <= set(columns)
    rows, columns = Coverage().axes("master")
    assert {"Hello", "RunReport", "ConnectionClosed"} <= set(rows)
    assert {"master recovering", "stranger", "member"} <= set(columns)
    rows, columns = Coverage().axes("session")
    assert {"SocketBroke", "UseMaster"} <= set(rows) and {"asking", "up"} <= set(columns)


def test_faults_can_be_left_out() -> None:
    """By kind, or by number. A fault keeps its number as long as all faults before it are there."""
    whole = lines_of(11, faults="chaos", steps=500)
    struck = [line for line in whole if " fault **" in line]
    kinds = {line.split()[-1] for line in struck}
    assert {"joins", "crashes"} <= kinds
    calmer = lines_of(11, faults="chaos", steps=500, without=["crashes", "link_breaks"])
    assert not any(line.endswith(("crashes", "link_breaks")) for line in calmer)
    number = next(line.split()[3] for line in struck if line.endswith("crashes"))
    skipped = lines_of(11, faults="chaos", steps=500, skip=[int(number.rstrip(":"))])
    place = next(index for index, line in enumerate(whole) if f"** {number}" in line)
    assert whole[:place] == skipped[:place]
    assert whole[place:] != skipped[place:]
    assert not any(f"** {number}" in line for line in skipped)


# --- Shrinking --------------------------------------------------------------------------------------------------------


def never() -> bool:
    return False


def crash(name: str, function: str, old: str) -> Mutant:
    """A machine crashes in this function."""
    return fault(name, function, old, "raise ZeroDivisionError('planted')")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "mutant", "needed", "error"),
    [
        # A seed that fails, does not need all peers, and shrinks in seconds.
        (1000, next(m for m in MUTANTS if m.name == "digests-not-compared"), {"corruption_chance"}, "Violation: S"),
        (0, JOINERS_NEVER_ADMITTED, set(), "Violation: L2"),
        (
            3,
            crash("crash-at-withdrawal", "protocol.operation:Operations._on_withdraw", "call_id = message.call_id"),
            {"withdraw_chance"},
            "ZeroDivisionError: planted",
        ),
    ],
    ids=["digests", "joiners", "crash"],
)
def test_shrinks_to_what_a_failure_needs(
    seed: int, mutant: Mutant, needed: set[str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few peers, few faults of few kinds; the rest fails in the same way, as its trace shows."""
    plant(monkeypatch, mutant)
    whole = Setup(faults="chaos", peers=5)
    while True:
        seed = run_seeds(range(seed, seed + 100), whole, keep_going=False).failures[0].seed
        found = shrink(seed, whole, never)
        if found is not None and found.setup.peers < whole.peers:  # Some failures need all peers, but not all do.
            break
        seed += 1
    small = found.setup
    assert small.steps < 500
    assert found.error.startswith(error)
    assert needed.isdisjoint(small.without)
    lines: list[str] = []
    cluster = small.build(seed, lines.append)
    with pytest.raises((Violation, ZeroDivisionError)) as caught:
        small.run(seed, cluster)
    assert found.error == f"{type(caught.value).__name__}: {caught.value}"
    assert list(found.trace) == [line[:TRACE_LINE_CHARS_MAX] for line in lines[-len(found.trace) :]]
    struck = [kind for number, kind in enumerate(cluster.injector.struck, 1) if number not in small.skip]
    assert needed <= set(struck)
    assert len(struck) <= 8
    assert f"{len(struck)} faults" in found.summary


@pytest.mark.slow
def test_shrinking_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, JOINERS_NEVER_ADMITTED)
    found = shrink(3, Setup(faults="chaos"), lambda: True)
    assert found is not None
    assert found.setup == Setup(faults="chaos").resolve(3)


def test_what_does_not_fail_is_not_shrunk() -> None:
    assert shrink(3, Setup(faults="calm", steps=200), never) is None


@pytest.mark.slow
def test_command_shrinks_and_its_replay_fails_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, JOINERS_NEVER_ADMITTED)
    assert main(["--seeds", "3:5", "--faults", "chaos"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("shrunken, in ") and ": Violation: L2: " in line for line in lines)
    replay = [line for line in lines if line.startswith("replay: ")][1]
    assert "--peers 2" in replay
    assert main(replay.split()[4:]) == 1
    assert "seed 3 (chaos) failed: Violation: L2: " in capsys.readouterr().out


# --- The command line -------------------------------------------------------------------------------------------------


def test_command_traces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--peers", "2", "--steps", "200", "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("Plan(" in line and "master ->" in line for line in lines)
    assert any("Resolve(" in line for line in lines)


def test_command_fails_and_says_how_to_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, JOINERS_NEVER_ADMITTED)
    assert main(["--seeds", "2:5", "--steps", "200", "--faults", "calm", "--no-shrink"]) == 1
    out = capsys.readouterr().out
    assert "seed 2 (calm) failed: Violation: L2" in out
    assert "replay: python -m zpccl.sim --seed 2 --peers 0 --steps 200 --faults calm --trace" in out
    assert main(["--seeds", "2:5", "--steps", "200", "--faults", "calm", "--keep-going", "--no-shrink"]) == 1
    assert "3 seeds, 3 failed" in capsys.readouterr().out


def test_command_reports_a_crash_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(
        monkeypatch,
        crash(
            "crash-at-rounds",
            "protocol.kinds.topology:Rounds.evaluate",
            "operation = self._operations.pending.get(Key(function))",
        ),
    )
    assert main(["--seed", "1", "--steps", "50", "--no-shrink"]) == 1
    captured = capsys.readouterr()
    assert "ZeroDivisionError: planted" in captured.out
    assert "Traceback" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--seeds", "5:5"],
        ["--seeds", "x"],
        ["--seed", "1", "--steps", "-1"],
        ["--seed", "1", "--without", "rain"],
        ["--seed", "1", "--skip", "x"],
        ["--seed", "1", "--jobs", "-1"],
    ],
)
def test_command_refuses_nonsense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err
