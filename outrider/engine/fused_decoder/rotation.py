"""Rotary positions of queries and keys. Keys and values are stored in the same pass.

(Su et al. 2021, "RoFormer".) Columns i and i + R / 2 of a head form a pair, as in transformers; R is D in
most models, and 0 in those without rotary positions.

Shapes: N packed tokens, Q query heads, H kv heads, D head width, R columns of a head that are rotated, S
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.engine.cpu.layer import Angles, RotationKernel, runs
from outrider.engine.fused_decoder.decoder import Growth, LayerSettings, Norm
from outrider.engine.fused_decoder.norm import RowNorm

Room: TypeAlias = tuple[Tensor, Tensor]
"""Entries [S, 2 H, D] of keys and values, or [S, H, D] of latents, and the slots [N or fewer] that the first
tokens are stored in."""


class Rotations:
    """The rotations of a step's positions [N], in the form that the kernel or torch takes."""

    def __init__(self, positions: Tensor, angles: Angles, growth: Growth | None = None) -> None:
        self.positions, self._angles, self._growth = positions, angles, growth

    @cached_property
    def table(self) -> Tensor:
        """See `Angles.table`."""
        return self._angles.table(self.positions)

    @cached_property
    def complex(self) -> Tensor:
        """Complex rotations [N, 1, R / 2]."""
        angles = self.positions.float()[:, None] * self._angles.frequencies
        return torch.polar(self._angles.stretch.expand_as(angles), angles)[:, None]

    @cached_property
    def factors(self) -> Tensor | None:
        """The factors of queries, see `Growth.factors`; None where all are 1."""
        if self._growth is None or int(self.positions.max()) < self._growth.period:
            return None
        return self._growth.factors(self.positions)


Rotation: TypeAlias = Callable[[Tensor, Rotations, Room], None]
"""Rotates queries and keys of qkv [N, Q + 2 H, D] in place, and stores keys and values."""


def make_rotation(settings: LayerSettings, dtype: torch.dtype, device: torch.device) -> Rotation:
    """Return the rotation of a layer, in a model of this dtype on a device."""
    head_norm = settings.head_norm
    norm = None if head_norm is None else RowNorm(head_norm, dtype)
    plain = partial(_rotate, settings.query_heads, settings.kv_heads, norm)
    return partial(_run, _kernel(settings, dtype), dtype, plain) if runs(dtype, device) else plain


def after_norms(settings: LayerSettings, dtype: torch.dtype, rotation: Rotation) -> Rotation:
    """Return the rotation of a layer with one norm over all heads of queries, and one over all heads of
    keys."""
    assert settings.whole_norms is not None, "it has such norms"
    edges = settings.query_heads, settings.query_heads + settings.kv_heads
    if settings.whole_means is None:
        norms = [RowNorm(norm, dtype).inside for norm in settings.whole_norms]
        apply = partial(_each, norms)
    else:
        apply = partial(_by_means, settings.whole_norms, settings.whole_means)

    def normed(qkv: Tensor, rotations: Rotations, room: Room) -> None:
        queries, keys, _ = qkv.tensor_split(edges, 1)
        apply([queries.flatten(1), keys.flatten(1)])
        rotation(qkv, rotations, room)

    return normed


def after_value_norm(settings: LayerSettings, dtype: torch.dtype, rotation: Rotation) -> Rotation:
    """Return the rotation of a layer that norms each head of values."""
    assert settings.value_norm is not None, "it has such a norm"
    norm, first = RowNorm(settings.value_norm, dtype), settings.query_heads + settings.kv_heads

    def normed(qkv: Tensor, rotations: Rotations, room: Room) -> None:
        values = qkv[:, first:]
        values.copy_(norm(values))
        rotation(qkv, rotations, room)

    return normed


def _each(norms: Sequence[Callable[[Tensor], None]], rows: Sequence[Tensor]) -> None:
    for norm, part in zip(norms, rows, strict=True):
        norm(part)


def _by_means(norms: Sequence[Norm], means: Callable[[Tensor], Tensor], rows: Sequence[Tensor]) -> None:
    """Normalise rows in place, of which this process has only some columns."""
    here = torch.stack([part.float().square().mean(-1) for part in rows], -1)
    for norm, part, mean in zip(norms, rows, means(here).unbind(-1), strict=True):
        part.copy_(part.float() * torch.rsqrt(mean + norm.eps)[:, None] * norm.weight)


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate each head by its position: x [N, heads, D], complex rotations [N, 1, R / 2] -> float32."""
    half = rotations.shape[-1]
    exact = x.float()
    pairs = torch.complex(exact[..., :half], exact[..., half : 2 * half]).mul_(rotations)
    return torch.cat((pairs.real, pairs.imag, exact[..., 2 * half :]), -1)


def _kernel(settings: LayerSettings, dtype: torch.dtype) -> RotationKernel:
    norm = settings.head_norm
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    heads = settings.query_heads, settings.kv_heads, settings.stored
    return RotationKernel(dtype, heads, weight, eps)


def _run(
    kernel: RotationKernel, dtype: torch.dtype, plain: Rotation, qkv: Tensor, rotations: Rotations, room: Room
) -> None:
    if qkv.dtype == dtype:
        kernel(qkv, rotations.table, rotations.positions, *room)
    else:
        plain(qkv, rotations, room)


def _rotate(
    query_heads: int, kv_heads: int, norm: RowNorm | None, qkv: Tensor, rotations: Rotations, room: Room
) -> None:
    heads = qkv[:, : query_heads + kv_heads]
    heads.copy_(rotate(heads if norm is None else norm(heads), rotations.complex))
    entries, slots = room
    if kv_heads:
        entries.index_copy_(0, slots, qkv[: len(slots), query_heads:])
