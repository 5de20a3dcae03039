"""Launches the products of chosen experts. Importing this imports Triton.

Libraries have no fitting product: torch's grouped product waits for the host on capability 8.0 and in
float16, and its batched product copies the weights of every pair.

Shapes: M tokens, K experts per token, S = M K pairs, C hidden width, F width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from outrider.engine.fused_decoder.decoder import BoundedGate, ExpertLinears, Experts, Router
from outrider.engine.gpu.kernels.experts import (
    arrange_kernel,
    bounded_gate_kernel,
    choose_kernel,
    expert_product_kernel,
    expert_sum_kernel,
)
from outrider.engine.gpu.shapes import check_shape

ARRANGED = 1024
"""Pairs that a program examines at once."""
BLOCK_ROWS = 32
"""Pairs of a tile, padded with zeros: reading a weight takes longer than multiplying this many rows."""
BLOCK_COLUMNS = 64
"""Columns of a tile."""
BLOCK_NUMBERS = 64
"""Numbers of a row that a program multiplies at a time."""
BLOCK = 1024
"""Columns per program in kernels that compute no matrix product."""


class Pairs(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert."""

    order: Tensor
    """[S] int32, the pairs in the order of their experts."""
    ends: Tensor
    """[E] int32, where each expert's pairs end."""


def expert_sum(
    experts: Experts, gate: Callable[[Tensor], Tensor], x: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """See `outrider.engine.fused_decoder.forward.ExpertSum`; `gate` applies the gate of the experts, [S, 2 F]
    -> [S, F].

    Raises:
        ValueError: an argument has another shape.
    """
    rows, count = chosen.shape
    check_shape("shares", shares, rows, count)
    pairs = arranged(chosen, len(experts.down.weight))
    opened = gate(expert_product(x, experts.gate_up, pairs, count))
    results = expert_product(opened, experts.down, pairs, 1)
    width = results.shape[1]
    out = x.new_empty((rows, width))
    expert_sum_kernel[(rows, -(-width // BLOCK))](
        results, shares, out, CHOSEN=count, WIDTH=width, BLOCK=BLOCK
    )
    return out


def choose(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts that a router chooses for x [M, C], and their shares; see `Choose`."""
    scores: Tensor = router.scores.forward(x)
    (rows, experts), count = scores.shape, router.count
    check_shape("scores", scores, rows, experts)
    chosen = scores.new_empty((rows, count), dtype=torch.int64)
    shares = scores.new_empty((rows, count), dtype=torch.float32)
    choose_kernel[(rows,)](
        scores,
        chosen,
        shares,
        EXPERTS=experts,
        BLOCK_E=next_power_of_2(experts),
        CHOSEN=count,
        BLOCK_K=next_power_of_2(count),
        NORMALISED=router.normalised,
        num_warps=1,
    )
    return chosen, shares


def bounded(gate: BoundedGate, x: Tensor) -> Tensor:
    """Return the result [S, F] of the gate for x [S, 2 F]."""
    rows, width = len(x), x.shape[1] // 2
    check_shape("what a gate takes", x, rows, 2 * width)
    out = x.new_empty((rows, width))
    grid = (rows, -(-width // BLOCK))
    bounded_gate_kernel[grid](x, out, WIDTH=width, ALPHA=gate.alpha, LIMIT=gate.limit, BLOCK=BLOCK)
    return out


def arranged(chosen: Tensor, experts: int) -> Pairs:
    """Return the pairs of chosen experts [M, K] int64."""
    check_shape("chosen", chosen, *chosen.shape)
    order = chosen.new_empty(chosen.numel(), dtype=torch.int32)
    ends = chosen.new_empty(experts, dtype=torch.int32)
    arrange_kernel[(experts,)](chosen, order, ends, chosen.numel(), BLOCK=ARRANGED)
    return Pairs(order, ends)


def expert_product(x: Tensor, linears: ExpertLinears, pairs: Pairs, sharing: int) -> Tensor:
    """Return the results [S, out] of the pairs' experts for x [S / sharing, in]. A row's bits are the same in
    any batch.

    Raises:
        ValueError: x has another shape.
    """
    count, (experts, columns, numbers) = len(pairs.order), linears.weight.shape
    check_shape("x", x, count // sharing, numbers)
    out = x.new_empty((count, columns))
    # The most tiles there can be: each expert has at most one that is not full.
    tiles = (count + min(experts, count) * (BLOCK_ROWS - 1)) // BLOCK_ROWS
    expert_product_kernel[(tiles, -(-columns // BLOCK_COLUMNS))](
        x,
        linears.weight,
        x if linears.bias is None else linears.bias,
        *pairs,
        out,
        *linears.weight.stride(),
        SHARING=sharing,
        IN=numbers,
        OUT=columns,
        EXPERTS=experts,
        BLOCK_E=next_power_of_2(experts),
        BIAS=linears.bias is not None,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=BLOCK_COLUMNS,
        BLOCK_K=BLOCK_NUMBERS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=4,
    )
    return out
