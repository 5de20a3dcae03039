"""A TCP proxy that simulates a network: it delays, cuts and freezes, and never limits throughput.

    python -m scripts.proxy --to 127.0.0.1:7701

Every byte is passed on half a round trip after its arrival, in both directions. The first line on standard
output is {"event": "ready", "endpoint": "host:port"}. A line {"round_trip_ms": 1} on standard input sets the
delay from now on, which is 0 at first, and is answered by {"event": "done"}. The end of standard input ends
the proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import selectors
import socket
import sys

CHUNK_BYTES = 1 << 16
MAX_CHUNKS = 4096
"""Most chunks on the way in one direction: 256 MiB, which allows 50 GB/s at a round trip of 10 ms."""


class Proxy:
    """Forwards connections to `host:port`. All methods belong to the event loop."""

    def __init__(self, upstream: str, round_trip: float = 0.0) -> None:
        self.round_trip = round_trip
        """Seconds; may be changed at any time. Bytes that are on their way keep their delay and order."""
        self.endpoint = ""
        self.redirect(upstream)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen (port 0 picks a free one); returns the endpoint."""
        self._server = await asyncio.start_server(self._accept, host, port)
        self.endpoint = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self.endpoint

    def redirect(self, upstream: str) -> None:
        """Send new connections to another upstream; existing ones stay where they are."""
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)

    def freeze(self) -> None:
        """Hold back all bytes in both directions, those of new connections too."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Pass on what was held back, and everything after it."""
        self._flowing.set()

    def cut(self) -> None:
        """End all connections with a reset; what was on its way is lost."""
        for connection in self._connections:
            connection.cancel()

    async def close(self) -> None:
        """Cut and stop listening."""
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._join(reader, writer)
        except (asyncio.CancelledError, OSError):
            pass  # cut, or nobody listens upstream
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until both directions have ended or one has broken."""
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        try:
            for one in (writer, up_writer):
                one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, up_writer))
                group.create_task(self._pump(up_reader, writer))
        except* OSError:
            pass  # one side has gone; `abort` tells the other
        finally:
            up_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction: bytes are written half a round trip after they were read; an empty chunk is
        the end."""
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        loop = asyncio.get_running_loop()

        async def take() -> None:
            data = b"-"
            while data:
                data = await reader.read(CHUNK_BYTES)
                await line.put((loop.time() + self.round_trip / 2, data))

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            group.create_task(self._give(line, writer))

    async def _give(self, line: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await line.get()
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            await self._flowing.wait()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose sleeps are exact to about 0.1 ms; epoll would round them up to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def serve(upstream: str) -> None:
    """Run until standard input ends."""
    proxy = Proxy(upstream)
    print(json.dumps({"event": "ready", "endpoint": await proxy.start()}), flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    async for line in commands:
        proxy.round_trip = json.loads(line)["round_trip_ms"] / 1e3
        print(json.dumps({"event": "done"}), flush=True)
    await proxy.close()


def main() -> None:
    """Parse the flags and serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="where connections go")
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(serve(parser.parse_args().to))


if __name__ == "__main__":
    main()
