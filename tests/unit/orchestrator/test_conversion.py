"""Tokenize, Detokenize and ListModels as a client sees them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from orchestrator.servicer import TOKENIZED_BEYOND
from outrider.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    OutriderError,
    RateLimited,
    UnknownModel,
)
from outrider.rpc.channels import error_of
from outrider.v1 import generation_pb2
from tests.fakes import INFO, FakeVerify
from tests.unit.orchestrator.rig import Rig
from tests.unit.orchestrator.test_service import Never, long_text, text_verify
from tests.unit.orchestrator.text.test_text_stream import byte_level
from tests.unit.orchestrator.text.test_tokenizer import TEMPLATE

TOKENIZER = byte_level()
POSITIONS = 4096
INFO_OF_TEXT = replace(INFO, context_length=POSITIONS, vocabulary_size=300, bos_token_id=0)
CHAT = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")])


def verify(**files: Any) -> FakeVerify:
    """A verify replica with a whole vocabulary and a context that long texts fit."""
    return text_verify(info=INFO_OF_TEXT, **files)


async def tokenize(rig: Rig, deadline: float = 20.0, **fields: Any) -> generation_pb2.TokenizeResponse:
    """One answer; raises the OutriderError that the status stands for."""
    found: generation_pb2.TokenizeResponse = await asked(
        rig.stub.Tokenize(generation_pb2.TokenizeRequest(**fields), timeout=deadline)
    )
    return found


async def detokenize(rig: Rig, deadline: float = 20.0, **fields: Any) -> str:
    """Likewise, the text."""
    message = generation_pb2.DetokenizeRequest(**fields)
    text: str = (await asked(rig.stub.Detokenize(message, timeout=deadline))).text
    return text


async def asked(call: Awaitable[Any]) -> Any:
    """The answer to a call, or its error."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None


@pytest.mark.parametrize("content", ["def f():", "", long_text(1500)])
async def test_a_text_becomes_its_tokens_and_back(content: str) -> None:
    """Long ones, in another process, as short ones."""
    async with Rig(verify()) as rig:
        found = await tokenize(rig, text=content)
        assert tuple(found.token_ids) == TOKENIZER.encode(content)
        assert (found.count, found.context_length) == (len(found.token_ids), POSITIONS)
        assert await detokenize(rig, token_ids=found.token_ids) == content


@pytest.mark.parametrize("content", ["x" * 900, "hell" * 3000, "x" * (512 + TOKENIZED_BEYOND)])
async def test_a_text_longer_than_the_context_is_tokenized(content: str) -> None:
    """Callers ask for its ids to find out how long it is; to generate from it is refused as before."""
    async with Rig(text_verify(info=replace(INFO, context_length=512))) as rig:
        found = await tokenize(rig, text=content)
        assert tuple(found.token_ids) == TOKENIZER.encode(content)
        assert (found.count, found.context_length) == (len(found.token_ids), 512)
        with pytest.raises(ContextTooLong):
            await rig.generate(text=content)


async def test_the_tokens_are_those_that_are_generated_from() -> None:
    """Of a text and of a conversation, unless the caller asks for something else."""
    replica = verify(chat_template=TEMPLATE)
    async with Rig(replica) as rig:
        for prompt in ({"text": "hello"}, {"chat": CHAT}):
            await rig.generate(**prompt)
            assert (await tokenize(rig, **prompt)).token_ids == list(replica.openings[-1].token_ids)
        short = await tokenize(rig, chat=CHAT, add_generation_prompt=False)
        assert await detokenize(rig, token_ids=short.token_ids) == "user: hi\n"


async def test_special_tokens_are_the_callers_choice() -> None:
    """Around a text or a conversation, and in the text that ids become."""
    replica = verify(chat_template=TEMPLATE, bos=True)
    async with Rig(replica) as rig:
        whole = (await tokenize(rig, text="hello")).token_ids
        bare = (await tokenize(rig, text="hello", add_special_tokens=False)).token_ids
        assert whole == [0, *bare]
        assert await detokenize(rig, token_ids=whole) == "hello"
        assert await detokenize(rig, token_ids=whole, keep_special_tokens=True) == "<s>hello"
        plain = (await tokenize(rig, chat=CHAT)).token_ids
        assert (await tokenize(rig, chat=CHAT, add_special_tokens=True)).token_ids == [0, *plain]


