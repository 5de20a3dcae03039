"""The gateway before a fake orchestrator: answers, streams, errors, tokens, ids, cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from outrider.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoReplica,
    OutriderError,
    Overloaded,
    RateLimited,
    Unauthenticated,
    UnknownModel,
)
from tests.unit.client.fake_orchestrator import FakeOrchestrator
from tests.unit.orchestrator.gateway.http import Response, posted, rig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "count"}
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
WORDS = "one two three"


def _post(fake: FakeOrchestrator, path: str, body: Any, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return posted(fake.endpoint, path, body, named)


def test_a_completion(fake: FakeOrchestrator) -> None:
    """Text, reason, counts and model, in OpenAI's shape."""
    answer = _post(fake, COMPLETIONS, {**PROMPT, "max_tokens": 3})
    assert answer.status == 200
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (WORDS, "stop", 0)
    assert (answer.json["object"], answer.json["model"]) == ("text_completion", "demo")
    assert answer.json["usage"]["total_tokens"] == 6
    assert fake.requests[0].sampling.max_tokens == 3


def test_a_conversation(fake: FakeOrchestrator) -> None:
    """Its answer is a message."""
    answer = _post(fake, CHAT, HELLO)
    (choice,) = answer.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": WORDS, "refusal": None}
    assert answer.json["object"] == "chat.completion"
    assert fake.requests[0].chat.messages[0].content == "hello"


def test_tools_need_the_setting_that_reads_calls(fake: FakeOrchestrator) -> None:
    """Without it they are refused, unless no tool may be called."""
    tools = [{"type": "function", "function": {"name": "now"}}]
    refused = _post(fake, CHAT, {**HELLO, "tools": tools})
    assert (refused.status, refused.error["param"]) == (400, "tools")
    assert "tool_call_parser" in refused.error["message"]
    assert _post(fake, CHAT, {**HELLO, "tools": tools, "tool_choice": "none"}).status == 200


def test_the_log_names_the_field_that_is_wrong(fake: FakeOrchestrator) -> None:
    """As the answer does, whoever refused it; a sign that a terminal obeys is spelled out."""
    refused = [{"prompt": 3}, {"nothing\x1b[2J": 1}, {}]
    with capture_logs() as lines:
        for body in refused:
            assert _post(fake, COMPLETIONS, body).status == 400
        _post(fake, COMPLETIONS, PROMPT)
        fake.error = InvalidRequest("sampling.top_p", "must be less")
        _post(fake, COMPLETIONS, PROMPT)
    named = [line.get("param") for line in lines if line["event"] == "answered"]
    assert named == ["prompt", "nothing\\x1b[2J", "prompt", None, "top_p"]


def test_an_echo_begins_with_the_prompt(fake: FakeOrchestrator) -> None:
    """Of a text and of token ids, which the orchestrator spells out."""
    answer = _post(fake, COMPLETIONS, {"prompt": "x = ", "echo": True})
    assert answer.json["choices"][0]["text"] == "x = " + WORDS
    several = _post(fake, COMPLETIONS, {"prompt": [[97], [98, 99]], "echo": True, "n": 2})
    assert [choice["text"] for choice in several.json["choices"]] == [
        "a" + WORDS,
        "a" + WORDS,
        "bc" + WORDS,
        "bc" + WORDS,
    ]


def test_an_echo_that_nobody_can_spell(fake: FakeOrchestrator) -> None:
    """The error names the field that asked for the text, and none of another endpoint."""
    fake.spells = False
    answer = _post(fake, COMPLETIONS, {"prompt": [97], "echo": True})
    assert (answer.status, answer.json["error"]["param"]) == (400, "echo")
    assert answer.json["error"]["message"] == "echo: the model came without a tokenizer"


def test_several_prompts_and_continuations(fake: FakeOrchestrator) -> None:
    """The choices of all prompts in order; each prompt is counted once."""
    answer = _post(fake, COMPLETIONS, {"prompt": ["a", "b"], "n": 2})
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
    assert {request.text for request in fake.requests} == {"a", "b"}
    assert answer.json["usage"]["prompt_tokens"] == 6
    assert answer.json["usage"]["completion_tokens"] == 12


