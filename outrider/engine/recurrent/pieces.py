"""The order in which a step's tokens go through a recurrent layer.

Tokens that are certain to stay, such as those of a prompt, go through at once. Candidates go level by level,
for all sequences together: a level is all candidates whose parents have their states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.step import Segment
from outrider.protocol.errors import InternalError

States: TypeAlias = dict[int, Any]
"""The state of each recurrent layer after a token, by the layer's index."""
Made: TypeAlias = Mapping[nn.Module, Tensor]
"""The results [N, out] of the linear layers that read a module's input, for all tokens of a step."""
STATES_EVERY = 256
"""Tokens of a prompt between the states that are kept for other sequences with the same beginning."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence that follow each other."""

    row: int
    """Packed position of the first token."""
    before: States | None
    """The states after the token before them; None at the beginning of a text."""
    after: States = field(default_factory=dict)
    """The states after the last of them, filled in by each layer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that a layer computes at once."""

    pieces: Sequence[Piece]
    count: int
    """Tokens of each piece."""
    rows: Tensor
    """[pieces * count] int64, their packed positions."""

    @property
    def begins(self) -> bool:
        """True when these are the first tokens of their texts."""
        return self.pieces[0].before is None

    def tokens(self) -> list[Batch]:
        """Return a batch of the first tokens of all pieces, then one of the second tokens, and so on."""
        columns = self.rows.view(-1, self.count).unbind(1)
        return [Batch(self.pieces, 1, rows) for rows in columns]


@dataclass(frozen=True, slots=True)
class Family:
    """Candidates that follow one state, each followed by its descendants."""

    before: States
    pieces: list[Piece]
    places: list[int]
    """The place of each candidate on its path; 0 for those that directly follow the state."""


def families_of(batches: Sequence[Batch]) -> tuple[list[Family], list[Batch]]:
    """Return the families of the step's single tokens that have a state before them, and the batches of all
    others."""
    single = [batch.count == 1 and not batch.begins for batch in batches]
    pieces = [piece for batch in compress(batches, single) for piece in batch.pieces]
    behind: dict[int, list[Piece]] = {id(piece.after): [] for piece in pieces}
    roots: dict[int, tuple[States, list[Piece]]] = {}
    for piece in pieces:
        assert piece.before is not None, "it begins no text"
        key = id(piece.before)
        (behind[key] if key in behind else roots.setdefault(key, (piece.before, []))[1]).append(piece)
    families = [_family(before, firsts, behind) for before, firsts in roots.values()]
    return families, [batch for batch, alone in zip(batches, single, strict=True) if not alone]


def _family(before: States, firsts: Sequence[Piece], behind: Mapping[int, Sequence[Piece]]) -> Family:
    family, left = Family(before, [], []), [(piece, 0) for piece in firsts]
    while left:
        piece, place = left.pop()
        family.pieces.append(piece)
        family.places.append(place)
        left += [(child, place + 1) for child in behind[id(piece.after)]]
    return family


def batches_of(segments: Sequence[Segment], first_rows: Sequence[int], device: torch.device) -> list[Batch]:
    """Return a step's tokens in the order in which a layer can compute them; `first_rows` are those of the
    segments.

    The scratch entries that end a piece get its states.

    Raises:
        InternalError: an entry follows one in the middle of a piece, whose states were not kept.
    """
    levels: dict[tuple[int, int, bool], list[Piece]] = defaultdict(list)
    for segment, row in zip(segments, first_rows, strict=True):
        kv, level_of = segment.kv, dict[int, int]()
        start = kv.scratch - len(segment.tokens)
        for first, count in _cut(segment, start):
            parent, last = kv.parents[first], first + count - 1
            piece = Piece(row + first - start, _states_at(kv, parent))
            level_of[last] = level_of.get(parent, -1) + 1
            levels[level_of[last], count, piece.before is None].append(piece)
            kv.states[last] = piece.after
    return [_batch(levels[key], key[1], device) for key in sorted(levels)]


def _cut(segment: Segment, start: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces of a segment whose scratch entries begin at `start`: the first entry and their number.

    Tokens that are certain to stay are cut at their last full page and every STATES_EVERY tokens, where
    another sequence may go on. No piece of them has only one token: modules may compute a prompt and a single
    token differently.
    """
    certain, position = segment.certain, int(segment.kv.positions(start)[0])
    if certain:
        end = position + certain
        often = range(-(-position // STATES_EVERY) * STATES_EVERY, end, STATES_EVERY)
        size = segment.kv.pool.page_size
        full = end - 2 if end % size == 1 else end
        page = full - full % size
        inside = {cut for cut in (page, *often) if position + 1 < cut < end - 1}
        for here, there in pairwise([position, *sorted(inside), end]):
            yield start + here - position, there - here
    for entry in range(start + certain, segment.kv.scratch):
        yield entry, 1


def _states_at(kv: SequenceKv, entry: int) -> States | None:
    """Return the states after a scratch entry, or after the last committed token; None where a text
    begins."""
    if entry < 0 and not kv.length:
        return None
    states: States | None = kv.states[entry] if entry >= 0 else kv.end_states
    if states is None:
        raise InternalError(f"scratch entry {entry} has no states of recurrent layers")
    return states


def _batch(pieces: Sequence[Piece], count: int, device: torch.device) -> Batch:
    rows = torch.tensor([piece.row for piece in pieces])[:, None] + torch.arange(count)
    return Batch(pieces, count, rows.flatten().to(device))
