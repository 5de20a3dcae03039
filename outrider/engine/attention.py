"""Attention over paged keys and values, plugged into a transformers model.

The model computes queries, keys and values of the packed tokens and calls us in place of its own
attention. We store the new keys and values in their slots, gather what each group of sequences sees, and
return the mixed values. Which tokens those are stands in the step that is current during the forward.

On the CPU the arithmetic is float32 whatever the model's is. It takes no longer, and the order of
additions, which depends on the batch and on a tree's shape, then hardly ever shows in a 16-bit result.

Shapes: N packed tokens, Q query heads, H kv heads, G = Q / H, D head width, S slots; B, n, L as in
`outrider.engine.step`. Query rows are folded as [B, H, G * n, D]: one problem per kv head instead of one
per query head, which reads every key once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from outrider.engine.kv.pages import Move
from outrider.engine.loaded_model import Geometry
from outrider.engine.step import Group, PackedStep, View
from outrider.protocol.errors import ModelError

_names = itertools.count()
_NEUTRAL = {"dropout", "is_causal", "position_ids", "use_cache", "cache_position", "output_attentions"}
"""Arguments of attention functions that change nothing here."""


class PagedAttention:
    """Keys and values of all slots, and the attention function that works on them.

    `name` is what the model's attention implementation is to be set to.

    Raises:
        ModelError: the device has no memory for so many slots.
    """

    def __init__(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        try:
            self.allocate(geometry, num_slots, dtype, device)
        except RuntimeError as error:
            raise ModelError(f"kv_tokens: no memory for {num_slots} tokens ({error}); lower it") from error
        self.unknown: set[str] = set()
        """Arguments that a layer passed and that we know nothing of."""
        self.name = f"outrider_{next(_names)}"
        self._noted: set[int] = set()
        """Layers that have called."""
        self._step: PackedStep | None = None
        _register(self)

    def allocate(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the memory of all slots."""
        shape = (geometry.num_layers, num_slots, geometry.kv_heads)
        self.keys = torch.zeros((*shape, geometry.head_dim), dtype=dtype, device=device)
        self.values = torch.zeros((*shape, geometry.value_dim), dtype=dtype, device=device)

    def stores(self) -> tuple[torch.Tensor, ...]:
        """All memory of keys and values, each [layers, slots, heads, width]."""
        return self.keys, self.values

    @contextmanager
    def during(self, step: PackedStep) -> Iterator[None]:
        """Make `step` the one that attention calls serve."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def move(self, moves: Sequence[Move]) -> None:
        """Copy entries between slots in all layers; all reads come before all writes."""
        if not moves:
            return
        pairs = torch.tensor(moves, dtype=torch.int64, device=self.keys.device)  # [moves, 2]
        for entries in (self.keys, self.values):
            entries.index_copy_(1, pairs[:, 1], entries.index_select(1, pairs[:, 0]))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention function: query [1, Q, N, D], key and value [1, H, N, D] -> [1, N, Q, D].

        `softcap` bounds the scores by tanh (Gemma 2); `s_aux` [Q] are attention sinks (gpt-oss).
        """
        step = self._step
        assert step is not None, "attention outside of a step"
        layer: int = module.layer_idx  # type: ignore[assignment]
        self.note(layer, others)
        keys, values = self.keys[layer], self.values[layer]
        stored = step.slots.shape[0]
        keys.index_copy_(0, step.slots, key[0, :, :stored].transpose(0, 1))
        values.index_copy_(0, step.slots, value[0, :, :stored].transpose(0, 1))
        explicit = softcap is not None or s_aux is not None
        mixed: list[torch.Tensor] = []
        for group in step.groups:
            view = step.view(group, sliding_window, explicit)
            rows, k, v = _gather(group, view, query, keys, values, step.dtype)
            rows = mixed_values(rows, k, v, view, scaling, softcap, s_aux)
            mixed.append(_unfold(group, rows, query.shape[1]))
        if query.shape[2] > stored:
            padding = (query.shape[2] - stored, query.shape[1], values.shape[-1])
            mixed.append(query.new_zeros(padding, dtype=step.dtype))
        packed = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return packed.to(query.dtype).contiguous().unsqueeze(0), None  # some models take a view of it

    def note(self, layer: int, others: Mapping[str, Any]) -> None:
        """Remember what a layer asks for when it calls first; the self check looks at it."""
        if layer not in self._noted:
            self._noted.add(layer)
            self.unknown.update({name for name, given in others.items() if given is not None} - _NEUTRAL)


def _register(attention: PagedAttention) -> None:
    """Make `attention` known to transformers, which must not keep its tensors alive."""
    attend = weakref.WeakMethod(attention.attend)

    def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        method = attend()
        assert method is not None, "the runner of this model is gone"
        return method(*args, **kwargs)

    AttentionInterface.register(attention.name, call)


def _gather(
    group: Group,
    view: View,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A group's queries [B, H or Q, rows, D], keys [B, H or Q, L, D] and values, in `dtype`."""
    batch, heads, query_heads = len(group.members), keys.shape[1], query.shape[1]
    packed = query[0].to(dtype)
    packed = packed[:, group.start : group.stop] if group.rows is None else packed.index_select(1, group.rows)
    rows = packed.view(query_heads, batch, group.width, -1).transpose(0, 1)  # [B, Q, n, D]
    k, v = (
        entries.index_select(0, view.slots).to(dtype).view(batch, -1, *entries.shape[1:]).transpose(1, 2)
        for entries in (keys, values)
    )
    if view.folded:
        return rows.reshape(batch, heads, -1, rows.shape[-1]), k, v
    repeats = query_heads // heads
    return rows, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def _unfold(group: Group, mixed: torch.Tensor, query_heads: int) -> torch.Tensor:
    """Attention output of a group as [its tokens, Q, D]."""
    batch, width = len(group.members), group.width
    rows = (
        mixed.reshape(batch, query_heads, width, -1).transpose(1, 2).reshape(batch * width, query_heads, -1)
    )
    return rows if group.valid is None else rows.index_select(0, group.valid)


def mixed_values(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: View,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What rows [B, H or Q, rows, D] see of keys and values [B, H or Q, L, D].

    With a softcap or sinks [Q], the rows must be folded.
    """
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(
            rows, keys, values, attn_mask=view.mask, is_causal=view.causal, scale=scaling
        )
    return _explicit_attention(rows, keys, values, view.mask, scaling, softcap, sinks)


def _explicit_attention(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of folded rows [B, H, G * n, D] in plain operations, for what the fused kernels lack."""
    scale = rows.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(rows, keys.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        batch, heads, count, _ = scores.shape
        column = sinks.view(heads, -1).repeat_interleave(count * heads // sinks.numel(), 1)
        scores = torch.cat([scores, column[None, :, :, None].expand(batch, -1, -1, 1).to(scores.dtype)], -1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(rows.dtype)
    return torch.matmul(weights[..., : keys.shape[-2]], values)
