"""A stream that outlives its connection and its orchestrator: decides what to request and what to pass on.
No I/O.

A broken request is resumed where it was, by one request after another for each continuation that has not
ended. With the seed and weights of its `Started` and the tokens received, it yields exactly the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outrider.client.request import Request
from outrider.client.results import Chunk, Complete, Event, Started
from outrider.client.retries import Attempts
from outrider.protocol.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutriderError,
    Unavailable,
)
from outrider.protocol.messages import MAX_CONTINUATIONS, SEEDS


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream broke, or a request was refused, and will be tried again after a pause."""

    error: OutriderError
    tokens: int
    pause: float
    """Seconds until the next attempt."""
    begun: bool
    """Whether events had arrived; the next attempt then asks for the rest."""


@dataclass(slots=True)
class _Part:
    """The state of one continuation."""

    started: Started | None = None
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    told: int = 0
    """Number of prompt tokens whose log probabilities have arrived."""
    told_again: int = 0
    """Number of them that the present stream will repeat."""


class Survivor:
    """One request until all of its continuations have ended."""

    def __init__(self, request: Request, attempts: Attempts, tell: Callable[[Broken], None]) -> None:
        self._request = request
        self._attempts = attempts
        self._tell = tell
        self._parts = [_Part() for _ in range(min(max(request.count, 1), MAX_CONTINUATIONS))]
        self._alone: int | None = None
        """Index of the continuation that the present request is for; None: all."""
        self._ends = 0

    def next_request(self) -> Request | None:
        """The request to send now; None: nothing is missing."""
        missing = [index for index, part in enumerate(self._parts) if not part.ended]
        if not missing:
            return None
        begun = next((part.started for part in self._parts if part.started), None)
        if begun is None:
            return self._request
        self._alone = missing[0]
        return self._rest(self._alone, begun)

    def take(self, event: Event) -> Event | None:
        """The event to pass on to the reader, for one of the present stream; None: none, as for a second
        `Started`."""
        index = event.index if self._alone is None else self._alone
        if index >= len(self._parts):
            return None
        part = self._parts[index]
        match event:
            case Started():
                known, part.started = part.started, part.started or replace(event, index=index)
                return None if known else part.started
            case Chunk():
                part.tokens += event.token_ids
                again = min(part.told_again, len(event.prompt_logprobs))
                part.told_again -= again
                part.told += len(event.prompt_logprobs) - again
                return replace(event, index=index, prompt_logprobs=event.prompt_logprobs[again:])
            case Complete():
                part.ended = True
                self._ends += 1
                return replace(event, index=index, resumptions=self._attempts.count)

    def stopped(self) -> OutriderError | None:
        """The error if the present stream ended too early without one; None: all is well."""
        parts = self._parts if self._alone is None else [self._parts[self._alone]]
        if all(part.ended for part in parts):
            return None
        return Unavailable("the stream ended before the text did")

    def broke(self, error: OutriderError, left: float) -> float:
        """Seconds to wait before the next request; `left` seconds remain until the deadline.

        Raises:
            OutriderError: `error` itself, or an `Unavailable` that says that the stream broke.
        """
        if all(part.ended for part in self._parts):
            return 0.0
        begun, tokens = any(part.started for part in self._parts), sum(len(p.tokens) for p in self._parts)
        lost = any(part.tokens and part.started is None for part in self._parts)
        pause = None if lost else self._attempts.pause(error, begun, tokens + self._ends)
        if pause is None or pause >= left:
            raise self._final(error, begun, tokens)
        self._tell(Broken(error, tokens, pause, begun))
        return pause

    def _final(self, error: OutriderError, begun: bool, tokens: int) -> OutriderError:
        """The error that the caller gets. A wrong request and a mistake of the service break no stream."""
        wrong = isinstance(error, InvalidRequest) and not self._attempts.count
        if not begun or wrong or isinstance(error, DeadlineExceeded | InternalError):
            return error
        return Unavailable(f"the stream broke after {tokens_said(tokens)} and cannot be resumed: {error}")

    def _rest(self, index: int, begun: Started) -> Request:
        """The request for the rest of a continuation, with the same weights and noise."""
        part = self._parts[index]
        seed = (begun.seed + index - begun.index) % SEEDS
        part.told_again = part.told
        return replace(
            self._request,
            model=begun.model,
            model_version=(part.started or begun).model_version,
            seed=seed if part.started is None else part.started.seed,
            n=1,
            prompt_logprobs=None if index or part.tokens else self._request.prompt_logprobs,
            resume_token_ids=[*self._request.resume_token_ids, *part.tokens],
        )


def tokens_said(count: int) -> str:
    """A count in words, such as `1 token`."""
    return f"{count} token{'' if count == 1 else 's'}"
