"""The findings as tables and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from outrider.cli.advise.chains import PLACES
from outrider.cli.advise.findings import MIN_GAIN, Findings, MeasuredDraft, Size
from outrider.cli.advise.options import WITHOUT, command

UNKNOWN = "\N{EN DASH}"
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")


def render(findings: Findings) -> str:
    """All tables, the advice, and the command that follows it."""
    advice = [_sentence(findings), "", _command(findings)]
    parts = [_head(findings), _drafts(findings), _tasks(findings), _loads(findings), advice]
    return "\n\n".join("\n".join(part) for part in parts if part)


def as_dict(findings: Findings) -> dict[str, Any]:
    """All figures, for JSON."""
    return {
        "machine": dict(findings.machine),
        "target": findings.target,
        "dtype": findings.dtype,
        "temperature": findings.temperature,
        "texts": len(findings.tasks),
        "tokens": findings.tokens,
        "target_size": asdict(findings.size),
        "without_drafts": [asdict(rate) for rate in findings.without],
        "drafts": [_candidate(findings, candidate) for candidate in findings.candidates],
        "advice": {"draft": findings.advice.draft, "command": _command(findings)},
    }


def _candidate(findings: Findings, candidate: MeasuredDraft) -> dict[str, Any]:
    kinds = sorted(set(findings.tasks))
    return {
        "name": candidate.option.name,
        "flags": list(candidate.option.flags),
        "size": asdict(candidate.size),
        "acceptance": candidate.acceptance(findings.tasks),
        "acceptance_by_task": {task: candidate.acceptance(findings.tasks, task) for task in kinds},
        "loads": [
            {**asdict(rate), "speed_up": speed_up}
            for rate, speed_up in zip(candidate.rates, findings.speed_ups(candidate), strict=True)
        ],
        "mean_speed_up": findings.mean_speed_up(candidate),
        "rests_from": candidate.rests_from,
        "command": command(findings.target, candidate.option, findings.dtype, findings.room),
    }


def _head(findings: Findings) -> list[str]:
    texts, size = len(findings.tasks), findings.size
    return [
        f"{texts} texts, {findings.tokens} tokens, T = {findings.temperature:g}; "
        f"{findings.machine.get('cpu', 'this machine')}",
        f"target {findings.target}: a step over one token takes {size.step_seconds * 1e3:.2f} ms; "
        f"{_megabytes(size)} MB of weights, {_kilobytes(size)} kB of keys and values per token",
    ]


def _drafts(findings: Findings) -> list[str]:
    width = _width(findings)
    title = "of chains, the first n tokens are all right"
    lines = [
        f"{'':{width}}{'step':>9}{'÷ target':>10}{'weights':>10}{'KV/token':>10}   {title}",
        f"{'draft':{width}}{'ms':>9}{'':>10}{'MB':>10}{'kB':>10}   {_ordinals()}",
    ]
    for one in findings.candidates:
        ratio = one.size.step_seconds / findings.size.step_seconds
        lines.append(
            f"{one.option.name:{width}}{one.size.step_seconds * 1e3:9.2f}{ratio:10.3f}"
            f"{_megabytes(one.size):>10}{_kilobytes(one.size):>10}   "
            f"{_shares(one.acceptance(findings.tasks))}"
        )
    return lines


def _tasks(findings: Findings) -> list[str]:
    kinds = sorted(set(findings.tasks))
    if len(kinds) < 2:
        return []
    width, wide = _width(findings), max(len(kind) for kind in (*kinds, "no task")) + 2
    lines = [f"{'draft':{width}}{'task':{wide}}{'texts':>6}   {_ordinals()}"]
    for one in findings.candidates:
        for kind in kinds:
            shares, count = _shares(one.acceptance(findings.tasks, kind)), findings.tasks.count(kind)
            lines.append(f"{one.option.name:{width}}{kind or 'no task':{wide}}{count:6}   {shares}")
    return lines


def _loads(findings: Findings) -> list[str]:
    width = _width(findings)
    counts = [rate.sessions for rate in findings.without]
    cells = [f"{rate.tokens_per_second:.4g}" for rate in findings.without]
    lines = [
        "expected tokens/s (÷ none) by sessions at once, one core for the target and one for the draft:",
        f"{'draft':{width}}{_row(map(str, counts))}  rests from",
        f"{WITHOUT.name:{width}}{_row(cells)}",
    ]
    for one in findings.candidates:
        cells = [
            f"{rate.tokens_per_second:.4g} ({ratio:.2f})"
            for rate, ratio in zip(one.rates, findings.speed_ups(one), strict=True)
        ]
        lines.append(f"{one.option.name:{width}}{_row(cells)}  {one.rests_from or UNKNOWN:>10}")
    return lines


def _sentence(findings: Findings) -> str:
    best = findings.best
    if best is None:
        return f"Take none: no draft brings {MIN_GAIN:.0%} over these loads."
    rests = best.rests_from
    resting = f" From {rests} sessions on it rests by itself." if rests else ""
    return (
        f"Take {best.option.name}: {findings.mean_speed_up(best):.2f} times the tokens/s of none, the mean "
        f"over these loads.{resting}"
    )


def _command(findings: Findings) -> str:
    return command(findings.target, findings.advice, findings.dtype, findings.room)


def _width(findings: Findings) -> int:
    return max(len(one.option.name) for one in findings.candidates) + 2


def _row(cells: Iterator[str] | Sequence[str]) -> str:
    return "".join(f"{cell:>15}" for cell in cells)


def _ordinals() -> str:
    return "".join(f"{name:>6}" for name in ORDINALS[:PLACES])


def _shares(shares: Sequence[float]) -> str:
    known = zip_longest((f"{share:.0%}" for share in shares), ORDINALS[:PLACES], fillvalue=UNKNOWN)
    return "".join(f"{share:>6}" for share, _ in known)


def _megabytes(size: Size) -> str:
    return f"{size.weight_bytes / 1e6:.1f}"


def _kilobytes(size: Size) -> str:
    return f"{size.kv_bytes_per_token / 1e3:.1f}"
