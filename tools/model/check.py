"""Checks the models of leadership and of the commit between peers with spin: unmodified, and with each rule broken.

The unmodified rules must pass in every configuration. If a rule is broken, spin must find a run that violates a
promise; otherwise the model covers too little. docs/model.md describes the configurations and the broken rules.

Ownership: each check has a temporary directory and one child at a time, and both end with it. All checks end with the
tool, also on Ctrl-C, SIGTERM or the loss of its terminal.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parent
MEMORY_MIB = 3500
"""Memory limit of one search; two run at the same time."""
SEARCH_TIMEOUT_S = 900.0
_KINDS = {
    "(e==f)": "S3: committed lists are no chain",
    "heard[i]==e": "S1: members heard different outcomes",
    "newest": "L2: not led, or a call without end",
    "adopted": "S3: two leaderships in a term",
    "promised": "S3: counted without a promise",
    "has_committed": "S1: a survivor lacks what a peer has returned",
    "(phase==2)": "S1: a survivor lacks what a peer has returned",
    "call[0]==1": "L1: a call without end",
}
_COMPILE = ("-O1", "-w", "-DSAFETY", "-DNOFAIR", "-DNOREDUCE", "-DVECTORSZ=1024")


@dataclass(frozen=True)
class Check:
    """One search."""

    name: str
    """The name of the configuration or of the broken rule."""
    options: str
    """Macros of the model."""
    is_broken: bool = False
    """spin must find an error."""
    is_deep: bool = False
    """The check runs only with --deep."""
    is_quick: bool = False
    """The check also runs with --quick."""
    model: str = "leadership"
    """The name of the model."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    states: int = 0
    depth: int = 0
    seconds: float = 0.0
    error: str | None = None
    """The assertion that failed; None: no error."""
    failure: str | None = None
    """Why the search is incomplete; None: it is complete."""
    trace: str = ""
    """The run that leads to the error."""


def _broken(rule: str, options: str, *, is_quick: bool = False) -> Check:
    macros = f"-DBREAK_{rule.upper()} -DOUTCOMES_ONLY {options}"
    return Check(rule, macros, is_broken=True, is_quick=is_quick)


def _commit(name: str, options: str, *, is_broken: bool = False, is_quick: bool = False) -> Check:
    macros = f"-DBREAK_{name.upper()} {options}" if is_broken else options
    return Check(name, macros, is_broken=is_broken, is_quick=is_quick, model="commit")


