"""Mutation check: puts the faults of mutants.py into the protocol, one at a time. A check must catch each of them.

Each fault goes into its own copy in a temporary directory; the checkout is only read. On that copy the simulator runs a
number of seeds, or the unit tests of the protocol run until one fails. The check that is expected to catch the fault
runs first; the other one runs if the first did not catch it. A fault that survives both is a gap in the tests: the tool
names it and exits with 1. The tool checks the unmodified protocol first; it must pass both.

Ownership: one thread owns every child and ends it by its process id, however the tool ends. A copy belongs to one child
at a time.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import WorkerFailed, positive, print_table, run_tool, say
from mutants import MUTANTS
from mutation import SIMULATOR, TESTS, Mutant, mutate

ROOT = Path(__file__).resolve().parent.parent
TEST_FOLDERS = ["tests/protocol", "tests/scenarios"]
COPIED = tuple(map(Path, ("zpccl", *TEST_FOLDERS, "tests/conftest.py", "docs/shared_state.md", "setup.cfg")))
"""Contents of a copy: the package, the tests of the protocol and the table that they read, the pytest settings."""
OUTPUT = "output.txt"
SURVIVED = "SURVIVED"
SEEDS = 300
CHECK_TIMEOUT_S = 600.0
"""Timeout of a check, without the time for its seeds."""
SEED_TIMEOUT_S = 0.5
"""Additional time for each seed."""

_FOUND = {
    SIMULATOR: re.compile(r"^seed (?P<by>\d+)\b.* failed: (?P<text>.*)$", re.MULTILINE),
    TESTS: re.compile(r"^FAILED tests/\w+/(?P<by>.+?)(?: - (?P<text>.*))?$", re.MULTILINE),
}
_TYPO = re.compile(r"(SyntaxError|NameError|UnboundLocalError|ImportError)\b")
"""Errors that show a broken mutant or environment instead of a caught fault."""


@dataclass(frozen=True)
class Effort:
    """The extent of the checks."""

    seeds: int
    """Number of seeds that the simulator runs, from 0 on."""
    tests: tuple[str, ...]
    """Files or folders of unit tests, below the root."""
    asks_both: bool
    """Run both checks for each mutant, even if the first has caught it."""
    only: str | None
    """Run only this check; None: both, or the second one only if the first has not caught the fault."""

    def checkers(self, mutant: Mutant) -> tuple[str, ...]:
        """The checks for a mutant, the one that is expected to catch it first."""
        if self.only is not None:
            return (self.only,)
        return (mutant.finder, SIMULATOR if mutant.finder == TESTS else TESTS)

    @property
    def timeout_s(self) -> float:
        """How long a check may take."""
        return CHECK_TIMEOUT_S + SEED_TIMEOUT_S * self.seeds


@dataclass(frozen=True)
class Finding:
    """The result of one check on one copy."""

    by: str
    """The seed or the test that failed; "" if all passed."""
    text: str
    seconds: float


@dataclass(frozen=True)
class MutantResult:
    """The result of one mutant: the findings of the checks, and the problem if a check could not run."""

    mutant: Mutant
    findings: tuple[Finding, ...]
    problem: str = ""

    @property
    def caught_by(self) -> str:
        """The check that caught it; "" if it survived."""
        return ", ".join(finding.by for finding in self.findings if finding.by)

    @property
    def fate(self) -> str:
        """The result as text: what caught it, "survived", or the problem."""
        return self.caught_by or self.problem or SURVIVED

    @property
    def seconds(self) -> float:
        """Duration of all its checks."""
        return sum(finding.seconds for finding in self.findings)


# --- Faults -----------------------------------------------------------------------------------------------------------


def place(mutant: Mutant, root: Path = ROOT) -> str:
    """The file and line of the fault.

    Raises:
        NoSuchCode: the mutant does not match the source.
    """
    return f"{mutant.path.name}:{mutate(mutant, (root / mutant.path).read_text(encoding='utf-8'))[1]}"


def put_in(mutant: Mutant, folder: Path) -> None:
    """Puts the fault into a copy.

    Raises:
        NoSuchCode: the mutant does not match the source.
    """
    path = folder / mutant.path
    path.write_text(ast.unparse(mutate(mutant, path.read_text(encoding="utf-8"))[0]), encoding="utf-8")


def make_copy(source: Path, folder: Path) -> None:
    """Copies the files that the checks need."""
    for path in COPIED:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if (source / path).is_dir():
            shutil.copytree(source / path, folder / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source / path, folder / path)


# --- Checks -----------------------------------------------------------------------------------------------------------


def command_of(checker: str, effort: Effort) -> list[str]:
    """The command line of a check."""
    if checker == SIMULATOR:
        return [sys.executable, "-m", "zpccl.sim", "--seeds", str(effort.seeds), "--no-shrink"]
    return [sys.executable, "-m", "pytest", "--exitfirst", "--quiet", "-p", "no:cacheprovider", *effort.tests]


async def run(command: Sequence[str], folder: Path, timeout_s: float) -> tuple[int | None, str]:
    """Runs a command in a copy. Returns its exit status (None: timeout) and its output."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "ZPCCL_"))}
    environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    environment["CI"] = "true"  # Makes Hypothesis try the same examples every time.
    status: int | None = None
    with (folder / OUTPUT).open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                status = await asyncio.wait_for(process.wait(), timeout_s)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return status, (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")


def judge(checker: str, status: int | None, output: str) -> tuple[str, str]:
    """Interprets exit status and output of a check. Returns what failed and how; two empty texts if it passed.

    Raises:
        WorkerFailed: the check failed for another reason than a fault of the protocol.
    """
    if status == 0:
        return "", ""
    found = _FOUND[checker].search(output)
    last = (output.strip().splitlines() or ["nothing"])[-1]
    if found is None and (status is None or "+++ Timeout +++" in output):
        return f"a hang of the {checker}", last
    text = (found["text"] or "") if found is not None else last
    if found is None or _TYPO.match(text):
        raise WorkerFailed(f"the {checker} cannot run, exit status {status}: {text}")
    return (f"seed {found['by']}" if checker == SIMULATOR else found["by"]), text


async def check(checker: str, folder: Path, effort: Effort) -> Finding:
    """Runs one check on a copy."""
    began = time.monotonic()
    status, output = await run(command_of(checker, effort), folder, effort.timeout_s)
    by, text = judge(checker, status, output)
    return Finding(by, text, time.monotonic() - began)


async def try_original(pristine: Path, effort: Effort) -> None:
    """Checks the unmodified protocol, with SEEDS seeds at most: longer campaigns without a fault are the simulator's
    own task.

    Raises:
        WorkerFailed: it fails, or a check would import another zpccl than that of the copy.
    """
    effort = replace(effort, seeds=min(effort.seeds, SEEDS))
    where = "import pathlib, zpccl; print(pathlib.Path(zpccl.__file__).resolve().parent.parent)"
    _, found = await run([sys.executable, "-c", where], pristine, CHECK_TIMEOUT_S)
    if found.strip() != str(pristine.resolve()):
        raise WorkerFailed(f"a copy in {pristine} runs another zpccl: {found.strip()}")
    for checker in (SIMULATOR, TESTS) if effort.only is None else (effort.only,):
        finding = await check(checker, pristine, effort)
        if finding.by:
            raise WorkerFailed(f"the unmodified protocol fails: {finding.by}: {finding.text}")
        say(f"without a fault: passed by the {checker}, {finding.seconds:.1f} s")


async def try_mutant(mutant: Mutant, pristine: Path, effort: Effort) -> MutantResult:
    """Puts one fault into a copy and runs the checks one after the other."""
    findings: list[Finding] = []
    problem = ""
    with tempfile.TemporaryDirectory(prefix="zpccl-mutant-") as name:
        folder = Path(name)
        make_copy(pristine, folder)
        put_in(mutant, folder)
        for checker in effort.checkers(mutant):
            if effort.asks_both or not any(finding.by for finding in findings):
                try:
                    findings.append(await check(checker, folder, effort))
                except WorkerFailed as error:
                    problem = str(error)
    verdict = MutantResult(mutant, tuple(findings), problem)
    say(f"{mutant.name}: {verdict.fate}, {verdict.seconds:.1f} s")
    return verdict


async def try_all(mutants: Sequence[Mutant], effort: Effort, jobs: int) -> list[MutantResult]:
    """Checks the original, then all mutants, `jobs` at the same time. Returns verdicts in the order of the mutants."""
    with tempfile.TemporaryDirectory(prefix="zpccl-original-") as name:
        pristine = Path(name)
        make_copy(ROOT, pristine)
        await try_original(pristine, effort)
        turns = asyncio.Semaphore(jobs)

        async def in_turn(mutant: Mutant) -> MutantResult:
            async with turns:
                return await try_mutant(mutant, pristine, effort)

        return await asyncio.gather(*map(in_turn, mutants))


# --- Command line -----------------------------------------------------------------------------------------------------


def print_list(mutants: Sequence[Mutant]) -> int:
    rows = [(mutant.name, place(mutant), mutant.finder, mutant.breaks) for mutant in mutants]
    print_table(f"{len(rows)} mutants", ("mutant", "place", "expected to catch it", "breaks"), rows)
    return 0


def check_mutants(mutants: Sequence[Mutant], options: argparse.Namespace) -> int:
    effort = Effort(options.seeds, tuple(options.tests), options.both, SIMULATOR if options.by_simulator else None)
    places = {mutant: place(mutant) for mutant in mutants}
    verdicts = asyncio.run(try_all(mutants, effort, options.jobs))
    rows = [(v.mutant.name, places[v.mutant], v.fate, f"{v.seconds:.1f}") for v in verdicts]
    survivors = [verdict for verdict in verdicts if not verdict.caught_by]
    title = f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants caught, {options.seeds} seeds at most"
    print_table(title, ("mutant", "place", "caught by", "seconds"), rows)
    for verdict in survivors:
        why = verdict.problem or f"survived, a gap in the tests: {verdict.mutant.breaks}"
        say(f"{verdict.mutant.name}: {why}")
    return 1 if survivors else 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="these mutants (default all)")
    parser.add_argument("--list", action="store_true", help="print the mutants and what they break, and end")
    parser.add_argument("--seeds", type=positive, default=SEEDS, help=f"number of simulator seeds (default {SEEDS})")
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="PATH",
        default=TEST_FOLDERS,
        help=f"unit tests (default {' '.join(TEST_FOLDERS)})",
    )
    parser.add_argument("--jobs", type=positive, default=1, help="mutants at the same time (default 1)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--both", action="store_true", help="run both checks for each mutant, to compare them")
    which.add_argument("--by-simulator", action="store_true", help="check each mutant with the simulator only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    mutants = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    return run_tool(lambda: print_list(mutants) if options.list else check_mutants(mutants, options))


if __name__ == "__main__":
    sys.exit(main())
