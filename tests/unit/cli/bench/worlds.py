"""A target that answers by the clock, an event loop whose time is not the world's, and an HTTP server that
says what it is told."""

from __future__ import annotations

import asyncio
import json
import selectors
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, TypeVar

from outrider.cli.bench.generator import Clock
from outrider.cli.bench.outcomes import RequestOutcome
from outrider.cli.bench.target import Ask, Delivered, Ended, Event, Served
from outrider.protocol.errors import OutriderError

_T = TypeVar("_T")
SERVED = Served(address="gRPC here", model="demo", vocabulary=100, eos_token_ids=(0,))


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


class VirtualSelector(selectors.SelectSelector):
    """Never waits: time jumps to when something is due."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now."""
        assert timeout is not None, "everything waits for ever"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time."""

    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self.virtual.now


def run_virtual(main: Callable[[Clock], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine to its end, with a clock of virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        return runner.run(main(Clock(now=loop.time)))


class ScriptedTarget:
    """Delivers after each of the pauses, then ends; `failing` requests end with the error instead."""

    def __init__(self, pauses: Sequence[float], failing: dict[int, OutriderError] | None = None) -> None:
        self.served = SERVED
        self.pauses = pauses
        self.failing = failing or {}
        self.asked: list[Ask] = []
        self.running = self.most_running = 0

    async def stream(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """See `BenchTarget`."""
        self.asked.append(ask)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for pause in self.pauses:
                await asyncio.sleep(pause)
                yield Delivered()
            if ask.index in self.failing:
                raise self.failing[ask.index]
            yield Ended(input_tokens=10, output_tokens=len(self.pauses))
        finally:
            self.running -= 1


def outcome(
    index: int = 0,
    sent: float = 0.0,
    deliveries: Sequence[float] = (1.0, 2.0, 3.0),
    tokens: int = 3,
    error: OutriderError | None = None,
    due: float | None = None,
    **end: Any,
) -> RequestOutcome:
    """A request that ended at its last delivery."""
    return RequestOutcome(
        index=index,
        sent=sent,
        due=due,
        deliveries=tuple(deliveries),
        ended=deliveries[-1] if deliveries else sent,
        end=None if error else Ended(input_tokens=10, output_tokens=tokens, **end),
        error=error,
    )


class FakeOpenAi:
    """An HTTP/1.1 server; each answer is taken from `answers`, the last one again and again."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        """First line, headers by lower-case name, body."""
        self.connections = 0
        self.url = ""

    @asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncGenerator[FakeOpenAi, None]:
        """The server, until the context is left."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((first, headers, json.loads(body or b"null")))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                writer.write(answer)
                if b"connection: close" in answer:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def chunked(*pieces: bytes, status: str = "200 OK") -> bytes:
    """An answer in chunks."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))
    return f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode() + body


def whole(body: Any, status: str = "200 OK", headers: str = "") -> bytes:
    """An answer in one piece."""
    text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n{headers}\r\n".encode() + text


def event(part: Any) -> bytes:
    """A server-sent event."""
    return f"data: {part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)}\n\n".encode()
