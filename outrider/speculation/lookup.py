"""Proposes what followed the earlier occurrences of a sequence's end (prompt lookup).

No model is needed: the draft service uses it as a drafter, and the verify service takes candidates from it
when no block has come. (Saxena 2023, "Prompt Lookup Decoding"; longest match first, as in suffix matching.)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple

_ORDERS = (4, 3, 2)
"""Lengths of the n-grams that are indexed."""
_MAX_MATCHES = 8
"""Most earlier occurrences that are continued."""
_LONGEST = 32
"""Length up to which a match is measured; a match of this length needs no alternatives."""


class Proposed(NamedTuple):
    """One proposed token."""

    parent: int
    """Index of an earlier proposed token; -1: the end of the sequence."""
    token: int
    match_length: int
    """Number of tokens before this one, proposed ones included, that also precede its earlier occurrence."""
    rank: int
    """0 for a token of the best match, 1 for the next match, and so on."""


PIECE = 4096
"""Number of tokens that a gradual lookup indexes at a time, which takes a few milliseconds."""
Keep = Callable[[int, int, int], bool]
"""Decides whether to propose a token, from its parent, its match length and its rank."""


def merged(chains: Iterable[tuple[int, Sequence[int]]], max_nodes: int, keep: Keep | None) -> list[Proposed]:
    """Merge chains of tokens, each with the length of its match, best first; equal beginnings share nodes.

    A token that `keep` refuses, and all that follow it, are left out.
    """
    proposed: list[Proposed] = []
    places: dict[tuple[int, int], int] = {}
    for rank, (length, tokens) in enumerate(chains):
        parent = -1
        for match_length, token in enumerate(tokens, length):
            place = places.get((parent, token))
            if place is None:
                if len(proposed) >= max_nodes:
                    return proposed
                if keep is not None and not keep(parent, match_length, rank):
                    break
                place = places[parent, token] = len(proposed)
                proposed.append(Proposed(parent, token, match_length, rank))
            parent = place
    return proposed


class Lookup:
    """Index of the last occurrences of the 2-, 3- and 4-grams of one sequence.

    Adding a token takes constant time (amortised). Beyond `max_tokens` tokens, the older half is forgotten.
    """

    def __init__(self, tokens: Sequence[int] = (), max_tokens: int = 32768) -> None:
        self._max_tokens = max_tokens
        self._clear()
        self.append(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the sequence."""
        if len(self._tokens) + len(tokens) > self._max_tokens:
            tokens = [*self._tokens, *tokens][-self._max_tokens // 2 :]
            self._clear()
        self._tokens.extend(tokens)
        for order in _ORDERS:
            self._index(order, first_end=len(self._tokens) - len(tokens) + 1)

    def propose(self, max_nodes: int, max_depth: int = 16, keep: Keep | None = None) -> list[Proposed]:
        """Continue the sequence: the longest match first, then the others.

        Continuations that start alike share their nodes; a match that overlaps the end repeats itself. Tokens
        after one that `keep` refuses are not proposed.
        """
        chains = ((length, self._following(end, max_depth)) for length, end in self._matches())
        return merged(chains, max_nodes, keep)

    def _clear(self) -> None:
        self._tokens: list[int] = []
        # Per order: the end of the latest occurrence of each n-gram, and the end before each end (0: none).
        self._latest: dict[int, dict[tuple[int, ...], int]] = {order: {} for order in _ORDERS}
        self._before: dict[int, array[int]] = {order: array("i", [0]) for order in _ORDERS}

    def _index(self, order: int, first_end: int) -> None:
        latest, before, tokens = self._latest[order], self._before[order], self._tokens
        for end in range(first_end, len(tokens) + 1):
            gram = tuple(tokens[end - order : end]) if end >= order else ()
            before.append(latest.get(gram, 0))
            if gram:
                latest[gram] = end

    def _matches(self) -> list[tuple[int, int]]:
        """(match length, end of the earlier occurrence), longest first, later ones first among equals."""
        context, here = self._tokens[-_LONGEST:], len(self._tokens)
        found: dict[int, int] = {}
        for order in _ORDERS:
            if len(context) >= order:
                for end in self._occurrences(order, tuple(context[-order:])):
                    if end != here and end not in found:
                        found[end] = self._common(context, end)
                        if found[end] == _LONGEST:
                            return [(_LONGEST, end)]
                    if len(found) == _MAX_MATCHES:
                        break
        return sorted(((length, end) for end, length in found.items()), reverse=True)

    def _occurrences(self, order: int, gram: tuple[int, ...]) -> Iterator[int]:
        """Ends of an n-gram, latest first."""
        before = self._before[order]
        end = self._latest[order].get(gram, 0)
        while end:
            yield end
            end = before[end]

    def _common(self, context: list[int], end: int) -> int:
        """The number of tokens before the end of the context that are also before `end`."""
        tokens = self._tokens
        limit = min(len(context), end)
        length = 0
        while length < limit and context[-1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def _following(self, end: int, count: int) -> list[int]:
        """The `count` tokens after an earlier occurrence; they repeat themselves from the sequence's end."""
        return list(islice(cycle(self._tokens[end : end + count]), count))


class GradualLookup:
    """A lookup that indexes its tokens in pieces, because a long prompt must not hold up other sequences.

    While tokens wait, it proposes nothing.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._lookup = Lookup()
        self._waiting = list(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the sequence."""
        self._waiting.extend(tokens)

    def index(self) -> bool:
        """Index one piece of the waiting tokens; returns True when none wait any more."""
        self._lookup.append(self._waiting[:PIECE])
        del self._waiting[:PIECE]
        return not self._waiting

    def propose(self, max_nodes: int, max_depth: int = 16, *, keep: Keep | None = None) -> list[Proposed]:
        """Index one piece, then continue the sequence; see `Lookup.propose`."""
        return self._lookup.propose(max_nodes, max_depth, keep=keep) if self.index() else []
