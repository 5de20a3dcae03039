"""`/v1/responses`: what its items mean to the chat path, its answers, and the order of its events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from orchestrator.gateway.calls.formats import FORMATS
from orchestrator.gateway.calls.reasoning import ReasoningParser
from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming.requests import chat_from
from orchestrator.gateway.outgoing.chat_shape import OutputReader
from orchestrator.gateway.responses.answer import ResponseAnswer
from orchestrator.gateway.responses.output import Output
from orchestrator.gateway.responses.request import responses_from
from outrider.client import Chunk, Complete, Event, Message, Started, TokenLogprob, ToolCall, Usage
from outrider.protocol.errors import InvalidRequest, Overloaded
from tests.unit.client.fake_orchestrator import FakeOrchestrator
from tests.unit.orchestrator.gateway.http import Response, posted, rig

PATH = "/v1/responses"
COUNT = f"{PATH}/input_tokens"
FLAT: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CALLED = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
SCHEMA = {"type": "array"}
ANSWER = {"role": "assistant", "content": "Well."}


def _asked(**fields: Any) -> Any:
    return responses_from({"input": "x", **fields}).http.requests[0]


def test_items_are_the_messages_of_a_conversation() -> None:
    """Instructions come first; calls belong to the answer before them; what OpenAI notes is left out."""
    said = {"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [said]},
        CALLED,
        {**CALLED, "call_id": "c2"},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
    ]
    calls = (ToolCall(id="c1", name="add", arguments="{}"), ToolCall(id="c2", name="add", arguments="{}"))
    assert _asked(input=items, instructions="be brief").prompt == (
        Message("system", "be brief"),
        Message("system", "be kind"),
        Message("user", ("1 + 2?",)),
        Message("assistant", ("Well.",), tool_calls=calls),
        Message("tool", "3", tool_call_id="c1"),
        Message("tool", ("4",), tool_call_id="c2"),
    )


def test_reasoning_belongs_to_what_follows_it() -> None:
    """To the text or the calls of the same answer; a summary alone is no part of the conversation."""

    def thought(text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}] if text else None
        return {"type": "reasoning", "id": "rs", "summary": [], "content": content, "encrypted_content": None}

    answer = {"role": "assistant", "content": "3"}
    items = [ITEM, thought("Add."), CALLED, RESULT, thought("Done."), answer, ITEM, thought(""), answer]
    assert _asked(input=items).prompt == (
        Message("user", "x"),
        Message("assistant", "", tool_calls=(ToolCall("c1", "add", "{}"),), reasoning_content="Add."),
        Message("tool", "3", tool_call_id="c1"),
        Message("assistant", "3", reasoning_content="Done."),
        Message("user", "x"),
        Message("assistant", "3"),
    )


@pytest.mark.parametrize(("before", "content"), [([], "after"), ([ANSWER], ("Well.", "after"))])
def test_text_behind_a_call_belongs_to_its_message(before: list[Any], content: object) -> None:
    """The result follows the message of the call."""
    items = [ITEM, *before, CALLED, {"role": "assistant", "content": "after"}, RESULT]
    assert _asked(input=items).prompt == (
        Message("user", "x"),
        Message("assistant", content, tool_calls=(ToolCall("c1", "add", "{}"),)),
        Message("tool", "3", tool_call_id="c1"),
    )


NESTED = {"type": "function", "function": {key: FLAT[key] for key in ("name", "parameters", "strict")}}
NAMED = {"type": "function", "name": "add"}
NESTED_NAME = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({}, {}),
        ({"max_output_tokens": 5, "temperature": 0.5}, {"max_tokens": 5, "temperature": 0.5}),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {}}, {}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"include": ["reasoning.encrypted_content"]}, {}),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"store": True}, {}),
        ({"store": False}, {"store": False}),
        ({"tools": [FLAT]}, {"tools": [NESTED]}),
        ({"tools": [FLAT], "tool_choice": "required"}, {"tools": [NESTED], "tool_choice": "required"}),
        (
            {"tools": [FLAT], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            {"tools": [NESTED], "tool_choice": "required"},
        ),
        ({"tools": [FLAT], "tool_choice": NAMED}, {"tools": [NESTED], "tool_choice": NESTED_NAME}),
        (
            {
                "tools": [FLAT],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]},
            },
            {
                "tools": [NESTED],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [NESTED_NAME]},
                },
            },
        ),
    ],
)
def test_fields_mean_what_they_mean_in_chat(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    """The request that is made is the same."""
    expected = chat_from({"messages": [{"role": "user", "content": "x"}], **chat})
    found = responses_from({"input": "x", **fields}).http
    assert replace(found, constrained_by="") == replace(expected, constrained_by="")


def test_a_schema_is_held() -> None:
    """And an error in it is named as the caller wrote it."""
    asked = responses_from({"input": "x", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}})
    assert asked.http.requests[0].json_schema == '{"type": "array"}'
    assert asked.http.constrained_by == "text.format.schema"


ITEM = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "named", "advice"),
    [
        ({"input": None}, "input", "missing"),
        ({"input": []}, "input", "missing"),
        ({"input": 5}, "input", "must be a list"),
        ({"input": [5]}, "input[0]", "object"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "must be one of"),
        ({"input": [{"role": "user"}]}, "input[0].content", "must be a string"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]", "object"),
        ({"input": [{**ITEM, "more": 1}]}, "input[0].more", "leave it out"),
        (
            {"input": [ITEM, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[1].content[0].type",
            "use input_text",
        ),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type", "itself, .* store false"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "use message"),
        ({"input": [{"type": ["x"]}]}, "input[0].type", "use message"),
        ({"input": [{**CALLED, "name": ""}]}, "input[0].name", "empty"),
        ({"input": [{**CALLED, "call_id": 5}]}, "input[0].call_id", "string"),
        ({"input": [{**RESULT, "output": None}]}, "input[0].output", "must be a string"),
        ({"previous_response_id": "r"}, "previous_response_id", "send all earlier items in input"),
        ({"conversation": "c"}, "conversation", "send all earlier items in input"),
        ({"background": True}, "background", "leave it out"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"truncation": "auto"}, "truncation", "leave it out"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "one of none, minimal"),
        ({"reasoning": {"mode": "x"}}, "reasoning.mode", "leave it out"),
        ({"include": ["nothing.known"]}, "include[0]", "leave it out"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "leave it out"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "must be a JSON schema"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema", "JSON schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "use function"),
        ({"tools": [5]}, "tools[0]", "object"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "string"),
        ({"tools": [{**FLAT, "parameters": 5}]}, "tools[0].parameters", "object"),
        ({"tools": [{**FLAT, "more": 5}]}, "tools[0].more", "leave it out"),
        ({"tools": [NESTED]}, "tools[0].function", "leave it out"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "use function"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "not one of"),
        ({"tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice.mode", "auto or required"),
        ({"tool_choice": 5}, "tool_choice", "must be none"),
        ({"tool_choice": "required"}, "tool_choice", "send tools"),
        ({"n": 2}, "n", "leave it out"),
        ({"max_output_tokens": -1}, "max_output_tokens", "0 or more"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"input": [CALLED] * 4097}, "input", "at most"),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict[str, Any], named: str, advice: str) -> None:
    """As the caller called it, with what to do instead."""
    with pytest.raises(Problem, match=advice) as failure:
        _asked(**fields)
    assert (failure.value.kind.status, failure.value.parameter) == (400, named)
    assert failure.value.message.startswith(f"{named}: ")


def _answer(*texts: str, reason: Any = "stop", parallel: bool = True, logprobs: bool = False) -> list[Any]:
    """What a stream of these texts says."""
    calls = FORMATS["hermes"]
    assert calls is not None
    parser = calls.parser(())

    def read(prompt_end: str) -> OutputReader:
        return OutputReader(ReasoningParser(parser, prompt_end), parallel, lambda: "call_1")

    request = responses_from({"input": "x", "tools": [FLAT]})
    answer = ResponseAnswer("id", 7, request, Output("id", read))
    started = Started(index=0, request_id="r", seed=1, model="m", prompt_tokens=3, cached_tokens=1)
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    end: Any = {"finish_reason": reason, "stop": "", "usage": usage, "speculation": {}, "seed": 1}
    tokens = (TokenLogprob(token=1, logprob=-0.5, spelling=b"a", top=()),) if logprobs else ()
    chunks = [Chunk(index=0, text=text, token_ids=(1,), logprobs=tokens) for text in texts]
    events: list[Event] = [started, *chunks, Complete(index=0, model="m", request_id="r", **end)]
    return [made for event in events for made in answer.events_of(event)]


BEGIN = ["created", "in_progress"]
MESSAGE_BEGINS = ["output_item.added", "content_part.added"]
MESSAGE_ENDS = ["output_text.done", "content_part.done", "output_item.done"]


def _kinds(told: list[Any]) -> list[str]:
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    return [one["type"].removeprefix("response.") for one in told]


def test_the_events_of_a_text() -> None:
    """In OpenAI's order; the parts are the text, and the last event has the whole response."""
    told = _answer("one", " two")
    text = ["output_text.delta"] * 2
    assert _kinds(told) == [*BEGIN, *MESSAGE_BEGINS, *text, *MESSAGE_ENDS, "completed"]
    assert told[0]["response"]["output"] == []
    assert told[2]["item"]["content"] == []
    assert told[3]["part"]["text"] == ""
    response = told[-1]["response"]
    assert (response["status"], response["store"], response["model"]) == ("completed", False, "m")
    assert response["output"] == [told[-2]["item"]]
    assert response["output"][0]["content"][0]["text"] == told[-4]["text"] == "one two"
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


