"""Translates between wire and domain for the draft service: one stream per session, each message checked on
arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from draft_service.checks import VerdictCheck, check_open
from draft_service.engine import DraftEngine
from draft_service.mailbox import Admitted, DraftStream
from outrider.grammar.compiler import GrammarCompiler
from outrider.internal.v1 import draft_pb2, draft_pb2_grpc
from outrider.protocol import wire
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import ModelInfo, Opened, TokenBlock
from outrider.rpc.unread import SILENT_SECONDS, UNREAD_SECONDS, opening_of, within
from outrider.telemetry.logs import get_logger
from outrider.telemetry.rpc_spans import DRAFT, server_span
from outrider.v1 import tokens_pb2

logger = get_logger(__name__)

Requests = AsyncIterator[draft_pb2.DraftRequest]
Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves one engine; `info` has the constant part of what it serves."""

    def __init__(
        self,
        engine: DraftEngine,
        info: ModelInfo,
        grammars: GrammarCompiler | None = None,
        unread_seconds: float = UNREAD_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """Without `grammars` proposals ignore constraints; the verify side drops what a grammar does not
        allow. A session ends if its caller does not read for `unread_seconds`, or sends nothing for
        `silent_seconds`.
        """
        self.info = info
        self._engine = engine
        self._grammars = grammars
        self._unread_seconds = unread_seconds
        self._silent_seconds = silent_seconds

    async def Draft(self, request_iterator: Requests, context: Context) -> None:  # noqa: N802
        """Serve one session, from `open` to `close`, the end of the requests, or cancellation."""
        with server_span(DRAFT, context):
            await self._serve(request_iterator, context)

    async def _serve(self, requests: Requests, context: Context) -> None:
        request = wire.open_draft_from_pb(await opening_of(requests))
        check_open(request, self.info)
        matcher, constraint = None, request.sampling.constraint
        if constraint is not None and self._grammars is not None:
            matcher = await self._grammars.matcher(constraint, request.token_ids[request.prompt_length :])
        stream = self._engine.open(request, matcher)
        reader = asyncio.create_task(self._read(requests, stream, VerdictCheck(request, self.info)))
        reader.add_done_callback(
            lambda task: stream.outbox.end(None if task.cancelled() else task.exception())
        )
        try:
            await self._write(stream, context)
        finally:
            reader.cancel()
            self._engine.close(stream)

    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """Return what this replica serves, and how much of it is in use."""
        return draft_pb2.DraftServiceGetModelInfoResponse(info=self._info_pb())

    async def SetShadow(  # noqa: N802
        self, request: draft_pb2.SetShadowRequest, context: Context
    ) -> draft_pb2.SetShadowResponse:
        """Make this replica a shadow, or make it one whose proposals are verified."""
        if request.version not in ("", self.info.draft_name):
            problem = f"is {request.version!r}, but the replica has {self.info.draft_name!r}"
            raise InvalidRequest("version", f"{problem}; ask for these, or leave it out")
        if self.info.shadow != request.shadow:
            logger.info("shadow" if request.shadow else "promoted", version=self.info.draft_name)
        self.info = replace(self.info, shadow=request.shadow)
        return draft_pb2.SetShadowResponse(info=self._info_pb())

    def _info_pb(self) -> tokens_pb2.ModelInfo:
        pages = self._engine.core.pages
        info = replace(
            self.info,
            sessions=self._engine.sessions,
            pages=pages.total,
            pages_free=pages.total - pages.used,
        )
        return wire.model_info_to_pb(info)

    async def _write(self, stream: DraftStream, context: Context) -> None:
        """Send the engine's events of this session until it is over.

        Raises:
            DeadlineExceeded: the caller does not read them.
        """
        not_read = f"block: not read for {self._unread_seconds:.0f} s; read on, or open a new session"
        while (event := await stream.outbox.take()) is not None:
            async with within(self._unread_seconds, not_read):
                await context.write(self._response(event))

    def _response(self, event: Admitted | TokenBlock) -> draft_pb2.DraftResponse:
        if isinstance(event, TokenBlock):
            return draft_pb2.DraftResponse(block=wire.block_to_pb(event))
        opened = Opened(self.info.replica, self.info.incarnation, event.cached_length)
        return draft_pb2.DraftResponse(opened=wire.opened_draft_to_pb(opened))

    async def _read(self, requests: Requests, stream: DraftStream, check: VerdictCheck) -> None:
        """Pass verdicts on to the engine until the session is closed.

        Raises:
            InvalidRequest: a message is wrong.
            DeadlineExceeded: the caller sends nothing.
        """
        silent = f"verdict: none came for {self._silent_seconds:.0f} s; open a new session with all tokens"
        while True:
            async with within(self._silent_seconds, silent):
                message = await anext(requests, None)
            if message is None:
                return
            match message.WhichOneof("message"):
                case "verdict":
                    verdict = wire.verdict_from_pb(message.verdict)
                    check.accept(verdict)
                    self._engine.verdict(stream, verdict)
                case "prompt_features":
                    part = wire.prompt_features_from_pb(message.prompt_features)
                    check.accept_features(part)
                    self._engine.tell(stream, part)
                case "close":
                    return
                case "open":
                    raise InvalidRequest("open", "the session is already open")
                case _:
                    raise InvalidRequest("message", "must be a verdict, prompt_features or close")
