"""The order of a ring and the links that it needs."""

from __future__ import annotations

import pytest

from zpccl.protocol.membership import Registry
from zpccl.protocol.topology import missing_links, ring_edges

from .harness import pids
from .test_membership import peer


@pytest.mark.parametrize(
    "order, edges",
    [("", []), ("a", []), ("ab", ["ab"]), ("abc", ["ab", "bc", "ca"]), ("abcd", ["ab", "bc", "cd", "da"])],
)
def test_ring_edges(order: str, edges: list[str]) -> None:
    peers = {name: peer(name) for name in order}
    assert [one.name + other.name for one, other in ring_edges(list(peers.values()))] == edges


def test_missing_links() -> None:
    peers = [peer(name) for name in "abcd"]
    registry = Registry()
    for one in peers:
        registry.add(one)
    for one in peers:
        one.linked = registry.link_bits(pids(name for name in "abcd" if name != one.name))
    assert missing_links(registry, peers) == []
    peers[1].linked = registry.link_bits(pids("a"))
    assert [one.name + other.name for one, other in missing_links(registry, peers)] == ["bc"]
