"""Whatever a service is sent, it answers with a status that says what is wrong; nobody else notices, nothing
stays behind, and no error is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from hypothesis import strategies as st

from draft_service.engine import DraftEngine
from outrider.internal.keda import externalscaler_pb2 as keda
from outrider.internal.v1 import draft_pb2, verify_pb2
from outrider.protocol import wire
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import KvHandle
from outrider.v1 import generation_pb2, tokens_pb2
from tests.fuzz.messages import changed, encoded
from tests.fuzz.profile import fuzzed
from tests.fuzz.world import (
    CODE,
    World,
    behind_a_hostile_draft,
    behind_a_hostile_verify,
    bystander,
    draft_service,
    lookup_service,
    public_service,
    read_to_end,
    server_stream,
    settle,
    stream,
    unary,
    until,
    verify_service,
)
from tests.unit.draft_service.fakes import request as draft_opening
from tests.unit.draft_service.fakes import verdict
from tests.unit.verify_service.fakes import chain_block, greedy_text
from tests.unit.verify_service.fakes import opening as verify_opening
from verify_service.engine import VerifyEngine

DRAFT = "/outrider.internal.v1.DraftService/Draft"
VERIFY = "/outrider.internal.v1.VerifyService/Verify"
GENERATE = "/outrider.v1.GenerationService/Generate"
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
CHAT = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hello")])
SAMPLING = tokens_pb2.SamplingParams(
    max_tokens=8,
    temperature=0.8,
    top_p=0.9,
    top_k=5,
    seed=3,
    stop=["\x7f"],
    logit_bias={3: 1.0},
    n=2,
    logprobs=1,
)
SPECULATION = generation_pb2.SpeculationParams(mode=generation_pb2.MODE_AUTO, max_nodes=8, max_depth=4)
PROMPTS = [
    generation_pb2.GenerateRequest(
        token_ids=tokens_pb2.TokenIds(ids=[10, 20, 30]), sampling=SAMPLING, task="code"
    ),
    generation_pb2.GenerateRequest(
        text="hello", sampling=SAMPLING, speculation=SPECULATION, keep_session=True
    ),
    generation_pb2.GenerateRequest(
        chat=CHAT, sampling=tokens_pb2.SamplingParams(max_tokens=4), record_timeline=True
    ),
]
HANDLE = wire.kv_handle_to_pb(KvHandle("here", "life", "1", 3, b"digest", 2**40))
OPEN_VERIFY = verify_pb2.VerifyRequest(
    open=wire.open_verify_to_pb(verify_opening(lookup=True, traceparent=TRACE))
)
OPEN_VERIFY.open.sampling.max_tokens = 30
PROPOSE = verify_pb2.VerifyRequest(propose=wire.block_to_pb(chain_block(0, 3, greedy_text((1, 2, 3), 4))))
VERIFY_MESSAGES = [
    OPEN_VERIFY,
    PROPOSE,
    PROPOSE,
    verify_pb2.VerifyRequest(close=verify_pb2.CloseVerify(keep=True)),
]
OPEN_DRAFT = draft_pb2.DraftRequest(
    open=wire.open_draft_to_pb(draft_opening(vocabulary_hash="hash", traceparent=TRACE, pipelined=True))
)
DRAFT_MESSAGES = [
    OPEN_DRAFT,
    draft_pb2.DraftRequest(verdict=wire.verdict_to_pb(verdict(3, 4, 5, step=1))),
    draft_pb2.DraftRequest(verdict=wire.verdict_to_pb(verdict(5, 6, step=2, node_price=0.2))),
    draft_pb2.DraftRequest(close=draft_pb2.CloseDraft()),
]


def conversations(good: Sequence[Message]) -> st.SearchStrategy[list[bytes]]:
    """Streams that begin well or not at all, and go on with anything, in any order."""
    one = st.sampled_from(good).flatmap(encoded)
    well = st.just(good[0].SerializeToString())
    as_it_should = st.sampled_from(good[1:]).map(lambda message: message.SerializeToString())
    changed_opening = changed(good[0]).map(lambda message: message.SerializeToString())
    first = st.one_of(well, well, changed_opening, one)
    return st.tuples(first, st.lists(st.one_of(one, one, as_it_should), max_size=5)).map(
        lambda pair: [pair[0], *pair[1]]
    )


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """The services; started by the tests that need them."""
    one = World()
    yield one
    one.close()


@fuzzed(60, request=st.sampled_from(PROMPTS).flatmap(encoded))
def test_the_public_service(world: World, request: bytes) -> None:
    """Any request, beside one that is good."""

    async def scenario(world: World) -> None:
        rig = await world.service(public_service)
        await asyncio.gather(server_stream(rig.channel, GENERATE, request), bystander(rig))
        await rig.quiet()

    world.run(scenario)


@fuzzed(60, requests=conversations(VERIFY_MESSAGES))
def test_a_verify_stream(world: World, requests: list[bytes]) -> None:
    """Any conversation, while another session is in the middle of its own."""

    async def scenario(world: World) -> None:
        channel, engine, endpoint = await world.service(verify_service)
        good = channel.stream_stream(VERIFY)(timeout=30)
        await good.write(OPEN_VERIFY.SerializeToString())
        read = 0
        tokens: list[int] = []
        while len(tokens) < 30:
            if read == 1:
                await stream(endpoint, VERIFY, requests)
            read += 1
            tokens += verify_pb2.VerifyResponse.FromString(await good.read()).verdict.tokens
        assert tokens == greedy_text((1, 2, 3), 30)
        await good.done_writing()
        await settle(read_to_end(good))
        await nothing_is_left(engine)

    world.run(scenario)


def test_steps_stay_on_the_wire(world: World) -> None:
    """Found by fuzzing: a first step so high that a verdict's number would no longer fit."""
    high = verify_pb2.VerifyRequest.FromString(OPEN_VERIFY.SerializeToString())

    async def scenario(world: World) -> None:
        _, engine, endpoint = await world.service(verify_service)
        for first_step, code in ((2**32 - 2, CODE.INVALID_ARGUMENT), (2**31, CODE.OK)):
            high.open.first_step = first_step
            assert await stream(endpoint, VERIFY, [high.SerializeToString()]) is code
        await nothing_is_left(engine)

    world.run(scenario)


