"""Paged attention with the keys and values of a token side by side.

One copy stores both and one gathers both, and a kernel of the CPU reads them where they are. Fused decoders,
whose queries, keys and values come out of one product, need it so; models that run their own modules take it
where there is the kernel. Otherwise it is the attention of `outrider.engine.attention`, with the same planned
steps, groups and views.

Shapes: N packed tokens, Q query heads, H kv heads, G = Q / H, D head width, S slots; B, n, L as in
`outrider.engine.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.engine.attention import PagedAttention, mixed_values
from outrider.engine.cpu.layer import AttentionKernel, attends
from outrider.engine.fused_decoder.decoder import Scores
from outrider.engine.kv.pages import Move
from outrider.engine.loaded_model import Geometry
from outrider.engine.step import Group, View


class FusedAttention(PagedAttention):
    """Entries [layers, S, 2 H, D] in place of `keys` and `values`: of each token its key heads, then its
    value heads.
    """

    def __init__(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, num_slots, dtype, device)
        self.dtype, self.device = dtype, device
        """Of the model."""
        self._kernel = AttentionKernel(dtype) if attends(geometry.head_dim, dtype, device) else None

    def allocate(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """See `PagedAttention.allocate`."""
        shape = (geometry.num_layers, num_slots, 2 * geometry.kv_heads, geometry.head_dim)
        self._entries = torch.zeros(shape, dtype=dtype, device=device)

    def stores(self) -> tuple[Tensor, ...]:
        """See `PagedAttention.stores`."""
        return (self._entries,)

    def move(self, moves: Sequence[Move]) -> None:
        """See `PagedAttention.move`."""
        if moves:
            pairs = torch.tensor(moves, dtype=torch.int64, device=self._entries.device)  # [moves, 2]
            self._entries.index_copy_(1, pairs[:, 1], self._entries.index_select(1, pairs[:, 0]))

    def room(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's entries [S, 2 H, D], and the slots [N or fewer] where the step's go."""
        assert self._step is not None, "attention outside of a step"
        return self._entries[layer], self._step.slots

    def mix(self, layer: int, qkv: Tensor, scores: Scores) -> Tensor:
        """What the queries of qkv [N, Q + 2 H, D], stored before, see: [N, Q * D]."""
        queries = qkv[:, : qkv.shape[1] - self._entries.shape[2]]
        return self._mixed(layer, queries, scores).view(len(qkv), -1)

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """See `PagedAttention.attend`."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        self.note(layer, others)
        entries, slots = self.room(layer)
        for place, given in zip(entries.chunk(2, 1), (key, value), strict=True):
            place.index_copy_(0, slots, given[0, :, : len(slots)].transpose(0, 1))
        queries = query[0].transpose(0, 1)
        if queries.stride()[1:] != (queries.shape[2], 1):
            queries = queries.contiguous()
        scale = queries.shape[2] ** -0.5 if scaling is None else scaling
        return self._mixed(layer, queries, Scores(scale, sliding_window, softcap, s_aux)).unsqueeze(0), None

    def _mixed(self, layer: int, queries: Tensor, scores: Scores) -> Tensor:
        """What queries [N, Q, D], of the model's dtype or float32, see: as many."""
        step = self._step
        assert step is not None, "attention outside of a step"
        entries, kernel = self._entries[layer], self._kernel
        padded = len(queries) > step.slots.shape[0]
        mixed = queries.new_zeros(queries.shape) if padded else queries.new_empty(queries.shape)
        for group in step.groups:
            if kernel is not None and scores.simple and queries.dtype == self.dtype:
                part, plain = slice(group.start, group.stop), step.plain_view(group, scores.window)
                kernel(queries[part], entries, plain, scores.scaling, mixed[part])
                continue
            view = step.view(group, scores.window, fold=not scores.simple)
            seen = _attended(_rows(group, queries, step.dtype), entries, view, scores)  # [B, n, Q, D]
            if group.valid is not None:
                seen = seen.flatten(0, 1).index_select(0, group.valid)
            mixed[group.start : group.stop].view(seen.shape).copy_(seen)
        return mixed


def _rows(group: Group, queries: Tensor, dtype: torch.dtype) -> Tensor:
    """A group's queries [B, Q, n, D] in `dtype`, contiguous; queries are [N, Q, D]."""
    packed = queries[group.start : group.stop] if group.rows is None else queries.index_select(0, group.rows)
    shape = (len(group.members), group.width, *queries.shape[1:])
    rows = packed.new_empty((shape[0], shape[2], shape[1], shape[3]), dtype=dtype)
    return rows.copy_(packed.view(shape).transpose(1, 2))


def _attended(rows: Tensor, entries: Tensor, view: View, scores: Scores) -> Tensor:
    """What the queries [B, Q, n, D] of a group see of a layer's entries [S, 2 H, D]: [B, n, Q, D]."""
    batch, query_heads, _, width = rows.shape
    both = entries.index_select(0, view.slots).to(rows.dtype)
    keys, values = both.view(batch, -1, *entries.shape[1:]).transpose(1, 2).chunk(2, 1)  # [B, H, L, D]
    if view.folded:
        rows = rows.view(batch, keys.shape[1], -1, width)
    else:
        repeats = query_heads // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    seen = mixed_values(rows, keys, values, view, scores.scaling, scores.softcap, scores.sinks)
    return seen.reshape(batch, query_heads, -1, width).transpose(1, 2)
