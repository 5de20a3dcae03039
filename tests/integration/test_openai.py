"""The HTTP door of `outrider up` on the demo pair, through the clients that people use."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from outrider.client import Client
from tests.integration.client import eventually
from tests.integration.cluster import Process
from tests.integration.test_cli import children

PROMPT = "def main():\n"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LONG = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(up: Process) -> Iterator[openai.OpenAI]:
    """The `openai` package."""
    with openai.OpenAI(base_url=up.ready["http"] + "/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
def grpc_client(up: Process) -> Iterator[Client]:
    """Our own."""
    with Client(up.endpoint) as made:
        yield made


def _metric(up: Process, name: str) -> float:
    with urllib.request.urlopen(up.ready["http"] + "/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def test_models(client: openai.OpenAI) -> None:
    """The one that is served, by itself too."""
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "target"


def test_a_completion_is_that_of_the_grpc_service(client: openai.OpenAI, grpc_client: Client) -> None:
    """Token for token, with the same parameters and seed."""
    found = client.completions.create(
        model="target", prompt=PROMPT, max_tokens=24, temperature=0.8, seed=7, top_p=0.95, logprobs=2
    )
    expected = grpc_client.generate(PROMPT, max_tokens=24, temperature=0.8, seed=7, top_p=0.95)
    (choice,) = found.choices
    assert choice.text == expected.text
    assert found.usage.completion_tokens == expected.usage.completion_tokens
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    assert all(choice.logprobs.top_logprobs)


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    """In parts, with the counts at the end."""
    request: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 24, "seed": 3}
    whole = client.completions.create(**request)
    parts = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(parts) > 3


def test_prompts_of_every_kind(client: openai.OpenAI) -> None:
    """Text, texts, ids, lists of ids; their choices come in order."""
    options: dict[str, Any] = {"model": "target", "max_tokens": 4, "temperature": 0}
    texts = ["x = ", "import "]
    single = [client.completions.create(prompt=text, **options).choices[0].text for text in texts]
    several = client.completions.create(prompt=texts, n=2, **options)
    assert [choice.text for choice in several.choices] == [single[0], single[0], single[1], single[1]]
    one = client.completions.create(prompt=[5, 6, 7], **options)
    two = client.completions.create(prompt=[[5, 6, 7], [5, 6, 7]], **options)
    assert [choice.text for choice in two.choices] == [one.choices[0].text] * 2


def test_a_conversation(client: openai.OpenAI) -> None:
    """Whole and as a stream, with log probabilities whose bytes make the text."""
    options: dict[str, Any] = {"model": "target", "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **options)
    message = whole.choices[0].message
    assert (message.role, whole.choices[0].finish_reason) == ("assistant", "length")
    content = whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == message.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    parts = client.chat.completions.create(messages=HELLO, stream=True, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == message.content
    again = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    parted = client.chat.completions.create(messages=again, **options)  # type: ignore[arg-type]
    assert parted.choices[0].message.content == message.content


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    """It puts the parts together as OpenAI's service would send them."""
    options: dict[str, Any] = {"model": "target", "messages": HELLO, "temperature": 0, "stop": ["\n", "t"]}
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**options)
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_stop_and_bias(client: openai.OpenAI) -> None:
    """A stop text ends the answer before it; a token that is forbidden does not come."""
    options: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    plain = client.completions.create(**options).choices[0]
    stop = plain.text.strip()[3:6]
    stopped = client.completions.create(**options, stop=[stop]).choices[0]
    assert stopped.text == plain.text.split(stop)[0]
    assert stopped.finish_reason == "stop"
    first = client.completions.create(**options, logprobs=0).choices[0].logprobs.tokens[0]
    with_ids = client.completions.create(**options, logit_bias={str(token): -100 for token in range(300)})
    assert with_ids.choices[0].text
    assert first


