"""Which security mechanism a ZeroMQ server speaks: the first half of a ZMTP 3 greeting (rfc.zeromq.org/spec/23).

libzmq tells a client whose handshake failed that its connection broke, but in general not why: a server that wants
another mechanism may close before its own greeting is out. So the client asks again, with a connection that stops
after the version: to that every server answers with its whole greeting.
"""

from __future__ import annotations

import asyncio

_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_VERSION = b"\x03\x00"
_MECHANISM = slice(12, 32)
_GREETING_BYTES = 64


async def mechanism_of(host: str, port: int) -> str:
    """The name of the mechanism, like "NULL" or "CURVE"; "" of a server that does not speak ZMTP 3.

    Raises:
        OSError: it cannot be reached, or closes the connection.
    """
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_SIGNATURE + _VERSION)
        greeting = await reader.readexactly(_GREETING_BYTES)
    except asyncio.IncompleteReadError:
        return ""
    finally:
        writer.close()
    if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
        return ""
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", errors="replace")
