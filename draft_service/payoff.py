"""Whether drafting pays at all. Pure.

A round of speculation brings the accepted tokens, less the price of the verified nodes. It costs the time
that the verify side spends on receiving blocks, in which the whole replica would have committed tokens. In
large batches nodes are dear, a session's gain is small and blocks are many: then drafting rests, but for a
few rounds of each session that tell when it pays again.
"""

from __future__ import annotations

from outrider.messages import Verdict

BLOCK_SECONDS = 5e-4
"""Time of the replica that a block costs: 0.1 to 0.3 ms in Python's grpc.aio at the verify side, and as much
again on its way there, where helpers of long steps are kept from their work."""
WEIGHT = 1 / 32
"""Share of the newest round in the mean."""
PROBE_ROUNDS = 8
PROBE_EVERY = 64
"""While drafting rests, a session drafts in so many rounds of so many."""
PROBE_EVERY_PER_SESSION = 16
"""In a large batch of so many rounds for each session: one session or none drafts at a time."""


class Payoff:
    """What speculation brought per round, over all sessions that drafted."""

    def __init__(self) -> None:
        self._mean = 1.0  # optimistic: a few dozen rounds without profit refute it

    @property
    def pays(self) -> bool:
        """True while speculation brings more than it costs."""
        return self._mean > 0.0

    def observe(self, verdict: Verdict, blocks: int, rate: float) -> None:
        """A session that sent `blocks` since its last verdict makes `rate` tokens per second.

        A round without blocks and nodes, as while the draft still computes the prompt, says nothing.
        """
        if not (blocks or verdict.verified):
            return
        drafted = 1.0 - verdict.lookup_verified / verdict.verified if verdict.verified else 1.0
        gain = drafted * (verdict.accepted - verdict.node_price * verdict.verified)
        cost = blocks * BLOCK_SECONDS * rate * verdict.batch_size
        self._mean += WEIGHT * (gain - cost - self._mean)


def probing(session: int, step: int, batch_size: int) -> bool:
    """True in the rounds in which a session drafts although it does not pay; sessions take turns."""
    every = max(PROBE_EVERY, PROBE_EVERY_PER_SESSION * batch_size)
    return (step + PROBE_ROUNDS * session) % every < PROBE_ROUNDS
