"""Measures the times that a profile needs of a pair on this machine, with the project's own engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from outrider.engine.cpu.worker_pool import HELPED_ROWS
from outrider.protocol.messages import SamplingParams
from simulator.pair.draft_times import MeasuredDraft, measure_draft
from simulator.pair.messages import MessageTimes, measure_messages
from simulator.pair.models import ModelChoice
from simulator.pair.steps import one_step
from simulator.pair.target_times import MeasuredTarget, kv_tokens, measure_target, time_with_helper
from simulator.pair.texts import Text
from simulator.profile import HostTimes, Profile
from simulator.traces import Trace

CONTEXT = 100
"""Tokens before those of a measured step."""
WAKE = 0.00005
"""Seconds from a message's arrival until the engine thread that it wakes runs."""


def measure(target: Path, draft: Path, dtype: str, traces: str, texts: Sequence[Trace]) -> Profile:
    """The profile of a pair, measured with one core for each model."""
    asked = [Text(text.prompt, text.tokens, SamplingParams(seed=text.seed)) for text in texts]
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    room = kv_tokens(CONTEXT, longest)
    helped = time_with_helper(ModelChoice(str(target), dtype), CONTEXT, longest)
    runner = ModelChoice(str(target), dtype).load(room)
    measured = measure_target(runner, helped, asked, CONTEXT)
    small = ModelChoice(str(draft), dtype).load(room)
    drafting = measure_draft(small, asked, lambda: one_step(runner, CONTEXT), CONTEXT)
    note = f"{target} with {draft}, {dtype}, one thread each"
    return profile_of(target.name, note, traces, measured, drafting, measure_messages())


def profile_of(
    name: str,
    note: str,
    traces: str,
    target: MeasuredTarget,
    draft: MeasuredDraft,
    messages: MessageTimes,
    *,
    draft_kind: Literal["model", "lookup"] = "model",
    context_length: int = 2048,
) -> Profile:
    """The profile of a machine with one core for the target and one for the draft."""
    return Profile(
        name=name,
        origin="measured",
        note=note,
        traces=traces,
        cores="two",
        target_forward=target.forward,
        target_helped=target.helped,
        helped_rows=HELPED_ROWS,
        target_quiet=target.quiet,
        target_sampling=target.sampling,
        draft_kind=draft_kind,
        draft_forward=draft.forward,
        draft_sampling=draft.sampling,
        host=HostTimes(
            send=messages.message,
            receive=messages.message,
            rewarm=messages.rewarm,
            wake=WAKE,
            verify_step=target.step,
            verify_session=target.session,
            draft_step=draft.step,
            draft_verdict=draft.verdict,
        ),
        context_length=context_length,
    )
