"""Records the end of a request: metrics, log line and root span."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from orchestrator.generation import Generation
from orchestrator.observing.request_log import fields_of
from outrider.protocol.errors import OutriderError
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)


class RequestEnds:
    """Records how requests end. With `log`, each has a log line."""

    def __init__(self, instruments: OrchestratorInstruments, *, log: bool) -> None:
        self._instruments = instruments
        self._log = log

    @contextmanager
    def recording(self, generation: Generation, waited: float) -> Iterator[None]:
        """Around the run of a generation, which waited so many seconds for its place."""
        problem = "INTERNAL_ERROR"
        try:
            yield
            problem = ""
        except OutriderError as error:
            problem = error.reason
            raise
        except (asyncio.CancelledError, grpc.aio.InternalError):  # the latter: cancelled during a write
            problem = "CANCELLED"
            raise
        finally:
            self._record(generation, waited, problem)

    def _record(self, generation: Generation, waited: float, problem: str) -> None:
        """`problem` is the reason of what ended the request early; empty: nothing did."""
        seconds = generation.clock() - generation.arrived
        self._count(generation, seconds, problem)
        if self._log:
            fields = fields_of(generation.request, generation.completions, waited, seconds, problem)
            logger.info("request ended", **fields)
        generation.trace.finish(generation.request, generation.completions, time.time_ns(), problem)

    def _count(self, generation: Generation, seconds: float, problem: str) -> None:
        request, completions = generation.request, generation.completions
        trace_id, model = generation.trace.traceparent[3:35], request.served.model
        made = sum(one.completion_tokens - len(request.resumed) for one in completions)
        self._instruments.labels.finished(request.labels, made)
        if problem:
            self._instruments.finished(problem.lower(), 0, seconds, None, None, trace_id, model)
        if completions:
            cached = max(one.statistics.cached for one in completions)
            self._instruments.prompt(model, len(request.prompt), cached)
        for completion in completions:
            generated = completion.completion_tokens - len(request.resumed)
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
