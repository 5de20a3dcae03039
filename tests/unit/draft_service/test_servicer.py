"""The service over a real gRPC server in this process, with a drafter that is a table."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from draft_service.core import DraftCore
from draft_service.engine import DraftEngine
from draft_service.servicer import DraftServicer
from outrider.config import DraftConfig
from outrider.internal.v1 import draft_pb2, draft_pb2_grpc, session_pb2
from outrider.protocol.messages import ModelInfo, SamplingParams
from outrider.protocol.wire import block_from_pb, open_draft_to_pb, verdict_to_pb
from outrider.rpc import unread
from outrider.rpc.channels import error_of
from outrider.rpc.serving import GrpcServer
from outrider.rpc.unread import SILENT_SECONDS, UNREAD_SECONDS
from outrider.telemetry.instruments import DraftInstruments
from tests.unit.draft_service.fakes import TableDrafter, request, verdict

VOCABULARY = 200
INFO = ModelInfo(
    "tiny", "tokens:abc", VOCABULARY, 1000, replica="d0", incarnation="i0", kind="model", max_sessions=2
)
DEADLINE = 20


def _successor(tokens):
    return (((tokens[-1] + 1) % VOCABULARY, 10), ((tokens[-1] + 2) % VOCABULARY, 16))


def _opening(tokens=(1, 2, 3), **changes):
    changes = {"vocabulary_hash": "tokens:abc"} | changes
    return draft_pb2.DraftRequest(open=open_draft_to_pb(request(tokens, **changes)))


def _verdict(*arguments, **changes):
    return draft_pb2.DraftRequest(verdict=verdict_to_pb(verdict(*arguments, **changes)))


@asynccontextmanager
async def _service(unread_seconds=UNREAD_SECONDS, silent_seconds=SILENT_SECONDS, window=65535, **config):
    """An engine behind a server; yields (stub, engine, drafter)."""
    settings = DraftConfig(reflection=False, **({"max_sessions": 2} | config))
    drafter = TableDrafter(_successor)
    instruments = DraftInstruments(CollectorRegistry())
    engine = DraftEngine(lambda deliver: DraftCore(drafter, settings, instruments, deliver), settings)
    server = GrpcServer(settings, ["outrider.internal.v1.DraftService"])
    served = DraftServicer(engine, INFO, None, unread_seconds, silent_seconds)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(served, server.server)
    await server.start()
    server.set_serving(True)
    engine.start()
    try:
        options = [("grpc.http2.lookahead_bytes", window), ("grpc.http2.bdp_probe", 0)]
        opened = grpc.aio.insecure_channel(server.endpoint, options)
        async with asyncio.timeout(DEADLINE), opened as channel:
            yield draft_pb2_grpc.DraftServiceStub(channel), engine, drafter
    finally:
        await server.stop()
        await engine.stop()


async def _until_ready(call):
    """Blocks up to and with the next one that is ready."""
    blocks = []
    while not blocks or not blocks[-1].ready:
        blocks.append(block_from_pb((await call.read()).block))
    return blocks


async def _until(condition):
    while not condition():  # noqa: ASYNC110 - what another thread does has no event here
        await asyncio.sleep(0.005)


async def _error(call):
    """What the stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _to_the_end(call)
    return caught.value


async def _to_the_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_session_opens_drafts_follows_verdicts_and_closes():
    """The life of a session, as the orchestrator sees it."""
    async with _service() as (stub, engine, drafter):
        call = stub.Draft()
        await call.write(_opening())
        opened = (await call.read()).opened
        assert (opened.replica, opened.incarnation, opened.cached_length) == ("d0", "i0", 0)
        blocks = await _until_ready(call)
        assert (blocks[0].tokens[0], blocks[0].parents[0]) == (4, -3)
        await call.write(_verdict(3, 4, 5, 90))
        while 91 not in (block := block_from_pb((await call.read()).block)).tokens:
            pass  # older blocks, and one that says ready at once where drafting was slow
        assert block.base_length == 6
        await call.write(draft_pb2.DraftRequest(close=draft_pb2.CloseDraft()))
        await _to_the_end(call)
        assert await call.code() == grpc.StatusCode.OK
        await _until(lambda: len(engine.core._entries) == 0)
        assert drafter.tokens == {}