def test_the_events_of_text_and_call() -> None:
    """One item after the other; the arguments come in parts."""
    told = _answer("Well. <tool", CALL[5:44], CALL[44:])
    call = ["output_item.added", *["function_call_arguments.delta"] * 2]
    ends = ["function_call_arguments.done", "output_item.done", "completed"]
    assert _kinds(told) == [*BEGIN, *MESSAGE_BEGINS, "output_text.delta", *MESSAGE_ENDS, *call, *ends]
    assert "".join(one["delta"] for one in told if one["type"].endswith("arguments.delta")) == '{"a": 1}'
    text, made = told[-1]["response"]["output"]
    assert text["content"][0]["text"] == "Well."
    assert (made["call_id"], made["name"], made["arguments"]) == ("call_1", "add", '{"a": 1}')
    assert [one["output_index"] for one in told if "item" in one] == [0, 0, 1, 1]


def test_the_events_of_reasoning() -> None:
    """An item of its own before the answer."""
    told = _answer("<think>So", " so.\n</think>", "Yes.", logprobs=True)
    begins = ["output_item.added", "content_part.added", *["reasoning_text.delta"] * 2]
    ends = ["reasoning_text.done", "content_part.done", "output_item.done"]
    text = [*MESSAGE_BEGINS, "output_text.delta", *MESSAGE_ENDS, "completed"]
    assert _kinds(told) == [*BEGIN, *begins, *ends, *text]
    reasoning, message = told[-1]["response"]["output"]
    content = [{"type": "reasoning_text", "text": "So so."}]
    assert (reasoning["type"], reasoning["summary"], reasoning["content"]) == ("reasoning", [], content)
    assert (told[6]["text"], told[4]["delta"] + told[5]["delta"]) == ("So so.", "So so.")
    assert message["content"][0]["text"] == "Yes."
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["a"]


