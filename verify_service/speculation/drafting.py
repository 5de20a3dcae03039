"""Decides whether sessions should have drafts, by comparing with steps without drafts. Pure: times come with
the steps.

Everything that drafting costs the target shows in the time of its steps: nodes, messages, waiting for blocks,
a core or a cache that both need. So a step while drafts work is compared with T(n) of quiet steps: the same
step without the drafts' nodes, while no draft works. The difference is the time lost. The profit of a kind of
traffic is the tokens that its own drafts brought, minus those that the target could have committed by itself
in the kind's share of the time lost.

    drafting   sessions have drafts: few at first, twice as many after each window of steps that paid
    probing    for a few steps no session has a draft, so that T(n) without drafts is up to date; a window
               that could not be judged is judged again afterwards
    resting    after a window without profit this kind has no drafts; then drafting is tried again, each
               time after twice as long a rest

A kind is a task, whether tokens are sampled, and a batch size, rounded to a power of two: eight sessions may
rest where two draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log2, sqrt
from statistics import stdev
from typing import NamedTuple, TypeAlias

from outrider.recent import Recent
from verify_service.speculation.cost_model import CostModel

FIRST_DRAFTS = 4
"""Most sessions of a kind that have drafts before it is known whether drafts pay, so that a trial costs
little. Simulated with 32 cold sessions at T = 0.7, it reaches 0.98 of the speed without drafts; without this
rule 0.96."""
WINDOW_ROUNDS = 64
"""Most rounds with a draft in a window. In sampled text the number of a draft's tokens per round varies by
about its mean, so the sum over a window is known to about an eighth."""
CLEAR = 2.0
"""Standard deviations (estimated from the steps) by which a profit or loss has to differ from 0 to be judged
before the window is full."""
MIN_STEPS = 8
"""Fewest steps of a window and of a probe: step times vary by some hundredths. With a value of 16, 32 cold
sessions at T = 0.7 reach 0.94 instead of 0.96 of the speed without drafts (simulated)."""
PROBE_EVERY = 2048
"""Steps with drafts after which T(n) without drafts is measured again. A probe of MIN_STEPS costs at most 0.4
% of the tokens, however much drafts bring."""
MAX_LOSS = 0.02
"""Largest share of the tokens that trials may lose; it determines the rest after a trial. A trial of 16 steps
that takes a tenth longer is repeated after 80 steps, one that takes half as long again after 400."""
MAX_REST = 2048
"""Longest rest in steps."""
MAX_KINDS = 256
"""Most kinds that are remembered; the kind seen longest ago is forgotten."""

Traffic: TypeAlias = tuple[str, bool]
"""A session's task label, and whether its tokens are sampled."""


class SessionRound(NamedTuple):
    """One session's part of a step."""

    traffic: Traffic | None
    """None: the session never has a draft."""
    tokens: int
    """Committed tokens."""
    drafted: int
    """How many of them were proposed only by a draft."""
    draft_wanted: bool
    has_draft: bool
    """True when a draft answers its verdicts."""


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """What `Drafting` learns from one step."""

    rounds: Sequence[SessionRound]
    tokens: int
    """Tokens in the forward."""
    draft_nodes: int
    """How many of them are nodes of drafts."""
    seconds: float
    """Time since the end of the step before, or since there was work; includes waiting for blocks."""
    prompts: bool
    """True when tokens of prompts are in the forward."""


class _WindowStep(NamedTuple):
    """One step of a window, for one kind."""

    drafted: int
    """Tokens that this kind's drafts brought."""
    without: int
    """Tokens of all sessions that drafts did not bring."""
    base: int
    """Tokens in the forward that are not nodes of drafts."""
    seconds: float
    drafts: int
    """Sessions of this kind that had a draft."""
    share: float
    """Their share of all sessions that had a draft."""


@dataclass(slots=True)
class _Standing:
    """Whether one kind drafts or rests, and its present window."""

    rest: int = 0
    """Steps without drafts until the next trial; 0: drafts are wanted."""
    failures: int = 0
    """Trials in a row that brought no profit."""
    max_drafts: int = FIRST_DRAFTS
    few: int = 0
    """Steps in a row in which most of the drafts that are wanted were missing. After a window of these, the
    others will not come: the draft replicas have no place for them."""
    window: list[_WindowStep] = field(default_factory=list)

    def complete(self, quiet: CostModel) -> bool:
        """True when the window can be judged: it is full, or the drafts' profit or loss is clear already.

        Clearness is checked only each time the window has doubled: more frequent checks would mistake chance
        for it.
        """
        steps = len(self.window)
        if steps < MIN_STEPS:
            return False
        if sum(entry.drafts for entry in self.window) >= WINDOW_ROUNDS:
            return True
        if steps.bit_count() > 1:
            return False
        profits = [entry.drafted - _lost(entry, quiet) for entry in self.window]
        return abs(self.profit(quiet)) > CLEAR * stdev(profits) * sqrt(steps)

    def profit(self, quiet: CostModel) -> float:
        """Return the tokens that drafts brought in the window, minus those that their time cost.

        A window shorter than without drafts is chance, so drafts that bring nothing have no profit. The step
        that lost most counts only as much as the second: drafts do not cause a single pause of the process.
        """
        *lost, _ = sorted(_lost(entry, quiet) for entry in self.window)
        return sum(entry.drafted for entry in self.window) - max(sum(lost) + lost[-1], 0.0)

    def give_up(self, quiet: CostModel) -> None:
        """Rest in proportion to the loss; each further failure in a row doubles the rest."""
        committed = sum(entry.without for entry in self.window)
        steps_lost = -self.profit(quiet) * len(self.window) / max(committed, 1)
        rest = max(round(steps_lost / MAX_LOSS), MIN_STEPS) << self.failures
        self.rest = min(rest, MAX_REST)
        self.failures += rest < MAX_REST
        self.max_drafts = FIRST_DRAFTS
        self.window.clear()

    def succeed(self) -> None:
        """Note that drafting pays: allow twice as many drafts, if more than half of the allowed ones were
        used."""
        if 2 * self.window[-1].drafts > self.max_drafts:
            self.max_drafts *= 2
        self.failures = 0
        self.window.clear()


