"""The clients: one connection per request, as behind a balancer, and each in its own manner.

What a reader gets is compared with the run without faults, token by token, however often it had to come back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.v1 import generation_pb2, generation_pb2_grpc
from scripts.proxy import Proxy
from tests.faults.harness.plan import Ask, Case, Manner
from tests.faults.harness.system import RETURN_SECONDS, System
from tests.integration.client import details, request

ASK_SECONDS = 2 * RETURN_SECONDS
"""Deadline of a request, returns and retries included."""
COME_BACK_SECONDS = 0.1
GONE_SECONDS = 60.0
"""Longer than the servers' keepalive takes to notice."""
MODES = {
    "AUTO": generation_pb2.MODE_AUTO,
    "SEQUENTIAL": generation_pb2.MODE_SEQUENTIAL,
    "OFF": generation_pb2.MODE_OFF,
}
LEFT_OPEN = {
    Manner.CANCEL: (grpc.StatusCode.CANCELLED,),
    Manner.VANISH: (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN),
    Manner.DISAPPEAR: (grpc.StatusCode.CANCELLED,),
    Manner.HURRY: (grpc.StatusCode.DEADLINE_EXCEEDED,),
}
"""How a call may end for a client that left."""
CUT_OFF = (*LEFT_OPEN[Manner.VANISH], grpc.StatusCode.CANCELLED)
"""How a call may end whose connection or server went away; the last, one that came while the server ended.
With an orchestrator in order, none of them may come."""
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


@dataclass(frozen=True, slots=True)
class Expected:
    """A case's tokens and text without faults."""

    tokens: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """One request that was read to its end without pauses of the reader."""

    at: float
    first_token_seconds: float
    seconds: float
    longest_silence_seconds: float
    """Between two tokens, or before the first; retries and returns included."""
    tokens: int
    returns: int


@dataclass(slots=True)
class Journal:
    """What happened, for the report and for those who wait for the next token."""

    begun: int = 0
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    finished: list[Finished] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    returns: int = 0
    """Readers that came back with their tokens."""
    refusals: int = 0
    """RESOURCE_EXHAUSTED with a time to come back after."""
    draft_losses: int = 0
    verify_losses: int = 0
    ended: bool = False
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        """A request begins."""
        self.begun += 1
        self._notify()

    def token(self) -> None:
        """Some client got a token."""
        self.tokens += 1
        self._notify()

    def end(self) -> None:
        """The load is over: perhaps no more tokens come."""
        self.ended = True
        self._notify()

    async def change(self) -> None:
        """Until the next token or request."""
        await self._change.wait()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


