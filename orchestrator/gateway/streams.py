"""Merges several requests of the client into one stream of events, and ends work when its caller goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from prometheus_client import Counter

from outrider.client import Event

WAITING_EVENTS = 64
"""Most events of a request that are read and not yet written. Beyond that the orchestrator has to wait."""

Open = Callable[[], AsyncGenerator[Event, None]]


async def merged(streams: Sequence[Open], per_stream: int) -> AsyncGenerator[Event, None]:
    """The events of all streams as they come; each stream's indices follow those of the one before.

    Raises:
        OutriderError: the error of the first stream that fails; the others are closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]()) as events:
            async for event in events:
                yield event
        return
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(WAITING_EVENTS)
    tasks = [asyncio.create_task(_feed(queue, one, i * per_stream)) for i, one in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            match await queue.get():
                case None:
                    running -= 1
                case BaseException() as error:
                    raise error
                case event:
                    yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def while_connected(
    receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, None], aborted: Counter
) -> None:
    """Do the work; when the caller closes the connection, cancel it and count that.

    Raises:
        Exception: what the work raises.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        else:
            aborted.inc()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})


async def _feed(queue: asyncio.Queue[Event | BaseException | None], open_stream: Open, first: int) -> None:
    try:
        async with aclosing(open_stream()) as events:
            async for event in events:
                await queue.put(replace(event, index=first + event.index))
    except Exception as error:  # any error is handed to the reader
        await queue.put(error)
    else:
        await queue.put(None)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
