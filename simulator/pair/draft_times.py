"""Measures how long the steps of a draft take, with the caches as a target step leaves them.

A draft that had the caches to itself would be measured a third too fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

from prometheus_client import CollectorRegistry

from draft_service.core import DraftCore
from draft_service.drafters.base import Drafter, Expansion, Proposal
from draft_service.drafters.lookup import LookupDrafter
from draft_service.drafters.model import ModelDrafter
from draft_service.mailbox import Close, Commit, Message, Open
from draft_service.scheduler import PREFILL_CHUNK
from outrider.config import DraftConfig
from outrider.engine.runner import ModelRunner
from outrider.protocol.messages import OpenDraft, SamplingParams, Verdict
from outrider.telemetry.instruments import DraftInstruments
from simulator.pair.steps import now, time_step
from simulator.pair.target_times import SESSIONS, nowhere
from simulator.pair.texts import Text, with_room
from simulator.profile import Points

VERDICTS, TOKENS_OF_A_VERDICT = 39, 2
"""Rounds that a draft engine is measured over, and tokens that each commits."""
CONFIG = DraftConfig.model_validate({})


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """The times of a draft in a profile."""

    forward: Points
    sampling: float
    step: float
    verdict: float


def measure_draft(
    runner: ModelRunner, texts: Sequence[Text], target_step: Callable[[], object], context: int
) -> MeasuredDraft:
    """Times of a draft model that is loaded for one thread."""
    texts = with_room(texts, VERDICTS * TOKENS_OF_A_VERDICT + CONFIG.max_depth, runner)
    plain, sampled = (
        _engine(_TimedDrafter(runner), texts, temperature, target_step) for temperature in (0.0, 1.0)
    )
    most = CONFIG.expansions
    one, full = (time_step(runner, 1, count, context, before=target_step) for count in (1, most))
    return MeasuredDraft(
        forward=(
            (1, plain.full * min(one / full, 1.0)),
            (most, plain.full),
            (PREFILL_CHUNK, time_step(runner, 1, PREFILL_CHUNK, 0)),
        ),
        sampling=max(sampled.full - plain.full, 0.0),
        step=plain.step,
        verdict=plain.verdict,
    )


def measure_lookup(texts: Sequence[Text], target_step: Callable[[], object]) -> MeasuredDraft:
    """Times of a draft by lookup, which has no forwards."""
    found = _engine(_TimedLookup(), texts, 0.0, target_step)
    return MeasuredDraft(((1, 0.0), (PREFILL_CHUNK, 0.0)), 0.0, found.step, found.verdict)


@dataclass(frozen=True, slots=True)
class _Engine:
    """Seconds of a draft engine: a full forward, and what the engine adds per step and per verdict."""

    full: float
    step: float
    verdict: float


class _TimedDrafter(ModelDrafter):
    """A drafter that notes how long its expansions take."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, children=CONFIG.children, max_nodes=CONFIG.max_nodes)
        self.full: list[float] = []
        """Seconds of the forwards that expanded as many nodes as one forward may."""
        self.last = 0.0

    def expand(self, expansions: Sequence[Expansion]) -> list[Proposal | None]:
        """See Drafter."""
        start = now()
        proposals = super().expand(expansions)
        self.last = now() - start
        if len(expansions) == CONFIG.expansions:
            self.full.append(self.last)
        return proposals


class _TimedLookup(LookupDrafter):
    """A lookup drafter with the same attributes; it expands nothing."""

    def __init__(self) -> None:
        super().__init__(CONFIG.max_nodes, CONFIG.max_depth)
        self.full = [0.0]
        self.last = 0.0


def _engine(
    drafter: _TimedDrafter | _TimedLookup,
    texts: Sequence[Text],
    temperature: float,
    target_step: Callable[[], object],
) -> _Engine:
    """Measure rounds of a target step, verdicts to all sessions, and draft steps."""
    texts = list(islice(cycle(texts), SESSIONS))
    core = _core(drafter)
    streams = [nowhere(id) for id in range(SESSIONS)]
    messages: list[Message] = [
        Open(stream, _request(text, temperature)) for stream, text in zip(streams, texts, strict=True)
    ]
    while core.turn(messages) is not None:
        messages = []
    del drafter.full[1:]  # the sessions' first steps read their prompts
    learning, stepping = [], []
    for number in range(1, VERDICTS + 1):
        target_step()
        verdicts: list[Message] = [
            Commit(stream, _verdict(text, number), now()) for stream, text in zip(streams, texts, strict=True)
        ]
        learning.append(_beside(core, drafter, verdicts))
        stepping += [_beside(core, drafter, ()) for _ in range(3)]
    core.turn([Close(stream) for stream in streams])
    step = median(stepping)
    return _Engine(median(drafter.full), step, max(median(learning) - step, 0.0) / SESSIONS)


def _core(drafter: Drafter) -> DraftCore:
    return DraftCore(drafter, CONFIG, DraftInstruments(CollectorRegistry()), lambda deliveries: None)


def _beside(core: DraftCore, drafter: _TimedDrafter | _TimedLookup, messages: Sequence[Message]) -> float:
    """Seconds of a draft step without its forward."""
    drafter.last = 0.0
    start = now()
    core.turn(messages)
    return now() - start - drafter.last


def _verdict(text: Text, number: int) -> Verdict:
    """A verdict with the next tokens of a text, which is repeated after its end."""
    base = TOKENS_OF_A_VERDICT * (number - 1)
    tokens = tuple(text.tokens[(base + i) % len(text.tokens)] for i in range(TOKENS_OF_A_VERDICT))
    return Verdict(number, len(text.prompt) + base, tokens)


def _request(text: Text, temperature: float) -> OpenDraft:
    params = SamplingParams(temperature=temperature, seed=text.params.seed, ignore_eos=True)
    return OpenDraft(request_id="", token_ids=text.prompt, prompt_length=len(text.prompt), sampling=params)
