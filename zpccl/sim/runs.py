"""Whole runs: faults, healing, and the demand that all is well again."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from zpccl import limits
from zpccl.limits import SECOND
from zpccl.sim.cluster import Cluster, Violation
from zpccl.sim.coverage import Coverage
from zpccl.sim.faults import PROFILES, TURNS, Faults

SHORT_STEPS = 300
"""Runs with fewer steps have fewer peers, and faults that come closer together: else hardly anything would happen."""
SHORT_HASTE = 3
AUTO = "auto"
SEEDS_PER_COLLECTION = 64
"""A run leaves cycles of a megabyte, and looking for them among what is in use takes a tenth of its time."""


def choose_faults(name: str, seed: int) -> Faults:
    """The profile of a name; "auto" takes them in turn."""
    return PROFILES[name] if name != AUTO else TURNS[seed % len(TURNS)]


@contextlib.contextmanager
def tight_limits(cluster: Cluster) -> Iterator[None]:
    """Bounds as the calls of a large group need them, with its dead, and no more, where the faults say so."""
    if not cluster.faults.is_tight:
        yield
        return
    calls = max(cluster.script.tags) + 1
    named = calls * 2 * cluster.peers_max
    tight = {"CALLS_IN_FLIGHT_MAX": calls, "OUTCOMES_KEPT_MAX": calls}
    tight |= dict.fromkeys(("CALLS_NAMED_MAX", "OUTCOME_CALLS_KEPT_MAX"), named)
    loose = {name: getattr(limits, name) for name in tight if hasattr(limits, name)}
    try:
        for name in loose:
            setattr(limits, name, tight[name])
        yield
    finally:
        for name, value in loose.items():
            setattr(limits, name, value)


@dataclass(frozen=True)
class Setup:
    """How seeds are run.

    Attributes:
        peers: how many start; 0 lets the seed choose as many as the profile has, or 2 to 4 where there are few steps.
        steps: events before the healing; 0: as many as the profile has.
        faults: name of a profile, or "auto".
        without: kinds of faults that never strike.
        skip: numbers of faults that are left out, in the order in which they would strike.
        haste: how many times closer together faults come; 0: 1, or 3 where there are few steps.
    """

    peers: int = 0
    steps: int = 0
    faults: str = AUTO
    without: tuple[str, ...] = ()
    skip: tuple[int, ...] = ()
    haste: int = 0

    def settle(self, seed: int) -> Setup:
        """The same for one seed, with nothing left to choose."""
        faults = choose_faults(self.faults, seed)
        steps = self.steps or faults.steps
        is_short = steps < SHORT_STEPS
        fewest, most = (2, 4) if is_short else faults.peers
        return replace(
            self,
            peers=self.peers or fewest + seed // len(TURNS) % (most + 1 - fewest),
            steps=steps,
            faults=faults.name,
            haste=self.haste or (SHORT_HASTE if is_short else 1),
        )

    def build(
        self, seed: int, tracer: Callable[[str], None] | None = None, coverage: Coverage | None = None
    ) -> Cluster:
        """The cluster of a seed, before anything happens."""
        settled = self.settle(seed)
        faults = PROFILES[settled.faults].without(self.without)
        how: dict[str, Any] = {"masters": faults.masters, "faults": faults, "skip": self.skip}
        return Cluster(seed, settled.peers, tracer=tracer, coverage=coverage, **how)

    def run(self, seed: int, cluster: Cluster) -> None:
        """Faults, then healing, as run_seed says."""
        settled = self.settle(seed)
        with tight_limits(cluster):
            self._run(settled, cluster)

    def _run(self, settled: Setup, cluster: Cluster) -> None:
        cluster.run(settled.steps, PROFILES[settled.faults].without(self.without).hasten(settled.haste))
        cluster.heal()
        # With several masters a run may have lost its quorum: members wait for it in vain, and a new run for them.
        if not (cluster.quiesces() if len(cluster.masters) == 1 else cluster.quiesces(steps=60_000, seconds=150)):
            raise cluster.violation("L2", f"no rest after healing: {'; '.join(cluster.reasons_of_unrest())}")
        cluster.checkers.on_end()

    def replay_command(self, seed: int) -> str:
        """What shows a run again, line by line."""
        command = f"python -m zpccl.sim --seed {seed} --peers {self.peers} --steps {self.steps} --faults {self.faults}"
        if self.haste:
            command += f" --haste {self.haste}"
        if self.without:
            command += f" --without {','.join(self.without)}"
        if self.skip:
            command += f" --skip {','.join(map(str, self.skip))}"
        return f"{command} --trace"


def run_seed(
    seed: int, *, tracer: Callable[[str], None] | None = None, coverage: Coverage | None = None, **how: Any
) -> Cluster:
    """Runs one seed: faults, then healing.

    Args:
        tracer: is given every line of the trace.
        coverage: is told what is reached.
        how: fields of Setup.

    Raises:
        Violation: a promise is broken.
        AssertionError: a machine is in an impossible state.
    """
    setup = Setup(**how)
    cluster = setup.build(seed, tracer, coverage)
    setup.run(seed, cluster)
    return cluster


def replay_command(seed: int, **how: Any) -> str:
    """What shows the run of a seed again, line by line; `how` are fields of Setup."""
    return Setup(**how).replay_command(seed)


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


def run_seeds(
    seeds: Iterable[int],
    setup: Setup,
    *,
    keep_going: bool,
    covers: bool = False,
    tracer: Callable[[str], None] | None = None,
) -> Tally:
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
                cluster = setup.build(seed, tracer, coverage)
                setup.run(seed, cluster)
                tally.totals.update(count_events(cluster))
            except BrokenPipeError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a machine raises is a find
                details = "" if isinstance(error, Violation) else traceback.format_exc()
                profile = setup.settle(seed).faults
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
