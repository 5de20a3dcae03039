"""Whether sessions should have drafts: measured against steps without. Pure: times come with the steps.

All that drafting costs the target shows in how long its steps take: nodes, messages, waiting for blocks, a
core or a cache that both need. So a step while drafts work is held against the time that the tokens it took
without the drafts' nodes would have taken while no draft works, T(n) of quiet steps. A kind of traffic
profits by the tokens that its own drafts brought, less those that the target could have committed by itself
in its share of the time lost.

    drafting   sessions have drafts, few at first, twice as many after each window of steps that paid
    probing    no session has one for a few steps, so that T(n) without drafts is up to date; a window in
               doubt is judged again afterwards
    resting    this kind has none, after a window without profit; then drafting is tried again, after
               twice as long each time

Kinds are told apart by task, by whether tokens are sampled, and by batch size, in doublings: a batch of
eight may rest where two sessions draft. Known only here, where the sessions of all orchestrators meet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import NamedTuple, TypeAlias

from verify_service.speculation.cost_model import CostModel

FIRST_DRAFTS = 4
"""Sessions of a kind that have drafts before it is known whether those pay: so a trial costs little."""
WINDOW_ROUNDS = 64
"""Rounds with a draft that a judgement rests on. A round of sampled text brings a draft's tokens with a
standard deviation near their mean: with so many, the sum is known to about an eighth."""
MIN_STEPS = 8
"""Steps of a window and of a probe, at least: step times vary by some hundredths."""
CLEAR_PROFIT = 0.25
"""Share of the tokens without drafts. A larger profit needs no probe: T(n) is never that wrong for long."""
PROBE_EVERY = 1024
"""Steps with drafts after which T(n) without is measured again. A probe of MIN_STEPS then costs 0.2 % of the
tokens at most, because a clear profit needs none."""
MIN_REST = 256
MAX_REST = 2048
"""Steps without drafts until they are tried again, at first and at most: in the long run, a trial of 16 steps
that loses a tenth costs 0.1 %."""
MAX_KINDS = 256
"""Kinds that are remembered; the one seen longest ago is forgotten."""

Traffic: TypeAlias = tuple[str, bool]
"""A session's task label, and whether its tokens are sampled."""


class SessionRound(NamedTuple):
    """What a step was for one session."""

    traffic: Traffic | None
    """None: it never has a draft."""
    tokens: int
    """Committed."""
    drafted: int
    """Of these, the ones that a draft proposed and nobody else did."""
    draft_wanted: bool
    has_draft: bool
    """Its draft answers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as far as drafting is concerned."""

    rounds: Sequence[SessionRound]
    tokens: int
    """In the forward."""
    draft_nodes: int
    """Of these, nodes that came from drafts."""
    seconds: float
    """From the end of the step before, or from when there was work; waiting for blocks is part of it."""
    prompts: bool
    """Tokens of prompts are among them."""


class _Entry(NamedTuple):
    """One step of a window, for one kind."""

    drafted: int
    without: int
    """Tokens that all sessions committed without drafts."""
    base: int
    """Tokens in the forward without draft nodes."""
    seconds: float
    drafts: int
    """Sessions of this kind that had one."""
    share: float
    """Of all sessions with drafts."""


@dataclass(slots=True)
class _Standing:
    """What drafting does for one kind."""

    rest: int = 0
    """Steps without drafts until the next trial; 0: drafts are wanted."""
    next_rest: int = MIN_REST
    max_drafts: int = FIRST_DRAFTS
    window: list[_Entry] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """The window is long enough to judge by."""
        return len(self.window) >= MIN_STEPS and sum(entry.drafts for entry in self.window) >= WINDOW_ROUNDS

    def profit(self, quiet: CostModel) -> float:
        """Tokens that drafts brought in the window, as a share of those without."""
        brought = sum(_profit(entry, quiet) for entry in self.window)
        return brought / max(sum(entry.without for entry in self.window), 1)

    def give_up(self) -> None:
        """Rest, and for longer next time."""
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, MAX_REST)
        self.max_drafts = FIRST_DRAFTS
        self.window.clear()

    def succeed(self) -> None:
        """Drafting pays: for twice as many, if so many had drafts."""
        if 2 * self.window[-1].drafts > self.max_drafts:
            self.max_drafts *= 2
        self.next_rest = MIN_REST
        self.window.clear()


