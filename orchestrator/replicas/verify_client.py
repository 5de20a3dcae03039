"""One verify session on one replica: translates between protocol messages and the session's events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from orchestrator.events import Event, FeaturesArrived, PromptArrived, VerdictArrived, VerifyOpened
from orchestrator.replicas.stream import ReplicaStream
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol.errors import Draining, InternalError, OutriderError, Unavailable
from outrider.protocol.messages import KvHandle, OpenVerify, TokenBlock
from outrider.protocol.wire import (
    block_to_pb,
    kv_handle_from_pb,
    kv_handle_to_pb,
    open_verify_to_pb,
    opened_from_pb,
    prompt_features_from_pb,
    prompt_logprobs_from_pb,
    verdict_from_pb,
)
from outrider.telemetry.rpc_spans import VERIFY, client_span

MOVE_SECONDS = 5.0
"""Longest time for a draining replica to end its step and keep keys and values. Then the session moves
without them."""


class VerifyClient:
    """Stream number `stream` of a session; events go to `deliver`, which may wait to slow the replica."""

    def __init__(self, stream: int, opening: OpenVerify, deliver: Callable[[Event], Awaitable[None]]) -> None:
        self.stream = stream
        self.kept: KvHandle | None = None
        """Keys and values kept by `close(keep=True)` or `lose`; set once `run` has returned."""
        self.leaving: Draining | None = None
        """Set when the session moves because its replica drains."""
        self._opened = False
        self._too_late: asyncio.TimerHandle | None = None
        self._deliver = deliver
        self._endpoint = self._incarnation = ""
        self._asked_to_close = self._closed = False
        self._traceparent = opening.traceparent
        self._first = verify_pb2.VerifyRequest(open=open_verify_to_pb(opening))
        self._messages: ReplicaStream[verify_pb2.VerifyRequest, verify_pb2.VerifyResponse] = ReplicaStream(
            self._first
        )

    def redeem(self, handle: KvHandle, covered: tuple[int, ...]) -> None:
        """Open with this handle, which covers the tokens `covered`, in place of another replica's.

        Call this before `run`.
        """
        opening = self._first.open
        opening.kv_handle.CopyFrom(kv_handle_to_pb(handle))
        opening.token_ids[:] = [*covered, *opening.token_ids]
        opening.all_token_ids = True

    def lose(self, error: OutriderError) -> None:
        """Leave the replica. One that drains keeps keys and values for the next replica; others do not."""
        if not isinstance(error, Draining) or not self._opened:
            self._messages.abort(error)
        elif self.leaving is None:
            self.leaving = error
            self._end(verify_pb2.CloseVerify(keep=True, move=True))
            loop = asyncio.get_running_loop()
            self._too_late = loop.call_later(MOVE_SECONDS, self._messages.abort, error)

    def propose(self, block: TokenBlock) -> None:
        """Send nodes to the replica."""
        if self.leaving is None:
            self._messages.send(verify_pb2.VerifyRequest(propose=block_to_pb(block)))

    def close(self, keep: bool) -> None:
        """End the session; with `keep`, keys and values stay under a lease."""
        if self.leaving is None:
            self._end(verify_pb2.CloseVerify(keep=keep))

    def _end(self, close: verify_pb2.CloseVerify) -> None:
        self._asked_to_close = True
        self._messages.end(verify_pb2.VerifyRequest(close=close))

    async def run(self, endpoint: str, channel: grpc.aio.Channel, incarnation: str) -> None:
        """Hold the session until the replica ends it.

        A replica of another incarnation may have other weights, so it is given up and probed again.

        Raises:
            OutriderError: the stream failed.
        """
        self._endpoint, self._incarnation = endpoint, incarnation
        stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            with client_span(VERIFY, self._traceparent, endpoint) as metadata:
                await self._messages.run(stub.Verify(metadata=metadata), self._receive)
        finally:
            if self._too_late is not None:
                self._too_late.cancel()
        if self.leaving is not None:
            raise self.leaving

    async def _receive(self, response: verify_pb2.VerifyResponse) -> None:
        if self._closed:
            raise InternalError("the verify replica went on after it had closed the session")
        match response.WhichOneof("message"):
            case "verdict":
                await self._deliver(VerdictArrived(self.stream, verdict_from_pb(response.verdict)))
            case "prompt_logprobs":
                part = prompt_logprobs_from_pb(response.prompt_logprobs)
                await self._deliver(PromptArrived(self.stream, part))
            case "prompt_features":
                features = prompt_features_from_pb(response.prompt_features)
                await self._deliver(FeaturesArrived(self.stream, features))
            case "opened":
                opened = opened_from_pb(response.opened)
                if opened.incarnation != self._incarnation:
                    raise Unavailable(f"{self._endpoint} was restarted")
                self._opened = True
                await self._deliver(VerifyOpened(self.stream, opened, self._endpoint))
            case "closed":
                if not self._asked_to_close:
                    raise InternalError("the verify replica closed the session by itself")
                self._closed = True
                if response.closed.HasField("kv_handle"):
                    self.kept = kv_handle_from_pb(response.closed.kv_handle)
            case _:
                raise InternalError("the verify replica sent an empty message")
