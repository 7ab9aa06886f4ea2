"""The benchmark of how long members stop for a newcomer, with a small state."""

from __future__ import annotations

import pytest
from benches import rows_of


@pytest.mark.slow
@pytest.mark.e2e
def test_it_writes_a_row_with_and_one_without() -> None:
    """The sync does not fetch again what was fetched ahead."""
    plain, ahead = rows_of("join", "--bytes", "2MiB", "--reps", "1")
    assert (plain["ahead"], ahead["ahead"]) == (False, True)
    assert plain["received_median"] > 2**21 > ahead["received_median"]
    assert ahead["of_plain"] == ahead["stop_median"] / plain["stop_median"]
