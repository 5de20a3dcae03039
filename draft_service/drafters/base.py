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
    """Bucket of `outrider.speculation.acceptance` that learns estimates for such candidates."""
    rank: int
    """Rank among the source's candidates below one parent, from 0."""
    parent: int = -1
    """Index of an earlier candidate of the same proposal; -1: the expanded position itself."""


class Proposal(NamedTuple):
    """What a drafter proposes below one position: a small tree, parents before children."""

    candidates: Sequence[Candidate]
    winners: tuple[int, ...] = ()
    """For each sharpness of `SHARPNESS_GRID`, the child that would be first; empty where sharpness has no
    meaning."""


NOTHING = Proposal(())


@dataclass(frozen=True, slots=True)
class Expansion:
    """A request for the children of a node of one sequence; node None is the last committed token."""

    key: int
    node: Node | None
    sharpness: float = 1.0


@dataclass(frozen=True, slots=True)
class PageCounts:
    """KV memory of a drafter, in pages; `cached` pages have no owner and can be reclaimed."""

    total: int = 0
    used: int = 0
    cached: int = 0


class Drafter(Protocol):
    """Proposes candidates for open sequences, each named by a key."""

    kind: str
    expands: bool
    """False if there is nothing to compute: all candidates come from `recall`."""
    context_length: int
    """The drafter can compute positions below this."""
    max_nodes: int
    """Most nodes of a sequence's tree."""

    def open(self, key: int, request: OpenDraft) -> int:
        """Start a sequence; return how many of its tokens need no computing. Raises Overloaded."""

    def constrain(self, key: int, matcher: Matcher) -> None:
        """From now on propose only what a grammar allows, if the drafter can; `matcher` is at the last
        token."""

    def recall(self, key: int) -> Proposal:
        """Return what can be proposed below the last committed token without a forward."""

    def expand(self, expansions: Sequence[Expansion]) -> list[Proposal | None]:
        """Return the children for each expansion, best first; None if its turn has not come (prefill goes
        on).

        A parent is expanded before its children, or earlier in the same call.

        Raises:
            OutOfPages: nothing was computed; close or reset a sequence and try again.
        """

    def commit(self, key: int, tokens: Sequence[int], rerooted: Rerooted) -> None:
        """Append committed tokens; keep what was computed for the nodes that live on."""

    def fits(self, key: int) -> bool:
        """True if the memory that the sequence needs is available."""

    def reset(self, key: int) -> None:
        """Release the sequence's memory; it is computed again at its next expansion."""

    def close(self, key: int) -> None:
        """End a sequence; its memory is free when this returns."""

    def pages(self) -> PageCounts:
        """Return how much KV memory is in use."""


@runtime_checkable
class FeatureReader(Protocol):
    """A drafter that reads features of the target's layers, and proposes nothing without them."""

    def tell(self, key: int, rows: bytes, position: int | None = None) -> None:
        """Pass rows of `outrider.engine.features`, the first for the token at `position`; None: for the last
        tokens. A sequence that got no rows before goes on from these."""

    def waits(self, key: int) -> bool:
        """True until the features up to the last committed token are known."""
