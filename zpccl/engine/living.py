"""The living objects of a kind in this process, for actions that concern all of them.

Any thread may add and list objects. Each is added when it is made: a weak reference made in `__del__`, during garbage
collection, would give others an object that is being taken apart. The removal of a collected object is C code, unlike
that of `WeakSet`: it may run in the main thread, where Ctrl-C would end Python code of the removal and not the program.
"""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class Living(Generic[T]):
    """A set of objects that does not keep them alive."""

    def __init__(self) -> None:
        self._references: set[ref[T]] = set()
        self.clear = self._references.clear

    def add(self, one: T) -> None:
        """Adds an object."""
        self._references.add(ref(one, self._references.discard))

    def all(self) -> list[T]:
        """The objects that are alive."""
        return [one for reference in self._references.copy() if (one := reference()) is not None]
