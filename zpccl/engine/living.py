"""The objects of a kind that this process has and has not collected: for what is to be done with all of them.

Any thread may enter and list them. Each is entered as it is made: a weak reference that is made while garbage is
collected, in `__del__`, would give others what the collector then takes apart.
"""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Living(Generic[T]):
    """Holds none of them alive."""

    def __init__(self) -> None:
        self._references: WeakKeyDictionary[T, None] = WeakKeyDictionary()  # Unlike a set, it may grow while listed.
        self.clear = self._references.clear

    def add(self, one: T) -> None:
        """Enters an object."""
        self._references[one] = None

    def all(self) -> list[T]:
        """Those that are there."""
        found = [reference() for reference in self._references.keyrefs()]
        return [one for one in found if one is not None]
