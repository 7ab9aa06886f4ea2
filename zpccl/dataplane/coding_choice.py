"""Which coding delivers a state soonest: by the rate of the link, and by samples of what each coding makes of the data.

Pure: whoever serves blocks measures, and says what was measured.

Blocks of a group are alike, so a piece of one of them stands for all. A byte takes the time of coders and link, as if
one waited for the other. They work at the same time, but what coders take is not there for what moves and digests the
blocks, nor for the trainer: of two codings that a link can hardly tell apart the cheap one is taken. While the rate is
not known, blocks go as they are, which measures it. Samples are taken of one coding after the other, the fastest first,
where they can win and the transfer is long enough to be worth them. Coders that are slower than the link hide its rate,
which may have been measured too low. So where the rate has not been measured for a while, blocks go as they are until
it is: at once, if the link is what is slow, and the less often, the more often it was found to be the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from zpccl import limits
from zpccl.dataplane.state_codec import (
    CODINGS,
    LZ4_BITS,
    LZ4_BYTES,
    RAW,
    ZSTD_FAST,
    ZSTD_STRONG,
    Coding,
    Sample,
)
from zpccl.types import DataType

_GAIN = limits.STATE_CODING_GAIN_PERCENT / 100
_SAMPLE_SHARE = limits.STATE_SAMPLE_PERCENT_MAX / 100
_PROBE_SECONDS = limits.STATE_PROBE_INTERVAL_NS / limits.SECOND
_RATE_CHANGE = 0.25
"""A rate that changes by less is still the same."""
_PRIOR_SECONDS_PER_BYTE: dict[Coding, tuple[float, float]] = {
    LZ4_BITS: (0.15e-9, 1.5e-9),
    LZ4_BYTES: (0.1e-9, 2.2e-9),
    ZSTD_FAST: (0.3e-9, 2.5e-9),
    ZSTD_STRONG: (0.3e-9, 20e-9),
}
"""What coding takes at least and at most, of any data: docs/shared_state.md. For what was not measured yet."""


class Choice(NamedTuple):
    """How the next block shall travel, unless there is something to be measured first: then choose again after it."""

    coding: Coding
    sample: Coding | None


class Group(NamedTuple):
    """Blocks that are alike: of a large tensor, or, with no key, of all tensors of a type."""

    datatype: DataType
    key: int | None = None


def group_of(key: int, datatype: DataType, nbytes: int) -> Group:
    """The group of the blocks of a tensor of so many bytes."""
    return Group(datatype, key if nbytes > limits.STATE_BLOCK_BYTES else None)


@dataclass
class _Known:
    """Of a coding of a group: means in which older samples count less."""

    ratio: float
    seconds_per_byte: float
    samples: int = 1

    def add(self, ratio: float, seconds_per_byte: float) -> None:
        self.ratio += (ratio - self.ratio) / 2
        self.seconds_per_byte += (seconds_per_byte - self.seconds_per_byte) / 2
        self.samples += 1


@dataclass
class _Found:
    """Of a group."""

    served_bytes: int = 0
    known: dict[Coding, _Known] = field(default_factory=dict)


class CodingChoice:
    """Chooses the coding of what goes over one link.

    Args:
        workers: threads that code at a time, on either side.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._groups: dict[Group, _Found] = {}
        self._served_bytes = 0
        self._spent_seconds = 0.0
        """On samples: CPU time that others may have had a use for."""
        self._rate: float | None = None
        self._hidden_bytes = 0
        """Coded since the rate was measured."""
        self._hidden_seconds = 0.0
        """That they should have taken."""
        self._probe_after_seconds = _PROBE_SECONDS

    def choose(
        self, group: Group, nbytes: int, bytes_left: int, link_rate: float | None, *, is_limit: bool = False
    ) -> Choice:
        """The coding of a block that is about to be sent.

        Args:
            group: of the block.
            nbytes: its size.
            bytes_left: what is still to be sent over the link after it, as far as is known.
            link_rate: bytes per second, as measured last while the link was what held the transfer up; None: not yet.
            is_limit: the rate was not measured: nobody may send faster.
        """
        found = self._groups.setdefault(group, _Found())
        best, sample = RAW, None
        times: dict[Coding, float] = {}
        if link_rate is not None:
            self._note_rate(link_rate)
            # What is not known of a group yet is taken to be as in all others of its type.
            known = {**self._groups.get(Group(group.datatype), found).known, **found.known}
            times = {coding: self._time(it.seconds_per_byte, it.ratio, link_rate) for coding, it in known.items()}
            best = min(times, key=times.__getitem__, default=RAW)
            if best is RAW or times[best] > (1 - _GAIN) / link_rate:
                best = RAW
            sample = self._due_sample(found, nbytes + bytes_left, link_rate, times.get(best, 1 / link_rate))
        if sample is None:
            found.served_bytes += nbytes
            self._served_bytes += nbytes
            if best is not RAW and not is_limit:
                self._hidden_bytes += nbytes
                self._hidden_seconds += nbytes * times[best]
                if self._is_probe():
                    best = RAW
        return Choice(best, sample)

    def add(self, group: Group, sample: Sample) -> None:
        """A sample was taken."""
        ratio = sample.packed_bytes / sample.raw_bytes
        seconds_per_byte = (sample.encode_seconds + sample.decode_seconds) / sample.raw_bytes
        for each in {group, Group(group.datatype)}:
            known = self._groups.setdefault(each, _Found()).known
            if sample.coding in known:
                known[sample.coding].add(ratio, seconds_per_byte)
            else:
                known[sample.coding] = _Known(ratio, seconds_per_byte)

    def _time(self, seconds_per_byte: float, ratio: float, rate: float) -> float:
        """Of a byte of a block on its way, all in all."""
        return seconds_per_byte / self._workers + ratio / rate

    def _due_sample(self, found: _Found, bytes_left: int, rate: float, target: float) -> Coding | None:
        """The first coding that wants a sample, can win, and is worth its time."""
        wanted = 1 + found.served_bytes // limits.STATE_SAMPLE_INTERVAL_BYTES
        budget = _SAMPLE_SHARE * (self._served_bytes + bytes_left) * target
        for coding in CODINGS:
            known = found.known.get(coding)
            if known is not None and known.samples >= wanted:
                continue
            least, most = _PRIOR_SECONDS_PER_BYTE[coding]
            ratio = 0.0
            if known is not None:
                least = most = known.seconds_per_byte
                ratio = known.ratio / 2  # Who was far from winning will not be looked at again.
            cost = most * limits.STATE_SAMPLE_BYTES
            if self._time(least, ratio, rate) < target and self._spent_seconds + cost <= budget:
                self._spent_seconds += cost
                return coding
        return None

    def _note_rate(self, rate: float) -> None:
        old, self._rate = self._rate, rate
        if rate == old:
            return
        if old is None or abs(rate - old) > _RATE_CHANGE * old:
            self._probe_after_seconds = _PROBE_SECONDS
        elif self._is_probe():
            self._probe_after_seconds *= 2
        self._hidden_bytes, self._hidden_seconds = 0, 0.0

    def _is_probe(self) -> bool:
        """True while blocks go as they are to show what the link can do. On a slow link few blocks take long."""
        return self._hidden_seconds >= self._probe_after_seconds and self._hidden_bytes >= limits.STATE_PROBE_BYTES
