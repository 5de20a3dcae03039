"""How published formats store the weights of one layer, and what they stand for.

A layer's tensors are named without the name of its module, such as `qweight`. If a format has codes of 4 or 8
bits, and scales for groups that the kernels support, the result has the same codes, scales and zeros.
Otherwise it is the decoded numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.engine.quantization.weight import WORD_BITS, QuantizedWeight, quantized, unpacked

Parts: TypeAlias = Mapping[str, Tensor]
"""The tensors of a layer by name."""
Read: TypeAlias = QuantizedWeight | Tensor
"""Codes, or numbers [out, in] float32."""
STEP = 32
"""Sizes of the groups that the kernels support are multiples of this."""
Blocks: TypeAlias = Sequence[tuple[int, int]]
"""How many rows, and numbers of a row, share a scale; 0: all of them."""
SHAPE, ORDER = "weight_shape", ("g_idx", "weight_g_idx")
"""Names of tensors: the shape of a weight, and the group of each number of a row."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each place of a word holds, from the lowest bits on."""


class Unreadable(Exception):
    """A layer is stored in an unknown way, which the text describes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One format."""

    name: str
    mark: Callable[[frozenset[str]], bool]
    """True for the names of a quantized layer's tensors."""
    read: Callable[[Parts], Read]
    sides: tuple[int, int] = (0, 1)
    """The axis of the weight [out, in] that each axis of its tensors runs along."""
    entries: tuple[int, ...] = ()
    """How many numbers may share one entry of a tensor, except 1 and the whole axis."""
    group: int = 0
    """Numbers of a group by the settings; 0 or less: `entries` and the shapes of tensors show them."""


