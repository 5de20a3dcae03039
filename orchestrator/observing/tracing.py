"""The spans of one request: its own, and below it `prefill` and one `speculation.step` per verdict.

Nothing here runs for a request that is not sampled. Attributes of the root span are those of the
OpenTelemetry conventions for generative AI and for gRPC; `docs/tracing.md` lists those of all spans. Neither
text nor tokens of a request are among them.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from orchestrator.observing.drift import Reading
from orchestrator.observing.statistics import Statistics
from orchestrator.observing.timeline import Step
from orchestrator.output import Completion
from orchestrator.request.resolver import ResolvedRequest
from outrider.config import TraceDetail
from outrider.protocol.messages import FinishReason
from outrider.protocol.rpc_errors import code_of_reason
from outrider.telemetry.rpc_spans import GENERATE, rpc_attributes
from outrider.telemetry.spans import (
    Attribute,
    Attributes,
    SpanKind,
    is_sampled,
    record_request,
    record_span,
    start_request,
    step_span_id,
)

MAX_INT = 2**63 - 1
"""The largest integer that an attribute can hold."""
CANCELLED = "CANCELLED"
MAX_KEPT = 512
"""Most steps of a continuation that are kept until it is known whether it was slow: some 100 KB."""


@dataclass(slots=True)
class RequestTrace:
    """The root span of a request; `traceparent` is empty when it is not sampled."""

    name: str
    incoming: str
    start_ns: int
    traceparent: str

    @classmethod
    def start(cls, request: ResolvedRequest, incoming: str, start_ns: int) -> RequestTrace:
        """Decide whether the request is sampled. `incoming` is the caller's traceparent, or empty."""
        operation = _operation(request)
        name = f"{operation} {request.served.model}"
        traceparent = start_request(name, incoming, {"gen_ai.operation.name": operation})
        return cls(name, incoming, start_ns, traceparent)

    def continuation(self, index: int) -> str:
        """The parent of one continuation's spans, as a traceparent: for the first one it is the root span."""
        if index == 0 or not self.traceparent:
            return self.traceparent
        return f"{self.traceparent[:36]}{random.getrandbits(64) or 1:016x}{self.traceparent[52:]}"

    def record_continuation(self, traceparent: str, index: int, start_ns: int, end_ns: int) -> None:
        """Record the span of a continuation after the first."""
        if index and traceparent:
            span_id = int(traceparent[36:52], 16)
            attributes = {"outrider.index": index}
            record_span(
                "continuation",
                parent=self.traceparent,
                start_ns=start_ns,
                end_ns=end_ns,
                attributes=attributes,
                span_id=span_id,
            )

    def finish(
        self, request: ResolvedRequest, completions: list[Completion], end_ns: int, error: str
    ) -> None:
        """Record the root span; `error` is the reason why the request ended early, or empty. Completions that
        were cut off have no reason."""
        if self.traceparent:
            record_request(
                self.traceparent,
                self.name,
                incoming=self.incoming,
                start_ns=self.start_ns,
                end_ns=end_ns,
                attributes=_attributes(request, completions) | _outcome(completions, error),
                error=error,
            )


class StepSpans:
    """The spans of one continuation's steps: all of them, none, or at its end those of a slow continuation.

    With the detail `slow`, the last `MAX_KEPT` steps of a sampled request are kept until its end. The
    replicas then record nothing, because it is not known yet whether it will be slow.
    """

    def __init__(self, traceparent: str = "", detail: TraceDetail = "all", slow_seconds: float = 0.0) -> None:
        self._traceparent = traceparent
        self._detail = detail
        self._slow_seconds = slow_seconds
        self._kept: deque[tuple[Step, Reading | None]] = deque(maxlen=MAX_KEPT)

    @property
    def of_replicas(self) -> str:
        """The traceparent that is the parent of the replicas' spans; empty: they record nothing."""
        return self._traceparent if self._detail == "all" else ""

    def prefill(self, start_ns: int, end_ns: int, tokens: int, cached: int) -> None:
        """Record the span from opening a verify session to its first verdict."""
        record_span(
            "prefill",
            parent=self._traceparent,
            start_ns=start_ns,
            end_ns=end_ns,
            attributes={"outrider.prefill.tokens": tokens, "outrider.prefill.cached_tokens": cached},
        )

    def step(self, step: Step, drift: Reading | None) -> None:
        """A step has ended."""
        match self._detail:
            case "all":
                record_step(self._traceparent, step, drift)
            case "slow":
                if is_sampled(self._traceparent):
                    self._kept.append((step, drift))
            case "none":
                pass

    def end(self, seconds: float) -> None:
        """The continuation has ended, `seconds` after its request arrived."""
        if seconds >= self._slow_seconds:
            for step, drift in self._kept:
                record_step(self._traceparent, step, drift)
        self._kept.clear()