async def nothing_is_left(engine: VerifyEngine) -> None:
    """No session, and no page but those of leases."""
    await until(lambda: engine.sessions == 0 and not engine.core.sessions)


@fuzzed(60, requests=conversations(DRAFT_MESSAGES))
def test_a_draft_stream(world: World, requests: list[bytes]) -> None:
    """Any conversation, while another session waits for its next verdict."""

    async def scenario(world: World) -> None:
        channel, engine, endpoint = await world.service(draft_service)
        good = channel.stream_stream(DRAFT)(timeout=30)
        await good.write(OPEN_DRAFT.SerializeToString())
        await stream(endpoint, DRAFT, requests)
        await good.write(DRAFT_MESSAGES[1].SerializeToString())
        base = 0
        while base < 5:
            response = draft_pb2.DraftResponse.FromString(await good.read())
            base = max(base, response.block.base_length)
        await good.write(DRAFT_MESSAGES[3].SerializeToString())
        await settle(read_to_end(good))
        await nobody_is_left(engine)
        assert not engine.core._drafter.tokens

    world.run(scenario)


@fuzzed(40, requests=conversations(DRAFT_MESSAGES))
def test_a_draft_stream_without_a_model(world: World, requests: list[bytes]) -> None:
    """Any conversation with prompt lookup, then a session that is good."""

    async def scenario(world: World) -> None:
        _, engine, endpoint = await world.service(lookup_service)
        await stream(endpoint, DRAFT, requests)
        good = [OPEN_DRAFT, DRAFT_MESSAGES[1], DRAFT_MESSAGES[3]]
        assert await stream(endpoint, DRAFT, [message.SerializeToString() for message in good]) is CODE.OK
        await nobody_is_left(engine)

    world.run(scenario)


async def nobody_is_left(engine: DraftEngine) -> None:
    """No session and no entry of one."""
    await until(lambda: engine.sessions == 0 and not engine.core._entries)


