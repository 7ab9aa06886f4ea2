"""Complete simulated runs: faults, healing, then the demand that the cluster becomes quiet."""

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
"""Runs with fewer steps have fewer peers and higher fault rates, else hardly anything would happen."""
SHORT_HASTE = 3
AUTO = "auto"
SEEDS_PER_COLLECTION = 4
"""A run leaves reference cycles of 1 MB. Automatic collections would take a fifth of the time; so would rarer ones, of
colder memory."""


def choose_faults(name: str, seed: int) -> Faults:
    """The profile of that name; "auto": by the seed."""
    return PROFILES[name] if name != AUTO else TURNS[seed % len(TURNS)]


@contextlib.contextmanager
def tight_limits(cluster: Cluster) -> Iterator[None]:
    """If the profile is tight: lowers the limits on calls to just what the programs need, dead peers included."""
    if not cluster.faults.is_tight:
        yield
        return
    calls = max(cluster.script.tags) + 1
    named = (calls + 2) * 2 * cluster.peers_max
    tight = {"CALLS_IN_FLIGHT_MAX": calls, "CALLS_UNDECIDED_MAX": 2, "OUTCOMES_KEPT_MAX": calls + 2}
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
        peers: number of peers that start; 0: by the seed, within the range of the profile, or 2 to 4 in short runs.
        steps: steps before the healing; 0: by the profile.
        faults: name of a profile, or "auto".
        without: kinds of faults that never strike.
        skip: numbers of the faults to leave out, in the order in which they would strike.
        haste: factor for the fault rates; 0: 1, or SHORT_HASTE in short runs.
    """

    peers: int = 0
    steps: int = 0
    faults: str = AUTO
    without: tuple[str, ...] = ()
    skip: tuple[int, ...] = ()
    haste: int = 0

    def resolve(self, seed: int) -> Setup:
        """The same with every 0 and "auto" replaced by the value for this seed."""
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
        """Makes the cluster of a seed."""
        resolved = self.resolve(seed)
        faults = PROFILES[resolved.faults].without(self.without)
        how: dict[str, Any] = {"masters": faults.masters, "faults": faults, "skip": self.skip}
        return Cluster(seed, resolved.peers, tracer=tracer, coverage=coverage, **how)

    def run(self, seed: int, cluster: Cluster) -> None:
        """Runs a cluster as run_seed() does."""
        resolved = self.resolve(seed)
        with tight_limits(cluster):
            self._run(resolved, cluster)

    def _run(self, resolved: Setup, cluster: Cluster) -> None:
        cluster.run(resolved.steps, PROFILES[resolved.faults].without(self.without).hasten(resolved.haste))
        cluster.heal()
        # With several masters a run may have lost its quorum: its members wait until they give up, and a new run waits
        # until then.
        if not (cluster.quiesces() if len(cluster.masters) == 1 else cluster.quiesces(steps=2_000_000, seconds=150)):
            raise cluster.violation("L2", f"no rest after healing: {'; '.join(cluster.reasons_of_unrest())}")
        cluster.checkers.on_end()

    def replay_command(self, seed: int) -> str:
        """The command that replays the run of a seed with a trace."""
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
        tracer: called with every line of the trace.
        coverage: records what is reached.
        how: fields of Setup.

    Raises:
        Violation: a promise is broken.
        AssertionError: an assertion of a machine failed.
    """
    setup = Setup(**how)
    cluster = setup.build(seed, tracer, coverage)
    setup.run(seed, cluster)
    return cluster


def replay_command(seed: int, **how: Any) -> str:
    """The command that replays the run of a seed with a trace; `how` are fields of Setup."""
    return Setup(**how).replay_command(seed)


@dataclass(frozen=True)
class Failure:
    """A seed that failed.

    Attributes:
        profile: name of its profile of faults.
        error: type and text of the exception.
        details: traceback; empty for a Violation.
    """

    seed: int
    profile: str
    error: str
    details: str = ""


@dataclass
class Tally:
    """Results of some seeds, with their coverage if it was requested."""

    seeds: int = 0
    failures: list[Failure] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    coverage: Coverage = field(default_factory=Coverage)

    def add(self, other: Tally) -> None:
        """Adds the results of later seeds."""
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
    """Runs seeds as run_seed() does, until the first failure or, with `keep_going`, all of them."""
    tally = Tally()
    coverage = tally.coverage if covers else None
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # Collections skip the objects that exist now: they live longer.
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
            except Exception as error:  # noqa: BLE001 - any exception of a machine is a finding
                details = "" if isinstance(error, Violation) else traceback.format_exc()
                profile = setup.resolve(seed).faults
                tally.failures.append(Failure(seed, profile, f"{type(error).__name__}: {error}", details))
                if not keep_going:
                    break
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    return tally


def count_events(cluster: Cluster) -> dict[str, int]:
    """Counts of what happened in a run."""
    liveness = cluster.checkers.liveness
    return {
        "steps": cluster.step_count,
        "commits": liveness.committed_count,
        "aborts": liveness.aborted_count,
        "answers": liveness.answered_count,
        "faults": len(cluster.incidents),
        "seconds": cluster.clock.now_ns // SECOND,
    }