_CHAIN = "-DOUTCOMES=false"
_TWO_TERMS = f"-DTERMS=2 -DLISTS=2 -DBREAKS=4 -DCRASHES=0 {_CHAIN}"
CHECKS: tuple[Check, ...] = (
    Check("quick", "-DTERMS=3 -DLISTS=3 -DBREAKS=2 -DCRASHES=0", is_quick=True),
    Check("outcomes", "-DTERMS=3 -DLISTS=3 -DBREAKS=3 -DCRASHES=0"),
    Check("chain", f"-DTERMS=3 -DLISTS=3 -DBREAKS=4 -DCRASHES=0 {_CHAIN}"),
    Check("crash", f"-DTERMS=3 -DLISTS=2 -DBREAKS=2 -DCRASHES=1 {_CHAIN}"),
    Check("lost reports", f"-DTERMS=3 -DLISTS=2 -DBREAKS=3 -DCRASHES=0 -DLOST_REPORTS {_CHAIN}"),
    Check("stragglers", f"-DTERMS=3 -DLISTS=2 -DBREAKS=2 -DCRASHES=0 -DLOSE_CONNECTED {_CHAIN}"),
    Check("revocation", f"-DTERMS=3 -DLISTS=2 -DBREAKS=2 -DCRASHES=0 -DREVOCATIONS=1 {_CHAIN}"),
    Check("leave", f"-DTERMS=3 -DLISTS=3 -DBREAKS=2 -DCRASHES=0 -DLEAVES=1 {_CHAIN}"),
    Check("newcomer", f"-DPEERS=4 -DTERMS=2 -DLISTS=3 -DBREAKS=3 -DCRASHES=0 {_CHAIN}"),
    Check("newcomer with the lowest id", f"-DPEERS=3 -DMEMBERS=6 -DTERMS=3 -DLISTS=3 -DBREAKS=3 -DCRASHES=0 {_CHAIN}"),
    Check("heal", "-DTERMS=2 -DLISTS=3 -DBREAKS=2 -DCRASHES=0 -DHEAL_TERMS=3"),
    # Redundant while the other rules hold, so no error is expected: see docs/model.md.
    Check(
        "largest number, promises kept", f"-DBREAK_LARGEST_NUMBER -DTERMS=3 -DLISTS=2 -DBREAKS=4 -DCRASHES=0 {_CHAIN}"
    ),
    Check("old quorum alone", f"-DBREAK_OLD_QUORUM_ALONE -DTERMS=3 -DLISTS=2 -DBREAKS=3 -DCRASHES=0 {_CHAIN}"),
    Check("deep chain", f"-DTERMS=4 -DLISTS=3 -DBREAKS=4 -DCRASHES=0 {_CHAIN}", is_deep=True),
    Check("deep heal", "-DTERMS=2 -DLISTS=3 -DBREAKS=3 -DCRASHES=0 -DHEAL_TERMS=3", is_deep=True),
    Check("deep heal after a crash", "-DTERMS=2 -DLISTS=2 -DBREAKS=1 -DCRASHES=1 -DHEAL_TERMS=3", is_deep=True),
    _broken("count_held", f"-DTERMS=3 -DLISTS=3 -DBREAKS=4 -DCRASHES=0 {_CHAIN}"),
    _broken("unpromised_term", f"-DTERMS=3 -DLISTS=3 -DBREAKS=4 -DCRASHES=0 {_CHAIN}"),
    _broken("promise_down", _TWO_TERMS, is_quick=True),
    _broken("term_twice", _TWO_TERMS),
    _broken("stale_acknowledgement", f"-DTERMS=3 -DLISTS=3 -DBREAKS=4 -DCRASHES=0 {_CHAIN}"),
    _broken("new_quorum_alone", _TWO_TERMS, is_quick=True),
    _broken("elect_without_old", f"-DTERMS=3 -DLISTS=3 -DBREAKS=4 -DCRASHES=0 {_CHAIN}"),
    _broken("change_before_commit", f"-DPEERS=4 -DTERMS=3 -DLISTS=3 -DBREAKS=4 -DCRASHES=0 {_CHAIN}"),
    _broken("revoked_consents", f"-DTERMS=2 -DLISTS=2 -DBREAKS=3 -DCRASHES=0 -DREVOCATIONS=1 {_CHAIN}"),
    _broken("largest_number -DBREAK_UNPROMISED_TERM", f"-DTERMS=3 -DLISTS=2 -DBREAKS=3 -DCRASHES=1 {_CHAIN}"),
    _broken("decide_uncommitted", "-DTERMS=3 -DLISTS=3 -DBREAKS=4 -DCRASHES=0"),
    _broken("decide_unreported", "-DTERMS=3 -DLISTS=3 -DBREAKS=4 -DCRASHES=0"),
    _broken("members_alone_depose", "-DTERMS=2 -DLISTS=3 -DBREAKS=2 -DCRASHES=0 -DHEAL_TERMS=3"),
    _broken("old_members_not_told", "-DTERMS=2 -DLISTS=3 -DBREAKS=3 -DCRASHES=0 -DHEAL_TERMS=3"),
    _broken("kick_early", "-DTERMS=2 -DLISTS=3 -DBREAKS=2 -DCRASHES=0 -DHEAL_TERMS=3"),
    _broken("equal_term", "-DTERMS=2 -DLISTS=3 -DBREAKS=2 -DCRASHES=0 -DHEAL_TERMS=3"),
    _commit("commit, planned ahead", "-DCRASHES=2 -DLOSSES=1"),
    _commit("commit, planned", "-DAHEAD=false -DCRASHES=2 -DLOSSES=1"),
    _commit("commit, two losses", "-DCRASHES=1 -DLOSSES=2"),
    _commit("commit not named in run reports", "-DBREAK_COMMIT_NOT_REPORTED -DCRASHES=2 -DLOSSES=1"),
    _commit("return_early", "-DCRASHES=0", is_broken=True, is_quick=True),
    _commit("give_up_told", "-DCRASHES=0", is_broken=True),
    _commit("tell_withdrawn", "-DCRASHES=0", is_broken=True),
    _commit("loss_aborts", "-DCRASHES=0", is_broken=True),
    _commit("plan_at_loss", "-DCRASHES=0", is_broken=True),
    _commit("no_recall", "-DCRASHES=0", is_broken=True),
)