@pytest.mark.parametrize("leave", ["cancel", "half-close"])
async def test_a_stream_that_goes_away_frees_its_session(leave):
    """Nothing is left of it, whichever way it went."""
    async with _service() as (stub, engine, drafter):
        call = stub.Draft()
        await call.write(_opening())
        await call.read()
        await (call.done_writing() if leave == "half-close" else asyncio.sleep(0))
        if leave == "cancel":
            call.cancel()
        await _until(lambda: len(engine.core._entries) == 0)
        assert (drafter.tokens, drafter.holding) == ({}, {})


BAD_OPENINGS = {
    "no tokens": (_opening(()), "token_ids"),
    "a token outside": (_opening((1, 2, VOCABULARY)), "token_ids[2]"),
    "no prompt": (_opening(prompt_length=0), "prompt_length"),
    "prompt beyond the tokens": (_opening(prompt_length=4), "prompt_length"),
    "node ids of the verify side": (_opening(first_node_id=2**62), "first_node_id"),
    "a verdict first": (_verdict(3, 4), "open"),
    "nothing": (draft_pb2.DraftRequest(), "open"),
    "temperature": (
        draft_pb2.DraftRequest(
            open=draft_pb2.OpenDraft(
                token_ids=[1], prompt_length=1, vocabulary_hash="tokens:abc", sampling={"temperature": -1.0}
            )
        ),
        "sampling.temperature",
    ),
    "a bias outside": (
        draft_pb2.DraftRequest(
            open=draft_pb2.OpenDraft(
                token_ids=[1],
                prompt_length=1,
                vocabulary_hash="tokens:abc",
                sampling={"logit_bias": {VOCABULARY: 1.0}},
            )
        ),
        f"sampling.logit_bias[{VOCABULARY}]",
    ),
}


@pytest.mark.parametrize(("message", "field"), BAD_OPENINGS.values(), ids=BAD_OPENINGS)
async def test_a_bad_opening_is_refused_with_the_field_at_fault(message, field):
    """The status names it, and the service goes on."""
    async with _service() as (stub, engine, _):
        call = stub.Draft()
        await call.write(message)
        error = await _error(call)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert error_of(error).field == field
        assert len(engine.core._entries) == 0
        healthy = stub.Draft()
        await healthy.write(_opening())
        assert (await healthy.read()).WhichOneof("message") == "opened"


BAD_MESSAGES = {
    "a gap": (_verdict(4, 5), "verdict.base_length"),
    "a repetition": (_verdict(2, 5), "verdict.base_length"),
    "no tokens": (_verdict(3), "verdict.tokens"),
    "a token outside": (_verdict(3, 1, VOCABULARY), "verdict.tokens[1]"),
    "tokens beyond the end": (_verdict(3, *range(4, 10)), "verdict.tokens"),
    "an old step": (_verdict(3, 4, step=0), "verdict.step"),
    "a second opening": (_opening(), "open"),
    "nothing": (draft_pb2.DraftRequest(), "message"),
}