def test_a_stream_of_a_completion(fake: FakeOrchestrator) -> None:
    """An event per verdict, the counts where they are asked for, and the end."""
    answer = _post(fake, COMPLETIONS, {**PROMPT, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, usage, done = answer.events
    assert "".join(part["choices"][0]["text"] for part in parts) == WORDS
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(part["usage"] is None for part in parts)
    assert (usage["choices"], usage["usage"]["total_tokens"], done) == ([], 6, "[DONE]")


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, HELLO)])
def test_a_stream_with_counts_in_each_part(fake: FakeOrchestrator, path: str, body: dict[str, Any]) -> None:
    """They grow to those of the end, as GuideLLM asks for them."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last, _ = _post(fake, path, {**body, "stream": True, "stream_options": options}).events
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1
    assert {part["usage"]["prompt_tokens"] for part in parts} == {last["usage"]["prompt_tokens"]}
    assert parts[-1]["usage"] == last["usage"]


def test_a_stream_of_a_conversation(fake: FakeOrchestrator) -> None:
    """Begins with the role and ends with the reason."""
    answer = _post(fake, CHAT, {**HELLO, "stream": True, "n": 2})
    *parts, done = answer.events
    for index in (0, 1):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content", "") for one in mine) == WORDS
        assert mine[-1]["finish_reason"] == "stop"
    assert done == "[DONE]"
    assert all("usage" not in part for part in parts)


def test_a_lost_orchestrator_does_not_end_a_stream(fake: FakeOrchestrator) -> None:
    """The rest comes from the next one."""
    fake.breaks = [(1, grpc.StatusCode.UNAVAILABLE)]
    answer = _post(fake, COMPLETIONS, {**PROMPT, "stream": True})
    assert "".join(part["choices"][0]["text"] for part in answer.events[:-1]) == WORDS
    assert len(fake.requests) == 2


ERRORS = [
    (InvalidRequest("sampling.top_p", "must be less"), 400, "top_p", None),
    (InvalidRequest("chat.messages[0].role", "is too long"), 400, "messages[0].role", None),
    (InvalidRequest("token_ids.ids[3]", "is too large"), 400, "prompt[3]", None),
    (ContextTooLong("text", "9 tokens leave no room"), 400, "prompt", "context_length_exceeded"),
    (Unauthenticated("authorization: send a token"), 401, None, "invalid_api_key"),
    (UnknownModel("a", "b"), 404, "model", "model_not_found"),
    (Overloaded("the queue is full", retry_after=2.4), 429, None, "overloaded"),
    (RateLimited("too often", retry_after=0.1), 429, None, "rate_limit_exceeded"),
    (NoReplica("no verify replica"), 503, None, "unavailable"),
    (DeadlineExceeded("the deadline passed"), 504, None, "timeout"),
    (InternalError("a mistake of ours"), 500, None, "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "parameter", "code"), ERRORS)
def test_refusals_have_a_status(
    fake: FakeOrchestrator,
    error: OutriderError,
    status: int,
    parameter: str | None,
    code: str | None,
    stream: bool,
) -> None:
    """And a body that says it in OpenAI's words; a stream has not begun."""
    fake.error = error
    answer = _post(fake, COMPLETIONS, {**PROMPT, "stream": stream})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (status, parameter, code)
    assert answer.error["message"]
    again = answer.headers.get("retry-after")
    assert again == (None if error.retry_after is None else {2.4: "3", 0.1: "1"}.get(error.retry_after, "1"))
    assert ("www-authenticate" in answer.headers) == (status == 401)


def test_a_field_is_called_as_the_caller_called_it(fake: FakeOrchestrator) -> None:
    """In the message too."""
    fake.error = InvalidRequest("sampling.top_p", "must be between 0 and 1, not 2")
    assert _post(fake, COMPLETIONS, PROMPT).error["message"] == "top_p: must be between 0 and 1, not 2"


def test_an_error_within_a_stream_is_its_last_event(fake: FakeOrchestrator) -> None:
    """The status has been sent by then."""
    fake.breaks = [(1, grpc.StatusCode.UNAVAILABLE), *[(0, grpc.StatusCode.UNAVAILABLE)] * 9]
    answer = _post(fake, COMPLETIONS, {**PROMPT, "stream": True})
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == "unavailable"


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, PROMPT), ("/v1/responses", {"input": "x"}), ("/outrider/stream", PROMPT)]
)
def test_an_error_within_a_stream_is_logged_and_counted(fake: FakeOrchestrator, path: str, body: Any) -> None:
    """With the status that it would have had before the stream."""
    fake.breaks = [(1, grpc.StatusCode.UNAVAILABLE), *[(0, grpc.StatusCode.UNAVAILABLE)] * 9]

    async def run() -> float | None:
        async with rig(fake.endpoint) as made:
            await made.http.post(path, {**body, "stream": True})
            labels = {"endpoint": path, "status": "503"}
            return made.registry.get_sample_value("outrider_gateway_requests_total", labels)

    with capture_logs() as lines:
        assert asyncio.run(run()) == 1.0
    assert [line["status"] for line in lines if line["event"] == "answered"] == [503]


