"""Makes decisions of the bytes of an input: a change of a byte changes a decision, so a fuzzer finds its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Reads an input from its begin; zeros follow its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def __bool__(self) -> bool:
        """True while there are bytes."""
        return self._place < len(self._data)

    def number(self, count: int) -> int:
        """From 0 to count - 1."""
        byte = self._data[self._place] if self else 0
        self._place += 1
        return byte % count

    def one_of(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.number(len(values))]

    def some_of(self, values: Sequence[T], most: int = 3) -> tuple[T, ...]:
        """Up to `most` values, perhaps the same ones."""
        return tuple(self.one_of(values) for _ in range(self.number(most + 1)))

    def take(self, count: int) -> bytes:
        """The next bytes themselves, fewer at the end."""
        taken = self._data[self._place : self._place + count]
        self._place += count
        return taken
