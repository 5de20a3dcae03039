"""Whether sessions should have drafts at all. Pure: times come with the verdicts.

A round of speculation brings the tokens that it commits, less those that the session would have committed
in its time if no session had a draft (`pace.py`). What that is has to be seen from time to time. Until then,
and while little doubt is left, the profit is estimated: a draft's accepted tokens, less the price of the
verified nodes, less what the target would have committed while it received blocks. In large batches nodes
are dear, a session's gain is small and messages are many: then drafts are given up, and the target goes on
alone.

    pays     sessions have drafts; the mean of what rounds brought is kept
    rests    none has: now and then for a few steps, to see what is committed without, and for many
             rounds when the mean has fallen to nothing; then drafting is tried again

Each trial in vain doubles the time to the next. All this is known for every batch size, in doublings, so
that a batch of eight may rest where two sessions draft. While drafting pays, few sessions have drafts at
first and twice as many whenever the rounds of those have paid, so that a burst of requests does not draft
for all before it is known what that is worth in so large a batch.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import log2

from orchestrator.pace import Pace
from outrider.messages import Verdict

BLOCK_SECONDS_CPU = 2.5e-4
"""Time of the target that a block costs where its core also receives: 0.1 ms in Python's grpc.aio, and more
on its way there, where helpers of long steps are kept from their work. Compared at 0.1, 0.25 and 0.5 ms in
docs/performance.md."""
BLOCK_SECONDS_DEVICE = 2e-5
"""The same where the target runs on a device of its own: it goes on while a block is received, and waits
only for what the engine does with it between two steps. Simulated, see docs/capacity.md."""
FIRST_DRAFTS = 4
"""Sessions that have drafts before it is known whether those pay."""
WEIGHT = 1 / 128
"""Share of the newest round in the mean. Sampled texts' rounds differ by half a token: it is known to some
hundredths."""
OPTIMISM = 0.1
"""Mean that a trial begins with: some dozens of rounds without profit refute it, and a profit of a tenth of
a token seldom looks like none."""
CLOSE = 0.25
"""A mean below this is not left to estimates."""
LOOK_AFTER = 128
LOOK_EVERY = 8192
"""Rounds with drafts after which it is looked what rounds without bring, at first and at most: each time
four times as many."""
LOOK_STEPS = 16
"""Steps without drafts that it takes."""
ENOUGH_ROUNDS = 16
"""Rounds that decide on drafts for twice as many sessions."""
REST = 1024
MAX_REST = 8192
"""Rounds of all sessions without drafts before the next trial, at first and at most."""
QUIET_SECONDS = 1.0
"""After so long without verdicts nothing is known of the batch that a new session comes to."""
MAX_KINDS = 64
"""Kinds of traffic that are told apart; the one seen longest ago is forgotten."""


@dataclass(slots=True)
class _Standing:
    """What drafting brought in batches of about one size."""

    mean: float = OPTIMISM
    paid: int = 0
    """Rounds of this trial."""
    unseen: int = 0
    """Rounds with drafts since those without were last looked at."""
    next_look: int = LOOK_AFTER
    recent: list[float] = field(default_factory=list)
    """What the last rounds brought that decide on more drafts."""
    most_drafts: int = FIRST_DRAFTS
    rest: int = 0
    """Rounds without drafts until the next trial; 0: drafting pays."""
    next_rest: int = REST

    def add(self, profit: float) -> None:
        """A round with a draft."""
        self.paid += 1
        self.unseen += 1
        self.mean += WEIGHT * (profit - self.mean)

    def pays_for_more(self, profit: float) -> bool:
        """True when this is the last of the rounds that decide, and they brought something."""
        self.recent.append(profit)
        if len(self.recent) < ENOUGH_ROUNDS:
            return False
        total = sum(self.recent)
        self.recent.clear()
        return total > 0.0

    def should_look(self, measured: bool) -> bool:
        """True when it has not been seen for long what rounds without drafts bring, and may matter."""
        return self.unseen >= self.next_look and (measured or self.mean < CLOSE)

    def give_up(self) -> None:
        """Rest for long; for longer next time, unless drafting has paid for long. Then a trial begins."""
        if self.paid > MAX_REST:
            self.next_rest = REST
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, MAX_REST)
        self.most_drafts = FIRST_DRAFTS
        self.mean, self.paid, self.unseen = OPTIMISM, 0, 0
        self.recent.clear()

    def look(self, rounds: int) -> None:
        """Rest for a few rounds, then go on."""
        self.rest, self.next_look = rounds, min(4 * self.next_look, LOOK_EVERY)
        self.mean, self.unseen = OPTIMISM, 0


class Payoff:
    """What drafting brought for one kind of traffic, over all its sessions; `device`: the target's."""

    def __init__(self, device: str = "cpu") -> None:
        self._block_seconds = BLOCK_SECONDS_CPU if device in ("", "cpu") else BLOCK_SECONDS_DEVICE
        self._pace = Pace()
        self._size = 1
        """The power of two that batches are around: 1 for lone sessions, which always have drafts."""
        self._standings = {1: _Standing()}
        self._seen = -QUIET_SECONDS
        """Time of the last verdict."""
        self._drafts = 0
        """Sessions with a draft."""

    @property
    def _now(self) -> _Standing:
        return self._standings[self._size]

    @property
    def pays(self) -> bool:
        """True when sessions should have drafts; one that has the target for itself always should."""
        return not self._now.rest

    @property
    def has_room(self) -> bool:
        """True when one more session may have a draft."""
        return self._drafts < self._now.most_drafts

    def admits(self, now: float) -> bool:
        """True when a new session should have a draft; the first after a quiet time may be the only one."""
        if self.pays:
            return self.has_room
        quiet = now - self._seen >= QUIET_SECONDS
        self._seen = now
        return quiet

    def join(self) -> None:
        """A session gets a draft."""
        self._drafts += 1

    def leave(self) -> None:
        """It has none any more."""
        self._drafts -= 1

    def alone(self, verdict: Verdict, now: float) -> None:
        """A session without a draft had a round."""
        self._see(verdict.batch_size, now)
        if not self._drafts:
            self._pace.observe(verdict)
        if not self.pays:
            self._now.rest -= 1

    def drafted(self, verdict: Verdict, blocks: int, now: float) -> None:
        """A session whose draft sent `blocks` since its last verdict, and some before, had a round."""
        self._see(verdict.batch_size, now)
        if verdict.prompt_tokens or not self.pays:  # a round is long for prompts, or the last before a rest
            return
        standing, without = self._now, self._pace.expected(verdict)
        profit = self._estimate(verdict, blocks) if without is None else len(verdict.tokens) - without
        standing.add(profit)
        shared = self._size > 1
        if shared and standing.mean <= 0.0:
            standing.give_up()
        elif shared and standing.should_look(without is not None):
            standing.look(LOOK_STEPS * verdict.batch_size)
        elif standing.pays_for_more(profit) and 2 * self._drafts > standing.most_drafts:
            standing.most_drafts *= 2

    def _see(self, batch_size: int, now: float) -> None:
        """Batches are of about another size when they have doubled or are half as large.

        Of a larger one nothing better is expected, of a smaller one something may.
        """
        self._seen = now
        if self._size < 2 * batch_size and batch_size < 2 * self._size:
            return
        before, self._size = self._size, 1 << round(log2(max(batch_size, 1)))
        if self._size not in self._standings:
            grown = self._size > before
            self._standings[self._size] = _Standing(rest=self._standings[before].rest if grown else 0)

    def _estimate(self, verdict: Verdict, blocks: int) -> float:
        """Tokens that a round with a draft brought beyond one without."""
        drafted = 1.0 - verdict.lookup_verified / verdict.verified if verdict.verified else 1.0
        gain = drafted * (verdict.accepted - verdict.node_price * verdict.verified)
        seconds = verdict.times.round_seconds
        rate = verdict.batch_size * len(verdict.tokens) / seconds if seconds else 0.0
        return gain - max(blocks, 1) * self._block_seconds * rate


class Payoffs:
    """One payoff per kind of traffic: task, whether tokens are sampled, and the device of the target."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, bool, str], Payoff] = OrderedDict()

    def of(self, task: str, sampled: bool, device: str) -> Payoff:
        """That of one kind, which its sessions share."""
        kind = task, sampled, device
        found = self._kinds.setdefault(kind, Payoff(device))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return found
