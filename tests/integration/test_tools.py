"""Tools and reasoning, through the clients that people use.

The calls of a scripted orchestrator behind a real gateway; the prompts of the real services, whose target
has a template that shows both.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from outrider.client import Client
from tests.integration.cluster import DEMO_TARGET, Cluster, Process, demo_up
from tests.integration.scripted_orchestrator import ScriptedOrchestrator, serve

TEMPLATE = """{% if tools %}# tools: {{ tools | tojson }}
{% endif %}{% for message in messages %}# {{ message.role }}: {% set thought = message.reasoning_content -%}
{% if thought %}<think>{{ thought }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %} {{ call.function.name }}({{ call.function.arguments | tojson }})
{%- endfor %}
{% endfor %}{% if add_generation_prompt %}# assistant:{% if short %} (short){% endif %}{% if think %}<think>
{% endif %}{% endif %}"""
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
QUESTION: Any = {"role": "user", "content": "What is 1 + 2?"}
CALL = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
FINAL = "It is 3."


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedOrchestrator, str]]:
    """The orchestrator, and the URL of a gateway before it."""
    orchestrator = ScriptedOrchestrator()
    server, endpoint = serve(orchestrator)
    cluster = Cluster(tmp_path_factory.mktemp("gateway"))
    arguments = ("--orchestrator", endpoint, "--port", "0", "--tool-call-parser", "hermes")
    process = cluster.launch("serve", "gateway", *arguments, "--reasoning-parser", "think").wait_ready()
    yield orchestrator, process.ready["endpoint"] + "/v1"
    cluster.stop()
    server.stop(None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target with a template that knows tools."""
    folder = tmp_path_factory.mktemp("models") / "target"
    folder.mkdir()
    for file in DEMO_TARGET.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Iterator[Process]:
    """`outrider up` on it and the demo draft."""
    folder = tmp_path_factory.mktemp("up")
    with demo_up(folder, target, OUTRIDER_GATEWAY_TOOL_CALL_PARSER="hermes") as process:
        yield process


@contextmanager
def another_gateway(up: Process, folder: Path, *flags: str) -> Iterator[str]:
    """The URL of a gateway with other settings before the same orchestrator."""
    cluster = Cluster(folder)
    try:
        arguments = ("--orchestrator", up.endpoint, "--port", "0", *flags)
        yield cluster.launch("serve", "gateway", *arguments).wait_ready().ready["endpoint"] + "/v1"
    finally:
        cluster.stop()


async def test_a_round_trip_of_the_async_client(scripted: tuple[ScriptedOrchestrator, str]) -> None:
    """Question, call, result, answer: whole and as a stream, with the same call in both."""
    orchestrator, url = scripted
    options: Any = {"model": "target", "tools": [ADD]}
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        orchestrator.answers = [CALL, CALL, FINAL]
        whole = await client.chat.completions.create(messages=[QUESTION], **options)
        (choice,) = whole.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
        async with client.chat.completions.stream(messages=[QUESTION], **options) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == "tool_calls"
        found = [one.message.tool_calls[0].function for one in (choice, streamed)]
        assert [(one.name, json.loads(one.arguments)) for one in found] == [("add", {"a": 1, "b": 2})] * 2
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "3"}
        talk: Any = [QUESTION, choice.message.model_dump(), result]
        last = await client.chat.completions.create(messages=talk, **options)
        assert (last.choices[0].message.content, last.choices[0].finish_reason) == (FINAL, "stop")
    asked = orchestrator.requests[-1].chat
    assert [tool.name for tool in asked.tools] == ["add"]
    assert [message.role for message in asked.messages] == ["user", "assistant", "tool"]
    call = asked.messages[1].tool_calls[0]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
    assert asked.messages[2].tool_call_id == call.id


