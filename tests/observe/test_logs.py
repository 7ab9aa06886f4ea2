"""The logger of the library as the environment sets it up."""

from __future__ import annotations

import pytest

from zpccl.observe.logs import log_as_environment_says


def test_a_level_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZPCCL_LOG_LEVEL", "loud")
    with pytest.warns(RuntimeWarning, match="ZPCCL_LOG_LEVEL is 'loud', not one of debug, info, warning, error"):
        log_as_environment_says()
