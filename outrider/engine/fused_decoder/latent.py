"""Multi-head latent attention: the keys and values of all heads are projections of one latent per token.

Only the latent and the rotated part of the key, which all heads share, are stored: as one kv head whose last
columns are its value. Each query is multiplied by its head's key projection, so that it can be compared with
latents. The attention result is a mixture of latents; each head's value projection is applied to it.
(DeepSeek-AI 2024, "DeepSeek-V2".)

Shapes: N packed tokens, C hidden width, Q query heads, R width of a latent, P rotated columns of a head, B
other columns of a head, V width of a head's values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.fused_decoder import modules
from outrider.engine.fused_decoder.joining import joined, with_rows
from outrider.engine.fused_decoder.known_norms import described
from outrider.engine.fused_decoder.modules import NotFused
from outrider.engine.fused_decoder.norm import RowNorm
from outrider.engine.linears import HeadLinears
from outrider.engine.loaded_model import Geometry

_LATENTS, _KEYS_AND_VALUES = "kv_a_proj_with_mqa", "kv_b_proj"
_QUERIES, _NARROW, _WIDE = "q_proj", "q_a_proj", "q_b_proj"
"""Queries are a projection of a token's row, or of a narrower row that is projected from it first."""


class LatentHeads(nn.Module):
    """Computes each token's queries and key, not yet rotated: [N, C] -> [N, Q + 1, P + R]."""

    def __init__(
        self,
        first: nn.Module,
        wide: nn.Module | None,
        norms: tuple[RowNorm | None, RowNorm],
        keys: HeadLinears,
        rotated: int,
    ) -> None:
        """`first` projects to queries [Q * (P + B)], or with `wide` to the narrow row that is normed and
        projected to queries by it, and to the key [P + R], whose latent is normed afterwards. `keys`
        [Q, R, B] takes the B columns of queries to the width of latents; `rotated` is P.
        """
        super().__init__()
        self.first, self.wide, self.keys = first, wide, keys
        self._narrow_norm, self._latent_norm = norms
        self._heads, self._latent, _ = keys.weight.shape
        self._head = self._latent + rotated

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        rows = self.first(x)
        queries, key = rows[:, : -self._head], rows[:, -self._head :]
        if self.wide is not None and self._narrow_norm is not None:
            queries = self.wide(self._narrow_norm(queries))
        queries = queries.unflatten(1, (self._heads, -1))
        result: Tensor = rows.new_empty(len(rows), self._heads + 1, self._head)
        rotated = self._head - self._latent
        result[:, :-1, :rotated] = queries[..., :rotated]
        result[:, :-1, rotated:] = self.keys(queries[..., rotated:])
        result[:, -1] = key
        self._latent_norm.inside(result[:, -1, rotated:])
        return result


class LatentOutput(nn.Module):
    """Computes attention's output from mixtures of latents: [N, Q * R] -> [N, C]."""

    def __init__(self, values: HeadLinears, output: nn.Module) -> None:
        """`values` [Q, V, R] projects latents to values."""
        super().__init__()
        self.values, self.output = values, output
        self._heads = len(values.weight)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        mixed = x.view(len(x), self._heads, x.shape[1] // self._heads)
        result: Tensor = self.output(self.values(mixed).flatten(1))
        return result


class LatentParts:
    """The modules of a layer's latent attention, without its output projection."""

    def __init__(self, attention: Any) -> None:
        narrow = getattr(attention, _WIDE, None) is not None
        self.first: list[Any] = modules.linears(attention, ((_NARROW if narrow else _QUERIES, _LATENTS),))
        self.queries: Any = modules.linear(attention, _WIDE if narrow else _QUERIES)
        self.narrow_norm = modules.norm(attention, "q_a_layernorm") if narrow else None
        self.norm = modules.norm(attention, "kv_a_layernorm")
        self.both: Any = modules.linear(attention, _KEYS_AND_VALUES)
        if type(self.both) is not nn.Linear or self.both.bias is not None:
            raise NotFused("the projection of its latents to keys and values is quantized or has a bias")
        self.latent: int = self.both.in_features
        self.rotated: int = self.first[1].out_features - self.latent
        self._interleaved: bool = getattr(getattr(attention, "config", None), "rope_interleave", False)

    def all(self) -> list[nn.Module]:
        """Every module with weights."""
        norms = [norm for norm in (self.narrow_norm, self.norm) if norm is not None]
        return [*self.first, self.queries, self.both, *norms]

    def kept(self, geometry: Geometry) -> Geometry:
        """The shape of what is stored for a token instead of keys and values."""
        width = self.rotated + self.latent
        return replace(geometry, kv_heads=1, head_dim=width, value_dim=self.latent, latent=True)

    def fused(
        self, output: nn.Module, heads: int, order: Tensor | None, like: Tensor
    ) -> tuple[LatentHeads, LatentOutput]:
        """Return what runs before the attention of Q `heads`, and what runs after it; `order` is that of
        `Turn`, [P].
        """
        columns, rows = self._columns(order), torch.arange(self.queries.out_features).view(heads, -1)
        plain = rows.shape[1] - self.rotated
        queries = torch.cat([rows[:, plain + columns], rows[:, :plain]], 1).flatten()
        key = torch.cat([self.latent + columns, torch.arange(self.latent)])
        before = queries if self.narrow_norm is None else torch.arange(self.first[0].out_features)
        first = with_rows(joined(self.first), torch.cat([before, len(before) + key]))
        wide = None if self.narrow_norm is None else with_rows(self.queries, queries)

        def normed(norm: nn.Module) -> RowNorm:
            return RowNorm(described(norm, like), like.dtype)

        norms = None if self.narrow_norm is None else normed(self.narrow_norm), normed(self.norm)
        both = self.both.weight.detach().unflatten(0, (heads, -1))
        keys = HeadLinears(both[:, :plain].transpose(1, 2))
        made = LatentHeads(first, wide, norms, keys, self.rotated)
        return made, LatentOutput(HeadLinears(both[:, plain:]), output)

    def _columns(self, order: Tensor | None) -> Tensor:
        """The order [P] in which the weights' rotated columns are rotated by halves."""
        columns = torch.arange(self.rotated)
        if order is not None:
            return order
        return columns.view(-1, 2).t().flatten() if self._interleaved else columns


def latent_parts(attention: nn.Module) -> LatentParts | None:
    """The parts of a layer's attention; None: it has no latents."""
    return LatentParts(attention) if getattr(attention, _KEYS_AND_VALUES, None) is not None else None
