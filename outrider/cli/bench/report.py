"""What `outrider bench` prints and writes. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.cli.bench.figures import Spread, Summary
from outrider.cli.bench.outcomes import RequestOutcome
from outrider.cli.bench.slo import Slo, good
from outrider.cli.bench.target import Served

HIDDEN = "HIDDEN"
"""Replaces the bearer token in a command line that is shown."""
LATENCIES = (
    ("time to first token", "ttft"),
    ("between deliveries", "gap"),
    ("per output token", "tpot"),
    ("end to end", "e2e"),
    ("sent late", "late"),
)
SHARES = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """A load that has ended, or was interrupted."""

    served: Served
    setting: str
    """One line that describes the load."""
    requests: int
    """Number of requests planned."""
    begun: int
    outcomes: Sequence[RequestOutcome]
    summary: Summary
    slo: Slo


def table(run: LoadRun) -> str:
    """The run as a table for people."""
    parts = [
        f"{run.served.address}, model {run.served.model}\n{run.setting}",
        "\n".join(f"{name:<20}{value:>12}{note}" for name, value, note in _counts(run)),
        _latencies(run.summary),
        _speculation(run.summary),
        _errors(run),
        _cut_short(run),
    ]
    return "\n\n".join(part for part in parts if part)


def record(run: LoadRun, machine: Mapping[str, str], command: Sequence[str], version: str) -> dict[str, Any]:
    """The run as JSON for programs. Names that end in `_s` are seconds; `sent_s` counts from the first
    request."""
    start = min((outcome.sent for outcome in run.outcomes), default=0.0)
    return {
        "command": shlex.join(without_token(command)),
        "outrider": version,
        "machine": dict(machine),
        "target": {"address": run.served.address, "model": run.served.model},
        "setting": run.setting,
        "slo_s": {bound.figure: bound.seconds for bound in run.slo},
        "asked": run.requests,
        "cut_short": run.begun - len(run.outcomes),
        "summary": _summary(run.summary),
        "requests": [
            _request(outcome, start, run.slo) for outcome in sorted(run.outcomes, key=lambda one: one.index)
        ],
    }


def without_token(command: Sequence[str]) -> list[str]:
    """The command line with its bearer token replaced, so that it can be shown to others."""
    shown = [f"--token={HIDDEN}" if word.startswith("--token=") else word for word in command]
    after = [False, *(word == "--token" for word in shown)]
    return [HIDDEN if secret else word for secret, word in zip(after, shown, strict=False)]


def _counts(run: LoadRun) -> list[tuple[str, str, str]]:
    """Rows of a name, a value, and a remark about it."""
    summary = run.summary
    cached = f"  {summary.cached_tokens} of them cached" if summary.cached_tokens else ""
    rows = [
        ("duration", f"{summary.seconds:.2f}", " s"),
        ("completed", str(summary.completed), ""),
        ("failed", str(summary.failed), ""),
        ("input tokens", str(summary.input_tokens), cached),
        ("output tokens", str(summary.output_tokens), ""),
        ("requests/s", f"{summary.requests_per_second:.3f}", ""),
        ("output tokens/s", f"{summary.output_tokens_per_second:.1f}", ""),
        ("all tokens/s", f"{summary.total_tokens_per_second:.1f}", ""),
        ("running at once", f"{summary.in_flight:.2f}", "  on average"),
    ]
    if summary.goodput is not None:
        bounds = ", ".join(map(str, run.slo))
        rows.append(("goodput", f"{summary.goodput.share:.1%}", f"  within {bounds}"))
        rows.append(("goodput requests/s", f"{summary.goodput.requests_per_second:.3f}", ""))
    return rows


def _latencies(summary: Summary) -> str:
    rows = [(name, getattr(summary, key)) for name, key in LATENCIES]
    known = [_latency(name, spread) for name, spread in rows if spread is not None]
    if not known:
        return ""
    return "\n".join([f"{'ms':<20}" + "".join(f"{share:>12}" for share in SHARES), *known])


def _latency(name: str, spread: Spread) -> str:
    return f"{name:<20}" + "".join(f"{getattr(spread, share) * 1000:12.2f}" for share in SHARES)


def _speculation(summary: Summary) -> str:
    counts = summary.speculation
    if counts is None:
        return ""
    return (
        f"acceptance length {counts.acceptance_length:.2f} tokens per step, "
        f"acceptance rate {counts.acceptance_rate:.1%} of verified nodes\n"
        f"{counts.steps} steps; {counts.drafted} nodes from drafts; {counts.verified} verified, "
        f"those of lookup included, {counts.accepted} accepted"
    )


def _errors(run: LoadRun) -> str:
    failed = [outcome for outcome in run.outcomes if outcome.error is not None]
    if not failed:
        return ""
    first = min(failed, key=lambda outcome: outcome.ended)
    kinds = ", ".join(f"{count} {kind}" for kind, count in run.summary.errors.items())
    return f"failed: {kinds}\nthe first, request {first.index}: {first.error}"


def _cut_short(run: LoadRun) -> str:
    if len(run.outcomes) == run.requests:
        return ""
    cut, unsent = run.begun - len(run.outcomes), run.requests - run.begun
    return f"interrupted: {cut} requests were cut short and {unsent} not sent; neither counts above"


def _summary(summary: Summary) -> dict[str, Any]:
    found = asdict(summary)
    for name in ("seconds", *(key for _, key in LATENCIES)):
        found[f"{'duration' if name == 'seconds' else name}_s"] = found.pop(name)
    return found


def _request(outcome: RequestOutcome, start: float, slo: Slo) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": outcome.index,
        "sent_s": outcome.sent - start,
        "late_s": outcome.late,
        "ttft_s": outcome.ttft,
        "tpot_s": outcome.tpot,
        "e2e_s": outcome.e2e,
        "gaps_s": outcome.gaps,
        "good": good(outcome, slo) if slo else None,
        "error": None if outcome.error is None else f"{outcome.error.reason}: {outcome.error}",
    }
    return found | (asdict(outcome.end) if outcome.end is not None else {})
