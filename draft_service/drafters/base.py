"""The interface of drafters: they propose children below positions of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from outrider.grammar.matcher import Matcher
from outrider.protocol.messages import OpenDraft
from outrider.speculation.candidate_tree import Node, Rerooted


class CandidateSource(IntEnum):
    """Who proposed a candidate; each source is calibrated on its own."""

    MODEL = 0
    LOOKUP = 1
    GRAMMAR = 2


class Candidate(NamedTuple):
    """One proposed child, before it is known whether it is worth a node."""

    token: int
    source: CandidateSource
    bucket: int
    """Bucket of `outrider.speculation.acceptance` in which estimates for such candidates are learned."""
    rank: int
    """Place among the source's candidates below one parent, from 0."""
    parent: int = -1
    """Index of an earlier candidate of the same proposal; -1: the expanded position itself."""


class Proposal(NamedTuple):
    """What a drafter proposes below one position: a small tree, parents before children."""

    candidates: Sequence[Candidate]
    winners: tuple[int, ...] = ()
    """Per sharpness of `SHARPNESS_GRID`, the child that would be first; empty where that means nothing."""


NOTHING = Proposal(())


@dataclass(frozen=True, slots=True)
class Expansion:
    """Asks for the children of one node of one sequence; node None is the last committed token."""

    key: int
    node: Node | None
    sharpness: float = 1.0


@dataclass(frozen=True, slots=True)
class PageCounts:
    """KV memory of a drafter, in pages; `cached` ones are unowned and can be reclaimed."""

    total: int = 0
    used: int = 0
    cached: int = 0


class Drafter(Protocol):
    """Proposes candidates for the sequences that are open, each named by a key."""

    kind: str
    expands: bool
    """False when there is nothing to compute: all candidates come from `recall`."""
    context_length: int
    """Positions that can be computed are below this."""
    max_nodes: int
    """Most nodes of a sequence's tree."""

    def open(self, key: int, request: OpenDraft) -> int:
        """Start a sequence; returns how many of its tokens need no computing. Raises Overloaded."""

    def constrain(self, key: int, matcher: Matcher) -> None:
        """Propose only what a grammar allows, as far as the drafter can; `matcher` is at the last token."""

    def recall(self, key: int) -> Proposal:
        """What can be proposed below the last committed token without a forward."""

    def expand(self, expansions: Sequence[Expansion]) -> list[Proposal | None]:
        """Children of each expansion, best first; None when its turn has not come (prefill goes on).

        A parent is expanded before its children, or earlier in the same call.

        Raises:
            OutOfPages: nothing was computed; close or reset a sequence and try again.
        """

    def commit(self, key: int, tokens: Sequence[int], rerooted: Rerooted) -> None:
        """Append committed tokens; what was computed for the nodes that live on is kept."""

    def fits(self, key: int) -> bool:
        """True when the memory that the sequence needs is at hand."""

    def reset(self, key: int) -> None:
        """Give the sequence's memory back; it is computed anew when it is expanded again."""

    def close(self, key: int) -> None:
        """End a sequence; its memory is free when this returns."""

    def pages(self) -> PageCounts:
        """How much KV memory is in use."""


@runtime_checkable
class FeatureReader(Protocol):
    """A drafter that reads what the target's layers make of a text, and proposes nothing without."""

    def tell(self, key: int, rows: bytes, position: int | None = None) -> None:
        """Rows of `outrider.engine.features`, the first for the token at `position`; None: for the last
        tokens. A sequence that was told none before them goes on from there."""

    def waits(self, key: int) -> bool:
        """True until what goes before the last committed token is known."""
