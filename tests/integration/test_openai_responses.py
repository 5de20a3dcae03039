"""`/v1/responses` of `outrider up` on the demo pair, through OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.integration.cluster import Process

OPTIONS: dict[str, Any] = {"model": "target", "temperature": 0, "max_output_tokens": 12}


class Answer(BaseModel):
    """What a structured answer is."""

    sure: bool
    side: Literal["left", "right"]


@pytest.fixture
def client(up: Process) -> Iterator[openai.OpenAI]:
    """The `openai` package."""
    with openai.OpenAI(base_url=up.ready["http"] + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_a_response_is_the_message_of_a_conversation(client: openai.OpenAI) -> None:
    """The same text and counts, from a text and from items, whole and as a stream."""
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model="target", messages=messages, temperature=0, max_tokens=12)
    text = chat.choices[0].message.content
    whole = client.responses.create(instructions="Be brief.", input="hello", **OPTIONS)
    assert (whole.output_text, whole.status, whole.store) == (text, "incomplete", False)
    assert whole.usage.total_tokens == chat.usage.total_tokens
    assert client.responses.create(input=messages, **OPTIONS).output_text == text
    counted = client.responses.input_tokens.count(model="target", instructions="Be brief.", input="hello")
    assert counted.input_tokens == chat.usage.prompt_tokens
    events = list(client.responses.create(input=messages, stream=True, **OPTIONS))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-1].response.output_text == text


async def test_the_async_clients_stream_helper(up: Process) -> None:
    """It puts the events together as OpenAI's service would send them."""
    async with openai.AsyncOpenAI(base_url=up.ready["http"] + "/v1", api_key="unused") as client:
        whole = await client.responses.create(input="hello", **OPTIONS)
        async with client.responses.stream(input="hello", **OPTIONS) as stream:
            text = "".join([one.delta async for one in stream if one.type == "response.output_text.delta"])
    assert whole.output_text == text != ""


def test_structured_answers_are_parsed(client: openai.OpenAI) -> None:
    """By the client, whole and as a stream; they follow the schema whatever the model is."""
    options: dict[str, Any] = {**OPTIONS, "max_output_tokens": 64, "text_format": Answer, "input": "hello"}
    whole = client.responses.parse(**options)
    with client.responses.stream(**options) as stream:
        streamed = stream.get_final_response()
    assert isinstance(whole.output_parsed, Answer)
    assert streamed.output_parsed == whole.output_parsed


def test_log_probabilities(client: openai.OpenAI) -> None:
    """Their bytes make the text."""
    found = client.responses.create(
        input="hello", include=["message.output_text.logprobs"], top_logprobs=2, **OPTIONS
    )
    (content,) = found.output[0].content  # type: ignore[union-attr]
    entries = content.logprobs  # type: ignore[union-attr]
    assert b"".join(bytes(entry.bytes) for entry in entries or []).decode() == found.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in entries or [])


def test_every_mode_has_the_same_text(client: openai.OpenAI) -> None:
    """With a seed, which is a field of the other endpoints."""
    options: dict[str, Any] = {"model": "target", "input": "hello", "max_output_tokens": 24}
    texts = [
        client.responses.create(**options, extra_body={"seed": 5, "speculation": {"mode": mode}}).output_text
        for mode in ("auto", "sequential", "off")
    ]
    assert texts[0] == texts[1] == texts[2] != ""


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    """With the field that is wrong; a stored response cannot be fetched."""
    options: dict[str, Any] = {**OPTIONS, "input": "hello"}
    with pytest.raises(openai.BadRequestError, match="in input") as earlier:
        client.responses.create(**options, previous_response_id="resp_1")
    assert earlier.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as tool:
        client.responses.create(**options, tools=[{"type": "web_search"}])
    assert tool.value.param == "tools[0].type"
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(**{**options, "max_output_tokens": 100_000})
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
