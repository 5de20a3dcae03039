"""Tools of which a call is required: what is too deep or too large is refused."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.gateway.calls.formats import FORMATS, OutputFormat
from outrider.protocol.constraint import MAX_BYTES
from tests.unit.client.fake_orchestrator import FakeOrchestrator
from tests.unit.orchestrator.gateway.http import Response, posted

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("levels", [100, 960, 970, 974, 976, 978, 980, 990])
def test_deep_tools_are_refused_or_answered(fake: FakeOrchestrator, levels: int) -> None:
    """Where a call of them is required, and another process than at first reads their schemas once more."""
    schema = '{"a": ' * levels + "1" + "}" * levels
    tools = '[{"type": "function", "function": {"name": "add", "parameters": ' + schema + "}}]"
    hello = '"messages": [{"role": "user", "content": "x"}]'
    body = f'{{{hello}, "tool_choice": "required", "tools": {tools}{" " * 100_000}}}'
    assert _required(fake, body.encode()).status in ((200,) if levels == 100 else (200, 400))


def test_large_tools_are_refused_before_they_are_read_again(fake: FakeOrchestrator) -> None:
    """Nothing larger than a constraint may be would be made of them."""
    parameters = {"type": "object", "description": "x" * MAX_BYTES}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    answer = _required(fake, {**HELLO, "tools": tools, "tool_choice": "required"})
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert str(MAX_BYTES) in answer.error["message"]
    assert not fake.requests


def _required(fake: FakeOrchestrator, body: Any) -> Response:
    return posted(fake.endpoint, CHAT, body, format=OutputFormat(FORMATS["hermes"]))
