"""Counts of one continuation."""

from __future__ import annotations

from orchestrator.observing.statistics import Statistics
from outrider.protocol.messages import StepTimes, Verdict

PREFILL = StepTimes(queue_micros=5_000, forward_micros=90_000, sample_micros=1_000)
ROUND = StepTimes(queue_micros=2_000, forward_micros=7_000, sample_micros=1_000, idle_micros=1_500)


def test_efficiency_leaves_prefill_out() -> None:
    """Rounds are counted from the first verdict on; the sums by kind of work are over all steps."""
    statistics = Statistics()
    for step, times in enumerate((PREFILL, ROUND, ROUND), 1):
        statistics.add_verdict(Verdict(step, step, (5,), times=times), now=float(step))
    assert (statistics.decode_busy_us, statistics.decode_us) == (16_000, 20_000)
    assert statistics.forward_us == 104_000
    assert (statistics.steps, statistics.first_token_at) == (3, 1.0)


def test_nothing_is_divided_by_zero() -> None:
    """A continuation without a step has no acceptance length."""
    assert Statistics().acceptance_length == 0.0


def test_accepted_candidates_are_counted_by_step() -> None:
    """Of the steps that verified any: a step without candidates is no draw."""
    statistics = Statistics()
    for verified, accepted in ((4, 2), (0, 0), (3, 0), (5, 2)):
        statistics.add_verdict(
            Verdict(1, 0, (1,) * (accepted + 1), verified=verified, accepted=accepted), 1.0
        )
    assert statistics.histogram == [1, 0, 2]
