"""How many connections a link begins with where the user names no number: by the round trip of its first one.

A connection has so many bytes under way at most, by the kernel's limits and by what losses leave of its window. So
what it carries falls as the round trip grows, and only more connections make up for it; near by, more bring nothing.
Whether still more help is found out by what transfers measure (link_growth.py).
"""

from __future__ import annotations

import math
import socket
import struct

from zpccl import limits

_ROUND_TRIP = struct.Struct("=68xI")  # tcp_info.tcpi_rtt of linux/tcp.h, in microseconds.


def connections_for(round_trip_ns: int) -> int:
    """Connections that carry LINK_WANTED_BITS_PER_SECOND over a path, within the bounds for a choice of our own.

    Args:
        round_trip_ns: of the path, unloaded; 0 if it is not known.
    """
    under_way_bytes = limits.LINK_WANTED_BITS_PER_SECOND / 8 * round_trip_ns / limits.SECOND
    wanted = math.ceil(under_way_bytes / limits.CONNECTION_UNDER_WAY_BYTES)
    return min(max(wanted, limits.LINK_CONNECTIONS_DEFAULT), limits.LINK_CONNECTIONS_FAR_MAX)


def round_trip_ns(connection: socket.socket) -> int:
    """What TCP measured when it was connected, free of lost packets that were sent again; 0 if nothing."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    except OSError:
        return 0
    if len(info) < _ROUND_TRIP.size:
        return 0
    (microseconds,) = _ROUND_TRIP.unpack(info)
    return int(microseconds) * 1000


def far_round_trip_ns(connection: socket.socket) -> int:
    """The same of a path to another host; 0 if no network lies between both ends, which have the same address then."""
    try:
        is_near = connection.getsockname()[0] == connection.getpeername()[0]
    except OSError:
        return 0
    return 0 if is_near else round_trip_ns(connection)
