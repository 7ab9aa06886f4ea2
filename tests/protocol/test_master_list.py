"""The list of masters that the peers of a run were given."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol.master_list import CommonList
from zpccl.protocol.messages import Refusal, Refused, Welcome

from .harness import MasterBench
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


def test_the_list_of_peers_that_have_gone_is_forgotten() -> None:
    """Duel, seed 9986257, L2: a peer with a wrong list began the run and left; all others were refused without end."""
    bench = MasterBench()
    bench.hello("x")
    bench.leave("x")
    assert not bench.machine.registry.peers
    ((_, refused),) = bench.hello("y", masters=("m:1", "n:2"))
    assert isinstance(refused, Refused) and refused.refusal is Refusal.OTHER_MASTERS
    bench.tick(limits.RUN_MEMORY_NS + 1)
    told = bench.hello("y", masters=("m:1", "n:2"))
    assert any(isinstance(message, Welcome) for _, message in told)
