"""Estimates how long messages between processes take on this machine, from round trips between two processes.

Handling a message in a service takes longer than such an echo. It was measured once, on the machine whose
round trips are below. Its time here is scaled by the ratio of the round trips.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import grpc

from outrider.process import end_with_parent

MESSAGE = 0.000095
"""Seconds of processor time to send or to receive a message. The orchestrator's process took 0.19 ms to pass
on a verdict, which is both, with 32 sessions and no drafts."""
REWARM = 0.0005
"""Additional seconds of the first message after a pause: with one session, a verdict took 0.84 ms."""
ECHO = 0.00014
"""Seconds of a round trip on that machine."""
RESTED_ECHO = 0.00055
"""Seconds of a round trip after a pause of 20 ms, on that machine."""
PAUSE_SECONDS = 0.02
ROUNDS = 600
RESTED_ROUNDS = 50
CONTENT = b"x" * 200
"""About the size of a verdict."""
METHOD = "/outrider.Echo/Echo"


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Times of messages in seconds."""

    message: float
    """Time to send or to receive a message."""
    rewarm: float
    """Additional time of the first message after a pause."""


def measure_messages() -> MessageTimes:
    """Start an echo in another process and ask it for about two seconds."""
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    # In a session of its own, Ctrl-C on the terminal does not reach it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            echo, rested = asyncio.run(_round_trips(process.stdout.readline().strip()))
        finally:
            process.kill()
    return scaled(echo, rested)


def scaled(echo: float, rested: float) -> MessageTimes:
    """The times on a machine with these round trips in seconds, without pauses (`echo`) and after one."""
    pause = max(rested - echo, 0.0) / (RESTED_ECHO - ECHO)
    return MessageTimes(MESSAGE * echo / ECHO, REWARM * pause)


async def _round_trips(endpoint: str) -> tuple[float, float]:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        call: Any = channel.stream_stream(METHOD)()
        await _median_trip(call, ROUNDS, 0.0)  # warm-up
        found = await _median_trip(call, ROUNDS, 0.0), await _median_trip(call, RESTED_ROUNDS, PAUSE_SECONDS)
        call.cancel()
    return found


async def _median_trip(call: Any, rounds: int, pause: float) -> float:
    seconds: list[float] = []
    for _ in range(rounds):
        await asyncio.sleep(pause)
        start = time.perf_counter()
        await call.write(CONTENT)
        await call.read()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


class _Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: object) -> Any:
        return grpc.stream_stream_rpc_method_handler(_echo)


async def _echo(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _serve(say: Callable[[str], None]) -> None:
    server = grpc.aio.server(handlers=[_Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(f"127.0.0.1:{port}")
    await server.wait_for_termination()


def main() -> None:
    """Run the echo: print its endpoint, and serve on the last core until it or its parent is killed."""
    end_with_parent(int(sys.argv[1]))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    asyncio.run(_serve(lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
