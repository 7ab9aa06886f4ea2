"""The real protocol in a fake world: a whole run, with all that can go wrong, from one seed."""

from zpccl.sim.cluster import Cluster, Violation
from zpccl.sim.faults import (
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
    Faults,
)

__all__ = [
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
    "Cluster",
    "Faults",
    "Violation",
]
