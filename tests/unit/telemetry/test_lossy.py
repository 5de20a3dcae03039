"""Lines that nobody reads."""

from __future__ import annotations

import os

import pytest

from outrider.telemetry import lossy
from outrider.telemetry.lossy import Lossy

MANY = 2000
LINE = "x" * 99 + "\n"


def test_a_pipe_that_nobody_reads_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is dropped, line by line; once the reader goes on, lines come again."""
    monkeypatch.setattr(lossy, "FULL_SECONDS", 0.0)
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader, open(writing, "w", encoding="utf-8") as writer:
        stream = Lossy(writer)
        for _ in range(MANY):
            stream.write(LINE)
            stream.flush()
        lines = reader.read(MANY * len(LINE)).decode().splitlines(keepends=True)
        assert 0 < len(lines) < MANY
        assert set(lines) == {LINE}
        stream.write("again\n")
        stream.flush()
        assert reader.read(100) == b"again\n"
