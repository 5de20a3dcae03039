"""What a request may ask for beside its prompt: over a real connection, from a scripted target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RequestInfo
from google.rpc.status_pb2 import Status

from outrider.protocol.errors import ContextTooLong, InvalidRequest
from outrider.protocol.rpc_errors import DETAILS_KEY
from outrider.rpc.channels import error_of
from outrider.v1 import generation_pb2
from tests.fakes import INFO, FakeDraft, FakeVerify, continuation
from tests.unit.orchestrator.rig import AUTO, OFF, PROMPT, SEQUENTIAL, Rig, request
from tests.unit.orchestrator.test_service import text_verify
from tests.unit.orchestrator.text.test_text_stream import byte_level


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL, OFF])
async def test_a_stop_string_may_stay_in_the_text(mode: int) -> None:
    """With the tokens that it ends in; without being asked for, the text ends before it."""
    tokenizer = byte_level()
    expected = tokenizer.decode(continuation(PROMPT, 400))
    stop = expected[20:23]
    async with Rig(text_verify(), FakeDraft()) as rig:
        kept = await rig.generate(mode=mode, stop=[stop], include_stop=True, max_tokens=400)
        cut = await rig.generate(mode=mode, stop=[stop], max_tokens=400)
    at = expected.index(stop)
    assert kept.text[0] == expected[: at + len(stop)]
    assert cut.text[0] == expected[:at]
    assert tokenizer.decode(kept.tokens[0]).startswith(kept.text[0])
    assert kept.completes[0].stop == cut.completes[0].stop == stop


@pytest.mark.parametrize("mode", [AUTO, OFF])
async def test_a_token_that_ends_the_text_has_none(mode: int) -> None:
    """Though it is an ordinary one, as in models whose end of text is not special; unless it is asked for."""
    expected = continuation(PROMPT, 40)
    stop = next(token for token in expected if expected.index(token) >= 12)
    tokens = expected[: expected.index(stop) + 1]
    tokenizer = byte_level()
    async with Rig(text_verify(), FakeDraft()) as rig:
        cut = await rig.generate(mode=mode, stop_token_ids=[stop])
        kept = await rig.generate(mode=mode, stop_token_ids=[stop], include_stop=True)
    assert cut.tokens[0] == kept.tokens[0] == tokens
    assert cut.text[0] == tokenizer.decode(tokens[:-1])
    assert kept.text[0] == tokenizer.decode(tokens)


async def test_special_tokens_may_be_spelled() -> None:
    """A stop token that is special has a text then."""
    verify = text_verify()
    async with Rig(verify) as rig:
        bias: dict[str, Any] = {"prompt": (0, 5), "max_tokens": 3}
        plain = await rig.generate(**bias)
        spelled = await rig.generate(**bias, keep_special_tokens=True)
        assert plain.tokens == spelled.tokens
        assert plain.text == spelled.text, "none of these is special"
        resumed = [*plain.tokens[0][:1], 0]
        assert verify.openings[-1].sampling.keep_special_tokens
        again = await rig.generate(**bias, keep_special_tokens=True, resume_token_ids=resumed)
        assert again.completes[0].usage.completion_tokens == 3


async def test_a_prompt_may_be_cut_to_its_end() -> None:
    """To so many tokens; a longer one stays as it is, and one beyond the context is refused all the same."""
    prompt = tuple(range(10, 30))
    async with Rig(FakeVerify()) as rig:
        cut = await rig.generate(prompt, truncate_prompt_tokens=5)
        assert cut.tokens[0] == continuation(prompt[-5:], 40)
        assert cut.completes[0].usage.prompt_tokens == 5
        assert (await rig.generate(prompt, truncate_prompt_tokens=50)).tokens[0] == continuation(prompt, 40)
        with pytest.raises(ContextTooLong):
            await rig.generate((1,) * 600, truncate_prompt_tokens=5)


async def test_the_models_defaults_hold_where_a_request_says_nothing() -> None:
    """Then the caller's own default, then greedy; what a request says wins."""
    info = replace(INFO, sampling_defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05})
    verify = FakeVerify(info)
    async with Rig(verify) as rig:
        await rig.generate()
        first = verify.openings[-1].sampling
        assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
        assert first.repetition_penalty == 1.05
        await rig.generate(temperature=0.0, top_k=0, default_temperature=1.0)
        assert (verify.openings[-1].sampling.temperature, verify.openings[-1].sampling.top_k) == (0.0, 0)
        await rig.generate(default_temperature=1.0)
        assert verify.openings[-1].sampling.temperature == 0.6
        told = await rig.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
        assert told.target.sampling_defaults.top_k == 20
        assert not told.target.sampling_defaults.HasField("top_p")
    plain = FakeVerify()
    async with Rig(plain) as rig:
        await rig.generate(default_temperature=1.0)
        assert plain.openings[-1].sampling.temperature == 1.0
        await rig.generate()
        assert plain.openings[-1].sampling.greedy