class Drafting:
    """Decides for all sessions of a replica. `quiet` is T(n) while no draft works; the caller updates it."""

    def __init__(self, quiet: CostModel) -> None:
        self._quiet = quiet
        self._standings = Recent[tuple[Traffic, int], _Standing](MAX_KINDS)
        self._probe = 0
        """Steps without drafts that the current probe still needs."""
        self._measured = False
        """True once T(n) without drafts includes real steps, which take longer than those measured at the
        start."""
        self._since_quiet = 0
        """Steps with drafts since the last step without drafts."""

    def max_drafts(self, traffic: Traffic, batch_size: int) -> int:
        """Return the most sessions of this traffic that should have drafts, in a batch of about this size."""
        standing = self._standing(traffic, _power(batch_size))
        return 0 if self.probing or standing.rest else standing.max_drafts

    @property
    def probing(self) -> bool:
        """True while no session should have a draft, for a few steps."""
        return self._probe > 0

    def end_probe(self) -> None:
        """End a probe early: some session drafts whatever is decided here. A window that could not be judged
        begins another probe later."""
        self._probe = 0

    def observe(self, step: ObservedStep) -> None:
        """Learn from a step that committed tokens for every session in it."""
        if step.prompts or not step.rounds or step.seconds <= 0.0:
            return  # prompts make a step long whoever drafts
        size = _power(len(step.rounds))
        if any(each.has_draft for each in step.rounds):
            self._observe_drafted(step, size)
        else:
            self._observe_quiet(step, size)

    def _observe_quiet(self, step: ObservedStep, size: int) -> None:
        self._measured, self._since_quiet = True, 0
        self._rest(step.rounds, size)
        if self._probe:
            self._probe -= 1
            if not self._probe:
                self._judge_again()

    def _observe_drafted(self, step: ObservedStep, size: int) -> None:
        self._since_quiet += 1
        drafting = sum(each.has_draft for each in step.rounds)
        without = sum(each.tokens - each.drafted for each in step.rounds)
        for traffic in _kinds(step.rounds):
            own = [each for each in step.rounds if each.traffic == traffic]
            having = sum(each.has_draft for each in own)
            standing = self._standing(traffic, size)
            if self._probe or standing.rest or not having:
                continue
            few = 2 * having < sum(each.draft_wanted for each in own)
            standing.few = standing.few + 1 if few else 0
            if 0 < standing.few <= WINDOW_ROUNDS:
                continue  # many drafts have not begun yet
            drafted = sum(each.drafted for each in own)
            base = step.tokens - step.draft_nodes
            standing.window.append(
                _WindowStep(drafted, without, base, step.seconds, having, having / drafting)
            )
            if standing.complete(self._quiet):
                self._judge(standing)
        self._rest(step.rounds, size)

    def _judge(self, standing: _Standing) -> None:
        """Judge a complete window; probe first if T(n) without drafts is too old for that."""
        profit = standing.profit(self._quiet)
        fresh = self._measured and self._since_quiet <= len(standing.window)
        if profit > 0.0 and self._since_quiet < PROBE_EVERY:
            standing.succeed()
        elif profit <= 0.0 and fresh:
            standing.give_up(self._quiet)
        else:
            self._probe = MIN_STEPS

    def _judge_again(self) -> None:
        """Judge the complete windows, now that T(n) without drafts is up to date."""
        for standing in self._standings.values():
            if standing.complete(self._quiet):
                if standing.profit(self._quiet) > 0.0:
                    standing.succeed()
                else:
                    standing.give_up(self._quiet)

    def _rest(self, rounds: Iterable[SessionRound], size: int) -> None:
        """Count one more step of rest for the kinds of these sessions that rest."""
        for traffic in _kinds(rounds):
            standing = self._standing(traffic, size)
            standing.rest = max(standing.rest - 1, 0)

    def _standing(self, traffic: Traffic, size: int) -> _Standing:
        """Return the standing of one kind. A new batch size begins with the rest of half that size."""
        half = self._standings.get((traffic, size // 2))
        return self._standings.use((traffic, size), lambda: _Standing(rest=half.rest if half else 0))


def _lost(entry: _WindowStep, quiet: CostModel) -> float:
    """Return the tokens that the target would have committed in the time that a kind's drafts cost it."""
    alone = quiet.seconds(entry.base)
    return entry.share * (entry.seconds - alone) * entry.without / alone


def _kinds(rounds: Iterable[SessionRound]) -> list[Traffic]:
    """The kinds of traffic in a step, each once."""
    return list(dict.fromkeys(each.traffic for each in rounds if each.traffic is not None))


def _power(batch_size: int) -> int:
    """The power of two nearest to a batch size."""
    return 1 << round(log2(max(batch_size, 1)))
