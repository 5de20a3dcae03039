"""One trace per request over all three services, received by a real OTLP endpoint."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.telemetry.rpc_spans import DRAFT, VERIFY
from tests.integration.client import AUTO, OFF, Generation, eventually
from tests.integration.collector import Collector, Span, new_traceparent
from tests.tracing_page import documented

STEP_ATTRIBUTES = (
    "drafted",
    "verified",
    "accepted",
    "hit",
    "batch_size",
    "queue",
    "forward",
    "sample",
    "idle",
)
"""Each must be part of the name of an attribute of a step span."""
STATUS = "rpc.response.status_code"
MAX_TEXTS = 20
"""Most texts until the draft has a part in one."""


@dataclass(frozen=True)
class Trace:
    """A traced request: what the client got and what the collector got."""

    generation: Generation
    caller_span_id: str
    spans: list[Span]

    def named(self, name: str) -> list[Span]:
        """The spans of a name, oldest first."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    @property
    def root(self) -> Span:
        """The request's own span: the one below the caller's."""
        [root] = [span for span in self.spans if span.parent_id == self.caller_span_id]
        return root


def complete_trace(collector: Collector, trace_id: str, caller_span_id: str, steps: int) -> list[Span]:
    """Wait for the root, all steps and their forwards, the drafting that they link to, and both streams.

    Every service exports in batches of its own, in no order.
    """
    wanted = {
        "prefill": 1,
        "speculation.step": steps,
        "verify.forward": steps,
        "draft.expand": 1,
        VERIFY: 2,
        DRAFT: 2,
    }

    def complete() -> bool:
        spans = collector.trace(trace_id)
        names = [span.name for span in spans]
        rooted = any(span.parent_id == caller_span_id for span in spans)
        linked = {link for span in spans for link in span.links}
        counted = all(names.count(name) >= count for name, count in wanted.items())
        return rooted and counted and linked <= {span.span_id for span in spans}

    eventually(complete, f"a whole trace of {steps} steps")
    return collector.trace(trace_id)


@pytest.fixture(scope="module")
def traced(demo, prompts, collector) -> Trace:
    """One pipelined request with the demo pair, sampled by its caller, in which the draft has a part.

    On a busy machine its blocks may come too late for a text; and then it rests, for texts of that task. A
    stream may also end too late there, and is cancelled.
    """
    for number in range(MAX_TEXTS):
        traceparent, trace_id = new_traceparent()
        generation = demo.client("real").generate(
            prompts(8)[7], mode=AUTO, max_tokens=48, task=f"traced {number}", traceparent=traceparent
        )
        if generation.statistics.draft_micros:
            caller_span_id = traceparent.split("-")[2]
            spans = complete_trace(collector, trace_id, caller_span_id, generation.statistics.steps)
            if {"CANCELLED"}.isdisjoint(span.attributes.get(STATUS) for span in spans):
                return Trace(generation, caller_span_id, spans)
    raise AssertionError(f"no draft had a part in one of {MAX_TEXTS} texts, or its streams ended late")


def test_the_root_continues_the_callers_trace(traced):
    """The request's span is a child of the caller's, with the attributes of the `gen_ai` conventions."""
    assert traced.root.service == "outrider-orchestrator"
    assert any(name.startswith("gen_ai.") for name in traced.root.attributes)


def test_all_three_services_take_part(traced):
    """One trace holds spans of the orchestrator, the draft and the verify service."""
    services = {span.service for span in traced.spans}
    assert services == {"outrider-orchestrator", "outrider-draft", "outrider-verify"}


def test_every_step_is_a_child_of_the_request(traced):
    """There is one `speculation.step` per verify step, directly below the request, and a `prefill` beside."""
    steps = traced.named("speculation.step")
    assert len(steps) == traced.generation.statistics.steps
    assert {span.parent_id for span in steps} == {traced.root.span_id}
    assert {span.parent_id for span in traced.named("prefill")} == {traced.root.span_id}


