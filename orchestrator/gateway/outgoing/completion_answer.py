"""Answers of completions and conversations, whole and in parts, from the client's events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from orchestrator.gateway.calls.formats import CallFormat, OutputFormat
from orchestrator.gateway.calls.reasoning import Parser, PlainText, ReasoningParser
from orchestrator.gateway.incoming.messages import ToolUse
from orchestrator.gateway.incoming.requests import HttpRequest
from orchestrator.gateway.outgoing.chat_shape import ChatShape, OutputReader, ReadOutput
from orchestrator.gateway.outgoing.shapes import CompletionShape, Prompt, of_prompt
from outrider.client import Chunk, Complete, Event, Generation, Started, Usage

PREDICTED = ("accepted_prediction_tokens", "rejected_prediction_tokens")


@dataclass(slots=True)
class Answer:
    """The answer to one HTTP request, as its parts come."""

    id: str
    created: int
    request: HttpRequest
    shape: CompletionShape | ChatShape
    model: str = ""
    usage: dict[int, Usage] = field(default_factory=dict)
    """Token counts by choice: of those that have ended, or of all if every part of a stream has counts."""

    @classmethod
    def to(
        cls, request: HttpRequest, request_id: str, created: int, format: OutputFormat | None = None
    ) -> Answer:
        """An answer that has not begun; `created` is in Unix seconds, `format` that of the model's output."""
        if not request.chat:
            shape = CompletionShape(request.top_logprobs, request.prompt_logprobs)
            return cls(f"cmpl-{request_id}", created, request, shape)
        chat = ChatShape(request.top_logprobs, read_output(request, format or OutputFormat()))
        return cls(f"chatcmpl-{request_id}", created, request, chat)

    def part(self, event: Event, left: Event | None) -> dict[str, Any] | None:
        """The part of a stream for an event; None: there is none. `left` is what the caller does not have yet
        of the event.
        """
        if isinstance(event, Started):
            self.model = event.model
        if self.request.continuous_usage or isinstance(event, Complete):
            self._count(event)
        choice = self._choice(event, left)
        usage = self._usage() if self.request.continuous_usage else None
        return None if choice is None else self._part([choice], usage)

    def _count(self, event: Event) -> None:
        match event:
            case Started():
                begun = Usage(prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens)
                self.usage[event.index] = begun
            case Chunk():
                counted = self.usage.get(event.index, Usage())
                tokens = counted.completion_tokens + len(event.token_ids)
                self.usage[event.index] = replace(counted, completion_tokens=tokens)
            case Complete():
                self.usage[event.index] = event.usage

    def _choice(self, event: Event, left: Event | None) -> dict[str, Any] | None:
        match event:
            case Started():
                begun = self.shape.begin(event.index, event.prompt_end)
                return None if left is None else begun
            case Chunk():
                return self._text(event, left if isinstance(left, Chunk) else replace(event, text=""))
            case Complete():
                return None if left is None else self.shape.end(event.index, event)

    def _text(self, chunk: Chunk, left: Chunk) -> dict[str, Any] | None:
        if len(left.text) < len(chunk.text):
            self.shape.skip(chunk.index, chunk.text.removesuffix(left.text))
        return self.shape.text(chunk.index, left) if left.text or left.logprobs else None

    def usage_part(self) -> dict[str, Any]:
        """The last part of a stream whose caller asked for token counts."""
        return self._part([], self._usage())

    def finished(self, generations: Sequence[Generation], echoed: Sequence[str] = ()) -> dict[str, Any]:
        """The whole answer; `echoed` are the prompts' texts if the answer repeats them."""
        if self.request.only_prompt:
            generations = [_without_text(one) for one in generations]
        self.usage = {index: one.usage for index, one in enumerate(generations)}
        prompts = [
            Prompt(echoed[number] if echoed else None, first.prompt_logprobs)
            for number, first in enumerate(generations[:: self.request.per_prompt])
        ]
        choices = [
            self.shape.choice(index, one, prompts[index // self.request.per_prompt])
            for index, one in enumerate(generations)
        ]
        model = generations[0].end.model
        shown = self.request.chat and self.request.prompt_logprobs
        own = {"prompt_logprobs": of_prompt(prompts[0].logprobs)} if shown else {}
        return {**self._head(self.shape.whole, model), "choices": choices, "usage": self._usage(), **own}

    def _part(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        head = self._head(self.shape.part, self.model)
        return {**head, "choices": choices, **({"usage": usage} if self.request.include_usage else {})}

    def _head(self, kind: str, model: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": model}
        return {**head, "system_fingerprint": None}

    def _usage(self) -> dict[str, Any]:
        """Each prompt is counted once, however many continuations it has."""
        prompts = [one for index, one in self.usage.items() if index % self.request.per_prompt == 0]
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


def _without_text(generation: Generation) -> Generation:
    usage = replace(generation.usage, completion_tokens=0)
    end = replace(generation.end, finish_reason="length", stop="", usage=usage)
    return replace(generation, text="", token_ids=(), logprobs=(), end=end)


def read_output(request: HttpRequest, format: OutputFormat) -> ReadOutput:
    """What makes the reader of one choice.

    A constraint that allows no reasoning holds from the first token on: all of the output is the answer.
    """
    reasons = format.reasoning and (request.reasons or not request.constrained_by)
    return partial(_reader, format.calls, request.tools, reasons)


def _reader(calls: CallFormat | None, tools: ToolUse | None, reasons: bool, prompt_end: str) -> OutputReader:
    parser: Parser = PlainText() if calls is None or tools is None else calls.parser(tools.offered)
    if reasons:
        parser = ReasoningParser(parser, prompt_end)
    return OutputReader(parser, tools is None or tools.parallel)
