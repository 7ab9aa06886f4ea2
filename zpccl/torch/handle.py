"""Handles: how ranks find each other without a launcher, to form a new configuration.

torch asks each rank for its handle. The program gives the handles of all ranks that will take part to each of them, and
torch passes these to `reconfigure`. A handle of zpccl is the address of a store that its rank serves as long as its
process group lives, and a secret of that rank. Ranks meet in the store of the first one, under a new number each time.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zpccl.control.addresses import format_address, listen_on_first_free, parse_address
from zpccl.errors import InvalidArgument, OperationTimeout
from zpccl.torch.rendezvous import claimed, loopback_or_all, own_host

_SECRET_BYTES = 8
_ANY_PORT = range(1)


class Handle:
    """The handle of this rank, and the store behind it.

    Attributes:
        text: the handle that other ranks get.
    """

    def __init__(self) -> None:
        host = own_host(None, is_default=False)
        listener = listen_on_first_free(loopback_or_all(host), _ANY_PORT)
        port = listener.getsockname()[1]
        self._secret = secrets.token_hex(_SECRET_BYTES)
        self._store: Any = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.text = f"{format_address(host, port)}/{self._secret}"

    def store(self, number: int, first: str, timeout: timedelta) -> Any:
        """The store in which the ranks of a configuration meet.

        Args:
            number: number of the configuration.
            first: handle of its first rank.
            timeout: for every request to the store.

        Raises:
            InvalidArgument: `first` is no handle.
            OperationTimeout: its rank does not answer.
            InvalidUsage: this rank has used this number with this first rank before.
        """
        address, _, secret = first.partition("/")
        if first == self.text:
            store = self._store
            store.set_timeout(timeout)
        else:
            host, port = parse_address(address, what="handle")
            if not secret:
                raise InvalidArgument(f"{first!r} is not a handle of zpccl")
            try:
                store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            except RuntimeError as error:
                raise OperationTimeout(f"the rank at {address} has not answered within {timeout}: {error}") from error
        return claimed(dist.PrefixStore(f"{secret}/{number}", store), self._secret)
