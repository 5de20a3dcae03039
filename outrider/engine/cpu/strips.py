"""Codes as `outrider.engine.cpu.kernels.quantized_matmul` reads them: in strips of panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.cpu.panels import PANEL, aligned, paired
from outrider.engine.cpu.processor import LANES
from outrider.engine.quantization.weight import QuantizedWeight, packed, unpacked

SHORT_GROUP = 64
"""Most numbers of a group that the kernel multiplies. In longer groups sums would be long chains of additions
that wait for each other, and a group would not stay in the cache while panels take turns."""


def in_short_groups(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the same numbers in groups of 64 or 32, some of which have the same scale and zero."""
    group = SHORT_GROUP if weight.group % SHORT_GROUP == 0 else SHORT_GROUP // 2
    count = weight.group // group
    if count == 1:
        return weight
    scales, zeros = (
        None if part is None else part.repeat_interleave(count, 1) for part in (weight.scales, weight.zeros)
    )
    assert scales is not None
    return replace(weight, scales=scales, zeros=zeros, group=group)


def with_signs(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the same numbers, with zeros if some 8-bit code is 0: its distance of -128 from the middle does
    not fit into a sign and 7 bits."""
    if weight.zeros is not None or weight.e4m3 or weight.bits != 8:
        return weight
    if not (weight.words.view(torch.uint8)[:, : weight.numbers] == 0).any():
        return weight
    return replace(weight, zeros=torch.full_like(weight.scales, weight.middle))


def alike(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return the same numbers, with zeros in all weights if `with_signs` adds zeros to any."""
    if all(with_signs(weight).zeros is None for weight in weights):
        return [*weights]
    middles = [torch.full_like(weight.scales, weight.middle) for weight in weights]
    return [
        replace(weight, zeros=middle if weight.zeros is None else weight.zeros)
        for weight, middle in zip(weights, middles, strict=True)
    ]


def in_strips(
    weight: QuantizedWeight, strip: int, apart: Callable[[int], bool], *, gated: bool, numbers: str
) -> Tensor:
    """Return [strips, bytes] uint8: for each group scales, and perhaps zeros, [strip, PANEL], and its words,
    as they are multiplied as `numbers` (see `outrider.engine.cpu.kernels.codes`).

    Where `apart` is true for the bytes of a group's scales and zeros, those of all groups come first.
    """
    groups = weight.scales.shape[1]
    heads = [part for part in (weight.scales, weight.zeros) if part is not None]
    parts = [columns(part, strip, gated=gated).permute(0, 3, 1, 2) for part in heads]
    words = weight.words.view(len(weight.words), groups, -1)
    words = columns(words, strip, gated=gated).permute(0, 3, 4, 1, 2).contiguous()
    if weight.e4m3:
        bfloat16 = numbers == "bfloat16"
        words = _two_by_two(words.view(torch.uint8)) if bfloat16 else _places_together(words)
    elif numbers == "int16" or (numbers == "bfloat16" and weight.bits == 4):
        words = _halves(words, weight.bits)
    elif numbers == "bfloat16":
        words = _two_by_two(_signed(words.view(torch.uint8), zeros=weight.zeros is not None))
    head = torch.cat([_bytes(part, 2) for part in parts], 2)
    if apart(head.shape[2]):
        return aligned(torch.cat([head.flatten(1), _bytes(words, 1)], 1))
    return aligned(torch.cat([head, _bytes(words, 2)], 2).flatten(1))


def _bytes(values: Tensor, start: int) -> Tensor:
    """Return the values with all axes from `start` on flattened into one axis of uint8."""
    return values.flatten(start).contiguous().view(torch.uint8)


def columns(values: Tensor, strip: int, *, gated: bool) -> Tensor:
    """[out, ...] -> [strips, strip, PANEL, ...], with zeros after `out`."""
    if gated:
        values = paired(values)
    behind = (0, 0) * (values.ndim - 1) + (0, -len(values) % (strip * PANEL))
    return pad(values, behind).view(-1, strip, PANEL, *values.shape[1:])


def _halves(words: Tensor, bits: int) -> Tensor:
    """Reorder the codes of words: the first of each two numbers goes to the lower half of a word."""
    codes = words.view(torch.uint8) if bits == 8 else unpacked(words, bits)
    codes = codes.view(*words.shape, 16 // bits, 2)
    return packed(codes.transpose(-1, -2).flatten(-2), bits).squeeze(-1)


def _signed(codes: Tensor, *, zeros: bool) -> Tensor:
    """Return the distances of 8-bit codes from 128, or with `zeros` from 127 and 128, with a sign bit if
    below."""
    return torch.where(codes < 128, 255 - codes + int(not zeros), codes - 128)


def _two_by_two(codes: Tensor) -> Tensor:
    """Reorder [..., 4 PANEL] bytes of words: first two numbers of each of four words, then the other two of
    each."""
    return codes.view(*codes.shape[:-1], PANEL // 4, 4, 2, 2).transpose(-2, -3).flatten(-4)


def _places_together(words: Tensor) -> Tensor:
    """[..., PANEL] words of 8-bit codes -> bytes. In each vector of LANES words the first numbers go to the
    lower bytes of its first half, the second numbers to those of its second half, the last two to the higher
    bytes.
    """
    codes = words.view(torch.uint8).view(*words.shape[:-1], 2, LANES, 2, 2)
    return codes.permute(*range(codes.ndim - 3), -1, -3, -2).flatten(-4)
