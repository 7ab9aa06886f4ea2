"""The decision table of the election: the result for each peer, in every case of two to four peers.

There are two tables. The table of docs/shared_state.md is written by hand, for readers. The other table has all
combinations of strategy, revision and contents, and the result by the rules of the public API: `expect` states these
rules as conditions that the outcome must meet, without the steps of the election.

A peer is written "REVISION CONTENTS [STRATEGY]". Peers are in ring order, named a, b, c, d. Results for each:

    holds         it has the elected state, and sends it to the peers that need it
    has it        it has the elected state and sends nothing: RECEIVE_ONLY
    gets X        it receives contents X
    refused       InvalidUsage
    nobody        NoSharedState: no peer can send
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, product, takewhile
from pathlib import Path
from typing import TypeAlias

import pytest

from zpccl.errors import Result
from zpccl.protocol.election import Election, elect
from zpccl.protocol.messages import SyncSpec
from zpccl.types import SharedStateSyncStrategy

from .harness import entry, sync_spec

LAST = 3
"""The revision of the last completed sync, in cases that have one. The next, E, is 4."""


@dataclass(frozen=True)
class Offer:
    """What one peer offers."""

    revision: int
    contents: str
    strategy: str = ""

    @property
    def sends(self) -> bool:
        """False if the peer only receives."""
        return self.strategy != "RECEIVE_ONLY"

    @staticmethod
    def parse(text: str) -> Offer:
        """Parses the form that the tables use."""
        revision, contents, *strategy = text.split()
        return Offer(int(revision), contents, *strategy)


Row: TypeAlias = tuple[str, ...]
"""Revision of the last sync and the peers that completed it ("" is the first sync); offers; the result for each."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "shared_state.md"


def rows_of(text: str) -> dict[str, Row]:
    """The rows of the first table of a document, by their cases."""
    _, _, table = text.partition("|---|---|---|---|\n")
    lines = takewhile(lambda line: line.startswith("|"), table.splitlines())
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return {case: tuple(rest) for case, *rest in cells}


ROWS = rows_of(DOCUMENT.read_text())


def found_in(election: Election[str], offers: dict[str, Offer]) -> list[str]:
    """The result for each peer, by the election."""
    found = []
    for name in offers:
        if name in election.refused:
            names = {Result.INVALID_USAGE: "refused", Result.NO_SHARED_STATE_AVAILABLE: "nobody"}
            found.append(names[election.refused[name][0]])
        elif election.fetch[name]:
            (wanted,) = election.fetch[name]
            found.append(f"gets {wanted.digest.decode().rstrip('-')}")
        else:
            found.append("holds" if name in election.holders else "has it")
    return found


def run(offers: dict[str, Offer], last: int | None, completed: str) -> Election[str]:
    """The election of a case."""
    return elect({name: message_of(one) for name, one in offers.items()}, last, frozenset(completed))


@cache
def message_of(one: Offer) -> SyncSpec:
    """The message of the peer."""
    strategy = SharedStateSyncStrategy[one.strategy or "ENFORCE_POPULAR"]
    return sync_spec(one.revision, entry("w", one.contents), strategy=strategy)


# --- The rules --------------------------------------------------------------------------------------------------------


def expect(offers: dict[str, Offer], last: int | None, completed: str) -> list[str]:
    """The result for each peer, by the rules."""
    sending = {name: one for name, one in offers.items() if one.sends}
    if not sending:
        return ["nobody"] * len(offers)
    offered = {one.revision for one in sending.values()}
    (current,) = (revision for revision in offered if is_current(revision, sending, last, completed))

    at_current = {name: one for name, one in sending.items() if one.revision == current}
    only_sending = {name: one for name, one in at_current.items() if one.strategy == "SEND_ONLY"}
    do_differ = len({one.contents for one in only_sending.values()}) > 1
    electing = only_sending or at_current
    if do_differ:
        electing = {name: one for name, one in at_current.items() if name not in only_sending}
    elected = [one.contents for one in electing.values() if is_popular(one.contents, list(electing.values()))]

    verdicts = []
    for name, one in offers.items():
        is_ahead = one.sends and one.revision > current
        must_receive = one.strategy == "SEND_ONLY" and one.revision < current
        if is_ahead or must_receive or (do_differ and name in only_sending):
            verdicts.append("refused")
        elif not elected:
            verdicts.append("nobody")
        elif one.contents != elected[0]:
            verdicts.append(f"gets {elected[0]}")
        else:
            verdicts.append("holds" if name in electing else "has it")
    return verdicts


