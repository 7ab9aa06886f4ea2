"""The order of peers in a ring, and which links it needs. The order is that of admission."""

from __future__ import annotations

from zpccl.protocol.membership import Peer, Registry


def ring_edges(order: list[Peer]) -> list[tuple[Peer, Peer]]:
    """The pairs of neighbours of a ring, each pair once."""
    if len(order) < 2:
        return []
    if len(order) == 2:
        return [(order[0], order[1])]
    return [(order[i], order[(i + 1) % len(order)]) for i in range(len(order))]


def missing_links(registry: Registry, order: list[Peer]) -> list[tuple[Peer, Peer]]:
    """The edges of the ring whose link is not up."""
    return [(one, other) for one, other in ring_edges(order) if not registry.are_linked(one, other)]
