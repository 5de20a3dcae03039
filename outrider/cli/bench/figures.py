"""Computes the figures of a report from its requests. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from outrider.cli.bench.outcomes import RequestOutcome
from outrider.cli.bench.slo import Slo, good
from outrider.cli.bench.target import Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The distribution of some values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that kept to the service level objectives."""

    share: float
    """Share of all requests that ended, failed ones included."""
    requests_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Counts of speculation, over all requests for which the server reported them."""

    steps: int
    drafted: int
    verified: int
    accepted: int
    acceptance_length: float
    """Tokens committed per verify step."""
    acceptance_rate: float
    """Accepted nodes divided by verified nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a whole load. Times are in seconds; tokens are those of completed requests."""

    seconds: float
    """From the first request's beginning to the last one's end."""
    completed: int
    failed: int
    errors: Mapping[str, int]
    """Failed requests by kind."""
    input_tokens: int
    cached_tokens: int
    """Prompt tokens that the server had cached."""
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    in_flight: float
    """Requests running at once, on average."""
    ttft: Spread | None
    gap: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    late: Spread | None
    goodput: Goodput | None
    speculation: Speculation | None


def summarize(outcomes: Sequence[RequestOutcome], slo: Slo = ()) -> Summary:
    """The figures of some requests. Latencies are those of completed requests only."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    ends = [outcome.end for outcome in done if outcome.end is not None]
    seconds = duration(outcomes)
    inputs, outputs = sum(end.input_tokens for end in ends), sum(end.output_tokens for end in ends)
    return Summary(
        seconds=seconds,
        completed=len(done),
        failed=len(outcomes) - len(done),
        errors=dict(Counter(outcome.error.reason for outcome in outcomes if outcome.error is not None)),
        input_tokens=inputs,
        cached_tokens=sum(end.cached_tokens for end in ends),
        output_tokens=outputs,
        requests_per_second=per_second(len(done), seconds),
        output_tokens_per_second=per_second(outputs, seconds),
        total_tokens_per_second=per_second(inputs + outputs, seconds),
        in_flight=per_second(sum(outcome.e2e for outcome in outcomes), seconds),
        ttft=spread(outcome.ttft for outcome in done),
        gap=spread(gap for outcome in done for gap in outcome.gaps),
        tpot=spread(outcome.tpot for outcome in done),
        e2e=spread(outcome.e2e for outcome in done),
        late=spread(outcome.late for outcome in outcomes),
        goodput=goodput(outcomes, slo, seconds) if slo else None,
        speculation=speculation(ends),
    )


def duration(outcomes: Sequence[RequestOutcome]) -> float:
    """Seconds from the first request's beginning to the last one's end."""
    if not outcomes:
        return 0.0
    return max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)


def per_second(amount: float, seconds: float) -> float:
    """A rate; 0 where no time has passed."""
    return amount / seconds if seconds > 0 else 0.0


def spread(values: Iterable[float | None]) -> Spread | None:
    """The distribution of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    cuts = quantiles(known, n=100, method="inclusive") if len(known) > 1 else 99 * known
    return Spread(mean=fmean(known), p50=cuts[49], p90=cuts[89], p95=cuts[94], p99=cuts[98])


def goodput(outcomes: Sequence[RequestOutcome], slo: Slo, seconds: float) -> Goodput:
    """The requests that kept to all bounds: their share and rate."""
    count = sum(good(outcome, slo) for outcome in outcomes)
    share = count / len(outcomes) if outcomes else 0.0
    return Goodput(share=share, requests_per_second=per_second(count, seconds))


def speculation(ends: Sequence[Ended]) -> Speculation | None:
    """The counts of all requests together; None if the server reported none."""
    told = [end.speculation for end in ends if end.speculation.get("steps")]
    if not told:
        return None
    steps, drafted, verified, accepted = (
        int(sum(one.get(name, 0) for one in told)) for name in ("steps", "drafted", "verified", "accepted")
    )
    committed = sum(one["steps"] * one.get("acceptance_length", 0.0) for one in told)
    return Speculation(
        steps=steps,
        drafted=drafted,
        verified=verified,
        accepted=accepted,
        acceptance_length=committed / steps,
        acceptance_rate=accepted / verified if verified else 0.0,
    )
