"""From events to OpenAI's objects: what the other tests do not see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from orchestrator.gateway.calls.formats import FORMATS, OutputFormat
from orchestrator.gateway.incoming.requests import HttpRequest, chat_from, completions_from
from orchestrator.gateway.outgoing.completion_answer import Answer
from outrider.client import Chunk, Complete, Event, Generation, Started, TokenLogprob, Usage

ASKED = completions_from({"prompt": "x", "logprobs": 1})
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HERMES = OutputFormat(FORMATS["hermes"], reasoning=True)
ADD = {"type": "function", "function": {"name": "add"}}
SNOWMAN = "\N{SNOWMAN}".encode()

STARTED = Started(index=0, request_id="r", seed=1, model="m", prompt_tokens=3, cached_tokens=0)


def _logprob(token: int, spelling: bytes | None, logprob: float = -0.5) -> TokenLogprob:
    other = TokenLogprob(token=9, logprob=-math.inf, spelling=b"other")
    return TokenLogprob(token=token, logprob=logprob, spelling=spelling, top=(other,))


def _complete() -> Complete:
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    return Complete(
        index=0,
        finish_reason="stop",
        stop="END",
        usage=usage,
        speculation={},
        seed=1,
        model="m",
        request_id="r",
    )


def test_what_became_of_a_prediction_is_told() -> None:
    """Over all choices, as details of the completion's tokens."""
    usage = Usage(completion_tokens=9, accepted_prediction_tokens=6, rejected_prediction_tokens=2)
    answer = Answer.to(replace(ASKED, include_usage=True), "id", 1)
    answer.usage = {0: usage, 1: usage}
    told = answer.usage_part()["usage"]["completion_tokens_details"]
    assert told == {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 4}


def test_log_probabilities_of_a_completion() -> None:
    """Texts, numbers that JSON has, the token among its alternatives, and where each token begins."""
    answer = Answer.to(ASKED, "id", 1)
    for text, spelling, offset in (("ab", b"ab", 0), ("c", b"c", 2)):
        chunk = Chunk(index=0, text=text, token_ids=(1,), logprobs=(_logprob(1, spelling),))
        part = answer.part(chunk, chunk)
        assert part is not None
        assert part["choices"][0]["logprobs"] == {
            "tokens": [text],
            "token_logprobs": [-0.5],
            "top_logprobs": [{"other": -9999.0, text: -0.5}],
            "text_offset": [offset],
        }


