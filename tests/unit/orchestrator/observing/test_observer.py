"""What is counted of a continuation: its need of drafts, and falls of acceptance."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from orchestrator.observing.drift import MIN_STEPS
from orchestrator.observing.observer import Observer, Observers
from orchestrator.request.resolver import ResolvedRequest
from outrider.protocol.messages import Mode, ModelInfo, SamplingParams, StepTimes, TokenBlock, Verdict
from outrider.telemetry.instruments import OrchestratorInstruments

SERVED = ModelInfo("target", "hash", vocabulary_size=100, context_length=1000)
IDLE = StepTimes(idle_micros=100_000)


class Bench:
    """Observers over a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.observers = Observers(OrchestratorInstruments(self.registry))

    def watch(self, mode: Mode = Mode.AUTO) -> Observer:
        """Watch a continuation of traffic labelled "code"."""
        request = ResolvedRequest(
            request_id="r", served=SERVED, prompt=(1, 2), sampling=SamplingParams(), mode=mode, task="code"
        )
        observer = self.observers.watch(request)
        if mode is not Mode.OFF:
            observer.wants_draft()
        return observer

    def value(self, name: str, **labels: str) -> float | None:
        """A sample of the page."""
        return self.registry.get_sample_value(f"outrider_orchestrator_{name}", labels)


@pytest.fixture
def bench() -> Bench:
    """Nothing counted yet."""
    return Bench()


def verdict(step: int, accepted: int = 1, **fields: Any) -> Verdict:
    """One that commits two tokens, after two tokens of prompt."""
    return Verdict(step, 2 * step, (5, 6), verified=3, accepted=accepted, times=IDLE, **fields)


def block(base_length: int) -> TokenBlock:
    """A block of a draft that knows of so many committed tokens."""
    return TokenBlock(0, (-base_length,), (7,), (0.5,), base_length=base_length)


def test_sessions_that_wait_for_a_draft_are_counted(bench) -> None:
    """From the beginning, and again when the draft is lost, until the continuation ends."""
    observer = bench.watch()
    assert (bench.value("draft_sessions_wanted"), bench.value("draft_sessions_waiting")) == (1, 1)
    observer.draft_opened("draft-1:7701")
    assert bench.value("draft_sessions_waiting") == 0
    observer.lost("draft", "draft-1:7701")
    assert bench.value("draft_sessions_waiting") == 1
    assert bench.value("fallbacks_total", kind="draft") == 1
    observer.close()
    assert (bench.value("draft_sessions_wanted"), bench.value("draft_sessions_waiting")) == (0, 0)


def test_a_session_with_two_drafts_waits_for_none_while_one_is_left(bench) -> None:
    """The loss of the second one makes it wait."""
    observer = bench.watch()
    for endpoint in ("draft-1:7701", "draft-2:7701"):
        observer.draft_opened(endpoint)
    for endpoint, waiting in (("draft-1:7701", 0), ("draft-2:7701", 1)):
        observer.lost("draft", endpoint)
        assert bench.value("draft_sessions_waiting") == waiting


def test_a_session_that_moves_lost_nothing(bench) -> None:
    """It waits for a draft again, and nobody is told of a fallback."""
    observer = bench.watch()
    observer.wants_draft()
    observer.draft_opened("draft-1:7701")
    observer.left("draft-1:7701")
    assert bench.value("draft_sessions_waiting") == 1
    assert bench.value("fallbacks_total", kind="draft") == 0


def test_a_lost_verify_replica_leaves_the_draft_alone(bench) -> None:
    """It is a fallback of its own kind."""
    observer = bench.watch()
    observer.draft_opened("draft-1:7701")
    observer.lost("verify")
    assert bench.value("draft_sessions_waiting") == 0
    assert bench.value("fallbacks_total", kind="verify") == 1


def test_a_session_that_gave_its_draft_up_wants_none(bench) -> None:
    """Drafting does not pay: that is no lack of drafts."""
    observer = bench.watch()
    observer.draft_opened("draft-1:7701")
    observer.verdict(verdict(1), 10.0)
    observer.parked()
    assert bench.value("draft_parkings_total") == 1
    assert (bench.value("draft_sessions_wanted"), bench.value("draft_sessions_waiting")) == (0, 0)
    observer.verdict(verdict(2), 11.0)
    assert bench.value("draft_wanted_seconds_total") == 0
    observer.close()
    assert (bench.value("draft_sessions_wanted"), bench.value("draft_sessions_waiting")) == (0, 0)


def test_who_wants_no_drafts_does_not_wait_for_one(bench) -> None:
    """MODE_OFF is no demand, and its time counts for nothing."""
    observer = bench.watch(Mode.OFF)
    observer.verdict(verdict(1), 10.0)
    observer.verdict(verdict(2), 11.0)
    assert (bench.value("draft_sessions_wanted"), bench.value("draft_sessions_waiting")) == (0, 0)
    assert bench.value("draft_wanted_seconds_total") == 0


def test_time_is_counted_from_the_first_verdict(bench) -> None:
    """Wanted: all of it. Missing: what passed without a draft. Idle: as the verify service says."""
    observer = bench.watch()
    observer.verdict(verdict(1), 10.0)
    observer.verdict(verdict(2), 10.5)
    observer.draft_opened("draft-1:7701")
    observer.verdict(verdict(3), 12.5)
    assert bench.value("draft_wanted_seconds_total") == 2.5
    assert bench.value("draft_missing_seconds_total") == 0.5
    assert bench.value("draft_idle_seconds_total") == pytest.approx(0.2)


def test_lag_ends_with_the_first_block_that_knows_of_the_verdict(bench) -> None:
    """A block that was on its way already is no answer; later verdicts do not start the clock anew."""
    observer = bench.watch()
    observer.draft_opened("draft-1:7701")
    observer.verdict(verdict(1), 10.0)  # commits up to length 4
    observer.block(block(2), 10.1)
    observer.block(TokenBlock(0, (), (), (), base_length=4), 10.1)  # the draft is only at work
    assert bench.value("draft_lag_seconds_count") == 0
    observer.verdict(verdict(2), 10.2)
    observer.block(block(4), 10.5)
    assert bench.value("draft_lag_seconds_count") == 1
    assert bench.value("draft_lag_seconds_sum") == pytest.approx(0.5)
    observer.block(block(6), 10.6)
    assert bench.value("draft_lag_seconds_count") == 1


def test_steps_are_attributed_to_the_draft_at_hand(bench) -> None:
    """By its endpoint, and to "none" while there is none."""
    observer = bench.watch()
    observer.verdict(verdict(1), 1.0)
    observer.draft_opened("draft-1:7701")
    observer.verdict(verdict(2), 2.0)
    assert bench.value("steps_total", task="code", draft="none") == 1
    assert bench.value("steps_total", task="code", draft="draft-1:7701") == 1


def test_a_fall_of_acceptance_is_told(bench) -> None:
    """Once: as a count, as a log line, and as what the step's span will carry."""
    observer, readings = bench.watch(), []
    observer.draft_opened("draft-1:7701")
    with capture_logs() as lines:
        for step in range(1, 2 * MIN_STEPS + 1):
            readings.append(observer.verdict(verdict(step, accepted=step <= MIN_STEPS), float(step)))
    alarms = [reading for reading in readings if reading is not None]
    assert len(alarms) == 1
    assert bench.value("drifts_total", task="code", draft="draft-1:7701") == 1
    (line,) = (line for line in lines if "acceptance has fallen" in line["event"])
    assert (line["task"], line["draft"]) == ("code", "draft-1:7701")
    assert line["mean_before"] == pytest.approx(alarms[0].before, abs=1e-3)
