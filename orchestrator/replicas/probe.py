"""Asks one replica, with unary calls, whether it serves and which model."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from orchestrator.replicas.stream import parsed
from orchestrator.text.tokenizer import TextTokenizer
from outrider.internal.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from outrider.protocol.errors import Unavailable
from outrider.protocol.messages import ModelInfo
from outrider.protocol.wire import model_info_from_pb
from outrider.rpc.channels import error_of

PROBE_SECONDS = 2.0
TOKENIZER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A replica's answer."""

    info: ModelInfo | None
    """None when the replica loads or drains, and does not say what it serves."""
    serving: bool


async def probe(kind: str, channel: grpc.aio.Channel) -> Probe:
    """Health and model of a "verify" or "draft" replica.

    Raises:
        OutriderError: it cannot be reached, does not answer in time, or answers what is no message.
    """
    try:
        health = health_pb2_grpc.HealthStub(channel)
        answer = parsed(await health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS))
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None
    try:
        return Probe(await _model_info(kind, channel), serving)
    except grpc.aio.AioRpcError as error:
        problem = error_of(error)
        if serving or not isinstance(problem, Unavailable):
            raise problem from None
        return Probe(None, serving)


async def fetch_tokenizer(channel: grpc.aio.Channel) -> TextTokenizer | None:
    """The target's tokenizer; None when the model has none.

    Raises:
        OutriderError: the replica cannot be reached.
    """
    request = verify_pb2.GetTokenizerRequest()
    try:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
        files = parsed(await stub.GetTokenizer(request, timeout=TOKENIZER_SECONDS))
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None
    if not files.tokenizer_json:
        return None
    return TextTokenizer(
        files.tokenizer_json, files.chat_template, dict(files.special_tokens), files.tool_chat_template
    )


async def _model_info(kind: str, channel: grpc.aio.Channel) -> ModelInfo:
    if kind == "verify":
        verify = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
        request = verify_pb2.VerifyServiceGetModelInfoRequest()
        return model_info_from_pb(parsed(await verify.GetModelInfo(request, timeout=PROBE_SECONDS)).info)
    draft = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
    answer = await draft.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=PROBE_SECONDS)
    return model_info_from_pb(parsed(answer).info)
