"""Attention whose sums are the same for a token wherever it is computed.

    plan_runs      a step's queries in runs; their keys in blocks, cut by position
    plan_batches   runs of similar size side by side, with masks
    mix            scores, weights and values block by block; the blocks' sums are added in order

A key block is one matrix product of fixed width, and hidden keys weigh exactly 0: a block that a query does
not see adds nothing to its sum. So the sum does not depend on how many keys there are, where in a chunk or
tree the query stands, or what is beside it. The branches of a tree share the blocks before they part; each
has its own copy of the block in which they do, so that in every block keys stand where their position says.

Shapes: B runs of a batch, n queries of each, G query heads per kv head, H kv heads, D head width, C blocks
of K keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.arithmetic import KEYS_PER_BLOCK
from outrider.engine.pages import SequenceKv
from outrider.engine.row_blocks import RowBlocks
from outrider.engine.step import FOLD_LIMIT, Group, group_alike

Integers: TypeAlias = npt.NDArray[np.int64]
SHARED = -1
"""Branch of keys that all queries of a run may see."""
_NOWHERE = 2**40
"""Position of padding keys: behind all queries."""


@dataclass(frozen=True, slots=True)
class Run:
    """Some queries of one sequence, and all keys that they may see."""

    rows: Integers
    """[n] packed position of each query."""
    positions: Integers
    """[n] its position in the sequence."""
    branches: Integers
    """[n] which copy of the last blocks is its own."""
    slots: Integers
    """[C * K] where keys and values are."""
    key_positions: Integers
    """[C * K] ascending within a branch."""
    key_branches: Integers
    """[C * K] SHARED, or whose copy a key belongs to."""

    def from_block(self, window: int | None) -> int:
        """The first key of the first block that any query sees."""
        if window is None:
            return 0
        shared = int(np.count_nonzero(self.key_branches == SHARED))
        first = max(int(self.positions.min()) - window + 1, 0)
        return min(first // KEYS_PER_BLOCK * KEYS_PER_BLOCK, shared)


@dataclass(frozen=True, slots=True)
class Batch:
    """Runs that are computed at once."""

    rows: torch.Tensor
    """[B * n] int64, packed positions, the last one of a run repeated as padding."""
    slots: torch.Tensor
    """[B * C * K] int64, padded with a slot of the same sequence."""
    mask: torch.Tensor
    """[B, 1, C, 1, n, K] added to the scores: 0 or -inf."""


def plan_runs(groups: Iterable[Group]) -> list[Run]:
    """The runs of a step, none with more than FOLD_LIMIT queries."""
    runs: list[Run] = []
    for group in groups:
        first = group.start
        for kv, count in zip(group.members, group.counts, strict=True):
            for start in range(0, count, FOLD_LIMIT):
                stop = min(start + FOLD_LIMIT, count)
                offset = kv.scratch - count + start
                runs.append(_run(kv, np.arange(offset, offset + stop - start), first + start))
            first += count
    return runs


def plan_batches(runs: Sequence[Run], window: int | None, device: torch.device) -> list[Batch]:
    """Batches of runs whose queries see the last `window` positions, or all."""
    firsts = [run.from_block(window) for run in runs]
    sizes = [(len(run.rows), len(run.slots) - first) for run, first in zip(runs, firsts, strict=True)]
    return [
        _batch([runs[i] for i in members], [firsts[i] for i in members], window, device)
        for members in group_alike(sizes)
    ]


def mix(
    batches: Iterable[Batch],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: RowBlocks,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention [N, Q, D] in float32: queries [Q, N, D], keys and values [S, H, D] of all slots.

    Rows of no run are zero.
    """
    heads, kv_heads = query.shape[0], keys.shape[1]
    mixed = torch.zeros((query.shape[1], heads, values.shape[-1]), device=query.device)
    for batch in batches:
        runs, _, count, _, width, _ = batch.mask.shape
        rows = query.index_select(1, batch.rows).float().view(kv_heads, -1, runs, width, query.shape[-1])
        rows = rows.permute(2, 0, 1, 3, 4).reshape(runs, kv_heads, -1, query.shape[-1])
        k, v = (_in_blocks(entries.index_select(0, batch.slots), runs, count) for entries in (keys, values))
        result = attend(rows, k, v, batch.mask, blocks, scale, softcap)
        result = result.view(runs, heads, width, -1).transpose(1, 2).flatten(0, 1)  # [B * n, Q, D]
        mixed.index_copy_(0, batch.rows, result)
    return mixed


