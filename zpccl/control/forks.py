"""A forked child, such as a worker of a DataLoader, closes its copies of the parent's connections and listeners.

A connection ends when all its copies are closed. If a child kept one open, the other end would not notice that the
parent has died until heartbeats are missing. The child closes its copies, which sends nothing; a shutdown would end the
parent's connection. The sockets of open links belong to the engine, which does the same for them (native/engine.c).
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TypeVar

from zpccl.engine.living import Living


class Descriptor:
    """A descriptor that libzmq owns and may close at any moment; its number may then belong to another file."""

    def __init__(self, number: int) -> None:
        self._number, self._inode = number, _inode(number)

    def detach(self) -> int:
        """Returns the descriptor, once, if it is still the same file; otherwise -1."""
        number, self._number = self._number, -1
        return number if self._inode is not None and _inode(number) == self._inode else -1


def _inode(number: int) -> tuple[int, int] | None:
    """The device and the inode of an open file, which identify it; None if it is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


_T = TypeVar("_T", Descriptor, socket.socket)
_open: Living[Descriptor | socket.socket] = Living()


def closed_in_children(source: _T) -> _T:
    """Marks a socket or descriptor to be closed in each child that is forked while it is open. Returns it."""
    _open.add(source)
    return source


def _close_all() -> None:
    for source in _open.all():
        descriptor = source.detach()
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # The engine has taken it over and has closed it in this child.
                os.close(descriptor)


os.register_at_fork(after_in_child=_close_all)
