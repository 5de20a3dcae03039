"""The public gRPC service: turns a request into a token stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from orchestrator.collecting.collector import Collector
from orchestrator.generation import Generation, Item, Shared
from orchestrator.observing.observer import Observers
from orchestrator.observing.request_end import RequestEnds, is_late
from orchestrator.observing.tracing import RequestTrace
from orchestrator.replicas.fleet import Fleet
from orchestrator.replicas.pool import ReplicaState
from orchestrator.replicas.served import ServedModel
from orchestrator.request.admission import Admission, Waiter
from orchestrator.request.auth import digest_of
from orchestrator.request.constraints import Constraints
from orchestrator.request.rate_limit import RateLimit, client_of
from orchestrator.request.resolver import ResolvedRequest, Resolver
from orchestrator.request.wire import (
    check_lengths,
    ids_from_pb,
    incoming_from_pb,
    models_to_pb,
    prompt_from_pb,
    response_to_pb,
    tokens_to_pb,
)
from orchestrator.shadow.shadows import Shadows
from orchestrator.text.jobs import Prompt
from orchestrator.text.tokenizing import Tokenizing
from outrider.config import OrchestratorConfig
from outrider.protocol.errors import NoReplica, NotRead, OutriderError
from outrider.protocol.wire import model_info_to_pb
from outrider.request_ids import CURRENT, HEADER, request_id_of
from outrider.rpc.metadata import metadata_value
from outrider.rpc.unread import UNREAD_SECONDS, within
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.telemetry.logs import request_context
from outrider.v1 import generation_pb2, generation_pb2_grpc

WAITING_MESSAGES = 4
"""Most bytes of prompts that wait to be tokenized, in messages of the largest size."""
TOKENIZED_BEYOND = 131_072
"""Tokens that `Tokenize` takes beyond the context, because callers use it to find out how long a text is."""
NOT_READ = f"the stream was not read for {UNREAD_SECONDS:.0f} s; resume it"

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The public service: validate, admit, run, count."""

    def __init__(
        self,
        config: OrchestratorConfig,
        fleet: Fleet,
        instruments: OrchestratorInstruments,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.admission = Admission(config.max_queued, fleet.capacity, clock)
        self.tokenizing = Tokenizing(WAITING_MESSAGES * config.max_request_mb << 20)
        self.checking = Tokenizing(WAITING_MESSAGES * config.max_request_mb << 20)
        self._constraints = Constraints(self.checking)
        self._rate_limit = RateLimit(config.client_rate, config.client_burst, clock)
        self._config = config
        self._fleet = fleet
        self._instruments = instruments
        self._ends = RequestEnds(instruments, log=config.request_log)
        self.observers = Observers(instruments, drafts=bool(config.draft or config.replicas_file))
        self.shadows = Shadows(config, fleet, instruments.shadows)
        self.collector = Collector.configure(config, instruments.collected)
        self._clock = clock
        self._shared = Shared(config, fleet, self.observers, self.shadows, self.collector, clock)

    async def Generate(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream the continuations of a prompt."""
        arrived, deadline = self._clock(), self._deadline(context)
        request_id = request_id_of(metadata_value(context, HEADER))
        CURRENT.set(request_id)
        try:
            async with AsyncExitStack() as stack:
                with self._counting_rejections(arrived, deadline):
                    caller = self._client(context)
                    self._rate_limit.take(caller)
                    served = self._served()
                    resolved = await self._prepare(request, served, deadline, request_id)
                    n, priority = resolved.sampling.n, resolved.priority
                    self._instruments.queued.set(self.admission.queue.queued + 1)
                    waiter = await stack.enter_async_context(
                        self.admission.enter(caller, priority, n, deadline)
                    )
                self._instruments.admitted(waiter.waited)
                self._report_load()
                await self._run(resolved, served, arrived, waiter, deadline, context)
        finally:
            self._report_load()

    async def GetModelInfo(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        """The model that is served, and the number of its replicas."""
        served, now = self._served(), self._clock()
        pools = self._fleet.pools
        return generation_pb2.GetModelInfoResponse(
            target=model_info_to_pb(served.info),
            verify_replicas=pools["verify"].count(ReplicaState.USABLE, now),
            draft_replicas=pools["draft"].count(ReplicaState.USABLE, now),
            text_prompts=served.tokenizer is not None,
            chat_prompts=served.takes_chat,
        )

    async def ListModels(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.ListModelsRequest, context: Context
    ) -> generation_pb2.ListModelsResponse:
        """The models that a request may name."""
        served = self._served()
        return models_to_pb(served.info, served.tokenizer is not None, served.takes_chat)

    async def GetLoad(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.GetLoadRequest, context: Context
    ) -> generation_pb2.GetLoadResponse:
        """How busy this orchestrator and its replicas are."""
        now, pools = self._clock(), self._fleet.pools
        queue, places = self.admission.queue, self._fleet.capacity()
        infos = [replica.info for replica in pools["verify"].usable(now) if replica.info is not None]
        return generation_pb2.GetLoadResponse(
            running=queue.begun,
            waiting=queue.queued,
            places=places,
            free_places=max(places - queue.running, 0),
            pages=sum(info.pages for info in infos),
            pages_free=sum(info.pages_free for info in infos),
            verify_replicas=len(infos),
            draft_replicas=pools["draft"].count(ReplicaState.USABLE, now),
            tokens_per_second=self.observers.tokens.per_second(now),
        )

    async def Tokenize(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        """The token ids of a text or a conversation."""
        async with self._converting(context, "the prompt was tokenized") as served:
            positions = served.info.context_length + TOKENIZED_BEYOND
            prompt = prompt_from_pb(request, served.info, positions, served.bytes_per_token)
            tokens = await self.tokenizing.tokens(prompt, served.tokenizer, positions)
            return tokens_to_pb(tokens, served.info)

    async def Detokenize(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        """The text of token ids."""
        async with self._converting(context, "the text was made") as served:
            ids = ids_from_pb(request, served.info)
            text = await self.tokenizing.text(ids, served.tokenizer, served.info.context_length)
            return generation_pb2.DetokenizeResponse(text=text)

    def _deadline(self, context: Context) -> float:
        """The caller's deadline in seconds of our clock; the default deadline if it set none."""
        remaining = context.time_remaining()
        return self._clock() + (self._config.default_deadline_seconds if remaining is None else remaining)

    def _client(self, context: Context) -> str:
        """The key of the caller for rate limit and admission: its token only if tokens are checked.

        Otherwise one caller could pose as many by sending many tokens.
        """
        checked = self._config.auth_tokens_file and context.invocation_metadata()
        return client_of(digest_of(checked or ()), context.peer())

    def _served(self) -> ServedModel:
        if self._fleet.served is None:
            raise NoReplica("no verify replica is known yet")
        return self._fleet.served

    async def _prepare(
        self, pb: generation_pb2.GenerateRequest, served: ServedModel, deadline: float, request_id: str
    ) -> ResolvedRequest:
        """The request to run. One that cannot fit the context is refused before its texts are read."""
        check_lengths(pb, served.info.context_length, served.bytes_per_token)
        incoming = incoming_from_pb(pb, served.info.sampling_defaults)
        resolver = Resolver(
            served=served.info,
            tokenizer=served.tokenizer,
            default_max_tokens=self._config.default_max_tokens,
            draw_seed=lambda: secrets.randbits(64),
            max_priority=self._config.max_priority,
        )
        resolver.check(incoming)
        assert incoming.prompt is not None
        async with self._before(deadline, "the request was ready to run"):
            prompt = await self._tokens(incoming.prompt, served)
            prediction = await self._tokens(incoming.prediction, served)
            request = resolver.resolve(incoming, request_id, prompt, prediction)
            if served.tokenizer is None:
                return request
            complete = await self._constraints.complete(incoming, served.tokenizer, served.info)
            return replace(request, complete=complete)

    async def _tokens(self, given: Prompt | tuple[int, ...], served: ServedModel) -> tuple[int, ...]:
        """Token ids as they were received, or those of a text or conversation."""
        if isinstance(given, tuple):
            return given
        return await self.tokenizing.tokens(given, served.tokenizer, served.info.context_length)

    async def _run(
        self,
        request: ResolvedRequest,
        served: ServedModel,
        arrived: float,
        waiter: Waiter,
        deadline: float,
        context: Context,
    ) -> None:
        """Generate, and record how the request ended."""
        arrived_ns = time.time_ns() - round((self._clock() - arrived) * 1e9)
        trace = RequestTrace.start(request, metadata_value(context, "traceparent"), arrived_ns)
        tokenizer = served.tokenizer
        place = partial(self.admission.place, waiter)
        generation = Generation(self._shared, request, tokenizer, trace, arrived, place)
        spelling = tokenizer.spelling if tokenizer is not None else None

        async def write(item: Item) -> None:
            async with within(UNREAD_SECONDS, NOT_READ, NotRead):
                await context.write(response_to_pb(item, spelling))

        named = request_context(request.request_id, trace.traceparent, request.labels)
        with named, self._ends.recording(generation, waiter.waited, deadline):
            async with self._before(deadline, "the end of the text"):
                await generation.run(write)

    @asynccontextmanager
    async def _converting(self, context: Context, end: str) -> AsyncIterator[ServedModel]:
        """A context for a conversion. `end` says in the error what did not happen before the deadline."""
        deadline = self._deadline(context)
        with self._counting_rejections(self._clock(), deadline):
            self._rate_limit.take(self._client(context))
            served = self._served()
            async with self._before(deadline, end):
                yield served

    def _before(self, deadline: float, end: str) -> AbstractAsyncContextManager[None]:
        """A context with a deadline. `end` says in the error what did not happen before it."""
        return within(deadline - self._clock(), f"the deadline passed before {end}; raise the timeout")

    @contextmanager
    def _counting_rejections(self, arrived: float, deadline: float) -> Iterator[None]:
        try:
            yield
        except OutriderError as error:
            self._instruments.rejected.labels(error.reason).inc()
            raise
        except asyncio.CancelledError:
            if is_late(self._clock(), arrived, deadline):
                self._instruments.rejected.labels("DEADLINE_EXCEEDED").inc()
            raise

    def _report_load(self) -> None:
        self._instruments.running.set(self.admission.queue.begun)
        self._instruments.queued.set(self.admission.queue.queued)
