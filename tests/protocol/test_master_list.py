"""The lists of masters that the peers of a run have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol.master_list import CommonList
from zpccl.protocol.messages import Refusal, Refused, Welcome

from .harness import MasterBench
from .takeover import TakeOver, hello_of


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
    """S3: one master may have several addresses, so different addresses prove nothing. Split, seed 9445953."""
    common = CommonList()
    common.note(replace(hello_of("x"), masters=("a", "b", "c"), master_index=1), 0)
    assert bool(common.difference(replace(hello_of("y"), masters=masters, master_index=index))) == is_refused


def test_the_list_of_peers_that_have_gone_is_forgotten() -> None:
    """Duel, seed 9986257, L2: a peer with a wrong list began the run and left; all others were refused for ever."""
    bench = MasterBench()
    bench.hello("x")
    bench.leave("x")
    assert not bench.machine.registry.peers
    ((_, refused),) = bench.hello("y", masters=("m:1", "n:2"))
    assert isinstance(refused, Refused) and refused.refusal is Refusal.OTHER_MASTERS
    bench.tick(limits.RUN_MEMORY_NS + 1)
    told = bench.hello("y", masters=("m:1", "n:2"))
    assert any(isinstance(message, Welcome) for _, message in told)


def test_the_list_of_members_counts_before_that_of_newcomers() -> None:
    """L2: x has a wrong list and comes first to a master that recovers. y was refused for good, for a false reason."""
    bench = TakeOver()
    bench.hello("x", masters=("m:1", "n:2"))
    bench.hello("y")
    bench.report("ab", "ab")
    bench.hello("z")
    bench.tick(limits.RECOVERY_GRACE_NS)
    assert not bench.machine.is_recovering and bench.pending() == "yz"
    refused = [message.refusal for message in bench.said["x1"] if isinstance(message, Refused)]
    assert refused in ([Refusal.OTHER_MASTERS], [Refusal.NO_QUORUM]), "NO_QUORUM: it is to try another master"
    for name in "yz":
        told = bench.said[f"{name}1"]
        assert Refusal.OTHER_MASTERS not in [m.refusal for m in told if isinstance(m, Refused)]


def test_of_newcomers_alone_the_first_one_names_the_list() -> None:
    """S3: x has not asked its other master yet, so it must not take part in a run that y would begin."""
    bench = TakeOver()
    bench.hello("x", masters=("m:1", "n:2"))
    bench.hello("y")
    bench.tick(limits.RECOVERY_GRACE_NS)
    refused = [[m.refusal for m in bench.said[to] if isinstance(m, Refused)] for to in ("x1", "y1")]
    assert refused == [[Refusal.NO_RUN], [Refusal.NO_QUORUM, Refusal.OTHER_MASTERS]]
    assert bench.machine.is_recovering and not bench.machine.registry.peers
