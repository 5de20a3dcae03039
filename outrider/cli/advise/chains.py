"""How many tokens of a draft's chains are right on a target's texts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.lookup import Lookup

PLACES = 5
"""Number of a chain's first tokens whose acceptance is reported."""


def runs(right: Sequence[bool]) -> tuple[int, ...]:
    """For each position, how many tokens of a chain from there are right, up to the first wrong one."""
    lengths: list[int] = []
    for ok in reversed(right):
        lengths.append(lengths[-1] + 1 if ok and lengths else int(ok))
    return tuple(reversed(lengths))


def lookup_runs(prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    """For each position, how many tokens are right of the best chain that a lookup proposes there; 0 where it
    proposes nothing."""
    lookup, found = Lookup(prompt), list[int]()
    for place, token in enumerate(tokens):
        chain = [one.token for one in lookup.propose(PLACES, PLACES) if one.rank == 0]
        length = 0
        while length < min(len(chain), len(tokens) - place) and chain[length] == tokens[place + length]:
            length += 1
        found.append(length)
        lookup.append([token])
    return tuple(found)


def acceptance(texts: Sequence[Sequence[int]]) -> list[float]:
    """Share of the chains whose first 1, 2, ... tokens are all right; `texts` are runs.

    The share for n tokens leaves out chains that begin fewer than n tokens before their text's end.
    """
    shares: list[float] = []
    for place in range(1, PLACES + 1):
        starts = [run >= place for text in texts for run in text[: max(len(text) - place + 1, 0)]]
        if not starts:
            break
        shares.append(sum(starts) / len(starts))
    return shares
