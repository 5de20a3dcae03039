"""What is counted of a step: estimates against what the walk did, and rounds after the first."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from outrider.telemetry.instruments import VerifyInstruments
from tests.unit.verify_service.fakes import FakeRunner, block, greedy_text, make_session
from verify_service.report import count_verdict, verdict_of
from verify_service.scheduler import Work
from verify_service.speculation.controller import Advice
from verify_service.verifier import Verifier


@pytest.fixture
def registry() -> CollectorRegistry:
    """Nothing counted yet."""
    return CollectorRegistry()


def step(registry: CollectorRegistry, **session_changes: object) -> None:
    """A step over a right child, a wrong child, and a right and a wrong grandchild; counted."""
    session = make_session(**session_changes)
    truth = greedy_text([1, 2, 3], 3)
    wrong = [(token + 1) % 13 for token in truth]
    nodes = [(-3, truth[0], 0.75), (-3, wrong[0], 0.25), (0, truth[1], 0.8), (1, truth[1], 0.9)]
    session.propose(block(0, nodes), arrived=0.0)
    result = Verifier(FakeRunner(), ()).run([Work(session, 1, True, list(session.tree.nodes()))])
    (outcome,) = result.outcomes
    count_verdict(
        VerifyInstruments(registry), outcome, verdict_of(outcome, result, 0.0, Advice(0.0, True, 0.0))
    )


def test_estimates_are_judged_by_the_walk(registry) -> None:
    """The right child and grandchild were reached; a right token below a wrong one was not."""
    step(registry)

    def at(name: str, bucket: str) -> float | None:
        return registry.get_sample_value(f"outrider_verify_calibration_{name}_total", {"bucket": bucket})

    assert (at("nodes", "0.7"), at("accepted", "0.7")) == (1, 1)
    assert (at("nodes", "0.6"), at("accepted", "0.6")) == (1, 1)
    assert at("predicted", "0.6") == pytest.approx(0.75 * 0.8)
    assert (at("nodes", "0.2"), at("accepted", "0.2")) == (2, 0)
    assert sum(at("nodes", f"0.{i}") for i in range(10)) == 4


def test_the_first_step_of_a_session_is_no_round(registry) -> None:
    """Its time is prefill."""
    step(registry)
    assert registry.get_sample_value("outrider_verify_steps_total", {"task": "none"}) == 1
    assert registry.get_sample_value("outrider_verify_round_seconds_total", {"task": "none"}) == 0
