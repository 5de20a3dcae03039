"""Makes all decisions about speculation on a replica: a step's nodes, its wait, whether drafts are wanted,
and whether they take turns with the target.

Only the engine sees the sessions of every orchestrator, the time of its steps, and when blocks come, so
nothing else decides. Verdicts tell the other services what to do: a node's price, whether a draft is wanted
and takes turns, and when the next step is expected. Pure: times are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from outrider.protocol.messages import VerifyPolicy
from outrider.speculation.decayed import Decayed
from verify_service.scheduler import StepPlan, plan_step
from verify_service.session import VerifySession
from verify_service.speculation.cost_model import CostModel
from verify_service.speculation.drafting import Drafting, ObservedStep, SessionRound, Traffic
from verify_service.verifier import SessionOutcome, StepResult


class DraftWork(IntEnum):
    """What drafts do while the target computes."""

    NONE = 0
    """No session has a draft."""
    IN_TURNS = 1
    """Drafts take turns with the target."""
    BESIDE = 2
    """Some draft works at the same time."""


class Controller:
    """Plans the steps of one replica and learns from them.

    It keeps a T(n) for each kind of `DraftWork`, because drafts may need the cores that help the target, its
    caches, or its GPU. Where drafts that work beside the target make its steps longer by more than they save,
    they take turns with it: a draft stops at its ready block, and goes on with the next verdict.
    """

    def __init__(self, cost: CostModel, max_step_tokens: int) -> None:
        self.max_step_tokens = max_step_tokens
        """Most tokens of a step."""
        self._costs = {DraftWork.NONE: cost, DraftWork.IN_TURNS: cost.copy(), DraftWork.BESIDE: cost.copy()}
        self._draft_work = DraftWork.NONE
        """During the next step."""
        self._slowed = Decayed()
        """Seconds that a step takes longer beside drafts than in turns with them."""
        self._drafting = Drafting(cost)
        self._period = Decayed()
        """Seconds from step to step including waiting, which is the time that drafts have."""
        self._nodes_left = False
        """See `StepPlan.nodes_left`, of the latest plan."""
        self._last_end: float | None = None
        """When the last step ended; None if there has been nothing to do since."""
        self._waiting_since: float | None = None
        """When the next step could have begun, while it waits for blocks."""

    @property
    def cost(self) -> CostModel:
        """The present T(n)."""
        return self._costs[self._draft_work]

    @property
    def drafts_at_work(self) -> bool:
        """True if drafts work during the next step: they answered lately, and do not take turns."""
        return self._draft_work is DraftWork.BESIDE

    def plan(self, sessions: Sequence[VerifySession], now: float) -> StepPlan:
        """Decide the next step; `sessions` come in the order of their seniority."""
        self._draft_work = max(map(_draft_work, sessions), default=DraftWork.NONE)
        plan = plan_step(sessions, now, self.cost, self.max_step_tokens)
        self._nodes_left = plan.nodes_left
        if plan.until is not None:
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
        elif not plan.works:
            self._last_end = self._waiting_since = None
        return plan

    def observe(self, result: StepResult) -> None:
        """Learn from a step, unless later ones of its size take less time."""
        times = result.timings
        waiting_since = times.start if self._waiting_since is None else self._waiting_since
        begun = waiting_since if self._last_end is None else self._last_end
        waited = times.start - waiting_since
        self._last_end, self._waiting_since = times.end, None
        if result.warming_up:
            return
        seconds = times.end - begun
        if not result.prompt_tokens:  # few tokens of prompts have logits, so they take less time than nodes
            self.cost.observe(result.tokens, seconds - waited, self._nodes_left)
            self._approach()
        self._period.observe(seconds)
        if any(outcome.session.policy is VerifyPolicy.SEQUENTIAL for outcome in result.outcomes):
            self._drafting.end_probe()
            return  # a sequential session drafts, and waits for its draft, even where that does not pay
        self._drafting.observe(
            ObservedStep(
                rounds=[_round_of(outcome) for outcome in result.outcomes],
                tokens=result.tokens,
                draft_nodes=sum(outcome.draft_nodes for outcome in result.outcomes),
                seconds=seconds,
                prompts=result.prompt_tokens > 0,
            )
        )

    def opened(self, session: VerifySession, others: Sequence[VerifySession]) -> None:
        """Decide whether a new session should have a draft before its first token.

        A session gets one only if it has the replica to itself: a draft that computes a prompt may take a
        core from the target.
        """
        alone = all(other.finished for other in others)
        traffic = session.traffic
        pays = traffic is None or (alone and self._drafting.max_drafts(traffic, 1) > 0)
        session.draft_wanted = session.policy is not VerifyPolicy.OFF and pays

    def decide_drafts(self, sessions: Sequence[VerifySession], now: float) -> None:
        """Decide, after a step, which sessions should have drafts; those that have one come first.

        A session behind its pace should have a draft even where that does not pay for the whole replica. No
        draft begins while the target computes prompts of other sessions: it would compute prompts too, and
        may take a core from the target. A draft that was wanted before its session's first verdict begins
        with that verdict.
        """
        going = [session for session in sessions if session.runnable]  # steps have only these
        prefills = {session.id for session in going if session.uncomputed > 1}
        room: dict[Traffic, int] = {}
        for session in sorted(going, key=_without_draft):
            traffic = session.traffic
            if traffic is not None:
                left = room.setdefault(traffic, self._drafting.max_drafts(traffic, len(going)))
                behind = session.weight(now) > 1.0 and not self._drafting.probing
                begins = not session.draft_wanted or session.step == 0
                session.draft_wanted = (left > 0 or behind) and not (begins and prefills - {session.id})
                room[traffic] = left - 1

    def decide_turns(self, sessions: Sequence[VerifySession], step_tokens: int) -> None:
        """Decide which drafts take turns with the target, after a step of `step_tokens` tokens besides those
        of prompts."""
        beside, in_turns = self._costs[DraftWork.BESIDE], self._costs[DraftWork.IN_TURNS]
        slowed = self._slowed.observe(beside.seconds(step_tokens) - in_turns.seconds(step_tokens))
        for session in sessions:
            sequential = session.policy is VerifyPolicy.SEQUENTIAL
            session.takes_turns = sequential or slowed > session.patience.saved

    def _approach(self) -> None:
        """Lower the estimates of the way of drafting that is not in use, so that it is tried again after some
        hundred steps: the machine may have changed."""
        costs = self._costs
        if self._draft_work is DraftWork.IN_TURNS:
            costs[DraftWork.BESIDE].approach(costs[DraftWork.IN_TURNS])
        elif self._draft_work is DraftWork.BESIDE:
            costs[DraftWork.IN_TURNS].approach(costs[DraftWork.NONE])

    def next_step(self, step_tokens: int) -> float:
        """Expected seconds until the step after the one that begins now; the last one had `step_tokens`
        tokens."""
        return self._period.value or self.cost.seconds(step_tokens)


def _round_of(outcome: SessionOutcome) -> SessionRound:
    session = outcome.session
    return SessionRound(
        session.traffic, len(outcome.tokens), outcome.drafted, session.draft_wanted, session.has_draft
    )


def _draft_work(session: VerifySession) -> DraftWork:
    if not (session.has_draft and session.runnable):  # without verdicts a draft soon has nothing to do
        return DraftWork.NONE
    return DraftWork.IN_TURNS if session.takes_turns else DraftWork.BESIDE


def _without_draft(session: VerifySession) -> bool:
    return not session.draft_wanted
