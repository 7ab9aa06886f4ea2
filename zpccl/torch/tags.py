"""Tags of the collectives of a process group, the same on all ranks without a word between them.

All ranks issue the same collectives in the same order, so each can count for itself. A plain sequence number would do,
but a call is planned ahead only where the last one at its tag was alike. So each signature, which is what calls must
agree on, has some tags of its own and uses them in turn: a training step finds the plans of the step before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class Tags:
    """Gives out tags from 0 to `count - 1`, as a function of the signatures asked for so far and of nothing else.

    Args:
        count: tags there are.
        turns: tags of one signature. Once as many signatures have tags as fit, the one that was used longest ago gives
            its own to the next new one.
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
