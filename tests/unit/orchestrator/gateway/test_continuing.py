"""A stream that goes on after `Last-Event-ID`, against a fake orchestrator."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from orchestrator.gateway.calls.formats import FORMATS, OutputFormat
from tests.unit.client.fake_orchestrator import SEED, VERSION, FakeOrchestrator
from tests.unit.orchestrator.gateway.http import Response, posted, rig

CHAT = "/v1/chat/completions"
PATHS = {
    "/v1/completions": {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}
WORDS = "one two three"


def _post(
    fake: FakeOrchestrator, path: str, last: str = "", format: OutputFormat | None = None, **fields: Any
) -> Response:
    headers = {"last-event-id": last} if last else {"accept": "text/event-stream"}
    return posted(fake.endpoint, path, {"stream": True, **PATHS[path], **fields}, headers, format=format)


def _text(answer: Response, index: int = 0) -> str:
    found = [event["choices"][0] for event in answer.events[:-1]]
    mine = [one for one in found if one["index"] == index]
    return "".join(one.get("text", "") + one.get("delta", {}).get("content", "") for one in mine)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_goes_on_after_every_event(fake: FakeOrchestrator, path: str, n: int) -> None:
    """What was sent up to it and what follows are the whole text of every choice, and each ends once."""
    whole = _post(fake, path, n=n)
    assert len(whole.ids) == len(whole.events) - 1
    for place, last in enumerate(whole.ids):
        rest = _post(fake, path, last, n=n)
        before = Response(parts=[*whole.parts[: place + 1], b"data: [DONE]\n\n"])
        for index in range(n):
            assert _text(before, index) + _text(rest, index) == WORDS
        assert fake.requests[-1].sampling.seed == SEED
        assert fake.requests[-1].model_version == VERSION
        events = [*before.events[:-1], *rest.events[:-1]]
        assert [event["choices"][0]["finish_reason"] for event in events].count("stop") == n
        assert sum("role" in event["choices"][0].get("delta", {}) for event in events) == n * ("chat" in path)


def test_a_stream_goes_on_within_reasoning(fake: FakeOrchestrator) -> None:
    """What was sent up to any event and what follows are the reasoning and the answer."""
    fake.prompt_end = "<think>"
    fake.texts = {11: "a \n", 12: "b </th", 13: "ink> ", 14: "c d", 15: " e"}
    format = OutputFormat(reasoning=True)

    def read(*answers: Response) -> tuple[str, str]:
        deltas = [event["choices"][0]["delta"] for one in answers for event in one.events[:-1]]
        return tuple("".join(d.get(name, "") for d in deltas) for name in ("reasoning_content", "content"))

    whole = _post(fake, CHAT, format=format)
    assert read(whole) == ("a \nb", "c d e")
    assert len(whole.ids) == 6
    for place, last in enumerate(whole.ids):
        before = Response(parts=[*whole.parts[: place + 1], b"data: [DONE]\n\n"])
        assert read(before, _post(fake, CHAT, last, format=format)) == ("a \nb", "c d e")


def test_an_id_may_name_no_weights(fake: FakeOrchestrator) -> None:
    """Those of several ranks have no version."""
    rest = _post(fake, "/v1/completions", "1.4")
    assert (_text(rest), fake.requests[-1].model_version) == (WORDS[4:], "")


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        ("nonsense", {}),
        ("1.2.3", {}),
        ("1.2", {"stream": False}),
        ("1.2", {"logprobs": 1}),
        ("1.2", {"prompt": ["a", "b"]}),
    ],
)
def test_an_id_that_is_not_of_this_stream_is_refused(
    fake: FakeOrchestrator, last: str, fields: dict[str, Any]
) -> None:
    """It would bring another text."""
    answer = _post(fake, "/v1/completions", last, **fields)
    assert (answer.status, answer.error["param"]) == (400, "last-event-id")
    assert not fake.requests


async def test_readers_of_data_lines_alone_understand_a_stream(fake: FakeOrchestrator) -> None:
    """Load generators take all between empty lines for JSON behind `data: `; an id would be an error."""
    async with rig(fake.endpoint) as made:
        body = {"prompt": "count", "stream": True, "stream_options": {"include_usage": True}}
        found = await made.http.post("/v1/completions", body, {"accept": "*/*"})
    told = b"".join(found.parts).decode().split("\n\n")
    parts = [json.loads(one.removeprefix("data: ")) for one in told if one and one != "data: [DONE]"]
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == WORDS
    assert parts[-1]["usage"]["completion_tokens"] == 3


def test_a_stream_with_tools_has_no_ids(fake: FakeOrchestrator) -> None:
    """Its calls are found in the whole text: a stream that went on within one would show it as text."""
    tools = [{"type": "function", "function": {"name": "now"}}]
    body = {"stream": True, **PATHS[CHAT], "tools": tools}

    async def run(headers: dict[str, str]) -> Response:
        async with rig(fake.endpoint, format=OutputFormat(FORMATS["hermes"])) as made:
            return await made.http.post(CHAT, body, headers)

    whole = asyncio.run(run({"accept": "text/event-stream"}))
    assert (whole.ids, whole.events[-1]) == ([], "[DONE]")
    refused = asyncio.run(run({"last-event-id": "1.4"}))
    assert (refused.status, refused.error["param"]) == (400, "last-event-id")
