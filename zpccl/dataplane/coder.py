"""Encodes blocks for one link, each as it is delivered soonest. Called by any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from zpccl.dataplane.coding_choice import CodingChoice, Group
from zpccl.dataplane.state_codec import encode, measure


class LinkCoder:
    """The coder of what goes over one link. It owns a lock, for the choice.

    Args:
        workers: threads that call it at a time.
    """

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._choice = CodingChoice(workers)

    def encode(
        self,
        group: Group,
        block: memoryview,
        itemsize: int,
        bytes_left: int,
        link_rate: float | None,
        *,
        is_limit: bool = False,
    ) -> Sequence[Any]:
        """A block as it travels: buffers to be sent end to end. One may be the block itself.

        Args:
            group: of the block: `group_of`.
            block: contiguous bytes, at least one.
            itemsize: bytes of an element.
            bytes_left: what is still to be sent over the link after it, as far as is known.
            link_rate: bytes per second, as measured last while the link was what held the transfer up; None: not yet.
            is_limit: the rate was not measured: nobody may send faster.
        """
        while True:
            with self._lock:
                coding, sample = self._choice.choose(group, len(block), bytes_left, link_rate, is_limit=is_limit)
            if sample is None:
                return encode(block, itemsize, coding)
            found = measure(block, itemsize, sample)
            with self._lock:
                self._choice.add(group, found)
