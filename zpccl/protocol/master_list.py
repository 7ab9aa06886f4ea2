"""The masters that a peer knows, and which of them it connects to; and what a master knows about that list.

A peer is connected to one master at a time. It switches to the next one when a master does not answer, or answers but
does not lead the run within some time. It waits longest at the first master, so that all peers meet there if they can.
The waits of peers differ, or two peers that switch in step could miss each other forever.

All peers of a run must be given the same list: with different lists, two masters could lead it. A master compares lists
by their length and its own position, because the addresses may be written differently. It also refuses a list with the
same addresses in another order.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from zpccl import limits
from zpccl.protocol.messages import Hello

_NO_ID = bytes(16)


class MasterList:
    """The current master of a peer, and when the peer switches to the next one.

    Args:
        addresses: the addresses of the masters, in order of preference.
        peer_id: the id of the peer; makes its waits differ from those of others.

    Attributes:
        index: the index of the master that the peer is connected to, or tries to reach.
        stay_ns: until when it waits for that master to lead the run; None if the master leads or is not connected.
        switch_ns: when it switches to the next master, because this one failed; None if it has not failed.
    """

    def __init__(self, addresses: tuple[str, ...], peer_id: bytes) -> None:
        self.addresses = addresses
        self._peer_id = peer_id
        self.index = 0
        self.stay_ns: int | None = None
        self.switch_ns: int | None = None
        self._failures = 0  # Failed tries since a master last led the run.
        self._without_run: set[int] = set()  # Masters that lead no run, asked since the first one was asked.
        self._first_run_id = _NO_ID  # Of the run that the first master would begin.
        self._stay_count = 0

    @property
    def has_others(self) -> bool:
        """True if there are several masters."""
        return len(self.addresses) > 1

    @property
    def address(self) -> str:
        """The address of the current master."""
        return self.addresses[self.index]

    @property
    def begins(self) -> bytes:
        """The id of the run that a newcomer may begin: at the first master, if no master leads one. Otherwise zeros."""
        is_to_begin = self.index == 0 and len(self._without_run) == len(self.addresses)
        return self._first_run_id if is_to_begin else _NO_ID

    @property
    def is_leaving(self) -> bool:
        """True if a switch to the next master is due soon."""
        return self.switch_ns is not None

    def on_connected(self) -> None:
        """The current master accepts a connection, so it gets time to answer."""
        self.switch_ns = None

    def on_disconnected(self) -> None:
        """The connection broke: the peer waits for no master."""
        self.stay_ns = None

    def on_led(self) -> None:
        """The current master leads the run."""
        self._failures, self.stay_ns, self.switch_ns = 0, None, None

    def on_no_run(self, run_id: bytes, now_ns: int) -> None:
        """The current master knows of no run; `run_id` is the id of the run that it would begin."""
        if self.index == 0:
            self._without_run.clear()
            self._first_run_id = run_id
        self._without_run.add(self.index)
        self.fail(now_ns)

    def forget_answers(self) -> None:
        """The answers of masters about runs are out of date."""
        self._without_run.clear()

    def on_no_answer(self) -> None:
        """The current master did not answer, so it may lead a run."""
        self._without_run.discard(self.index)

    def stay(self, now_ns: int) -> None:
        """Starts to wait for the current master to lead the run, unless it waits already."""
        if self.has_others and self.stay_ns is None:
            self._stay_count += 1
            time_ns = limits.MASTER_STAY_NS if self.index else limits.MASTER_STAY_FIRST_NS
            salt = zlib.crc32(self._peer_id + self._stay_count.to_bytes(8, "big"))
            self.stay_ns = now_ns + time_ns + salt % limits.MASTER_STAY_SPREAD_NS

    def fail(self, now_ns: int) -> None:
        """The current master failed: schedules the switch to the next one, after a pause once all have failed."""
        count = len(self.addresses)
        if self.has_others and self.switch_ns is None:
            self._failures += 1
            pause_ns = limits.RECONNECT_INTERVAL_NS << min(self._failures // count, 8)
            is_last = self._failures % count == 0
            self.switch_ns = now_ns + (min(pause_ns, limits.RECONNECT_INTERVAL_MAX_NS) if is_last else 0)

    def is_due(self, now_ns: int) -> bool:
        """True if it is time to switch to the next master."""
        return any(due_ns is not None and now_ns >= due_ns for due_ns in (self.stay_ns, self.switch_ns))

    def switch(self) -> int:
        """Switches to the next master and returns its index."""
        self.stay_ns = self.switch_ns = None
        self.index = (self.index + 1) % len(self.addresses)
        return self.index

    def clear(self) -> None:
        """Cancels all waits."""
        self.stay_ns = self.switch_ns = None


@dataclass(frozen=True)
class GivenList:
    """The list of masters that a peer was given, and the position of the master that it says Hello to."""

    addresses: tuple[str, ...]
    index: int

    @property
    def count(self) -> int:
        """The number of masters."""
        return max(1, len(self.addresses))

    def may_be(self, other: GivenList) -> bool:
        """True for lists that may name the same masters in the same order: one master may have several addresses."""
        is_permuted = self.addresses != other.addresses and sorted(self.addresses) == sorted(other.addresses)
        return (self.count, self.index) == (other.count, other.index) and not is_permuted

    @property
    def text(self) -> str:
        """The list, for error messages."""
        if not self.addresses:
            return "the address of this master alone"
        return f'"{",".join(self.addresses)}" (this master is number {self.index + 1} of {self.count})'


class CommonList:
    """The list of masters that the peers of a run were given, as the master knows it: the list of the first peer.

    Attributes:
        given: the list; None as long as no peer has named one.
    """

    def __init__(self) -> None:
        self.given: GivenList | None = None
        self._named_ns = 0  # When a peer last named it.

    def note(self, hello: Hello, now_ns: int) -> None:
        """A peer that was given the common list takes part, or waits to."""
        self._named_ns = now_ns
        self.given = self.given or GivenList(hello.masters, hello.master_index)

    def forget_if_old(self, now_ns: int) -> None:
        """Forgets the list if none of the peers that named it may be left."""
        if now_ns - self._named_ns > limits.RUN_MEMORY_NS:
            self.given = None

    def difference(self, hello: Hello) -> str:
        """Why a peer with another list cannot take part. "" if it was given the same list."""
        theirs = GivenList(hello.masters, hello.master_index)
        if self.given is None or self.given.may_be(theirs):
            return ""
        return (
            f"this peer was given {theirs.text}, the others of the run {self.given.text}; "
            "all peers need the same list of masters in the same order"
        )
