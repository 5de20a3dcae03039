"""What the target commits per second while no session has a draft, by batch size. Pure.

Rounds with drafts are held against it: whatever drafting costs the target, in nodes, messages, waiting, or
cores and caches that both need, shows in how long they last.
"""

from __future__ import annotations

from outrider.messages import Verdict

MEMORY = 1024
"""Rounds after which what was seen counts a third."""
MIN_ROUNDS = 32
"""Rounds of a batch size before its rate counts as known."""
DIGITS = 4
"""Leading binary digits of a batch size that count; sizes below 16 are told apart one by one."""


class Pace:
    """Committed tokens per second of the whole target, learned from sessions without a draft."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def observe(self, verdict: Verdict) -> None:
        """Learn from a round while no session had a draft.

        If prompts were computed in it, or a broken replica says that it took no time, it teaches nothing.
        """
        if verdict.times.round_seconds and not verdict.prompt_tokens:
            self._seen.setdefault(_key(verdict.batch_size), _Seen()).add(verdict)

    def expected(self, verdict: Verdict) -> float | None:
        """Tokens that a session commits without drafts in the time of this round; None: unknown."""
        seen = self._seen.get(_key(verdict.batch_size))
        if seen is None or seen.rounds < MIN_ROUNDS:
            return None
        return seen.tokens / seen.target_seconds * _target_seconds(verdict)


class _Seen:
    """Decayed sums over the rounds of one batch size."""

    def __init__(self) -> None:
        self.rounds = 0
        self.tokens = 0.0
        self.target_seconds = 0.0

    def add(self, verdict: Verdict) -> None:
        kept = 1.0 - 1.0 / MEMORY
        self.rounds += 1
        self.tokens = kept * self.tokens + len(verdict.tokens)
        self.target_seconds = kept * self.target_seconds + _target_seconds(verdict)


def _target_seconds(verdict: Verdict) -> float:
    """The session's share of the target's time in a round."""
    return verdict.times.round_seconds / max(verdict.batch_size, 1)


def _key(batch_size: int) -> int:
    """The batch size, rounded down to its leading digits."""
    dropped = max(batch_size.bit_length() - DIGITS, 0)
    return batch_size >> dropped << dropped
