"""Server interceptor: refuses calls while the service does not serve, and turns our errors into statuses.

`grpc.aio` has two styles of handlers for methods with streamed responses: an async generator, and a coroutine
that calls `context.write`. Each is wrapped in its own style.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from outrider.protocol.errors import Draining, InternalError, InvalidRequest, OutriderError
from outrider.protocol.rpc_errors import DETAILS_KEY, code_of, details_of, message_of
from outrider.request_ids import CURRENT, HEADER, USABLE
from outrider.rpc.metadata import metadata_value
from outrider.rpc.unread import FIRST_SECONDS, within
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
NEUTRAL = "internal error; the service's log has the details"

Reader: TypeAlias = Callable[["grpc.aio.ServicerContext[Any, Any]"], Awaitable[Any]]
"""Reads a call's only request."""
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # not subscriptable at run time


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Turns a handler's error into its status, and refuses calls while `refusal` is set.

    Only methods of `service_names` are refused: health and reflection always answer.
    """

    def __init__(
        self,
        service_names: Collection[str],
        refusal: OutriderError | None,
        while_draining: Collection[str] = (),
    ) -> None:
        """Methods whose names are in `while_draining` are not refused during a drain."""
        self.service_names = frozenset(service_names)
        self.refusal = refusal
        self._while_draining = frozenset(while_draining)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See `grpc.aio.ServerInterceptor`."""
        method: str = handler_call_details.method
        if self.refusal is not None and self._refuses(method, self.refusal):
            return _refuse(self.refusal)
        handler = await continuation(handler_call_details)
        return handler if handler is None else _wrap(handler, method)

    def _refuses(self, method: str, refusal: OutriderError) -> bool:
        service, _, name = method.removeprefix("/").partition("/")
        allowed = isinstance(refusal, Draining) and name in self._while_draining
        return service in self.service_names and not allowed


def _refuse(error: OutriderError) -> Handler:
    """A handler that answers a call of any kind with `error`, without reading its messages."""

    async def refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _wrap(handler: Handler, method: str) -> Handler:
    parse, streamed = _parser(handler.request_deserializer), handler.request_streaming
    behaviour = _behaviour(handler)
    read = None if streamed else partial(_only_request, parse)
    if inspect.isasyncgenfunction(behaviour):
        wrapped: Callable[..., Any] = _wrap_generator(behaviour, read, method)
    elif inspect.iscoroutinefunction(behaviour):
        wrapped = _wrap_coroutine(behaviour, read, method)
    else:
        return handler
    many, one = grpc.stream_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
    made: Handler = (many if handler.response_streaming else one)(
        wrapped,
        request_deserializer=parse if streamed else None,
        response_serializer=handler.response_serializer,
    )
    return made


def _behaviour(handler: Handler) -> Any:
    """The handler's function."""
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def _parser(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        if deserialize is None:
            return data
        try:
            return deserialize(data)
        except DecodeError:
            raise InvalidRequest("message", "does not parse as this method's request") from None

    return parse


async def _only_request(parse: Callable[[bytes], Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The one request of a call. gRPC itself would never answer a call that ends without it."""
    async with within(FIRST_SECONDS, f"message: none came within {FIRST_SECONDS:g} s"):
        data = await context.read()
    if data is grpc.aio.EOF:
        raise InvalidRequest("message", "is missing; send one")
    return parse(data)


def _wrap_coroutine(
    behaviour: Callable[..., Awaitable[Any]], read: Reader | None, method: str
) -> Callable[..., Awaitable[Any]]:
    async def call(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(await read(context) if read else requests, context)
        except Exception as error:  # the last line of defence
            refusal = _refusal(error, method)
        await _abort(context, refusal)
        return None  # not reached: an abort raises

    return call


def _wrap_generator(
    behaviour: Callable[..., Any], read: Reader | None, method: str
) -> Callable[..., AsyncIterator[Any]]:
    async def stream(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(await read(context) if read else requests, context)) as responses:
                async for response in responses:
                    yield response
            return
        except Exception as error:  # the last line of defence
            refusal = _refusal(error, method)
        await _abort(context, refusal)

    return stream


def _refusal(error: Exception, method: str) -> OutriderError:
    """The error with which a call ends if its handler raised `error`; aborts and cancellation pass through.

    The error no longer refers to the frames that it came through, and so not to their values, such as the
    request: gRPC keeps the abort with the call, and all of these would wait for the garbage collector.
    """
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        # gRPC raised it because the call was cancelled during a write: there is no caller any more
        raise asyncio.CancelledError from None
    if isinstance(error, InternalError):
        logger.exception("internal error", method=method)
    if not isinstance(error, OutriderError):
        logger.exception("unexpected error", method=method)
        return InternalError(NEUTRAL)  # the details are only in the log
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> None:
    """End the call with the error, and with the request's id, if it has one, so that logs can be searched."""
    error.request_id = CURRENT.get() or _given_id(context)
    trailing: list[tuple[str, str | bytes]] = [(DETAILS_KEY, details_of(error))]
    if error.request_id:
        trailing.append((HEADER, error.request_id))
    await context.abort(code_of(error), message_of(error), tuple(trailing))


def _given_id(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's own request id; empty if it gave none that is usable."""
    given = metadata_value(context, HEADER)
    return given if USABLE.fullmatch(given) else ""
