"""What the documentation says in the same words as the code or its tests."""

from __future__ import annotations

from pathlib import Path

from protocol.test_election_table import ROWS

DOCS = Path(__file__).parents[1] / "docs"


def test_the_rows_of_the_decision_table_are_in_it() -> None:
    text = (DOCS / "shared_state.md").read_text()
    for row in ROWS:
        assert f"| {' | '.join(row)} |" in text
