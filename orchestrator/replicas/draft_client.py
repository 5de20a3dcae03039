"""One draft session on one replica: translates between protocol messages and the session's events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc

from orchestrator.events import BlockArrived, DraftOpened, Event
from orchestrator.replicas.stream import ReplicaStream
from outrider.internal.v1 import draft_pb2, draft_pb2_grpc
from outrider.protocol.errors import InternalError, Unavailable
from outrider.protocol.messages import OpenDraft, PromptFeatures, Verdict
from outrider.protocol.wire import (
    block_from_pb,
    open_draft_to_pb,
    opened_from_pb,
    prompt_features_to_pb,
    verdict_to_pb,
)
from outrider.telemetry.rpc_spans import DRAFT, client_span


class DraftClient:
    """Stream number `stream` of a session; events go to `deliver`, which may wait to slow the replica."""

    def __init__(self, stream: int, opening: OpenDraft, deliver: Callable[[Event], Awaitable[None]]) -> None:
        self.stream = stream
        self.reads_features = False
        """True when the replica reads features of the target's layers."""
        self._deliver = deliver
        self._endpoint = ""
        self._traceparent = opening.traceparent
        self._may_be_silent = False
        self._opened = False
        first = draft_pb2.DraftRequest(open=open_draft_to_pb(opening))
        self._messages: ReplicaStream[draft_pb2.DraftRequest, draft_pb2.DraftResponse] = ReplicaStream(first)
        self.abort = self._messages.abort

    def commit(self, verdict: Verdict) -> None:
        """Tell the replica what the target committed."""
        message = verdict if verdict.nodes is None else replace(verdict, nodes=None)  # for the caller only
        if message.features and not self.reads_features:
            message = replace(message, features=b"")
        self._messages.send(draft_pb2.DraftRequest(verdict=verdict_to_pb(message)))

    def tell(self, features: PromptFeatures) -> None:
        """Send the replica the target's features of a part of the text, if it reads them."""
        if self.reads_features:
            part = prompt_features_to_pb(features)
            self._messages.send(draft_pb2.DraftRequest(prompt_features=part))

    def close(self) -> None:
        """End the session."""
        self._messages.end(draft_pb2.DraftRequest(close=draft_pb2.CloseDraft()))

    async def run(
        self, endpoint: str, channel: grpc.aio.Channel, open_seconds: float, may_be_silent: bool
    ) -> None:
        """Hold the session until the replica ends it; it has `open_seconds` to admit it.

        Raises:
            OutriderError: the stream failed or did not open in time.
        """
        self._endpoint = endpoint
        self._may_be_silent = may_be_silent
        late = asyncio.get_running_loop().call_later(open_seconds, self._give_up)
        try:
            stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
            with client_span(DRAFT, self._traceparent, endpoint) as metadata:
                await self._messages.run(stub.Draft(metadata=metadata), self._receive)
        finally:
            late.cancel()

    def _give_up(self) -> None:
        if not self._opened:
            self.abort(Unavailable(f"draft replica {self._endpoint} did not open the session in time"))

    async def _receive(self, response: draft_pb2.DraftResponse) -> None:
        match response.WhichOneof("message"):
            case "block":
                await self._deliver(BlockArrived(self.stream, block_from_pb(response.block)))
            case "opened":
                self._opened = True
                opened = opened_from_pb(response.opened)
                await self._deliver(DraftOpened(self.stream, opened, self._endpoint, self._may_be_silent))
            case _:
                raise InternalError("the draft replica sent an empty message")