def attend(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    blocks: RowBlocks,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of rows [B, H, G * n, D] to keys and values [B, H, C, K, D]: [B, H, G * n, D], all float32.

    `mask` is a batch's; a `softcap` bounds the scores by tanh (Gemma 2).
    """
    rows = (rows * scale).unsqueeze(2)
    scores = blocks.apply(rows, lambda part: _product(part, keys.transpose(-1, -2)))  # [B, H, C, G * n, K]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    by_head = scores.view(*scores.shape[:3], -1, *mask.shape[4:])  # [B, H, C, G, n, K]
    by_head.add_(mask)
    weights = scores.sub_(scores.amax((2, 4), keepdim=True)).exp_()
    mixed = blocks.apply(weights, lambda part: _product(part, values))
    return add_in_order(mixed) / add_in_order(weights.sum(-1, keepdim=True))


def add_in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum of parts [B, H, C, ...] over C, first to last; writes into `parts`."""
    first, *others = parts.unbind(2)
    for part in others:
        first.add_(part)
    return first


def _product(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """[B, H, C or 1, R, X] by [B, H, C, X, Y] -> [B, H, C, R, Y], one fixed product for each of B, H, C."""
    batch = others.shape[:3]
    rows = rows.expand(*batch, -1, -1).flatten(0, 2)
    return torch.bmm(rows, others.flatten(0, 2)).view(*batch, rows.shape[1], -1)


def _in_blocks(entries: torch.Tensor, runs: int, count: int) -> torch.Tensor:
    """Gathered keys or values [B * C * K, H, D] as float32 [B, H, C, K, D]."""
    blocks = entries.view(runs, count, -1, *entries.shape[1:]).permute(0, 3, 1, 2, 4)
    return blocks.to(torch.float32, memory_format=torch.contiguous_format)


def _run(kv: SequenceKv, offsets: Integers, first_row: int) -> Run:
    """The run of these scratch entries, which are packed one after the other."""
    first, last = int(offsets[0]), int(offsets[-1])
    if kv.is_chain:
        paths = [np.arange(last + 1)]
        branches, common = np.zeros_like(offsets), last + 1
    else:
        lineage = kv.ancestors(first)[: len(offsets)]  # [n, scratch]
        inner = set(kv.parents[first : last + 1])
        ends = [row for row, offset in enumerate(offsets.tolist()) if offset not in inner]
        paths = [np.flatnonzero(lineage[end]) for end in ends]
        branches = lineage[ends][:, offsets].argmax(0)  # the first path that a query is on
        common = int(np.count_nonzero(lineage[ends].all(0)))
    part = (kv.length + common) // KEYS_PER_BLOCK * KEYS_PER_BLOCK
    pieces = [_piece(kv, paths[0], SHARED, 0, part)]
    pieces += [_piece(kv, path, branch, part, kv.length + len(path)) for branch, path in enumerate(paths)]
    slots, key_positions, key_branches = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
    positions = kv.positions(first)[: len(offsets)]
    rows = first_row + offsets - first
    return Run(rows, positions, branches, slots, key_positions, key_branches)


def _piece(
    kv: SequenceKv, path: Integers, branch: int, start: int, stop: int
) -> tuple[Integers, Integers, Integers]:
    """Slots, positions and branches of a path's positions [start, stop), in whole blocks."""
    count = -(-(stop - start) // KEYS_PER_BLOCK) * KEYS_PER_BLOCK
    slots = np.full(count, kv.slots[0])
    committed = max(min(stop, kv.length) - start, 0)
    slots[:committed] = kv.slots[start : start + committed]
    scratch = path[max(start - kv.length, 0) : max(stop - kv.length, 0)]
    slots[committed : stop - start] = kv.slots[kv.length + scratch]
    positions = np.full(count, _NOWHERE)
    positions[: stop - start] = np.arange(start, stop)
    return slots, positions, np.full(count, branch)


def _batch(runs: list[Run], firsts: list[int], window: int | None, device: torch.device) -> Batch:
    queries = max(len(run.rows) for run in runs)
    keys = max(len(run.slots) - first for run, first in zip(runs, firsts, strict=True))
    starts = list(zip(runs, firsts, strict=True))
    rows = _stack([run.rows for run in runs], queries)
    slots = _stack([run.slots[first:] for run, first in starts], keys)
    positions = _stack([run.positions for run in runs], queries)[:, :, None]
    branches = _stack([run.branches for run in runs], queries)[:, :, None]
    key_positions = _stack([run.key_positions[first:] for run, first in starts], keys, _NOWHERE)[:, None]
    key_branches = _stack([run.key_branches[first:] for run, first in starts], keys)[:, None]
    behind = positions - key_positions  # [B, n, C * K]
    seen = (behind >= 0) & ((key_branches == branches) | (key_branches == SHARED))
    if window is not None:
        seen &= behind < window
    hidden = np.where(seen, np.float32(0), np.float32("-inf"))
    mask = hidden.reshape(len(runs), queries, -1, KEYS_PER_BLOCK).swapaxes(1, 2)[:, None, :, None]
    return Batch(*(torch.from_numpy(part).to(device) for part in (rows.ravel(), slots.ravel(), mask)))


def _stack(parts: Sequence[Integers], width: int, fill: int | None = None) -> Integers:
    """[B, width] with `fill` or its own last element behind each part."""
    return np.stack(
        [np.append(part, np.full(width - len(part), part[-1] if fill is None else fill)) for part in parts]
    )
