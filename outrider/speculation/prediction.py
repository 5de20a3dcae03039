"""Proposes the next tokens of a predicted text, for a text that resembles it, such as a file that is edited.

The text's place in the prediction is kept as a few guesses, the best first. A token that some of them foresaw
confirms these, and the others are dropped. A token that none foresaw is an edit; the text may then continue

    after the longest match     of the text's end, the nearest ahead first: something was deleted or moved
    as many tokens further      something was replaced
    where it was                something was inserted
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from outrider.speculation.lookup import Keep, Proposed, merged

_LONGEST = 16
"""Length up to which a match is measured."""
_MAX_MATCHES = 16
"""Most occurrences of a token that are compared after an edit, in each direction."""


class Prediction:
    """A text's place in a predicted one. Adding a token takes constant time."""

    def __init__(self, predicted: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """`tokens` are those of the text so far."""
        self._predicted = list(predicted)
        self._ends: dict[int, list[int]] = {}
        """The places after each token's occurrences in the prediction, ascending."""
        for end, token in enumerate(self._predicted, 1):
            self._ends.setdefault(token, []).append(end)
        self._recent: deque[int] = deque(maxlen=_LONGEST)
        self._guesses = [0]
        """Possible places of the next token in the prediction, best first."""
        self._home = 0
        """The place in the prediction after the last token that was foreseen."""
        self._edited = 0
        """Number of tokens since then."""
        self.append(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the text."""
        for token in tokens:
            self._recent.append(token)
            right = [guess + 1 for guess in self._guesses if self._predicted[guess : guess + 1] == [token]]
            if right:
                self._home, self._edited = right[0], 0
                self._guesses = right
            else:
                self._edited += 1
                self._guesses = self._guesses_after_edit(token)

    def propose(self, max_nodes: int, *, keep: Keep | None = None) -> list[Proposed]:
        """Continue the text from each guess; those that begin alike share their tokens.

        Tokens after one that `keep` refuses are not proposed.
        """
        depth = max_nodes // len(self._guesses)
        chains = ((self._common(guess), self._predicted[guess : guess + depth]) for guess in self._guesses)
        return merged(chains, max_nodes, keep)

    def _guesses_after_edit(self, token: int) -> list[int]:
        ends = self._ends.get(token, ())
        ahead = bisect_right(ends, self._home)
        near = [*ends[ahead : ahead + _MAX_MATCHES], *reversed(ends[max(ahead - _MAX_MATCHES, 0) : ahead])]
        found = [max(near, key=self._common)] if near else []  # the first of equals
        return list(dict.fromkeys([*found, self._home + self._edited, self._home]))

    def _common(self, end: int) -> int:
        """The number of tokens at the end of the text that are also before `end` in the prediction."""
        before = reversed(self._predicted[max(end - _LONGEST, 0) : end])
        length = 0
        for ours, theirs in zip(reversed(self._recent), before, strict=False):
            if ours != theirs:
                break
            length += 1
        return length
