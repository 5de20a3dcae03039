"""`/v1/messages` and `/v1/messages/count_tokens` before a fake orchestrator."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.gateway.calls.formats import FORMATS, OutputFormat
from orchestrator.gateway.errors import KINDS, Problem
from orchestrator.gateway.messages.errors import body_of
from outrider.protocol.errors import ContextTooLong, InvalidRequest, NoReplica, Overloaded, RateLimited
from tests.unit.client.fake_orchestrator import FakeOrchestrator
from tests.unit.orchestrator.gateway.http import Response, posted, rig

PAGE = (Path(__file__).resolve().parents[4] / "docs/messages.md").read_text()
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
BODY: dict[str, Any] = {**HELLO, "max_tokens": 5}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HERMES = OutputFormat(FORMATS["hermes"], reasoning=True)


def _post(fake: FakeOrchestrator, path: str = PATH, body: Any = BODY, **options: Any) -> Response:
    return posted(fake.endpoint, path, body, **options)


def test_a_whole_answer(fake: FakeOrchestrator) -> None:
    """Its id is the request's, which Anthropic's header has too."""
    answer = _post(fake, body={**BODY, "system": "be brief"}, figures=True)
    found = answer.json
    assert (answer.status, found["type"], found["stop_reason"]) == (200, "message", "end_turn")
    assert found["id"] == f"msg_{answer.headers['request-id']}"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert found["content"] == [{"type": "text", "text": "one two three"}]
    assert "num_draft_tokens" in found["metrics"]["speculative_decoding"]
    assert [one.content for one in fake.requests[0].chat.messages] == ["be brief", "hello"]
    assert fake.requests[0].sampling.max_tokens == 5


def test_a_stream(fake: FakeOrchestrator) -> None:
    """Each event has its name; none is [DONE]."""
    answer = _post(fake, body={**BODY, "stream": True})
    names = [line for part in answer.parts for line in part.decode().split("\n") if line[:6] == "event:"]
    assert names == [f"event: {one['type']}" for one in answer.events]
    texts = [one["delta"]["text"] for one in answer.events if one["type"] == "content_block_delta"]
    assert "".join(texts) == "one two three"
    assert answer.events[-1] == {"type": "message_stop"}
    assert answer.ids == []


def test_a_round_trip_of_a_call(fake: FakeOrchestrator) -> None:
    """Question, reasoning and call; then the answer goes back as it came, with the result."""
    fake.texts = {11: "<think>Add.</think>", 12: f"Well. {CALL}"}
    asked = {**BODY, "tools": [TOOL]}
    content = _post(fake, body=asked, format=HERMES).json["content"]
    assert [one["type"] for one in content] == ["thinking", "text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": "3"}
    talk = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    assert _post(fake, body={**asked, "messages": [*HELLO["messages"], *talk]}, format=HERMES).status == 200
    chat = fake.requests[-1].chat
    assert [one.role for one in chat.messages] == ["user", "assistant", "tool"]
    assert chat.messages[1].reasoning_content == "Add."
    (call,) = chat.messages[1].tool_calls
    assert (call.id, call.name, call.arguments) == (content[2]["id"], "add", '{"a": 1}')
    assert chat.messages[2].tool_call_id == call.id
    assert [tool.name for tool in chat.tools] == ["add"]


def test_a_required_call_is_held_to(fake: FakeOrchestrator) -> None:
    """By a grammar; tools need the setting that reads calls."""
    asked = {**BODY, "tools": [TOOL], "tool_choice": {"type": "any"}}
    assert _post(fake, body=asked, format=OutputFormat(FORMATS["hermes"])).status == 200
    assert "tool_call" in fake.requests[-1].sampling.grammar
    refused = _post(fake, body=asked)
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert "tool_call_parser" in refused.error["message"]


def test_what_is_counted(fake: FakeOrchestrator) -> None:
    """The prompt as the model reads it, even with tools that no setting reads."""
    answer = _post(fake, COUNT, {**HELLO, "system": "hi", "tools": [TOOL]})
    assert (answer.status, answer.json) == (200, {"input_tokens": 7})
    assert [tool.name for tool in fake.requests[0].chat.tools] == ["add"]
    fake.error = InvalidRequest("chat.messages[0].content", "is too long")
    refused = _post(fake, COUNT, {**HELLO, "system": "hi"})
    assert (refused.status, refused.error["message"]) == (400, "system: is too long")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (InvalidRequest("sampling.max_tokens", "is bad"), 400, "invalid_request_error", "max_tokens: is bad"),
        (ContextTooLong("sampling.max_tokens", "is"), 400, "invalid_request_error", "max_tokens: is"),
        (
            ContextTooLong("chat.messages", "9 tokens do not fit"),
            400,
            "invalid_request_error",
            "prompt is too long: messages: 9 tokens do not fit",
        ),
        (
            InvalidRequest("sampling.stop[1]", "is bad"),
            400,
            "invalid_request_error",
            "stop_sequences[1]: is bad",
        ),
        (
            InvalidRequest("chat.continue_final_message", "is bad"),
            400,
            "invalid_request_error",
            "messages: is bad",
        ),
        (
            InvalidRequest("chat.tools[3].parameters", "is bad"),
            400,
            "invalid_request_error",
            "tools[3].input_schema: is bad",
        ),
        (
            InvalidRequest("chat.tools[3].name", "is bad"),
            400,
            "invalid_request_error",
            "tools[3].name: is bad",
        ),
        (
            InvalidRequest("sampling.json_schema", "is bad"),
            400,
            "invalid_request_error",
            "output_config.format.schema: is bad",
        ),
        (
            InvalidRequest("chat.messages[1].tool_calls[0].id", "is bad"),
            400,
            "invalid_request_error",
            "messages[0]: is bad",
        ),
        (Overloaded("the queue is full"), 429, "overloaded_error", "the queue is full"),
        (RateLimited("too often", retry_after=2.5), 429, "rate_limit_error", "too often"),
        (NoReplica("nobody"), 503, "api_error", "nobody"),
    ],
)
def test_refusals_have_a_status(
    fake: FakeOrchestrator, error: Any, status: int, kind: str, message: str, stream: bool
) -> None:
    """Anthropic's form, and the caller's names; a stream has not begun."""
    fake.error = error
    held = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "array"}}}}
    answer = _post(fake, body={**BODY, **held, "stream": stream, "system": "x", "stop_sequences": ["a", "b"]})
    assert answer.status == status
    id = answer.headers["request-id"]
    assert answer.json == {"type": "error", "error": {"type": kind, "message": message}, "request_id": id}
    assert ("retry-after" in answer.headers) == (error.retry_after is not None)


def test_an_error_within_a_stream_is_its_last_event(fake: FakeOrchestrator) -> None:
    """It is named, so that clients raise it."""
    fake.breaks = [(1, grpc.StatusCode.UNAVAILABLE), *[(0, grpc.StatusCode.UNAVAILABLE)] * 9]
    answer = _post(fake, body={**BODY, "stream": True})
    last = answer.events[-1]
    assert (answer.status, last["type"], last["error"]["type"]) == (200, "error", "api_error")
    assert last["request_id"] == answer.headers["request-id"]
    assert answer.parts[-1].startswith(b"event: error\n")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"max_tokens": NaN}', b"\xff", b"[" * 5000])
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_garbage_is_refused(fake: FakeOrchestrator, path: str, body: bytes) -> None:
    """In the same form."""
    answer = _post(fake, path, body)
    assert (answer.status, answer.json["type"]) == (400, "error")
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("size", [0, 100_000])
@pytest.mark.parametrize("levels", [100, 400, 900, 970])
def test_deep_tools_are_refused_or_answered(fake: FakeOrchestrator, levels: int, size: int) -> None:
    """Also where another process reads them."""
    schema = '{"a": ' * levels + "1" + "}" * levels
    tools = '[{"name": "add", "input_schema": ' + schema + "}]"
    fields = f'"max_tokens": 5, "messages": [{{"role": "user", "content": "x"}}], "tools": {tools}'
    body = f'{{{fields}, "tool_choice": {{"type": "none"}}}}' + " " * size
    assert _post(fake, body=body.encode()).status in ((200,) if levels == 100 else (200, 400))


async def test_the_key_of_anthropics_client_is_the_bearer_token(fake: FakeOrchestrator) -> None:
    """Here and for the orchestrator; only a bearer token goes before it. The query and headers do nothing."""
    async with rig(fake.endpoint, tokens=b"s3cret\n") as made:
        given: list[dict[str, str]] = [
            {},
            {"x-api-key": "wrong"},
            {"x-api-key": "s3cret", "anthropic-version": "2023-06-01", "anthropic-beta": "x"},
            {"authorization": "Bearer s3cret", "x-api-key": "wrong"},
            {"authorization": "Bearer wrong", "x-api-key": "s3cret"},
            {"authorization": "Basic dTpw", "x-api-key": "s3cret"},
        ]
        found = [(await made.http.post(f"{PATH}?beta=true", BODY, headers)).status for headers in given]
    assert found == [401, 401, 200, 200, 401, 200]
    assert all(one["authorization"] == "Bearer s3cret" for one in fake.metadata)


async def test_errors_before_the_endpoint_have_the_same_form(fake: FakeOrchestrator) -> None:
    """Without a token, at an unknown path below it, by another method, or when the gateway drains."""
    async with rig(fake.endpoint, tokens=b"s3cret\n", max_bytes=1000) as made:
        known = {"x-api-key": "s3cret"}
        answers = [
            await made.http.post(PATH, BODY),
            await made.http.post(f"{PATH}/batches", BODY, known),
            await made.http.get(PATH, **known),
            await made.http.post(PATH, BODY | {"system": "x" * 1000}, known),
        ]
        made.gateway.draining = True
        answers.append(await made.http.post(COUNT, BODY, known))
        assert "type" not in (await made.http.post("/v1/messagesx", BODY, known)).json
        assert all(one.json["type"] == "error" for one in answers)
    assert [(one.status, one.error["type"]) for one in answers] == [
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (503, "api_error"),
    ]


async def test_they_are_endpoints_like_the_others(fake: FakeOrchestrator) -> None:
    """They have the caller's id, and are counted by their names."""
    async with rig(fake.endpoint) as made:
        for path, body in ((PATH, BODY), (COUNT, HELLO)):
            answer = await made.http.post(path, body, {"x-request-id": "mine"})
            assert answer.headers["request-id"] == "mine"
        labels = [{"endpoint": path, "status": "200"} for path in (PATH, COUNT)]
        found = [made.registry.get_sample_value("outrider_gateway_requests_total", one) for one in labels]
    assert found == [1.0, 1.0]


