"""Attention over paged keys and values, plugged into a transformers model.

The model computes queries, keys and values of the packed tokens and calls us in place of its own
attention. We store the new keys and values in their slots, and return the mixed values of what each token
sees. The current step says which tokens those are.

Keys and values of a token lie side by side: one copy stores both, one copy gathers both, and a CPU kernel
reads them in place. Where no such kernel applies, torch computes. On the CPU torch computes in float32
whatever the model's dtype: this takes no longer, and the order of additions, which depends on the batch and
on a tree's shape, then hardly ever shows in a 16-bit result.

Shapes: N packed tokens, Q query heads, H kv heads, G = Q / H, D and V widths of keys and values, S slots; B,
n, L as in `outrider.engine.step`. Query rows are folded as [B, H, G * n, D]: one problem per kv head instead
of one per query head, which reads every key once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from outrider.engine.cpu.layer import AttentionKernel, attends
from outrider.engine.cpu.recording import recording
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.fused_decoder.decoder import Scores
from outrider.engine.kv.pages import Move
from outrider.engine.loaded_model import Geometry
from outrider.engine.step import Group, PackedStep, View
from outrider.protocol.errors import ModelError

_names = itertools.count()
NEUTRAL = {
    *("dropout", "is_causal", "position_ids", "use_cache", "cache_position"),
    *("output_attentions", "output_router_logits"),
}
"""Arguments of attention functions that change nothing here."""


class Attention:
    """Keys and values of all slots, and the attention function that works on them.

    `name` is the value to which the model's attention implementation has to be set.

    Raises:
        ModelError: the device has no memory for `num_slots` slots.
    """

    def __init__(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        try:
            self.allocate(geometry, num_slots, dtype, device)
        except RuntimeError as error:
            raise ModelError(f"kv_tokens: no memory for {num_slots} tokens ({error}); lower it") from error
        self.unknown: set[str] = set()
        """Names of the arguments that a layer passed and that are not known here."""
        self.name = f"outrider_{next(_names)}"
        self.step: Any = None
        """The step that calls of `attend` belong to."""
        self._noted: set[int] = set()
        """Numbers of the layers that have called `attend`."""
        register_attention(self.name, self.attend)

    def allocate(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the memory of all slots."""
        raise NotImplementedError

    def stores(self) -> tuple[Tensor, ...]:
        """All memory of keys and values, each [layers, slots, ...]."""
        raise NotImplementedError

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the tokens' keys [N, H, D] and values [N, H, V] to their slots."""
        raise NotImplementedError

    def mix(self, layer: int, queries: Tensor, scores: Scores) -> Tensor:
        """Return the attention result [N, Q, V] of the queries [N, Q, D]."""
        raise NotImplementedError

    @contextmanager
    def during(self, step: Any) -> Iterator[None]:
        """Make `step` the one that calls of `attend` belong to."""
        self.step = step
        try:
            yield
        finally:
            self.step = None

    def move(self, moves: Sequence[Move]) -> None:
        """Copy entries between slots in all layers; all reads come before all writes."""
        for entries in self.stores() if moves else ():
            pairs = torch.tensor(moves, dtype=torch.int64, device=entries.device)  # [moves, 2]
            entries.index_copy_(1, pairs[:, 1], entries.index_select(1, pairs[:, 0]))

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
        """transformers' attention function: query [1, Q, N, D], key and value [1, H, N, D] -> [1, N, Q, V].

        `softcap` bounds the scores by tanh (Gemma 2); `s_aux` [Q] are attention sinks (gpt-oss).
        """
        layer: int = module.layer_idx  # type: ignore[assignment]
        self._note(layer, others)
        self.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = Scores(factor, sliding_window, softcap, s_aux)
        return self.mix(layer, query[0].transpose(0, 1), scores).unsqueeze(0), None

    def _note(self, layer: int, others: Mapping[str, Any]) -> None:
        """Remember what a layer asks for when it calls first; the self check looks at it."""
        if layer not in self._noted:
            self._noted.add(layer)
            self.unknown.update({name for name, given in others.items() if given is not None} - NEUTRAL)


