"""Which coding is chosen, in transfers of data whose codings were measured: docs/shared_state.md."""

from __future__ import annotations

import pytest

from zpccl import limits
from zpccl.dataplane.coding_choice import Choice, CodingChoice, Group, group_of
from zpccl.dataplane.state_codec import CODINGS, LZ4_BITS, RAW, ZSTD_FAST, ZSTD_STRONG, Coding, Sample
from zpccl.limits import MIB
from zpccl.types import DataType

# Ratio, MB/s of encoding and of decoding by one thread.
Measured = dict[Coding, tuple[float, float, float]]


def measured(*rows: tuple[float, float, float]) -> Measured:
    return dict(zip(CODINGS, rows, strict=True))


DATA: dict[str, Measured] = {
    "random": measured((1.0, 4000, 50000), (1.0, 10000, 50000), (1.0, 2600, 50000), (1.0, 3200, 56000)),
    "weights f32": measured((1.135, 5469, 9304), (1.059, 1810, 8696), (1.184, 1074, 4630), (1.174, 72, 3770)),
    "weights bf16": measured((1.322, 5418, 6503), (1.129, 1104, 5128), (1.452, 685, 2758), (1.427, 65, 1945)),
    "sparse f32": measured((2.625, 820, 2186), (4.507, 985, 717), (8.16, 570, 1349), (8.84, 60, 1489)),
    "integers": measured((19.1, 4072, 8107), (19.4, 830, 10332), (37.7, 3328, 6142), (57.2, 347, 8988)),
}
MBITS = [10, 100, 1000, 2500, 5000, 10_000, 25_000, 100_000]
WORKERS = 2
GROUP = Group(DataType.FLOAT, 0)


def sample_of(data: Measured, coding: Coding) -> Sample:
    ratio, encode, decode = data[coding]
    size = limits.STATE_SAMPLE_BYTES
    return Sample(coding, size, int(size / ratio), size / encode / 1e6, size / decode / 1e6)


def coders_seconds(data: Measured, coding: Coding) -> float:
    """Of a byte, all threads of one side together."""
    return (1e-6 / data[coding][1] + 1e-6 / data[coding][2]) / WORKERS if coding is not RAW else 0.0


def ratio_of(data: Measured, coding: Coding) -> float:
    return data[coding][0] if coding is not RAW else 1.0


class Transfer:
    """Blocks over a link of so many bytes per second.

    Args:
        overlap: link and coders work at the same time; False: both need the same CPUs all the time.
        known_rate: what is said of the link, if not the truth; the truth is measured where the link has been the slower
            one for 50 ms.
    """

    def __init__(self, data: Measured, rate: float, *, overlap: bool, known_rate: float | None = None) -> None:
        self.choice = CodingChoice(WORKERS)
        self.data, self.rate, self.overlap = data, rate, overlap
        self.known_rate = known_rate or rate
        self.seconds = 0.0
        self.chosen: list[Coding] = []
        self.samples: list[Coding] = []
        self._waited = 0.0  # For the link, without a pause.
        self._measured = 0

    def run(self, nbytes: int, group: Group = GROUP) -> Transfer:
        for left in range(nbytes - MIB, -1, -MIB):
            while (step := self.choice.choose(group, MIB, left, self.known_rate)).sample is not None:
                self.samples.append(step.sample)
                sample = sample_of(self.data, step.sample)
                self.choice.add(group, sample)
                self.seconds += 0 if self.overlap else (sample.encode_seconds + sample.decode_seconds) / WORKERS
            self.chosen.append(step.coding)
            coders = coders_seconds(self.data, step.coding)
            link = 1 / ratio_of(self.data, step.coding) / self.rate
            self._waited = self._waited + MIB * link if link >= coders else 0.0
            if self._waited >= 0.05:
                self._waited = 0.0
                self._measured += 1
                self.known_rate = self.rate * (1 + self._measured % 2 / 1000)  # No two measurements are the same.
            self.seconds += MIB * (max(coders, link) if self.overlap else coders + link)
        return self


@pytest.mark.parametrize("mbits", MBITS)
@pytest.mark.parametrize("what", DATA)
@pytest.mark.parametrize("overlap", [True, False])
def test_it_is_never_slower_than_none(what: str, mbits: int, overlap: bool) -> None:
    """By more than 5 %, however link and coders get in each other's way; samples included."""
    rate = mbits * 1e6 / 8
    transfer = Transfer(DATA[what], rate, overlap=overlap).run(256 * MIB)
    assert transfer.seconds <= 1.05 * 256 * MIB / rate


@pytest.mark.parametrize("mbits", [10, 100, 1000])
@pytest.mark.parametrize("what", DATA)
def test_a_slow_link_gets_what_delivers_soonest(what: str, mbits: int) -> None:
    rate = mbits * 1e6 / 8
    transfer = Transfer(DATA[what], rate, overlap=True).run(256 * MIB)
    best = min(
        256 * MIB * max(coders_seconds(DATA[what], coding), 1 / ratio_of(DATA[what], coding) / rate)
        for coding in (RAW, *CODINGS)
    )
    # Coders count as if link and coders took turns, and what is left after the best is little beside no coding.
    assert transfer.seconds <= max(1.15 * best, 0.06 * 256 * MIB / rate)


