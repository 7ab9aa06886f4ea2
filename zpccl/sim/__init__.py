"""A deterministic simulator: the real protocol machines in a simulated network with faults, replayed from one seed."""

from zpccl.sim.cluster import Cluster, Violation
from zpccl.sim.faults import (
    ANARCHY,
    CALM,
    CHAOS,
    CHURN,
    FLAKY_NETWORK,
    HEADLESS,
    HOSTILE,
    IMPATIENT,
    JOINERS,
    MUDDLED,
    PATHS,
    PROFILES,
    REGICIDE,
    UNRULY,
    Faults,
)

__all__ = [
    "ANARCHY",
    "CALM",
    "CHAOS",
    "CHURN",
    "FLAKY_NETWORK",
    "HEADLESS",
    "HOSTILE",
    "IMPATIENT",
    "JOINERS",
    "MUDDLED",
    "PATHS",
    "PROFILES",
    "REGICIDE",
    "UNRULY",
    "Cluster",
    "Faults",
    "Violation",
]
