"""`/v1/messages`: the blocks of an answer, and the events that make the same blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.gateway.calls.formats import FORMATS
from orchestrator.gateway.calls.reasoning import ReasoningParser
from orchestrator.gateway.messages.answer import MessageAnswer
from orchestrator.gateway.messages.output import Output, input_of
from orchestrator.gateway.outgoing.chat_shape import OutputReader
from orchestrator.gateway.sending import dumped
from outrider.client import Chunk, Complete, Event, Started, Usage

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
FULL = f"<think>So\n so.</think>\n\nWell. {CALL}\n{CALL}"
USED = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}}


def _answer(
    *texts: str, reason: Any = "stop", stop: str = "", parallel: bool = True, figures: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """What a stream of these texts says, and the whole answer."""
    calls = FORMATS["hermes"]
    assert calls is not None
    parser = calls.parser(())

    def read(prompt_end: str) -> OutputReader:
        return OutputReader(ReasoningParser(parser, prompt_end), parallel, lambda: "call_1")

    answer = MessageAnswer("id", Output(read), figures)
    started = Started(index=0, request_id="r", seed=1, model="m", prompt_tokens=3, cached_tokens=1)
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    end: Any = {"finish_reason": reason, "stop": stop, "usage": usage, "speculation": {}, "seed": 1}
    chunks = [Chunk(index=0, text=text, token_ids=(1,)) for text in texts]
    events: list[Event] = [started, *chunks, Complete(index=0, model="m", request_id="r", **end)]
    return [made for event in events for made in answer.events_of(event)], answer.whole


def _built(told: list[Any]) -> dict[str, Any]:
    """The message that a client puts together from the events. Checks their order."""
    assert (told[0]["type"], told[-1]["type"]) == ("message_start", "message_stop")
    message, growing = dict(told[0]["message"], content=[]), None
    for one in told[1:-1]:
        match one["type"]:
            case "content_block_start":
                assert growing is None
                assert one["index"] == len(message["content"])
                growing, written = dict(one["content_block"]), ""
            case "content_block_delta":
                assert growing is not None
                ((name, text),) = [(key, value) for key, value in one["delta"].items() if key != "type"]
                written += text if name == "partial_json" else ""
                growing |= {} if name == "partial_json" else {name: growing[name] + text}
            case "content_block_stop":
                assert growing is not None
                growing |= {"input": json.loads(written)} if written else {}
                message["content"].append(growing)
                growing = None
            case "message_delta":
                message |= one["delta"] | {"usage": one["usage"]}
    return message


def _kinds(told: list[Any]) -> list[str]:
    return [one.get("delta", {}).get("type") or one["type"].removeprefix("content_block_") for one in told]


def test_the_events_of_a_text() -> None:
    """In Anthropic's order; the counts of the prompt come first."""
    told, whole = _answer("one", " two")
    expected = ["message_start", "start", "text_delta", "text_delta", "stop", "message_delta", "message_stop"]
    assert _kinds(told) == expected
    first = told[0]["message"]
    assert (first["content"], first["stop_reason"], first["usage"]["output_tokens"]) == ([], None, 0)
    assert whole == {
        "id": "msg_id",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "one two"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 2,
        },
    }
    assert _built(told) == whole


def test_the_events_of_reasoning_text_and_calls() -> None:
    """One block after the other; reasoning ends with a signature."""
    told, whole = _answer(FULL)
    blocks = [
        {"type": "thinking", "thinking": "So\n so.", "signature": "unsigned"},
        {"type": "text", "text": "Well."},
        USED,
        USED,
    ]
    assert (whole["content"], whole["stop_reason"]) == (blocks, "tool_use")
    thought = ["start", "thinking_delta", "signature_delta", "stop"]
    call = ["start", "input_json_delta", "stop"]
    text = ["start", "text_delta", "stop"]
    assert _kinds(told)[1:-2] == [*thought, *text, *call, *call]


