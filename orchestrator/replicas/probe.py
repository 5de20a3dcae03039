"""Asks one replica, with unary calls, whether it serves and which model."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from orchestrator.text.tokenizer import TextTokenizer
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol.errors import Unavailable
from outrider.protocol.messages import ModelInfo
from outrider.protocol.wire import model_info_from_pb
from outrider.rpc.channels import answer_of
from outrider.rpc.draft_admin import draft_info

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
    health = health_pb2_grpc.HealthStub(channel)
    answer = await answer_of(health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS))
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    try:
        info = await (_target_info(channel) if kind == "verify" else draft_info(channel, PROBE_SECONDS))
    except Unavailable:
        if serving:
            raise
        return Probe(None, serving)
    return Probe(info, serving)


async def fetch_tokenizer(channel: grpc.aio.Channel) -> TextTokenizer | None:
    """The target's tokenizer; None when the model has none.

    Raises:
        OutriderError: the replica cannot be reached.
    """
    stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
    files = await answer_of(stub.GetTokenizer(verify_pb2.GetTokenizerRequest(), timeout=TOKENIZER_SECONDS))
    if not files.tokenizer_json:
        return None
    return TextTokenizer(
        files.tokenizer_json, files.chat_template, dict(files.special_tokens), files.tool_chat_template
    )


async def _target_info(channel: grpc.aio.Channel) -> ModelInfo:
    stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
    request = verify_pb2.VerifyServiceGetModelInfoRequest()
    return model_info_from_pb((await answer_of(stub.GetModelInfo(request, timeout=PROBE_SECONDS))).info)
