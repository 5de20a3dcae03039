"""Answers whose streams consist of events that have a type."""

from __future__ import annotations

from typing import Any, Protocol

from orchestrator.gateway.errors import Problem
from outrider.client import Event

StreamEvent = dict[str, Any]
"""An event of a stream; its `type` is its name."""


class EventAnswer(Protocol):
    """The answer to one request, as it grows."""

    whole: dict[str, Any]
    """The answer without a stream, once the last event has come."""

    def events_of(self, event: Event) -> list[StreamEvent]:
        """What a stream says of a client's event."""

    def failed(self, problem: Problem) -> list[StreamEvent]:
        """The end of a stream that an error ends."""
