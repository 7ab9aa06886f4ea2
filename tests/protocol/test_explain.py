"""The lines of the master's log about an election."""

from __future__ import annotations

from zpccl import limits
from zpccl.protocol.election import elect
from zpccl.protocol.explain import explain
from zpccl.protocol.messages import SyncSpec

from .harness import entry, sync_spec


def lines_of(offers: dict[str, SyncSpec], last: int | None = None, completed: str = "") -> list[str]:
    return explain(elect(offers, last, frozenset(completed)), offers, last, str)


def w(contents: str, revision: int, strategy: int = 0) -> SyncSpec:
    return sync_spec(revision, entry("v", "1"), entry("w", contents), strategy=strategy)


def test_an_election() -> None:
    """Golden: candidates, votes, and what each peer receives."""
    offers = {"a": w("x", 4), "b": w("y", 4), "c": w("x", 4), "d": w("z", 3), "e": w("x", 0, strategy=1)}
    assert lines_of(offers, 3, "abc") == [
        "offers: a at 4, b at 4, c at 4, d at 3, e at 0 (RECEIVE_ONLY)",
        "revision 4, the next after 3; the contents of 2 (a, c) are elected, over 1 (b)",
        "holders: a, c; receivers: b (1 tensors of 16 bytes), d (1 tensors of 16 bytes)",
    ]


def test_why_that_revision() -> None:
    same = {"a": w("x", 7), "b": w("x", 7)}
    reasons = {
        (None, ""): "the highest offered in the first sync",
        (6, "ab"): "the next after 6",
        (3, "ab"): "the revision of most peers that completed 3",
        (3, ""): "the highest offered, as no peer continues from 3",
        (7, "ab"): "the highest offered, and none is above 7",
    }
    for (last, completed), reason in reasons.items():
        _, chosen, received = lines_of(same, last, completed)
        assert chosen == f"revision 7, {reason}; the contents of 2 (a, b) are elected"
        assert received == "all peers hold these contents; no peer fetches anything"


def test_nobody_is_elected() -> None:
    offers = {"a": w("x", 4, strategy=1), "b": w("y", 4, strategy=1)}
    assert lines_of(offers)[1:] == ["no state is elected: all peers are RECEIVE_ONLY"]


def test_lines_are_short_whatever_the_number_of_peers() -> None:
    offers = {f"p{number}": w(str(number), number % 2) for number in range(1000)}
    lines = lines_of(offers)
    rest = 1000 - limits.EXPLAINED_PEERS_MAX
    assert lines[0].endswith(f" and {rest} more")
    assert all(len(line) < 1200 for line in lines)


def test_a_datatype_that_is_none() -> None:
    """Peers may claim anything: that must not stop the master."""
    entries = [entry("w", contents, datatype=200) for contents in "xy"]
    offers = {name: sync_spec(0, one) for name, one in zip("ab", entries, strict=True)}
    assert lines_of(offers)[-1] == "holders: a; receivers: b (1 tensors of 0 bytes)"
