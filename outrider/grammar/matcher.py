"""Where one text is in its grammar: at the last committed token, and at every candidate path below it.

The committed state only ever goes forward, by committed tokens. Candidate paths are gone along by a copy,
which is thrown away at the next commit: what is rejected leaves nothing behind. Masks are functions of the
committed tokens and the path alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TypeAlias

from llguidance import LLMatcher

Mask: TypeAlias = bytes
"""One bit per token, the lowest bit of the first byte for token 0; tokens beyond the end are not allowed."""


class Matcher:
    """One session's; made by `GrammarCompiler`, then of one thread.

    The end-of-sequence tokens are allowed where the text may end. A text that must end has no mask but
    theirs, or is `complete` already.
    """

    def __init__(self, state: LLMatcher) -> None:
        self.problem = ""
        """Why nothing can follow the committed tokens though the text is not complete; else empty."""
        self._root = state
        self._scout: LLMatcher | None = None
        """A copy that goes along candidate paths; at `_scouted`."""
        self._scouted: tuple[int, ...] = ()
        self._masks: dict[tuple[int, ...], Mask | None] = {}
        """Of each path that was asked for since the last commit; None where the path is not possible."""

    @property
    def complete(self) -> bool:
        """The committed text is whole, and no token can follow it."""
        return not self.problem and self._root.is_stopped()

    def advance(self, token: int) -> bool:
        """Commit a token; returns `complete`. One that does not fit is a `problem`."""
        self._masks.clear()
        self._scout = None
        if not self.problem and not self._root.consume_token(token):
            self.problem = self._root.get_error() or "the token does not follow"
        return self.complete

    def settle(self) -> str:
        """Make the mask after the committed tokens ready; returns `problem`, which may come to light."""
        if not self.complete and not self.problem and self.mask(()) is None:
            self.problem = "no token can follow"
        return self.problem

    def allows(self, path: tuple[int, ...]) -> bool:
        """True when each token of a path is allowed by the mask before it, and something may follow it."""
        return self.mask(path) is not None

    def forced(self, path: tuple[int, ...], most: int) -> list[int]:
        """Tokens after a path, at most so many, that are each the only one allowed and no end."""
        tokens: list[int] = []
        while len(tokens) < most and (token := only_token(self.mask(path))) is not None:
            path = (*path, token)
            if not self.allows(path):
                break
            tokens.append(token)
        return tokens

    def mask(self, path: tuple[int, ...]) -> Mask | None:
        """The tokens that may follow a path below the last committed token; None where `allows` is false."""
        if path not in self._masks:
            self._masks[path] = self._look(path) if self._may_reach(path) else None
        return self._masks[path]

    def _may_reach(self, path: tuple[int, ...]) -> bool:
        if not path:
            return not self.problem
        above = self.mask(path[:-1])
        return above is not None and allowed(above, path[-1])

    def _look(self, path: tuple[int, ...]) -> Mask | None:
        """The mask after a path; None where the text is complete, or the grammar has become too costly."""
        scout = self._go(path)
        mask = None if scout.is_stopped() else scout.compute_bitmask()
        if scout.is_error():
            self._scout = None
            return None
        return mask

    def _go(self, path: tuple[int, ...]) -> LLMatcher:
        """The scout at a path, by way of what that has in common with where it is."""
        if self._scout is None:
            self._scout, self._scouted = self._root.deep_copy(), ()
        shared = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, self._scouted, strict=False))
        )
        self._scout.rollback(len(self._scouted) - shared)
        self._scout.consume_tokens(list(path[shared:]))
        self._scouted = path
        return self._scout


def allowed(mask: Mask, token: int) -> bool:
    """Whether a mask has a token."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def only_token(mask: Mask | None) -> int | None:
    """The one token of a mask; None where there are more, or no mask."""
    if mask is None:
        return None
    bits = int.from_bytes(mask, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


def replay(matcher: Matcher, tokens: Sequence[int]) -> int:
    """Commit the tokens of an earlier session; returns how many of them follow the grammar."""
    for index, token in enumerate(tokens):
        if matcher.complete:
            return index
        matcher.advance(token)
        if matcher.problem:
            return index
    return len(tokens)
