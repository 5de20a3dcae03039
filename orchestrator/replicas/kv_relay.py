"""Carries keys and values from one verify replica to another, part by part, without reading them.

The replicas do not know each other: the orchestrator, which may call both, passes on what the owner sends. It
holds at most one part at a time; gRPC's flow control makes the owner wait for the receiver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from outrider.internal.v1 import verify_pb2
from outrider.protocol.errors import InternalError, OutriderError, Unavailable
from outrider.protocol.kv_parts import KvTokens
from outrider.protocol.kv_wire import kv_part_to_pb
from outrider.protocol.messages import KvHandle
from outrider.protocol.wire import kv_handle_from_pb, kv_handle_to_pb
from outrider.rpc.channels import Ending, error_of, parsed

SERVICE = "/outrider.internal.v1.VerifyService/"
QUIET_SECONDS = 5.0
"""Longest time between two parts, in seconds. A receiver takes the first one only after its current step."""
TOO_EARLY = "the verify replica took keys and values before they were complete"


async def relay(
    owner: grpc.aio.Channel,
    receiver: grpc.aio.Channel,
    handle: KvHandle,
    tokens: Sequence[int],
    seconds: float,
) -> KvHandle:
    """Move what a handle of `owner` holds, which covers `tokens`; returns a handle of `receiver`.

    Raises:
        OutriderError: one of the replicas refused, failed, or did not finish in time.
    """
    fetching: Any = owner.unary_stream(
        f"{SERVICE}FetchKv", request_serializer=verify_pb2.FetchKvRequest.SerializeToString
    )(verify_pb2.FetchKvRequest(kv_handle=kv_handle_to_pb(handle)), timeout=seconds)
    storing: Any = receiver.stream_unary(
        f"{SERVICE}StoreKv", response_deserializer=verify_pb2.StoreKvResponse.FromString
    )(timeout=seconds)
    first = verify_pb2.StoreKvRequest(part=kv_part_to_pb(KvTokens(tuple(tokens))))
    copying = asyncio.ensure_future(_copy(fetching, storing, first.SerializeToString()))
    try:
        await asyncio.wait({copying})
    finally:  # a read or write ends with its call and is not cancelled; see `orchestrator.replicas.stream`
        fetching.cancel()
        storing.cancel()
        await asyncio.wait({copying})
        copying.cancelled() or copying.exception()  # looked at, so that asyncio does not report it
    if copying.cancelled():
        raise Unavailable(f"a replica gave up, or nothing moved for {QUIET_SECONDS:g} s")
    return copying.result()


async def _copy(fetching: Any, storing: Any, first: bytes) -> KvHandle:
    quiet, connected = _Watchdog(storing.cancel), asyncio.ensure_future(storing.wait_for_connection())
    ending = Ending(storing)
    storing.add_done_callback(lambda _: fetching.cancel())  # then nothing waits for the owner
    storing.add_done_callback(lambda _: connected.cancel())  # grpc.aio would wait on, and so would a write
    try:
        await connected
        await storing.write(first)
        while (part := await fetching.read()) is not grpc.aio.EOF:
            await storing.write(part)
            quiet.pat()
        await storing.done_writing()
        return kv_handle_from_pb(parsed(await storing).kv_handle)
    except (asyncio.CancelledError, asyncio.InvalidStateError):  # the receiver has ended its call
        raise await _why(storing) from None
    except grpc.aio.AioRpcError as error:
        raise await ending.error_of(error) or InternalError(TOO_EARLY) from None
    finally:
        quiet.end()


class _Watchdog:
    """Calls `on_quiet` when it is not patted for `QUIET_SECONDS`."""

    def __init__(self, on_quiet: Callable[[], object]) -> None:
        self._start = partial(asyncio.get_running_loop().call_later, QUIET_SECONDS, on_quiet)
        self._timer = self._start()

    def pat(self) -> None:
        self.end()
        self._timer = self._start()

    def end(self) -> None:
        self._timer.cancel()


async def _why(call: Any) -> OutriderError:
    """The error that ended a call too early."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error_of(error)
    return InternalError(TOO_EARLY)
