"""An OpenAI-compatible server as a target."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import httpx2
import pytest

from outrider.cli.bench.openai_target import OpenAiSettings, OpenAiTarget, refusal
from outrider.cli.bench.target import Ask, Delivered, Ended, Event, Sampling
from outrider.client.conversation import Message
from outrider.protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from tests.unit.cli.bench.worlds import FakeOpenAi, chunked, event, in_a_loop, whole

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
ANSWER = (
    event({"choices": [{"text": "", "finish_reason": None}]}),
    event({"choices": [{"text": "one "}], "usage": None}),
    b": a comment\n\n",
    event({"choices": [{"text": "two\u2028"}]}),
    event({"choices": [{"text": "", "finish_reason": "length"}]}),
    event({"choices": [], "usage": USAGE}),
    event("[DONE]"),
)
CHAT = (
    event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
    event({"choices": [{"delta": {"reasoning_content": "hm"}}]}),
    event({"choices": [{"delta": {"content": "hi"}}]}),
    event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}),
)


def settings(url: str, chat: bool = False, seconds: float = 30.0, **extra: Any) -> OpenAiSettings:
    """How the server is asked."""
    return OpenAiSettings(url=url, chat=chat, seconds=seconds, sampling=Sampling(max_tokens=5), extra=extra)


def client(url: str) -> httpx2.AsyncClient:
    """One for the server at an address."""
    return httpx2.AsyncClient(base_url=url, trust_env=False)


def target(server: FakeOpenAi, **more: Any) -> OpenAiTarget:
    """The server as a target."""
    return OpenAiTarget(client(server.url), settings(server.url, **more), "demo")


async def events(found: OpenAiTarget, ask: Ask) -> list[Event]:
    """Those of one request."""
    async with aclosing(found.stream(ask)) as stream:
        return [event async for event in stream]


def serving(*pieces: bytes) -> AbstractAsyncContextManager[FakeOpenAi]:
    """A server that answers with these chunks."""
    return FakeOpenAi(chunked(*pieces)).serving()


@in_a_loop
async def test_a_completion() -> None:
    """A delivery for each part with text; the counts are the server's."""
    async with serving(*ANSWER) as server:
        found = await events(target(server), Ask(0, "x = ", seed=3))
    assert found[:-1] == [Delivered(), Delivered()]
    assert found[-1] == Ended(input_tokens=7, output_tokens=5, cached_tokens=4, finish_reason="length")
    ((first, _, body),) = server.requests
    assert first.startswith("POST /v1/completions ")
    assert body == {
        "model": "demo",
        "prompt": "x = ",
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
    }


@in_a_loop
async def test_events_may_cross_chunks() -> None:
    """A network divides them as it likes."""
    whole = b"".join(ANSWER)
    async with serving(*(whole[at : at + 7] for at in range(0, len(whole), 7))) as server:
        found = await events(target(server), Ask(0, "x"))
    assert found[:-1] == [Delivered(), Delivered()]


@in_a_loop
async def test_a_chat() -> None:
    """The part that only has a role is no token; one of a reasoning is."""
    async with serving(*CHAT) as server:
        found = await events(target(server, chat=True), Ask(0, (Message("user", "hello"),)))
    assert found[:-1] == [Delivered(), Delivered()]
    ((first, _, body),) = server.requests
    assert first.startswith("POST /v1/chat/completions ")
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert "seed" not in body


@in_a_loop
async def test_the_body_can_be_changed() -> None:
    """More fields, others, and fewer."""
    async with serving(*ANSWER) as server:
        await events(target(server, top_k=5, temperature=1.0, max_tokens=None), Ask(0, (1, 2)))
    body = server.requests[0][2]
    assert (body["top_k"], body["temperature"], body["prompt"]) == (5, 1.0, [1, 2])
    assert "max_tokens" not in body


@in_a_loop
async def test_the_first_model_is_taken_where_none_is_named() -> None:
    """From /models."""
    async with FakeOpenAi(whole({"data": [{"id": "first"}, {"id": "second"}]})).serving() as server:
        http = client(server.url)
        found = await OpenAiTarget.reach(http, settings(server.url), "")
        named = await OpenAiTarget.reach(http, settings(server.url), "mine")
    assert (found.served.model, named.served.model) == ("first", "mine")
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", [whole({"data": []}), whole("<html>"), whole({"detail": "?"})])
@in_a_loop
async def test_an_address_that_is_no_api(answer: bytes) -> None:
    """Is told from a server that is down."""
    async with FakeOpenAi(answer).serving() as server:
        with pytest.raises(Unavailable, match="GET /models failed"):
            await OpenAiTarget.reach(client(server.url), settings(server.url), "")


@in_a_loop
async def test_nobody_there() -> None:
    """The sentence names the address."""
    async with FakeOpenAi(whole("")).serving() as server:
        url = server.url
    with pytest.raises(Unavailable, match=f"cannot reach {url}"):
        await OpenAiTarget.reach(client(url), settings(url), "")


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (ANSWER[:5], "without usage"),
        ((*ANSWER[:2], event({"error": {"message": "out of pages"}})), "out of pages"),
        ((event("{"),), "the answer broke"),
        ((event([]),), "the answer broke"),
    ],
    ids=["no usage", "an error inside", "no JSON", "no object"],
)
@in_a_loop
async def test_a_stream_that_goes_wrong_has_failed(pieces: tuple[bytes, ...], said: str) -> None:
    """With what went wrong."""
    async with serving(*pieces) as server:
        with pytest.raises(Unavailable, match=said):
            await events(target(server), Ask(0, "x"))


@in_a_loop
async def test_a_connection_that_breaks_has_failed() -> None:
    """Though tokens came."""
    answer = chunked(*ANSWER)[:-80].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    async with FakeOpenAi(answer).serving() as server:
        with pytest.raises(Unavailable, match=r"the answer broke .*peer closed connection"):
            await events(target(server), Ask(0, "x"))


@in_a_loop
async def test_a_server_that_hangs_meets_the_deadline() -> None:
    """Of each request."""
    begun = chunked(*ANSWER[:2]).removesuffix(b"0\r\n\r\n")
    async with FakeOpenAi(begun).serving() as server:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
            await events(target(server, seconds=0.05), Ask(0, "x"))


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (400, '{"error": {"message": "max_tokens: too many"}}', InvalidRequest, "HTTP 400: max_tokens"),
        (401, '{"error": "no key"}', Unauthenticated, "no key; set OPENAI_API_KEY"),
        (404, '{"detail": "Not Found"}', InvalidRequest, "most end in /v1"),
        (429, "", Overloaded, "HTTP 429"),
        (307, "", InvalidRequest, "HTTP 307"),
        (503, "<html>busy", Unavailable, "HTTP 503: <html>busy"),
    ],
)
def test_a_refusal_is_an_error_of_its_kind(
    status: int, body: str, kind: type[OutriderError], said: str
) -> None:
    """With the server's own sentence."""
    error = refusal(status, body, "http://here/v1/completions")
    assert type(error) is kind
    assert said in str(error)
