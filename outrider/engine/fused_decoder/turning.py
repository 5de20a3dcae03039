"""How layers turn queries and keys by their positions, found out from what they hand to attention.

Modules show frequencies, not what the code does with them: some layers turn nothing, and columns pair up with
their neighbours or with those half a head away. So what a layer makes of a token at two positions is compared
with what each of these ways would.

The engine turns halves. Scores do not depend on the order of columns that queries and keys share, so a model
with another way gets its rows in another order.

Shapes: Q query heads, H kv heads, D head width, R columns of a head that turn.
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
    """What a layer hands to attention for the same input at position 0 and at another one."""

    position: int
    queries: int
    """Q"""
    first: Tensor
    """Queries and keys [Q + H, D] at position 0."""
    there: Tensor
    """The same at `position`."""

    def last(self, width: int) -> Observed:
        """With the last columns of heads alone."""
        return replace(self, first=self.first[:, -width:], there=self.there[:, -width:])


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """How a layer's heads are turned: by halves, once their columns are in `order` [D]; None: as they are."""

    rope: Rope
    order: Tensor | None


def still(device: torch.device) -> Rope:
    """One that turns nothing."""
    return Rope(torch.empty(0, device=device), 1.0)


def turns_of(
    layers: Sequence[Observed | None], ropes: Sequence[Rope], widths: Sequence[int], *, whole: bool
) -> list[Turn]:
    """The turn of each layer, by one of these ropes or none; those that are alike have the same.

    `widths` are D of each layer, or P where the last P columns are looked at alone. A layer that was not
    observed turns as most models do: by halves. With `whole` all columns of a head are given an angle, which
    is 0 for those that do not turn.

    Raises:
        NotFused: a layer turns in another way.
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
    """[2, R / 2] the columns that turn together."""
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
    """Between what was observed and what this way gives, relative to it."""
    order = _order(pairs, seen.first.shape[1], 0).to(seen.first.device)
    angles = rope.frequencies.float() * seen.position
    expected = rotate(seen.first[None, :, order], torch.polar(torch.ones_like(angles), angles)[None, None])
    if rope.growth is not None:
        expected[:, : seen.queries] *= rope.growth.factors(torch.tensor([seen.position]))
    there = seen.there[:, order].float()
    return float((expected[0] - there).norm() / there.norm())


def _turn(rope: Rope, pairs: Tensor, width: int, whole: bool) -> Turn:
    added = width // 2 - pairs.shape[1] if whole else 0
    frequencies = torch.cat([rope.frequencies, rope.frequencies.new_zeros(added)])
    order = _order(pairs, width, added)
    return Turn(
        replace(rope, frequencies=frequencies), None if torch.equal(order, order.sort()[0]) else order
    )


def _order(pairs: Tensor, width: int, added: int) -> Tensor:
    """The columns [D] of a head as halves of pairs; `added` pairs are of columns that do not turn."""
    rest = torch.arange(pairs.numel(), width)
    return torch.cat([pairs[0], rest[:added], pairs[1], rest[added:]])
