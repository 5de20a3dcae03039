"""Log lines: what they carry, what they never show."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from outrider.telemetry.logs import configure_logging, get_logger, request_context


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard error while JSON logging is set up; everything is put back afterwards."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    root = logging.getLogger()
    before = (root.handlers, root.level)
    configure_logging("verify", "info", "json")
    yield stream
    root.handlers, root.level = before
    structlog.reset_defaults()


def _read(lines: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_lines_carry_service_logger_and_request(lines: io.StringIO) -> None:
    """Inside a request every line can be joined with its trace."""
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    with request_context("r1", traceparent, {"team": "search"}):
        get_logger("verify_service.engine").info("stepped", tokens=3)
    get_logger("verify_service.engine").info("idle")
    inside, outside = _read(lines)
    expected = {"service": "verify", "logger": "verify_service.engine", "event": "stepped", "tokens": 3}
    assert expected.items() <= inside.items()
    assert (inside["request_id"], inside["trace_id"], inside["span_id"]) == ("r1", "a" * 32, "b" * 16)
    assert inside["labels"] == {"team": "search"}
    assert "request_id" not in outside
    assert "labels" not in outside


def test_prompts_and_secrets_are_blanked(lines: io.StringIO) -> None:
    """A careless line does not put a user's words or token on disk."""
    get_logger("x").info("request", prompt="my diary", authorization="Bearer 123", token_ids=[1, 2])
    assert "diary" not in lines.getvalue()
    assert "123" not in lines.getvalue()
    assert _read(lines)[0]["token_ids"] == "[not logged]"


def test_libraries_are_quiet_and_in_the_same_format(lines: io.StringIO) -> None:
    """Chatter of libraries is muted; their warnings that matter look like our lines."""
    logging.getLogger("transformers.modeling_utils").warning("chatter")
    logging.getLogger("some.library").warning("watch %s", "out")
    (line,) = _read(lines)
    assert line["event"] == "watch out"
    assert line["logger"] == "some.library"


def test_tracebacks_show_no_values(lines: io.StringIO) -> None:
    """An exception is logged with its lines of code, without the values of local variables."""
    try:
        secret = "hunter".capitalize()
        raise ValueError(len(secret))
    except ValueError:
        get_logger("x").exception("failed")
    (line,) = _read(lines)
    assert "ValueError" in str(line["exception"])
    assert "raise ValueError" in str(line["exception"])
    assert "Hunter" not in str(line["exception"])


def test_a_line_that_cannot_be_written_is_lost(lines: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk with the log is full, what logs goes on, and later lines come again."""

    def refuse(_text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(lines, "write", refuse)
        get_logger("x").info("lost")
        logging.getLogger("some.library").warning("lost too")
    get_logger("x").info("kept")
    assert [line["event"] for line in _read(lines)] == ["kept"]
