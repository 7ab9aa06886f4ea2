"""The counters of a master, for metrics. They also show the master whether it has decided anything in its run."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field


class AbortReason(str, enum.Enum):
    """Why an attempt at a collective was aborted. The value is a label of the metrics."""

    FAILED = "failed"
    """A participant reported that its part failed."""
    PEER_LOST = "peer_lost"
    RESULTS_DIFFER = "results_differ"
    WITHDRAWN = "withdrawn"
    """A participant withdrew its call, or had voted again at a master that took the run over."""


class LossReason(str, enum.Enum):
    """Why a peer was lost. The value is a label of the metrics."""

    LEFT = "left"
    DISCONNECTED = "disconnected"
    """Its connection broke, or it was silent for too long, and it did not reconnect in time."""
    ABSENT = "absent"
    """It did not report to a master that took the run over."""
    KICKED = "kicked"


@dataclass(slots=True)
class Counts:
    """Events since the master started. The numbers only grow."""

    plans: int = 0
    commits: int = 0
    aborts: Counter[AbortReason] = field(default_factory=Counter)
    syncs_committed: int = 0
    syncs_aborted: int = 0
    sources_dropped: int = 0
    """Sources of shared state that a fetch dropped, because they sent nothing or wrong bytes."""
    losses: Counter[LossReason] = field(default_factory=Counter)
    takeovers: int = 0
