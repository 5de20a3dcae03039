"""The spans of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from orchestrator.observing.drift import Reading
from orchestrator.observing.timeline import Step
from orchestrator.observing.tracing import MAX_KEPT, RequestTrace, StepSpans, record_step
from orchestrator.request.resolver import ResolvedRequest
from outrider.protocol.messages import ModelInfo, SamplingParams, Verdict
from outrider.telemetry.spans import shutdown_tracing, use_processor

TRACEPARENT = f"00-{1:032x}-{2:016x}-01"
STEP = Step(Verdict(4, 10, (5,)), 1_000, 2_000, drafted=3, draft_us=0, wire_us=0, links=())
SERVED = ModelInfo("target", "hash", vocabulary_size=300, context_length=20)
ERROR_TYPES = {"": "OK", "NO_REPLICA": "UNAVAILABLE", "CANCELLED": "CANCELLED", "A_BUG": "UNKNOWN"}


class Spans(SpanProcessor):
    """Collects finished spans."""

    def __init__(self) -> None:
        self.ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """One more."""
        self.ended.append(span)


@pytest.fixture
def spans():
    """What is recorded while a test runs."""
    collected = Spans()
    use_processor("orchestrator", "o0", collected)
    yield collected
    shutdown_tracing()


def test_a_step_that_found_drift_says_so(spans) -> None:
    """Its span carries an event with what acceptance was before."""
    record_step(TRACEPARENT, STEP, Reading(1.0, True, before=0.7, steps=900))
    (event,) = spans.ended[0].events
    assert (event.name, event.timestamp) == ("outrider.drift", 2_000)
    assert dict(event.attributes) == {"outrider.drift.mean_before": 0.7, "outrider.drift.steps": 900}


def test_other_steps_have_no_events(spans) -> None:
    """Drift is the exception."""
    record_step(TRACEPARENT, STEP)
    assert spans.ended[0].name == "speculation.step"
    assert list(spans.ended[0].events) == []


def test_labels_are_attributes(spans) -> None:
    """Each under its own name; a request without any has none."""
    for labels in ({"team": "search"}, {}):
        request = ResolvedRequest(
            request_id="r", served=SERVED, prompt=(1,), sampling=SamplingParams(max_tokens=1), labels=labels
        )
        RequestTrace.start(request, TRACEPARENT, 1_000).finish(request, [], 2_000, "")
    labelled, plain = (dict(span.attributes) for span in spans.ended)
    assert labelled["outrider.label.team"] == "search"
    assert not any(name.startswith("outrider.label") for name in plain)


def _root(spans: Spans, sampling: SamplingParams, *, chat: bool = False, error: str = "") -> ReadableSpan:
    """The root span of a request that ended before its first token."""
    request = ResolvedRequest(request_id="r", served=SERVED, prompt=(1, 2), sampling=sampling, chat=chat)
    RequestTrace.start(request, TRACEPARENT, 1_000).finish(request, [], 2_000, error)
    return spans.ended[-1]


def test_a_root_span_has_what_was_asked_and_is_out_of_the_ordinary(spans) -> None:
    """Defaults are left out; a greedy request has no seed."""
    root = _root(spans, SamplingParams(max_tokens=4))
    assert root.name == "text_completion target"
    assert root.attributes["gen_ai.request.max_tokens"] == 4
    unusual = {"gen_ai.request.top_p", "gen_ai.request.seed", "gen_ai.request.choice.count", "outrider.task"}
    assert not unusual & set(root.attributes)
    sampled = _root(spans, SamplingParams(max_tokens=4, temperature=1.0, top_p=0.5, seed=2**63 - 1, n=2))
    assert unusual - {"outrider.task"} <= set(sampled.attributes)
    assert "target" in _root(spans, SamplingParams(max_tokens=4), chat=True).name.removeprefix("chat ")


def test_a_seed_that_no_attribute_can_hold_is_left_out(spans) -> None:
    """OTLP's integers are signed; the exporter would complain about every such span."""
    root = _root(spans, SamplingParams(max_tokens=4, temperature=1.0, seed=2**63))
    assert "gen_ai.request.seed" not in root.attributes


@pytest.mark.parametrize(("error", "status"), ERROR_TYPES.items())
def test_a_root_span_says_how_the_request_ended(spans, error, status) -> None:
    """With the reason that metrics have too, and the status that the caller saw."""
    root = _root(spans, SamplingParams(max_tokens=4), error=error)
    assert root.attributes["rpc.response.status_code"] == status
    assert root.attributes.get("error.type", "") == error
    assert root.status.is_ok is not bool(error)


def steps(spans: Spans) -> list[int]:
    """The numbers of the recorded steps."""
    return [one.attributes["outrider.step.number"] for one in spans.ended if one.name == "speculation.step"]


def numbered(count: int) -> list[Step]:
    """So many steps."""
    return [replace(STEP, verdict=replace(STEP.verdict, step=number)) for number in range(count)]


@pytest.mark.parametrize(("seconds", "found"), [(1.9, []), (2.0, [0, 1, 2])])
def test_steps_of_slow_requests_are_recorded_at_their_end(
    spans: Spans, seconds: float, found: list[int]
) -> None:
    """Not before, and not those of quick ones; replicas record nothing."""
    kept = StepSpans(TRACEPARENT, "slow", 2.0)
    for step in numbered(3):
        kept.step(step, None)
    assert steps(spans) == []
    kept.end(seconds)
    assert steps(spans) == found
    assert kept.of_replicas == ""


def test_a_slow_request_keeps_its_last_steps(spans: Spans) -> None:
    """However long it is; without a trace it keeps none."""
    for traceparent, found in ((TRACEPARENT, list(range(9, MAX_KEPT + 9))), ("", [])):
        kept = StepSpans(traceparent, "slow", 0.0)
        for step in numbered(MAX_KEPT + 9):
            kept.step(step, None)
        spans.ended.clear()
        kept.end(5.0)
        assert steps(spans) == found


def test_steps_may_be_left_out(spans: Spans) -> None:
    """With `none` only what is above them is recorded."""
    kept = StepSpans(TRACEPARENT, "none", 0.0)
    kept.prefill(1, 2, 3, 0)
    kept.step(STEP, None)
    kept.end(5.0)
    assert [one.name for one in spans.ended] == ["prefill"]
    assert kept.of_replicas == ""


def test_all_steps_are_recorded_as_they_come(spans: Spans) -> None:
    """The default; replicas record their part below the same trace."""
    every = StepSpans(TRACEPARENT)
    every.step(STEP, None)
    assert steps(spans) == [4]
    assert every.of_replicas == TRACEPARENT
