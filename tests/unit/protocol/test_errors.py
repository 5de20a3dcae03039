"""Every error of ours has a status and crosses the wire unchanged."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import grpc
import pytest

from outrider.config import VerifyConfig
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol import errors
from outrider.protocol.errors import OutriderError, UnknownModel
from outrider.protocol.rpc_errors import MAX_MESSAGE, details_of, message_of
from outrider.rpc.channels import error_of, open_channel
from outrider.rpc.serving import GrpcServer

NAME = "outrider.internal.v1.VerifyService"
ARGUMENTS: dict[type[OutriderError], tuple[object, ...]] = {
    errors.InvalidRequest: ("sampling.top_p", "must be between 0 and 1"),
    errors.ContextTooLong: ("token_ids", "2000 tokens do not fit 1024"),
    errors.UnknownModel: ("gpt", "demo"),
    errors.Overloaded: ("queue full", 2.5),
    errors.OutOfPages: ("no page", 0.25),
    errors.Unavailable: ("not now", 4.0),
    errors.Draining: ("going", 1.5),
    errors.NoReplica: ("none", 3.0),
}


def every_error() -> list[type[OutriderError]]:
    """The whole tree."""
    found = [OutriderError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return [kind for kind in found if kind.__module__ == errors.__name__]


class Raiser(verify_pb2_grpc.VerifyServiceServicer):
    """Raises what it was given, in a unary method and in a stream."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def GetModelInfo(self, request: object, context: object) -> object:  # noqa: N802
        """See the proto."""
        raise self.error

    async def Verify(self, requests: object, context: object) -> object:  # noqa: N802
        """See the proto."""
        yield verify_pb2.VerifyResponse()
        raise self.error


async def _what_arrives(error: Exception) -> list[OutriderError]:
    """The error as a client sees it, from a unary call and from a stream."""
    server = GrpcServer(VerifyConfig(), [NAME])
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(Raiser(error), server.server)
    await server.start()
    server.set_serving(True)
    found = []
    async with open_channel(server.endpoint) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest())
        found.append(error_of(unary.value))
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in stub.Verify():
                pass
        found.append(error_of(stream.value))
    await server.stop()
    return found


def test_every_error_has_a_status() -> None:
    """No error leaves a process without somebody having decided its status."""
    assert all("status" in vars(kind) for kind in (OutriderError, *OutriderError.__subclasses__()))


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_crosses_the_wire_unchanged(kind: type[OutriderError]) -> None:
    """Class, message, field, reason and retry time are the same on the other side."""
    error = kind(*ARGUMENTS.get(kind, ("what to change",)))
    for arrived in asyncio.run(_what_arrives(error)):
        assert type(arrived) is kind
        assert str(arrived) == str(error)
        assert arrived.field == error.field
        assert arrived.reason == error.reason
        assert arrived.retry_after == error.retry_after
        assert getattr(arrived, "problem", None) == getattr(error, "problem", None)


def test_unexpected_exceptions_tell_the_caller_nothing() -> None:
    """A bug is INTERNAL with a neutral sentence: no message, path or value of ours leaks."""
    for arrived in asyncio.run(_what_arrives(ValueError("secret"))):
        assert type(arrived) is errors.InternalError
        assert "secret" not in str(arrived)


async def test_statuses_that_grpc_made_are_errors_of_ours_too() -> None:
    """A connection that cannot be made is `Unavailable`, so callers have one kind of error to handle."""
    async with open_channel("127.0.0.1:1") as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest(), timeout=10)
        error = error_of(failure.value)
    assert type(error) is errors.Unavailable
    assert error.retry_after is None  # nobody has said


async def test_another_service_at_the_endpoint_is_named() -> None:
    """Who gives the address of another service learns that, not only that a method is missing."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest(), timeout=10)
    await server.stop(0)
    assert "the endpoint is another service" in str(error_of(failure.value))


def test_long_messages_are_cut() -> None:
    """What a caller sent may be repeated in a message; the status still fits what its client takes."""
    error = UnknownModel("\U0001f600" * 5000, "served")
    assert len(message_of(error)) <= MAX_MESSAGE
    assert message_of(error).startswith("model: ")
    assert message_of(error).endswith("use 'served'")
    assert len(quote(message_of(error))) + len(details_of(error)) * 4 // 3 < 8192