async def test_async_clients_run_side_by_side(up: Process) -> None:
    """Streams of several at once are those of each alone."""
    async with openai.AsyncOpenAI(base_url=up.ready["http"] + "/v1", api_key="unused") as client:

        async def one(seed: int) -> str:
            stream = await client.completions.create(
                model="target", prompt=PROMPT, max_tokens=16, seed=seed, stream=True
            )
            return "".join([part.choices[0].text async for part in stream])

        texts = await asyncio.gather(*(one(seed % 3) for seed in range(9)))
    assert texts[:3] == texts[3:6] == texts[6:]


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    """Each class by its status, with the field that is wrong."""
    options: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 4}
    with pytest.raises(openai.BadRequestError) as failure:
        client.completions.create(**options, top_p=3)
    assert failure.value.param == "top_p"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(**{**options, "model": "gpt-5"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(**{**options, "max_tokens": 100_000})
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="target", messages=HELLO, response_format={"type": "xml"})


def test_leaving_a_stream_frees_its_place(up: Process, client: openai.OpenAI) -> None:
    """Closing the connection cancels the request before it has run to its end."""
    tokens = _metric(up, "outrider_gateway_tokens_total")
    stream = client.completions.create(model="target", prompt=PROMPT, stream=True, **LONG)
    next(iter(stream))
    stream.close()
    running = "outrider_gateway_requests_running"
    eventually(lambda: _metric(up, running) == 0.0, "no request runs")
    assert _metric(up, "outrider_gateway_requests_aborted_total") >= 1.0
    assert _metric(up, "outrider_gateway_tokens_total") == tokens, "no continuation came to its end"


def test_curl(up: Process) -> None:
    """Server-sent events as they are on the wire, with the caller's id."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 4, "stream": True})
    headers = ("content-type: application/json", "x-request-id: my-id", "accept: text/event-stream")
    command = [curl, "-sNi", *(word for header in headers for word in ("-H", header)), "-d", body]
    done = subprocess.run(
        [*command, up.ready["http"] + "/v1/completions"], capture_output=True, text=True, timeout=60
    )
    head, _, events = done.stdout.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "x-request-id: my-id" in head
    lines = [line for line in events.split("\n") if line]
    assert all(line.startswith(("id: ", "data: ")) for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_large_prompts_come_through(up: Process) -> None:
    """A body beyond what is parsed on the event loop is parsed elsewhere."""
    ids = [5] * 1900
    body = {"prompt": [ids] * 20, "max_tokens": 1, "temperature": 0}
    assert len(json.dumps(body)) > 64 << 10
    request = urllib.request.Request(
        up.ready["http"] + "/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        choices = json.load(answer)["choices"]
    assert len({choice["text"] for choice in choices}) == 1


def _post(up: Process, path: str, body: Any) -> Any:
    data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(up.ready["http"] + path, data, kind), timeout=60
    ) as answer:
        return json.load(answer)


def test_token_ids_are_those_of_a_request(up: Process, client: openai.OpenAI, grpc_client: Client) -> None:
    """Of a text and of a conversation: as many as are counted, and the same answer comes of them."""
    options: dict[str, Any] = {"model": "target", "max_tokens": 8, "temperature": 0}
    found = _post(up, "/tokenize", {"prompt": PROMPT})
    whole = client.completions.create(prompt=PROMPT, **options)
    assert found["count"] == len(found["tokens"]) == whole.usage.prompt_tokens
    assert (
        client.completions.create(prompt=found["tokens"], **options).choices[0].text == whole.choices[0].text
    )
    chat = _post(up, "/tokenize", {"messages": HELLO})
    answer = client.chat.completions.create(messages=HELLO, **options)
    assert chat["count"] == answer.usage.prompt_tokens
    assert grpc_client.tokenize(HELLO).token_ids == tuple(chat["tokens"])
    assert found["max_model_len"] == grpc_client.models()[0].context_length


def test_text_comes_back_from_its_token_ids(up: Process, grpc_client: Client) -> None:
    """A short one and one that another process tokenizes; special tokens are left out over gRPC alone."""
    for text in (PROMPT, PROMPT * 350):
        tokens = grpc_client.tokenize(text, add_special_tokens=False).token_ids
        assert grpc_client.detokenize(tokens) == text
        assert _post(up, "/detokenize", {"tokens": tokens}) == {"prompt": text}
    (special,) = grpc_client.model_info().eos_token_ids
    assert grpc_client.detokenize([special]) == ""
    assert _post(up, "/detokenize", {"tokens": [special]})["prompt"] != ""


def test_a_cut_connection_goes_on_after_its_last_event(up: Process, client: openai.OpenAI) -> None:
    """With the seed that the service chose: the texts of both connections are that of an unbroken one."""
    body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    last, begin = _read(up, body, {}, 5)
    _, rest = _read(up, body, {"last-event-id": last}, 1000)
    seed = int(last.partition(".")[0], 16)
    whole = client.completions.create(
        model="target", prompt=PROMPT, max_tokens=200, seed=seed, extra_body={"ignore_eos": True}
    )
    assert begin
    assert begin + rest == whole.choices[0].text


def _read(up: Process, body: dict[str, Any], headers: dict[str, str], events: int) -> tuple[str, str]:
    """The last id and the text of so many events, after which the connection is closed."""
    request = urllib.request.Request(
        up.ready["http"] + "/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "accept": "text/event-stream", **headers},
    )
    last, text = "", ""
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"id: "):
                last = line[4:].strip().decode()
            elif line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                events -= 1
            if not events:
                break
    return last, text


def test_a_stream_outlives_the_orchestrator(up: Process, client: openai.OpenAI) -> None:
    """It is killed in the middle: the caller sees a pause, and the text of an unbroken stream."""
    request: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 900, "seed": 11}
    request["extra_body"] = {"ignore_eos": True}
    stream = client.completions.create(**request, stream=True)
    text = next(stream).choices[0].text
    os.kill(children(up.pid)["orchestrator"], signal.SIGKILL)
    text += "".join(part.choices[0].text for part in stream)
    assert text == client.completions.create(**request).choices[0].text


def test_a_killed_gateway_comes_back_on_its_port(up: Process, client: openai.OpenAI) -> None:
    """Its clients go on calling the same address."""
    before = children(up.pid)["gateway"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: children(up.pid).get("gateway", before) != before, "it is started again", 60)
    eventually(lambda: _answers(client), "it answers", 60)


def _answers(client: openai.OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.APIConnectionError:
        return False
