"""Converts texts to token ids and back: short ones on the event loop, long ones in another process, one at a
time, the shortest first.

The tokenizer's library keeps the interpreter's lock while it encodes, and a chat template is Python: in a
thread, either would stop the event loop for seconds. The queue is bounded in number and bytes; beyond that,
requests are refused. The process is started when it is first needed, and again when it has ended.
"""

from __future__ import annotations

import asyncio
import heapq
import signal
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from orchestrator.text.constraint_check import ConstraintCheck
from orchestrator.text.jobs import Ids, Job, Prompt, too_long
from orchestrator.text.tokenizer import TextTokenizer
from orchestrator.text.tokenizer_process import TokenizerProcess
from outrider.protocol.errors import InternalError, InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
_T = TypeVar("_T")
MAX_WAITING = 256
CONFUSED = "the process that tokenizes long prompts answered with something else"
OVER_BOUNDS_STATUSES = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)
"""Exit statuses of the process for a job that takes more time, memory or stack than it may."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitingJob:
    """A job that waits for its turn."""

    size: int
    number: int
    job: Job
    tokenizer: TextTokenizer
    positions: int
    """Most tokens that a prompt may have. Time and memory for any job go by it."""
    done: asyncio.Future[Found]

    def __lt__(self, other: WaitingJob) -> bool:
        return (self.size, self.number) < (other.size, other.number)

    def is_like(self, other: WaitingJob) -> bool:
        """Whether the outcome is that of another job, as for requests with one constraint."""
        same = self.job == other.job and self.positions == other.positions
        return same and self.tokenizer is other.tokenizer


Found: TypeAlias = tuple[int, ...] | str | bool
Start = Callable[[TextTokenizer], Awaitable[TokenizerProcess]]


class Tokenizing:
    """Converts texts, with a queue before the process. At most `max_bytes` wait, or one larger prompt."""

    def __init__(self, max_bytes: int, start: Start | None = None) -> None:
        self._max_bytes = max_bytes
        self._start = start or TokenizerProcess.start
        self._jobs: list[WaitingJob] = []
        self._bytes = self._number = self.waiting = 0
        self._worker: TokenizerProcess | None = None
        self._working: asyncio.Task[None] | None = None

    async def tokens(
        self, prompt: Prompt, tokenizer: TextTokenizer | None, positions: int
    ) -> tuple[int, ...]:
        """Token ids of a text or conversation, at most `positions`.

        Raises:
            ContextTooLong: there are more than `positions`.
            InvalidRequest: there is no tokenizer, it takes too much time or memory, or the chat template
                refuses it.
            Overloaded: too many jobs wait already.
            Unavailable: the process ended twice, or cannot be started.
        """
        used = _needed(tokenizer, prompt.field)
        if not prompt.is_quick:
            return await self._by_process(prompt, used, positions, tuple)
        tokens = prompt.tokens(used)
        if len(tokens) > positions:
            raise too_long(prompt.field, f"{len(tokens)} tokens", positions)
        return tokens

    async def text(self, ids: Ids, tokenizer: TextTokenizer | None, positions: int) -> str:
        """The text of token ids.

        Raises:
            InvalidRequest: there is no tokenizer, or it takes too much time or memory.
            Overloaded, Unavailable: as above.
        """
        used = _needed(tokenizer, ids.field)
        return await self._by_process(ids, used, positions, str) if not ids.is_quick else ids.text(used)

    async def checked(self, check: ConstraintCheck, tokenizer: TextTokenizer, positions: int) -> bool:
        """Whether the text so far is complete: its constraint allows nothing after it.

        Raises:
            InvalidRequest: the constraint is wrong or too costly, or a generated token does not follow it.
            Overloaded, Unavailable: as above.
        """
        return await self._by_process(check, tokenizer, positions, bool)

    async def _by_process(self, job: Job, tokenizer: TextTokenizer, positions: int, kind: type[_T]) -> _T:
        """Queue a job; return what the process finds, which has to be of this kind."""
        size = job.size
        if self.waiting >= MAX_WAITING or (self._bytes and self._bytes + size > self._max_bytes):
            raise Overloaded(
                f"{self.waiting} texts with {self._bytes} bytes in all wait for their turn; try again later"
            )
        self._bytes += size
        self.waiting += 1
        self._number += 1
        done: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        try:
            found = await self._put(WaitingJob(size, self._number, job, tokenizer, positions, done))
        finally:
            self._bytes -= size
            self.waiting -= 1
        if not isinstance(found, kind):
            raise Unavailable(CONFUSED)
        return found

    async def close(self) -> None:
        """End the process; whatever waits fails."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        await self._end_worker()

    async def _put(self, waiting: WaitingJob) -> Found:
        heapq.heappush(self._jobs, waiting)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        try:
            return await waiting.done
        finally:
            if waiting in self._jobs:  # its caller has gone: do not keep the text until then
                self._jobs.remove(waiting)
                heapq.heapify(self._jobs)

    async def _work(self) -> None:
        """Do jobs until there are none, equal ones together. A job whose caller goes meanwhile is still
        finished."""
        while self._jobs:
            waiting = heapq.heappop(self._jobs)
            if waiting.done.done():
                continue
            try:
                outcome: Found | OutriderError = await self._ask(waiting)
            except OutriderError as error:
                outcome = error
            except asyncio.CancelledError:
                _settle([waiting, *self._jobs], Unavailable("this orchestrator stops"))
                raise
            except Exception as error:  # a bug must not leave callers waiting
                logger.exception("a long prompt could not be tokenized")
                outcome = InternalError(f"the prompt could not be tokenized: {type(error).__name__}")
            _settle([waiting, *filter(waiting.is_like, self._jobs)], outcome)

    async def _ask(self, waiting: WaitingJob) -> Found:
        for _ in range(2):
            worker = await self._worker_for(waiting)
            answer = await worker.ask(waiting.job, waiting.positions)
            status = None
            if answer is None or worker.leaving:
                status = await self._end_worker()
            if answer is not None:
                return _outcome(waiting, answer)
            logger.warning("the process that tokenizes long prompts has ended", status=status)
            if status in OVER_BOUNDS_STATUSES:
                raise InvalidRequest(waiting.job.field, waiting.job.over_bounds)
        raise Unavailable("the process that tokenizes long prompts ended twice; try again")

    async def _worker_for(self, waiting: WaitingJob) -> TokenizerProcess:
        """The process for a job's tokenizer; it is started if necessary."""
        if self._worker is not None and self._worker.tokenizer is not waiting.tokenizer:
            await self._end_worker()
        if self._worker is None:
            self._worker = await self._start(waiting.tokenizer)
        return self._worker

    async def _end_worker(self) -> int | None:
        worker, self._worker = self._worker, None
        return None if worker is None else await worker.end()


def _needed(tokenizer: TextTokenizer | None, field: str) -> TextTokenizer:
    if tokenizer is None:
        raise InvalidRequest(field, "the model came without a tokenizer; put it into the model's folder")
    return tokenizer


def _settle(jobs: list[WaitingJob], outcome: Found | OutriderError) -> None:
    for waiting in jobs:
        if waiting.done.done():
            continue
        if isinstance(outcome, OutriderError):
            waiting.done.set_exception(outcome)
        else:
            waiting.done.set_result(outcome)


def _outcome(waiting: WaitingJob, answer: tuple[str, Any]) -> Found:
    match answer:
        case ("tokens", bytes(data)):
            return tuple(array("I", data))
        case ("text", str(text)):
            return text
        case ("checked", bool(complete)):
            return complete
        case ("too_long", int(count)):
            raise too_long(waiting.job.field, f"{count} tokens or more", waiting.positions)
        case (_, (str(named), str(problem))):
            raise InvalidRequest(named, problem)
    raise Unavailable(CONFUSED)
