"""Whole runs: faults, healing, and the demand that all is well again."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from zpccl.limits import SECOND
from zpccl.sim.cluster import Cluster, Violation
from zpccl.sim.coverage import Coverage
from zpccl.sim.faults import PROFILES, Faults

STEPS = 1000
SHORT_STEPS = 300
"""Runs with fewer steps have fewer peers, and faults that come closer together: else hardly anything would happen."""
SHORT_HASTE = 3
AUTO = "auto"
SEEDS_PER_COLLECTION = 64
"""A run leaves cycles of a megabyte, and looking for them among what is in use takes a tenth of its time."""


def choose_faults(name: str, seed: int) -> Faults:
    """The profile of a name; "auto" takes them in turn."""
    return PROFILES[name] if name != AUTO else list(PROFILES.values())[seed % len(PROFILES)]


def choose_peers(seed: int, steps: int) -> int:
    """How many peers start."""
    return 2 + seed // len(PROFILES) % (5 if steps >= SHORT_STEPS else 3)


def run_seed(
    seed: int,
    *,
    peers: int = 0,
    steps: int = STEPS,
    faults: str = AUTO,
    without: Collection[str] = (),
    skip: Collection[int] = (),
    tracer: Callable[[str], None] | None = None,
    coverage: Coverage | None = None,
) -> Cluster:
    """Runs one seed: faults, then healing.

    Args:
        peers: how many start; 0 lets the seed choose 2 to 6, or 2 to 4 where there are few steps.
        steps: events before the healing.
        faults: name of a profile, or "auto".
        without: kinds of faults that never strike.
        skip: numbers of faults that are left out, in the order in which they would strike.
        tracer: is given every line of the trace.
        coverage: is told what is reached.

    Raises:
        Violation: a promise is broken.
        AssertionError: a machine is in an impossible state.
    """
    cluster = Cluster(seed, peers or choose_peers(seed, steps), tracer=tracer, coverage=coverage)
    cluster.injector.skip = frozenset(skip)
    profile = choose_faults(faults, seed).without(without)
    cluster.run(steps, profile if steps >= SHORT_STEPS else profile.hasten(SHORT_HASTE))
    cluster.heal()
    if not cluster.quiesces():
        raise cluster.violation("L2", f"no rest after healing: {'; '.join(cluster.reasons_of_unrest())}")
    return cluster


def replay_command(
    seed: int,
    *,
    peers: int = 0,
    steps: int = STEPS,
    faults: str = AUTO,
    without: Collection[str] = (),
    skip: Collection[int] = (),
) -> str:
    """What shows a run again, line by line."""
    command = f"python -m zpccl.sim --seed {seed} --peers {peers} --steps {steps} --faults {faults}"
    if without:
        command += f" --without {','.join(without)}"
    if skip:
        command += f" --skip {','.join(map(str, skip))}"
    return f"{command} --trace"


@dataclass(frozen=True)
class Failure:
    """A seed that failed.

    Attributes:
        profile: the faults that it ran with.
        error: kind and text of what was raised.
        details: a traceback, where a machine raised it by itself.
    """

    seed: int
    profile: str
    error: str
    details: str = ""


@dataclass
class Tally:
    """What became of some seeds, and what they reached, if that is asked for."""

    seeds: int = 0
    failures: list[Failure] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    coverage: Coverage = field(default_factory=Coverage)

    def add(self, other: Tally) -> None:
        """Adds those of another one, which come after these."""
        self.seeds += other.seeds
        self.failures += other.failures
        self.totals.update(other.totals)
        self.coverage.add(other.coverage)


def run_seeds(seeds: Iterable[int], *, keep_going: bool, covers: bool = False, **how: Any) -> Tally:
    """Runs some seeds, as run_seed does; up to the first that fails, unless it shall keep going."""
    tally = Tally()
    coverage = tally.coverage if covers else None
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for seed in seeds:
            tally.seeds += 1
            if tally.seeds % SEEDS_PER_COLLECTION == 0:
                gc.collect()
            try:
                tally.totals.update(count_events(run_seed(seed, coverage=coverage, **how)))
            except BrokenPipeError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a machine raises is a find
                details = "" if isinstance(error, Violation) else traceback.format_exc()
                profile = choose_faults(how["faults"], seed).name
                tally.failures.append(Failure(seed, profile, f"{type(error).__name__}: {error}", details))
                if not keep_going:
                    break
    finally:
        if was_enabled:
            gc.enable()
    return tally


def count_events(cluster: Cluster) -> dict[str, int]:
    """How much happened in a run."""
    progress = cluster.checkers.progress
    return {
        "steps": cluster.step_count,
        "commits": progress.committed_count,
        "aborts": progress.aborted_count,
        "answers": progress.answered_count,
        "faults": len(cluster.incidents),
        "seconds": cluster.clock.now_ns // SECOND,
    }