def test_an_error_of_one_prompt_ends_all(fake: FakeOrchestrator) -> None:
    """Nobody is told half of what was asked."""
    fake.error = Overloaded("the queue is full")
    assert _post(fake, COMPLETIONS, {"prompt": ["a", "b", "c"]}).status == 429


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"prompt": NaN}', {}, 400),
        (b"\xff", {}, 400),
        (b'{"prompt": ' + b"9" * 5_000 + b"}", {}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-encoding": "gzip"}, 415),
        (b"x" * (2 << 20), {}, 413),
        (b"{}", {"content-length": "99999999999"}, 413),
    ],
)
def test_bodies_that_cannot_be_read(
    fake: FakeOrchestrator, body: bytes, headers: dict[str, str], status: int
) -> None:
    """Are refused with a status of their own, and nothing is sent on."""
    answer = _post(fake, COMPLETIONS, body, **headers)
    assert answer.status == status
    assert answer.error["message"]
    assert "sys." not in answer.error["message"]
    assert not fake.requests


async def test_large_bodies_are_read_elsewhere(fake: FakeOrchestrator) -> None:
    """And mean the same; what is wrong with one is said as well."""
    async with rig(fake.endpoint) as made:
        large = {"prompt": "x" * 100_000}
        refused = await made.http.post(COMPLETIONS, b"{" + b" " * 100_000)
        answer = await made.http.post(COMPLETIONS, large)
    assert answer.status == 200
    assert len(fake.requests[0].text) == 100_000
    assert refused.status == 400


async def test_a_body_that_does_not_come_is_given_up(fake: FakeOrchestrator) -> None:
    """After a time that is bounded."""
    async with rig(fake.endpoint) as made:
        sent: list[Any] = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "headers": [(b"content-type", b"application/json")],
        }
        never = asyncio.Event()

        async def receive() -> Any:
            await never.wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await made.gateway(scope, receive, send)
    assert sent[0]["status"] == 408


async def test_other_paths_and_methods(fake: FakeOrchestrator) -> None:
    """Are told what there is."""
    async with rig(fake.endpoint) as made:
        missing, method = await made.http.get("/v2/nothing"), await made.http.get(COMPLETIONS)
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    assert (method.status, method.headers["allow"]) == (405, "POST")


async def test_models_health_and_version(fake: FakeOrchestrator) -> None:
    """What clients look at first."""
    async with rig(fake.endpoint) as made:
        answers = [
            await made.http.get(path)
            for path in (
                *(f"/v1/models{end}" for end in ("", "/", "/demo", "/other")),
                "/health",
                "/version",
            )
        ]
        made.healthy[0] = False
        ill = await made.http.get("/health")
    models, slash, one, other, health, version = answers
    assert [model["id"] for model in models.json["data"]] == ["demo"]
    assert slash.json == models.json
    assert (one.json["id"], one.json["root"], one.json["max_model_len"]) == ("demo", "demo", 64)
    assert (other.status, other.error["param"]) == (404, "model")
    assert (health.status, version.json["version"], ill.status) == (200, "0.1.0", 503)


def test_text_becomes_token_ids(fake: FakeOrchestrator) -> None:
    """A prompt's or a conversation's, in vLLM's shape, with what was asked for passed on."""
    answer = _post(fake, "/tokenize", {"prompt": "ab", "add_special_tokens": False, "model": "demo"})
    assert answer.json == {"count": 2, "max_model_len": 64, "tokens": [97, 98], "token_strs": None}
    assert _post(fake, "/tokenize", HELLO).json["tokens"] == [ord(sign) for sign in "hello"]
    text, chat = fake.requests
    assert (text.model, text.add_special_tokens, chat.model) == ("demo", False, "")
    assert not chat.HasField("add_special_tokens")


def test_token_ids_become_text(fake: FakeOrchestrator) -> None:
    """Special ones too; the caller's bearer token goes with them."""
    answer = _post(fake, "/detokenize", {"tokens": [97, 98]}, authorization="Bearer s3cret")
    assert answer.json == {"prompt": "ab"}
    assert fake.requests[0].keep_special_tokens
    assert fake.metadata[0]["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("path", "field", "parameter"),
    [
        ("/tokenize", "text", "prompt"),
        ("/tokenize", "chat.messages", "messages"),
        ("/tokenize", "chat", "messages"),
        ("/detokenize", "token_ids", "tokens"),
        ("/detokenize", "token_ids[3]", "tokens[3]"),
    ],
)
def test_what_cannot_be_converted_is_named(
    fake: FakeOrchestrator, path: str, field: str, parameter: str
) -> None:
    """As the caller called it."""
    fake.error = InvalidRequest(field, "is wrong")
    answer = _post(fake, path, {"prompt": "x"} if path == "/tokenize" else {"tokens": [1]})
    assert (answer.status, answer.error["param"]) == (400, parameter)
    assert answer.error["message"] == f"{parameter}: is wrong"


