"""Reports a step: verdicts with their times, metrics and spans."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.protocol.messages import FinishReason, StepTimes, Verdict
from outrider.telemetry.instruments import VerifyInstruments
from outrider.telemetry.spans import is_sampled, record_span, step_traceparent
from verify_service.verifier import SessionOutcome, StepResult

MAX_MICROS = 2**32 - 1
"""Largest time on the wire, in microseconds: it has 32 bits. Longer times, as of a session that nobody has
read for hours, are cut to it."""


class IdleMeter:
    """Measures the seconds in which sessions were open but no step ran. Times come from the engine's
    clock."""

    def __init__(self, now: float) -> None:
        self.total = 0.0
        self._last_end = now

    def restart(self, now: float) -> None:
        """Restart when the first session is opened: the time before does not count."""
        self._last_end = now

    def until(self, now: float) -> float:
        """Return the total up to `now`, between two steps."""
        return self.total + now - self._last_end

    def step(self, start: float, end: float) -> float:
        """Note a step from `start` to `end`; return the idle time right before it."""
        idle = start - self._last_end
        self.total += idle
        self._last_end = end
        return idle


def verdict_of(
    outcome: SessionOutcome, result: StepResult, idle_total: float, price: float, next_step: float
) -> Verdict:
    """Return the verdict of one session's part of a step, with the session's next number.

    `idle_total` are the engine's idle seconds at the start of the step, `price` is the price of its nodes in
    tokens of an average session, `next_step` the expected seconds until the step after the one that begins
    now.
    """
    session, times = outcome.session, result.timings
    return Verdict(
        step=session.step + 1,
        base_length=outcome.base_length,
        tokens=tuple(outcome.tokens),
        verified=len(outcome.nodes),
        accepted=outcome.accepted,
        depth=outcome.depth,
        hit=outcome.hit,
        lookup_verified=len(outcome.nodes) - outcome.draft_nodes,
        batch_size=result.sessions,
        logprobs=outcome.logprobs,
        times=StepTimes(
            forward_start_unix_nano=times.start_ns,
            queue_micros=_micros(times.start - session.last_verdict),
            forward_micros=_micros(times.forwarded - times.start),
            sample_micros=_micros(times.end - times.forwarded),
            idle_micros=_micros(idle_total - session.idle_before),
        ),
        finish_reason=outcome.finish,
        node_price=price / session.weight(times.end),
        prompt_tokens=result.prompt_tokens,
        draft_wanted=session.draft_wanted,
        next_step_micros=_micros(next_step),
        take_turns=session.takes_turns,
        nodes=outcome.recorded,
        predicted=outcome.predicted,
        predicted_accepted=outcome.predicted_accepted,
        features=outcome.features,
    )


def count_verdict(instruments: VerifyInstruments, outcome: SessionOutcome, verdict: Verdict) -> None:
    """Count a session's part of a step."""
    opening = outcome.session.opening
    instruments.verdict(verdict, opening.task, first=verdict.step == opening.first_step + 1)
    if outcome.finish is FinishReason.NONE:  # the end of a text would cut the walk short
        instruments.estimates(_judged(outcome))


def _judged(outcome: SessionOutcome) -> Iterator[tuple[float, bool]]:
    """Yield (estimated reach, whether the walk arrived) of every verified node; parents come before
    children."""
    walked: set[int] = set()
    for node in outcome.nodes:
        arrived = (
            node.depth <= outcome.accepted
            and node.token == outcome.tokens[node.depth - 1]
            and (node.parent is None or node.parent.id in walked)
        )
        if arrived:
            walked.add(node.id)
        yield node.reach, arrived


def record_forward(outcome: SessionOutcome, verdict: Verdict, step_tokens: int) -> None:
    """Record the `verify.forward` span of a session's step when its request is sampled."""
    traceparent = outcome.session.opening.traceparent
    if not is_sampled(traceparent):
        return
    times = verdict.times
    record_span(
        "verify.forward",
        parent=step_traceparent(traceparent, verdict.step),
        start_ns=times.forward_start_unix_nano,
        end_ns=times.forward_start_unix_nano + (times.forward_micros + times.sample_micros) * 1000,
        attributes={
            "outrider.step.number": verdict.step,
            "outrider.step.verified": verdict.verified,
            "outrider.step.accepted": verdict.accepted,
            "outrider.step.hit": verdict.hit,
            "outrider.step.batch_size": verdict.batch_size,
            "outrider.step.batch_tokens": step_tokens,
            "outrider.step.prompt_tokens": verdict.prompt_tokens,
            "outrider.step.queue_us": times.queue_micros,
            "outrider.step.idle_us": times.idle_micros,
            "outrider.step.sample_us": times.sample_micros,
        },
    )


def _micros(seconds: float) -> int:
    return min(max(round(seconds * 1e6), 0), MAX_MICROS)
