"""The list of masters that the peers of a run were given."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from zpccl.protocol.master_list import CommonList

from .takeover import hello_of


@pytest.mark.parametrize(
    ("masters", "index", "is_refused"),
    [
        (("a", "b", "c"), 1, False),
        (("a.example", "b.example", "c.example"), 1, False),
        (("c", "b", "a"), 1, True),
        (("b", "a", "c"), 0, True),
        (("a", "b"), 1, True),
        ((), 0, True),
    ],
)
def test_a_newcomer_needs_the_list_of_the_others(masters: tuple[str, ...], index: int, is_refused: bool) -> None:
    """S3: one master may have several addresses, so addresses that differ tell nothing. Split, seed 9445953."""
    common = CommonList()
    common.note(replace(hello_of("x"), masters=("a", "b", "c"), master_index=1), 0)
    assert bool(common.difference(replace(hello_of("y"), masters=masters, master_index=index))) == is_refused
