"""Finds out how layers rotate queries and keys by their positions, from what they pass to attention.

Modules show frequencies, but not what the code does with them: some layers rotate nothing, and columns are
paired with their neighbours or with those half a head away. So a layer's results for a token at two positions
are compared with those of each of these ways.

The engine rotates halves: it pairs columns half a head apart. Scores do not depend on the order of columns as
long as queries and keys share it, so the rows of a model with another way are reordered.

Shapes: Q query heads, H kv heads, D head width, R columns of a head that are rotated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.engine.fused_decoder.decoder import Rope
from outrider.engine.fused_decoder.modules import TOLERANCE, NotFused
from outrider.engine.fused_decoder.rotation import rotate


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What a layer passes to attention for the same input at position 0 and at another position."""

    position: int
    queries: int
    """Q"""
    first: Tensor
    """Queries and keys [Q + H, D] at position 0."""
    there: Tensor
    """Queries and keys [Q + H, D] at `position`."""
    softcap: float | None = None
    """The bound of scores that the layer asks for."""

    def last(self, width: int) -> Observed:
        """Return the last `width` columns of each head."""
        return replace(self, first=self.first[:, -width:], there=self.there[:, -width:])


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """How a layer's heads are rotated: by halves, with their columns in `order` [D]; None: in the model's
    order."""

    rope: Rope
    order: Tensor | None


def still(device: torch.device) -> Rope:
    """Return a rope that rotates nothing."""
    return Rope(torch.empty(0, device=device), 1.0)


def turns_of(
    layers: Sequence[Observed | None], ropes: Sequence[Rope], widths: Sequence[int], *, whole: bool
) -> list[Turn]:
    """Return the turn of each layer, by one of these ropes or by none; layers with equal turns share one.

    `widths` are D of each layer, or P where only the last P columns may be rotated. A layer that was not
    observed is assumed to rotate like most models: by halves. With `whole` all columns of a head get an
    angle, which is 0 for those that are not rotated.

    Raises:
        NotFused: a layer rotates in another way.
    """
    if max(2 * len(rope.frequencies) for rope in ropes) > max(widths):
        raise NotFused("its rotary embedding turns more than a head")
    ways = [(rope, _pairs(rope, neighbours)) for neighbours in (False, True) for rope in ropes]
    ways.append((none := still(ropes[0].frequencies.device), _pairs(none, neighbours=False)))
    seen = [one and one.last(width) for one, width in zip(layers, widths, strict=True)]
    chosen = [0 if one is None else _way_of(i, one, ways) for i, one in enumerate(seen)]
    turns = {(way, width): _turn(*ways[way], width, whole) for way, width in zip(chosen, widths, strict=True)}
    return [turns[alike] for alike in zip(chosen, widths, strict=True)]


def _pairs(rope: Rope, neighbours: bool) -> Tensor:
    """Return [2, R / 2]: the pairs of columns that are rotated together."""
    columns = torch.arange(2 * len(rope.frequencies))
    return columns.view(-1, 2).t() if neighbours else columns.view(2, -1)


def _way_of(layer: int, seen: Observed, ways: Sequence[tuple[Rope, Tensor]]) -> int:
    width = seen.first.shape[1]
    distances = [_distance(seen, rope, pairs) if pairs.numel() <= width else math.inf for rope, pairs in ways]
    best = min(range(len(ways)), key=distances.__getitem__)
    if not distances[best] <= TOLERANCE:
        raise NotFused(f"layer {layer} turns queries and keys in a way that is not known")
    return best


def _distance(seen: Observed, rope: Rope, pairs: Tensor) -> float:
    """Return the relative distance of what was observed from the result of this way."""
    order = _order(pairs, seen.first.shape[1], 0).to(seen.first.device)
    angles = rope.frequencies.float() * seen.position
    expected = rotate(seen.first[None, :, order], torch.polar(torch.ones_like(angles), angles)[None, None])
    if rope.growth is not None:
        expected[:, : seen.queries] *= rope.growth.factors(
            torch.tensor([seen.position], device=expected.device)
        )
    there = seen.there[:, order].float()
    return float((expected[0] - there).norm() / there.norm())


def _turn(rope: Rope, pairs: Tensor, width: int, whole: bool) -> Turn:
    added = width // 2 - pairs.shape[1] if whole else 0
    frequencies = torch.cat([rope.frequencies, rope.frequencies.new_zeros(added)])
    order = _order(pairs, width, added)
    return Turn(
        replace(rope, frequencies=frequencies, still=added),
        None if torch.equal(order, order.sort()[0]) else order,
    )


def _order(pairs: Tensor, width: int, added: int) -> Tensor:
    """Return the columns [D] of a head as halves of pairs; `added` pairs are of columns that are not
    rotated."""
    rest = torch.arange(pairs.numel(), width)
    return torch.cat([pairs[0], rest[:added], pairs[1], rest[added:]])
