"""The verify service over gRPC: a stream's life, its ends, and messages that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from outrider.config import VerifyConfig
from outrider.engine.loading.tokenizer_files import TokenizerFiles
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol import wire
from outrider.protocol.allowance import BLOCKS, LATE
from outrider.protocol.messages import OpenVerify, SamplingParams, TokenBlock
from outrider.rpc import unread
from outrider.rpc.serving import GrpcServer
from outrider.rpc.unread import UNREAD_SECONDS
from outrider.telemetry.instruments import VerifyInstruments
from tests.unit.verify_service.fakes import (
    LIMITS,
    REPLICA,
    STEP_SECONDS,
    FakeRunner,
    chain_block,
    greedy_text,
    opening,
)
from verify_service.core import CoreSettings, VerifyCore
from verify_service.engine import VerifyEngine
from verify_service.main import SERVICE
from verify_service.servicer import VerifyServicer
from verify_service.speculation.cost_model import CostModel

Request = verify_pb2.VerifyRequest


@dataclass
class Service:
    """A served engine and a client to it."""

    engine: VerifyEngine
    runner: FakeRunner
    stub: verify_pb2_grpc.VerifyServiceStub
    failures: list[str]

    async def idle(self) -> None:
        """Wait until every session is closed and every page is back."""
        async with asyncio.timeout(10):
            while self.engine.sessions or self.engine.statistics.used:  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    runner: FakeRunner | None = None,
    max_pending: int = 8,
    unread_seconds: float = UNREAD_SECONDS,
    window: int = 65535,
) -> AsyncIterator[Service]:
    """Run the service with a fake target in this process."""
    runner = runner or FakeRunner()
    settings = CoreSettings("here", "life", LIMITS, 64, 60.0, True)
    cost = CostModel([1, 64], [STEP_SECONDS, STEP_SECONDS], 64)
    instruments = VerifyInstruments(CollectorRegistry())
    failures: list[str] = []
    engine = VerifyEngine(
        lambda deliver: VerifyCore(runner, cost, settings, instruments, deliver),
        max_sessions=3,
        max_unread=max_pending,
        on_failure=lambda: failures.append("failed"),
    )
    server = GrpcServer(VerifyConfig(), [SERVICE])
    tokenizer = TokenizerFiles(b"{}", "template", {"bos_token": "<s>"}, "tools")
    VerifyServicer(engine, REPLICA, tokenizer, unread_seconds=unread_seconds).register(server.server)
    port = await server.start()
    server.set_serving(True)
    engine.start()
    try:
        options = [("grpc.http2.lookahead_bytes", window), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            yield Service(engine, runner, verify_pb2_grpc.VerifyServiceStub(channel), failures)
    finally:
        await server.stop()
        await engine.stop()


def open_pb(request: OpenVerify) -> Request:
    """An opening for the wire."""
    return Request(open=wire.open_verify_to_pb(request))


def propose_pb(proposed: TokenBlock) -> Request:
    """A block for the wire."""
    return Request(propose=wire.block_to_pb(proposed))


def close_pb(keep: bool = False) -> Request:
    """A close for the wire."""
    return Request(close=verify_pb2.CloseVerify(keep=keep))


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """Read a call to its end, which must be an error."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")


async def read_verdicts(call: Any, until: int) -> list[Any]:
    """Verdicts until `until` tokens are committed."""
    received: list[Any] = []
    while sum(len(verdict.tokens) for verdict in received) < until:
        received.append((await call.read()).verdict)
    return received


async def test_a_session_from_open_to_close() -> None:
    """Opened, verdicts that use the proposals, closed; then nothing is held."""
    async with serving() as service:
        truth = greedy_text((1, 2, 3), 20)
        call = service.stub.Verify()
        await call.write(open_pb(opening((1, 2, 3), sampling=SamplingParams(max_tokens=20))))
        opened = (await call.read()).opened
        assert (opened.replica, opened.incarnation, opened.cached_length) == ("here", "life", 0)
        await call.write(propose_pb(chain_block(0, 3, truth)))
        received = await read_verdicts(call, 20)
        assert [token for verdict in received for token in verdict.tokens] == truth
        assert received[-1].finish_reason == 2
        await call.write(close_pb())
        assert not (await call.read()).closed.HasField("kv_handle")
        assert await call.read() is grpc.aio.EOF
        await service.idle()


