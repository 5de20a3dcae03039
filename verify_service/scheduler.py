"""Which sessions, which prefill chunks and which nodes go into the next step. Pure: the time is passed in.

A step starts when a session has reason to start (see `patience`), with two looks at the others:

    hold    when the blocks of waiting sessions are due so soon that they bring more tokens than the whole
            replica makes until then, the step waits for them: otherwise sessions in step with each other
            would fall apart into groups that run one after the other
    join    when it starts, it takes along every runnable session whose policy allows it: while the target
            is busy nobody can start anyway, and the last committed token's row brings one more token at
            next to no cost. Sequential sessions stay out until their block has come.

Nodes are added over all sessions, most likely first, up to the number at which the expected committed
tokens per second of the step are highest. T(n) is a step function of n, so the best number is looked
for over all prefixes and not only up to the first fall. That one rule gives long blocks to few sessions,
short ones to many, and none where they do not pay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge

from outrider.candidate_tree import Node
from outrider.messages import VerifyPolicy
from verify_service.cost_model import CostModel
from verify_service.session import Session

PREFILL_SHARE = 0.5
"""Share of a step that nodes leave to waiting prefill."""


@dataclass(slots=True)
class Work:
    """What one session does in a step: its next `chain` uncomputed tokens, then `nodes` below them.

    `completes`: the chain ends with the last committed token, so the step commits new ones.
    """

    session: Session
    chain: int
    completes: bool
    nodes: list[Node] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens in the forward."""
        return self.chain + len(self.nodes)


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step; without work, `until` is when to look again (None: nobody waits)."""

    works: list[Work]
    until: float | None = None


def plan_step(sessions: Sequence[Session], now: float, cost: CostModel, max_tokens: int) -> Plan:
    """Decide the next step, of at most `max_tokens` tokens.

    `sessions` come in the order of their seniority; the one that stepped longest ago goes first where
    there is not room for all.
    """
    runnable = [session for session in sessions if session.runnable]
    if not any(session.may_start(now) for session in runnable):
        return Plan([], min((session.deadline for session in runnable), default=None))
    wait = hold(runnable, now)
    if wait is not None:
        return Plan([], now + wait)
    going = [s for s in runnable if s.may_start(now) or s.policy is not VerifyPolicy.SEQUENTIAL]
    prefills = [session for session in going if session.uncomputed > 1]
    decodes = sorted((s for s in going if s.uncomputed == 1), key=_last_verdict)[:max_tokens]
    works = [Work(session, 1, True) for session in decodes]
    room = max_tokens - len(works)
    add_nodes(works, cost, int(room * PREFILL_SHARE) if prefills else room)
    room -= sum(len(work.nodes) for work in works)
    return Plan(works + list(_chunks(prefills, room)))


def hold(runnable: Sequence[Session], now: float) -> float | None:
    """Seconds to wait for blocks that are due before the step; None: start. Prompts are not held up."""
    if any(session.uncomputed > 1 for session in runnable):
        return None
    dues = ((session.block_due(now), session.gain) for session in runnable)
    rate = sum(session.patience.rate for session in runnable)
    gains = 0.0
    for due, gain in sorted((due, gain) for due, gain in dues if due is not None):
        gains += gain
        if gains > rate * due:
            return due
    return None


def add_nodes(works: Sequence[Work], cost: CostModel, room: int) -> None:
    """Give the works the nodes, at most `room`, with which the step commits most tokens per second.

    T counts the works and their nodes; prompts fill what is left of the step afterwards.
    """
    streams = [_reaches(work) for work in works]
    picks: list[tuple[float, Work, Node]] = []
    base, expected = len(works), float(len(works))
    best, best_rate = 0, expected / cost.seconds(base) if works else 0.0
    for pick in merge(*streams, key=_minus_reach):
        if len(picks) == room:
            break
        picks.append(pick)
        expected += pick[0]
        rate = expected / cost.seconds(base + len(picks))
        if rate > best_rate:
            best, best_rate = len(picks), rate
    for _, work, node in picks[:best]:
        work.nodes.append(node)


def _chunks(prefills: Sequence[Session], room: int) -> Iterator[Work]:
    """Whole prompts while there is room, then the beginning of one."""
    for session in prefills:
        if room == 0:
            return
        chunk = min(session.uncomputed, room)
        room -= chunk
        yield Work(session, chunk, completes=chunk == session.uncomputed)


def _reaches(work: Work) -> Iterator[tuple[float, Work, Node]]:
    return ((node.reach, work, node) for node in work.session.eligible_nodes())


def _minus_reach(pick: tuple[float, Work, Node]) -> float:
    return -pick[0]


def _last_verdict(session: Session) -> float:
    return session.last_verdict
