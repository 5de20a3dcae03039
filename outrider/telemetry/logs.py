"""Logging: one line per event on standard error, as JSON or formatted for a terminal.

Prompts, generated text and credentials are never logged; as a safeguard, a processor blanks fields with such
names.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from outrider.telemetry.lossy import Lossy

SECRET = frozenset({"authorization", "bearer", "chat", "messages", "prompt", "session", "text", "token_ids"})
QUIET = {
    "asyncio": logging.WARNING,
    "filelock": logging.WARNING,
    "grpc": logging.ERROR,
    "httpx": logging.WARNING,
    "huggingface_hub": logging.ERROR,
    "opentelemetry": logging.WARNING,
    "torch": logging.ERROR,
    "transformers": logging.ERROR,
    "urllib3": logging.WARNING,
}
"""Least severe level of libraries' loggers whose lines are logged."""

Format = Literal["auto", "json", "console"]


def configure_logging(service: str, level: str = "info", format: Format = "auto") -> None:
    """Set up our loggers and those of libraries. `auto` is console on a terminal, JSON elsewhere."""
    number = getattr(logging, level.upper())
    console = format == "console" or (format == "auto" and sys.stderr.isatty())
    stream = cast(TextIO, Lossy(sys.stderr))
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Service(service),
        _blank_secrets,
    ]
    structlog.configure(
        processors=[*shared, *_rendering(console)],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    _adopt_others(number, shared, console, stream)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry `logger=name`; use keyword arguments for fields."""
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger(logger_name=name))


def request_context(
    request_id: str, traceparent: str = "", labels: Mapping[str, str] | None = None
) -> AbstractContextManager[Any]:
    """A context in which log lines of this task carry the request's id, its labels and, if it is sampled, its
    trace ids."""
    fields: dict[str, Any] = {"request_id": request_id}
    if labels:
        fields["labels"] = dict(labels)
    if traceparent:
        _, fields["trace_id"], fields["span_id"], _ = traceparent.split("-")
    return structlog.contextvars.bound_contextvars(**fields)


def _rendering(console: bool) -> list[Processor]:
    if console:
        plain = structlog.dev.plain_traceback  # the default shows the values of local variables
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _adopt_others(level: int, shared: list[Processor], console: bool, stream: TextIO) -> None:
    """Format the lines of libraries that use the standard logging module like ours, and drop unimportant
    ones."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(console)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name, minimum in QUIET.items():
        logging.getLogger(name).setLevel(max(level, minimum))


class _Service:
    """Adds the service's and the logger's name to every line."""

    def __init__(self, service: str) -> None:
        self.service = service

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = self.service
        if "logger_name" in event:
            event["logger"] = event.pop("logger_name")
        return event


def _blank_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name in SECRET.intersection(event):
        event[name] = "[not logged]"
    return event
