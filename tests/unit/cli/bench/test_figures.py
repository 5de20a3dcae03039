"""From requests to figures."""

from __future__ import annotations

import pytest

from outrider.cli.bench.figures import spread, summarize
from outrider.cli.bench.slo import parse_slo
from outrider.protocol.errors import Overloaded, Unavailable
from tests.unit.cli.bench.worlds import outcome


def test_percentiles_lie_between_the_nearest_values() -> None:
    """As numpy's do; of one value all are that value."""
    found, one = spread([3.0, 1.0, 4.0, 2.0]), spread([5.0])
    assert found is not None
    assert one is not None
    assert (found.p50, found.p90) == (2.5, pytest.approx(3.7))
    assert (one.p50, one.p99) == (5.0, 5.0)


def test_a_spread_leaves_out_what_is_not_known() -> None:
    """And there is none of nothing."""
    found = spread([3.0, None, 1.0])
    assert found is not None
    assert (found.mean, found.p50) == (2.0, 2.0)
    assert spread([None]) is None


def test_figures_of_one_request() -> None:
    """First token from sending; time per token over the tokens after the first, however they came."""
    one = outcome(sent=1.0, deliveries=(1.5, 1.7, 2.5), tokens=11, due=0.75)
    assert one.ttft == pytest.approx(0.5)
    assert one.gaps == pytest.approx([0.2, 0.8])
    assert one.tpot == pytest.approx(0.1)
    assert (one.e2e, one.late) == (1.5, 0.25)


def test_an_empty_answer_has_no_latencies_but_its_end() -> None:
    """Neither a first token nor a time per token."""
    none = outcome(deliveries=(), tokens=0)
    assert (none.ttft, none.gaps, none.tpot) == (None, [], None)
    assert outcome(deliveries=(1.0,), tokens=1).tpot is None


def test_rates_count_from_the_first_sent_to_the_last_ended() -> None:
    """Two requests, one after the other, over five seconds."""
    summary = summarize(
        [outcome(0, sent=10.0, deliveries=(12.0,)), outcome(1, sent=12.0, deliveries=(15.0,))]
    )
    assert (summary.seconds, summary.completed, summary.failed) == (5.0, 2, 0)
    assert (summary.input_tokens, summary.output_tokens) == (20, 6)
    assert summary.requests_per_second == pytest.approx(0.4)
    assert summary.output_tokens_per_second == pytest.approx(1.2)
    assert summary.total_tokens_per_second == pytest.approx(5.2)
    assert summary.in_flight == pytest.approx(1.0)


def test_failed_requests_are_counted_by_kind_and_nowhere_else() -> None:
    """Their latencies would make a server that refuses look fast."""
    failures = [Overloaded("full"), Overloaded("full"), Unavailable("gone")]
    failed = [outcome(i, deliveries=(0.001,), error=error) for i, error in enumerate(failures)]
    summary = summarize([*failed, outcome(3)])
    assert (summary.completed, summary.failed) == (1, 3)
    assert summary.errors == {"OVERLOADED": 2, "UNAVAILABLE": 1}
    assert summary.ttft is not None
    assert summary.ttft.p50 == 1.0


def test_nothing_has_no_figures() -> None:
    """An interrupt before the first end is no error."""
    summary = summarize([], parse_slo("ttft=1s"))
    assert (summary.seconds, summary.requests_per_second, summary.ttft) == (0.0, 0.0, None)


def test_goodput_counts_requests_within_all_bounds() -> None:
    """One is good, one too slow, one failed: a third of them."""
    good = outcome(0, deliveries=(0.4, 0.6), tokens=2)
    slow = outcome(1, deliveries=(0.4, 4.0), tokens=2)
    failed = outcome(2, deliveries=(0.1,), error=Unavailable("gone"))
    goodput = summarize([good, slow, failed], parse_slo("ttft=500ms,tpot=1s")).goodput
    assert goodput is not None
    assert goodput.share == pytest.approx(1 / 3)
    assert goodput.requests_per_second == pytest.approx(0.25)
    assert summarize([good]).goodput is None


def test_speculation_is_weighted_by_steps() -> None:
    """Long requests count for more; servers that tell nothing leave it out."""
    counts = {"drafted": 30, "verified": 20, "accepted": 10}
    long = outcome(0, speculation={"steps": 9, "acceptance_length": 3.0, **counts})
    short = outcome(1, speculation={"steps": 1, "acceptance_length": 1.0, **counts})
    found = summarize([long, short, outcome(2)]).speculation
    assert found is not None
    assert found.acceptance_length == pytest.approx(2.8)
    assert (found.steps, found.drafted, found.acceptance_rate) == (10, 60, 0.5)
    assert summarize([outcome()]).speculation is None
