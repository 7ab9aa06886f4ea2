"""Turns the bytes of an input into decisions: a changed byte changes a decision, so a fuzzer can explore them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Reads an input from its start; zeros follow its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def __bool__(self) -> bool:
        """True while there are bytes left."""
        return self._place < len(self._data)

    def number(self, count: int) -> int:
        """A number from 0 to count - 1."""
        byte = self._data[self._place] if self else 0
        self._place += 1
        return byte % count

    def one_of(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.number(len(values))]

    def some_of(self, values: Sequence[T], most: int = 3) -> tuple[T, ...]:
        """Up to `most` values; a value may occur more than once."""
        return tuple(self.one_of(values) for _ in range(self.number(most + 1)))

    def take(self, count: int) -> bytes:
        """The next bytes themselves; fewer at the end."""
        taken = self._data[self._place : self._place + count]
        self._place += count
        return taken
