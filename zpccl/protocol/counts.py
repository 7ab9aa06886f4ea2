"""What a master counts, for those who watch it. Nothing is decided by it."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field


class AbortReason(str, enum.Enum):
    """Why an attempt at a collective was aborted. The value is for people."""

    FAILED = "failed"
    """A participant reported that its part failed."""
    PEER_LOST = "peer_lost"
    RESULTS_DIFFER = "results_differ"
    WITHDRAWN = "withdrawn"
    """A participant gave it up, or had begun it anew with a master that took the run over."""


class LossReason(str, enum.Enum):
    """Why a peer was lost. The value is for people."""

    LEFT = "left"
    DISCONNECTED = "disconnected"
    """Its connection broke, or it was silent for too long, and it did not come back."""
    ABSENT = "absent"
    """It did not come to a master that took the run over."""
    KICKED = "kicked"


@dataclass(slots=True)
class Counts:
    """What has happened since the master started. Numbers only grow."""

    plans: int = 0
    commits: int = 0
    aborts: Counter[AbortReason] = field(default_factory=Counter)
    syncs_committed: int = 0
    syncs_aborted: int = 0
    sources_dropped: int = 0
    """That a fetch of shared state went on without, for they sent nothing, or what does not check."""
    losses: Counter[LossReason] = field(default_factory=Counter)
    takeovers: int = 0
