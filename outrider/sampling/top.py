"""The largest numbers of long rows on a GPU, such as logits: one launch over all blocks of the rows, and one
over what the blocks yield. Importing this imports Triton.

Shapes: N rows, C columns, B blocks of a row, K numbers wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from outrider.sampling.kernels.triton_top import top_kernel

BLOCK = 2048
"""Columns of a block."""
MOST = BLOCK // 8
"""Most numbers of a row: blocks must yield far fewer than they have."""


class Top(NamedTuple):
    """The largest numbers of each row, the largest first, and among equals the first column first."""

    values: Tensor
    """[N, K]; -inf where a row has fewer numbers."""
    columns: Tensor
    """[N, K] int64"""


def top(numbers: Tensor, count: int) -> Top:
    """The `count` largest of numbers [N, C] float; `count` is at most C.

    Raises:
        ValueError: `count` is above MOST.
    """
    values, columns, _ = _of_blocks(numbers, count, weighed=False)
    return _joined(values, columns)


def most_likely(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely tokens of logits [N, V] float32, their logits and their probabilities, [N, count]."""
    values, columns, totals = _of_blocks(logits, count, weighed=True)
    found = _joined(values, columns)
    largest = found.values[:, :1]
    whole = ((values[:, :, 0] - largest).exp() * totals).sum(-1, keepdim=True)
    return found.columns, found.values, (found.values - largest).exp() / whole


def _of_blocks(numbers: Tensor, count: int, *, weighed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Per block the largest numbers and their columns [N, B, K], and if `weighed` its total [N, B]; see
    `top_kernel`."""
    if count > MOST:
        raise ValueError(f"{count} numbers of a row are asked for, and {MOST} are the most")
    rows, size = numbers.shape
    block = min(BLOCK, next_power_of_2(size))
    blocks = -(-size // block)
    values = numbers.new_empty((rows, blocks, count))
    columns = torch.empty((rows, blocks, count), dtype=torch.int64, device=numbers.device)
    totals = numbers.new_empty((rows, blocks) if weighed else 0)
    top_kernel[(rows, blocks)](
        numbers, values, columns, totals, numbers.stride(0), size, COUNT=count, BLOCK=block, WEIGHED=weighed
    )
    return values, columns, totals


def _joined(values: Tensor, columns: Tensor) -> Top:
    """The largest of those of all blocks [N, B, K]."""
    if values.shape[1] == 1:
        return Top(values[:, 0], columns[:, 0])
    places = top(values.flatten(1), values.shape[2])
    return Top(places.values, columns.flatten(1).gather(1, places.columns))
