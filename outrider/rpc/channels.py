"""Client channels to services, with every option set explicitly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from outrider.protocol.errors import InternalError, OutriderError
from outrider.protocol.rpc_errors import error_of
from outrider.rpc.reloading import Reloaded
from outrider.rpc.tls import Certificates, channel_credentials

__all__ = ["Ending", "answer_of", "error_of", "open_blocking_channel", "open_channel", "parsed"]

MAX_MESSAGE_BYTES = 64 << 20
"""Most bytes of a message in either direction; the largest messages are tokenizers."""
UNCOMPRESSED = ("grpc.compression_enabled_algorithms_bitset", 1)
"""Option by which compressed messages are refused. gRPC would unpack them as a whole before it looks at their
size, and 8 MiB can become 8 GiB."""
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
FAILED_WRITE = "Internal error from Core"
"""gRPC's own details of a call whose write failed."""
STATUS_SECONDS = 1.0
"""Longest wait for a service's status after a write has failed."""
SEVERAL = ("dns:", "ipv4:", "ipv6:")
"""Schemes of endpoints that may stand for several servers."""
OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.enable_http_proxy", 0),  # a web proxy seldom reaches services of the same network
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    UNCOMPRESSED,
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),  # channels do not share a bad replica's state
)
"""Of every channel."""

Answer = TypeVar("Answer")


def parsed(message: Answer | None) -> Answer:
    """What a service sent; grpc.aio makes None of bytes that are no message.

    Raises:
        InternalError: they were none.
    """
    if message is None:
        raise InternalError("the service sent bytes that do not parse")
    return message


async def answer_of(call: Awaitable[Any]) -> Any:
    """The answer to a unary call.

    Raises:
        OutriderError: the service's own error, or it cannot be reached, or answers what is no message.
    """
    try:
        return parsed(await call)
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None


def open_channel(
    endpoint: str,
    *,
    response_bytes: Mapping[str, int] | None = None,
    certificates: Reloaded[Certificates] | None = None,
    tls_name: str = "",
) -> grpc.aio.Channel:
    """A channel to `host:port` that connects at its first call and reconnects automatically.

    gRPC's own retries are off, because only the caller knows the tokens with which to continue a session.
    Channels can share `certificates`; without them it is plaintext. `tls_name` is the name in the server's
    certificate, if that is not the endpoint's host. `response_bytes` limits the responses of services, or of
    methods as `service/method`; a larger one ends its call as `Flood`. An endpoint with a scheme of `SEVERAL`
    may stand for several servers, which take the calls in turn.
    """
    options = [*OPTIONS, *_service_config(endpoint, response_bytes or {})]
    if certificates is None:
        return grpc.aio.insecure_channel(endpoint, options=options)
    if tls_name:
        options.append(("grpc.ssl_target_name_override", tls_name))

    def connect(current: Certificates) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(endpoint, channel_credentials(current), options=options)

    return RenewedChannel(certificates, connect)


def open_blocking_channel(endpoint: str, certificates: Reloaded[Certificates] | None) -> grpc.Channel:
    """Like `open_channel`, for threads. The channel keeps the certificates that it was opened with."""
    options = [*OPTIONS, *_service_config(endpoint, {})]
    if certificates is None:
        return grpc.insecure_channel(endpoint, options=options)
    credentials = channel_credentials(certificates.current())
    return grpc.secure_channel(endpoint, credentials, options=options)


class Ending:
    """How the service ended a call. If a write fails at that time, grpc.aio puts a status of its own in place
    of the service's, just before or after that comes (github.com/grpc/grpc/issues/36066).
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._status: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._note)

    async def error_of(self, error: grpc.aio.AioRpcError) -> OutriderError | None:
        """The service's error, where the call has failed with `error`; None if the service saw none."""
        if error.details() != FAILED_WRITE:
            return error_of(error)
        await asyncio.wait({self._status}, timeout=STATUS_SECONDS)
        told = self._status.result() if self._status.done() else error
        return None if told.code() is grpc.StatusCode.OK else error_of(told)

    def _note(self, call: grpc.aio.Call) -> None:
        try:
            _status(call).send(None)  # it does not wait, for the call has a status
        except StopIteration as end:
            if end.value.details() != FAILED_WRITE and not self._status.done():
                self._status.set_result(end.value)


async def _status(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    code, details = await call.code(), await call.details()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), await call.trailing_metadata(), details)


class _Connected:
    """A channel that uses one version of the certificates, with its open calls."""

    def __init__(self, certificates: Certificates, channel: grpc.aio.Channel) -> None:
        self.certificates = certificates
        self.channel = channel
        self.calls: set[grpc.aio.Call] = set()


class RenewedChannel(grpc.aio.Channel):
    """A channel that begins each call with the current certificates. Running calls keep their connection,
    which is closed after the last of them."""

    def __init__(
        self, certificates: Reloaded[Certificates], connect: Callable[[Certificates], grpc.aio.Channel]
    ) -> None:
        self._certificates = certificates
        self._connect = connect
        self._now = _Connected(certificates.value, connect(certificates.value))
        self._before: set[_Connected] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """See `grpc.aio.Channel`."""
        self._closed = True
        for connected in (self._now, *self._before):
            await connected.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See `grpc.aio.Channel`."""
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See `grpc.aio.Channel`."""
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See `grpc.aio.Channel`."""
        await self._current().channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._method("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._method("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._method("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._method("stream_stream", arguments, options)

    def _method(self, kind: str, arguments: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
        """A method that chooses its connection at each call."""

        def call(*request: Any, **how: Any) -> Any:
            connected = self._current()
            begun = getattr(connected.channel, kind)(*arguments, **options)(*request, **how)
            connected.calls.add(begun)
            begun.add_done_callback(lambda _: self._ended(connected, begun))
            return begun

        return call

    def _current(self) -> _Connected:
        certificates = self._certificates.current()
        if certificates is not self._now.certificates and not self._closed:
            old, self._now = self._now, _Connected(certificates, self._connect(certificates))
            self._before.add(old)
            self._close_if_idle(old)
        return self._now

    def _ended(self, connected: _Connected, call: grpc.aio.Call) -> None:
        connected.calls.discard(call)  # once only: see `Ending`
        if connected in self._before:
            self._close_if_idle(connected)

    def _close_if_idle(self, connected: _Connected) -> None:
        if connected.calls or self._closed:
            return
        self._before.discard(connected)
        task = asyncio.ensure_future(connected.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _service_config(endpoint: str, response_bytes: Mapping[str, int]) -> list[tuple[str, int | str]]:
    """Options for the load balancing of a channel's calls, and for the largest responses."""
    config: dict[str, Any] = {}
    if endpoint.startswith(SEVERAL):
        config["loadBalancingConfig"] = [{"round_robin": {}}]
    if response_bytes:
        config["methodConfig"] = _response_limits(response_bytes)
    return [("grpc.service_config", json.dumps(config))] if config else []


def _response_limits(response_bytes: Mapping[str, int]) -> list[dict[str, Any]]:
    """An entry with the size for each name; the most specific name counts."""
    limits = []
    for name, most in response_bytes.items():
        service, slash, method = name.partition("/")
        names = {"service": service, "method": method} if slash else {"service": service}
        limits.append({"name": [names], "maxResponseMessageBytes": most})
    return limits
