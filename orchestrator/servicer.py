"""Request in, token stream out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any

import grpc

from orchestrator.generation import Generation, Item
from orchestrator.observing.load import load_of
from orchestrator.observing.observer import Observers
from orchestrator.observing.request_log import fields_of
from orchestrator.observing.tracing import RequestTrace
from orchestrator.replicas.fleet import Fleet, ServedModel
from orchestrator.replicas.pool import State
from orchestrator.request.admission import Admission, Waiter
from orchestrator.request.auth import digest_of
from orchestrator.request.constraints import Constraints
from orchestrator.request.rate_limit import RateLimit, client_of
from orchestrator.request.resolver import Request, Resolver
from orchestrator.request.wire import (
    asked_from_pb,
    check_lengths,
    ids_from_pb,
    load_to_pb,
    models_to_pb,
    prompt_from_pb,
    response_to_pb,
    tokens_to_pb,
)
from orchestrator.text.conversion import Conversion
from orchestrator.text.tokenizing import Tokenizing
from outrider.config import OrchestratorConfig
from outrider.protocol.errors import DeadlineExceeded, NoReplica, OutriderError
from outrider.protocol.info_wire import model_info_to_pb
from outrider.request_ids import CURRENT, HEADER, request_id_of
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.telemetry.logs import get_logger, request_context
from outrider.v1 import generation_pb2, generation_pb2_grpc

logger = get_logger(__name__)
WAITING_MESSAGES = 4
"""Prompts that wait to be tokenized, in messages of the largest size."""

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
        self._conversion = Conversion(self.tokenizing, clock)
        self.checking = Tokenizing(WAITING_MESSAGES * config.max_request_mb << 20)
        self._constraints = Constraints(self.checking, clock)
        self._rate_limit = RateLimit(config.client_rate, config.client_burst, clock)
        self._config = config
        self._fleet = fleet
        self._instruments = instruments
        self.observers = Observers(instruments)
        self._clock = clock

    async def Generate(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream the continuations of a prompt."""
        arrived, deadline = self._clock(), self._deadline(context)
        request_id = request_id_of(_metadata(context, HEADER))
        CURRENT.set(request_id)
        try:
            async with AsyncExitStack() as stack:
                with self._counting_rejections():
                    caller = self._client(context)
                    self._rate_limit.take(caller)
                    served = self._served()
                    resolved = await self._resolve(request, served, deadline, request_id)
                    n, priority = resolved.sampling.n, resolved.priority
                    self._instruments.queued(self.admission.statistics().queued + 1)
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
        """What is served, and by how many replicas."""
        served, now = self._served(), self._clock()
        pools = self._fleet.pools
        tokenizer = served.tokenizer
        return generation_pb2.GetModelInfoResponse(
            target=model_info_to_pb(served.info),
            verify_replicas=pools["verify"].count(State.USABLE, now),
            draft_replicas=pools["draft"].count(State.USABLE, now),
            text_prompts=tokenizer is not None,
            chat_prompts=tokenizer is not None and tokenizer.has_chat_template,
        )

    async def ListModels(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.ListModelsRequest, context: Context
    ) -> generation_pb2.ListModelsResponse:
        """The models that a request may name."""
        served = self._served()
        tokenizer = served.tokenizer
        chat = tokenizer is not None and tokenizer.has_chat_template
        return models_to_pb(served.info, tokenizer is not None, chat)

    async def GetLoad(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.GetLoadRequest, context: Context
    ) -> generation_pb2.GetLoadResponse:
        """How busy this orchestrator and its replicas are."""
        now, pools = self._clock(), self._fleet.pools
        load = load_of(
            self.admission.statistics(),
            self._fleet.capacity(),
            pools["verify"].usable(now),
            pools["draft"].count(State.USABLE, now),
            self.observers.tokens.per_second(now),
        )
        return load_to_pb(load)

    async def Tokenize(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        """The token ids of a text or a conversation."""
        with self._counting_rejections():
            self._rate_limit.take(self._client(context))
            served, deadline = self._served(), self._deadline(context)
            prompt = prompt_from_pb(request, served.info, _bytes_per_token(served))
            positions = served.info.context_length
            tokens = await self._conversion.tokens(prompt, served.tokenizer, positions, deadline)
            return tokens_to_pb(tokens, served.info)

    async def Detokenize(  # noqa: N802 - the name on the wire
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        """The text of token ids."""
        with self._counting_rejections():
            self._rate_limit.take(self._client(context))
            served, deadline = self._served(), self._deadline(context)
            ids = ids_from_pb(request, served.info)
            positions = served.info.context_length
            text = await self._conversion.text(ids, served.tokenizer, positions, deadline)
            return generation_pb2.DetokenizeResponse(text=text)

    def _deadline(self, context: Context) -> float:
        """By our clock; the default one where the caller set none."""
        remaining = context.time_remaining()
        return self._clock() + (self._config.default_deadline_seconds if remaining is None else remaining)

    def _client(self, context: Context) -> str:
        """Whom rate limit and admission count; a token that nobody checked would let one caller be many."""
        checked = self._config.auth_tokens_file and context.invocation_metadata()
        return client_of(digest_of(checked or ()), context.peer())

    def _served(self) -> ServedModel:
        if self._fleet.served is None:
            raise NoReplica("no verify replica is known yet")
        return self._fleet.served

    async def _resolve(
        self, pb: generation_pb2.GenerateRequest, served: ServedModel, deadline: float, request_id: str
    ) -> Request:
        """What cannot fit is refused before it is read, and what is long is tokenized elsewhere."""
        positions, tokenizer = served.info.context_length, served.tokenizer
        check_lengths(pb, positions, _bytes_per_token(served))
        resolver = Resolver(
            served=served.info,
            tokenizer=tokenizer,
            default_max_tokens=self._config.default_max_tokens,
            draw_seed=_draw_seed,
            max_priority=self._config.max_priority,
        )
        asked = asked_from_pb(pb, served.info.sampling_defaults)
        predicted = asked.predicted_text
        if predicted is not None:
            resolver.check(asked)
            prediction = await self._conversion.tokens(predicted, tokenizer, positions, deadline)
            asked = replace(asked, prediction=prediction)
        prompt, tokens = asked.prompt, None
        if prompt is not None and not prompt.is_quick:
            resolver.check(asked)
            tokens = await self._conversion.tokens(prompt, tokenizer, positions, deadline)
        request = resolver.resolve(asked, request_id, tokens)
        if tokenizer is None or asked.sampling.constraint is None:
            return request
        complete = await self._constraints.complete(asked, tokenizer, served.info, deadline)
        return replace(request, complete=complete)

    async def _run(
        self,
        request: Request,
        served: ServedModel,
        arrived: float,
        waiter: Waiter,
        deadline: float,
        context: Context,
    ) -> None:
        """Generate, and count and record how it ended."""
        arrived_ns = time.time_ns() - round((self._clock() - arrived) * 1e9)
        trace = RequestTrace.start(request, _metadata(context, "traceparent"), arrived_ns)
        generation = Generation(
            request,
            self._fleet,
            self._config,
            served.tokenizer,
            self.observers,
            trace,
            arrived,
            lambda: self.admission.place(waiter),
            self._clock,
        )

        spelling = served.tokenizer.spelling if served.tokenizer is not None else None

        async def write(item: Item) -> None:
            await context.write(response_to_pb(item, spelling))

        with request_context(request.request_id, trace.traceparent, request.labels):
            problem = "INTERNAL_ERROR"
            try:
                await self._until(deadline, generation, write)
                problem = ""
            except OutriderError as error:
                problem = error.reason
                raise
            except (asyncio.CancelledError, grpc.aio.InternalError):  # the latter: cancelled during a write
                problem = "CANCELLED"
                raise
            finally:
                seconds = self._clock() - arrived
                self._count(generation, problem, seconds)
                if self._config.request_log:
                    done = generation.completions
                    logger.info("request ended", **fields_of(request, done, waiter.waited, seconds, problem))
                trace.finish(request, generation.completions, time.time_ns(), problem)

    async def _until(self, deadline: float, generation: Generation, write: Any) -> None:
        try:
            async with asyncio.timeout(deadline - self._clock()):
                await generation.run(write)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the end of the text") from None

    def _count(self, generation: Generation, problem: str, seconds: float) -> None:
        trace_id, model = generation.trace.traceparent[3:35], generation.request.served.model
        made = sum(one.completion_tokens - len(generation.request.resumed) for one in generation.completions)
        self._instruments.labels.finished(generation.request.labels, made)
        if problem:
            self._instruments.finished(problem.lower(), 0, seconds, None, None, trace_id, model)
        if generation.completions:
            cached = max(one.statistics.cached for one in generation.completions)
            self._instruments.prompt(model, len(generation.request.prompt), cached)
        for completion in generation.completions:
            generated = completion.completion_tokens - len(generation.request.resumed)
            streaming = completion.total_seconds - completion.first_token_seconds
            self._instruments.finished(
                completion.reason.name.lower(),
                generated,
                completion.total_seconds,
                completion.first_token_seconds if generated else None,
                streaming / (generated - 1) if generated > 1 else None,
                trace_id,
                model,
            )

    @contextmanager
    def _counting_rejections(self) -> Iterator[None]:
        try:
            yield
        except OutriderError as error:
            self._instruments.rejected(error.reason)
            raise

    def _report_load(self) -> None:
        statistics = self.admission.statistics()
        self._instruments.running(statistics.running)
        self._instruments.queued(statistics.queued)


def _draw_seed() -> int:
    return secrets.randbits(64)


def _bytes_per_token(served: ServedModel) -> int:
    """Most bytes of text that a token stands for; 0 where there is no tokenizer."""
    return served.tokenizer.bytes_per_token if served.tokenizer is not None else 0


def _metadata(context: Context, name: str) -> str:
    """What the caller sent under a name; empty where it sent nothing."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return ""