UNARY = {
    "/outrider.internal.v1.VerifyService/ReleaseKv": verify_pb2.ReleaseKvRequest(kv_handle=HANDLE),
    "/outrider.internal.v1.VerifyService/ForkKv": verify_pb2.ForkKvRequest(kv_handle=HANDLE),
    "/outrider.internal.v1.VerifyService/GetModelInfo": verify_pb2.VerifyServiceGetModelInfoRequest(),
    "/outrider.internal.v1.VerifyService/GetTokenizer": verify_pb2.GetTokenizerRequest(),
    "/outrider.internal.v1.DraftService/GetModelInfo": draft_pb2.DraftServiceGetModelInfoRequest(),
    "/outrider.internal.v1.DraftService/SetShadow": draft_pb2.SetShadowRequest(
        shadow=True, version="0a1b2c3d"
    ),
    "/outrider.v1.GenerationService/GetModelInfo": generation_pb2.GetModelInfoRequest(),
    "/outrider.v1.GenerationService/ListModels": generation_pb2.ListModelsRequest(),
    "/outrider.v1.GenerationService/Tokenize": generation_pb2.TokenizeRequest(
        chat=CHAT, add_special_tokens=True, add_generation_prompt=False
    ),
    "/outrider.v1.GenerationService/Detokenize": generation_pb2.DetokenizeRequest(token_ids=[10, 20, 30]),
    "/externalscaler.ExternalScaler/IsActive": keda.ScaledObjectRef(name="draft", namespace="outrider"),
    "/externalscaler.ExternalScaler/GetMetricSpec": keda.ScaledObjectRef(name="draft", namespace="outrider"),
    "/externalscaler.ExternalScaler/GetMetrics": keda.GetMetricsRequest(
        scaledObjectRef=keda.ScaledObjectRef(name="draft"), metricName="outrider_draft_replicas_desired"
    ),
}


@fuzzed(
    150,
    call=st.sampled_from(sorted(UNARY)).flatmap(lambda name: st.tuples(st.just(name), encoded(UNARY[name]))),
)
def test_unary_calls(world: World, call: tuple[str, bytes]) -> None:
    """Handles that nobody gave out, references to anything, and bytes."""
    method, request = call

    async def scenario(world: World) -> None:
        if "VerifyService" in method:
            channel, *_ = await world.service(verify_service)
        elif "DraftService" in method:
            channel, *_ = await world.service(draft_service)
        else:
            channel = (await world.service(public_service)).channel
        await unary(channel, method, request)

    world.run(scenario)


@fuzzed(40, request=encoded(health_pb2.HealthCheckRequest(service="readiness")))
def test_health(world: World, request: bytes) -> None:
    """Any name: known, unknown, or no message; the answer afterwards is the truth."""

    async def scenario(world: World) -> None:
        channel = (await world.service(public_service)).channel
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        sent = call(request, timeout=10)
        assert await sent.code() in (CODE.OK, CODE.NOT_FOUND, CODE.INVALID_ARGUMENT)
        good = health_pb2.HealthCheckRequest(service="readiness").SerializeToString()
        answer = health_pb2.HealthCheckResponse.FromString(await call(good, timeout=10))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    world.run(scenario)


BLOCK = draft_pb2.DraftResponse(block=wire.block_to_pb(chain_block(100, 3, (40, 50, 60))))
OPENED = draft_pb2.DraftResponse(opened=draft_pb2.DraftOpened(replica="draft", incarnation="1"))
VERDICT = verify_pb2.VerifyResponse(
    verdict=wire.verdict_to_pb(verdict(4, 40, step=2, verified=3, accepted=0))
)
VERDICT.verdict.logprobs.add(token=40, logprob=-1.0)
CLOSED = verify_pb2.VerifyResponse(closed=verify_pb2.VerifyClosed(kv_handle=HANDLE))


@fuzzed(60, says=st.lists(st.sampled_from([BLOCK, BLOCK, OPENED]).flatmap(changed), min_size=1, max_size=4))
def test_what_a_draft_replica_says(world: World, says: list[Message]) -> None:
    """Whatever it proposes, the caller gets the target's tokens."""

    async def scenario(world: World) -> None:
        rig = await world.service(behind_a_hostile_draft)
        rig.replicas[1].says = says
        await bystander(rig)
        await rig.quiet()

    world.run(scenario)


@fuzzed(
    60, says=st.lists(st.sampled_from([VERDICT, VERDICT, CLOSED]).flatmap(changed), min_size=1, max_size=3)
)
def test_what_a_verify_replica_says(world: World, says: list[Message]) -> None:
    """A target that lies well is believed; one that does not is left, and the request goes on with the next
    session. Either way the request ends, and the next one is served."""

    async def scenario(world: World) -> None:
        rig = await world.service(behind_a_hostile_verify)
        rig.replicas[0].says = says
        with suppress(OutriderError):
            await rig.generate(max_tokens=12, logprobs=1)
        rig.replicas[0].says = []
        await bystander(rig)
        await rig.quiet()

    world.run(scenario)
