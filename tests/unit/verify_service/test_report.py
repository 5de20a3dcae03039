"""What is counted of a step: estimates against what the walk did, and rounds after the first."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from outrider.protocol.messages import SamplingParams
from outrider.protocol.wire import verdict_from_pb, verdict_to_pb
from outrider.telemetry.instruments import VerifyInstruments
from tests.unit.verify_service.fakes import (
    Bench,
    FakeRunner,
    block,
    greedy_text,
    make_session,
    opening,
    text,
    verdicts,
)
from verify_service.report import count_verdict, verdict_of
from verify_service.scheduler import Work
from verify_service.speculation.pace import LATE_WEIGHT
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
    count_verdict(VerifyInstruments(registry), outcome, verdict_of(outcome, result, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(("pace", "price"), [(0.0, 0.8), (1e-9, 0.8 / LATE_WEIGHT)])
def test_a_session_behind_its_pace_hears_a_lower_price(pace: float, price: float) -> None:
    """A token of it is worth several of others."""
    session = make_session(seconds_per_token=pace)
    session.published(0.0, 0.0)
    result = Verifier(FakeRunner(), ()).run([Work(session, 1, True)])
    assert verdict_of(result.outcomes[0], result, 0.0, 0.8, 0.0).node_price == price


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


def test_a_verdict_after_hours_of_silence_goes_over_the_wire() -> None:
    """A reader who comes back after a day gets the rest of the text; the wait is said as far as it can be."""
    bench = Bench(max_unread=2)
    stream = bench.open(opening(sampling=SamplingParams(max_tokens=8)))
    bench.run()
    before = verdicts(stream)
    bench.clock.now += 24 * 3600.0
    bench.run()
    late = verdicts(stream)
    assert [verdict_from_pb(verdict_to_pb(verdict)) for verdict in late] == late
    assert late[0].times.queue_micros == late[0].times.idle_micros == 2**32 - 1
    found = text([*before, *late])
    assert found == greedy_text([1, 2, 3], len(found))
