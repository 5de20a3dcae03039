"""Records the end of a request: metrics, log line and root span."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from orchestrator.generation import Generation
from orchestrator.observing.statistics import Statistics
from outrider.protocol.errors import OutriderError
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
DIGITS = 4
"""Decimal places of times in the log, in seconds."""
OK = "OK"
LATE_SHARE = 0.02
"""Last share of a caller's time in which a call that is cut off counts as late. A caller cuts it off when its
time is over, and the deadline that gRPC sends us can be a hundredth later."""


def is_late(now: float, arrived: float, deadline: float) -> bool:
    """Whether a call that was cut off now had no time left, rather than a caller who had lost interest."""
    return now >= deadline - LATE_SHARE * (deadline - arrived)


class RequestEnds:
    """Records how requests end. With `log`, each gets a log line."""

    def __init__(self, instruments: OrchestratorInstruments, *, log: bool) -> None:
        self._instruments = instruments
        self._log = log

    @contextmanager
    def recording(self, generation: Generation, waited: float, deadline: float) -> Iterator[None]:
        """A context around the run of a generation, which waited `waited` seconds for its place."""
        problem = "INTERNAL_ERROR"
        try:
            yield
            problem = ""
        except OutriderError as error:
            problem = error.reason
            raise
        except (asyncio.CancelledError, grpc.aio.InternalError):  # the latter: cancelled during a write
            late = is_late(generation.shared.clock(), generation.arrived, deadline)
            problem = "DEADLINE_EXCEEDED" if late else "CANCELLED"
            raise
        finally:
            self._record(generation, waited, problem)

    def _record(self, generation: Generation, waited: float, problem: str) -> None:
        """`problem` is the reason why the request ended early; empty: it did not."""
        seconds = generation.shared.clock() - generation.arrived
        self._count(generation, seconds, problem)
        if self._log:
            logger.info("request ended", **_fields(generation, waited, seconds, problem))
        begun = [*generation.completions, *generation.cut]
        generation.trace.finish(generation.request, begun, time.time_ns(), problem)

    def _count(self, generation: Generation, seconds: float, problem: str) -> None:
        request, completions = generation.request, generation.completions
        trace_id, model = generation.trace.traceparent[3:35], request.served.model
        ended, cut = (
            sum(one.completion_tokens - len(request.resumed) for one in some)
            for some in (completions, generation.cut)
        )
        self._instruments.labels.finished(request.labels, ended + cut)
        if problem:
            self._instruments.finished(problem.lower(), cut, seconds, None, None, trace_id, model)
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


def _fields(generation: Generation, waited: float, seconds: float, problem: str) -> dict[str, Any]:
    """Fields of the log line. Counts are over all continuations that began, times are from the request's
    arrival. Neither text nor tokens of the request are in it."""
    request, completions = generation.request, [*generation.completions, *generation.cut]
    counts = Statistics.total(one.statistics for one in completions)
    first = min((one.first_token_seconds for one in completions if one.statistics.steps), default=None)
    return {
        "status": problem or OK,
        "model": request.served.model,
        "mode": request.mode.name.lower(),
        "task": request.task,
        "continuations": request.sampling.n,
        "finish_reasons": [one.reason.name.lower() for one in generation.completions],
        "prompt_tokens": len(request.prompt),
        "cached_tokens": counts.cached,
        "output_tokens": sum(one.completion_tokens for one in completions),
        "resumed_tokens": len(request.resumed),
        "queue_seconds": round(waited, DIGITS),
        "first_token_seconds": None if first is None else round(first, DIGITS),
        "seconds": round(seconds, DIGITS),
        "steps": counts.steps,
        "acceptance_length": round(counts.acceptance_length, 3),
        "verified": counts.verified,
        "accepted": counts.accepted,
        "verify": sorted({one.verify for one in completions if one.verify}),
        "draft": sorted({one.draft for one in completions if one.draft}),
        "verify_losses": counts.verify_losses,
        "draft_losses": counts.draft_losses,
    }
