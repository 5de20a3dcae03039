"""Whether sessions should have drafts at all. Pure: times come with the verdicts.

A round of speculation brings the accepted tokens, less the price of the verified nodes. It costs the time
that the replicas spend on receiving blocks and verdicts, in which the target would have committed tokens.
In large batches nodes are dear, a session's gain is small and messages are many: then drafts are given up,
and the target goes on alone.

    pays        every session has a draft; the mean of what rounds brought is kept
    rests       none has; after many rounds one session gets a draft for a few, and those decide

Each probe doubles the time to the next. A batch that has shrunk by half is probed at once.
"""

from __future__ import annotations

from collections import OrderedDict

from outrider.messages import Verdict

BLOCK_SECONDS = 2.5e-4
"""Time of the replica that a block costs: 0.1 ms in Python's grpc.aio at the verify side, and more on its way
there, where helpers of long steps are kept from their work. Compared at 0.1, 0.25 and 0.5 ms in
docs/performance.md."""
WEIGHT = 1 / 32
"""Share of the newest round in the mean."""
OPTIMISM = 1.0
"""Mean that new traffic is credited with: a few dozen rounds without profit refute it."""
PROBE_ROUNDS = 16
"""Rounds with blocks of one session that decide whether drafting pays again."""
PROBE_EVERY = 1024
MOST_PROBE_EVERY = 8192
"""Rounds of all sessions without drafts between two probes, at first and at most."""
QUIET_SECONDS = 1.0
"""After so long without verdicts nothing is known of the batch that a new session comes to."""
MAX_KINDS = 64
"""Kinds of traffic that are told apart; the one seen longest ago is forgotten."""


class Payoff:
    """What drafting brought for one kind of traffic, over all its sessions."""

    def __init__(self) -> None:
        self._mean = OPTIMISM
        self._batch_size = 1
        self._seen = -QUIET_SECONDS
        """Time of the last verdict."""
        self._resting_at = 0
        """Largest batch since drafting ceased to pay; 0: it pays."""
        self._paid = 0
        """Rounds since drafting began to pay."""
        self._alone = 0
        """Rounds without a draft since the last probe."""
        self._every = PROBE_EVERY
        self._probe: list[float] = []
        """What the rounds of the probe brought."""

    @property
    def pays(self) -> bool:
        """True when sessions should have drafts; one that has the target for itself always should."""
        return not self._resting_at or self._batch_size <= 1

    def admits(self, now: float) -> bool:
        """True when a new session should have a draft; the first after a quiet time may be the only one."""
        if not self._resting_at:
            return True
        quiet = now - self._seen >= QUIET_SECONDS
        self._seen = now
        return quiet

    def take_probe(self) -> bool:
        """True when it is time for a probe, which the caller then has to make."""
        if self._alone < self._every:
            return False
        self._alone = 0
        self._probe.clear()
        return True

    def alone(self, verdict: Verdict, now: float) -> None:
        """A session without a draft had a round."""
        self._see(verdict.batch_size, now)
        self._alone += 1

    def drafted(self, verdict: Verdict, blocks: int, now: float, probes: bool = False) -> None:
        """A session whose draft sent `blocks`, at least one, since its last verdict had a round."""
        self._see(verdict.batch_size, now)
        profit = _profit(verdict, blocks)
        if self._resting_at:
            if probes or self._batch_size == 1:
                self._add_to_probe(profit)
            return
        self._paid += 1
        self._mean += WEIGHT * (profit - self._mean)
        if self._mean <= 0.0 and self._batch_size > 1:
            self._rest()

    def _see(self, batch_size: int, now: float) -> None:
        self._batch_size, self._seen = batch_size, now
        if not self._resting_at:
            return
        self._resting_at = max(self._resting_at, batch_size)
        if self._resting_at >= 2 * batch_size:
            self._resting_at, self._alone = batch_size, self._every

    def _add_to_probe(self, profit: float) -> None:
        self._probe.append(profit)
        if len(self._probe) < PROBE_ROUNDS:
            return
        mean = sum(self._probe) / len(self._probe)
        self._probe.clear()
        self._every = min(2 * self._every, MOST_PROBE_EVERY)
        if mean > 0.0:
            self._mean, self._resting_at, self._paid = mean, 0, 0

    def _rest(self) -> None:
        self._resting_at = self._batch_size
        self._alone = 0
        self._probe.clear()
        if self._paid > MOST_PROBE_EVERY:
            self._every = PROBE_EVERY


class Payoffs:
    """One payoff per kind of traffic: task, and whether tokens are sampled."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, bool], Payoff] = OrderedDict()

    def of(self, task: str, sampled: bool) -> Payoff:
        """That of one kind, which its sessions share."""
        found = self._kinds.setdefault((task, sampled), Payoff())
        self._kinds.move_to_end((task, sampled))
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return found


def _profit(verdict: Verdict, blocks: int) -> float:
    """Tokens that a round with a draft brought beyond one without."""
    drafted = 1.0 - verdict.lookup_verified / verdict.verified if verdict.verified else 1.0
    gain = drafted * (verdict.accepted - verdict.node_price * verdict.verified)
    times = verdict.times
    seconds = (times.queue_us + times.forward_us + times.sample_us) * 1e-6
    rate = verdict.batch_size * len(verdict.tokens) / seconds if seconds else 0.0
    return gain - blocks * BLOCK_SECONDS * rate
