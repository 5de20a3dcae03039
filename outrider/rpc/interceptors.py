"""Server interceptor: refuses calls while the service does not serve, turns our errors into statuses.

`grpc.aio` knows two handler styles for each of its four method kinds with streamed responses: an async
generator, and a coroutine that calls `context.write`. Both are wrapped as what they are.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from outrider.protocol.errors import Draining, InternalError, InvalidRequest, OutriderError
from outrider.protocol.rpc_errors import DETAILS_KEY, code_of, details_of, message_of
from outrider.request_ids import CURRENT, HEADER, USABLE
from outrider.rpc.metadata import metadata_value
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
NEUTRAL = "internal error; the service's log has the details"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # not subscriptable at run time


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into its status, and refuses calls while `refusal` is set.

    Only methods of `service_names` are refused: health and reflection always answer.
    """

    def __init__(
        self,
        service_names: Collection[str],
        refusal: OutriderError | None,
        while_draining: Collection[str] = (),
    ) -> None:
        """Methods of the names `while_draining` are not refused because of a drain."""
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
    parse = _parser(handler.request_deserializer)
    # A streamed request is parsed inside the handler, where errors are seen; a single one before it.
    late = None if handler.request_streaming else parse
    early = parse if handler.request_streaming else None
    behaviour, factory = _behaviour(handler)
    if inspect.isasyncgenfunction(behaviour):
        wrapped: Callable[..., Any] = _wrap_generator(behaviour, late, method)
    elif inspect.iscoroutinefunction(behaviour):
        wrapped = _wrap_coroutine(behaviour, late, method)
    else:
        return handler
    made: Handler = factory(
        wrapped, request_deserializer=early, response_serializer=handler.response_serializer
    )
    return made


def _behaviour(handler: Handler) -> tuple[Any, Any]:
    """The handler's function and what makes a handler of its kind."""
    if handler.request_streaming and handler.response_streaming:
        return handler.stream_stream, grpc.stream_stream_rpc_method_handler
    if handler.request_streaming:
        return handler.stream_unary, grpc.stream_unary_rpc_method_handler
    if handler.response_streaming:
        return handler.unary_stream, grpc.unary_stream_rpc_method_handler
    return handler.unary_unary, grpc.unary_unary_rpc_method_handler


def _parser(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        if deserialize is None:
            return data
        try:
            return deserialize(data)
        except DecodeError:
            raise InvalidRequest("message", "does not parse as this method's request") from None

    return parse


def _wrap_coroutine(
    behaviour: Callable[..., Awaitable[Any]], parse: Callable[[bytes], Any] | None, method: str
) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        held = [request]
        del request  # gRPC keeps this frame with an abort; what came must not stay with it
        try:
            return await behaviour(parse(held.pop()) if parse else held.pop(), context)
        except Exception as error:  # the last line of defence
            refusal = _refusal(error, method)
        await _abort(context, refusal)
        return None  # not reached: an abort raises

    return call


def _wrap_generator(
    behaviour: Callable[..., Any], parse: Callable[[bytes], Any] | None, method: str
) -> Callable[..., AsyncIterator[Any]]:
    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        held = [request]
        del request  # as above
        try:
            async with aclosing(behaviour(parse(held.pop()) if parse else held.pop(), context)) as responses:
                async for response in responses:
                    yield response
            return
        except Exception as error:  # the last line of defence
            refusal = _refusal(error, method)
        await _abort(context, refusal)

    return stream


def _refusal(error: Exception, method: str) -> OutriderError:
    """What a call ends with whose handler raised `error`; aborts pass, and so does cancellation.

    It has let go of the frames that it came through, and of what is in them, such as the request: gRPC keeps
    the abort with the call, and all of it would wait for the garbage collector.
    """
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        # gRPC's own, when the call is cancelled during a write: nobody is left to tell
        raise asyncio.CancelledError from None
    if isinstance(error, InternalError):
        logger.exception("internal error", method=method)
    if not isinstance(error, OutriderError):
        logger.exception("unexpected error", method=method)
        return InternalError(NEUTRAL)  # the caller gets no innards, the log has got them all
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> None:
    """End the call with the error and the request's id, where it has one, by which logs can be searched."""
    error.request_id = CURRENT.get() or _given_id(context)
    trailing: list[tuple[str, str | bytes]] = [(DETAILS_KEY, details_of(error))]
    if error.request_id:
        trailing.append((HEADER, error.request_id))
    await context.abort(code_of(error), message_of(error), tuple(trailing))


def _given_id(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's own; empty when it gave none that can be kept."""
    given = metadata_value(context, HEADER)
    return given if USABLE.fullmatch(given) else ""
