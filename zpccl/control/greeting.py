"""Asks a ZeroMQ server for its security mechanism, with the start of a ZMTP 3 greeting (rfc.zeromq.org/spec/23).

libzmq reports to a client that the handshake failed, but mostly not why: a server that requires another mechanism may
close the connection before it has sent its greeting. So the client opens a connection on which it sends nothing after
the version; every server answers with its complete greeting.
"""

from __future__ import annotations

import asyncio

_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_VERSION = b"\x03\x00"
_MECHANISM = slice(12, 32)
_GREETING_BYTES = 64


async def mechanism_of(host: str, port: int) -> str:
    """The name of the mechanism, like "NULL" or "CURVE"; "" if the server does not speak ZMTP 3.

    Raises:
        OSError: the server cannot be reached, or resets the connection.
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
