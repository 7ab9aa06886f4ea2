"""Proxies in front of a master. They add latency, break connections, or refuse all connections."""

from __future__ import annotations

import asyncio
import threading

READ_BYTES = 1 << 16


class FarPath:
    """A local port that forwards to a master with added latency. Its thread owns all sockets.

    Args:
        address: address of the master, "host:port".
        round_trip_s: added round-trip time in seconds.

    Attributes:
        connection_count: number of connections to the master so far.
    """

    def __init__(self, address: str, round_trip_s: float = 0.0) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._one_way_s = round_trip_s / 2
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.connection_count = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Breaks all connections."""
        self._call(self._break())

    def cut(self) -> None:
        """Breaks all connections, and each new one until `heal()`."""
        self._is_cut = True
        self.reset()

    def heal(self) -> None:
        """Lets connections through again."""
        self._is_cut = False

    def close(self) -> None:
        """Ends the thread."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: object) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()  # type: ignore[arg-type]

    async def _break(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _end(self) -> None:
        self._server.close()
        await self._break()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        await asyncio.sleep(2 * self._one_way_s)  # The time of a SYN and its acknowledgement.
        if self._is_cut:
            return writer.close()
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return writer.close()
        self._writers.add(far_writer)
        self.connection_count += 1
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        return None

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b"-"
        while data:
            try:
                data = await reader.read(READ_BYTES)
            except OSError:
                data = b""
            self._loop.call_later(self._one_way_s, self._deliver, writer, data)

    def _deliver(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if writer in self._writers and data:
            writer.write(data)
        elif not data:
            self._writers.discard(writer)
            writer.close()
