"""Tags of the collectives of a process group, the same on all ranks without messages between them.

All ranks issue the same collectives in the same order, so each rank can count for itself. A plain sequence number would
be enough, but a call is planned ahead only if the last call at its tag was alike. So each signature (the values that
calls must agree on) has some tags of its own and uses them in turn: a training step finds the plans of the last step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class Tags:
    """Gives out tags from 0 to `count - 1`, as a function of the signatures asked for so far and of nothing else.

    Args:
        count: number of tags.
        turns: tags of one signature. When all tags are given out, the next new signature takes those of the signature
            that was used longest ago.
    """

    def __init__(self, count: int, turns: int) -> None:
        assert count >= turns >= 1
        self._turns, self._blocks_max = turns, count // turns
        self._used: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()

    def next(self, signature: Hashable) -> int:
        """The tag of the next collective."""
        if signature in self._used:
            block, turn = self._used.pop(signature)
        elif len(self._used) < self._blocks_max:
            block, turn = len(self._used), 0
        else:
            _, (block, turn) = self._used.popitem(last=False)
        self._used[signature] = block, (turn + 1) % self._turns
        return block * self._turns + turn