@pytest.mark.parametrize("at", range(1, len(FULL)))
def test_a_stream_may_be_cut_anywhere(at: int) -> None:
    """It makes the same blocks as the whole answer."""
    told, whole = _answer(FULL[:at], FULL[at:])
    assert _built(told) == whole == _answer(FULL)[1]


def test_a_stream_of_single_signs() -> None:
    """Likewise, also with text after a call."""
    text = f"{FULL} done"
    told, whole = _answer(*text)
    assert _built(told) == whole == _answer(text)[1]
    assert whole["content"][-1]["type"] == "text"


def test_one_call_where_several_are_not_wanted() -> None:
    """The first alone."""
    assert len(_answer(CALL + CALL, parallel=True)[1]["content"]) == 2
    told, whole = _answer(CALL + CALL, parallel=False)
    assert _built(told)["content"] == whole["content"] == [USED]


@pytest.mark.parametrize(
    ("text", "reason", "stop", "expected"),
    [
        ("one", "stop", "", ("end_turn", None)),
        ("one", "stop", "\n", ("stop_sequence", "\n")),
        ("one", "length", "", ("max_tokens", None)),
        (CALL, "stop", "", ("tool_use", None)),
        (CALL, "stop", "\n", ("stop_sequence", "\n")),
        (CALL, "length", "", ("max_tokens", None)),
        ("", "", "", ("end_turn", None)),
    ],
)
def test_why_it_ended(text: str, reason: str, stop: str, expected: Any) -> None:
    """What cut it off comes before its calls; the stop sequence is named."""
    told, whole = _answer(text, reason=reason, stop=stop)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert told[-2]["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}


def test_an_empty_answer_is_an_empty_text() -> None:
    """Clients look for a block."""
    told, whole = _answer()
    assert _kinds(told)[1:-2] == ["start", "stop"]
    assert _built(told)["content"] == whole["content"] == [{"type": "text", "text": ""}]
    assert _answer("<think>So.", reason="length")[1]["content"] == [
        {"type": "thinking", "thinking": "So.", "signature": "unsigned"}
    ]


def test_figures_are_there_where_the_gateway_tells_them() -> None:
    """In the whole answer, and in the event that has the counts."""
    told, whole = _answer("one", figures=True)
    assert told[-2]["metrics"] == whole["metrics"]
    assert "metrics" not in _answer("one")[1]


@pytest.mark.parametrize(
    "written",
    [
        *('{"a": 1', "[1]", "1", "nothing", "1], [2", "{} {}", "null"),
        *('{"a": NaN}', '{"a": 1e999}', '{"a": ' + "1" * 5000 + "}"),
    ],
)
def test_arguments_that_are_no_object_are_not_lost(written: str) -> None:
    """They are the text in an object, which no function takes for its own arguments."""
    assert input_of(written) == {"INVALID_JSON": written}


def test_a_call_that_is_cut_off_has_what_was_written() -> None:
    """In the whole answer; a stream has it in parts."""
    told, whole = _answer(CALL[: CALL.index("}")], reason="length")
    assert whole["content"] == [{**USED, "input": {"INVALID_JSON": '{"a": 1'}}]
    assert [one["delta"]["partial_json"] for one in told if "partial_json" in one.get("delta", {})] == [
        '{"a": 1'
    ]
    assert input_of("") == {}


@pytest.mark.parametrize("levels", [1, 500, 800, 850, 890, 900, 950, 1000, 5000])
@pytest.mark.parametrize("more", [0, 40])
def test_deep_arguments_can_be_sent(levels: int, more: int) -> None:
    """As an object or as a text, from a stack of any depth that a server has."""
    written = '{"a": ' * levels + "1" + "}" * levels

    def send(frames: int) -> bytes:
        return send(frames - 1) if frames else dumped({"content": [{"input": input_of(written)}]})

    assert send(more).startswith(b'{"content":[{"input":{')
    assert levels > 500 or "INVALID_JSON" not in input_of(written)


def test_half_a_surrogate_can_be_sent() -> None:
    """JSON may have one; UTF-8 may not."""
    assert dumped(input_of('{"a": "\\ud800"}')) == b'{"a":"?"}'
