"""A target whose next token is a pure function of the tokens before it, an engine around it, and openings."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from prometheus_client import CollectorRegistry

from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.runner import Segment
from outrider.protocol.messages import (
    FinishReason,
    ModelInfo,
    OpenVerify,
    SamplingParams,
    TokenBlock,
    Verdict,
)
from outrider.rpc.queues import Outbox, Stream, deliver
from outrider.telemetry.instruments import VerifyInstruments
from verify_service.core import CoreSettings, VerifyCore
from verify_service.mailbox import Close, Event, Open, Propose
from verify_service.session import VerifyLimits, VerifySession
from verify_service.speculation.cost_model import CostModel
from verify_service.speculation.patience import Patience
from verify_service.verifier import Runner

VOCABULARY = 13
STEP_SECONDS = 0.001
"""What a forward takes when nothing else is said."""
FLAT = CostModel([1, 1024], [1.0, 1.0], 1024)
"""Further tokens cost nothing."""
LINEAR = CostModel([1, 1024], [1.0, 1024.0], 1024)
"""Every token costs as much as the first."""
LIMITS = VerifyLimits(
    max_nodes=8,
    max_tree_nodes=64,
    context_length=200,
    vocabulary_size=VOCABULARY,
    eos_token_ids=frozenset(),
    max_patience=0.05,
)
REPLICA = ModelInfo(
    model="fake",
    vocabulary_hash="hash",
    vocabulary_size=LIMITS.vocabulary_size,
    context_length=LIMITS.context_length,
    replica="here",
    incarnation="life",
    max_sessions=3,
)
"""What the fake replica says of itself."""


class Clock:
    """Time that passes when told to, and by `tick` at every look."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 100.0
        self._tick = tick

    def __call__(self) -> float:
        """The time."""
        self.now += self._tick
        return self.now


def logits_after(tokens: Sequence[int]) -> torch.Tensor:
    """[V] random logits that depend on the last tokens and their position only."""
    seed = zlib.crc32(array("q", [len(tokens) % 7, *tokens[-3:]]).tobytes())
    draw = random.Random(seed)
    return torch.tensor([draw.uniform(-3.0, 3.0) for _ in range(VOCABULARY)])


