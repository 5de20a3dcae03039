"""One verify session on one replica: messages of the wire <-> events of the session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from orchestrator.events import Event, PromptArrived, VerdictArrived, VerifyOpened
from orchestrator.replicas.stream import ReplicaStream
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol.errors import InternalError, InvalidRequest
from outrider.protocol.messages import KvHandle, OpenVerify, TokenBlock, Verdict
from outrider.protocol.wire import (
    block_to_pb,
    kv_handle_from_pb,
    open_verify_to_pb,
    opened_verify_from_pb,
    prompt_logprobs_from_pb,
    verdict_from_pb,
)
from outrider.telemetry.rpc_spans import VERIFY, client_span


class VerifyClient:
    """Stream number `stream` of a session; events go to `deliver`, which may wait to slow the replica."""

    def __init__(self, stream: int, opening: OpenVerify, deliver: Callable[[Event], Awaitable[None]]) -> None:
        self.stream = stream
        self.kept: KvHandle | None = None
        """What `close(keep=True)` brought, once `run` has returned."""
        self._deliver = deliver
        self._endpoint = ""
        self._closed = False
        self._traceparent = opening.traceparent
        first = verify_pb2.VerifyRequest(open=open_verify_to_pb(opening))
        self._messages: ReplicaStream[verify_pb2.VerifyRequest, verify_pb2.VerifyResponse] = ReplicaStream(
            first
        )
        self.abort = self._messages.abort

    def propose(self, block: TokenBlock) -> None:
        """Give nodes to the replica."""
        self._messages.send(verify_pb2.VerifyRequest(propose=block_to_pb(block)))

    def close(self, keep: bool) -> None:
        """End the session; with `keep`, keys and values stay under a lease."""
        self._messages.end(verify_pb2.VerifyRequest(close=verify_pb2.CloseVerify(keep=keep)))

    async def run(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        """Hold the session until the replica ends it.

        Raises:
            OutriderError: the stream failed.
        """
        self._endpoint = endpoint
        stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
        with client_span(VERIFY, self._traceparent, endpoint) as metadata:
            await self._messages.run(stub.Verify(metadata=metadata), self._receive)

    async def _receive(self, response: verify_pb2.VerifyResponse) -> None:
        if self._closed:
            raise InternalError("the verify replica went on after it had closed the session")
        match response.WhichOneof("message"):
            case "verdict":
                await self._deliver(VerdictArrived(self.stream, _verdict(response)))
            case "prompt_logprobs":
                part = prompt_logprobs_from_pb(response.prompt_logprobs)
                await self._deliver(PromptArrived(self.stream, part))
            case "opened":
                opened = opened_verify_from_pb(response.opened)
                await self._deliver(VerifyOpened(self.stream, opened, self._endpoint))
            case "closed":
                self._closed = True
                if response.closed.HasField("kv_handle"):
                    self.kept = kv_handle_from_pb(response.closed.kv_handle)
            case _:
                raise InternalError("the verify replica sent a message that says nothing")


def _verdict(response: verify_pb2.VerifyResponse) -> Verdict:
    try:
        return verdict_from_pb(response.verdict)
    except InvalidRequest as error:  # the replica's mistake, not the caller's
        raise InternalError(f"the verify replica sent a malformed verdict: {error}") from None