WRONG: list[tuple[str, dict[str, Any], type[OutriderError], str]] = [
    ("Tokenize", {}, InvalidRequest, "prompt"),
    ("Tokenize", {"text": "x", "model": "gpt-5"}, UnknownModel, "model"),
    ("Tokenize", {"text": "x", "model": "m" * 600}, InvalidRequest, "model"),
    ("Tokenize", {"text": "x", "add_generation_prompt": True}, InvalidRequest, "add_generation_prompt"),
    ("Tokenize", {"text": "x" * (512 + TOKENIZED_BEYOND + 1)}, ContextTooLong, "text"),
    ("Tokenize", {"text": "hell" * (512 + TOKENIZED_BEYOND + 1)}, ContextTooLong, "text"),
    ("Tokenize", {"text": "x" * 8_000_000}, ContextTooLong, "text"),
    ("Tokenize", {"chat": generation_pb2.Chat()}, InvalidRequest, "chat.messages"),
    (
        "Tokenize",
        {"chat": generation_pb2.Chat(messages=list(CHAT.messages) * 4097)},
        InvalidRequest,
        "chat.messages",
    ),
    ("Detokenize", {"token_ids": [1], "model": "gpt-5"}, UnknownModel, "model"),
    ("Detokenize", {"token_ids": [1, 10**6]}, InvalidRequest, "token_ids[1]"),
    ("Detokenize", {"token_ids": [1] * 600}, ContextTooLong, "token_ids"),
]


@pytest.mark.parametrize(("method", "fields", "error", "named"), WRONG)
async def test_wrong_fields_are_named(
    method: str, fields: dict[str, Any], error: type[OutriderError], named: str
) -> None:
    """And each is counted as rejected."""
    info = replace(INFO, context_length=512)
    async with Rig(text_verify(info=info, chat_template=TEMPLATE)) as rig:
        message = getattr(generation_pb2, f"{method}Request")(**fields)
        with pytest.raises(error) as caught:
            await asked(getattr(rig.stub, method)(message, timeout=20))
        assert caught.value.field == named
        assert rig.metric("requests_rejected_total", reason=error("", "").reason) == 1


async def test_a_model_without_a_tokenizer() -> None:
    """Is listed as one that takes token ids, and what needs a tokenizer is refused."""
    async with Rig(FakeVerify()) as rig:
        (model,) = (await rig.stub.ListModels(generation_pb2.ListModelsRequest())).models
        assert (model.name, model.context_length) == (INFO.model, INFO.context_length)
        assert not model.text_prompts
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: tokenize(rig, text="x"), "text"),
            (lambda: tokenize(rig, chat=CHAT), "chat.messages"),
            (lambda: detokenize(rig, token_ids=[1]), "token_ids"),
        ]
        for call, named in calls:
            with pytest.raises(InvalidRequest) as caught:
                await call()
            assert caught.value.field == named


async def test_models_say_which_prompts_they_take() -> None:
    """Text with a tokenizer, conversations with a template."""
    async with Rig(verify(chat_template=TEMPLATE)) as rig:
        (model,) = (await rig.stub.ListModels(generation_pb2.ListModelsRequest())).models
        assert (model.text_prompts, model.chat_prompts) == (True, True)
        assert model.vocabulary_size == INFO_OF_TEXT.vocabulary_size


async def test_a_deadline_ends_what_waits() -> None:
    """For the other process, in both directions; a drain waits for it."""
    async with Rig(verify()) as rig:
        rig.orchestrator.servicer.tokenizing._start = Never().start
        with pytest.raises(DeadlineExceeded):
            await tokenize(rig, deadline=0.3, text=long_text(1500))
        with pytest.raises(DeadlineExceeded):
            await detokenize(rig, deadline=0.3, token_ids=[10] * 2000)
        assert await detokenize(rig, token_ids=TOKENIZER.encode("short")) == "short"


async def test_conversions_count_for_the_rate_limit() -> None:
    """As requests do; to ask what there is costs nothing."""
    now = time.monotonic()
    async with Rig(verify(), clock=lambda: now, client_rate=1.0, client_burst=2) as rig:
        await tokenize(rig, text="x")
        await detokenize(rig, token_ids=[10])
        for call in (tokenize(rig, text="x"), detokenize(rig, token_ids=[10])):
            with pytest.raises(RateLimited):
                await call
        assert (await rig.stub.ListModels(generation_pb2.ListModelsRequest())).models