def gptq(bits: int, group: int, *, zeros_less_one: bool) -> Layout:
    """`qweight` [in bits / 32, out] and `qzeros` [G, out bits / 32] int32, `scales` [G, out].

    `g_idx` [in], if present, is the group of each number; if it is not in order (`desc_act`), the numbers of
    a group do not follow each other. The first version of the format stores zeros minus one. A group of -1 is
    a whole row.
    """

    def read(parts: Parts) -> Read:
        codes = unpacked(parts["qweight"].t().contiguous(), bits)
        zeros = unpacked(parts["qzeros"], bits).t()
        if zeros_less_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        size = codes.shape[1] if group < 0 else group
        scales, order = parts["scales"].t(), torch.arange(codes.shape[1]) // size
        given = parts.get("g_idx")
        if given is not None and not torch.equal(given.long(), order):
            return (codes.float() - zeros[:, given.long()]) * scales.float()[:, given.long()]
        if given is not None:  # a rank has the scales of all groups, also where its own come first
            used = -(-codes.shape[1] // size)
            scales, zeros = scales[:, :used], zeros[:, :used]
        return _grouped(codes, scales, zeros, bits, size)

    return Layout("gptq", lambda names: "qweight" in names, read, (1, 0), _entries(bits, group), group)


def awq(bits: int, group: int) -> Layout:
    """Version GEMM, `qweight` [in, out / 8] and `qzeros` [G, out / 8] int32 in AWQ_ORDER; `scales`."""

    def read(parts: Parts) -> Read:
        codes, zeros = (_in_order(unpacked(parts[name], bits)).t() for name in ("qweight", "qzeros"))
        size = codes.shape[1] if group < 0 else group
        return _grouped(codes, parts["scales"].t(), zeros, bits, size)

    return Layout("awq", lambda names: "qweight" in names, read, (1, 0), _entries(bits, group))


def compressed_tensors(blocks: Blocks) -> Layout:
    """`weight_packed` [out, in bits / 32] int32 with `weight_shape`, or `weight` of int8 or fp8.

    There is also `weight_scale` [], [1], [out, 1], [out, G] or one per block, and perhaps `weight_zero_point`
    of the same shape (packed along `out` if codes are packed), and `weight_g_idx` [in] as in GPTQ. Codes
    count from the middle of their range. A layer has blocks of one of these sizes.
    """
    words = tuple(WORD_BITS // bits for bits in (4, 8))
    marks = {"weight_packed", "weight_scale"}
    return Layout(
        "compressed-tensors",
        lambda names: bool(names & marks),
        lambda parts: _compressed(parts, blocks),
        entries=(*_sizes(blocks), *words),
    )


def fp8(blocks: Blocks) -> Layout:
    """`weight` of fp8, and `weight_scale_inv` or `weight_scale` for each block of one of these sizes."""
    return Layout(
        "fp8",
        lambda names: bool(names & {"weight_scale_inv", "weight_scale"}),
        lambda parts: _scaled(
            parts["weight"], parts.get("weight_scale_inv", parts.get("weight_scale")), blocks
        ),
        entries=_sizes(blocks),
    )


def is_fp8(tensor: Tensor) -> bool:
    """Whether numbers have 8 bits, which mean nothing without their scales."""
    return tensor.is_floating_point() and tensor.element_size() == 1


def _entries(bits: int, group: int) -> tuple[int, ...]:
    return (WORD_BITS // bits, *([group] if group > 0 else []))


def _sizes(blocks: Blocks) -> tuple[int, ...]:
    return tuple(size for block in blocks for size in block if size > 1)


def _compressed(parts: Parts, blocks: Blocks) -> Read:
    scales = parts["weight_scale"]
    if "weight_packed" not in parts:
        weight = parts["weight"]
        if weight.dtype.is_floating_point:
            return _scaled(weight, scales, blocks)
        if weight.dtype != torch.int8:
            raise Unreadable(f"its weights are {weight.dtype}")
        codes, bits = (weight.int() + 128).to(torch.uint8), 8
    else:
        codes, bits = _unpacked_rows(parts["weight_packed"], parts["weight_shape"])
    out = len(codes)
    scales = scales.expand(out, 1) if scales.numel() == 1 else scales.view(out, -1)
    zeros = _compressed_zeros(parts.get("weight_zero_point"), scales, bits)
    order = parts.get("weight_g_idx")
    if order is not None and not _follow(order, scales, blocks):
        middle = torch.full_like(scales, 1 << (bits - 1)) if zeros is None else zeros
        return (codes.float() - middle[:, order.long()].float()) * scales.float()[:, order.long()]
    return _grouped(codes, scales, zeros, bits, _block(codes, parts["weight_scale"], blocks)[1])


def _follow(order: Tensor, scales: Tensor, blocks: Blocks) -> bool:
    """Whether the numbers of each group follow each other, and all groups with scales [out, G] are there."""
    places = torch.arange(len(order))
    orders = [places // (wide or len(order)) for _, wide in blocks]
    return any(torch.equal(order.long(), each) and scales.shape[1] == each[-1] + 1 for each in orders)


def _unpacked_rows(words: Tensor, shape: Tensor) -> tuple[Tensor, int]:
    """Return the codes [out, in] and their bits, which follow from the width of the words."""
    out, width = (int(size) for size in shape)
    for bits in (4, 8):
        if words.dtype == torch.int32 and words.shape == (out, -(-width * bits // WORD_BITS)):
            return unpacked(words, bits)[:, :width], bits
    raise Unreadable(f"its packed weights are {tuple(words.shape)} of {words.dtype} for {(out, width)}")


def _compressed_zeros(zeros: Tensor | None, scales: Tensor, bits: int) -> Tensor | None:
    """Return the zeros [out, G], counted from 0."""
    if zeros is None:
        return None
    if zeros.dtype == torch.int32 and len(zeros) != len(scales):
        return unpacked(zeros.t().contiguous(), bits).t()[: len(scales)]
    return zeros.reshape(-1, scales.shape[1]).expand_as(scales).float() + (1 << (bits - 1))


def _grouped(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> Read:
    """Return codes, or numbers if the kernels do not support such groups."""
    width = codes.shape[1]
    if scales.shape[1] != -(-width // group):
        raise Unreadable(f"it has {scales.shape[1]} groups of {group} for rows of {width} numbers")
    if scales.shape[1] == 1:
        group = -(-width // STEP) * STEP
    if group % STEP == 0:
        return quantized(codes, scales, zeros, bits, group)
    groups = torch.arange(width) // group
    middle = float(1 << (bits - 1)) if zeros is None else zeros.float()[:, groups]
    return (codes.float() - middle) * scales.float()[:, groups]


def _scaled(weight: Tensor, scales: Tensor | None, blocks: Blocks) -> Read:
    """Return an fp8 weight [out, in] times the scale of each block. Blocks at the end may be cut off.

    Numbers of e4m3 stay codes if the kernels support such blocks.
    """
    if scales is None:
        raise Unreadable(f"its weights are {weight.dtype} without scales")
    if not is_fp8(weight):  # saved before they were compressed: the scales do not belong to these numbers
        raise Unreadable(f"its weights are {weight.dtype}, not fp8, beside scales")
    if scales.dtype == torch.uint8:  # MXFP8: powers of two, stored as bytes
        scales = scales.view(torch.float8_e8m0fnu)
    if weight.ndim != 2:
        return weight.float() * scales.float()
    (out, width), (high, wide) = weight.shape, _block(weight, scales, blocks)
    grid = _grid(scales).float()[torch.arange(out) // high]
    if grid.shape[1] == 1:
        wide = -(-width // STEP) * STEP
    if wide % STEP == 0 and weight.dtype == torch.float8_e4m3fn:
        codes = weight.view(torch.uint8)
        if not ((codes & 0x7F) == 0x7F).any():  # products of codes do not support NaN
            return quantized(codes, grid, None, 8, wide, e4m3=True)
    return weight.float() * grid[:, torch.arange(width) // wide]


def _block(weight: Tensor, scales: Tensor, blocks: Blocks) -> tuple[int, int]:
    """Return the first of `blocks` of which a weight [out, in] has as many as there are scales."""
    out, width = weight.shape
    whole = [(high or out, wide or width) for high, wide in blocks]
    for high, wide in whole:
        if _grid(scales).shape == (-(-out // high), -(-width // wide)):
            return high, wide
    sizes = " or ".join(f"{high} x {wide}" for high, wide in whole) or "no size"
    raise Unreadable(f"it has scales {tuple(scales.shape)} for a weight {(out, width)} in blocks of {sizes}")


def _grid(scales: Tensor) -> Tensor:
    """Return the scales as [rows of blocks, blocks of a row]."""
    return scales.view(1, 1) if scales.numel() == 1 else scales.view(len(scales), -1)


def _in_order(codes: Tensor) -> Tensor:
    """[N, out] in AWQ_ORDER -> [N, out] in order."""
    places = torch.tensor(AWQ_ORDER).argsort()
    return codes.view(len(codes), -1, len(AWQ_ORDER))[..., places].flatten(1)
