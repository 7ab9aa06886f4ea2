"""How many connections a link gets where the user names no number: chosen once, when the first one is connected.

A connection has so many bytes under way at most, by the kernel's limits and by what losses leave of its window. So
what it carries falls as the round trip grows, and only more connections make up for it; near by, more bring nothing.
How many more follows from what a lost packet does to the window: a loss-based congestion control (CUBIC, Reno) takes
each for a full path and cuts its window; BBR does not, and more connections only fill the queue of its path.
"""

from __future__ import annotations

import socket
import struct

from zpccl import limits

_ROUND_TRIP = struct.Struct("=68xI")  # tcp_info.tcpi_rtt of linux/tcp.h, in microseconds.
_NAME_BYTES_MAX = 16  # TCP_CA_NAME_MAX of net/tcp.h.


def connections_for(round_trip_ns: int, congestion_control: str) -> int:
    """Connections of a link.

    Args:
        round_trip_ns: of the path, unloaded; 0 if it is not known.
        congestion_control: the kernel's name for it; "" if it is not known.
    """
    if round_trip_ns < limits.LINK_FAR_ROUND_TRIP_NS:
        return limits.LINK_CONNECTIONS_DEFAULT
    is_bbr = congestion_control.startswith("bbr")  # Later versions may be called bbr2, bbr3.
    return limits.LINK_CONNECTIONS_FAR_BBR_DEFAULT if is_bbr else limits.LINK_CONNECTIONS_FAR_DEFAULT


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


def congestion_control(connection: socket.socket) -> str:
    """The kernel's name for what a connection uses, such as "cubic" or "bbr": the host's default, or its route's."""
    try:
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES_MAX)
    except OSError:
        return ""
    return name.partition(b"\0")[0].decode("ascii", "replace")
