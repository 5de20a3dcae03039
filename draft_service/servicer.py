"""Wire <-> domain of the draft service: one stream per session, every message checked on arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from draft_service.engine import DraftEngine
from draft_service.feature_check import FeatureCheck
from draft_service.mailbox import Admitted, DraftStream
from outrider.grammar.compiler import GrammarCompiler
from outrider.internal.v1 import draft_pb2, draft_pb2_grpc
from outrider.protocol import info_wire, wire
from outrider.protocol.errors import InvalidRequest, MismatchedPair
from outrider.protocol.messages import ModelInfo, OpenDraft, Opened, PromptFeatures, TokenBlock, Verdict
from outrider.protocol.vocabulary import check_vocabulary
from outrider.telemetry.logs import get_logger
from outrider.telemetry.rpc_spans import DRAFT, server_span
from outrider.v1 import tokens_pb2

logger = get_logger(__name__)
MAX_NODE_ID = 2**62
"""Ids from here on belong to the verify side's own lookup."""

Requests = AsyncIterator[draft_pb2.DraftRequest]
Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves one engine; `info` tells what it serves, apart from how much of it is in use."""

    def __init__(self, engine: DraftEngine, info: ModelInfo, grammars: GrammarCompiler | None = None) -> None:
        """Without `grammars` proposals know no constraints; the verify side drops what cannot be."""
        self.info = info
        self._engine = engine
        self._grammars = grammars

    async def Draft(self, request_iterator: Requests, context: Context) -> None:  # noqa: N802
        """One session, from `open` to `close`, the end of the requests, or cancellation."""
        with server_span(DRAFT, context):
            await self._serve(request_iterator, context)

    async def _serve(self, requests: Requests, context: Context) -> None:
        request = await _opening(requests)
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
        """What this replica serves, and how much of it is in use."""
        return draft_pb2.DraftServiceGetModelInfoResponse(info=self._info_pb())

    async def SetShadow(  # noqa: N802
        self, request: draft_pb2.SetShadowRequest, context: Context
    ) -> draft_pb2.SetShadowResponse:
        """Make this replica a shadow, or one whose proposals are verified."""
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
        return info_wire.model_info_to_pb(info)

    async def _write(self, stream: DraftStream, context: Context) -> None:
        """Pass on what the engine has for this session, until it is over."""
        while (event := await stream.outbox.take()) is not None:
            await context.write(self._response(event))

    def _response(self, event: Admitted | TokenBlock) -> draft_pb2.DraftResponse:
        if isinstance(event, TokenBlock):
            return draft_pb2.DraftResponse(block=wire.block_to_pb(event))
        opened = Opened(self.info.replica, self.info.incarnation, event.cached_length)
        return draft_pb2.DraftResponse(opened=wire.opened_draft_to_pb(opened))

    async def _read(self, requests: Requests, stream: DraftStream, check: VerdictCheck) -> None:
        """Pass verdicts on until the session is closed."""
        async for message in requests:
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


class VerdictCheck:
    """Follows a session's committed length, so that no verdict with a gap reaches the engine."""

    def __init__(self, request: OpenDraft, info: ModelInfo) -> None:
        self._length = len(request.token_ids)
        self._step = request.first_step
        self._features = FeatureCheck(request, info)
        self._vocabulary_size = info.vocabulary_size
        self._end = request.sampling.end_length(request.prompt_length)

    def accept(self, verdict: Verdict) -> None:
        """Take a verdict into account.

        Raises:
            InvalidRequest: it does not continue what is committed; open a new session with all tokens.
        """
        if verdict.base_length != self._length:
            problem = f"is {verdict.base_length}, but {self._length} tokens are committed here"
            raise InvalidRequest("verdict.base_length", f"{problem}; open a new session")
        if verdict.step <= self._step:
            raise InvalidRequest("verdict.step", f"must be above {self._step}, not {verdict.step}")
        _check_tokens("verdict.tokens", verdict.tokens, self._vocabulary_size)
        if self._length + len(verdict.tokens) > self._end:
            raise InvalidRequest("verdict.tokens", f"go beyond the {self._end} that the session may have")
        self._features.verdict(verdict)
        self._length += len(verdict.tokens)
        self._step = verdict.step

    def accept_features(self, part: PromptFeatures) -> None:
        """Take features of the text into account.

        Raises:
            InvalidRequest: see `FeatureCheck.prompt`.
        """
        self._features.prompt(part, self._length)


def check_open(request: OpenDraft, info: ModelInfo) -> None:
    """Check the first message of a session against what is served.

    Raises:
        InvalidRequest: a field is out of its range.
        MismatchedPair: the target has another vocabulary.
    """
    if info.vocabulary_hash and request.vocabulary_hash != info.vocabulary_hash:
        raise MismatchedPair(
            f"vocabulary_hash: the target's is {request.vocabulary_hash!r} and that of draft model "
            f"{info.model!r} is {info.vocabulary_hash!r}; use a draft with the target's tokenizer"
        )
    _check_tokens("token_ids", request.token_ids, info.vocabulary_size)
    length = len(request.token_ids)
    if not 1 <= request.prompt_length <= length:
        raise InvalidRequest("prompt_length", f"must be 1 to {length}, not {request.prompt_length}")
    if request.first_node_id >= MAX_NODE_ID:
        raise InvalidRequest("first_node_id", f"must be below 2**62, not {request.first_node_id}")
    check_vocabulary("sampling.logit_bias", request.sampling.logit_bias, info.vocabulary_size)


def _check_tokens(field: str, tokens: Sequence[int], vocabulary_size: int) -> None:
    if not tokens:
        raise InvalidRequest(field, "must not be empty")
    check_vocabulary(field, tokens, vocabulary_size)


async def _opening(requests: Requests) -> OpenDraft:
    """The session's first message."""
    async for message in requests:
        if message.WhichOneof("message") != "open":
            raise InvalidRequest("open", "must be the first message")
        return wire.open_draft_from_pb(message.open)
    raise InvalidRequest("open", "must be sent before the stream ends")
