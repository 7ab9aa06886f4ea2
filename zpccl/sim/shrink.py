"""Shrinks a failing run: removes everything that its failure does not need.

A smaller run has fewer peers, fewer steps, fewer kinds of faults or fewer single faults, and still breaks the same
promise or fails in the same function. Reductions are tried in turn until none succeeds or the time is up. A reduced run
takes another course, so whether it still fails can only be found out by running it.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zpccl.sim.cluster import Violation
from zpccl.sim.runs import Setup

TRACE_LINES_MAX = 40
TRACE_LINE_CHARS_MAX = 400
"""Longer lines are cut: the report of a peer to a new master has thousands of characters."""
PEERS_MIN = 2


@dataclass(frozen=True)
class Shrunken:
    """The smallest run that was found.

    Attributes:
        runs: number of runs tried.
        trace: the last lines of its trace.
    """

    setup: Setup
    error: str
    summary: str
    runs: int
    trace: tuple[str, ...]


@dataclass(frozen=True)
class _Failed:
    """A run that failed.

    Attributes:
        signature: equal for failures that count as the same.
        steps: number of steps until the failure.
        struck: kinds of the faults that struck or were left out, in order.
    """

    setup: Setup
    error: str
    signature: str
    steps: int
    struck: tuple[str, ...]


def shrink(seed: int, setup: Setup, is_over: Callable[[], bool]) -> Shrunken | None:
    """Shrinks the failure of a seed until `is_over()`. None: the seed does not fail."""
    first = _run(seed, setup.resolve(seed))
    if first is None:
        return None
    best, runs = _cut(seed, first), 2
    is_smaller = True
    while is_smaller and not is_over():
        is_smaller = False
        for propose in (_fewer_peers, _fewer_kinds, _fewer_steps, _fewer_faults):
            for smaller in propose(best):
                if is_over():
                    break
                runs += 1
                found = _run(seed, smaller)
                if found is not None and found.signature == first.signature:
                    best, is_smaller = _cut(seed, found), True
                    break
    left = len(best.struck) - len(best.setup.skip)
    summary = f"{best.setup.peers} peers, {best.setup.steps} steps before healing, {left} faults"
    trace: deque[str] = deque(maxlen=TRACE_LINES_MAX)
    _run(seed, best.setup, lambda line: trace.append(line[:TRACE_LINE_CHARS_MAX]))
    return Shrunken(best.setup, best.error, summary, runs + 1, tuple(trace))


def _run(seed: int, setup: Setup, tracer: Callable[[str], None] | None = None) -> _Failed | None:
    """Runs a seed. None: it does not fail."""
    cluster = setup.build(seed, tracer)
    try:
        setup.run(seed, cluster)
    except Exception as error:  # noqa: BLE001 - any exception of a machine is a finding
        place = error.promise if isinstance(error, Violation) else traceback.extract_tb(error.__traceback__)[-1].name
        text = f"{type(error).__name__}: {error}"
        struck = tuple(cluster.injector.struck)
        needed = replace(setup, skip=tuple(number for number in setup.skip if number <= len(struck)))
        return _Failed(needed, text, f"{type(error).__name__} {place}", cluster.step_count, struck)
    return None


def _cut(seed: int, failed: _Failed) -> _Failed:
    """The same run, cut off at its failure."""
    if failed.steps >= failed.setup.steps:
        return failed
    return _run(seed, replace(failed.setup, steps=failed.steps)) or failed


def _fewer_peers(failed: _Failed) -> Iterator[Setup]:
    for peers in range(PEERS_MIN, failed.setup.peers):
        yield replace(failed.setup, peers=peers)


def _fewer_kinds(failed: _Failed) -> Iterator[Setup]:
    """Without all kinds that struck, without half of them, without each single one."""
    kinds = sorted({"silent_chance", *failed.struck} - set(failed.setup.without))
    for size in (len(kinds), len(kinds) // 2, 1):
        for start in range(0, len(kinds), max(1, size)):
            taken = kinds[start : start + max(1, size)]
            if taken:
                yield replace(failed.setup, without=(*failed.setup.without, *taken))


def _fewer_steps(failed: _Failed) -> Iterator[Setup]:
    steps = failed.setup.steps
    for part in (2, 4, 8, 16, 32):
        if steps // part:
            yield replace(failed.setup, steps=steps // 2 if part == 2 else steps - steps // part)


def _fewer_faults(failed: _Failed) -> Iterator[Setup]:
    """Without all faults that are left, then without ever smaller pieces of them, the latest first."""
    left = [number for number in range(1, len(failed.struck) + 1) if number not in failed.setup.skip]
    size = len(left)
    while size:
        for start in reversed(range(0, len(left), size)):
            skip = {*failed.setup.skip, *left[start : start + size]}
            yield replace(failed.setup, skip=tuple(sorted(skip)))
        size //= 2