class FakeRunner:
    """Computes `logits_after` every wanted entry's own path, and counts what it was asked."""

    def __init__(
        self, num_pages: int = 64, page_size: int = 4, on_forward: Callable[[int], None] | None = None
    ):
        self.pool = PagePool(num_pages, page_size)
        self.warming_up = False
        self.steps: list[list[int]] = []
        """Tokens per session of each forward."""
        self.drafts_at_work: list[bool] = []
        """What each forward was told."""
        self.on_forward = on_forward

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits of the wanted entries."""
        rows = []
        for segment in segments:
            segment.kv.reserve(len(segment.tokens))
            first = segment.kv.scratch
            segment.kv.append(segment.tokens, segment.parents)
            rows.extend(logits_after(_path(segment.kv, first + index)) for index in segment.wanted)
        self.steps.append([len(segment.tokens) for segment in segments])
        if self.on_forward is not None:
            self.on_forward(sum(self.steps[-1]))
        return torch.stack(rows) if rows else torch.empty(0, VOCABULARY)

    def commit(self, kv: SequenceKv, keep: Sequence[int], tokens: Sequence[int]) -> None:
        """Nothing but the accounts moves."""
        kv.commit(keep, tokens)

    def fork(self, kv: SequenceKv) -> SequenceKv:
        """A second sequence."""
        return kv.fork()[0]

    def drafting(self, at_work: bool) -> None:
        """Note it."""
        self.drafts_at_work.append(at_work)

    def settle(self) -> None:
        """No move is put off."""


def _path(kv: SequenceKv, offset: int) -> list[int]:
    """Tokens up to a scratch entry."""
    path: list[int] = []
    while offset >= 0:
        path.append(kv.scratch_tokens[offset])
        offset = kv.parents[offset]
    return kv.tokens + path[::-1]


def greedy_text(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake target says by itself."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


def opening(tokens: Sequence[int] = (1, 2, 3), **changes: object) -> OpenVerify:
    """A greedy opening of a prompt."""
    fields: dict[str, object] = {
        "request_id": "r",
        "model": "",
        "token_ids": tuple(tokens),
        "prompt_length": len(tokens),
        "sampling": SamplingParams(),
        "lookup": False,
    }
    return OpenVerify(**(fields | changes))


def block(
    first_id: int, nodes: Iterable[tuple[int, int, float]], ready: bool = True, base: int = 0
) -> TokenBlock:
    """A block of (parent, token, acceptance)."""
    columns = list(zip(*nodes, strict=True)) or [(), (), ()]
    return TokenBlock(first_id, *columns, ready=ready, base_length=base)


def chain_block(
    first_id: int, base: int, tokens: Sequence[int], acceptance: float = 0.9, ready: bool = True
) -> TokenBlock:
    """A chain below the committed length `base`."""
    parents = [-base, *range(first_id, first_id + len(tokens) - 1)]
    nodes = [(parent, token, acceptance) for parent, token in zip(parents, tokens, strict=False)]
    return block(first_id, nodes, ready, base)


def make_session(
    session_id: int = 1, tokens: Sequence[int] = (1, 2, 3), computed: int | None = None, **changes: object
) -> VerifySession:
    """A session that has computed all of its tokens but the last, or the first `computed`."""
    request = opening(tokens, **changes)
    patience = Patience(LIMITS.max_patience)
    session = VerifySession(session_id, request, tokens, LIMITS, Outbox(4, lambda: None), 0.0, patience)
    kv = SequenceKv.open(PagePool(64, 4), [])
    done = len(tokens) - 1 if computed is None else computed
    kv.reserve(done)
    kv.append(tokens[:done], None)
    kv.commit(range(done), tokens[:done])
    session.kv = kv
    return session


def step(session: VerifySession, tokens: Sequence[int]) -> None:
    """Commit tokens and compute all but the last, as a step does."""
    session.commit(tokens)
    computed = session.tree.committed[session.kv.length : -1]
    session.kv.reserve(len(computed))
    session.kv.append(computed, None)
    session.kv.commit(range(len(computed)), computed)


class Bench:
    """An engine core without a thread, whose events land in lists."""

    def __init__(
        self,
        runner: Runner | None = None,
        *,
        limits: VerifyLimits = LIMITS,
        cost: CostModel | None = None,
        max_step_tokens: int = 64,
        max_unread: int = 1000,
        lookup: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.runner = runner or FakeRunner()
        if isinstance(self.runner, FakeRunner) and self.runner.on_forward is None:
            self.runner.on_forward = self._pass_a_step
        self.registry = CollectorRegistry()
        self.limits = limits
        self.max_unread = max_unread
        settings = CoreSettings("here", "life", limits, max_step_tokens, 60.0, lookup)
        self.core = VerifyCore(
            self.runner,
            cost or CostModel([1, 1024], [STEP_SECONDS, STEP_SECONDS], 1024),
            settings,
            VerifyInstruments(self.registry),
            deliver,
            self.clock,
            self.clock,
        )
        self.streams: dict[int, Stream] = {}

    def _pass_a_step(self, tokens: int) -> None:
        self.clock.now += STEP_SECONDS

    def open(self, request: OpenVerify) -> Stream:
        """Open a session; the turn takes its first step too."""
        stream = Stream(len(self.streams) + 1, Outbox(self.max_unread, lambda: None))
        self.streams[stream.id] = stream
        self.core.turn([Open(stream, request)])
        return stream

    def propose(self, stream: Stream, proposed: TokenBlock) -> float | None:
        """Offer a block; the turn steps if it may."""
        stream.sent += 1
        return self.core.turn([Propose(stream, proposed, self.clock())])

    def close(self, stream: Stream, keep: bool = False) -> Event:
        """Close a session; returns the last event."""
        self.core.turn([Close(stream, keep)])
        return events(stream)[-1]

    def run(self, most_turns: int = 10_000) -> None:
        """Turn until there is nothing to do; waits pass at once."""
        for _ in range(most_turns):
            wait = self.core.turn([])
            if wait is None or (not any(not s.finished for s in self.core.sessions.values()) and wait > 0):
                return
            self.clock.now += wait
        raise AssertionError("the engine does not come to rest")


def events(stream: Stream) -> list[Event]:
    """Take all that is in a stream's outbox."""
    queue = stream.outbox._events
    taken = []
    while not queue.empty():
        taken.append(queue.get_nowait())
        stream.outbox._taken += 1
    return taken


def verdicts(stream: Stream) -> list[Verdict]:
    """Take all, return the verdicts."""
    return [event for event in events(stream) if isinstance(event, Verdict)]


def text(received: Iterable[Verdict]) -> list[int]:
    """The committed tokens of verdicts in order; checks that steps and lengths have no gap."""
    tokens: list[int] = []
    received = list(received)
    for before, after in pairwise(received):
        assert after.step == before.step + 1
        assert after.base_length == before.base_length + len(before.tokens)
        assert before.finish_reason is FinishReason.NONE
    for verdict in received:
        tokens.extend(verdict.tokens)
    return tokens