async def test_labels_are_counted() -> None:
    """By name and value, with the tokens that were made; so many of each, the rest together."""
    async with Rig(FakeVerify()) as rig:
        await rig.generate(labels={"team": "search", "app": "x"}, max_tokens=5)
        await rig.generate(labels={"team": "search"}, max_tokens=3)
        labels = {"label": "team", "value": "search"}
        assert rig.metric("labelled_requests_total", **labels) == 2
        assert rig.metric("labelled_tokens_total", **labels) == 8
        assert rig.metric("labelled_tokens_total", label="app", value="x") == 5
        for number in range(40):
            await rig.generate(labels={"team": f"t{number}"}, max_tokens=1)
        assert rig.metric("labelled_requests_total", label="team", value="other") == 9


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"labels": {f"n{number}": "x" for number in range(9)}}, "labels"),
        ({"labels": {"Team": "x"}}, "labels['Team']"),
        ({"labels": {"": "x"}}, "labels['']"),
        ({"labels": {"team": ""}}, "labels['team']"),
        ({"labels": {"team": "x" * 65}}, "labels['team']"),
        ({"labels": {"team": "a\0"}}, "labels['team']"),
        ({"priority": 6}, "priority"),
        ({"priority": -101}, "priority"),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
        ({"default_temperature": -1.0}, "sampling.temperature"),
    ],
)
async def test_what_may_not_be_is_named(fields: dict[str, Any], named: str) -> None:
    """Labels that cannot be counted by, and a priority above the one that this service allows."""
    async with Rig(FakeVerify(), max_priority=5) as rig:
        await rig.generate(priority=5, max_tokens=1)
        with pytest.raises(InvalidRequest) as caught:
            await rig.generate(**fields)
        assert caught.value.field == named


async def test_the_load_is_told() -> None:
    """Places, pages and requests now, tokens over the last seconds."""
    now = [100.0]
    info = replace(INFO, max_sessions=4, pages=50, pages_free=20)
    verify = FakeVerify(info)
    async with Rig(verify, FakeDraft(), clock=lambda: now[0], max_queued=8) as rig:

        async def load() -> generation_pb2.GetLoadResponse:
            return await rig.stub.GetLoad(generation_pb2.GetLoadRequest())

        await rig.until(lambda: any(r.info for r in rig.fleet.pools["draft"]))
        idle = await load()
        assert (idle.places, idle.free_places, idle.pages, idle.pages_free) == (4, 4, 50, 20)
        assert (idle.verify_replicas, idle.draft_replicas, idle.running, idle.waiting) == (1, 1, 0, 0)
        await rig.generate(max_tokens=30)
        assert (await load()).tokens_per_second == pytest.approx(3.0)
        now[0] += 11.0
        assert (await load()).tokens_per_second == 0.0
        verify.hold.clear()
        calls = [rig.stub.Generate(request(n=2)) for _ in range(3)]
        await rig.until(lambda: rig.orchestrator.running() == 3)
        busy = await load()
        assert (busy.running, busy.waiting, busy.free_places) == (2, 1, 0)
        for call in calls:
            call.cancel()
        verify.hold.set()


async def test_errors_carry_the_requests_id() -> None:
    """The caller's own or the one that was made for it: in the trailing metadata, and as a detail."""

    async def failed(rig: Rig, metadata: tuple[tuple[str, str], ...]) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rig.stub.Generate(request(temperature=-1.0), metadata=metadata):
                pass
        return caught.value

    async with Rig(FakeVerify()) as rig:
        error = await failed(rig, (("x-request-id", "mine"),))
        assert error_of(error).request_id == "mine"
        trailing = dict(error.trailing_metadata())
        assert trailing["x-request-id"] == "mine"
        details = Status.FromString(trailing[DETAILS_KEY]).details
        info = RequestInfo()
        assert any(detail.Unpack(info) for detail in details)
        assert info.request_id == "mine"
        made = error_of(await failed(rig, ())).request_id
        assert len(made) == 16
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Tokenize(
                generation_pb2.TokenizeRequest(text="x"), metadata=(("x-request-id", "theirs"),)
            )
        assert error_of(caught.value).request_id == "theirs"