async def test_a_round_trip_of_reasoning(scripted: tuple[ScriptedOrchestrator, str]) -> None:
    """Whole and as a stream, of both APIs; it goes back with the next turn."""
    orchestrator, url = scripted
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        orchestrator.answers = [f"<think>\nAdd.\n</think>\n\n{FINAL}"] * 4
        whole = await client.chat.completions.create(model="target", messages=[QUESTION])
        message = whole.choices[0].message
        assert (message.content, message.model_extra) == (FINAL, {"reasoning_content": "Add."})
        async with client.chat.completions.stream(model="target", messages=[QUESTION]) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message
        assert streamed.model_dump()["reasoning_content"] == "Add."
        assert streamed.content == FINAL
        talk: Any = [QUESTION, message.model_dump(), QUESTION]
        await client.chat.completions.create(model="target", messages=talk)
        assert orchestrator.requests[-1].chat.messages[1].reasoning_content == "Add."
        async with client.responses.stream(model="target", input=[QUESTION]) as events:
            response = await events.get_final_response()
        reasoning: Any = response.output[0]
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Add.")
        assert response.output_text == FINAL
        orchestrator.answers = [FINAL]
        again: Any = [QUESTION, *(one.model_dump() for one in response.output), QUESTION]
        await client.responses.create(model="target", input=again)
        assert orchestrator.requests[-1].chat.messages[1].reasoning_content == "Add."


async def test_a_round_trip_of_responses(scripted: tuple[ScriptedOrchestrator, str]) -> None:
    """The same by the newer API: the items of an answer go back as they came, with the result."""
    orchestrator, url = scripted
    options: Any = {"model": "target", "tools": [{"type": "function", "strict": True, **ADD["function"]}]}
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        orchestrator.answers = [CALL, CALL, FINAL]
        talk: Any = [QUESTION]
        whole = await client.responses.create(input=talk, **options)
        async with client.responses.stream(input=talk, **options) as stream:
            streamed = await stream.get_final_response()
        for one in (whole, streamed):
            text, call = one.output
            assert (one.output_text, text.type, call.type) == ("Well.", "message", "function_call")
            assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
        result = {"type": "function_call_output", "call_id": streamed.output[1].call_id, "output": "3"}
        talk += [*(item.model_dump(exclude={"parsed_arguments"}) for item in whole.output), result]
        talk[-2]["call_id"] = result["call_id"]
        last = await client.responses.create(input=talk, **options)
        assert (last.output_text, last.status) == (FINAL, "completed")
    asked = orchestrator.requests[-1].chat
    assert [message.role for message in asked.messages] == ["user", "assistant", "tool"]
    call = asked.messages[1].tool_calls[0]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
    assert asked.messages[2].tool_call_id == call.id


def test_without_a_choice_of_tools_text_is_left_as_it_is(scripted: tuple[ScriptedOrchestrator, str]) -> None:
    """Even where it looks like a call; the prompt shows no tools."""
    orchestrator, url = scripted
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        options: Any = {"model": "target", "messages": [QUESTION], "tools": [ADD]}
        orchestrator.answers = [CALL]
        found = client.chat.completions.create(**options, tool_choice="none")
        assert found.choices[0].message.content == CALL
        assert not orchestrator.requests[-1].chat.tools


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_that_is_required_comes(up: Process, temperature: float) -> None:
    """From a model that was never taught to call: whole, as a stream, and the same in every mode."""
    closed = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    flip: Any = {"name": "flip", "parameters": {**closed, "additionalProperties": False}}
    tools: Any = [ADD, {"type": "function", "function": flip}]
    options: Any = {"model": "target", "messages": [QUESTION], "tools": tools, "max_tokens": 48, "seed": 3}
    choice: Any = {"type": "function", "function": {"name": "flip"}}
    found = []
    with openai.OpenAI(base_url=up.ready["http"] + "/v1", api_key="unused", max_retries=0) as client:
        for mode in ("auto", "sequential", "off"):
            answer = client.chat.completions.create(
                **options,
                tool_choice=choice,
                temperature=temperature,
                extra_body={"speculation": {"mode": mode}},
            )
            (call,) = answer.choices[0].message.tool_calls or []
            assert (call.function.name, answer.choices[0].finish_reason) == ("flip", "tool_calls")
            assert isinstance(json.loads(call.function.arguments)["a"], bool)
            found.append(call.function.arguments)
        assert len(set(found)) == 1
        with client.chat.completions.stream(**options, tool_choice=choice, temperature=temperature) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls or []
        assert [one.function.arguments for one in streamed] == found[:1]
        every = client.chat.completions.create(**options, tool_choice="required", temperature=temperature)
        calls = every.choices[0].message.tool_calls or []
        assert calls
        assert {one.function.name for one in calls} <= {"add", "flip"}
        wrong: Any = {"name": "f", "parameters": {"type": "nothing"}}
        options["tools"] = [{"type": "function", "function": wrong}]
        with pytest.raises(openai.BadRequestError, match="tools: "):
            client.chat.completions.create(**options, tool_choice="required")


