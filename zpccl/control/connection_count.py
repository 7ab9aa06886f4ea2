"""The congestion control of far connections, and the default number of connections of a link.

Each end of a far connection asks the kernel for BBR, for this socket alone. If the kernel refuses, the system's setting
stays. The number of connections is chosen once, when the first one is up; how many of them are used depends on the rate
that the path has shown.

The congestion window of a connection is bounded by the kernel's buffer limits and by packet loss. So its throughput
falls as the round-trip time grows, and more connections make up for that; on a short path they gain nothing. How many
are useful depends on the congestion control: a loss-based one (CUBIC, Reno) cuts the window at each lost packet; BBR
does not, and more connections would only fill the queue of the bottleneck.
"""

from __future__ import annotations

import socket
import struct

from zpccl import limits
from zpccl.limits import SECOND, US
from zpccl.protocol.messages import PathSample
from zpccl.protocol.network import connections_in_use

_ROUND_TRIP = struct.Struct("=68xI")  # tcp_info.tcpi_rtt of linux/tcp.h, in microseconds.
_NAME_BYTES_MAX = 16  # TCP_CA_NAME_MAX of net/tcp.h.


def connections_for(round_trip_ns: int, congestion_control: str) -> int:
    """The default number of connections of a link.

    Args:
        round_trip_ns: of the unloaded path; 0 if unknown.
        congestion_control: the kernel's name for it; "" if unknown.
    """
    if round_trip_ns < limits.LINK_FAR_ROUND_TRIP_NS:
        return limits.LINK_CONNECTIONS_DEFAULT
    is_bbr = _is_bbr(congestion_control)
    return limits.LINK_CONNECTIONS_FAR_BBR_DEFAULT if is_bbr else limits.LINK_CONNECTIONS_FAR_DEFAULT


def places_for(count: int) -> int:
    """The greatest number of connections that a link may get, if it was opened with `count`."""
    return limits.LINK_CONNECTIONS_MAX if count == limits.LINK_CONNECTIONS_FAR_DEFAULT else count


def senders_for(path: PathSample, queued_us: int, used: int, count: int, congestion_control: str) -> int:
    """The number of connections of a link that take frames from now on, such that each has enough data in flight.

    No congestion control sends less than a few segments a round trip, and BBR remembers for ten round trips how much
    bandwidth was free. So many connections overflow the queue of a slow path. The number grows at once. It falls to a
    quarter at most, and only if the path was the limit for many round trips; otherwise the path may carry more.

    The result exceeds the number that the link has if all of them are limited, but hardly anything waits in the queues
    of the path: then losses or kernel buffers bound the data in flight of each connection, and the path has room.

    Args:
        path: measurement of the path.
        queued_us: how long packets wait in its queues.
        used: number of connections that have taken frames until now.
        count: number of connections with which the link was opened.
        congestion_control: the kernel's name for it; "" if unknown.
    """
    rate = path.sent_bytes * SECOND // (path.busy_us * US)
    is_bbr = _is_bbr(congestion_control)
    window = limits.LINK_SENDER_WINDOW_BBR_BYTES if is_bbr else limits.LINK_SENDER_WINDOW_BYTES
    is_sure = path.is_limited and path.busy_us >= limits.LINK_SENDER_ROUND_TRIP_COUNT * path.round_trip_us
    has_room = is_sure and used == count and 100 * queued_us <= limits.LINK_ROOM_QUEUE_PERCENT_MAX * path.round_trip_us
    if has_room or used > count:  # Connections added since stay: with them, the queues may be full.
        count = places_for(count)
    wanted = min(count, connections_in_use(rate, path.round_trip_us * US, window))
    if wanted >= used:
        return wanted
    return max(wanted, used // 4) if is_sure else used


def use_bbr(connection: socket.socket) -> bool:
    """Asks for BBR if the connection is far. False: it is far, and the kernel does not let this process use BBR."""
    if round_trip_ns(connection) < limits.LINK_FAR_ROUND_TRIP_NS or _is_bbr(congestion_control(connection)):
        return True
    return ask_for_bbr(connection)


def ask_for_bbr(connection: socket.socket) -> bool:
    """Asks for BBR. False if the kernel does not let this process use it."""
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:
        return False
    return True


def _is_bbr(name: str) -> bool:
    return name.startswith("bbr")  # Later versions may be called bbr2, bbr3.


def round_trip_ns(connection: socket.socket) -> int:
    """The smoothed round-trip time of TCP; 0 if unknown. TCP takes no sample from retransmitted packets."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
    except OSError:
        return 0
    if len(info) < _ROUND_TRIP.size:
        return 0
    (microseconds,) = _ROUND_TRIP.unpack(info)
    return int(microseconds) * 1000


def congestion_control(connection: socket.socket) -> str:
    """The congestion control of a connection, such as "cubic" or "bbr"; "" if unknown."""
    try:
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES_MAX)
    except OSError:
        return ""
    return name.partition(b"\0")[0].decode("ascii", "replace")
