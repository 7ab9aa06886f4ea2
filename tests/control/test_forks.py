"""What a forked child closes."""

from __future__ import annotations

import os

from zpccl.control.forks import Descriptor


def test_a_number_that_is_another_file_by_now_is_left_alone() -> None:
    """libzmq closes its descriptors at any moment, and the next file gets the same number."""
    number, other = os.open(os.devnull, os.O_RDONLY), os.open("/", os.O_RDONLY)
    one, gone = Descriptor(number), Descriptor(number)
    assert (one.detach(), one.detach()) == (number, -1)
    os.close(number)
    assert Descriptor(number).detach() == -1
    os.dup2(other, number)
    assert gone.detach() == -1
    os.close(number)
    os.close(other)
