"""The path of a link: the addresses of its two ends, and the network interface of this host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from zpccl.control.addresses import format_address, interface_addresses, plain_host
from zpccl.control.connection_count import congestion_control


@dataclass(frozen=True, slots=True)
class LinkEnds:
    """The ends of a link when it was opened.

    Attributes:
        local_address, remote_address: "host:port" of the first connection; "" for a Unix-domain socket.
        interface: the interface of this host with the local address, such as "eth0"; "" if none has it any more.
        connections: number of connections.
        congestion_control: that of the connections, such as "cubic"; "" for Unix-domain sockets.
        is_local: True for Unix-domain sockets, within this host.
    """

    local_address: str
    remote_address: str
    interface: str
    connections: int
    congestion_control: str
    is_local: bool

    def __str__(self) -> str:
        if self.is_local:
            return f"shared memory, {self.connections} Unix-domain sockets"
        way = f"{self.local_address} ({self.interface or 'no interface'}) to {self.remote_address}"
        return f"{way}, {self.connections} connections, {self.congestion_control or 'unknown congestion control'}"


def ends_of(sockets: Sequence[socket.socket]) -> LinkEnds:
    """The ends of the connections of a link.

    Raises:
        OSError: the first one is broken already.
    """
    first = sockets[0]
    if first.family == socket.AF_UNIX:
        return LinkEnds("", "", "", len(sockets), "", is_local=True)
    local, remote = (_host_and_port(address) for address in (first.getsockname(), first.getpeername()))
    interface = interface_of(local[0])
    algorithm = congestion_control(first)
    return LinkEnds(format_address(*local), format_address(*remote), interface, len(sockets), algorithm, is_local=False)


def interface_of(host: str) -> str:
    """The name of the network interface that has an address; "" if none has."""
    plain = host.partition("%")[0]
    return next((name for name, address in interface_addresses() if address == plain), "")


def _host_and_port(address: tuple[str, int]) -> tuple[str, int]:
    return plain_host(address[0]), address[1]
