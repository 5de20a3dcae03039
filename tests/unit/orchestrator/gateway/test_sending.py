"""Events as they go out."""

from __future__ import annotations

import json

from orchestrator.gateway.sending import server_sent


def test_an_event_is_one_line_for_every_reader() -> None:
    """Whatever the text has: some readers split at all line ends of Unicode, not at the format's alone."""
    text = "".join(map(chr, range(0x20))) + "a\x7f\x85\u2028\u2029\u4e2d\U0001f600"
    line, *rest = server_sent({"text": text}).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