CHOSEN = {
    ("weights f32", 10): ZSTD_FAST,
    ("weights f32", 100): ZSTD_FAST,
    ("weights f32", 1000): LZ4_BITS,
    ("weights f32", 5000): RAW,
    ("weights f32", 10_000): RAW,
    ("weights bf16", 1000): LZ4_BITS,
    ("weights bf16", 5000): LZ4_BITS,
    ("weights bf16", 25_000): RAW,
    ("sparse f32", 10): ZSTD_STRONG,
    ("sparse f32", 1000): ZSTD_FAST,
    ("sparse f32", 100_000): RAW,
    ("integers", 10): ZSTD_STRONG,
    ("integers", 10_000): LZ4_BITS,
    ("random", 10): RAW,
    ("random", 10_000): RAW,
}


@pytest.mark.parametrize(("what", "mbits"), CHOSEN)
def test_what_is_chosen(what: str, mbits: int) -> None:
    transfer = Transfer(DATA[what], mbits * 1e6 / 8, overlap=True).run(64 * MIB)
    assert transfer.chosen[-1] == CHOSEN[what, mbits]


def test_nothing_is_tried_before_the_rate_is_known() -> None:
    choice = CodingChoice(2)
    assert [choice.choose(GROUP, MIB, 2**30, None) for _ in range(100)] == [Choice(RAW, None)] * 100


def test_the_rest_of_a_transfer_must_be_worth_a_sample() -> None:
    """And what cannot win is not tried: on a fast link that is nearly all."""
    assert CodingChoice(2).choose(GROUP, MIB, 0, 1e9) == Choice(RAW, None)
    assert CodingChoice(2).choose(GROUP, MIB, 2**30, 1e9).sample is LZ4_BITS
    assert CodingChoice(2).choose(GROUP, MIB, 2**40, 50e9) == Choice(RAW, None)
    random = Transfer(DATA["random"], 1.25e7, overlap=True).run(64 * MIB)
    assert random.samples[:4] == list(CODINGS)


def test_samples_are_taken_again_as_a_tensor_goes_on() -> None:
    """Its end may be of other contents than its beginning."""
    transfer = Transfer(DATA["random"], 1.25e7, overlap=True).run(256 * MIB)
    assert transfer.chosen[-1] is RAW
    transfer.data = DATA["sparse f32"]
    transfer.run(1024 * MIB)
    assert transfer.chosen[-1] is not RAW


def test_samples_of_many_tensors_cost_little_all_together() -> None:
    """10 MiB each on a fast link: the bound is of the whole transfer, and others go as those of their type."""
    transfer = Transfer(DATA["integers"], 6e8, overlap=False)
    for key in range(200):
        transfer.run(10 * MIB, group_of(key, DataType.INT64, 10 * MIB))
    samples = [sample_of(DATA["integers"], coding) for coding in transfer.samples]
    cost = sum(sample.encode_seconds + sample.decode_seconds for sample in samples)
    assert 4 < len(samples) < 400 and cost < 0.02 * 2000 * MIB / 6e8
    assert transfer.chosen.count(RAW) < 0.1 * len(transfer.chosen)


def test_small_tensors_are_one_group() -> None:
    assert group_of(1, DataType.FLOAT, MIB) == group_of(2, DataType.FLOAT, 5)
    assert group_of(1, DataType.FLOAT, MIB + 1) != group_of(2, DataType.FLOAT, MIB + 1)
    assert group_of(1, DataType.FLOAT, 5) != group_of(1, DataType.INT32, 5)


def test_a_rate_that_was_measured_too_low_is_found_out() -> None:
    """The coders then are slower than the link, so nothing shows its rate but blocks that go as they are."""
    transfer = Transfer(DATA["sparse f32"], 12.5e9, overlap=True, known_rate=5e7).run(4096 * MIB)
    assert transfer.chosen[0] is ZSTD_FAST and transfer.chosen[-1] is RAW and transfer.known_rate >= 12.5e9


def test_looking_for_a_faster_link_is_done_less_and_less_often() -> None:
    """Where the rate was right, and the coders are slower still because the data shrinks that much."""
    transfer = Transfer(DATA["sparse f32"], 6.25e8, overlap=True).run(4096 * MIB)
    assert 0 < transfer.chosen.count(RAW) < 0.03 * len(transfer.chosen)
    assert set(transfer.chosen) == {RAW, ZSTD_FAST} and transfer.seconds < 0.82 * 4096 * MIB / 6.25e8


def test_blocks_that_wait_for_a_slow_link_are_no_sign_of_a_faster_one() -> None:
    """Each takes most of a second, and some are encoded before the first has left."""
    choice = CodingChoice(2)
    while (step := choice.choose(GROUP, MIB, 2**30, 1.25e6)).sample is not None:
        choice.add(GROUP, sample_of(DATA["weights f32"], step.sample))
    assert [choice.choose(GROUP, MIB, 2**30, 1.25e6).coding for _ in range(16)] == [ZSTD_FAST] * 16
