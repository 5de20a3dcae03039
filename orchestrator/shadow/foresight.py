"""Counts how many of the target's tokens a draft had proposed in its blocks. Pure.

A committed token counts as foreseen when, by the time its verdict came, the draft had proposed it as its
first choice below the token before. These tokens would have been accepted from a single chain of the draft,
whatever the target verified. Drafts in use and shadows are scored alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from outrider.protocol.messages import TokenBlock
from outrider.speculation.candidate_tree import CandidateTree, Node

MAX_NODES = 1024


class Score(NamedTuple):
    """Counts of committed tokens."""

    tokens: int
    proposed: int
    """Tokens for whose position the draft had proposed something."""
    foreseen: int
    """Tokens that the draft had proposed."""


class Foresight:
    """The proposals of one draft in one session."""

    def __init__(self, committed: Sequence[int]) -> None:
        self._tree = CandidateTree(list(committed), MAX_NODES)

    def block(self, block: TokenBlock) -> None:
        """The draft sent nodes."""
        self._tree.add(block)

    def verdict(self, tokens: Sequence[int]) -> Score:
        """These tokens are committed; return how many of them were foreseen."""
        proposed = foreseen = 0
        below: dict[int, Node] = self._tree.children
        for token in tokens:
            first = max(below.values(), key=attrgetter("acceptance"), default=None)
            proposed += first is not None
            foreseen += first is not None and first.token == token
            below = below[token].children if token in below else {}
        self._tree.commit(list(tokens))
        return Score(len(tokens), proposed, foreseen)