def test_forwards_and_expansions_are_children_of_steps(traced):
    """`verify.forward` and `draft.expand` hang below the step they belong to, in their own services."""
    steps = {span.span_id for span in traced.named("speculation.step")}
    forwards, expansions = traced.named("verify.forward"), traced.named("draft.expand")
    assert {span.parent_id for span in forwards} == steps
    assert {span.service for span in forwards} == {"outrider-verify"}
    assert {span.service for span in expansions} == {"outrider-draft"}
    below_steps = [span for span in expansions if span.parent_id in steps]
    assert len(below_steps) >= len(expansions) - 2, "only work for a step that never came may lack its parent"


def test_steps_link_to_the_blocks_they_used(traced):
    """A step that verified drafted nodes links to `draft.expand` spans of this trace."""
    expansions = {span.span_id for span in traced.named("draft.expand")}
    linked = {link for span in traced.named("speculation.step") for link in span.links}
    assert linked
    assert linked <= expansions


def test_steps_carry_their_counts_and_times(traced):
    """A step says what was drafted, verified and accepted, and where its time went."""
    for span in traced.named("speculation.step"):
        for part in STEP_ATTRIBUTES:
            assert any(part in name for name in span.attributes), (
                f"{part} is missing in {sorted(span.attributes)}"
            )
    accepted = sum(span.attributes["outrider.step.accepted"] for span in traced.named("speculation.step"))
    assert accepted == traced.generation.statistics.accepted


@pytest.mark.parametrize(("method", "service"), [(VERIFY, "outrider-verify"), (DRAFT, "outrider-draft")])
def test_both_ends_of_a_stream(traced, method, service):
    """The orchestrator's end is below the request and names the replica, whose end is below it."""
    ends = {span.kind: span for span in traced.named(method)}
    assert ends["CLIENT"].service == "outrider-orchestrator"
    assert ends["CLIENT"].parent_id == traced.root.span_id
    assert ends["CLIENT"].attributes["server.address"]
    assert ends["SERVER"].service == service
    assert ends["SERVER"].parent_id == ends["CLIENT"].span_id
    assert {span.attributes[STATUS] for span in ends.values()} == {"OK"}


def test_attributes_are_those_of_the_page(traced):
    """docs/tracing.md lists every attribute, and what it lists without a condition is there."""
    page, root = documented(), "text_completion MODEL"
    names = {traced.root.name: root, DRAFT: VERIFY}
    for span in traced.spans:
        attributes = page[names.get(span.name, span.name)]
        assert set(span.attributes) <= set(attributes), span.name
        assert {name for name, always in attributes.items() if always} <= set(span.attributes), span.name
    assert {names.get(span.name, span.name) for span in traced.spans} == set(page) - {"continuation"}


def test_spans_lie_inside_their_parents_on_one_machine(traced):
    """No span ends before it starts, and steps lie within the request."""
    for span in traced.spans:
        assert span.start_ns <= span.end_ns
    for span in traced.named("speculation.step"):
        assert traced.root.start_ns <= span.start_ns
        assert span.end_ns <= traced.root.end_ns


def test_the_target_alone_has_no_draft_spans(demo, prompts, collector):
    """MODE_OFF traces its steps too, without any drafting."""
    traceparent, trace_id = new_traceparent()
    generation = demo.client("real").generate(prompts(1)[0], mode=OFF, max_tokens=6, traceparent=traceparent)
    steps = generation.statistics.steps
    eventually(lambda: len(collector.trace(trace_id)) >= 1 + 2 * steps, "the spans of MODE_OFF")
    assert not [span for span in collector.trace(trace_id) if span.name == "draft.expand"]


def test_unsampled_requests_leave_nothing(demo, prompts, collector):
    """A caller that does not sample gets no span anywhere."""
    unsampled, trace_id = new_traceparent(sampled=False)
    sampled, later_trace_id = new_traceparent()
    client = demo.client("real")
    client.generate(prompts(1)[0], max_tokens=8, traceparent=unsampled)
    client.generate(prompts(1)[0], max_tokens=8, traceparent=sampled)
    eventually(lambda: len(collector.trace(later_trace_id)) > 10, "the sampled request's spans")
    assert collector.trace(trace_id) == []
