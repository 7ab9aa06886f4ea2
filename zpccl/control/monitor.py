"""Events of ZeroMQ's socket monitors.

pyzmq has a function for this, but it makes an enum member of each value that it meets, and enums keep their members for
ever. The value of a failed dial is a random number, so a peer that waits for its master would grow by 700 bytes with
each dial.
"""

from __future__ import annotations

import struct

import zmq

_EVENT = struct.Struct("=Hi")
"""Kind and value (zmq_socket_monitor(3))."""


def take_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Takes the next event of a monitor, without waiting.

    Returns:
        Its kind (`zmq.EVENT_...`), and its value: a descriptor, or an error number.

    Raises:
        zmq.Again: there is none.
    """
    event, _ = monitor.recv_multipart(zmq.NOBLOCK)
    kind, value = _EVENT.unpack(event)
    return kind, value
