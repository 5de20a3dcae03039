"""Translates between wire and domain for the verify service: one stream per session, each message checked on
arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from outrider.engine.loading.tokenizer_files import TokenizerFiles
from outrider.grammar.compiler import GrammarCompiler, matcher_of
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol import wire
from outrider.protocol.allowance import Allowance
from outrider.protocol.errors import Flood, InvalidRequest
from outrider.protocol.kv_parts import KvPart
from outrider.protocol.kv_wire import kv_part_from_pb, kv_part_to_pb
from outrider.protocol.messages import (
    FinishReason,
    ModelInfo,
    Opened,
    PromptFeatures,
    PromptLogprobs,
    Verdict,
)
from outrider.rpc.unread import UNREAD_SECONDS, opening_of, within
from outrider.telemetry.rpc_spans import VERIFY, server_span
from verify_service.admission import check_open, generated_tokens
from verify_service.engine import VerifyEngine
from verify_service.mailbox import Closed, Event, VerifyStream
from verify_service.transfer.exchange import KvExchange

Requests = AsyncIterator[verify_pb2.VerifyRequest]
Context = grpc.aio.ServicerContext[Any, Any]


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Serves one engine; `info` has the constant part of what it serves."""

    def __init__(
        self,
        engine: VerifyEngine,
        info: ModelInfo,
        tokenizer: TokenizerFiles | None,
        grammars: GrammarCompiler | None = None,
        exchange: KvExchange | None = None,
        unread_seconds: float = UNREAD_SECONDS,
    ) -> None:
        """Without `exchange`, this replica neither sends nor receives keys and values. A session ends if its
        caller does not read for `unread_seconds`.
        """
        self._engine = engine
        self._info = info
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._exchange = exchange
        self._unread_seconds = unread_seconds

    def register(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def Verify(self, request_iterator: Requests, context: Context) -> None:  # noqa: N802
        """Serve one session until it is closed, the requests end, or the call is cancelled."""
        with server_span(VERIFY, context):
            await self._serve(request_iterator, context)

    async def _serve(self, requests: Requests, context: Context) -> None:
        opening = wire.open_verify_from_pb(await opening_of(requests))
        check_open(opening, self._info)
        constraint = opening.sampling.constraint
        matcher = await matcher_of(self._grammars, constraint, generated_tokens(opening))
        stream = await self._engine.open(opening, matcher)
        allowance = Allowance.full()
        reader = asyncio.create_task(self._read(requests, stream, allowance))
        reader.add_done_callback(lambda task: self._stop_if_failed(stream, task))
        try:
            await self._write(stream, allowance, context)
        except InvalidRequest as error:
            if self._grammars is not None and constraint is not None and error.field == constraint.field:
                self._grammars.forget(constraint)
            raise
        finally:
            reader.cancel()
            self._engine.close(stream)

    async def GetModelInfo(  # noqa: N802
        self, request: verify_pb2.VerifyServiceGetModelInfoRequest, context: Context
    ) -> verify_pb2.VerifyServiceGetModelInfoResponse:
        """Return what this replica serves, and how much of it is in use."""
        pages = self._engine.statistics
        info = replace(
            self._info,
            sessions=self._engine.sessions + self._engine.waiting,
            pages=pages.total,
            pages_free=pages.free + pages.cached,
        )
        return verify_pb2.VerifyServiceGetModelInfoResponse(info=wire.model_info_to_pb(info))

    async def GetTokenizer(  # noqa: N802
        self, request: verify_pb2.GetTokenizerRequest, context: Context
    ) -> verify_pb2.GetTokenizerResponse:
        """Return the target's tokenizer; empty if the model came without one."""
        if self._tokenizer is None:
            return verify_pb2.GetTokenizerResponse()
        return verify_pb2.GetTokenizerResponse(
            tokenizer_json=self._tokenizer.tokenizer_json,
            chat_template=self._tokenizer.chat_template,
            special_tokens=self._tokenizer.special_tokens,
            tool_chat_template=self._tokenizer.tool_chat_template,
        )

    async def ReleaseKv(  # noqa: N802
        self, request: verify_pb2.ReleaseKvRequest, context: Context
    ) -> verify_pb2.ReleaseKvResponse:
        """End a handle's lease."""
        await self._engine.release(wire.kv_handle_from_pb(request.kv_handle))
        return verify_pb2.ReleaseKvResponse()

    async def ForkKv(  # noqa: N802
        self, request: verify_pb2.ForkKvRequest, context: Context
    ) -> verify_pb2.ForkKvResponse:
        """Make a second handle for the same sequence."""
        forked = await self._engine.fork(wire.kv_handle_from_pb(request.kv_handle))
        return verify_pb2.ForkKvResponse(kv_handle=wire.kv_handle_to_pb(forked))

    async def FetchKv(  # noqa: N802
        self, request: verify_pb2.FetchKvRequest, context: Context
    ) -> None:
        """Send the pages that a handle holds."""

        async def write(part: KvPart) -> None:
            await context.write(verify_pb2.FetchKvResponse(part=kv_part_to_pb(part)))

        await self._exchanged().send(wire.kv_handle_from_pb(request.kv_handle), write)

    async def StoreKv(  # noqa: N802
        self, request_iterator: AsyncIterator[verify_pb2.StoreKvRequest], context: Context
    ) -> verify_pb2.StoreKvResponse:
        """Receive pages that another replica sent."""
        parts = (kv_part_from_pb(request.part) async for request in request_iterator)
        handle = await self._exchanged().receive(parts)
        return verify_pb2.StoreKvResponse(kv_handle=wire.kv_handle_to_pb(handle))

    def _exchanged(self) -> KvExchange:
        if self._exchange is None:
            raise InvalidRequest(
                "kv_handle", "this replica's keys and values cannot be moved; send all tokens instead"
            )
        return self._exchange

    async def _read(self, requests: Requests, stream: VerifyStream, allowance: Allowance) -> None:
        """Pass messages on to the engine. The end of the requests ends the session like a close."""
        close = verify_pb2.CloseVerify()
        async for message in requests:
            match message.WhichOneof("message"):
                case "propose":
                    block = wire.block_from_pb(message.propose)
                    if not allowance.spend(len(block)):
                        raise Flood("propose: more blocks or nodes than fit between two verdicts")
                    self._engine.propose(stream, block)
                case "close":
                    close = message.close
                    break
                case "open":
                    raise InvalidRequest("open", "the session is open already")
                case _:
                    raise InvalidRequest("message", "must be propose or close")
        self._engine.finish(stream, close.keep, close.move)

    async def _write(self, stream: VerifyStream, allowance: Allowance, context: Context) -> None:
        """Send the session's events until it is closed.

        Raises:
            DeadlineExceeded: they are not read, or the session is not closed after its last verdict.
        """
        seconds, over = self._unread_seconds, False
        not_read = f"verdict: not read for {seconds:.0f} s; read on, or open a session with all tokens"
        not_closed = f"close: not sent for {seconds:.0f} s after the last verdict; send it"
        while True:
            async with within(seconds if over else None, not_closed):
                event = await stream.outbox.take()
            if isinstance(event, Verdict):
                allowance.refill()
                over = event.finish_reason is not FinishReason.NONE
            async with within(seconds, not_read):
                await context.write(_response(event))
            if isinstance(event, Closed):
                return

    def _stop_if_failed(self, stream: VerifyStream, reader: asyncio.Task[None]) -> None:
        """End a session whose messages are invalid; the writer raises the error, between two writes."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            stream.outbox.end(error)
            self._engine.finish(stream, keep=False)


def _response(event: Event) -> verify_pb2.VerifyResponse:
    match event:
        case Verdict():
            return verify_pb2.VerifyResponse(verdict=wire.verdict_to_pb(event))
        case Opened():
            return verify_pb2.VerifyResponse(opened=wire.opened_verify_to_pb(event))
        case PromptLogprobs():
            return verify_pb2.VerifyResponse(prompt_logprobs=wire.prompt_logprobs_to_pb(event))
        case PromptFeatures():
            return verify_pb2.VerifyResponse(prompt_features=wire.prompt_features_to_pb(event))
        case Closed(handle):
            kept = None if handle is None else wire.kv_handle_to_pb(handle)
            return verify_pb2.VerifyResponse(closed=verify_pb2.VerifyClosed(kv_handle=kept))
