"""How findings are shown."""

from __future__ import annotations

import json

import pytest

from zpccl.cli.findings import Finding, Level, as_json, as_table, is_good

GOOD = Finding("NAT", Level.OK, "none")
BAD = Finding(
    "data port", Level.PROBLEM, "word " * 60, "first command --with 'a long argument'" + "x" * 200 + "\nsecond"
)


def test_a_problem_is_not_good() -> None:
    assert is_good([GOOD, Finding("a", Level.WARNING, "b")]) and not is_good([GOOD, BAD])


def test_json_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(as_json([GOOD, BAD]))
    assert report["is_good"] is False
    assert report["findings"][0] == {"check": "NAT", "level": "ok", "text": "none", "fix": ""}


def test_text_is_wrapped_and_commands_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users copy commands."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = as_table([GOOD, BAD]).splitlines()
    assert lines[0] == "NAT        OK       none"
    texts = [line for line in lines if "word" in line]
    assert len(texts) > 3 and all(len(line) <= 80 for line in texts)
    commands = [line.strip() for line in lines if "->" in line]
    assert commands == ["-> " + line for line in BAD.fix.splitlines()]
    assert lines[-1] == "1 problem, 0 warnings"