def test_langchain(scripted: tuple[ScriptedOrchestrator, str], up: Process) -> None:
    """Tools of Python functions, streams that add up to the same call, a plain talk with the real pair."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    orchestrator, url = scripted
    settings: Any = {"api_key": "unused", "model": "target", "max_retries": 0}
    agent = ChatOpenAI(base_url=url, **settings).bind_tools([add])
    orchestrator.answers = [CALL, CALL, FINAL]
    answer = agent.invoke("What is 1 + 2?")
    (call,) = answer.tool_calls
    assert (call["name"], call["args"], answer.content) == ("add", {"a": 1, "b": 2}, "Well.")
    parts = list(agent.stream("What is 1 + 2?"))
    together = parts[0]
    for part in parts[1:]:
        together += part
    assert [(one["name"], one["args"]) for one in together.tool_calls] == [(call["name"], call["args"])]
    talk = [HumanMessage("What is 1 + 2?"), answer, ToolMessage("3", tool_call_id=call["id"])]
    assert agent.invoke(talk).content == FINAL

    model = ChatOpenAI(base_url=up.ready["http"] + "/v1", temperature=0, max_tokens=12, **settings)
    whole = model.invoke("hello")
    assert "".join(str(part.content) for part in model.stream("hello")) == whole.content
    with Client(up.endpoint) as client:
        assert whole.content == client.generate([{"role": "user", "content": "hello"}], max_tokens=12).text


def test_litellm(
    scripted: tuple[ScriptedOrchestrator, str], up: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, as a provider with an OpenAI API."""
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would be fetched at import
    import litellm

    orchestrator, url = scripted
    settings: Any = {"model": "openai/target", "api_key": "unused", "num_retries": 0}
    orchestrator.answers = [CALL, CALL]
    found = litellm.completion(api_base=url, messages=[QUESTION], tools=[ADD], **settings)
    (call,) = found.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert found.choices[0].finish_reason == "tool_calls"
    parts = list(litellm.completion(api_base=url, messages=[QUESTION], tools=[ADD], stream=True, **settings))
    built = litellm.stream_chunk_builder(parts)
    (again,) = built.choices[0].message.tool_calls
    assert json.loads(again.function.arguments) == {"a": 1, "b": 2}

    options: Any = {"messages": [QUESTION], "temperature": 0, "max_tokens": 12}
    plain = litellm.completion(api_base=up.ready["http"] + "/v1", **options, **settings)
    with Client(up.endpoint) as client:
        assert plain.choices[0].message.content == client.generate([QUESTION], max_tokens=12).text
    options["messages"] = [QUESTION, plain.choices[0].message, {"role": "user", "content": "and now?"}]
    turn = litellm.completion(api_base=up.ready["http"] + "/v1", **options, **settings)
    assert turn.usage.prompt_tokens > plain.usage.total_tokens