class PagedAttention(Attention):
    """Attention by a CPU kernel, shared by the workers, if it supports the heads, otherwise by torch."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        workers: WorkerPool | None = None,
    ) -> None:
        super().__init__(geometry, num_slots, dtype, device)
        self.dtype, self.device = dtype, device
        """The model's dtype and device."""
        runs = attends(geometry.head_dim, dtype, device)
        self.kernel = AttentionKernel(dtype, self._kv_heads, self._values_at, workers) if runs else None

    def allocate(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """See `Attention.allocate`."""
        self._widths = geometry.head_dim, geometry.value_dim
        self._kv_heads, self._values_at = geometry.kv_heads, geometry.values_at
        shape = (geometry.num_layers, num_slots, self._values_at + self._kv_heads * geometry.value_dim)
        self._entries = torch.zeros(shape, dtype=dtype, device=device)

    def stores(self) -> tuple[Tensor, ...]:
        """See `Attention.stores`."""
        return (self._entries,)

    @property
    def keys(self) -> Tensor:
        """[layers, S, H, D]"""
        return self._apart(self._entries)[0]

    @property
    def values(self) -> Tensor:
        """[layers, S, H, V]"""
        return self._apart(self._entries)[1]

    def place(self, layer: int) -> tuple[PagedAttention, int]:
        """Return the object that holds a layer's keys and values, and the layer's number in it."""
        return self, layer

    def room(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's entries, and the slots [N or fewer] that the step writes. Entries are [S, 2 H, D]
        with V equal to D, or [S, H, D] where values are columns of keys.
        """
        entries = self._entries[layer]
        return entries.view(len(entries), -1, self._widths[0]), self.step.slots

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `Attention.store`."""
        slots = self.step.slots
        for place, given in zip(self._apart(self._entries[layer]), (key, value), strict=True):
            place.index_copy_(0, slots, given[: len(slots)])

    def mix(self, layer: int, queries: Tensor, scores: Scores) -> Tensor:
        """See `Attention.mix`; queries are of the model's dtype or float32."""
        step: PackedStep = self.step
        kernel = self.kernel
        if (under_way := recording()) is not None:
            under_way.next_stretch()
        if queries.stride()[1:] != (queries.shape[2], 1):
            queries = queries.contiguous()
        shape = (*queries.shape[:2], self._widths[1])
        padded = len(queries) > len(step.slots)
        mixed = queries.new_zeros(shape) if padded else queries.new_empty(shape)
        for group in step.groups:
            part = slice(group.start, group.stop)
            if kernel is not None and queries.dtype == self.dtype:
                plain, bounds = step.plain_view(group, scores.window), (scores.softcap, scores.sinks)
                kernel(queries[part], self._entries[layer], plain, scores.scaling, mixed[part], *bounds)
                continue
            view = step.view(group, scores.window, fold=not scores.simple)
            seen = self._attended(layer, _rows(group, queries, step.dtype), view, scores)  # [B, n, Q, V]
            if group.valid is not None:
                seen = seen.flatten(0, 1).index_select(0, group.valid)
            mixed[part].view(seen.shape).copy_(seen)
        return mixed

    def _attended(self, layer: int, rows: Tensor, view: View, scores: Scores) -> Tensor:
        """Return the attention result [B, n, Q, V] of a group's queries [B, Q, n, D]."""
        batch, query_heads, _, width = rows.shape
        both = self._entries[layer].index_select(0, view.slots).to(rows.dtype)
        both = both.view(batch, -1, both.shape[1])
        keys, values = (part.transpose(1, 2) for part in self._apart(both))  # [B, H, L, D]
        if view.folded:
            rows = rows.view(batch, self._kv_heads, -1, width)
        else:
            repeats = query_heads // self._kv_heads
            keys, values = _repeated(keys, repeats), _repeated(values, repeats)
        seen = _mixed_values(rows, keys, values, view, scores)
        return seen.reshape(batch, query_heads, -1, seen.shape[-1]).transpose(1, 2)

    def _apart(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the keys [..., H, D] and values [..., H, V] of entries."""
        width, heads = self._kv_heads * self._widths[0], (self._kv_heads, -1)
        keys, values = entries[..., :width], entries[..., self._values_at :]
        return keys.view(*keys.shape[:-1], *heads), values.view(*keys.shape[:-1], *heads)


def register_attention(name: str, method: Callable[..., tuple[Tensor, None]]) -> None:
    """Make a method known to transformers as the attention function `name`. transformers must not keep the
    method's object and its tensors alive."""
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        alive = found()
        assert alive is not None, "the object of this attention is gone"
        return alive(*args, **kwargs)

    AttentionInterface.register(name, call)


def _rows(group: Group, queries: Tensor, dtype: torch.dtype) -> Tensor:
    """A group's queries [B, Q, n, D] in `dtype`, contiguous; queries are [N, Q, D]."""
    packed = queries[group.start : group.stop] if group.rows is None else queries.index_select(0, group.rows)
    shape = (len(group.members), group.width, *queries.shape[1:])
    rows = packed.new_empty((shape[0], shape[2], shape[1], shape[3]), dtype=dtype)
    return rows.copy_(packed.view(shape).transpose(1, 2))


def _repeated(heads: Tensor, times: int) -> Tensor:
    """Repeat each head of [B, H, L, D]: [B, H * times, L, D]; a view if there is one head."""
    return heads.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def _mixed_values(rows: Tensor, keys: Tensor, values: Tensor, view: View, scores: Scores) -> Tensor:
    """Return the attention result [B, H or Q, rows, V] of rows [B, H or Q, rows, D] over keys and values.

    Keys are [B, H or Q, L, D], values [B, H or Q, L, V].

    Rows must be folded unless the scores are simple.
    """
    if scores.simple:
        return scaled_dot_product_attention(
            rows, keys, values, attn_mask=view.mask, is_causal=view.causal, scale=scores.scaling
        )
    found = torch.matmul(rows, keys.transpose(-1, -2)) * scores.scaling
    if scores.softcap is not None:
        found = torch.tanh(found / scores.softcap) * scores.softcap
    if view.mask is not None:
        found = found + view.mask
    if scores.sinks is not None:
        batch, heads, count, _ = found.shape
        column = scores.sinks.view(heads, -1).repeat_interleave(count * heads // scores.sinks.numel(), 1)
        found = torch.cat([found, column[None, :, :, None].expand(batch, -1, -1, 1).to(found.dtype)], -1)
    weights = torch.softmax(found, dim=-1, dtype=torch.float32).to(rows.dtype)
    return torch.matmul(weights[..., : keys.shape[-2]], values)
