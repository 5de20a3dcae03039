"""Chooses the sessions, prefill chunks and nodes of the next step. Pure: the time is passed in.

A step takes every session that may run: its time depends little on the number of tokens, so the row of a
session's last committed token brings one more token at hardly any cost. A sequential session stays out until
its block has come. Nodes of all sessions are added, most likely first, up to the number with which the step
is expected to commit the most tokens per second. T(n) rises in steps, so all numbers are tried: the search
does not end where the rate first falls. This one rule gives long blocks to few sessions, short ones to many,
and none where they do not pay. A token counts several times if its session is behind the pace that its caller
asked for.

The same rate decides whether to wait. A step waits for blocks that are due soon if they bring more tokens,
minus the price of their nodes, than the target would commit until they come. So a single session waits after
a miss, and a full batch does not wait at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from outrider.speculation.candidate_tree import Node
from verify_service.session import VerifySession
from verify_service.speculation.cost_model import CostModel

PREFILL_SHARE = 0.5
"""Share of a step that is reserved for waiting prefill, at the cost of nodes."""
PREFILL_PACE = 0.9
"""Share of the best rate in tokens per second at which prompts are computed while other sessions decode:
larger chunks gain little and make the others wait longer (docs/history/performance.md)."""
MAX_PROMPT_ROWS = 64
"""Most rows of a step that are computed for log probabilities of prompts: each is as wide as the
vocabulary."""
MIN_STRETCH = 4
"""Fewest tokens over which the slope of T(n) is taken, because T(n) rises in steps."""


@dataclass(slots=True)
class Work:
    """What one session does in a step: its next `chain` uncomputed tokens, then `nodes` below them.

    `completes`: the chain ends with the last committed token, so the step commits new tokens.
    """

    session: VerifySession
    chain: int
    completes: bool
    nodes: list[Node] = field(default_factory=list)
    weight: float = 1.0
    """How many tokens of other sessions one token of this session is worth."""

    @property
    def tokens(self) -> int:
        """Tokens in the forward."""
        return self.chain + len(self.nodes)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a step computes of prompts, in addition to nodes."""

    tokens: int = 0
    sessions: int = 0


NO_PROMPTS = Prompts()


@dataclass(frozen=True, slots=True)
class StepValue:
    """The rate that a step is expected to reach, and what a node in it costs."""

    rate: float
    """Committed tokens per second."""
    marginal_price: float
    """Expected tokens that one more node would have to bring to pay for its time."""
    price: float
    """Mean cost of the step's nodes, in tokens; without nodes, the marginal price."""
    nodes_left: bool = False
    """True if nodes were left out because their time costs more than they bring."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step. Without work, `until` is when to plan again (None: no session waits)."""

    works: list[Work]
    until: float | None = None
    price: float = 0.0
    """Cost of a node of this step, in tokens."""
    nodes_left: bool = False
    """See `StepValue.nodes_left`."""


def plan_step(sessions: Sequence[VerifySession], now: float, cost: CostModel, max_tokens: int) -> StepPlan:
    """Decide the next step, of at most `max_tokens` tokens.

    `sessions` come in the order of their seniority. If there is no room for all, those that stepped longest
    ago go first.
    """
    runnable = [session for session in sessions if session.runnable]
    going = [session for session in runnable if session.may_start(now)]
    if not going:
        return StepPlan([], min((session.deadline for session in runnable), default=None))
    prefills = [session for session in going if session.uncomputed > 1]
    decodes = sorted((s for s in going if s.uncomputed == 1), key=attrgetter("last_verdict"))[:max_tokens]
    works = [Work(session, 1, True, weight=session.weight(now)) for session in decodes]
    room = max_tokens - len(works)
    if not prefills:
        value = add_nodes(works, cost, room)
        if (wait := seconds_to_wait(works, now, value)) is not None:
            return StepPlan([], now + wait)
        return StepPlan(works, price=value.price, nodes_left=value.nodes_left)
    chunk = min(chunk_length(cost) if works else room, sum(session.uncomputed for session in prefills))
    value = add_nodes(works, cost, int(room * PREFILL_SHARE), Prompts(chunk, len(prefills)))
    room -= sum(len(work.nodes) for work in works)
    return StepPlan(works + list(_chunks(prefills, min(room, chunk))), price=value.price)


def chunk_length(cost: CostModel) -> int:
    """Return how many prompt tokens a step takes while sessions decode: the fewest that are computed at
    nearly the best rate, if the decoding adds the time of a step of one token to each step.
    """
    rates = {tokens: tokens / (cost.seconds(1) + cost.seconds(tokens)) for tokens in cost.points}
    enough = PREFILL_PACE * max(rates.values())
    return next(tokens for tokens, rate in rates.items() if rate >= enough)


def seconds_to_wait(works: Sequence[Work], now: float, value: StepValue) -> float | None:
    """Return how many seconds a step of this value should wait for blocks that are due; None: start it
    now."""
    dues = [(due, work) for work in works if (due := work.session.block_due(now)) is not None]
    gains = 0.0
    for due, work in sorted(dues, key=itemgetter(0)):
        gains += work.weight * work.session.gain(value.marginal_price / work.weight)
        if gains > value.rate * due:
            return due
    return None


def add_nodes(works: Sequence[Work], cost: CostModel, room: int, prompts: Prompts = NO_PROMPTS) -> StepValue:
    """Add to the works those nodes, at most `room`, with which the most tokens per second are committed.

    Tokens are weighted by session. Prompts make the step long whether it has nodes or not. So a node costs
    the time that it adds to the prompts' time, and that time is worth the tokens that all sessions, including
    those of the prompts, would commit in it without nodes.
    """
    if not works:
        return StepValue(0.0, 0.0, 0.0)
    picks = [
        (each.probability * work.weight, work, each.node)
        for work in works
        for each in work.session.eligible()
    ]
    picks.sort(key=itemgetter(0), reverse=True)  # a stable sort: parents stay before their children
    base, alone = len(works) + prompts.tokens, cost.seconds(len(works) + prompts.sessions)
    others = alone - cost.seconds(base)
    expected = sum(work.weight for work in works) + prompts.sessions
    best_rate = expected / alone
    best = 0
    for count, (tokens, _, _) in enumerate(picks[:room], 1):
        expected += tokens
        rate = expected / (cost.seconds(base + count) + others)
        if rate > best_rate:
            best, best_rate = count, rate
    for _, work, node in picks[:best]:
        work.nodes.append(node)
    marginal = best_rate * cost.slope(base + best, max(len(works), MIN_STRETCH))
    price = best_rate * cost.slope(base, best) if best else marginal
    return StepValue(best_rate, marginal, price, nodes_left=best < min(len(picks), room))


def _chunks(prefills: Sequence[VerifySession], room: int) -> Iterator[Work]:
    """Divide the room between prompts, and the rows of those whose log probabilities are wanted: half of both
    goes to the shortest first, so that they need not wait for long ones, the rest by seniority.
    """
    chunks = dict.fromkeys((session.id for session in prefills), 0)
    rows = MAX_PROMPT_ROWS
    shortest = sorted(prefills, key=attrgetter("uncomputed"))
    for order, kept_room, kept_rows in ((shortest, room // 2, rows // 2), (prefills, 0, 0)):
        for session in order:
            chunk = min(session.uncomputed - chunks[session.id], room - kept_room)
            if session.prompt_logprobs_left:
                chunk = min(chunk, rows - kept_rows)
                rows -= chunk
            chunks[session.id] += chunk
            room -= chunk
    for session in prefills:
        if chunk := chunks[session.id]:
            yield Work(session, chunk, completes=chunk == session.uncomputed)
