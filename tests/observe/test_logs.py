"""The library's logger, as the environment sets it up."""

from __future__ import annotations

import logging

import pytest

from zpccl import limits
from zpccl.observe.logs import BoundedLog, log_as_environment_says


def test_a_level_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZPCCL_LOG_LEVEL", "loud")
    with pytest.warns(RuntimeWarning, match="ZPCCL_LOG_LEVEL is 'loud', not one of debug, info, warning, error"):
        log_as_environment_says()


def test_usual_lines_leave_room_for_warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that sync with every step cause three lines each time."""
    monkeypatch.setattr(limits, "LOG_LINES_MAX", 10)
    caplog.set_level(logging.INFO, "zpccl.master")
    log = BoundedLog(logging.getLogger("zpccl.master"), "LOG_LINES_MAX")
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        for _ in range(20):
            log.write(level, logging.getLevelName(level), 0)
    assert [record.levelname for record in caplog.records] == ["INFO"] * 5 + ["WARNING"] * 5
    caplog.clear()
    log.write(logging.INFO, "INFO", limits.REFUSALS_LOGGED_INTERVAL_NS)
    assert [record.getMessage() for record in caplog.records] == ["50 more lines before this one were left out", "INFO"]


def test_nobody_forges_a_line_or_controls_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """S7: the description of a malformed message has parts of the message, and reasons come from members."""
    log = BoundedLog(logging.getLogger("zpccl.master"), "LOG_LINES_MAX")
    log.write(logging.WARNING, "Invalid value '\nERROR \x1b[2J\x9b\u2028\ud800 Grüße'", 0)
    assert [record.getMessage() for record in caplog.records] == [
        r"Invalid value '\nERROR \x1b[2J\x9b\u2028\ud800 Grüße'"
    ]