def record_step(traceparent: str, step: Step, drift: Reading | None = None) -> None:
    """Record one step, under the id that all services derive for it; `drift` is the alarm it raised."""
    if not is_sampled(traceparent):
        return
    verdict, times = step.verdict, step.verdict.times
    record_span(
        "speculation.step",
        parent=traceparent,
        start_ns=step.start_ns,
        end_ns=step.end_ns,
        span_id=step_span_id(traceparent, verdict.step),
        links=step.links,
        events=[("outrider.drift", step.end_ns, _drift_attributes(drift))] if drift is not None else [],
        attributes={
            "outrider.step.number": verdict.step,
            "outrider.step.nodes_drafted": step.drafted,
            "outrider.step.verified": verdict.verified,
            "outrider.step.accepted": verdict.accepted,
            "outrider.step.acceptance_length": len(verdict.tokens),
            "outrider.step.depth": verdict.depth,
            "outrider.step.hit": verdict.hit,
            "outrider.step.batch_size": verdict.batch_size,
            "outrider.step.draft_us": step.draft_us,
            "outrider.step.wire_us": step.wire_us,
            "outrider.step.queue_us": times.queue_micros,
            "outrider.step.forward_us": times.forward_micros,
            "outrider.step.sample_us": times.sample_micros,
            "outrider.step.idle_us": times.idle_micros,
        },
    )


def _drift_attributes(drift: Reading) -> Attributes:
    return {"outrider.drift.mean_before": drift.before, "outrider.drift.steps": drift.steps}


def _operation(request: ResolvedRequest) -> str:
    return "chat" if request.chat else "text_completion"


def _attributes(request: ResolvedRequest, completions: list[Completion]) -> dict[str, Attribute]:
    """Attributes of the request and of its results."""
    sampling, counts = request.sampling, Statistics.total(each.statistics for each in completions)
    assert sampling.max_tokens is not None
    return {
        "gen_ai.operation.name": _operation(request),
        "gen_ai.provider.name": "outrider",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": request.served.model,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        **_unusual(request),
        "gen_ai.response.model": request.served.model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": sum(completion.completion_tokens for completion in completions),
        "gen_ai.usage.cache_read.input_tokens": counts.cached,
        "outrider.mode": request.mode.name.lower(),
        **({"outrider.task": request.task} if request.task else {}),
        **{f"outrider.label.{name}": value for name, value in request.labels.items()},
        "outrider.steps": counts.steps,
        "outrider.verified": counts.verified,
        "outrider.accepted": counts.accepted,
        "outrider.draft_losses": counts.draft_losses,
        "outrider.verify_losses": counts.verify_losses,
    }


def _unusual(request: ResolvedRequest) -> dict[str, Attribute]:
    """Parameters that differ from their defaults."""
    sampling = request.sampling
    given: dict[str, tuple[Attribute, Attribute]] = {
        "gen_ai.request.top_p": (sampling.top_p, 1.0),
        "gen_ai.request.top_k": (sampling.top_k, 0),
        "gen_ai.request.presence_penalty": (sampling.presence_penalty, 0.0),
        "gen_ai.request.frequency_penalty": (sampling.frequency_penalty, 0.0),
        "gen_ai.request.choice.count": (sampling.n, 1),
    }
    found = {name: value for name, (value, default) in given.items() if value != default}
    if not sampling.greedy and sampling.seed <= MAX_INT:
        found["gen_ai.request.seed"] = sampling.seed
    return found


def _outcome(completions: list[Completion], error: str) -> dict[str, Attribute]:
    """How the request ended."""
    status = "OK" if not error else CANCELLED if error == CANCELLED else code_of_reason(error).name
    found = rpc_attributes(GENERATE, status, SpanKind.SERVER)
    if error:
        found["error.type"] = error
    if ended := [one for one in completions if one.reason is not FinishReason.NONE]:
        found["gen_ai.response.finish_reasons"] = [_reason(one.reason) for one in ended]
        found["gen_ai.response.time_to_first_chunk"] = min(one.first_token_seconds for one in ended)
    return found


def _reason(reason: FinishReason) -> str:
    return "length" if reason is FinishReason.LENGTH else "stop"