def test_large_conversions_are_read_elsewhere(fake: FakeOrchestrator) -> None:
    """Bodies beyond what is parsed on the event loop."""
    assert _post(fake, "/detokenize", {"tokens": [97] * 30_000}).json == {"prompt": "a" * 30_000}
    assert _post(fake, "/tokenize", {"prompt": "b" * 100_000}).json["count"] == 100_000


@pytest.mark.parametrize(("path", "body"), [("/tokenize", PROMPT), ("/detokenize", {"tokens": [1]})])
async def test_closing_the_connection_ends_a_conversion(fake: FakeOrchestrator, path: str, body: Any) -> None:
    """The orchestrator hears of it, and it is counted."""
    fake.answers.clear()
    async with rig(fake.endpoint) as made:
        asked = asyncio.create_task(made.http.post(path, body))
        assert await asyncio.to_thread(fake.asked.wait, 10)
        made.http.leave.set()
        await asked
        assert await asyncio.to_thread(fake.over.wait, 10)
        assert made.registry.get_sample_value("outrider_gateway_requests_aborted_total") == 1.0
    fake.answers.set()


def test_request_ids_and_traces(fake: FakeOrchestrator) -> None:
    """A caller's own are kept, passed on and echoed; one is made where none is usable."""
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    answer = _post(fake, COMPLETIONS, PROMPT, x_request_id="my-id", traceparent=trace)
    assert answer.headers["x-request-id"] == "my-id"
    assert answer.json["id"] == "cmpl-my-id"
    assert (fake.metadata[0]["x-request-id"], fake.metadata[0]["traceparent"]) == ("my-id", trace)
    for unusable in ("", "a b", "x" * 200):
        made = _post(fake, COMPLETIONS, PROMPT, x_request_id=unusable).headers["x-request-id"]
        assert made not in ("", unusable)
    assert _post(fake, COMPLETIONS, b"{", x_request_id="my-id").headers["x-request-id"] == "my-id"


def test_tokens_are_passed_on(fake: FakeOrchestrator) -> None:
    """The orchestrator decides."""
    _post(fake, COMPLETIONS, PROMPT, authorization="Bearer s3cret")
    _post(fake, COMPLETIONS, PROMPT)
    assert fake.metadata[0]["authorization"] == "Bearer s3cret"
    assert "authorization" not in fake.metadata[1]


async def test_tokens_of_our_own_are_looked_at_first(fake: FakeOrchestrator) -> None:
    """Before the body; health and version need none."""
    async with rig(fake.endpoint, tokens=b"s3cret\n") as made:
        wrong = await made.http.post(COMPLETIONS, b"{", {"authorization": "Bearer other"})
        none = await made.http.get("/v1/models")
        hidden = await made.http.post("/tokenize", PROMPT)
        right = await made.http.post(COMPLETIONS, PROMPT, {"authorization": "Bearer s3cret"})
        open_to_all = await made.http.get("/health")
    answers = (wrong, none, hidden, right, open_to_all)
    assert [one.status for one in answers] == [401, 401, 401, 200, 200]


def test_a_token_that_no_header_can_carry_is_refused(fake: FakeOrchestrator) -> None:
    """As a request that is wrong, not as a mistake of ours; the error names the header."""
    refused = _post(fake, COMPLETIONS, PROMPT, authorization="Bearer né")
    assert (refused.status, refused.error["param"]) == (400, "authorization")
    assert refused.error["message"] == "authorization: must be printable ASCII"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), ("/v1/responses", {"input": "count"})])
async def test_closing_the_connection_cancels_the_request(
    fake: FakeOrchestrator, path: str, body: Any, stream: bool
) -> None:
    """The orchestrator hears of it, and nothing is left running here."""
    fake.answers.clear()
    async with rig(fake.endpoint) as made:
        asked = asyncio.create_task(made.http.post(path, {**body, "stream": stream}))
        assert await asyncio.to_thread(fake.asked.wait, 10)
        assert made.gateway.running == 1
        made.http.leave.set()
        await asked
        assert await asyncio.to_thread(fake.over.wait, 10)
        assert made.registry.get_sample_value("outrider_gateway_requests_aborted_total") == 1.0
        assert made.gateway.running == 0
    fake.answers.set()


async def test_a_gateway_that_drains_takes_nothing_new(fake: FakeOrchestrator) -> None:
    """And says when to come again."""
    async with rig(fake.endpoint) as made:
        made.gateway.draining = True
        answer = await made.http.post(COMPLETIONS, PROMPT)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_nobody_behind_it() -> None:
    """Is 503, not a mistake of ours."""
    async with rig("127.0.0.1:1") as made:
        answer = await made.http.post(COMPLETIONS, PROMPT)
    assert answer.status == 503
