"""Deals the samples of an epoch to peers that come and go, each sample once.

The shared state records which samples have been read: one bit per sample, in the order in which samples are dealt. All
members hold the same bits, so each finds the next samples and its share of them without a message. A share counts as
read only once the step has used it: the share of a lost peer is dealt again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zpccl import limits
from zpccl.caller import checked_int
from zpccl.errors import InvalidArgument, InvalidUsage
from zpccl.shared_state import TensorInfo

Array = np.ndarray[Any, Any]


class ElasticSampler:
    """Samples of an epoch, each read once by one of the peers, even if peers are lost and join.

    A step of all members:

        batch = sampler.take(32, members, comm.peer_id)  # The same members, in the same order, on all of them.
        ...                                              # Gradients of batch, averaged.
        sampler.commit(hook.peer_ids)                    # The peers whose gradients were in the average.

    `members` must be the same on all peers, so use the peers that took part in the last collective
    (`AsyncReduceHandle.peer_ids`, `GatherResult.peer_ids`), not `Communicator.peer_ids`, which does not change on all
    peers at the same time.

    Args:
        length: number of samples in the data set.
        seed: seed of the order, the same on all peers; 0 to 2**32 - 1.
        shuffle: False: deal samples in the order of their indices in each epoch.

    Attributes:
        length: number of samples in the data set.

    Raises:
        InvalidArgument: the length or the seed is out of range.
    """

    def __init__(self, length: int, *, seed: int = 0, shuffle: bool = True) -> None:
        self.length = checked_int(length, "length", 1, limits.TORCH_SAMPLES_MAX)
        self._seed, self._shuffle = checked_int(seed, "seed", 0, 2**32 - 1), shuffle
        self._epoch = np.zeros(1, np.int64)
        self._is_read = np.zeros((self.length + 7) // 8, np.uint8)
        self._order: tuple[int, Array] | None = None
        self._taken: dict[str, Array] | None = None

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0 on."""
        return int(self._epoch[0])

    @property
    def remaining(self) -> int:
        """Samples of this epoch that have not been read."""
        return self.length - int(np.unpackbits(self._is_read, count=self.length).sum())

    def tensor_infos(self, prefix: str = "sampler") -> list[TensorInfo]:
        """The state of the sampler, for `SharedState`: after a sync, newcomers go on where the others are.

        It has one bit per sample, and the number of the epoch. Sync between steps: after `commit`, before `take`.

        Args:
            prefix: prefix of the tensor names.
        """
        return [
            TensorInfo.from_numpy(self._epoch, f"{prefix}.epoch"),
            TensorInfo.from_numpy(self._is_read, f"{prefix}.is_read"),
        ]

    def take(self, batch_size: int, members: Sequence[str], peer: str) -> Array:
        """This peer's samples of the next step. Until `commit`, calling it again deals the same samples anew.

        Args:
            batch_size: samples for each member, the same on all of them. At the end of an epoch members get fewer, and
                some perhaps none: these take part in the step with the weight 0.
            members: the peers that will take part, the same on all of them.
            peer: this peer, one of the members.

        Returns:
            Indices of samples, int64, at most `batch_size`.

        Raises:
            InvalidArgument: `peer` is not a member, a member is named twice, or `batch_size` is not positive.
        """
        if peer not in members or len(set(members)) < len(members):
            raise InvalidArgument(f"{peer!r} must be one of the members, which must differ: {list(members)}")
        batch_size = checked_int(batch_size, "batch_size", 1)
        places = self._next_places(batch_size * len(members))
        shares = np.array_split(places, len(members))
        self._taken = dict(zip(members, shares, strict=True))
        found: Array = self._permutation()[self._taken[peer]]
        return found

    def commit(self, took_part: Sequence[str]) -> None:
        """Marks the samples of these members as read. Those of all other members are dealt again.

        Args:
            took_part: the members whose samples the step has used, the same on all members.

        Raises:
            InvalidUsage: nothing was taken since the last commit.
            InvalidArgument: a peer was not a member when samples were taken.
        """
        if self._taken is None:
            raise InvalidUsage("nothing has been taken; call take() before each commit()")
        strangers = set(took_part) - self._taken.keys()
        if strangers:
            raise InvalidArgument(f"{sorted(strangers)} had no samples; they were not among the members of take()")
        for peer in took_part:
            places = self._taken[peer]
            np.bitwise_or.at(self._is_read, places >> 3, (128 >> (places & 7)).astype(np.uint8))
        self._taken = None

    def next_epoch(self) -> None:
        """Begins the next epoch. All members call it, when nothing remains, or earlier to skip the rest."""
        self._epoch += 1
        self._is_read[:] = 0
        self._taken = None

    def _next_places(self, count: int) -> Array:
        """The first `count` unread places, in the order of dealing; fewer at the end."""
        start = int(np.argmax(self._is_read != 255))
        width = max(count // 8 + 1, 1024)
        while True:
            window = np.unpackbits(self._is_read[start : start + width])[: self.length - 8 * start]
            places: Array = np.flatnonzero(window == 0)[:count] + 8 * start
            if len(places) == count or start + width >= len(self._is_read):
                return places
            width *= 2

    def _permutation(self) -> Array:
        """The order in which samples are dealt in this epoch."""
        if self._order is None or self._order[0] != self.epoch:
            if self._shuffle:
                # The only generator of numpy that promises the same numbers in all versions.
                epoch = self.epoch & 0xFFFFFFFF
                order = np.random.RandomState([self._seed, epoch]).permutation(self.length)
            else:
                order = np.arange(self.length)
            self._order = self.epoch, order.astype(np.int64, copy=False)
        return self._order[1]
