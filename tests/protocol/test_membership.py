"""The registry of the master and its outbox."""

from __future__ import annotations

import pytest

from zpccl import limits
from zpccl.protocol.effects import Broadcast, Level, Log
from zpccl.protocol.membership import Outbox, Peer, Registry, names
from zpccl.protocol.messages import Decision, Neighbour, Welcome
from zpccl.protocol.operation import COLLECTIVE, Key

from .harness import RUN_ID, member_list, peer, pid, pids


def registry_of(*peers: Peer) -> Registry:
    registry = Registry()
    for one in peers:
        registry.add(one)
        registry.validate()
    return registry


def test_from_pending_to_member_to_gone() -> None:
    a, b, c = peer("a"), peer("b"), peer("c", group=1)
    registry = registry_of(a, b, c)
    assert (registry.members(), registry.pending(), registry.epoch) == ([], [a, b, c], 0)
    registry.admit([b])
    registry.admit([a, c])
    assert (registry.members(), registry.pending(), registry.epoch) == ([b, a, c], [], 2)
    assert (registry.members(0), registry.members(1), registry.members(2)) == ([b, a], [c], [])
    assert registry.member_list() == member_list(2, "bac", (1, 2, 2), c=1)
    registry.remove(b)
    registry.validate()
    assert (registry.members(), registry.epoch) == ([a, c], 3)
    assert set(registry.by_connection) == {"a", "c"}


def test_a_pending_peer_that_goes_changes_no_epoch() -> None:
    a, b = peer("a"), peer("b")
    registry = registry_of(a, b)
    registry.admit([a])
    registry.remove(b)
    assert registry.epoch == 1


def test_binding() -> None:
    a = peer("a")
    registry = registry_of(a)
    registry.bind(a, "new")
    registry.validate()
    assert registry.by_connection == {"new": a}
    registry.bind(a, None)
    registry.bind(a, None)
    registry.validate()
    assert registry.by_connection == {}
    registry.bind(a, "newer")
    assert registry.by_connection["newer"] is a


@pytest.mark.parametrize("a_says, b_says, linked", [(0, 0, False), (1, 0, False), (0, 1, False), (1, 1, True)])
def test_a_link_is_up_when_both_ends_say_so(a_says: bool, b_says: bool, linked: bool) -> None:
    a, b = peer("a"), peer("b")
    registry = registry_of(a, b)
    a.linked = registry.link_bits(pids("bx")) if a_says else 0
    b.linked = registry.link_bits(pids("aa")) if b_says else 0
    assert registry.are_linked(a, b) is registry.are_linked(b, a) is linked


def test_exactly_one_of_a_pair_dials_first() -> None:
    peers = [peer(name) for name in "abcd"] + [peer("x", group=1)]
    registry = registry_of(*peers)
    registry.admit(peers[1:3])
    dialled = set()
    for one in peers:
        for neighbour in registry.neighbours_of(one):
            if neighbour.dial:
                dialled.add((one.peer_id, neighbour.peer_id))
    group = pids("abcd")
    assert dialled == {(group[i], group[j]) for i in range(4) for j in range(i)}
    assert registry.neighbours_of(peers[1]) == (
        Neighbour(pid("a"), "a", ("a:1",), True),
        Neighbour(pid("c"), "c", ("c:1",), False, is_member=True),
        Neighbour(pid("d"), "d", ("d:1",), False),
    )
    assert registry.neighbours_of(peers[4]) == ()


def test_the_outbox_speaks_only_to_who_is_connected() -> None:
    outbox, a, b = Outbox(), peer("a"), peer("b")
    b.connection = None
    outbox.send(a, Welcome(RUN_ID, 1))
    outbox.send(b, Welcome(RUN_ID, 1))
    outbox.broadcast([a, b], Welcome(RUN_ID, 2))
    outbox.broadcast([b], Welcome(RUN_ID, 3))
    outbox.log(Level.INFO, "text")
    assert outbox.take() == [
        Broadcast(("a",), Welcome(RUN_ID, 1)),
        Broadcast(("a",), Welcome(RUN_ID, 2)),
        Log(Level.INFO, "text"),
    ]
    assert outbox.take() == []


def test_answers_are_kept_for_who_is_away() -> None:
    outbox, a = Outbox(), peer("a")
    a.connection = None
    a.open_calls[5] = Key(COLLECTIVE, 0, 1)
    outbox.answer(a, Decision(5, 0))
    assert outbox.take() == []
    assert (a.answers, a.open_calls) == ({5: Decision(5, 0)}, {})


def test_the_latest_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1."""
    monkeypatch.setattr(limits, "ANSWERS_KEPT_MAX", 2)
    outbox, a = Outbox(), peer("a")
    for call_id in (9, 3, 6, 1):
        outbox.answer(a, Decision(call_id, 0))
    assert list(a.answers) == [6, 1]


def test_names() -> None:
    assert names([peer("a"), peer("b")]) == "a, b"
    assert names([]) == "nobody"
