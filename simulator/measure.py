"""Measures a pair on this machine: the times that a profile needs, from the project's own engines.

Processor time of one thread, median of several rounds, with the caches as they are behind a target step: a
draft that had them for itself would be a third quicker than it is.
Messages between processes are not measured here: `MESSAGE` and `REWARM` are what gRPC for Python takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from draft_service.core import DraftCore
from draft_service.drafters.base import Expansion, Proposal
from draft_service.drafters.model import ModelDrafter
from draft_service.mailbox import Commit, Message
from draft_service.mailbox import Open as OpenDrafting
from outrider.config import DraftConfig, VerifyConfig
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.messages import OpenDraft, OpenVerify, SamplingParams, Verdict, VerifyPolicy
from outrider.rpc.queues import Stream
from outrider.telemetry.instruments import DraftInstruments, VerifyInstruments
from simulator.engine_fiber import ReadyOutbox
from simulator.profile import HostTimes, Profile
from simulator.traces import Trace
from verify_service.core import CoreSettings, VerifyCore
from verify_service.mailbox import Open
from verify_service.session import VerifyLimits
from verify_service.speculation.cost_model import CostModel

STEPS = (
    *((1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (2, 7), (3, 5), (8, 2), (8, 3), (7, 4), (8, 4)),
    *((16, 3), (16, 4), (32, 4)),
)
"""Sessions of a measured step and tokens of each: one session has long
blocks, many have short ones. The kernels for few rows end at 14 and 28."""
CHUNKS = (256, 512)
"""Tokens of measured prefill."""
CONTEXT = 100
ROUNDS = 7
SESSIONS = 8
TOKENS = 40
MESSAGE = 0.000095
"""Seconds of processor time to send or to receive a message: what the orchestrator's process took for each of
a session's step without drafts, when there were 32 sessions (0.19 ms for the verdict's way through)."""
REWARM = 0.0005
"""What the first message after a pause adds: with one session the same took 0.84 ms."""
WAKE = 0.00005
HELPED_STEPS = ((16, 2), (16, 4), (1, 128))
"""Sessions and tokens of the long steps that are measured with a helper."""
SHARE_OF_ONE = 0.75
"""A draft forward over one node takes this part of one over eight; measured with the demo draft."""
PAGE_SIZE = 16
now = time.thread_time
"""Processor time of the calling thread."""


def measure(target: Path, draft: Path, dtype: str, traces: str, texts: Sequence[Trace]) -> Profile:
    """The profile of a pair with one core for each model."""
    torch.set_num_threads(1)
    runner = _runner(target, dtype)
    alone, plain = (_verify_steps(runner, texts[:count], 0.0) for count in (1, SESSIONS))
    sampled = _verify_steps(runner, texts[:SESSIONS], 1.0)
    session = max(plain - alone, 0.0) / (SESSIONS - 1)
    forward = [(sessions * count, _step(runner, sessions, count)) for sessions, count in STEPS]
    forward += [(count, _step(runner, 1, count, context=0)) for count in CHUNKS]
    drafting, drafting_sampled = (
        _draft_steps(draft, dtype, texts, temperature, lambda: _step(runner, 1, 1, rounds=1))
        for temperature in (0.0, 1.0)
    )
    return Profile(
        name=target.name,
        origin="measured",
        note=f"{target} with {draft}, {dtype}, one thread each",
        traces=traces,
        cores="two",
        target_forward=tuple(forward),
        target_helped=_helped(target, dtype, dict(forward)),
        target_sampling=max(sampled - plain, 0.0),
        draft_forward=tuple(drafting.forward),
        draft_sampling=max(drafting_sampled.forward[1][1] - drafting.forward[1][1], 0.0),
        host=HostTimes(
            send=MESSAGE,
            receive=MESSAGE,
            rewarm=REWARM,
            wake=WAKE,
            verify_step=max(alone - session, 0.0),
            verify_session=session,
            draft_step=drafting.step,
            draft_verdict=drafting.verdict,
        ),
    )


def _runner(model: Path, dtype: str, helper_cores: Sequence[int] = ()) -> ModelRunner:
    loaded = load_model(str(model), dtype=dtype, device="cpu", threads=1, helper_cores=helper_cores)
    return ModelRunner(loaded, 512, PAGE_SIZE)


def _helped(target: Path, dtype: str, alone: Mapping[int, float]) -> float:
    """Part of T(n) - T(1) that a helper on a core of its own takes half of."""
    cores = os.sched_getaffinity(0)
    own, *others = sorted(cores)
    if not others:
        return 0.0
    os.sched_setaffinity(0, {own})
    try:
        runner = _runner(target, dtype, others[:1])
        shares = [
            2.0
            * (alone[sessions * count] - _step(runner, sessions, count, clock=time.perf_counter))
            / (alone[sessions * count] - alone[1])
            for sessions, count in HELPED_STEPS
        ]
    finally:
        os.sched_setaffinity(0, cores)
    return min(max(median(shares), 0.0), 1.0)


def _step(
    runner: ModelRunner,
    sessions: int,
    count: int,
    context: int = CONTEXT,
    clock: Callable[[], float] = now,
    rounds: int = ROUNDS,
) -> float:
    """Seconds of a forward over `count` tokens of each session."""
    seconds: list[float] = []
    for _ in range(rounds):
        sequences = [_sequence(runner, context) for _ in range(sessions)]
        segments = [Segment(kv, [1] * count, None, range(min(count, 64))) for kv in sequences]
        start = clock()
        runner.forward(segments)
        seconds.append(clock() - start)
        for kv in sequences:
            kv.release()
    return median(seconds)


def _sequence(runner: ModelRunner, context: int) -> SequenceKv:
    """A sequence with that many tokens, whatever their keys and values are."""
    kv = SequenceKv.open(runner.pool, [], reuse=False)
    kv.reserve(context)
    kv.append([1] * context, None)
    runner.commit(kv, range(context), [1] * context)
    return kv


class _Timed:
    """A runner that notes how long its forwards take."""

    def __init__(self, runner: ModelRunner) -> None:
        self.pool: PagePool = runner.pool
        self.seconds = 0.0
        self.commit = runner.commit
        self.fork = runner.fork
        self._forward = runner.forward

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        start = now()
        logits = self._forward(segments)
        self.seconds += now() - start
        return logits


def _verify_steps(runner: ModelRunner, texts: Sequence[Trace], temperature: float) -> float:
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
    openings = [_opening(text, params) for text in texts]
    core.turn([Open(_nowhere(id), o) for id, o in enumerate(openings)])
    beside: list[float] = []
    while not all(session.finished for session in core.sessions.values()):
        start, forward = now(), timed.seconds
        core.turn(())
        beside.append(now() - start - (timed.seconds - forward))
    return median(beside)


def _opening(text: Trace, params: SamplingParams) -> OpenVerify:
    return OpenVerify(
        request_id="",
        model="",
        token_ids=text.prompt,
        prompt_length=len(text.prompt),
        sampling=params,
        policy=VerifyPolicy.OFF,
    )


def _settings(runner: ModelRunner) -> CoreSettings:
    config = VerifyConfig.model_validate({})
    limits = VerifyLimits(
        max_nodes=config.max_nodes,
        max_tree_nodes=config.max_tree_nodes,
        context_length=runner.loaded.context_length,
        vocabulary_size=runner.loaded.vocabulary_size,
        eos_token_ids=frozenset(),
        max_patience=0.0,
    )
    return CoreSettings(
        replica="",
        incarnation="",
        limits=limits,
        max_step_tokens=config.max_step_tokens,
        lease_seconds=1.0,
        lookup=False,
    )


@dataclass(frozen=True, slots=True)
class _Drafting:
    """Times of a draft engine: its forwards, and per step and per verdict what the engine adds."""

    forward: list[tuple[int, float]]
    step: float
    verdict: float


class _TimedDrafter(ModelDrafter):
    """A drafter that notes how long its expansions take."""

    def __init__(self, runner: ModelRunner, config: DraftConfig) -> None:
        super().__init__(runner, children=config.children, max_nodes=config.max_nodes)
        self.full: list[float] = []
        """Of as many nodes as one forward expands at most."""
        self.last = 0.0
        self._most = config.expansions

    def expand(self, expansions: Sequence[Expansion]) -> list[Proposal | None]:
        """See Drafter."""
        start = now()
        proposals = super().expand(expansions)
        self.last = now() - start
        if len(expansions) == self._most:
            self.full.append(self.last)
        return proposals


def _draft_steps(
    draft: Path, dtype: str, texts: Sequence[Trace], temperature: float, verify: Callable[[], object]
) -> _Drafting:
    """A target step, verdicts of two tokens to all sessions, then draft steps, as long as the texts go."""
    config = DraftConfig.model_validate({})
    runner = _runner(draft, dtype)
    drafter = _TimedDrafter(runner, config)
    core = DraftCore(drafter, config, DraftInstruments(CollectorRegistry()), lambda deliveries: None)
    streams = [_nowhere(id) for id in range(SESSIONS)]
    requests = [_request(text, temperature) for text in texts[:SESSIONS]]
    messages: list[Message] = [OpenDrafting(*pair) for pair in zip(streams, requests, strict=False)]
    while core.turn(messages) is not None:
        messages = []
    drafter.full.clear()
    learning, stepping = [], []
    for number in range(1, TOKENS):
        verify()
        base = 2 * number - 2
        verdicts: list[Message] = []
        for stream, text in zip(streams, texts, strict=False):
            tokens = text.tokens[base : base + 2]
            verdicts.append(Commit(stream, Verdict(number, len(text.prompt) + base, tokens), now()))
        learning.append(_beside(core, drafter, verdicts))
        stepping += [_beside(core, drafter, ()) for _ in range(3)]
    full, step = median(drafter.full), median(stepping)
    chunk = _step(runner, 1, CHUNKS[0], context=0)
    one = full * SHARE_OF_ONE
    return _Drafting(
        [(1, one), (config.expansions, full), (CHUNKS[0], chunk)],
        step,
        max(median(learning) - step, 0.0) / len(requests),
    )


def _beside(core: DraftCore, drafter: _TimedDrafter, messages: Sequence[Message]) -> float:
    """Seconds of a draft step without its forward."""
    drafter.last = 0.0
    start = now()
    core.turn(messages)
    return now() - start - drafter.last


def _request(text: Trace, temperature: float) -> OpenDraft:
    params = SamplingParams(temperature=temperature, seed=text.seed, ignore_eos=True)
    return OpenDraft(request_id="", token_ids=text.prompt, prompt_length=len(text.prompt), sampling=params)


def _nowhere(id: int) -> Stream[Any]:
    return Stream(id, ReadyOutbox(lambda event: None))
