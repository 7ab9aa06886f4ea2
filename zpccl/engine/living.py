"""The objects of a kind that this process has and has not collected: for what is to be done with all of them.

Any thread may enter and list them. Each is entered as it is made: a weak reference that is made while garbage is
collected, in `__del__`, would give others what the collector then takes apart. The removal of one that is collected is
C code, unlike that of `WeakSet`: it may run in the main thread, and Ctrl-C would end the removal and not the program.
"""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class Living(Generic[T]):
    """Holds none of them alive."""

    def __init__(self) -> None:
        self._references: set[ref[T]] = set()
        self.clear = self._references.clear

    def add(self, one: T) -> None:
        """Enters an object."""
        self._references.add(ref(one, self._references.discard))

    def all(self) -> list[T]:
        """Those that are there."""
        return [one for reference in self._references.copy() if (one := reference()) is not None]
