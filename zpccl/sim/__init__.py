"""The real protocol in a fake world: a whole run, with all that can go wrong, from one seed."""

from zpccl.sim.cluster import Cluster, Violation
from zpccl.sim.faults import CALM, CHAOS, CHURN, FLAKY_NETWORK, HOSTILE, IMPATIENT, JOINERS, MUDDLED, PROFILES, Faults

__all__ = [
    "CALM",
    "CHAOS",
    "CHURN",
    "FLAKY_NETWORK",
    "HOSTILE",
    "IMPATIENT",
    "JOINERS",
    "MUDDLED",
    "PROFILES",
    "Cluster",
    "Faults",
    "Violation",
]
