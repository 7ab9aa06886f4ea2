"""The list of faults is up to date, and the tool that plants them tells caught faults from survivors."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))  # As Python does for a script in that folder.

import mutate_protocol  # noqa: E402
from common import WorkerFailed  # noqa: E402
from mutants import MUTANTS  # noqa: E402
from mutate_protocol import judge, place  # noqa: E402
from mutation import SIMULATOR, TESTS, Mutant, NoSuchCode, loaded, mutate, parse_mutants  # noqa: E402

FILES = "collective election master membership memory operation peer recovery rings sync topology".split()
FEW = ("--seeds", "10", "--tests", "tests/protocol/test_master.py")
HARMLESS = Mutant(
    name="harmless",
    function="protocol.rings:ring_edges",
    old="range(len(order))",
    new="tuple(range(len(order)))",
    breaks="nothing",
)


def run_tool(*arguments: str, output: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "mutate_protocol.py"), *arguments]
    return subprocess.run(command, text=True, stdout=output, stderr=subprocess.PIPE, check=False)


# --- The list ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_can_be_put_in(mutant: Mutant) -> None:
    """Its function contains the code to replace, differs afterwards, and can be replaced by the new one."""
    function, code = loaded(mutant)
    before = function.__code__
    assert (code.co_name, code.co_freevars) == (before.co_name, before.co_freevars)
    assert (code.co_code, code.co_consts, code.co_names) != (before.co_code, before.co_consts, before.co_names)
    assert mutant.finder in (SIMULATOR, TESTS)
    assert mutant.breaks.partition(": ")[0] in "S1 S2 S3 S4 S5 S6 S7 L1 L2 L3 B1".split()


def test_names_are_unique_and_all_machines_have_some() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert {mutant.path.stem for mutant in MUTANTS} >= set(FILES)


def test_a_text_that_is_no_mutant_is_refused() -> None:
    text = "# A heading\nname: module:function (simulator)\n  L1: breaks it\n  - x\n  + y\n"
    assert parse_mutants(text) == (Mutant("name", "module:function", "x", "y", "L1: breaks it"),)
    for wrong in ("  - x\n", text.replace("simulator", "somebody"), text.replace("  + y\n", "")):
        with pytest.raises(ValueError, match="no mutant: '"):
            parse_mutants(text + wrong)


SOURCE = """
class A:
    def f(self, x):
        if (x and  # Any layout.
                x < 1):
            self.x = x
            return g(x)

def f(x):
    return x + 1, x + 1
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "mutated"),
    [
        ("x and x < 1", "x < 1", 4, "if x < 1:"),
        ("x < 1", "x < 2 or y", 5, "if x and (x < 2 or y):"),
        ("self.x = x", "pass", 6, "pass"),
        ("self.x = x", "x += 1\ny = x", 6, "x += 1\n            y = x"),
        ("return g(x)", "g(x)", 7, "g(x)"),
        ("g(x)", "g(x) + 1", 7, "return g(x) + 1"),
    ],
)
def test_replaces_what_a_function_has_once(old: str, new: str, line: int, mutated: str) -> None:
    mutant = replace(HARMLESS, function="x:A.f", old=old, new=new)
    tree, found = mutate(mutant, SOURCE)
    assert found == line
    assert f" {mutated}\n" in ast.unparse(tree)


@pytest.mark.parametrize(
    ("function", "old", "problem"),
    [
        ("x:f", "x + 1", "'x + 1' is 2 times in x:f, not once"),
        ("x:A.f", "y", "'y' is 0 times in x:A.f, not once"),
        ("x:A.g", "x", "there is no x:A.g"),
        ("x:B.f", "x", "there is no x:B.f"),
    ],
)
def test_tells_what_is_out_of_date(function: str, old: str, problem: str) -> None:
    with pytest.raises(NoSuchCode, match=f"harmless: {re.escape(problem)}"):
        mutate(replace(HARMLESS, function=function, old=old), SOURCE)


def test_place() -> None:
    source = (ROOT / "zpccl" / "protocol" / "rings.py").read_text()
    line = source[: source.index("for i in range(len(order))")].count("\n") + 1
    assert place(HARMLESS) == f"rings.py:{line}"


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


@pytest.mark.slow
def test_lists() -> None:
    done = run_tool("--list")
    assert done.returncode == 0, done.stderr
    assert all(mutant.name in done.stdout for mutant in MUTANTS)


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_ends_it_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    done = run_tool("--list", output=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
def test_each_check_catches_one() -> None:
    """The simulator catches an L2 fault, a unit test an S7 fault. The checkout does not change."""
    names = ["token-not-checked", "connects-no-more"]
    sources = {path: path.read_bytes() for path in (ROOT / "zpccl" / "protocol").glob("*.py")}
    done = run_tool(*FEW, "--only", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 mutants caught" in done.stdout
    rows = [re.split(r" *\| *", line)[1:4] for line in done.stdout.splitlines()[-2:]]
    assert [row[0] for row in rows] == names
    assert rows[0][2].startswith("test_") and rows[1][2].startswith("seed ")
    assert {path: path.read_bytes() for path in sources} == sources


@pytest.fixture
def own_signals() -> Iterator[None]:
    """The tool runs in this process and sets the handler of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("options", [(), ("--by-simulator",)])
def test_a_survivor_is_named(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault that no check catches ends the tool with status 1."""
    monkeypatch.setattr(mutate_protocol, "MUTANTS", (HARMLESS,))
    assert mutate_protocol.main([*FEW, *options]) == 1
    said = capsys.readouterr()
    assert "0 of 1 mutants caught" in said.out
    assert "SURVIVED" in said.out
    assert "harmless: survived" in said.err
    assert ("passed by the unit tests" in said.err) == (not options)


@pytest.mark.slow
@pytest.mark.usefixtures("own_signals")
def test_a_protocol_that_fails_as_it_is_catches_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = next(mutant for mutant in MUTANTS if mutant.name == "connects-no-more")
    copy = mutate_protocol.make_copy

    def copy_wrong(source: Path, folder: Path) -> None:
        copy(source, folder)
        mutate_protocol.put_in(wrong, folder)

    monkeypatch.setattr(mutate_protocol, "make_copy", copy_wrong)
    assert mutate_protocol.main([*FEW, "--only", "token-not-checked"]) == 1
    assert "the unmodified protocol fails: seed" in capsys.readouterr().err