def test_a_token_that_is_part_of_a_character() -> None:
    """Its bytes are whole though its text is not; without a tokenizer there is its id."""
    asked = chat_from(
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "stream": True, "top_logprobs": 1}
    )
    entries = (_logprob(1, SNOWMAN[:1]), _logprob(2, None))
    chunk = Chunk(index=0, text="", token_ids=(1, 2), logprobs=entries)
    answer = Answer.to(asked, "id", 1)
    answer.part(STARTED, STARTED)
    part = answer.part(chunk, chunk)
    assert part is not None
    first, second = part["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == ("\N{REPLACEMENT CHARACTER}", [0xE2])
    assert (second["token"], second["bytes"]) == ("token_id:2", None)
    assert [other["token"] for other in first["top_logprobs"]] == ["other"]


def test_what_ended_a_text() -> None:
    """The stop text that was found, as vLLM tells it."""
    answer = Answer.to(ASKED, "id", 1)
    end = answer.part(_complete(), _complete())
    assert end is not None
    choice = end["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", "END", "")


def test_an_event_without_text_is_not_sent() -> None:
    """A verdict whose text is held back, as for a stop text that may begin, says nothing yet."""
    answer = Answer.to(ASKED, "id", 1)
    held = Chunk(index=0, text="", token_ids=(1,))
    assert answer.part(STARTED, STARTED) is None
    assert answer.part(held, held) is None
    assert answer.model == "m"


def _tools(**fields: Any) -> HttpRequest:
    return chat_from({"messages": [{"role": "user", "content": "x"}], "tools": [ADD], **fields})


def _generation(text: str, reason: Any = "stop", prompt: tuple[TokenLogprob, ...] = ()) -> Generation:
    end = replace(_complete(), finish_reason=reason)
    return Generation(
        text=text, token_ids=(1,), logprobs=(_logprob(1, text.encode()),), end=end, prompt_logprobs=prompt
    )


def _streamed(asked: HttpRequest, *texts: str) -> list[dict[str, Any]]:
    """The first choice of every part of a stream."""
    answer = Answer.to(asked, "id", 1, HERMES)
    events: list[Event] = [STARTED, *(Chunk(index=0, text=text, token_ids=(1,)) for text in texts)]
    parts = [answer.part(event, event) for event in [*events, _complete()]]
    return [part["choices"][0] for part in parts if part is not None]


def test_calls_of_a_whole_answer() -> None:
    """With ids of their own, and the reason that clients look for; a cut answer stays a cut one."""
    answer = Answer.to(_tools(), "id", 1, HERMES)
    (choice,) = answer.finished([_generation(f"Well.\n{CALL}\n{CALL}")])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Well.", "tool_calls")
    first, second = choice["message"]["tool_calls"]
    assert first["function"] == second["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert first["id"] != second["id"]
    (cut,) = answer.finished([_generation(CALL[:-14], "length")])["choices"]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", None)
    (text,) = answer.finished([_generation("No.")])["choices"]
    assert (text["finish_reason"], text["message"]["content"]) == ("stop", "No.")
    assert "tool_calls" not in text["message"]


def test_calls_of_a_stream() -> None:
    """Index, id and name first, then the arguments in parts; nothing is sent of what is held back."""
    begun, *parts, end = _streamed(_tools(), "Well. <tool", CALL[5:40], CALL[40:])
    assert begun["delta"] == {"role": "assistant", "content": ""}
    assert parts[0]["delta"] == {"content": "Well."}
    (call,) = parts[1]["delta"]["tool_calls"]
    assert (call["index"], call["type"], call["function"]["name"]) == (0, "function", "add")
    (more,) = parts[2]["delta"]["tool_calls"]
    assert set(more) == {"index", "function"}
    assert call["function"]["arguments"] + more["function"]["arguments"] == '{"a": 1}'
    assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")


def test_reasoning_has_a_field_of_its_own() -> None:
    """In whole answers and in streams, with or without calls after it; a cut one leaves an empty answer."""
    asked, text = (
        chat_from({"messages": [{"role": "user", "content": "x"}]}),
        "<think>\nSo.\n</think>\n\nYes.",
    )
    message = {"role": "assistant", "refusal": None}
    for request in (asked, _tools()):
        (choice,) = Answer.to(request, "id", 1, HERMES).finished([_generation(text)])["choices"]
        assert choice["message"] == {**message, "content": "Yes.", "reasoning_content": "So."}
        _, *parts, end = _streamed(request, "<think>So", ".\n</think>\n\nYes", ".")
        deltas = [part["delta"] for part in parts]
        assert deltas == [
            {"reasoning_content": "So"},
            {"reasoning_content": ".", "content": "Yes"},
            {"content": "."},
        ]
        assert (end["delta"], end["finish_reason"]) == ({}, "stop")
    (cut,) = Answer.to(asked, "id", 1, HERMES).finished([_generation(text[:10], "length")])["choices"]
    assert cut["message"] == {**message, "content": "", "reasoning_content": "So"}
    (call,) = Answer.to(_tools(), "id", 1, HERMES).finished([_generation(text + CALL)])["choices"]
    assert (call["message"]["reasoning_content"], call["finish_reason"]) == ("So.", "tool_calls")


def test_reasoning_may_begin_in_the_prompt() -> None:
    """The template wrote its first tag."""
    asked = chat_from({"messages": [{"role": "user", "content": "x"}]})
    begun = replace(_generation("So.</think>Yes."), prompt_end="<|im_start|>assistant\n<think>\n")
    (choice,) = Answer.to(asked, "id", 1, HERMES).finished([begun])["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("So.", "Yes.")


def test_a_constrained_answer_has_no_reasoning() -> None:
    """The constraint holds from its first token on, so that all of it is the answer."""
    asked = chat_from(
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    )
    begun = replace(_generation('{"a": 1}'), prompt_end="<think>")
    (choice,) = Answer.to(asked, "id", 1, HERMES).finished([begun])["choices"]
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": '{"a": 1}'}


def test_one_call_where_several_are_not_wanted() -> None:
    """The first; text that is held back at the end comes with it."""
    *_, end = parts = _streamed(_tools(parallel_tool_calls=False), CALL, CALL, " a <tool")
    calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0]
    assert end["delta"] == {"content": " <tool"}


def test_the_prompt_is_repeated_with_its_log_probabilities() -> None:
    """The first token has none; places in the text count the prompt too."""
    asked = completions_from({"prompt": "ab", "echo": True, "logprobs": 1})
    prompt = (TokenLogprob(token=5, logprob=0.0, spelling=b"a"), _logprob(6, b"b", -1.5))
    found = Answer.to(asked, "id", 1).finished([_generation("c", prompt=prompt)], ["ab"])
    (choice,) = found["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"other": -9999.0, "b": -1.5}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_the_best_of_alternatives_that_are_spelled_alike_counts() -> None:
    """So that a part of a character that is not the best choice does not look like it."""
    best = TokenLogprob(token=1, logprob=-0.1, spelling=SNOWMAN[:1])
    worse = TokenLogprob(token=2, logprob=-3.0, spelling=SNOWMAN[1:2])
    other = TokenLogprob(token=3, logprob=-0.7, spelling=b"a")
    for top in ((best, other), (best, other, worse)):
        chunk = Chunk(index=0, text="", token_ids=(2,), logprobs=(replace(worse, top=top),))
        part = Answer.to(ASKED, "id", 1).part(chunk, chunk)
        assert part is not None
        found = part["choices"][0]["logprobs"]
        assert found["token_logprobs"] == [-3.0]
        assert found["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -0.1, "a": -0.7}]


def test_parts_of_a_character_begin_where_it_does() -> None:
    """Each with the character's place; the token after them has the next one, also in the next part."""
    answer = Answer.to(ASKED, "id", 1)
    found: list[int] = []
    for spellings in ((b"a", SNOWMAN[:1]), (SNOWMAN[1:2],), (SNOWMAN[2:] + b"b", b"c")):
        entries = tuple(_logprob(1, spelling) for spelling in spellings)
        chunk = Chunk(index=0, text="", token_ids=(1,), logprobs=entries)
        part = answer.part(chunk, chunk)
        assert part is not None
        found += part["choices"][0]["logprobs"]["text_offset"]
    assert found == [0, 1, 1, 1, 3]


def test_bytes_that_are_no_character_have_places_of_their_own() -> None:
    """As in the text, each is a replacement character: a token never begins before the one in front of it."""
    logprobs = tuple(_logprob(1, spelling) for spelling in (b"ab", SNOWMAN[1:2], b"c", SNOWMAN[:1], b"d"))
    chunk = Chunk(index=0, text="", token_ids=(1,), logprobs=logprobs)
    part = Answer.to(ASKED, "id", 1).part(chunk, chunk)
    assert part is not None
    assert part["choices"][0]["logprobs"]["text_offset"] == [0, 2, 3, 4, 5]


def test_places_in_an_echo_do_not_count_what_the_tokenizer_puts_first() -> None:
    """A token of its own, or a space: the prompt's text does not have them."""
    asked = completions_from({"prompt": "ab", "echo": True, "logprobs": 1})
    first = TokenLogprob(token=0, logprob=0.0, spelling=b"<s>")
    for spelling in (b"a", b" a"):
        prompt = (first, _logprob(5, spelling), _logprob(6, b"b"))
        found = Answer.to(asked, "id", 1).finished([_generation("c", prompt=prompt)], ["ab"])
        assert found["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 2]


def test_an_echo_of_tokens_that_have_no_text() -> None:
    """Their log probabilities are shown all the same: a first space, or ids that the tokenizer lacks."""
    asked = completions_from({"prompt": [5], "echo": True, "logprobs": 1})
    prompt = (TokenLogprob(token=5, logprob=0.0, spelling=b" "),)
    (choice,) = Answer.to(asked, "id", 1).finished([_generation("c", prompt=prompt)], [""])["choices"]
    assert choice["text"] == "c"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]


def test_an_echo_without_tokens_is_the_prompt_only() -> None:
    """The token that is generated all the same is neither shown nor counted."""
    asked = completions_from({"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0})
    prompt = (TokenLogprob(token=5, logprob=0.0, spelling=b"a"), _logprob(6, b"b", -1.5))
    found = Answer.to(asked, "id", 1).finished([_generation("c", prompt=prompt)], ["ab"])
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5]
    assert found["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_the_prompt_by_themselves() -> None:
    """As vLLM has them: in each choice of a completion, beside the choices of a conversation."""
    prompt = (TokenLogprob(token=5, logprob=0.0, spelling=b"a"), _logprob(6, b"b", -1.5))
    expected = [
        None,
        {
            "9": {"logprob": -9999.0, "rank": 1, "decoded_token": "other"},
            "6": {"logprob": -1.5, "rank": None, "decoded_token": "b"},
        },
    ]
    completion = completions_from({"prompt": "ab", "prompt_logprobs": 1})
    found = Answer.to(completion, "id", 1).finished([_generation("c", prompt=prompt)])
    assert found["choices"][0]["prompt_logprobs"] == expected
    chat = chat_from({"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1})
    found = Answer.to(chat, "id", 1).finished([_generation("c", prompt=prompt)])
    assert found["prompt_logprobs"] == expected
