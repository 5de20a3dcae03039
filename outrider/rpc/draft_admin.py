"""Calls to a draft replica other than sessions: what it serves, and whether it is a shadow."""

from __future__ import annotations

from typing import Any

import grpc

from outrider.internal.v1 import draft_pb2, draft_pb2_grpc
from outrider.protocol.messages import ModelInfo
from outrider.protocol.wire import model_info_from_pb
from outrider.rpc.channels import answer_of

ASK_SECONDS = 5.0


async def draft_info(channel: grpc.aio.Channel, seconds: float) -> ModelInfo:
    """Ask a replica what it serves.

    Raises:
        OutriderError: the replica cannot be reached, does not answer in time, or answers what is no message.
    """
    return await _ask(channel, "GetModelInfo", draft_pb2.DraftServiceGetModelInfoRequest(), seconds)


async def set_shadow(
    channel: grpc.aio.Channel, shadow: bool, version: str = "", seconds: float = ASK_SECONDS
) -> ModelInfo:
    """Make a replica a shadow, or one whose proposals are verified; returns what it then serves.

    With a `version`, the replica changes only if it has these weights.

    Raises:
        OutriderError: as above, or the replica has other weights.
    """
    request = draft_pb2.SetShadowRequest(shadow=shadow, version=version)
    return await _ask(channel, "SetShadow", request, seconds)


async def _ask(channel: grpc.aio.Channel, method: str, request: Any, seconds: float) -> ModelInfo:
    stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
    answer = await answer_of(getattr(stub, method)(request, timeout=seconds))
    return model_info_from_pb(answer.info)
