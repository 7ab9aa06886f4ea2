"""Findings of checks, and their output."""

from __future__ import annotations

import enum
import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "OK"
    WARNING = "warning"
    """It works, but slower or not everywhere."""
    PROBLEM = "problem"
    """A run does not work with it."""


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: what was checked.
        level: how bad it is.
        text: what was seen.
        fix: the command or other action that fixes it; "" if there is nothing to do.
    """

    check: str
    level: Level
    text: str
    fix: str = ""


def as_json(findings: Sequence[Finding]) -> str:
    """Findings for programs."""
    found = [{**asdict(finding), "level": finding.level.name.lower()} for finding in findings]
    return json.dumps({"is_good": is_good(findings), "findings": found}, indent=2)


def as_table(findings: Sequence[Finding]) -> str:
    """Findings for people: one line or more for each, as wide as the terminal, with its fix below.

    A command stays in one line, so that it can be copied.
    """
    width = max(60, shutil.get_terminal_size((110, 24)).columns)
    first = max(len(finding.check) for finding in findings) + 2
    second = max(len(level.value) for level in Level) + 2
    lines = []
    for finding in findings:
        heads = iter([finding.check.ljust(first) + finding.level.value.ljust(second)])
        for line in textwrap.wrap(finding.text, width - first - second, break_long_words=False) or [""]:
            lines.append(next(heads, " " * (first + second)) + line)
        lines += [" " * (first + second) + "-> " + line for line in finding.fix.splitlines()]
    counts = [_count(findings, level) for level in (Level.PROBLEM, Level.WARNING)]
    return "\n".join([*lines, "", ", ".join(counts)])


def _count(findings: Sequence[Finding], level: Level) -> str:
    """Text such as "2 problems"."""
    count = sum(finding.level is level for finding in findings)
    return f"{count} {level.value}{'' if count == 1 else 's'}"


def is_good(findings: Sequence[Finding]) -> bool:
    """True if there is no problem."""
    return all(finding.level is not Level.PROBLEM for finding in findings)