class _Children:
    """The running programs, one for each search."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = False

    def run(self, command: Sequence[str], directory: Path, timeout_s: float) -> str:
        """Runs a program to its end, and returns its output."""
        with self._lock:
            if self._is_over:
                raise concurrent.futures.CancelledError
            pipe = subprocess.PIPE
            child = subprocess.Popen(command, cwd=directory, stdout=pipe, stderr=subprocess.STDOUT, text=True)
            self._running.add(child)
        with child:
            try:
                return child.communicate(timeout=timeout_s)[0]
            finally:
                child.kill()
                with self._lock:
                    self._running.remove(child)

    def end(self) -> None:
        """Ends the running programs. None starts afterwards."""
        with self._lock:
            self._is_over = True
            for child in self._running:
                child.terminate()  # A compiler then removes its files.


_children = _Children()
_run = _children.run


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def search(check: Check, timeout_s: float = SEARCH_TIMEOUT_S) -> SearchResult:
    """Compiles the model for one check, and searches all its states."""
    began = time.monotonic()
    macros = [word for word in re.split(r" (?=-D)", check.options) if word]
    model = MODELS / f"{check.model}.pml"
    with tempfile.TemporaryDirectory(prefix="zpccl-model-") as name:
        directory = Path(name)
        try:
            said = _run(["spin", "-a", *macros, str(model)], directory, timeout_s)
            if not (directory / "pan.c").is_file():
                return SearchResult(failure=f"spin: {said.strip()[:300]}")
            said = _run(["cc", *_COMPILE, f"-DMEMLIM={MEMORY_MIB}", "-o", "pan", "pan.c"], directory, timeout_s)
            if not (directory / "pan").is_file():
                return SearchResult(failure=f"cc: {said.strip()[:300]}")
            said = _run(["./pan", "-m100000", "-w22"], directory, timeout_s)
        except subprocess.TimeoutExpired:
            return SearchResult(seconds=time.monotonic() - began, failure=f"no end within {timeout_s:.0f} s")
        trail = sorted(directory.glob("*.trail"))
        trace = _run(["spin", "-t", "-k", trail[0].name, *macros, str(model)], directory, timeout_s) if trail else ""
    error = re.search(r"^pan:\d+: (.*?) \(at depth", said, re.MULTILINE)
    failure = None
    if "errors:" not in said or "out of memory" in said or "max search depth too small" in said:
        failure = " ".join(said.split())[-300:]
    elif "not completed" in said and error is None:
        failure = "the search was not completed"
    return SearchResult(
        _number(r"(\d+) states, stored", said),
        _number(r"depth reached (\d+)", said),
        time.monotonic() - began,
        _kind(error[1]) if error else None,
        failure,
        "\n".join(line.strip() for line in trace.splitlines() if re.match(r"\s+[a-z] [a-z]+ ", line)),
    )


def _kind(error: str) -> str:
    """The property that an assertion checks."""
    return next((kind for text, kind in _KINDS.items() if text in error), error[:60])


def is_as_expected(check: Check, outcome: SearchResult) -> bool:
    """True if the search is complete, and found an error exactly if one is expected."""
    return outcome.failure is None and (outcome.error is not None) == check.is_broken


def missing_programs() -> list[str]:
    """The programs that are not installed."""
    return [program for program in ("spin", "cc") if shutil.which(program) is None]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small configuration and three broken rules")
    parser.add_argument("--deep", action="store_true", help="larger configurations too, which take longer")
    parser.add_argument("--only", metavar="WORD", default="", help="only checks whose name contains WORD")
    parser.add_argument("--jobs", type=int, default=2, help="searches at a time (default: 2)")
    parser.add_argument("--trace", action="store_true", help="print the run that leads to each error")
    return parser.parse_args(argv)


def _leave(number: int, _: object) -> None:
    """Ends the tool by a signal."""
    sys.exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    missing = missing_programs()
    if missing:
        print(f"{' and '.join(missing)} not found; on Debian or Ubuntu: apt-get install spin gcc", file=sys.stderr)
        return 2
    checks = [
        check
        for check in CHECKS
        if arguments.only in check.name
        and (not arguments.quick or check.is_quick)
        and (arguments.deep or not check.is_deep)
    ]
    if not checks:
        print(f"no configuration has {arguments.only!r} in its name", file=sys.stderr)
        return 2
    print(f"{'configuration':44} {'states':>11} {'depth':>6} {'seconds':>8}  result", flush=True)
    wrong = 0
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)))
        stack.callback(_children.end)
        for check, outcome in zip(checks, pool.map(search, checks), strict=True):
            is_right = is_as_expected(check, outcome)
            wrong += not is_right
            result = outcome.failure or outcome.error or "no error"
            name = f"broken: {check.name.split()[0]}" if check.is_broken else check.name
            if not is_right:
                result = f"WRONG: {result}"
            figures = f"{outcome.states:11,} {outcome.depth:6} {outcome.seconds:8.1f}"
            print(f"{name:44} {figures}  {result}", flush=True)
            if outcome.trace and (arguments.trace or not is_right):
                print("    " + outcome.trace.replace("\n", "\n    "), flush=True)
    print(f"{wrong} of {len(checks)} are not as they must be" if wrong else f"all {len(checks)} as they must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
