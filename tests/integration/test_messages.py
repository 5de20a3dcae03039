"""`/v1/messages` through Anthropic's own client: of `outrider up`, and of an orchestrator by script."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from pydantic import BaseModel

from orchestrator.gateway.incoming.fields import COUNTED, MESSAGES
from tests.integration.cluster import Cluster, Process
from tests.integration.scripted_orchestrator import ScriptedOrchestrator, serve

QUESTION: Any = {"role": "user", "content": "hello"}
GREEDY: dict[str, Any] = {"temperature": 0}
OPTIONS: dict[str, Any] = {"model": "target", "max_tokens": 12, "messages": [QUESTION], "extra_body": GREEDY}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
THOUGHT = f"<think>\nAdd.\n</think>\n\nWell. {CALL}"
FINAL = "It is 3."
HEADERS = {"user_profile_id", "workspace_id"}
"""Parameters that the client sends as headers."""


class Answer(BaseModel):
    """What a structured answer is."""

    sure: bool
    side: Literal["left", "right"]


@pytest.fixture
def client(up: Process) -> Iterator[anthropic.Anthropic]:
    """The `anthropic` package."""
    with anthropic.Anthropic(base_url=up.ready["http"], api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedOrchestrator, str]]:
    """The orchestrator, and the URL of a gateway before it."""
    orchestrator = ScriptedOrchestrator()
    server, endpoint = serve(orchestrator)
    cluster = Cluster(tmp_path_factory.mktemp("gateway"))
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    process = cluster.launch("serve", "gateway", "--orchestrator", endpoint, "--port", "0", *flags)
    yield orchestrator, process.wait_ready().ready["endpoint"]
    cluster.stop()
    server.stop(None)


@pytest.mark.parametrize(
    ("known", "params"),
    [
        (MESSAGES, message_create_params.MessageCreateParamsBase),
        (COUNTED, message_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_field_of_the_client_has_its_row(known: Any, params: Any) -> None:
    """Whatever it may send is looked at."""
    assert set(params.__annotations__) - HEADERS <= set(known)


def test_a_message_is_the_answer_of_a_chat(up: Process, client: anthropic.Anthropic) -> None:
    """The same text and counts, whole and as a stream, also in the client's beta form."""
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    whole = client.messages.create(system=system, **OPTIONS)
    chat = _post(
        f"{up.ready['http']}/v1/chat/completions",
        {**GREEDY, "max_tokens": 12, "messages": [{"role": "system", "content": "Be brief."}, QUESTION]},
    )
    text = chat["choices"][0]["message"]["content"]
    assert _text(whole) == text
    assert (whole.stop_reason, whole.role, whole.model) == ("max_tokens", "assistant", "target")
    counts = whole.usage
    read = counts.input_tokens + (counts.cache_read_input_tokens or 0)
    assert (read, counts.output_tokens) == (chat["usage"]["prompt_tokens"], 12)
    counted = client.messages.count_tokens(model="target", system=system, messages=[QUESTION])
    assert counted.input_tokens == read
    with client.messages.stream(system=system, **OPTIONS) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    beta = client.beta.messages.create(system=system, betas=["x"], **OPTIONS)
    assert _text(beta) == text
    assert beta._request_id == beta.id.removeprefix("msg_")


def test_the_model_is_listed(client: anthropic.Anthropic) -> None:
    """As the client expects a model, on one page."""
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("target", "model", "target")
    assert model.created_at <= datetime.now(UTC)
    assert model.max_input_tokens == client.models.retrieve("target").max_tokens > 0


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    """And the text ends before it."""
    full = _text(client.messages.create(**OPTIONS))
    stop = full[len(full) // 2 :][:2]
    assert len(stop) == 2
    answer = client.messages.create(**OPTIONS, stop_sequences=["not there at all", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert _text(answer) == full[: full.index(stop)]


def test_the_answer_continues_a_begun_one(client: anthropic.Anthropic) -> None:
    """Word for word: what was generated is generated again after its first half."""
    full = _text(client.messages.create(**{**OPTIONS, "max_tokens": 8}))
    begun: Any = {"role": "assistant", "content": full}
    longer = _text(client.messages.create(**{**OPTIONS, "max_tokens": 12}))
    rest = client.messages.create(**{**OPTIONS, "max_tokens": 4, "messages": [QUESTION, begun]})
    assert full + _text(rest) == longer


def test_every_mode_has_the_same_text(client: anthropic.Anthropic) -> None:
    """With a seed, which is a field of the other endpoints."""
    more = [{"seed": 5, "speculation": {"mode": mode}} for mode in ("auto", "sequential", "off")]
    texts = [_text(client.messages.create(**{**OPTIONS, "extra_body": one})) for one in more]
    assert texts[0] == texts[1] == texts[2] != ""


def test_structured_answers_are_parsed(client: anthropic.Anthropic) -> None:
    """By the client, whole and as a stream; they follow the schema whatever the model is."""
    options = {**OPTIONS, "max_tokens": 64, "output_format": Answer}
    whole = client.messages.parse(**options)
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert isinstance(whole.parsed_output, Answer)
    assert streamed.parsed_output == whole.parsed_output


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    """With the field that is wrong, and the id of the request. Anthropic's words and the numbers tell clients
    how many tokens they may ask for.
    """
    exceeded = r"input length and `max_tokens` exceed context limit: \d+ \+ 20000 > 2048; max_tokens: 20000 "
    with pytest.raises(anthropic.BadRequestError, match=exceeded) as long:
        client.messages.create(**{**OPTIONS, "max_tokens": 20_000})
    assert long.value.type == "invalid_request_error"
    assert long.value.request_id
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type: 'web_search"):
        client.messages.create(**OPTIONS, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with (
        pytest.raises(anthropic.NotFoundError) as unknown,
        client.messages.stream(**OPTIONS | {"model": "x"}),
    ):
        pass
    assert unknown.value.type == "not_found_error"
    assert [one.id for one in client.models.list()] == ["target"]


async def test_a_round_trip_of_reasoning_and_calls(scripted: tuple[ScriptedOrchestrator, str]) -> None:
    """Whole and as a stream, by the async client: the blocks go back as they came, with the result."""
    orchestrator, url = scripted
    options: Any = {"model": "target", "max_tokens": 64, "tools": [ADD], "thinking": {"type": "adaptive"}}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
        orchestrator.answers = [THOUGHT, THOUGHT, FINAL]
        whole = await client.messages.create(messages=[QUESTION], **options)
        async with client.messages.stream(messages=[QUESTION], **options) as stream:
            streamed = await stream.get_final_message()
        both: list[Any] = [whole, streamed]
        for one in both:
            thinking, text, call = one.content
            assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
            assert (thinking.thinking, text.text) == ("Add.", "Well.")
            assert (call.name, call.input, one.stop_reason) == ("add", {"a": 1, "b": 2}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": both[1].content[2].id, "content": "3"}
        answer: Any = {"role": "assistant", "content": streamed.content}
        talk: Any = [QUESTION, answer, {"role": "user", "content": [result]}]
        last = await client.messages.create(messages=talk, **options)
        assert (_text(last), last.stop_reason) == (FINAL, "end_turn")
    asked = orchestrator.requests[-1].chat
    assert [message.role for message in asked.messages] == ["user", "assistant", "tool"]
    assert asked.messages[1].reasoning_content == "Add."
    call = asked.messages[1].tool_calls[0]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
    assert asked.messages[2].tool_call_id == call.id
    assert json.loads(asked.chat_template_kwargs) == {"enable_thinking": True}


def _post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _text(message: Any) -> str:
    (block,) = message.content
    return str(block.text)
