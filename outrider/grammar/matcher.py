"""The position of one text in its grammar, after the committed tokens and after every candidate path.

The committed state only moves forward, by committed tokens. Copies of it follow candidate paths, and are
thrown away at the next commit, so that rejected candidates leave no trace. Masks depend only on the committed
tokens and the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TypeAlias

from llguidance import LLMatcher

Mask: TypeAlias = bytes
"""One bit per token, from the lowest bit of the first byte on; tokens beyond the end are not allowed."""


class Matcher:
    """The matcher of one session; made by `GrammarCompiler`, then used by one thread.

    End-of-sequence tokens are allowed where the text may end. Where it must end, the mask has only these, or
    the text is `complete` already.
    """

    def __init__(self, state: LLMatcher) -> None:
        self.problem = ""
        """Why nothing can follow the committed tokens although the text is not complete; empty otherwise."""
        self._root = state
        self._scout: _Scout | None = None
        self._masks: dict[tuple[int, ...], Mask | None] = {}
        """Mask of each path that was asked for since the last commit; None for an impossible path."""

    @property
    def complete(self) -> bool:
        """True if the committed text is whole, and no token can follow it."""
        return not self.problem and self._root.is_stopped()

    def advance(self, token: int) -> bool:
        """Commit a token; returns `complete`. A token that does not fit sets `problem`."""
        self._masks.clear()
        self._scout = None
        if not self.problem and not self._root.consume_token(token):
            self.problem = on_one_line(self._root.get_error()) or "the token does not follow"
        return self.complete

    def settle(self) -> str:
        """Compute the mask after the committed tokens; returns `problem`, which this may reveal."""
        if not self.complete and not self.problem and self.mask(()) is None:
            self.problem = "no token can follow"
        return self.problem

    def allows(self, path: tuple[int, ...]) -> bool:
        """True when each token of a path is allowed by the mask before it, and something may follow it."""
        return self.mask(path) is not None

    def forced(self, path: tuple[int, ...], max_tokens: int) -> list[int]:
        """At most `max_tokens` tokens after a path, each the only one allowed there and no end token."""
        tokens: list[int] = []
        while len(tokens) < max_tokens and (token := only_token(self.mask(path))) is not None:
            path = (*path, token)
            if not self.allows(path):
                break
            tokens.append(token)
        return tokens

    def mask(self, path: tuple[int, ...]) -> Mask | None:
        """The tokens that may follow a path below the last committed token; None if `allows` is false."""
        if path not in self._masks:
            self._masks[path] = self._compute(path) if self._may_reach(path) else None
        return self._masks[path]

    def _may_reach(self, path: tuple[int, ...]) -> bool:
        if not path:
            return not self.problem
        above = self.mask(path[:-1])
        return above is not None and allowed(above, path[-1])

    def _compute(self, path: tuple[int, ...]) -> Mask | None:
        """The mask after a path; None if the text is complete there, or the grammar becomes too costly."""
        if self._scout is None:
            self._scout = _Scout(self._root)
        mask = self._scout.mask_after(path)
        if mask is not None and self._scout.doubtful(mask):
            self._scout = _Scout(self._root)
            mask = self._scout.mask_after(path)
        if self._scout.failed:
            self._scout = None
            return None
        if mask is not None:
            self._scout.given.add(mask)
        return mask


class _Scout:
    """A copy of the committed state that moves forwards and back along candidate paths.

    Copying takes a microsecond per committed token, and moving back is quicker. But the library (from 1.5.1
    to 1.9.1 at least) caches its last mask without the path to it, and after moving back may return it in
    place of the right one. So after moving back, a mask that was returned before is doubtful, and a new scout
    checks it.
    """

    def __init__(self, root: LLMatcher) -> None:
        self.given: set[Mask] = set()
        self._state = root.deep_copy()
        self._at: tuple[int, ...] = ()
        self._went_back = False

    @property
    def failed(self) -> bool:
        """True if the grammar has become too costly; the scout cannot be used any more."""
        return self._state.is_error()

    def mask_after(self, path: tuple[int, ...]) -> Mask | None:
        """The mask after a path; None if the text is complete there, or the scout has failed."""
        pairs = zip(path, self._at, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if shared < len(self._at):
            self._state.rollback(len(self._at) - shared)
            self._went_back = True
        self._state.consume_tokens(list(path[shared:]))
        self._at = path
        return None if self._state.is_stopped() else self._state.compute_bitmask()

    def doubtful(self, mask: Mask) -> bool:
        """True if a mask may be the library's cached one."""
        return self._went_back and mask in self.given


def on_one_line(text: str) -> str:
    """A message of the library without line breaks, and without the state that it may append."""
    return " ".join(text.split("<non-verbose/>")[0].split())


def allowed(mask: Mask, token: int) -> bool:
    """Whether a mask allows a token."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def only_token(mask: Mask | None) -> int | None:
    """The only token that a mask allows; None if there are several, or no mask."""
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
