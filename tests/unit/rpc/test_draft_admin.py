"""Calls to a draft replica other than sessions."""

from __future__ import annotations

import grpc
import pytest

from outrider.protocol.errors import InternalError
from outrider.rpc.channels import open_channel
from outrider.rpc.draft_admin import draft_info, set_shadow


async def test_bytes_that_are_no_answer_are_an_error_of_the_replica() -> None:
    """A caller that handles the errors of replicas handles this one too."""

    async def garbage(request: bytes, context: object) -> bytes:
        return b"\xff\xff"

    server = grpc.aio.server()
    methods = dict.fromkeys(("GetModelInfo", "SetShadow"), grpc.unary_unary_rpc_method_handler(garbage))
    service = "outrider.internal.v1.DraftService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        for call in (draft_info(channel, seconds=5.0), set_shadow(channel, shadow=True)):
            with pytest.raises(InternalError, match="do not parse"):
                await call
    await server.stop(0)