@pytest.mark.parametrize(("path", "body"), [(PATH, BODY), (PATH, {**BODY, "stream": True}), (COUNT, HELLO)])
async def test_closing_the_connection_cancels_the_request(
    fake: FakeOrchestrator, path: str, body: Any
) -> None:
    """The orchestrator stops working on it."""
    fake.answers.clear()
    async with rig(fake.endpoint) as made:
        asking = asyncio.create_task(made.http.post(path, body))
        await asyncio.to_thread(fake.asked.wait, 10)
        made.http.leave.set()
        await asking
        assert await asyncio.to_thread(fake.over.wait, 10)
        fake.answers.set()
        assert made.registry.get_sample_value("outrider_gateway_requests_aborted_total") == 1.0


def test_the_page_has_every_type_of_error() -> None:
    """Its status with its type."""
    rows = re.findall(r"^\| (\d+[\d, ]*) \| (`\w+`.*) \|$", PAGE, re.M)
    shown = {(int(one), kind) for codes, kinds in rows for one in codes.split(", ") for kind in _names(kinds)}
    told = {(one.status, body_of(Problem(one, ""), "")["error"]["type"]) for one in KINDS.values()}
    assert told == {(status, kind) for status, kind in shown if status not in (405, 408, 415)}


def _names(kinds: str) -> list[str]:
    return re.findall(r"`(\w+)`", kinds)
