"""Findings as a study makes them, with figures that are known."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cli.advise.findings import Findings, MeasuredDraft, Rate, Size
from outrider.cli.advise.options import DraftOption

SIZE = Size(step_seconds=0.02, weight_bytes=400_000_000, kv_bytes_per_token=2_000)
SMALL = Size(step_seconds=0.001, weight_bytes=10_000_000, kv_bytes_per_token=500)
SESSIONS = (1, 8, 32)


def rates(speeds: Sequence[float], drafting: Sequence[float] = (1.0, 1.0, 1.0)) -> tuple[Rate, ...]:
    """A rate for each of SESSIONS."""
    return tuple(
        Rate(sessions=sessions, tokens_per_second=speed, tokens_per_step=2.0, drafting=share)
        for sessions, speed, share in zip(SESSIONS, speeds, drafting, strict=True)
    )


def candidate(
    draft: str,
    speeds: Sequence[float],
    drafting: Sequence[float] = (1.0, 1.0, 1.0),
    runs: tuple[tuple[int, ...], ...] = ((2, 1, 0, 1), (0, 3, 2, 1)),
) -> MeasuredDraft:
    """A draft of that name with these tokens per second."""
    return MeasuredDraft(option=DraftOption(draft), size=SMALL, runs=runs, rates=rates(speeds, drafting))


def findings(*candidates: MeasuredDraft) -> Findings:
    """Two texts of two tasks; without drafts 50, 200 and 400 tokens per second."""
    return Findings(
        target="models/large",
        dtype="auto",
        temperature=0.7,
        size=SIZE,
        tasks=("chat", "code"),
        tokens=8,
        longest=40,
        without=rates((50.0, 200.0, 400.0), (0.0, 0.0, 0.0)),
        candidates=candidates,
        machine={"cpu": "a processor"},
    )
