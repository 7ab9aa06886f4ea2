"""Runs torch's own suite for backends of torch.distributed against zpccl, and prints the result of each test.

    python tools/torch_suite.py                   all tests, on 8 ranks, which some of them need
    python tools/torch_suite.py reduce broadcast  tests with one of the words in their names

The suite is `torch.testing._internal.distributed.distributed_test`, which torch's wheels contain. It needs the packages
torch and expecttest. The output of tests goes to standard error. Exit status: 0, or 1 if a test failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import sys
import unittest
from collections import Counter
from collections.abc import Sequence
from typing import Any

from common import print_table, say, whole


def load_suite(ranks: int) -> type[unittest.TestCase]:
    """The suite, set up for the backend of zpccl. It reads the environment while it is imported."""
    os.environ.update(BACKEND="zpccl", WORLD_SIZE=str(ranks), TEMP_DIR=os.environ.get("TEMP_DIR", "/tmp"))
    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    import zpccl.torch  # noqa: F401, makes the backend known.

    torch.set_num_threads(1)
    for feature in ("plugin", "ddp", "subgroup", "gpu", "cuda"):  # Tests for a GPU are skipped if there is none.
        DistTestCases.backend_feature[feature].add("zpccl")
    DistTestCases.skip_collective["sendrecv anysource"].add("zpccl")
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    def set_up(test: Any) -> None:
        TestDistBackend.setUp(test)
        # A fork has torch imported already. A spawned process would import it anew for each test.
        test._start_processes(multiprocessing.get_context("fork").Process)

    return type("Suite", (TestDistBackend, DistributedTest._DistTestBase), {"setUp": set_up})


class Outcomes(unittest.TestResult):
    """Records the result of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, str, str]] = []

    def _note(self, test: Any, outcome: str, why: str = "") -> None:
        self.rows.append((test.id().rpartition(".")[2], outcome, why))
        print("  ".join(self.rows[-1]), flush=True)

    def addSuccess(self, test: Any) -> None:
        """The test has passed."""
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        """The suite skips the test for this backend or machine."""
        self._note(test, "not applicable", reason)

    def addFailure(self, test: Any, error: Any) -> None:
        """The test has failed."""
        lines = [line for line in str(error[1]).splitlines() if "Error" in line] or str(error[1]).splitlines()
        self._note(test, "failed", lines[-1].strip() if lines else "")

    def addError(self, test: Any, error: Any) -> None:
        """The test has ended with an error."""
        self.addFailure(test, error)

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        """A part of the test has ended. If it failed, the test has failed, and unittest reports nothing else for it."""
        if error is not None:
            self.addFailure(test, error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of tests (default: all tests)")
    parser.add_argument("--ranks", type=whole(1), default=8, help="processes of each test (default %(default)s)")
    options = parser.parse_args(arguments)
    missing = [name for name in ("torch", "expecttest") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"needs {' and '.join(missing)}: pip install torch expecttest")
    suite, outcomes = load_suite(options.ranks), Outcomes()
    for name in unittest.TestLoader().getTestCaseNames(suite):
        if not options.words or any(word in name for word in options.words):
            suite(name).run(outcomes)
    if not outcomes.rows:
        say(f"no test name contains any of: {', '.join(options.words)}")
        return 1
    counts = Counter((outcome, why) for _, outcome, why in outcomes.rows)
    print_table("Tests", ["outcome", "why", "tests"], [[*key, str(count)] for key, count in sorted(counts.items())])
    return int(any(outcome == "failed" for _, outcome, _ in outcomes.rows))


if __name__ == "__main__":
    sys.exit(main())