@pytest.mark.parametrize(("message", "field"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
async def test_a_bad_message_ends_its_own_stream_only(message, field):
    """The session is gone with its memory; the one beside it goes on."""
    async with _service() as (stub, engine, drafter):
        healthy, call = stub.Draft(), stub.Draft()
        for stream in (healthy, call):
            await stream.write(_opening(sampling=SamplingParams(max_tokens=5)))
            await stream.read()
        await call.write(message)
        error = await _error(call)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert error_of(error).field == field
        await _until(lambda: len(engine.core._entries) == 1)
        await healthy.write(_verdict(3, 9))
        blocks = await _until_ready(healthy)
        while blocks[-1].base_length < 4:
            blocks = await _until_ready(healthy)
        assert len(drafter.tokens) == 1


async def test_another_vocabulary_is_refused_with_both_names():
    """Whoever paired them sees what to change."""
    async with _service() as (stub, _, _):
        call = stub.Draft()
        await call.write(_opening(vocabulary_hash="tokens:other"))
        error = await _error(call)
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        for part in ("tokens:other", "tokens:abc", "draft with the target's tokenizer"):
            assert part in error.details()


async def test_too_many_sessions_are_told_to_retry():
    """The status carries when."""
    async with _service(max_sessions=1) as (stub, _, _):
        first, second = stub.Draft(), stub.Draft()
        await first.write(_opening())
        await first.read()
        await second.write(_opening())
        error = await _error(second)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_of(error).retry_after > 0


async def test_an_engine_that_fails_ends_the_streams():
    """Nobody waits for blocks that never come."""
    async with _service() as (stub, _, drafter):
        call = stub.Draft()
        await call.write(_opening())
        await call.read()
        drafter.expand = None
        with capture_logs() as logs:
            await call.write(_verdict(3, 9))
            error = await _error(call)
        assert error.code() == grpc.StatusCode.INTERNAL
        assert logs[0]["event"] == "the engine failed"


async def test_model_info_tells_what_is_served_and_how_full_it_is():
    """The orchestrator chooses a replica by it."""
    async with _service() as (stub, _, _):
        call = stub.Draft()
        await call.write(_opening())
        await call.read()
        response = await stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest())
        info = response.info
        assert (info.vocabulary_hash, info.kind, info.sessions) == ("tokens:abc", "model", 1)
        assert (info.replica, info.incarnation, info.pages) == ("d0", "i0", 1000)


async def test_a_replica_becomes_a_shadow_and_back():
    """If it has the weights that were meant."""
    async with _service() as (stub, _, _):
        answer = await stub.SetShadow(draft_pb2.SetShadowRequest(shadow=True))
        assert answer.info.shadow
        info = (await stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest())).info
        assert info.shadow
        assert not (await stub.SetShadow(draft_pb2.SetShadowRequest(shadow=False))).info.shadow
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.SetShadow(draft_pb2.SetShadowRequest(shadow=True, version="other"))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_features_that_nobody_reads_end_the_stream():
    """The status names the field; the session's memory is free."""
    told = session_pb2.PromptFeatures(position=1, rows=b"12")
    messages = [
        (_verdict(3, 4, features=b"1234"), "verdict.features"),
        (draft_pb2.DraftRequest(prompt_features=told), "prompt_features"),
    ]
    async with _service() as (stub, _, drafter):
        for message, field in messages:
            call = stub.Draft()
            await call.write(_opening())
            await call.read()
            await call.write(message)
            error = error_of(await _error(call))
            assert error.field == field
            await _until(lambda: drafter.tokens == {})


async def test_a_reader_that_does_not_go_on_loses_its_session():
    """Its memory and its place are free though it never hangs up."""
    async with _service(unread_seconds=0.2, window=16) as (stub, engine, drafter):
        call = stub.Draft()
        await call.write(_opening())
        await call.read()
        length = 3
        while engine.sessions:
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await call.write(_verdict(length, *[90] * 4, step=length))
            length += 4
            await asyncio.sleep(0.001)
        await _until(lambda: not drafter.tokens)
        assert (await _error(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stream_whose_first_message_does_not_come_is_ended(monkeypatch):
    """Nobody can hold streams open without a session."""
    monkeypatch.setattr(unread, "FIRST_SECONDS", 0.05)
    async with _service() as (stub, _engine, _drafter):
        error = await _error(stub.Draft())
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details().startswith("open: not sent")


async def test_a_caller_that_says_nothing_loses_its_session():
    """Though it reads: its place is free, and it is told why."""
    async with _service(silent_seconds=0.2) as (stub, engine, drafter):
        call = stub.Draft()
        await call.write(_opening())
        error = await _error(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details().startswith("verdict: none came")
        await _until(lambda: not drafter.tokens and not engine.sessions)