def test_prompts_are_those_of_the_models_own_library(up: Process, target: Path) -> None:
    """Tools, calls, results, more variables, and a message to continue: token for token."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    talk: list[Any] = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    begun = [QUESTION, {"role": "assistant", "content": "It is "}]
    thought = [QUESTION, {"role": "assistant", "content": FINAL, "reasoning_content": "So."}, QUESTION]
    sent = json.loads(json.dumps(talk))
    sent[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": 1, "b": 2})
    cases: list[tuple[list[Any], list[Any], dict[str, Any], dict[str, Any]]] = [
        (sent, talk, {"tools": [ADD]}, {"tools": [ADD], "add_generation_prompt": True}),
        (begun, begun, {"continue_final_message": True}, {"continue_final_message": True}),
        (thought, thought, {}, {"add_generation_prompt": True}),
        (
            [QUESTION],
            [QUESTION],
            {"chat_template_kwargs": {"short": True}},
            {"short": True, "add_generation_prompt": True},
        ),
    ]
    with Client(up.endpoint) as client:
        for messages, theirs, fields, options in cases:
            text = tokenizer.apply_chat_template(theirs, tokenize=False, **options)
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert _tokenized(up, {"messages": messages, **fields}) == expected
            answer = _chat(up, {"messages": messages, **fields, "max_tokens": 4, "temperature": 0})
            assert answer["usage"]["prompt_tokens"] == len(expected)
            same = client.generate(expected, max_tokens=4).text
            assert answer["choices"][0]["message"]["content"] == same


def test_reasoning_that_the_template_begins(up: Process, tmp_path: Path) -> None:
    """All that a model writes before the last tag is reasoning."""
    chat: Any = {"messages": [QUESTION], "chat_template_kwargs": {"think": True}}
    with Client(up.endpoint) as client:
        expected = client.generate(_tokenized(up, chat), max_tokens=8)
    options: Any = {"model": "target", "messages": [QUESTION], "max_tokens": 8, "temperature": 0}
    with (
        another_gateway(up, tmp_path, "--reasoning-parser", "think") as url,
        openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client,
    ):
        extra = {"chat_template_kwargs": {"think": True}}
        message = client.chat.completions.create(**options, extra_body=extra).choices[0].message
    assert message.content == ""
    assert message.model_extra == {"reasoning_content": expected.text.strip(" \t\r\n")}


def test_a_required_call_with_tags(up: Process, tmp_path: Path) -> None:
    """In the format of Qwen 3 Coder; whole and as a stream the same arguments."""
    properties = {"n": {"type": "boolean"}, "day": {"enum": ["mon", "tue"]}}
    parameters = {"type": "object", "properties": properties, "required": ["n", "day"]}
    tools: Any = [{"type": "function", "function": {"name": "plan", "parameters": parameters}}]
    options: Any = {"model": "target", "messages": [QUESTION], "tools": tools, "max_tokens": 96, "seed": 5}
    options |= {"tool_choice": "required", "parallel_tool_calls": False}
    with (
        another_gateway(up, tmp_path, "--tool-call-parser", "qwen3_coder") as url,
        openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client,
    ):
        whole = client.chat.completions.create(**options).choices[0]
        with client.chat.completions.stream(**options) as stream:
            streamed = stream.get_final_completion().choices[0]
    found = [one.message.tool_calls[0].function for one in (whole, streamed)]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert found[0].name == "plan"
    assert found[0].arguments == found[1].arguments
    made = json.loads(found[0].arguments)
    assert type(made["n"]) is bool
    assert made["day"] in ("mon", "tue")


def test_log_probabilities_of_a_prompt(up: Process) -> None:
    """Over both doors, with a cached prompt too; an echo says what was scored."""
    text = "def add(a, b):\n    return a + b\n"
    body = {"prompt": text, "max_tokens": 4, "temperature": 0, "logprobs": 1, "echo": True}
    with Client(up.endpoint) as client:
        plain = client.generate(text, max_tokens=4)
        result = client.generate(text, max_tokens=4, prompt_logprobs=1)
        (generation,) = result.generations
        assert len(generation.prompt_logprobs) == result.usage.prompt_tokens
        assert b"".join(one.spelling or b"" for one in generation.prompt_logprobs).decode() == text
        assert result.text == plain.text
        for mode in ("off", "sequential"):
            other = client.generate(text, max_tokens=4, prompt_logprobs=1, mode=mode)
            assert other.token_ids == result.token_ids
            both = zip(other.generations[0].prompt_logprobs, generation.prompt_logprobs, strict=True)
            assert all(abs(one.logprob - two.logprob) < 1e-3 for one, two in both)
    echoed = _post(up, "/v1/completions", body)["choices"][0]
    assert echoed["text"] == text + plain.text
    scored = echoed["logprobs"]["token_logprobs"]
    assert scored[0] is None
    expected = [one.logprob for one in generation.prompt_logprobs[1:]]
    assert scored[1 : len(expected) + 1] == pytest.approx(expected, abs=1e-3)
    ids = [one.token for one in generation.prompt_logprobs]
    again = _post(up, "/v1/completions", {**body, "prompt": ids})["choices"][0]
    assert again["text"] == echoed["text"]
    theirs = _post(up, "/v1/completions", {"prompt": text, "max_tokens": 1, "prompt_logprobs": 0})
    entries = theirs["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert [next(iter(entry)) for entry in entries[1:]] == [str(token) for token in ids[1:]]


def _tokenized(up: Process, body: Any) -> Any:
    return _post(up, "/tokenize", body)["tokens"]


def _chat(up: Process, body: Any) -> Any:
    return _post(up, "/v1/chat/completions", body)


def _post(up: Process, path: str, body: Any) -> Any:
    data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(up.ready["http"] + path, data, kind)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