def test_one_call_where_several_are_not_wanted() -> None:
    """The first alone."""
    assert len(_answer(CALL + CALL, parallel=True)[-1]["response"]["output"]) == 2
    assert len(_answer(CALL + CALL, parallel=False)[-1]["response"]["output"]) == 1


@pytest.mark.parametrize("text", ["one", CALL[:40]])
def test_what_is_cut_is_incomplete(text: str) -> None:
    """The item that was written, and the response, which says why."""
    told = _answer(text, reason="length")
    response = told[-1]["response"]
    assert (told[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]


def test_an_empty_answer_is_an_empty_message() -> None:
    """Clients look for one."""
    told = _answer()
    assert _kinds(told) == [*BEGIN, *MESSAGE_BEGINS, *MESSAGE_ENDS, "completed"]
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_log_probabilities_are_those_of_the_text() -> None:
    """With the part of the text that they end in; those of a call have no place."""
    told = _answer("one <to", "nes", CALL, logprobs=True)
    parts = [one["logprobs"] for one in told if one["type"] == "response.output_text.delta"]
    (content,) = told[-1]["response"]["output"][0]["content"]
    assert content["logprobs"] == [entry for part in parts for entry in part]
    assert len(content["logprobs"]) == 2
    assert content["logprobs"][0] == {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def _post(fake: FakeOrchestrator, path: str = PATH, figures: bool = False, **body: Any) -> Response:
    return posted(fake.endpoint, path, {"input": "hello", **body}, figures=figures)


def test_a_whole_response(fake: FakeOrchestrator) -> None:
    """Its fields are said again; figures are there where the gateway tells them."""
    answer = _post(fake, figures=True, instructions="be brief", store=True, tools=[], metadata={"a": "b"})
    found = answer.json
    assert (answer.status, found["object"], found["status"]) == (200, "response", "completed")
    assert found["id"] == f"resp_{answer.headers['x-request-id']}"
    assert found["output"][0]["content"][0]["text"] == "one two three"
    said = (found["instructions"], found["store"], found["metadata"], found["tool_choice"])
    assert said == ("be brief", False, {"a": "b"}, "auto")
    assert "num_draft_tokens" in found["metrics"]["speculative_decoding"]
    assert "metrics" not in _post(fake).json
    assert [one.content for one in fake.requests[0].chat.messages] == ["be brief", "hello"]


def test_what_is_counted(fake: FakeOrchestrator) -> None:
    """The prompt as the model reads it, even with tools that no setting reads."""
    answer = _post(fake, COUNT, instructions="hi", tools=[FLAT])
    assert (answer.status, answer.json) == (200, {"object": "response.input_tokens", "input_tokens": 7})
    assert [tool.name for tool in fake.requests[0].chat.tools] == ["add"]
    fake.error = InvalidRequest("chat.messages[0].content", "is too long")
    refused = _post(fake, COUNT, instructions="hi")
    assert (refused.status, refused.error["param"]) == (400, "instructions")


def test_a_stream_ends_with_what_a_whole_response_is(fake: FakeOrchestrator) -> None:
    """But for ids and times; each event has its name."""
    streamed, whole = _post(fake, stream=True), _post(fake).json
    names = [line for part in streamed.parts for line in part.decode().split("\n") if line[:6] == "event:"]
    assert names == [f"event: {one['type']}" for one in streamed.events]
    last = streamed.events[-1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"] == whole["usage"]


@pytest.mark.parametrize("levels", [100, 400, 900, 950, 970])
@pytest.mark.parametrize("size", [0, 100_000])
async def test_deep_schemas_are_refused_or_answered(fake: FakeOrchestrator, levels: int, size: int) -> None:
    """Nothing between: what can be read can also be said again, and passed between processes."""
    schema = '{"a": ' * levels + "1" + "}" * levels
    tools = '[{"type": "function", "name": "add", "parameters": ' + schema + "}]"
    body = '{"input": "x", "tool_choice": "none", "tools": ' + tools + " " * size + "}"
    async with rig(fake.endpoint) as made:
        answer = await made.http.post(PATH, body.encode())
    assert answer.status == (200 if levels == 100 else 400)
    assert levels != 400 or answer.error["param"] == "tools"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (InvalidRequest("sampling.max_tokens", "is too large"), 400, "max_output_tokens"),
        (InvalidRequest("sampling.logprobs", "is too large"), 400, "top_logprobs"),
        (InvalidRequest("sampling.json_schema", "is no schema"), 400, "text.format.schema"),
        (InvalidRequest("chat.messages[1].content", "is too long"), 400, "input"),
        (InvalidRequest("chat", "has no template"), 400, "input"),
        (Overloaded("the queue is full"), 429, None),
    ],
)
def test_refusals_have_a_status(
    fake: FakeOrchestrator, error: Any, status: int, named: str | None, stream: bool
) -> None:
    """And the caller's names; a stream has not begun."""
    fake.error = error
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    answer = _post(fake, stream=stream, text=text, instructions="x")
    assert (answer.status, answer.error["param"]) == (status, named)


def test_an_error_within_a_stream_is_its_last_event(fake: FakeOrchestrator) -> None:
    """A response that failed."""
    fake.breaks = [(1, grpc.StatusCode.UNAVAILABLE), *[(0, grpc.StatusCode.UNAVAILABLE)] * 9]
    answer = _post(fake, stream=True)
    last = answer.events[-1]
    assert (answer.status, last["type"], last["response"]["status"]) == (200, "response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert [one["sequence_number"] for one in answer.events] == list(range(len(answer.events)))


async def test_it_is_an_endpoint_like_the_others(fake: FakeOrchestrator) -> None:
    """It needs the token, has the caller's id, and is counted by its name."""
    async with rig(fake.endpoint, tokens=b"s3cret\n") as made:
        refused = await made.http.post(PATH, {"input": "x"})
        headers = {"authorization": "Bearer s3cret", "x-request-id": "mine"}
        answer = await made.http.post(PATH, {"input": "x"}, headers)
        labels = {"endpoint": PATH, "status": "200"}
        counted = made.registry.get_sample_value("outrider_gateway_requests_total", labels)
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert (answer.status, answer.json["id"], counted) == (200, "resp_mine", 1.0)
