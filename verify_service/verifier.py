"""One step of the target: a packed forward, choose, walk, commit.

A session's part of the forward, as scratch offsets after its computed tokens:

    [0, chain)           uncomputed committed tokens; the last one's logits choose the next token
    [chain, chain + n)   candidate nodes, the most likely path first, so that what is kept often lies
                         where it belongs already

Shapes: W wanted rows over all sessions, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.runner import Segment
from outrider.protocol.messages import (
    FinishReason,
    PromptFeatures,
    PromptLogprobs,
    StepNodes,
    TokenLogprob,
)
from outrider.sampling.chooser import NO_TOKEN, SamplingRow, choose, logprobs, prepare
from outrider.speculation.candidate_tree import Node
from verify_service.features import StepFeatures, featured, layers_of
from verify_service.scheduler import Work
from verify_service.session import VerifySession
from verify_service.speculation.origins import from_draft, step_nodes


class Runner(Protocol):
    """What the service needs from `outrider.engine.runner.ModelRunner`."""

    pool: PagePool

    @property
    def warming_up(self) -> bool:
        """See `ModelRunner.warming_up`."""

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Return logits [W, V] of the wanted tokens; all tokens become scratch entries."""

    def commit(self, kv: SequenceKv, keep: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep a path of scratch entries and forget the others."""

    def fork(self, kv: SequenceKv) -> SequenceKv:
        """Return a second sequence with the same tokens."""

    def drafting(self, at_work: bool) -> None:
        """See `ModelRunner.drafting`; called before each step."""

    def settle(self) -> None:
        """See `ModelRunner.settle`."""


class FeatureRunner(Runner, Protocol):
    """A runner for sessions that ask for features."""

    def forward_with_features(
        self, segments: Sequence[Segment], layers: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """`forward`, and the inputs [F, C] of each of these layers at the segments' `featured` tokens."""


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """What a step did for one session."""

    session: VerifySession
    base_length: int
    tokens: list[int]
    nodes: list[Node]
    """Verified nodes."""
    depth: int
    """Depth of the deepest verified node."""
    accepted: int
    drafted: int
    """Accepted nodes that only a draft proposed."""
    hit: bool
    finish: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    recorded: StepNodes | None = None
    """The verified nodes for the caller, if it asked for them."""
    predicted: int = 0
    """Verified nodes that the caller's prediction proposed."""
    predicted_accepted: int = 0
    """How many of them were accepted."""
    features: bytes = b""
    """The features from which the last tokens were chosen, if the session asked for them."""

    @property
    def draft_nodes(self) -> int:
        """Number of verified nodes that came from a draft."""
        return sum(from_draft(node) for node in self.nodes)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What is reported about a part of one session's prompt."""

    session: VerifySession
    found: PromptLogprobs | PromptFeatures


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Times in seconds of the engine's clock, and by the wall clock where other processes read them."""

    start: float
    start_ns: int
    forwarded: float
    end: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """A finished step; sessions in the middle of their prompt have no outcome."""

    outcomes: list[SessionOutcome]
    timings: StepTimings
    sessions: int
    tokens: int
    prompt_tokens: int
    prompts: list[PromptPart] = field(default_factory=list)
    without_numbers: list[VerifySession] = field(default_factory=list)
    """Sessions that got no token, because the model gives no token a logit above -inf."""
    warming_up: bool = False
    """True if later steps of this size take less time; see `Runner`."""


class Verifier:
    """Runs steps on the engine thread."""

    def __init__(
        self,
        runner: Runner,
        eos_token_ids: Collection[int],
        clock: Callable[[], float] = time.perf_counter,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        prepare()

    def run(self, works: Sequence[Work]) -> StepResult:
        """Compute the works, whose pages are reserved, and commit what the target chose."""
        start, start_ns = self._clock(), self._wall_clock_ns()
        for work in works:
            work.nodes = most_likely_path_first(work.nodes)
        rows = [row for work in works for row in _rows(work)]
        logits, features = self._forward(works)
        logits, prompts = read_prompts(works, logits)
        if features is not None:
            parts = [(work.session, features.prompt(work)) for work in works]
            prompts += [PromptPart(session, part) for session, part in parts if part is not None]
        forwarded = self._clock()
        chosen = choose(logits, rows, self._eos_token_ids) if rows else []
        outcomes, without = self._commit_all(works, chosen, logits, features)
        timings = StepTimings(start, start_ns, forwarded, self._clock())
        prompt_tokens = sum(work.chain - work.completes for work in works)
        tokens = sum(work.tokens for work in works)
        warming_up = self._runner.warming_up
        return StepResult(outcomes, timings, len(works), tokens, prompt_tokens, prompts, without, warming_up)

    def _forward(self, works: Sequence[Work]) -> tuple[torch.Tensor, StepFeatures | None]:
        """Return logits [W, V] of all wanted rows, and the features of the step if any session wants them."""
        segments, layers = [_segment(work) for work in works], layers_of(works)
        if not layers:
            return self._runner.forward(segments), None
        logits, taken = cast(FeatureRunner, self._runner).forward_with_features(segments, layers)
        return logits, StepFeatures(works, taken)

    def _commit_all(
        self,
        works: Sequence[Work],
        chosen: Sequence[int],
        logits: torch.Tensor,
        features: StepFeatures | None,
    ) -> tuple[list[SessionOutcome], list[VerifySession]]:
        """Commit every work; `chosen` [W] and `logits` [W, V] are the rows that choose, work after work. Also
        return the sessions whose path has a row without a token though they had no candidates: nothing is
        committed for them.
        """
        outcomes: list[SessionOutcome] = []
        without_numbers: list[VerifySession] = []
        first = 0
        for work in works:
            if not work.completes:
                self._keep_chain(work)
                continue
            part = slice(first, first + 1 + len(work.nodes))
            path = walk(work.session.tree.children, work.nodes, chosen[part])
            if NO_TOKEN not in (chosen[first + row] for row in path):
                outcomes.append(self._commit(work, path, chosen[part], logits[part], features))
            elif work.nodes:
                self._leave_out_candidates(work.session)
            else:
                without_numbers.append(work.session)
            first = part.stop
        return outcomes, without_numbers

    def _commit(
        self,
        work: Work,
        path: Sequence[int],
        chosen: Sequence[int],
        logits: torch.Tensor,
        features: StepFeatures | None,
    ) -> SessionOutcome:
        """Commit the tokens along a session's `path` of rows; `chosen` [1 + n] and `logits` [1 + n, V] belong
        to its rows.
        """
        session = work.session
        assert session.kv is not None
        base_length = session.tree.committed_length
        depth = max((node.depth for node in work.nodes), default=0)
        recorded = step_nodes(work.nodes) if session.opening.record_steps else None
        committed = session.commit([chosen[row] for row in path])
        accepted = path[1 : len(committed.tokens) + 1]
        keep = [*range(work.chain), *(work.chain + row - 1 for row in accepted)]
        computed = session.tree.committed[session.kv.length :]
        self._runner.commit(session.kv, keep, computed[: len(keep)])
        nodes, candidates = work.nodes, session.candidates
        return SessionOutcome(
            session=session,
            base_length=base_length,
            tokens=committed.tokens,
            nodes=nodes,
            depth=depth,
            accepted=len(accepted),
            drafted=sum(candidates.needs_draft_for(nodes[row - 1]) for row in accepted),
            hit=committed.hit,
            finish=committed.finish,
            logprobs=_logprobs(session, logits, path, committed.tokens),
            recorded=recorded,
            predicted=sum(map(candidates.predicted, nodes)),
            predicted_accepted=sum(candidates.predicted(nodes[row - 1]) for row in accepted),
            features=b"" if features is None else features.verdict(work, path[: len(committed.tokens)]),
        )

    def _leave_out_candidates(self, session: VerifySession) -> None:
        """Forget the step: attention multiplies hidden values by 0, and NaN or infinity times 0 is NaN, so a
        candidate that overflows spoils the rows beside it."""
        assert session.kv is not None
        session.kv.rollback()
        session.without_candidates = True

    def _keep_chain(self, work: Work) -> None:
        kv = work.session.kv
        assert kv is not None
        tokens = work.session.tree.committed[kv.length : kv.length + work.chain]
        self._runner.commit(kv, range(work.chain), tokens)


def read_prompts(works: Sequence[Work], logits: torch.Tensor) -> tuple[torch.Tensor, list[PromptPart]]:
    """Divide the logits [W, V] of all wanted rows: return the rows that choose tokens, and what the other
    rows say about prompts.

    No row does both, because they belong to different tokens.
    """
    parts: list[PromptPart] = []
    chooses: list[int] = []
    first = 0
    for work in works:
        rows = work.session.prompt_rows(work.chain)
        if rows:
            parts.append(_prompt_part(work.session, rows, logits[first : first + len(rows)]))
            first += len(rows)
        count = 1 + len(work.nodes) if work.completes else 0
        chooses.extend(range(first, first + count))
        first += count
    return (logits[chooses], parts) if parts else (logits, parts)


def _prompt_part(session: VerifySession, rows: range, logits: torch.Tensor) -> PromptPart:
    """Return what `logits` [len(rows), V] say about the tokens that follow those of the rows."""
    kv, count = session.kv, session.opening.sampling.prompt_logprobs
    assert kv is not None
    assert count is not None
    position = kv.length + rows.start + 1
    tokens = session.tree.committed[position : position + len(rows)]
    session.note_prompt_logprobs(rows)
    return PromptPart(session, PromptLogprobs(position, tuple(logprobs(logits, tokens, count))))


def most_likely_path_first(nodes: Sequence[Node]) -> list[Node]:
    """Return the same nodes depth first; `nodes` come in the order of falling reach, parents before
    children."""
    below: dict[int | None, list[Node]] = {}
    for node in nodes:
        below.setdefault(node.parent.id if node.parent is not None else None, []).append(node)
    ordered: list[Node] = []
    stack = below.get(None, [])[::-1]
    while stack:
        ordered.append(stack.pop())
        stack.extend(reversed(below.get(ordered[-1].id, ())))
    return ordered


def walk(children: dict[int, Node], nodes: Sequence[Node], chosen: Sequence[int]) -> list[int]:
    """Return the rows on the accepted path: 0 for the last committed token, 1 + i for `nodes[i]`.

    The path follows the target's choices, `chosen` [1 + n] by row, down to the first token without a verified
    node.
    """
    row_of = {node.id: row for row, node in enumerate(nodes, 1)}
    path = [0]
    while (node := children.get(chosen[path[-1]])) is not None and node.id in row_of:
        path.append(row_of[node.id])
        children = node.children
    return path


def _segment(work: Work) -> Segment:
    kv, committed = work.session.kv, work.session.tree.committed
    assert kv is not None
    assert kv.scratch == 0, "a step begins without scratch"
    tokens = committed[kv.length : kv.length + work.chain]
    tokens.extend(node.token for node in work.nodes)
    chooses = range(work.chain - 1, len(tokens)) if work.completes else range(0)
    prompt = work.session.prompt_rows(work.chain)
    wanted = [*prompt, *chooses] if prompt else chooses
    return Segment(kv, tokens, _parents(work), wanted, featured(work), certain=work.chain)


def _parents(work: Work) -> list[int] | None:
    """Return the scratch offset of every token's parent; None if all tokens are one chain."""
    offset_of = {node.id: offset for offset, node in enumerate(work.nodes, work.chain)}
    root = work.chain - 1
    parents = [offset_of[node.parent.id] if node.parent is not None else root for node in work.nodes]
    if parents == list(range(root, root + len(parents))):
        return None
    return [*range(-1, root), *parents]


def _rows(work: Work) -> list[SamplingRow]:
    """Return the rows of the last committed token and of every node; none in the middle of a prompt."""
    row = work.session.row
    return [row(None), *map(row, work.nodes)] if work.completes else []


def _logprobs(
    session: VerifySession, logits: torch.Tensor, path: Sequence[int], tokens: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    """Return log probabilities of the committed tokens if they were asked for; `logits` is [1 + n, V]."""
    count = session.opening.sampling.logprobs
    if count is None:
        return ()
    return tuple(logprobs(logits[list(path[: len(tokens)])], tokens, count))
