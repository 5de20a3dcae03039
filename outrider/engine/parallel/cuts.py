"""Which part of each weight a rank holds.

Where there are more ranks than kv heads, several ranks hold the same head. Columns of the MLP are shared in
steps, as evenly as these allow. Every rank has equally many words of the vocabulary; those past its end are
zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outrider.engine.fused_decoder.shares import IN, OUT, Share, share_of
from outrider.engine.loaded_model import Geometry
from outrider.protocol.errors import ModelError

WHOLE = -1
"""Stands in place of a side where nothing is cut."""
Span: TypeAlias = tuple[int, int]
"""Rows or columns [first, end)."""
Along: TypeAlias = Sequence[tuple[int, int]]
"""For each axis of a tensor, the side of a weight that it runs along, and how many numbers share one
entry."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: `spans` of one axis, one after the other, then zeros up to `size`."""

    axis: int
    spans: tuple[Span, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of one rank."""

    shares: Mapping[str, Share]
    """See `shares_of`."""
    rank: int
    ranks: int
    step: int = 1
    """Numbers that stay together because they share a group of codes: columns of the MLP, words of the
    vocabulary."""

    def cut(self, name: str, shape: Sequence[int], along: Along | None = None) -> Cut | None:
        """Return this rank's part of the tensor with this name in a checkpoint and this shape; None: all of
        it.

        Raises:
            ModelError: the cut would fall between numbers that share an entry.
        """
        module, _, kind = name.rpartition(".")
        share = share_of(self.shares, name) or share_of(self.shares, module)
        if share is None:
            return None
        if kind.endswith("bias") and share.side == IN:  # added once
            return None if self.rank == 0 else Cut(0, (), shape[0])
        axes = _plain(share, shape) if along is None else along
        axis = next((i for i, (side, _) in enumerate(axes) if side == share.side), None)
        if axis is None or axes[axis][1] >= share.shape[share.side]:
            return None
        return self._entries(axis, axes[axis][1], share, module)

    def shape(self, share: Share) -> tuple[int, ...]:
        """A rank's (out, in) of a module."""
        sizes = list(share.shape)
        sizes[share.side] = self._spans(share)[1]
        return tuple(sizes)

    def check(self, geometry: Geometry, group: int = 1) -> None:
        """Refuse a number of ranks that does not divide a model, or that would cut groups of `group` numbers.

        Raises:
            ModelError: the text says what cannot be divided.
        """
        few, many = sorted((geometry.kv_heads, self.ranks))
        if geometry.query_heads % self.ranks:
            raise self._refused(f"cannot share the {geometry.query_heads} query heads of the model evenly")
        if many % few:
            raise self._refused(f"cannot share the {geometry.kv_heads} kv heads of the model evenly")
        for name, share in self.shares.items():
            if share.piece and share.side == IN and share.runs[0] // self.ranks % group:
                raise self._refused(f"would cut groups of {group} numbers of {name}")
            if not share.piece and not share.words and -(-share.runs[0] // self.step) < self.ranks:
                steps = f" in steps of {self.step}" if self.step > 1 else ""
                raise self._refused(f"cannot share the {share.runs[0]} columns of the MLP{steps}")

    def _entries(self, axis: int, numbers: int, share: Share, name: str) -> Cut:
        """Return a rank's part along an axis that has one entry per `numbers` numbers."""
        spans, size = self._spans(share)
        for span in spans:
            if any(edge % numbers and edge != share.shape[share.side] for edge in span):
                raise self._refused(f"would cut groups of {numbers} numbers of {name}")
        entries = tuple((first // numbers, -(-end // numbers)) for first, end in spans)
        return Cut(axis, entries, -(-size // numbers))

    def _spans(self, share: Share) -> tuple[tuple[Span, ...], int]:
        """Return a rank's part of a module along its side, and its size including the zeros after it."""
        if share.words:
            words, last = -(-share.runs[0] // (self.ranks * self.step)) * self.step, share.runs[0]
            first = self.rank * words
            return ((min(first, last), min(first + words, last)),), words
        spans, start = [], 0
        for run in share.runs:
            piece = share.piece or self.step * share.together
            first, end = self._pieces(-(-run // piece))
            spans.append((start + first * piece, start + min(end * piece, run)))
            start += run
        return tuple(spans), sum(end - first for first, end in spans)

    def _pieces(self, count: int) -> Span:
        """Return a rank's range of `count` pieces: at least one, which other ranks may have too."""
        first = self.rank * count // self.ranks
        return first, max(first + 1, (self.rank + 1) * count // self.ranks)

    def _refused(self, why: str) -> ModelError:
        return ModelError(f"tensor_parallel: {self.ranks} ranks {why}; set another number")


def _plain(share: Share, shape: Sequence[int]) -> Along:
    """Return what the axes of a tensor that is not quantized run along."""
    shape = shape[share.stacked :]
    sides = (IN, OUT) if share.transposed and len(shape) > 1 else (OUT, IN)
    axes = [(side, 1) for side, _ in zip(sides, shape, strict=False)]
    return [(WHOLE, 1), *axes] if share.stacked else axes


def heads_of(geometry: Geometry, ranks: int) -> tuple[int, int]:
    """Return the numbers of query and kv heads of one rank."""
    return geometry.query_heads // ranks, max(1, geometry.kv_heads // ranks)
