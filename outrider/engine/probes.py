"""Finds the arithmetic of a loaded model by trial: at which sizes do matrix kernels agree?

Every shape that occurs is multiplied in blocks of every size. The numbers are chosen to cancel, so that the
order of additions shows in nearly every result; with common numbers and 16 bits it seldom would.

Shapes: R rows, K inner width, M outer width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import nn

from outrider.engine.arithmetic import KEYS_PER_BLOCK, Arithmetic
from outrider.engine.loaded_model import Geometry
from outrider.engine.packed_linear import RowLinear
from outrider.engine.row_blocks import Kernel, RowBlocks
from outrider.errors import ModelError

SIZES = (*range(1, 17), *range(20, 65, 4), 128, 256, 512)
"""Numbers of rows that kernels are run with; few, because the first use of each builds its kernel."""
LADDER = (1, 2, 4, 8, 16)
"""Tried as the least size, smallest first; from four on, the others are its multiples."""
SAMPLE = 64
"""Different rows of a probe; larger sizes repeat them."""
VECTOR = 64
"""Elements that vectorized loops take at once: two registers of 16-bit numbers."""
_LARGE = 2.0**18
_BATCHES = (1, 2, 5)
"""Numbers of attention problems in a call that are probed."""

Probe: TypeAlias = tuple[Kernel, torch.Tensor]
"""A product, and rows for it."""


def find_arithmetic(network: nn.Module, kind: str, geometry: Geometry) -> Arithmetic:
    """Probe the shapes of `network`, whose linear layers are `RowLinear`, and make them keep to the result.

    `kind` is what errors call the model.

    Raises:
        ModelError: it has other matrix products than linear layers, or no size of block is consistent.
    """
    layers = _linear_layers(network, kind)
    linear = first_agreeing([_linear_probe(layer) for layer in _one_per_shape(layers)])
    device = layers[0].device
    probes = [probe for batch in _BATCHES for probe in _attention_probes(geometry, batch, device)]
    attention = first_agreeing(probes)
    if linear is None or attention is None:
        where = "attention" if linear is not None else "linear layers"
        raise ModelError(
            f"deterministic: the {where} of {kind} give a row other bits in every number of rows "
            f"on this {device.type}; set deterministic off or use another dtype"
        )
    for layer in layers:
        layer.rows = linear
    widths = {layer.in_features for layer in layers}
    return Arithmetic(linear, attention, max(VECTOR // math.gcd(VECTOR, width) for width in widths))


def candidates() -> Iterator[RowBlocks]:
    """What to try, the cheapest first; the last is one size for everything."""
    for least in LADDER:
        multiple = least if least > 2 else 1
        yield RowBlocks(tuple(size for size in SIZES if size >= least and size % multiple == 0))
    yield RowBlocks(LADDER[-1:])


def agree(blocks: RowBlocks, kernel: Kernel, rows: torch.Tensor) -> bool:
    """Whether all sizes give each of `rows` [..., SAMPLE, K] the bits that the smallest gives it."""
    least = blocks.sizes[0]
    expected = torch.cat([kernel(part.contiguous()) for part in torch.split(rows, least, -2)], -2)
    for size in blocks.sizes:
        copies = -(-size // SAMPLE)
        results = kernel(torch.cat([rows] * copies, -2)[..., :size, :].contiguous())
        for start, stop in pairwise([*range(0, size, SAMPLE), size]):
            if not torch.equal(results[..., start:stop, :], expected[..., : stop - start, :]):
                return False
    return True


def first_agreeing(probes: list[Probe]) -> RowBlocks | None:
    """The cheapest blocks in which all products agree; None when there are none."""
    with torch.inference_mode():
        for blocks in candidates():
            if all(agree(blocks, kernel, rows) for kernel, rows in probes):
                return blocks
    return None


def _linear_layers(network: nn.Module, kind: str) -> list[RowLinear]:
    layers: list[RowLinear] = []
    for name, module in network.named_modules():
        if isinstance(module, RowLinear):
            layers.append(module)
        elif not isinstance(module, nn.Embedding):
            matrices = [part for part, weight in module.named_parameters(recurse=False) if weight.ndim > 1]
            if matrices:
                raise ModelError(
                    f"deterministic: not offered for {kind}, whose {name} multiplies by "
                    f"{matrices[0]} outside of linear layers, such as experts do; set deterministic off"
                )
    return layers


def _one_per_shape(layers: Iterable[RowLinear]) -> list[RowLinear]:
    kinds = {
        (type(layer), layer.in_features, layer.out_features, layer.dtype, layer.biased): layer
        for layer in layers
    }
    return list(kinds.values())


def _linear_probe(layer: RowLinear) -> Probe:
    """A layer of this shape, and rows for it."""
    like = torch.empty(0, dtype=layer.dtype, device=layer.device)
    rows, weight = cancelling(SAMPLE, layer.in_features, layer.out_features, like)
    bias = weight.new_zeros(layer.out_features) if layer.biased else None
    return type(layer)(weight, bias).compute, rows


def _attention_probes(geometry: Geometry, batch: int, device: torch.device) -> list[Probe]:
    """Queries by keys, and weights by values."""
    like = torch.empty(0, device=device)
    queries, keys = cancelling(SAMPLE, geometry.head_dim, KEYS_PER_BLOCK, like)
    weights, values = cancelling(SAMPLE, KEYS_PER_BLOCK, geometry.value_dim, like)
    keys, values = keys.repeat(batch, 1, 1), values.t().repeat(batch, 1, 1)
    return [
        (lambda rows: torch.bmm(rows, keys.transpose(1, 2)), queries.repeat(batch, 1, 1)),
        (lambda rows: torch.bmm(rows, values), weights.repeat(batch, 1, 1)),
    ]


def cancelling(rows: int, inner: int, outer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, K] and a weight [M, K], of the dtype of `like`, whose products are differences of large terms.

    The two halves of the weight are equal, and a quarter of each row occurs again with the other sign: exact
    sums are small, and what is left of rounding the large terms depends on the order they were added in.
    """
    generator = torch.Generator(like.device).manual_seed(0)
    half = inner // 2
    weight = torch.randn((outer, inner), generator=generator, dtype=like.dtype, device=like.device)
    weight[:, half : 2 * half] = weight[:, :half]
    given = torch.randn((rows, inner), generator=generator, dtype=like.dtype, device=like.device)
    large = torch.rand(half, generator=generator, device=like.device) < 0.5
    terms = given[:, :half] * _LARGE
    given[:, :half] = torch.where(large, terms, given[:, :half])
    given[:, half : 2 * half] = torch.where(large, -terms, given[:, half : 2 * half])
    return given, weight
