"""Turns the client's events into OpenAI's Response, whole or as a stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.outgoing.figures import metrics_of
from orchestrator.gateway.outgoing.typed_events import StreamEvent
from orchestrator.gateway.responses.output import Output
from orchestrator.gateway.responses.request import ResponseRequest
from outrider.client import Chunk, Complete, Event, Started, Usage

NEVER: dict[str, Any] = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "store": False,
    "truncation": "disabled",
}
"""Fields that are the same in every response: nothing is stored or runs in the background."""


@dataclass(slots=True)
class ResponseAnswer:
    """The answer to one request, as it grows."""

    id: str
    created: int
    """Unix time in seconds."""
    request: ResponseRequest
    output: Output
    figures: bool = False
    """True when the response ends with its times and speculation figures."""
    model: str = ""
    whole: dict[str, Any] = field(default_factory=dict)
    """The response, once it has ended."""
    _number: int = 0
    """Number of the next event."""

    def events_of(self, event: Event) -> list[StreamEvent]:
        """What a stream says of a client's event. The stream's last entry has the whole response."""
        match event:
            case Started():
                self.model = event.model
                self.output.begin(event.prompt_end)
                begun = self._response("in_progress")
                return self._numbered([_about("created", begun), _about("in_progress", begun)])
            case Chunk():
                return self._numbered(self.output.text(event))
            case Complete():
                return self._numbered(self._ended(event))

    def failed(self, problem: Problem) -> list[StreamEvent]:
        """The end of a stream that an error ends."""
        known = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        code = known.get(problem.kind.status, "server_error")
        error = {"code": code, "message": problem.message, "param": problem.parameter}
        return self._numbered([_about("failed", self._response("failed", error=error))])

    def _ended(self, end: Complete) -> list[StreamEvent]:
        cut = end.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        events = self.output.end(status)
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        figures = {"metrics": metrics_of([end])} if self.figures else {}
        self.model = end.model
        self.whole = self._response(status, usage=_usage(end.usage), **more) | figures
        return [*events, _about(status, self.whole)]

    def _numbered(self, events: list[StreamEvent]) -> list[StreamEvent]:
        first, self._number = self._number, self._number + len(events)
        return [one | {"sequence_number": first + place} for place, one in enumerate(events)]

    def _response(
        self, status: str, usage: Any = None, error: Any = None, incomplete_details: Any = None
    ) -> dict[str, Any]:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": error,
            "incomplete_details": incomplete_details,
            "output": list(self.output.items),
            "usage": usage,
            **NEVER,
            **self.request.asked,
        }


def _about(what: str, response: dict[str, Any]) -> StreamEvent:
    return {"type": f"response.{what}", "response": response}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
