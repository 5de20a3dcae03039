"""Events as they go out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from orchestrator.gateway.sending import send_stream, server_sent


def test_an_event_is_one_line_for_every_reader() -> None:
    """Whatever the text has: some readers split at all line ends of Unicode, not at the format's alone."""
    text = "".join(map(chr, range(0x20))) + "a\x7f\x85\u2028\u2029\u4e2d\U0001f600"
    line, *rest = server_sent({"text": text}).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


def test_a_stream_that_is_cut_off_says_so() -> None:
    """A client does not have to guess whether the text is whole."""

    async def endless() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    async def scenario() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        sending = asyncio.create_task(send_stream(send, endless()))
        while len(sent) < 2:  # noqa: ASYNC110 - no one event says it
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        return sent

    last = asyncio.run(scenario())[-1]
    assert "shutting down" in last["body"].decode()
    assert not last["more_body"]
