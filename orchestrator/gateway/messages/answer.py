"""Turns the client's events into Anthropic's Message, whole or as a stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.messages.errors import body_of
from orchestrator.gateway.messages.output import Output
from orchestrator.gateway.outgoing.figures import metrics_of
from orchestrator.gateway.outgoing.typed_events import StreamEvent
from outrider.client import Chunk, Complete, Event, Started, Usage


@dataclass(slots=True)
class MessageAnswer:
    """The answer to one request, as it grows."""

    id: str
    """The request's id."""
    output: Output
    figures: bool = False
    """True when the answer ends with its times and speculation figures."""
    whole: dict[str, Any] = field(default_factory=dict)
    """The message, once it has ended."""

    def events_of(self, event: Event) -> list[StreamEvent]:
        """What a stream says of a client's event."""
        match event:
            case Started():
                self.output.begin(event.prompt_end)
                known = Usage(prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens)
                begun = self._message(event.model, None, known)
                return [{"type": "message_start", "message": begun}]
            case Chunk():
                return self.output.text(event.text)
            case Complete():
                return self._ended(event)

    def failed(self, problem: Problem) -> list[StreamEvent]:
        """The end of a stream that an error ends."""
        return [body_of(problem, self.id)]

    def _ended(self, end: Complete) -> list[StreamEvent]:
        events = self.output.end()
        figures = {"metrics": metrics_of([end])} if self.figures else {}
        self.whole = self._message(end.model, end, end.usage) | figures
        delta = {name: self.whole[name] for name in ("stop_reason", "stop_sequence")}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(end.usage), **figures}
        return [*events, last, {"type": "message_stop"}]

    def _message(self, model: str, end: Complete | None, usage: Usage) -> dict[str, Any]:
        reason = None if end is None else _reason(end, self.output.called)
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": list(self.output.content),
            "stop_reason": reason,
            "stop_sequence": end.stop if end is not None and reason == "stop_sequence" else None,
            "usage": _usage(usage),
        }


def _reason(end: Complete, called: bool) -> str:
    """Why the text ended. If it was cut off, that is the reason even if it has calls."""
    if end.finish_reason == "length":
        return "max_tokens"
    if end.stop:
        return "stop_sequence"
    return "tool_use" if called else "end_turn"


def _usage(usage: Usage) -> dict[str, int]:
    """Token counts. Those of the input that were computed before are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