async def test_a_kept_session_is_taken_up_again() -> None:
    """Keep gives a handle, fork a second one; both open sessions, each once; release ends a lease."""
    async with serving() as service:
        call = service.stub.Verify()
        await call.write(open_pb(opening((1, 2, 3), sampling=SamplingParams(max_tokens=4))))
        await call.read()
        await read_verdicts(call, 4)
        await call.write(close_pb(keep=True))
        handle = (await call.read()).closed.kv_handle
        assert (handle.owner, handle.incarnation, handle.length) == ("here", "life", 6)
        forked = (await service.stub.ForkKv(verify_pb2.ForkKvRequest(kv_handle=handle))).kv_handle
        for kept in (handle, forked):
            again = service.stub.Verify()
            request = opening((5,), kv_handle=wire.kv_handle_from_pb(kept), prompt_length=7)
            await again.write(open_pb(request))
            assert (await again.read()).opened.cached_length == 6
            await again.write(close_pb())
            third = service.stub.Verify()
            await third.write(open_pb(request))
            assert (await failure(third)).code() is grpc.StatusCode.FAILED_PRECONDITION
            while (await again.read()).WhichOneof("message") != "closed":
                pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.ReleaseKv(verify_pb2.ReleaseKvRequest(kv_handle=handle))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await service.idle()


async def test_release_ends_a_lease() -> None:
    """Its pages are back when the call returns."""
    async with serving() as service:
        call = service.stub.Verify()
        await call.write(open_pb(opening((1, 2, 3))))
        await call.read()
        await call.write(close_pb(keep=True))
        while (closed := await call.read()).WhichOneof("message") != "closed":
            pass
        assert service.engine.statistics.used > 0
        await service.stub.ReleaseKv(verify_pb2.ReleaseKvRequest(kv_handle=closed.closed.kv_handle))
        assert service.engine.statistics.used == 0


@pytest.mark.parametrize("how", ["cancel", "half-close", "deadline"])
async def test_every_end_of_a_stream_returns_its_pages(how: str) -> None:
    """Cancelled, half-closed or out of time in the middle of a generation."""
    async with serving() as service:
        call = service.stub.Verify(timeout=0.2 if how == "deadline" else None)
        with suppress(grpc.aio.AioRpcError) if how == "deadline" else nullcontext():
            await call.write(open_pb(opening((1, 2, 3))))
            await call.read()
            await call.read()
        if how == "cancel":
            call.cancel()
        elif how == "half-close":
            await call.done_writing()
        await service.idle()


async def test_a_reader_that_stops_pauses_its_session() -> None:
    """Steps end when the outbox and the transport are full, and others go on."""
    async with serving(max_pending=2) as service:
        stopped = service.stub.Verify()
        await stopped.write(open_pb(opening((1, 2, 3), sampling=SamplingParams(logprobs=13))))
        other = service.stub.Verify()
        await other.write(open_pb(opening((4, 5), sampling=SamplingParams(max_tokens=150))))
        await other.read()
        assert sum(len(verdict.tokens) for verdict in await read_verdicts(other, 150)) == 150
        stopped.cancel()
        other.cancel()
        await service.idle()


