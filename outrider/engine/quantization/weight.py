"""A weight whose numbers are codes of 4 or 8 bits, and the exact meaning of the codes.

A row is cut into groups. A number is `(code - zero) * scale` with the scale and the zero of its group, or
`e4m3(code) * scale`, where the 8 bits are a number of that type (Micikevicius et al. 2022, "FP8 Formats for
Deep Learning"); this value is the weight, whatever computes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD_BITS = 32
"""Bits of a word of codes."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight of [out, in] numbers. A row has G groups of `group` numbers, the last one padded; W = G group
    / (32 / bits)."""

    words: Tensor
    """[out, W] int32: codes from the lowest bits on."""
    scales: Tensor
    """[out, G] bfloat16 or float32."""
    zeros: Tensor | None
    """[out, G] of the scales' dtype; None: half of the codes' range."""
    bits: int
    group: int
    numbers: int
    """Numbers in a row."""
    e4m3: bool = False
    """True where codes are numbers of type e4m3; there are then no zeros."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.words), self.numbers

    @property
    def middle(self) -> int:
        """The zero of all groups if `zeros` is None."""
        return 1 << (self.bits - 1)

    def values(self) -> Tensor:
        """Return the numbers [out, in] float32 that the codes stand for."""
        codes = unpacked(self.words, self.bits).view(*self.scales.shape, self.group)
        zeros = None if self.zeros is None else self.zeros.float()[..., None]
        steps = decoded(codes, zeros, self.bits, self.e4m3)
        return (steps * self.scales.float()[..., None]).flatten(1)[:, : self.numbers]

    def rows(self, order: Tensor | slice) -> QuantizedWeight:
        """Return these rows of the weight, in this order; those of a slice share its memory."""
        zeros = None if self.zeros is None else self.zeros[order]
        return replace(self, words=self.words[order], scales=self.scales[order], zeros=zeros)


def quantized(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, *, e4m3: bool = False
) -> QuantizedWeight:
    """Return a weight from codes [out, in] uint8, and scales and zeros [out, G] of their groups.

    Scales may have any dtype. Scales and zeros become bfloat16 where that is exact, otherwise float32.
    """
    width = codes.shape[1]
    words = packed(pad(codes, (0, scales.shape[1] * group - width)), bits)
    if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
        zeros = None
    kept = (
        torch.bfloat16 if all(_fits(part) for part in (scales, zeros) if part is not None) else torch.float32
    )
    return QuantizedWeight(
        words, scales.to(kept), None if zeros is None else zeros.to(kept), bits, group, width, e4m3
    )


def decoded(codes: Tensor, zeros: Tensor | None, bits: int, e4m3: bool) -> Tensor:
    """Return uint8 codes as float32 numbers before scaling. `zeros` have equally many axes; None: half of the
    range."""
    if e4m3:
        return codes.view(torch.float8_e4m3fn).float()
    return codes.float() - (float(1 << (bits - 1)) if zeros is None else zeros)


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The rows of all, one after the other; None where their groups differ."""
    whole: QuantizedWeight | None = joined_along(0, parts)
    return whole


def joined_along(axis: int, parts: Sequence[Any]) -> Any:
    """Join weights along the axis of their words, scales and zeros that their rows are; None where groups
    differ."""
    first = parts[0]
    if len({(part.bits, part.group, part.numbers, part.e4m3) for part in parts}) > 1:
        return None
    kept = torch.bfloat16 if all(part.scales.dtype == torch.bfloat16 for part in parts) else torch.float32
    zeros: list[Tensor] = []
    if any(part.zeros is not None for part in parts):
        middle = 1 << (first.bits - 1)
        zeros = [torch.full_like(p.scales, middle) if p.zeros is None else p.zeros for p in parts]
    return replace(
        first,
        words=torch.cat([part.words for part in parts], axis),
        scales=torch.cat([part.scales.to(kept) for part in parts], axis),
        zeros=torch.cat([part.to(kept) for part in zeros], axis) if zeros else None,
    )


def packed(codes: Tensor, bits: int) -> Tensor:
    """[..., in] uint8 -> [..., W] int32, the first code in the lowest bits; zeros after the last code."""
    count = WORD_BITS // bits
    words = pad(codes, (0, -codes.shape[-1] % count)).view(*codes.shape[:-1], -1, count)
    result = torch.zeros(words.shape[:-1], dtype=torch.int32, device=codes.device)
    for place in range(count):
        result |= words[..., place].int() << bits * place
    return result


def unpacked(words: Tensor, bits: int) -> Tensor:
    """[..., W] int32 -> [..., 32 W / bits] uint8, the code in the lowest bits first."""
    places = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> places) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _fits(numbers: Tensor) -> bool:
    """True when bfloat16 holds all of them."""
    return torch.equal(numbers.bfloat16().double(), numbers.double())
