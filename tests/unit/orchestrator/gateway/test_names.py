"""Errors of the orchestrator name the field as the caller of the HTTP API wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming import values
from outrider.protocol.errors import ContextTooLong, InvalidRequest
from tests.unit.client.fake_orchestrator import FakeOrchestrator, fail, serving
from tests.unit.orchestrator.gateway.http import Response, posted

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LOGPROBS = {**HELLO, "logprobs": True, "top_logprobs": 30}


def _post(fake: FakeOrchestrator, path: str, body: Any) -> Response:
    return posted(fake.endpoint, path, body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "field", "named"),
    [
        (COMPLETIONS, {"prompt": "x", "stop": ""}, "sampling.stop[0]", "stop"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a", ""]}, "sampling.stop[1]", "stop[1]"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 30}, "sampling.logprobs", "logprobs"),
        (CHAT, LOGPROBS, "sampling.logprobs", "top_logprobs"),
        (RESPONSES, {"input": "x", "top_logprobs": 30}, "sampling.logprobs", "top_logprobs"),
        (CHAT, {**HELLO, "max_tokens": 0}, "sampling.max_tokens", "max_tokens"),
        (CHAT, {**HELLO, "max_completion_tokens": 0}, "sampling.max_tokens", "max_completion_tokens"),
        (CHAT, HELLO, "speculation.prediction", "prediction"),
        (CHAT, HELLO, "speculation.prediction.text", "prediction.content"),
        (CHAT, HELLO, "chat.tools[3].name", "tools[3].function.name"),
        (RESPONSES, {"input": "x"}, "chat.tools[3].name", "tools[3].name"),
        (CHAT, HELLO, "chat.messages[0].parts[1].text", "messages[0].content[1].text"),
        (CHAT, HELLO, "chat.messages[0].tool_calls[2].id", "messages[0].tool_calls[2].id"),
        (
            CHAT,
            HELLO,
            "chat.messages[0].tool_calls[2].arguments",
            "messages[0].tool_calls[2].function.arguments",
        ),
    ],
)
def test_a_field_has_the_callers_name(
    fake: FakeOrchestrator, path: str, body: Any, field: str, named: str, stream: bool
) -> None:
    """In the message too."""
    fake.error = InvalidRequest(field, "is wrong")
    answer = _post(fake, path, {**body, "stream": stream})
    assert (answer.status, answer.error["param"]) == (400, named)
    assert answer.error["message"] == f"{named}: is wrong"


def test_a_name_does_not_change_the_kind_of_error(fake: FakeOrchestrator) -> None:
    """Clients shorten a conversation by the code."""
    fake.error = ContextTooLong("sampling.max_tokens", "is too large")
    answer = _post(fake, CHAT, {**HELLO, "max_completion_tokens": 9})
    assert answer.error["code"] == "context_length_exceeded"


class Choosy(FakeOrchestrator):
    """Refuses one text, and one token id."""

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """See the proto."""
        ids = list(request.token_ids.ids)
        if request.text == "bad":
            fail(context, InvalidRequest("text", "is bad"))
        if 99 in ids:
            fail(context, InvalidRequest(f"token_ids.ids[{ids.index(99)}]", "is bad"))
        yield from super().Generate(request, context)


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (["a", "bad", "c"], "prompt[1]"),
        ([[1], [1, 2, 99]], "prompt[1][2]"),
        ("bad", "prompt"),
        ([1, 99], "prompt[1]"),
    ],
)
def test_of_several_prompts_the_wrong_one_is_named(prompts: Any, named: str) -> None:
    """And the entry in it."""
    with serving(Choosy()) as (fake, endpoint):
        fake.endpoint = endpoint
        answer = _post(fake, COMPLETIONS, {"prompt": prompts})
    assert (answer.status, answer.error["param"]) == (400, named)
    assert answer.error["message"] == f"{named}: is bad"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"text": "a"}, "p.type: is missing; use text"),
        ({"type": "None"}, "p.type: 'None' is not supported; use text"),
    ],
)
def test_a_type_that_is_missing_is_no_type_of_another_name(part: Any, said: str) -> None:
    """Nobody sent a type that is called None."""
    with pytest.raises(Problem) as caught:
        values.part_of_text("p", part)
    assert str(caught.value) == said