def is_current(revision: int, sending: dict[str, Offer], last: int | None, completed: str) -> bool:
    """True for the revision of the sync, one of those that peers which may send have offered."""
    offered = [one.revision for one in sending.values()]
    if last is None:
        return revision == max(offered)
    continued = [one.revision for name, one in sending.items() if name in completed]
    votes = [each for each in continued if each > last + 1]
    if last + 1 in (continued if votes else offered):
        return revision == last + 1
    if not votes:
        return revision == max(offered)
    return (
        all((votes.count(revision), revision) >= (votes.count(other), other) for other in votes) and revision in votes
    )


def is_popular(contents: str, electing: list[Offer]) -> bool:
    """True for the contents that most of these peers hold; of several such contents, for the first ones."""
    order = [one.contents for one in electing]

    def loses_to(other: str) -> bool:
        more, as_many = order.count(other) - order.count(contents), order.count(other) == order.count(contents)
        return more > 0 or (as_many and order.index(other) < order.index(contents))

    return not any(loses_to(other) for other in order)


# --- Tests ------------------------------------------------------------------------------------------------------------


def case_of(row: Row) -> tuple[dict[str, Offer], int | None, str, list[str]]:
    past, offered, outcome = row
    offers = dict(zip("abcd", map(Offer.parse, offered.split(", ")), strict=False))
    last, completed = past.split() if past else (None, "")
    return offers, None if last is None else int(last), completed, outcome.split(", ")


def test_the_table_is_read() -> None:
    assert len(ROWS) >= 30


@pytest.mark.parametrize("case", ROWS)
def test_rows_by_hand(case: str) -> None:
    offers, last, completed, outcome = case_of(ROWS[case])
    assert len(outcome) == len(offers)
    assert found_in(run(offers, last, completed), offers) == outcome


@pytest.mark.parametrize("case", ROWS)
def test_the_rules_say_the_same_as_the_rows_by_hand(case: str) -> None:
    offers, last, completed, outcome = case_of(ROWS[case])
    assert expect(offers, last, completed) == outcome


@pytest.mark.parametrize(
    "case, result, words",
    [
        ("E, and one is ahead", Result.INVALID_USAGE, "revision 5 is ahead of the run's 4"),
        ("SEND_ONLY ahead", Result.INVALID_USAGE, "revision 5 is ahead"),
        (
            "SEND_ONLY behind would have to receive",
            Result.INVALID_USAGE,
            "SEND_ONLY at revision 3, but the run is at 4",
        ),
        ("two SEND_ONLY that differ", Result.INVALID_USAGE, "SEND_ONLY peers hold different contents"),
        ("all RECEIVE_ONLY", Result.NO_SHARED_STATE_AVAILABLE, "all peers are RECEIVE_ONLY"),
    ],
)
def test_refusals_say_why(case: str, result: Result, words: str) -> None:
    offers, last, completed, _ = case_of(ROWS[case])
    refused = run(offers, last, completed).refused
    assert refused
    for found, reason in refused.values():
        assert found is result
        assert words in reason


def test_warning_when_nobody_goes_on() -> None:
    """It comes if there was an earlier run, but not if the peers of the last sync sync again."""
    restarted = [case for case, row in ROWS.items() if run(*case_of(row)[:3]).restarted]
    assert restarted == ["all who completed 3 are gone: the highest", "the same, above E"]


KINDS = [
    Offer(*kind) for kind in product((LAST, LAST + 1, LAST + 2, LAST + 4), "xy", ("", "RECEIVE_ONLY", "SEND_ONLY"))
]
PASTS: list[tuple[int | None, str]] = [(None, ""), (LAST, "abcd"), (LAST, "a"), (LAST, "")]


def combinations(count: int) -> Iterator[tuple[Offer, ...]]:
    """All offers of this many peers: of two in any order of the ring, of three in two, of four in each by turns."""
    if count == 2:
        yield from product(KINDS, repeat=2)
        return
    for place, kinds in enumerate(combinations_with_replacement(KINDS, count)):
        if count == 3 or place % 2:
            yield kinds
        if count == 3 or not place % 2:
            yield kinds[::-1]


@pytest.mark.parametrize(
    "count, rows, past",
    [
        *((2, 576, past) for past in PASTS),
        *((3, 5200, past) for past in PASTS),
        *((4, 17550, past) for past in PASTS[:2]),
    ],
    ids=str,
)
def test_all_combinations(count: int, rows: int, past: tuple[int | None, str]) -> None:
    """Every row of the whole table."""
    last, completed = past
    tried = 0
    for kinds in combinations(count):
        tried += 1
        offers = dict(zip("abcd", kinds, strict=False))
        found = found_in(run(offers, last, completed), offers)
        assert found == expect(offers, last, completed), f"{offers}, {past}"
    assert tried == rows
