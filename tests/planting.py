"""Faults that tests put into functions of their own process."""

from __future__ import annotations

import pytest
from mutation import Mutant, loaded


def fault(name: str, function: str, old: str, new: str) -> Mutant:
    """A fault for one test only: see Mutant."""
    return Mutant(name, function, old, new, breaks="")


JOINERS_NEVER_ADMITTED = fault(
    "joiners-never-admitted",
    "protocol.membership:Registry.joiners",
    "self.whole_hosts(peer for peer in self._pending.values() if peer.phase is PeerPhase.READY)",
    "[]",
)


def plant(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Replaces a function by its faulty version until the test ends."""
    function, code = loaded(mutant)
    monkeypatch.setattr(function, "__code__", code)
