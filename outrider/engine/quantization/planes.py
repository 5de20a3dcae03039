"""Codes in the order in which a GPU kernel reads them.

A *plane* is PLANE numbers that follow each other in a row of a weight, all of one group. A *block* is as many
planes as a word has codes. Each plane is at one place of the block's words, so that a product can take one
place of words [PLANE, out] without moving numbers.

Shapes: B blocks of P = 32 / bits planes, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.quantization.rounding import rounded
from outrider.engine.quantization.weight import WORD_BITS, QuantizedWeight, decoded, joined_along, unpacked

PLANE = 32
"""Numbers of a plane: the smallest group of codes, so that a plane has one scale."""
AT_ONCE = 1 << 24
"""Numbers of a weight that are converted at once: as float32 they take 64 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanarWeight:
    """The numbers of a `QuantizedWeight`; the last block is padded. Tensors may be columns of wider ones."""

    words: Tensor
    """[B PLANE, out] int32: place p of word (PLANE b + i, column) is number PLANE (P b + p) + i of a row."""
    scales: Tensor
    """[G, out] bfloat16 or float32."""
    zeros: Tensor | None
    """[G, out] of the scales' dtype, whole numbers; None: half of the codes' range."""
    bits: int
    group: int
    numbers: int
    """Numbers in a row."""
    e4m3: bool = False
    """See `QuantizedWeight`."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.words.shape[1], self.numbers

    def rows(self, order: Tensor | slice) -> PlanarWeight:
        """Return these rows of the weight, in this order; those of a slice share its memory."""
        zeros = None if self.zeros is None else self.zeros[:, order]
        return replace(self, words=self.words[:, order], scales=self.scales[:, order], zeros=zeros)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers [out, in] that the codes stand for, rounded to `dtype`."""
        made = torch.empty(self.shape, dtype=dtype, device=self.words.device)
        for part in _parts_of(self.shape):
            made[part] = self.rows(part)._numbers().t()
        return made

    def _numbers(self) -> Tensor:
        """Return the exact numbers [in, out] float32."""
        places = torch.arange(0, WORD_BITS, self.bits, dtype=torch.int32, device=self.words.device)
        blocks = self.words.view(-1, 1, PLANE, self.words.shape[1])
        codes = (blocks >> places[:, None, None]) & ((1 << self.bits) - 1)  # [B, P, PLANE, out]
        zeros = None if self.zeros is None else self._of_numbers(self.zeros)
        steps = decoded(codes.to(torch.uint8).flatten(0, 2)[: self.numbers], zeros, self.bits, self.e4m3)
        return steps * self._of_numbers(self.scales)

    def _of_numbers(self, of_groups: Tensor) -> Tensor:
        """Repeat values of groups for their numbers: [G, out] -> [in, out] float32."""
        return of_groups.float().repeat_interleave(self.group, 0)[: self.numbers]


def in_planes(weight: QuantizedWeight, place: torch.device) -> PlanarWeight:
    """Return the weight in this order on a device. It is copied part by part, to need little other memory
    there."""
    return _whole([_ordered(weight.rows(part), place) for part in _parts_of(weight.shape)])


def rounded_in_planes(weight: Tensor, bits: int, place: torch.device) -> PlanarWeight:
    """Return a weight [out, in] rounded on a device, to which it is copied part by part."""
    parts = (weight[part].to(place) for part in _parts_of(weight.shape))
    return _whole([in_planes(rounded(part, bits), place) for part in parts])


def takes_planes(weight: QuantizedWeight) -> bool:
    """True where kernels support the weight: its groups are whole planes, and its zeros are integers from 0
    to the largest code plus one.
    """
    zeros = weight.zeros
    fits = zeros is None or bool(
        ((zeros == zeros.round()) & (zeros >= 0) & (zeros <= 1 << weight.bits)).all()
    )
    return fits and weight.group % PLANE == 0


def joined_planes(parts: Sequence[PlanarWeight]) -> PlanarWeight | None:
    """The rows of all, one after the other; None where their groups differ."""
    whole: PlanarWeight | None = parts[0] if len(parts) == 1 else joined_along(1, parts)
    return whole


def _whole(parts: Sequence[PlanarWeight]) -> PlanarWeight:
    whole = joined_planes(parts)
    assert whole is not None, "parts of one weight"
    return whole


def _ordered(part: QuantizedWeight, place: torch.device) -> PlanarWeight:
    count = WORD_BITS // part.bits
    codes = unpacked(part.words.to(place), part.bits)[:, : part.numbers]
    codes = pad(codes, (0, -part.numbers % (count * PLANE))).view(len(codes), -1, count, PLANE)
    words = torch.zeros_like(codes[:, :, 0], dtype=torch.int32)  # [out, B, PLANE]
    for number in range(count):
        words |= codes[:, :, number].int() << part.bits * number
    turned = [None if each is None else each.to(place).t().contiguous() for each in (part.scales, part.zeros)]
    assert turned[0] is not None
    words = words.flatten(1).t().contiguous()
    return PlanarWeight(words, turned[0], turned[1], part.bits, part.group, part.numbers, part.e4m3)


def _parts_of(shape: Sequence[int]) -> Iterator[slice]:
    """Yield the rows of parts with AT_ONCE numbers of a weight of this shape (out, in)."""
    out, numbers = shape
    step = max(1, AT_ONCE // numbers)
    for start in range(0, out, step):
        yield slice(start, start + step)