class Drafting:
    """Decides for all sessions of a replica; `quiet` is T(n) while no draft works, kept current elsewhere."""

    def __init__(self, quiet: CostModel) -> None:
        self._quiet = quiet
        self._standings: OrderedDict[tuple[Traffic, int], _Standing] = OrderedDict()
        self._probe = 0
        """Quiet steps that the probe still needs."""
        self._since_quiet = 0
        """Steps with drafts since the last one without."""

    def max_drafts(self, traffic: Traffic, batch_size: int) -> int:
        """Sessions of this traffic that should have drafts at most, in a batch of about this size.

        A lone session always has one: it may lose a tenth of its speed by that, and miss a factor of three.
        """
        if batch_size == 1:
            return 1
        standing = self._standing(traffic, _power(batch_size))
        return 0 if self._probe or standing.rest else standing.max_drafts

    def observe(self, step: Step) -> None:
        """Learn from a step that committed tokens for every session in it."""
        if step.prompts or len(step.rounds) < 2 or step.seconds <= 0.0:
            return  # a step is long for prompts, whoever drafts; a lone session is not judged
        size = _power(len(step.rounds))
        if any(each.has_draft for each in step.rounds):
            self._observe_drafted(step, size)
        else:
            self._observe_quiet(step, size)

    def _observe_quiet(self, step: Step, size: int) -> None:
        self._since_quiet = 0
        self._rest(step.rounds, size)
        if self._probe:
            self._probe -= 1
            if not self._probe:
                self._judge_again()

    def _observe_drafted(self, step: Step, size: int) -> None:
        self._since_quiet += 1
        drafting = sum(each.has_draft for each in step.rounds)
        without = sum(each.tokens - each.drafted for each in step.rounds)
        for traffic in _kinds(step.rounds):
            own = [each for each in step.rounds if each.traffic == traffic]
            having = sum(each.has_draft for each in own)
            standing = self._standing(traffic, size)
            if self._probe or standing.rest or 2 * having < sum(each.draft_wanted for each in own):
                continue  # many drafts have not begun, or their last blocks are on their way
            drafted = sum(each.drafted for each in own)
            base = step.tokens - step.draft_nodes
            standing.window.append(_Entry(drafted, without, base, step.seconds, having, having / drafting))
            if standing.complete:
                self._judge(standing)
        self._rest(step.rounds, size)

    def _judge(self, standing: _Standing) -> None:
        """A window is complete."""
        profit = standing.profit(self._quiet)
        fresh = self._since_quiet <= len(standing.window)
        if profit > CLEAR_PROFIT or (profit > 0.0 and self._since_quiet < PROBE_EVERY):
            standing.succeed()
        elif profit <= 0.0 and fresh:
            standing.give_up()
        else:
            self._probe = MIN_STEPS

    def _judge_again(self) -> None:
        """T(n) without drafts is up to date: judge the complete windows."""
        for standing in self._standings.values():
            if standing.complete:
                if standing.profit(self._quiet) > 0.0:
                    standing.succeed()
                else:
                    standing.give_up()

    def _rest(self, rounds: Iterable[SessionRound], size: int) -> None:
        """The kinds of these sessions that rest have rested for one more step."""
        for traffic in _kinds(rounds):
            standing = self._standing(traffic, size)
            standing.rest = max(standing.rest - 1, 0)

    def _standing(self, traffic: Traffic, size: int) -> _Standing:
        """That of one kind. Nothing better is expected of a larger batch than of half of it."""
        key = traffic, size
        standing = self._standings.get(key)
        if standing is None:
            half = self._standings.get((traffic, size // 2))
            standing = self._standings[key] = _Standing(rest=half.rest if half is not None else 0)
            if len(self._standings) > MAX_KINDS:
                self._standings.popitem(last=False)
        self._standings.move_to_end(key)
        return standing


def _profit(entry: _Entry, quiet: CostModel) -> float:
    """Tokens of a kind's drafts, less what the target would have made in the time that they took from it."""
    alone = quiet.seconds(entry.base)
    return entry.drafted - entry.share * (entry.seconds - alone) * entry.without / alone


def _kinds(rounds: Iterable[SessionRound]) -> list[Traffic]:
    """The kinds of traffic in a step, each once."""
    return list(dict.fromkeys(each.traffic for each in rounds if each.traffic is not None))


def _power(batch_size: int) -> int:
    """The power of two nearest to a batch size."""
    return 1 << round(log2(max(batch_size, 1)))
