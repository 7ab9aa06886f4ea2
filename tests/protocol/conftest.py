"""Attempts in these tests have consecutive ids, except in tests of plans ahead."""

from __future__ import annotations

import pytest

from zpccl import limits


@pytest.fixture(autouse=True)
def no_plans_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.module.__name__.endswith("test_ahead"):
        monkeypatch.setattr(limits, "PLANS_AHEAD_AT_TAG_MAX", 0)
