"""From the client's events to OpenAI's objects, whole and in parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.gateway.requests import Asked
from outrider.client import Chunk, Complete, Event, Generation, Started, TokenLogprob, Usage

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

PREDICTED = ("accepted_prediction_tokens", "rejected_prediction_tokens")


class Shape(Protocol):
    """How one endpoint writes its choices."""

    @property
    def whole(self) -> str:
        """`object` of the whole answer."""

    @property
    def part(self) -> str:
        """`object` of a part of a stream."""

    def begin(self, index: int) -> dict[str, Any] | None:
        """The first part of a choice; None: there is none."""

    def text(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """New text."""

    def end(self, index: int, complete: Complete) -> dict[str, Any]:
        """The last part of a choice."""

    def choice(self, index: int, generation: Generation) -> dict[str, Any]:
        """A whole choice."""


@dataclass(slots=True)
class CompletionShape:
    """Of `/v1/completions`."""

    top: int | None
    """Alternatives of each token to show; None: no log probabilities."""
    whole: str = "text_completion"
    part: str = "text_completion"
    _offsets: dict[int, int] = field(default_factory=dict)
    """Characters of the tokens so far, by choice."""

    def begin(self, index: int) -> dict[str, Any] | None:
        """See `Shape`."""
        return None

    def text(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """See `Shape`."""
        return self._choice(index, chunk.text, chunk.logprobs, None, None)

    def end(self, index: int, complete: Complete) -> dict[str, Any]:
        """See `Shape`."""
        return self._choice(index, "", (), complete.finish_reason, complete.stop)

    def choice(self, index: int, generation: Generation) -> dict[str, Any]:
        """See `Shape`."""
        end = generation.end
        return self._choice(index, generation.text, generation.logprobs, end.finish_reason, end.stop)

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None, stop: str | None
    ) -> dict[str, Any]:
        shown = self._logprobs(index, logprobs) if logprobs and self.top is not None else None
        return {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": reason,
            "stop_reason": stop or None,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens, offsets = [spelled(entry) for entry in logprobs], []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best alternatives, and the token itself where it is none of them."""
        found = {spelled(other): finite(other.logprob) for other in entry.top}
        return found | {spelled(entry): finite(entry.logprob)}


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Of `/v1/chat/completions`."""

    top: int | None
    """See `CompletionShape.top`."""
    whole: str = "chat.completion"
    part: str = "chat.completion.chunk"

    def begin(self, index: int) -> dict[str, Any] | None:
        """See `Shape`."""
        return self._part(index, {"role": "assistant", "content": ""})

    def text(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """See `Shape`."""
        return self._part(index, {"content": chunk.text}, self._logprobs(chunk.logprobs))

    def end(self, index: int, complete: Complete) -> dict[str, Any]:
        """See `Shape`."""
        return self._part(index, {}, None, complete.finish_reason, complete.stop)

    def choice(self, index: int, generation: Generation) -> dict[str, Any]:
        """See `Shape`."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": generation.text, "refusal": None},
            "logprobs": self._logprobs(generation.logprobs),
            "finish_reason": generation.finish_reason,
            "stop_reason": generation.end.stop or None,
        }

    @staticmethod
    def _part(
        index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None, stop: str = ""
    ) -> dict[str, Any]:
        part = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return part | ({"stop_reason": stop or None} if reason else {})

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.top is None:
            return None
        content = [{**_entry(one), "top_logprobs": [_entry(other) for other in one.top]} for one in logprobs]
        return {"content": content, "refusal": None}


@dataclass(slots=True)
class Answer:
    """The answer to one HTTP request, as its parts come."""

    id: str
    created: int
    asked: Asked
    shape: Shape
    model: str = ""
    usage: dict[int, Usage] = field(default_factory=dict)
    """By choice, of those that have ended."""

    @classmethod
    def to(cls, asked: Asked, request_id: str, created: int) -> Answer:
        """An answer that has not begun; `created` is in Unix seconds."""
        if asked.chat:
            return cls(f"chatcmpl-{request_id}", created, asked, ChatShape(asked.top_logprobs))
        return cls(f"cmpl-{request_id}", created, asked, CompletionShape(asked.top_logprobs))

    def part(self, event: Event, left: Event | None) -> dict[str, Any] | None:
        """What a stream says of an event, of which `left` is to be told; None: nothing."""
        match event:
            case Started():
                self.model = event.model
            case Complete():
                self.usage[event.index] = event.usage
            case Chunk():
                pass
        choice = None if left is None else self._choice(left)
        return None if choice is None else self._part([choice], None)

    def _choice(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Started():
                return self.shape.begin(event.index)
            case Chunk():
                empty = not event.text and not event.logprobs
                return None if empty else self.shape.text(event.index, event)
            case Complete():
                return self.shape.end(event.index, event)

    def usage_part(self) -> dict[str, Any]:
        """The last part of a stream whose caller asked for the counts."""
        return self._part([], self._usage())

    def finished(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The whole answer."""
        self.usage = {index: one.usage for index, one in enumerate(generations)}
        choices = [self.shape.choice(index, one) for index, one in enumerate(generations)]
        model = generations[0].end.model
        return {**self._head(self.shape.whole, model), "choices": choices, "usage": self._usage()}

    def _part(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        head = self._head(self.shape.part, self.model)
        return {**head, "choices": choices, **({"usage": usage} if self.asked.include_usage else {})}

    def _head(self, kind: str, model: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": model}
        return {**head, "system_fingerprint": None}

    def _usage(self) -> dict[str, Any]:
        """Each prompt is counted once, however many continuations it has."""
        prompts = [one for index, one in self.usage.items() if index % self.asked.per_prompt == 0]
        prompt = sum(one.prompt_tokens for one in prompts)
        completion = sum(one.completion_tokens for one in self.usage.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
            "completion_tokens_details": {
                name: sum(getattr(one, name) for one in self.usage.values()) for name in PREDICTED
            },
        }


def spelled(entry: TokenLogprob) -> str:
    """The token's text, with a sign for bytes that are no whole character."""
    if entry.spelling is None:
        return f"token_id:{entry.token}"
    return entry.spelling.decode("utf-8", errors="replace")


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


def _entry(one: TokenLogprob) -> dict[str, Any]:
    spelling = None if one.spelling is None else list(one.spelling)
    return {"token": spelled(one), "logprob": finite(one.logprob), "bytes": spelling}
