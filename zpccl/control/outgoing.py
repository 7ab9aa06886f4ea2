"""Messages that are not sent yet, by destination.

Waking ZeroMQ's thread costs more than a message does. So the messages to one destination in one turn of a loop are sent
together, as parts of one ZeroMQ message. Messages that nobody waits for are held back and go out with them: for at most
SEND_HOLD_NS, or until there are SEND_HELD_MAX. A message may also be sent alone: ZeroMQ delivers a message when all of
its parts have arrived, which takes long if one is large and the path is slow.

It belongs to the thread of its loop, which takes the due messages at the end of each turn.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from zpccl import limits

ToT = TypeVar("ToT", bound=Hashable)
DataT = TypeVar("DataT")


class Outgoing(Generic[ToT, DataT]):
    """The messages of one socket.

    Attributes:
        deadline_ns: when the messages that are held back are due; None: there are none.
    """

    def __init__(self) -> None:
        self.deadline_ns: int | None = None
        self._unsent: dict[ToT, list[list[DataT]]] = {}  # Each list is sent together.
        self._urgent: dict[ToT, None] = {}  # Destinations with a message that cannot wait.

    def add(self, to: ToT, data: DataT, now_ns: int, *, may_wait: bool, alone: bool = False) -> None:
        """Adds a message behind the others to its destination."""
        unsent = self._unsent.setdefault(to, [[]])
        if alone or len(unsent[-1]) >= limits.MESSAGE_PARTS_MAX:
            unsent.append([])
        unsent[-1].append(data)
        if not may_wait or sum(map(len, unsent)) >= limits.SEND_HELD_MAX:
            self._urgent[to] = None
        elif self.deadline_ns is None:
            self.deadline_ns = now_ns + limits.SEND_HOLD_NS
        if alone:
            unsent.append([])

    def take(self, now_ns: int) -> list[tuple[ToT, list[DataT]]]:
        """Takes what is due: destinations, each with the messages to send together."""
        is_due = self.deadline_ns is not None and now_ns >= self.deadline_ns
        due = {to: self._unsent.pop(to) for to in list(self._unsent if is_due else self._urgent)}
        self._urgent.clear()
        if not self._unsent:
            self.deadline_ns = None
        return [(to, parts) for to, unsent in due.items() for parts in unsent if parts]

    def drop(self, to: ToT) -> None:
        """A destination is gone."""
        self._unsent.pop(to, None)
        self._urgent.pop(to, None)

    def clear(self) -> None:
        """Drops everything."""
        self._unsent.clear()
        self._urgent.clear()
        self.deadline_ns = None
