"""Measures how long the steps of a target take: its forwards, and the verify engine's work between them.

Forwards are timed with the caches as they are, in processor time of one thread. With a helper on a core of
its own they are timed in wall-clock time.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from outrider.config import VerifyConfig
from outrider.engine.kv.pages import PagePool
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.messages import ModelInfo, OpenVerify, SamplingParams, VerifyPolicy
from outrider.rpc.queues import Stream
from outrider.telemetry.instruments import VerifyInstruments
from simulator.pair.models import ModelChoice
from simulator.pair.steps import now, time_step
from simulator.pair.texts import Text, with_room
from simulator.profile import Points
from simulator.replica import ReadyOutbox
from verify_service.core import CoreSettings, VerifyCore
from verify_service.mailbox import Open
from verify_service.speculation.cost_model import CostModel

STEPS = (
    *((1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (2, 7), (3, 5), (8, 2), (8, 3), (7, 4), (8, 4)),
    *((16, 3), (16, 4), (32, 4)),
)
"""Measured steps: sessions, and tokens of each. Few sessions have long blocks, many have short ones. The
kernels for few rows end at 14 and 28 rows."""
CHUNKS = (256, 512)
"""Measured prefill steps, in tokens."""
HELPED_STEPS = ((16, 2), (16, 4), (1, 128))
"""Long steps that are measured with a helper, as in `STEPS`."""
QUIET_STEPS = ((1, 1), (2, 4), (8, 2), (16, 2), (32, 2))
"""Steps that are measured with a helper that has nothing else to do."""
SESSIONS, TOKENS = 8, 40
"""Sessions, and tokens of each, over which the engine's work between forwards is measured."""
MAX_SESSIONS = 32
"""Most sessions of a measured step."""
MAX_NODES = 256
"""Number of nodes for which a draft's tree needs room."""


@dataclass(frozen=True, slots=True)
class HelpedTimes:
    """Seconds of steps by their tokens, with a helper on another core; empty without such a core."""

    long: Mapping[int, float] = field(default_factory=dict)
    """Times when the helper joins only in long steps, as it does while it also drafts."""
    quiet: Points = ()
    """Times when the helper joins in every step, as it does while no draft works."""

    def share(self, alone: Mapping[int, float]) -> float:
        """The part of T(n) - T(1) that the helper halves; `alone` are the times without it."""
        shares = [
            2.0 * (alone[tokens] - seconds) / max(alone[tokens] - alone[1], 1e-9)
            for tokens, seconds in self.long.items()
        ]
        return min(max(median(shares), 0.0), 1.0) if shares else 0.0


@dataclass(frozen=True, slots=True)
class MeasuredTarget:
    """The times of a target in a profile."""

    forward: Points
    helped: float
    quiet: Points
    sampling: float
    step: float
    session: float


def kv_tokens(context: int, longest: int) -> int:
    """Tokens of memory that the measurements need: for many sessions of `context`, or some of the longest."""
    room = 2 * max(CHUNKS)
    return max(MAX_SESSIONS * (context + 32), (SESSIONS + 1) * (longest + 2 * TOKENS + MAX_NODES)) + room


def time_with_helper(choice: ModelChoice, context: int, longest: int) -> HelpedTimes:
    """Load the target with a helper, time some steps, and unload it.

    Raises:
        ModelError: it cannot be loaded.
    """
    cores = os.sched_getaffinity(0)
    own, *others = sorted(cores)
    if not others:
        return HelpedTimes()
    os.sched_setaffinity(0, {own})
    try:
        runner = choice.load(kv_tokens(context, longest), others[:1])
        found = HelpedTimes(
            dict(_helped(runner, HELPED_STEPS, context)),
            tuple(_helped(runner, QUIET_STEPS, context, quiet=True)),
        )
    finally:
        os.sched_setaffinity(0, cores)
    del runner
    gc.collect()
    return found


def measure_target(
    runner: ModelRunner, helped: HelpedTimes, texts: Sequence[Text], context: int
) -> MeasuredTarget:
    """Times of a target that is loaded for one thread; `context` tokens come before those of a step."""
    torch.set_num_threads(1)
    forward = {sessions * count: time_step(runner, sessions, count, context) for sessions, count in STEPS}
    forward |= {count: time_step(runner, 1, count, 0) for count in CHUNKS}
    eight = with_room(islice(cycle(texts), SESSIONS), TOKENS, runner)
    alone, plain = (_beside_forwards(runner, eight[:count], 0.0) for count in (1, SESSIONS))
    sampled = _beside_forwards(runner, eight, 1.0)
    session = max(plain - alone, 0.0) / (SESSIONS - 1)
    return MeasuredTarget(
        forward=tuple(sorted(forward.items())),
        helped=helped.share(forward),
        quiet=helped.quiet,
        sampling=max(sampled - plain, 0.0),
        step=max(alone - session, 0.0),
        session=session,
    )


def _helped(
    runner: ModelRunner, steps: Sequence[tuple[int, int]], context: int, quiet: bool = False
) -> list[tuple[int, float]]:
    runner.drafting(not quiet)
    return [
        (sessions * count, time_step(runner, sessions, count, context, clock=time.perf_counter))
        for sessions, count in steps
    ]


class _Timed:
    """A runner that notes how long its forwards take."""

    def __init__(self, runner: ModelRunner) -> None:
        self.pool: PagePool = runner.pool
        self.warming_up = False
        self.seconds = 0.0
        self.commit = runner.commit
        self.fork = runner.fork
        self.drafting = runner.drafting
        self.settle = runner.settle
        self._forward = runner.forward

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        start = now()
        logits = self._forward(segments)
        self.seconds += now() - start
        return logits


def _beside_forwards(runner: ModelRunner, texts: Sequence[Text], temperature: float) -> float:
    """Seconds per step that the verify engine adds to its forwards over one token of each text."""
    timed = _Timed(runner)
    core = VerifyCore(
        timed,
        CostModel([1, 64], [0.01, 0.1], 64),
        _settings(runner),
        VerifyInstruments(CollectorRegistry()),
        lambda deliveries: None,
    )
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
    core.turn([Open(nowhere(id), _opening(text, params)) for id, text in enumerate(texts)])
    beside: list[float] = []
    while not all(session.finished for session in core.sessions.values()):
        start, forward = now(), timed.seconds
        core.turn(())
        beside.append(now() - start - (timed.seconds - forward))
    for session in core.sessions.values():
        session.release_pages()
    return median(beside)


def _opening(text: Text, params: SamplingParams) -> OpenVerify:
    return OpenVerify(
        request_id="",
        model="",
        token_ids=text.prompt,
        prompt_length=len(text.prompt),
        sampling=params,
        policy=VerifyPolicy.OFF,
    )


def _settings(runner: ModelRunner) -> CoreSettings:
    """Settings without lookup and without waiting for candidates."""
    config, loaded = VerifyConfig.model_validate({"lookup": False}), runner.loaded
    info = ModelInfo("", "", loaded.vocabulary_size, loaded.context_length)
    settings = CoreSettings.of(config, info, config.max_step_tokens)
    return replace(settings, limits=replace(settings.limits, max_patience=0.0))


def nowhere(id: int) -> Stream[Any]:
    """A stream whose events are dropped."""
    return Stream(id, ReadyOutbox(lambda event: None))
