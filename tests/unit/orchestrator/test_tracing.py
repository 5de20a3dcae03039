"""The spans of a request."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from orchestrator.timeline import Step
from orchestrator.tracing import record_step
from outrider.drift import Reading
from outrider.messages import Verdict
from outrider.telemetry.spans import shutdown_tracing, use_processor

TRACEPARENT = f"00-{1:032x}-{2:016x}-01"
STEP = Step(Verdict(4, 10, (5,)), 1_000, 2_000, drafted=3, draft_us=0, wire_us=0, links=())


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