@dataclass(slots=True)
class _Reading:
    """What one client has got of one continuation."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    complete: generation_pb2.Complete | None = None
    chunks: int = 0
    began: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    last_at: float = 0.0
    longest_silence: float = 0.0

    def take(self, response: generation_pb2.GenerateResponse) -> bool:
        """Add a response; whether it brought tokens."""
        kind = response.WhichOneof("event")
        if kind == "complete":
            self.complete = response.complete
        if kind != "chunk":
            return False
        self.tokens += response.chunk.token_ids
        self.text += response.chunk.text
        self.chunks += 1
        now = time.monotonic()
        self.longest_silence = max(self.longest_silence, now - (self.last_at or self.began))
        self.first_at, self.last_at = self.first_at or now, now
        return bool(response.chunk.token_ids)


class Callers:
    """Carries out requests and writes down what came of them."""

    def __init__(self, system: System, cases: Sequence[Case], journal: Journal) -> None:
        self.expected: dict[int, Expected] = {}
        self._system = system
        self._cases = cases
        self._journal = journal
        self._gone: deque[tuple[float, Proxy]] = deque()
        """Ways of clients that disappeared, and when: they stay frozen until keepalive must have told."""

    async def learn(self, tokens: int, at_once: int) -> None:
        """The run without faults: every case once, to its end."""
        room = asyncio.Semaphore(at_once)

        async def one(case: Case) -> None:
            async with room:
                reading = _Reading()
                await self._attempt(
                    self._message(case, tokens, "AUTO", "", []), reading, self._system.endpoint
                )
                assert len(reading.tokens) == tokens
                self.expected[case.number] = Expected(reading.tokens, reading.text)

        await asyncio.gather(*map(one, self._cases))

    async def perform(self, ask: Ask) -> None:
        """One request from its beginning to its end, whatever happens to it."""
        self._journal.begin()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                match ask.manner:
                    case Manner.READ | Manner.SLOW:
                        outcome = await self._read(ask, self._case(ask))
                    case Manner.TURNS:
                        outcome = await self._converse(ask)
                    case _:
                        outcome = await self._leave(ask)
        except TimeoutError:
            outcome = "hung"
            self._violation(ask, f"not over after {ASK_SECONDS:g} s")
        except Exception as error:  # a harness that fails is a finding too
            outcome = "failed"
            self._violation(ask, f"{type(error).__name__}: {error}")
        self._journal.outcomes[f"{ask.manner}: {outcome}"] += 1

    async def close(self) -> None:
        """Let go of the clients that disappeared."""
        await self._forget(time.monotonic())

    async def _forget(self, before: float) -> None:
        """Close the ways of clients that disappeared before a moment."""
        while self._gone and self._gone[0][0] <= before:
            await self._gone.popleft()[1].close()

    def _case(self, ask: Ask) -> Case:
        return self._cases[ask.case]

    async def _read(self, ask: Ask, case: Case, **fields: Any) -> str:
        """Read to the end; cut off, come back with the tokens at hand; refused, come back when told."""
        returns, reading = 0, _Reading()
        while reading.complete is None:
            message = self._message(case, ask.tokens, ask.mode, ask.attack, reading.tokens, **fields)
            attempted = time.monotonic()
            try:
                pause = ask.pause if ask.manner is Manner.SLOW else 0.0
                await self._attempt(message, reading, self._system.endpoint, pause)
            except grpc.aio.AioRpcError as error:
                wait = self._come_back_after(error, attempted)
                if wait is None:
                    self._violation(ask, f"lost: {error.code().name} {error.details()!r}")
                    return "lost"
                returns += 1
                await asyncio.sleep(wait)
        self._compare(ask, case, reading)
        if ask.manner is Manner.SLOW:
            return "finished"  # its time is its own
        now = time.monotonic()
        self._journal.finished.append(
            Finished(
                at=now,
                first_token_seconds=reading.first_at - reading.began,
                seconds=now - reading.began,
                longest_silence_seconds=reading.longest_silence,
                tokens=len(reading.tokens),
                returns=returns,
            )
        )
        return "finished"

    async def _converse(self, ask: Ask) -> str:
        """Half of a case's tokens as one turn, the rest as the next, on the session of the first."""
        case, half = self._case(ask), ask.tokens // 2
        expected = self.expected[case.number].tokens
        if half == 0:
            return await self._read(ask, case)
        message = self._message(case, half, ask.mode, ask.attack, [], keep_session=True)
        first = await self._repeat(ask, message, expected[:half])
        if first is None or first.complete is None:
            return "lost"
        if ask.patience < 2:
            return "kept"  # and never asked for again: its lease has to end
        turn = Case(number=case.number, prompt=(*case.prompt, *first.tokens), sampling={}, seed=case.seed)
        session = first.complete.session
        message = self._message(turn, ask.tokens - half, ask.mode, ask.attack, [], session=session)
        second = await self._repeat(ask, message, expected[half : ask.tokens])
        return "lost" if second is None else "finished"

    async def _repeat(
        self, ask: Ask, message: generation_pb2.GenerateRequest, expected: list[int]
    ) -> _Reading | None:
        """A call that is made again from its beginning when it is cut off or refused; None: it was lost."""
        while True:
            began, reading = time.monotonic(), _Reading()
            try:
                await self._attempt(message, reading, self._system.endpoint)
            except grpc.aio.AioRpcError as error:
                wait = self._come_back_after(error, began)
                if wait is None:
                    self._violation(ask, f"lost: {error.code().name} {error.details()!r}")
                    return None
                await asyncio.sleep(wait)
                continue
            if reading.tokens != expected:
                self._violation(ask, f"wrong tokens: {_difference(expected, reading.tokens)}")
            return reading

    async def _leave(self, ask: Ask) -> str:
        """Go away in the middle; what came until then has to be right."""
        case, reading, began = self._case(ask), _Reading(), time.monotonic()
        message = self._message(case, ask.tokens, ask.mode, ask.attack, [])
        proxy = Proxy(self._system.endpoint)
        await proxy.start()
        try:
            await self._attempt(message, reading, proxy.endpoint, leave=ask, way=proxy)
            outcome = "left" if reading.complete is None else "finished"
        except grpc.aio.AioRpcError as error:
            outcome = "left"
            left = reading.chunks >= ask.patience or ask.manner is Manner.HURRY
            allowed = error.code() in LEFT_OPEN[ask.manner] and left
            if not allowed and self._come_back_after(error, began) is None:
                self._violation(ask, f"unexpected: {error.code().name} {error.details()!r}")
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            outcome = "left"
        finally:
            if ask.manner is Manner.DISAPPEAR:
                self._gone.append((time.monotonic(), proxy))
                await self._forget(time.monotonic() - GONE_SECONDS)
            else:
                await proxy.close()
        expected = self.expected[case.number].tokens[: len(reading.tokens)]
        if reading.tokens != expected:
            self._violation(ask, f"wrong tokens: {_difference(expected, reading.tokens)}")
        return outcome

    async def _attempt(
        self,
        message: generation_pb2.GenerateRequest,
        reading: _Reading,
        endpoint: str,
        pause: float = 0.0,
        leave: Ask | None = None,
        way: Proxy | None = None,
    ) -> None:
        """One call on a connection of its own."""
        hurried = leave is not None and leave.manner is Manner.HURRY
        timeout = leave.pause if hurried else ASK_SECONDS
        async with _stub(endpoint) as stub:
            call = stub.Generate(message, timeout=timeout)
            async for response in call:
                if reading.take(response):
                    self._journal.token()
                if pause:
                    await asyncio.sleep(pause)
                if leave is not None and reading.chunks >= leave.patience and way is not None:
                    self._go(leave, call, way)
                    if leave.manner is Manner.DISAPPEAR:
                        return
        if reading.complete is not None:
            statistics = reading.complete.speculation
            self._journal.draft_losses += statistics.draft_losses
            self._journal.verify_losses += statistics.verify_losses

    def _go(self, ask: Ask, call: Any, way: Proxy) -> None:
        match ask.manner:
            case Manner.CANCEL:
                call.cancel()
            case Manner.VANISH:
                way.cut()
            case Manner.DISAPPEAR:
                way.freeze()

    def _come_back_after(self, error: grpc.aio.AioRpcError, began: float) -> float | None:
        """Seconds after which a caller tries again; None: it must not have been sent away."""
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            retry = details(error).get("RetryInfo")
            if retry is None:
                return None
            self._journal.refusals += 1
            return max(0.05, min(retry.retry_delay.ToNanoseconds() / 1e9, 2.0))
        if error.code() in CUT_OFF and self._system.disturbed(began, time.monotonic()):
            self._journal.returns += 1
            return COME_BACK_SECONDS
        return None

    def _compare(self, ask: Ask, case: Case, reading: _Reading) -> None:
        expected = self.expected[case.number]
        if reading.tokens != expected.tokens[: ask.tokens]:
            self._violation(ask, f"wrong tokens: {_difference(expected.tokens, reading.tokens)}")
        elif len(reading.tokens) == len(expected.tokens) and reading.text != expected.text:
            self._violation(ask, f"wrong text: {reading.text!r} instead of {expected.text!r}")

    def _violation(self, ask: Ask, what: str) -> None:
        self._journal.violations.append(
            f"request {ask.number} (case {ask.case}, {ask.manner}, {ask.mode}): {what}"
        )

    def _message(
        self, case: Case, tokens: int, mode: str, task: str, resumed: list[int], **fields: Any
    ) -> generation_pb2.GenerateRequest:
        return request(
            case.prompt,
            mode=MODES[mode],
            max_tokens=tokens,
            seed=case.seed,
            task=task,
            fields={"resume_token_ids": list(resumed), **fields},
            **case.sampling,
        )


@asynccontextmanager
async def _stub(endpoint: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(endpoint, options=OPTIONS) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def _difference(expected: Sequence[int], actual: Sequence[int]) -> str:
    pairs = zip(expected, actual, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
    return (
        f"at {at} of {len(actual)}: expected {list(expected[at : at + 4])}, got {list(actual[at : at + 4])}"
    )
