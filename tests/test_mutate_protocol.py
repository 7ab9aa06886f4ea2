"""The list of faults is up to date, and the tool that puts them in tells who is caught from who is not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))  # As Python does for a script there.

import mutate_protocol  # noqa: E402
from common import WorkerFailed  # noqa: E402
from mutants import MUTANTS, SIMULATOR, TESTS, Mutant  # noqa: E402
from mutate_protocol import changed_lines, judge, problem_of  # noqa: E402

KINDS = "kinds/collective kinds/sync kinds/topology"
FILES = f"election master membership memory operation peer recovery rings {KINDS}".split()
FEW = ("--seeds", "75", "--tests", "tests/protocol/test_master.py")
HARMLESS = Mutant(
    name="harmless",
    file="rings.py",
    old='"""The order of peers in a ring',
    new='"""An order of peers in a ring',
    breaks="nothing",
)


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "mutate_protocol.py"), *arguments]
    return subprocess.run(command, text=True, capture_output=True, check=False)


# --- The list ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_can_be_put_in(mutant: Mutant) -> None:
    """Its text is there once, the file compiles with it, and it is one line of difference."""
    assert problem_of(mutant) == ""
    _, old, new = changed_lines(mutant)
    assert old == 1
    assert new == 1
    assert mutant.finder in (SIMULATOR, TESTS)
    assert mutant.breaks.partition(": ")[0] in "S1 S2 S3 S4 S5 S6 S7 L1 L2 L3 B1".split()


def test_names_are_unique_and_all_machines_have_some() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert {mutant.file for mutant in MUTANTS} >= {f"{name}.py" for name in FILES}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"old": "no such text"}, "0 times in rings.py"),
        ({"old": "order"}, "times in rings.py, not once"),
        ({"file": "no_such_file.py"}, "0 times in no_such_file.py"),
        ({"new": '""'}, "does not compile"),
    ],
)
def test_tells_what_is_out_of_date(changes: dict[str, str], problem: str) -> None:
    assert problem_of(HARMLESS) == ""
    assert problem in problem_of(replace(HARMLESS, **changes))


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [("a", "b", (0, 1, 1)), ("a\nb", "a\nc", (1, 1, 1)), ("a\nb\nc", "a\nc", (1, 1, 0)), ("a\nb", "c\nd", (0, 2, 2))],
)
def test_counts_changed_lines(old: str, new: str, lines: tuple[int, int, int]) -> None:
    assert changed_lines(replace(HARMLESS, old=old, new=new)) == lines


# --- What a check says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checker", "status", "output", "verdict"),
    [
        (SIMULATOR, 0, "300 seeds, 0 failed", ("", "")),
        (SIMULATOR, 1, "\nseed 17 (calm) failed: Violation: S1: no\nreplay: ...", ("seed 17", "Violation: S1: no")),
        (TESTS, 0, "599 passed", ("", "")),
        (TESTS, 1, "FAILED tests/protocol/test_a.py::test_b[c] - assert 1", ("test_a.py::test_b[c]", "assert 1")),
        (TESTS, 1, "FAILED tests/protocol/test_a.py::test_b[c d] - e", ("test_a.py::test_b[c d]", "e")),
        (TESTS, 1, "FAILED tests/protocol/test_a.py::test_b\n", ("test_a.py::test_b", "")),
        (TESTS, 1, "+++ Timeout +++\nstacks", ("a hang of the unit tests", "stacks")),
        (SIMULATOR, None, "", ("a hang of the simulator", "nothing")),
    ],
)
def test_judges(checker: str, status: int | None, output: str, verdict: tuple[str, str]) -> None:
    assert judge(checker, status, output) == verdict


@pytest.mark.parametrize(
    ("checker", "status", "output"),
    [
        (SIMULATOR, 1, "Traceback ...\nImportError: no"),
        (SIMULATOR, 1, "seed 0 (calm) failed: NameError: name 'x' is not defined"),
        (SIMULATOR, 2, "error: unrecognized arguments"),
        (TESTS, 2, "ERROR tests/protocol/test_a.py"),
        (TESTS, -9, ""),
    ],
)
def test_a_check_that_cannot_run_catches_nothing(checker: str, status: int, output: str) -> None:
    with pytest.raises(WorkerFailed, match=r"cannot run"):
        judge(checker, status, output)


# --- The tool ---------------------------------------------------------------------------------------------------------


def test_lists() -> None:
    done = run_tool("--list")
    assert done.returncode == 0, done.stderr
    assert all(mutant.name in done.stdout for mutant in MUTANTS)


@pytest.mark.slow
def test_each_check_catches_one(tmp_path: Path) -> None:
    """S1 by the simulator, S7 by a unit test; the checkout stays as it is."""
    names = ["digests-not-compared", "token-not-checked"]
    sources = {path: path.read_bytes() for path in (ROOT / "zpccl" / "protocol").glob("*.py")}
    done = run_tool(*FEW, "--only", *names, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 mutants caught" in done.stdout
    found = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["mutants"]}
    assert list(found) == names
    assert found[names[0]]["caught_by"].startswith("seed ")
    assert found[names[1]]["caught_by"].startswith("test_")
    assert {path: path.read_bytes() for path in sources} == sources


@pytest.fixture
def own_signals() -> Iterator[None]:
    """The tool, run in this process, sets what SIGTERM does."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("own_signals")
def test_a_survivor_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault that nobody catches ends the tool with 1."""
    monkeypatch.setattr(mutate_protocol, "MUTANTS", (HARMLESS,))
    assert mutate_protocol.main(FEW) == 1
    said = capsys.readouterr()
    assert "0 of 1 mutants caught" in said.out
    assert "SURVIVED" in said.out
    assert "harmless: survived" in said.err


@pytest.mark.slow
@pytest.mark.usefixtures("own_signals")
def test_a_protocol_that_fails_as_it_is_catches_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = next(mutant for mutant in MUTANTS if mutant.name == "digests-not-compared")
    copy = mutate_protocol.make_copy

    def copy_wrong(source: Path, folder: Path) -> None:
        copy(source, folder)
        path = folder / mutate_protocol.PROTOCOL / wrong.file
        path.write_text(path.read_text().replace(wrong.old, wrong.new))

    monkeypatch.setattr(mutate_protocol, "make_copy", copy_wrong)
    assert mutate_protocol.main([*FEW, "--only", "token-not-checked"]) == 1
    assert "the protocol fails as it is: seed" in capsys.readouterr().err
