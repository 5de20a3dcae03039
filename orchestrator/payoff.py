"""Whether sessions should have drafts at all. Pure: times come with the verdicts.

A round of speculation brings the accepted tokens, less the price of the verified nodes. It costs the time
that the replicas spend on receiving blocks and verdicts, in which the target would have committed tokens.
In large batches nodes are dear, a session's gain is small and messages are many: then drafts are given up,
and the target goes on alone.

    pays        sessions have drafts; the mean of what rounds brought is kept
    rests       none has; after many rounds one session gets a draft for a few, and those decide

Each probe doubles the time to the next. A batch that has shrunk by half is probed at once. While drafting
pays, few sessions have drafts at first and twice as many whenever the rounds of those have paid, so that a
burst of requests does not draft for all before it is known what that is worth in so large a batch.
"""

from __future__ import annotations

from collections import OrderedDict

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
WEIGHT = 1 / 32
"""Share of the newest round in the mean."""
OPTIMISM = 1.0
"""Mean that new traffic is credited with: a few dozen rounds without profit refute it."""
PROBE_ROUNDS = 16
"""Rounds that decide whether drafting pays again, or for twice as many sessions."""
PROBE_EVERY = 1024
MOST_PROBE_EVERY = 8192
"""Rounds of all sessions without drafts between two probes, at first and at most."""
QUIET_SECONDS = 1.0
"""After so long without verdicts nothing is known of the batch that a new session comes to."""
MAX_KINDS = 64
"""Kinds of traffic that are told apart; the one seen longest ago is forgotten."""


class Payoff:
    """What drafting brought for one kind of traffic, over all its sessions; `device`: the target's."""

    def __init__(self, device: str = "cpu") -> None:
        self._block_seconds = BLOCK_SECONDS_CPU if device in ("", "cpu") else BLOCK_SECONDS_DEVICE
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
        """What the last rounds brought that decide on more drafts: of the probe, or of all sessions."""
        self._drafts = 0
        """Sessions with a draft."""
        self._most_drafts = FIRST_DRAFTS

    @property
    def pays(self) -> bool:
        """True when sessions should have drafts; one that has the target for itself always should."""
        return not self._resting_at or self._batch_size <= 1

    @property
    def has_room(self) -> bool:
        """True when one more session may have a draft."""
        return self._drafts < self._most_drafts

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
        """A session whose draft sent `blocks` since its last verdict, and some before, had a round."""
        self._see(verdict.batch_size, now)
        profit = _profit(verdict, blocks, self._block_seconds)
        if self._resting_at:
            if probes or self._batch_size == 1:
                self._add_to_probe(profit)
            return
        self._paid += 1
        self._mean += WEIGHT * (profit - self._mean)
        if self._mean <= 0.0 and self._batch_size > 1:
            self._rest()
        elif (self._brought(profit) or 0.0) > 0.0 and 2 * self._drafts > self._most_drafts:
            self._most_drafts *= 2

    def _see(self, batch_size: int, now: float) -> None:
        self._batch_size, self._seen = batch_size, now
        if not self._resting_at:
            return
        self._resting_at = max(self._resting_at, batch_size)
        if self._resting_at >= 2 * batch_size:
            self._resting_at, self._alone = batch_size, self._every

    def _add_to_probe(self, profit: float) -> None:
        mean = self._brought(profit)
        if mean is None:
            return
        self._every = min(2 * self._every, MOST_PROBE_EVERY)
        if mean > 0.0:
            self._mean, self._resting_at, self._paid = mean, 0, 0

    def _brought(self, profit: float) -> float | None:
        """Mean of PROBE_ROUNDS rounds, when this is the last of them."""
        self._probe.append(profit)
        if len(self._probe) < PROBE_ROUNDS:
            return None
        mean = sum(self._probe) / len(self._probe)
        self._probe.clear()
        return mean

    def _rest(self) -> None:
        self._resting_at = self._batch_size
        self._most_drafts = FIRST_DRAFTS
        self._alone = 0
        self._probe.clear()
        if self._paid > MOST_PROBE_EVERY:
            self._every = PROBE_EVERY


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


def _profit(verdict: Verdict, blocks: int, block_seconds: float) -> float:
    """Tokens that a round with a draft brought beyond one without."""
    drafted = 1.0 - verdict.lookup_verified / verdict.verified if verdict.verified else 1.0
    gain = drafted * (verdict.accepted - verdict.node_price * verdict.verified)
    times = verdict.times
    seconds = (times.queue_us + times.forward_us + times.sample_us) * 1e-6
    rate = verdict.batch_size * len(verdict.tokens) / seconds if seconds else 0.0
    return gain - max(blocks, 1) * block_seconds * rate
