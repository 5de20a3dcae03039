"""The items of one continuation that the client gets: its beginning, its chunks and its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.observing.statistics import Statistics
from orchestrator.observing.timeline import Step, TimelineEvent
from orchestrator.text.text_stream import Piece, TextStream
from outrider.protocol.messages import FinishReason, Origin, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The beginning of a continuation, with what is needed to resume it."""

    index: int
    request_id: str
    seed: int
    model: str
    prompt_tokens: int
    cached_tokens: int
    model_version: str = ""
    """Version of the model's weights, as in `ModelInfo.version`."""
    prompt_end: str = ""
    """Last characters of a conversation's prompt."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a continuation: whole tokens and their text.

    In the last chunk before a stop string, the text ends where the stop string begins; the tokens are those
    that begin before it.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    origins: tuple[Origin, ...] = ()
    """One origin per token if the caller asked for steps."""
    step: Step | None = None
    """The step that committed the tokens. Only callers who asked for steps get it, with its first chunk."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The end of a continuation. Times are seconds from the request's arrival."""

    index: int
    reason: FinishReason
    stop: str
    prompt_tokens: int
    completion_tokens: int
    """Tokens of the continuation, including resumed ones and those of a stop string."""
    statistics: Statistics
    admission_seconds: float
    first_token_seconds: float
    total_seconds: float
    session: bytes
    seed: int
    model: str
    request_id: str
    timeline: tuple[TimelineEvent, ...]
    verify: str = ""
    draft: str = ""
    """Endpoints of its last verify and draft replicas; empty: it had none."""


class Output:
    """Turns committed tokens into chunks; holds tokens back until their text is certain."""

    def __init__(self, index: int, text: TextStream, prompt_end: str = "") -> None:
        self.index = index
        self.prompt_end = prompt_end
        """Last characters of a conversation's prompt."""
        self._text = text
        self._tokens: deque[int] = deque()
        self._logprobs: deque[TokenLogprob] = deque()
        self._origins: deque[Origin] = deque()
        self.stop = text.stop
        """The stop string that was reached; nothing follows it."""

    @property
    def consumed(self) -> int:
        """Tokens that belong to the continuation."""
        return self._text.consumed

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], step: Step | None = None
    ) -> list[Chunk]:
        """Add committed tokens; return what can be sent to the client now.

        That is at most one chunk. With the `step` that committed the tokens, it is one or more chunks, each
        as small as its text allows.
        """
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        if step is None:
            chunk = self._chunk(self._text.push(tokens))
            return [] if chunk is None else [chunk]
        self._origins.extend(step.origins)
        first, *rest = self._smallest(tokens) or [Chunk(self.index, "", ())]
        return [replace(first, step=step), *rest]

    def flush(self) -> Chunk | None:
        """The rest of the continuation, at its end."""
        return self._chunk(self._text.flush())

    def _smallest(self, tokens: Sequence[int]) -> list[Chunk]:
        """The chunks that tokens yield when they are added one by one, up to a stop string."""
        chunks: list[Chunk] = []
        for token in tokens:
            chunk = self._chunk(self._text.push((token,)))
            if chunk is not None:
                chunks.append(chunk)
            if self.stop:
                break
        return chunks

    def _chunk(self, pieces: Sequence[Piece]) -> Chunk | None:
        if not pieces:
            return None
        self.stop = pieces[-1].stop
        count = sum(piece.tokens for piece in pieces)
        tokens = tuple([self._tokens.popleft() for _ in range(count)])
        logprobs = tuple([self._logprobs.popleft() for _ in range(count if self._logprobs else 0)])
        origins = tuple([self._origins.popleft() for _ in range(count if self._origins else 0)])
        text = "".join([piece.text for piece in pieces])
        return Chunk(self.index, text, tokens, logprobs, origins) if tokens or text else None
