"""The rate of a link, as it shows in what arrives."""

from __future__ import annotations

from zpccl.dataplane.link_rate import LinkRate
from zpccl.limits import MIB, MS, SECOND


def test_it_is_measured_while_something_is_on_its_way() -> None:
    rate = LinkRate()
    found = []
    for tick in range(12):
        rate.note(tick * MIB, 4 * MIB, False, tick * 5 * MS)
        found.append(rate.bytes_per_second)
    assert found == [None] * 10 + [200 * MIB] * 2


def test_a_slow_link_is_measured_over_some_mib() -> None:
    """What one message did says nothing: those of several connections come together."""
    rate = LinkRate()
    rate.note(0, 4 * MIB, False, 0)
    found = []
    for second, arrived in enumerate((MIB, 2 * MIB, 6 * MIB), 1):
        rate.note(arrived, 4 * MIB, False, second * SECOND)
        found.append(rate.bytes_per_second)
    assert found == [None, MIB, 2.5 * MIB]  # The last one is the mean of old and new.


def test_pauses_and_coders_that_are_behind_are_not_the_links() -> None:
    rate = LinkRate()
    for on_its_way, behind in ((0, False), (4 * MIB, True)):
        rate.note(0, 4 * MIB, False, 0)
        rate.note(MIB, on_its_way, behind, 1 * SECOND)
        rate.note(9 * MIB, 4 * MIB, False, 9 * SECOND)
        assert rate.bytes_per_second is None
    rate.note(11 * MIB, 4 * MIB, False, 10 * SECOND)
    assert rate.bytes_per_second == 2 * MIB