async def test_a_reader_that_does_not_go_on_loses_its_session() -> None:
    """Its pages and its place are free though it never hangs up; the reason follows what waits for it."""
    async with serving(max_pending=2, unread_seconds=0.2, window=64) as service:
        call = service.stub.Verify()
        await call.write(open_pb(opening((1, 2, 3), sampling=SamplingParams(logprobs=13))))
        await call.read()
        await service.idle()
        error = await failure(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "not read" in error.details()


async def test_a_session_that_is_over_and_not_closed_is_ended() -> None:
    """After its last verdict nothing else is waited for."""
    async with serving(unread_seconds=0.2) as service:
        call = service.stub.Verify()
        await call.write(open_pb(opening((1, 2, 3), sampling=SamplingParams(max_tokens=4))))
        error = await failure(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "close" in error.details()
        await service.idle()


async def test_a_stream_whose_first_message_does_not_come_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can hold streams open without a session."""
    monkeypatch.setattr(unread, "FIRST_SECONDS", 0.05)
    async with serving() as service:
        error = await failure(service.stub.Verify())
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details().startswith("open: not sent")


async def test_sessions_beyond_the_limit_wait_and_then_are_refused() -> None:
    """As many as run may wait for a place; more get RESOURCE_EXHAUSTED and when to try again."""
    async with serving() as service:
        calls = [service.stub.Verify() for _ in range(3)]
        for call in calls:
            await call.write(open_pb(opening((1, 2, 3))))
            await call.read()
        waiting = [service.stub.Verify() for _ in range(3)]
        for call in waiting:
            await call.write(open_pb(opening((1, 2, 3))))
        while service.engine.waiting < 3:  # noqa: ASYNC110 - the server's
            await asyncio.sleep(0.001)
        seventh = service.stub.Verify()
        await seventh.write(open_pb(opening((1, 2, 3))))
        error = await failure(seventh)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error, error_details_pb2.RetryInfo).retry_delay.ToTimedelta().total_seconds() > 0
        waiting[0].cancel()
        for call in calls:
            call.cancel()
        for call in waiting[1:]:
            assert (await call.read()).HasField("opened")
            call.cancel()
        await service.idle()
        assert service.engine.waiting == 0


def details(error: grpc.aio.AioRpcError, kind: type[Any]) -> Any:
    """The detail of one kind that a status carries."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    found = kind()
    assert any(detail.Unpack(found) for detail in status.details)
    return found


BAD_OPENINGS: dict[str, tuple[OpenVerify, str]] = {
    "token": (opening((1, 2, 3, 13)), "token_ids[3]"),
    "no tokens": (opening((), prompt_length=1), "token_ids"),
    "no prompt": (opening((1, 2), prompt_length=0), "prompt_length"),
    "long prompt": (opening((1, 2), prompt_length=3), "prompt_length"),
    "context": (opening([1] * LIMITS.context_length), "token_ids"),
    "nothing left": (
        opening((1, 2), prompt_length=1, sampling=SamplingParams(max_tokens=1)),
        "sampling.max_tokens",
    ),
    "stop token": (opening(sampling=SamplingParams(stop_token_ids=(1, 99))), "sampling.stop_token_ids[1]"),
    "bias": (opening(sampling=SamplingParams(logit_bias={99: 1.0})), "sampling.logit_bias[99]"),
}
GOOD = wire.open_verify_to_pb(opening())
BAD_MESSAGES: dict[str, tuple[list[Request], str]] = {
    **{name: ([open_pb(request)], field) for name, (request, field) in BAD_OPENINGS.items()},
    "no message": ([Request()], "open"),
    "propose first": ([propose_pb(chain_block(0, 3, [1]))], "open"),
    "close first": ([close_pb()], "open"),
    "second open": ([Request(open=GOOD), Request(open=GOOD)], "open"),
    "empty message": ([Request(open=GOOD), Request()], "message"),
    "unequal parents": (
        [Request(open=GOOD), Request(propose={"tokens": [1], "acceptances": [0.5]})],
        "propose.parents",
    ),
    "unequal acceptances": (
        [Request(open=GOOD), Request(propose={"tokens": [1], "parents": [-3]})],
        "propose.acceptances",
    ),
    "not finite": (
        [
            Request(open=GOOD),
            Request(propose={"tokens": [1], "parents": [-3], "acceptances": [float("nan")]}),
        ],
        "propose.acceptances",
    ),
    "too many nodes": ([Request(open=GOOD), propose_pb(chain_block(0, 3, [1] * 1025))], "propose.tokens"),
    "temperature": (
        [Request(open={"token_ids": [1], "prompt_length": 1, "sampling": {"temperature": -1}})],
        "sampling.temperature",
    ),
}


async def test_more_blocks_than_fit_between_two_verdicts_end_their_stream() -> None:
    """Small ones without end and large ones; a session beside them does not notice."""
    small = chain_block(0, 3, [1])
    large = chain_block(0, 3, [1] * wire.MAX_BLOCK_NODES)
    async with serving() as service:
        bystander = service.stub.Verify()
        await bystander.write(open_pb(opening((4, 5), sampling=SamplingParams(max_tokens=100))))
        for block, most in ((small, LATE * BLOCKS), (large, LATE)):
            call = service.stub.Verify()
            await call.write(open_pb(opening((1, 2, 3), sampling=SamplingParams(max_tokens=1))))
            assert len(await read_verdicts(call, 1)) == 2, "opened, and the only verdict there is"
            for _ in range(most + 1):
                await call.write(propose_pb(block))
            error = await failure(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details(error, error_details_pb2.ErrorInfo).reason == "FLOOD"
        await bystander.read()
        received = await read_verdicts(bystander, 100)
        assert [token for verdict in received for token in verdict.tokens] == greedy_text((4, 5), 100)
        bystander.cancel()
        await service.idle()


async def test_wrong_messages_end_their_stream_and_name_the_field() -> None:
    """INVALID_ARGUMENT with the field in the details; a session beside them does not notice."""
    async with serving() as service:
        bystander = service.stub.Verify()
        await bystander.write(open_pb(opening((4, 5), sampling=SamplingParams(max_tokens=100))))
        await bystander.read()
        for name, (messages, field) in BAD_MESSAGES.items():
            call = service.stub.Verify()
            for message in messages:
                await call.write(message)
            error = await failure(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            violations = details(error, error_details_pb2.BadRequest).field_violations
            assert [violation.field for violation in violations] == [field], name
        received = await read_verdicts(bystander, 100)
        assert [token for verdict in received for token in verdict.tokens] == greedy_text((4, 5), 100)
        bystander.cancel()
        await service.idle()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND),
        ({"vocabulary_hash": "other"}, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_the_wrong_model_or_vocabulary_is_refused(
    change: dict[str, str], code: grpc.StatusCode
) -> None:
    """Before the session exists."""
    async with serving() as service:
        call = service.stub.Verify()
        await call.write(open_pb(replace(opening(), **change)))
        assert (await failure(call)).code() is code
        assert service.engine.sessions == 0


async def test_what_is_served_is_told() -> None:
    """Model, limits and use; and the tokenizer files."""
    async with serving() as service:
        call = service.stub.Verify()
        await call.write(open_pb(opening((1, 2, 3))))
        for kind in ("opened", "verdict"):  # pages are in use after the first step
            assert (await call.read()).WhichOneof("message") == kind
        info = (await service.stub.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest())).info
        assert (info.model, info.sessions, info.max_sessions, info.pages) == ("fake", 1, 3, 64)
        assert info.pages_free < 64
        files = await service.stub.GetTokenizer(verify_pb2.GetTokenizerRequest())
        assert (files.tokenizer_json, files.chat_template) == (b"{}", "template")
        assert (files.special_tokens, files.tool_chat_template) == ({"bos_token": "<s>"}, "tools")


class BrokenRunner(FakeRunner):
    """Fails at its third step."""

    def forward(self, segments: Any) -> Any:
        """Logits, twice."""
        if len(self.steps) == 2:
            raise RuntimeError("out of order")
        return super().forward(segments)


async def test_a_broken_engine_fails_loudly() -> None:
    """Running and new sessions get INTERNAL, and the process is told to end."""
    async with serving(runner=BrokenRunner()) as service:
        call = service.stub.Verify()
        await call.write(open_pb(opening((1, 2, 3))))
        assert (await failure(call)).code() is grpc.StatusCode.INTERNAL
        late = service.stub.Verify()
        await late.write(open_pb(opening((1, 2, 3))))
        assert (await failure(late)).code() is grpc.StatusCode.INTERNAL
        assert service.failures == ["failed"]
