"""Whole runs: faults, healing, and the demand that all is well again."""

from __future__ import annotations

from collections.abc import Callable

from zpccl.sim.cluster import Cluster
from zpccl.sim.faults import PROFILES, Faults

STEPS = 1000
AUTO = "auto"


def choose_faults(name: str, seed: int) -> Faults:
    """The profile of a name; "auto" takes them in turn."""
    return PROFILES[name] if name != AUTO else list(PROFILES.values())[seed % len(PROFILES)]


def run_seed(
    seed: int,
    *,
    peers: int = 0,
    steps: int = STEPS,
    faults: str = AUTO,
    tracer: Callable[[str], None] | None = None,
) -> Cluster:
    """Runs one seed: faults, then healing.

    Args:
        peers: how many start; 0 lets the seed choose 2 to 6.
        steps: events before the healing.
        faults: name of a profile, or "auto".
        tracer: is given every line of the trace.

    Raises:
        Violation: a promise is broken.
        AssertionError: a machine is in an impossible state.
    """
    profile = choose_faults(faults, seed)
    cluster = Cluster(seed, peers or 2 + seed // len(PROFILES) % 5, masters=profile.masters, tracer=tracer)
    cluster.run(steps, profile)
    cluster.heal()
    # With several masters a run may have lost its quorum: members wait for it in vain, and a new run waits for them.
    if not (cluster.quiesces() if profile.masters == 1 else cluster.quiesces(steps=60_000, seconds=150)):
        raise cluster.violation("L2", f"no rest after healing: {'; '.join(cluster.reasons_of_unrest())}")
    return cluster


def replay_command(seed: int, *, peers: int = 0, steps: int = STEPS, faults: str = AUTO) -> str:
    """What shows a run again, line by line."""
    return f"python -m zpccl.sim --seed {seed} --peers {peers} --steps {steps} --faults {faults} --trace"
