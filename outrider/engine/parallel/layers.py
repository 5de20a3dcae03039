"""What a rank's fused decoder needs from the other ranks: sums of products, and their columns of the
logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from outrider.engine.fused_decoder import FusedDecoder
from outrider.engine.fused_decoder.decoder import Experts, ForeignMlp, GatedMlp, LayerSettings, PlainMlp
from outrider.engine.parallel.ranks import Ranks


class SharedLinear(nn.Module):
    """A linear layer whose input columns are divided among the ranks."""

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part, self._ranks = part, ranks

    def forward(self, x: Tensor) -> Tensor:
        """[N, part of in] -> [N, out]."""
        product: Tensor = self.part(x)
        return self._ranks.sum(product)


class SharedEmbedding(nn.Module):
    """An embedding whose rows are divided evenly among the ranks."""

    def __init__(self, part: nn.Embedding, ranks: Ranks) -> None:
        super().__init__()
        self.part, self._ranks = part, ranks
        self._first = ranks.rank * part.num_embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        """[N] int64 -> [N, C]: rows of other ranks count as zeros here, and sums with zeros are exact."""
        places = tokens - self._first
        ours = (places >= 0) & (places < self.part.num_embeddings)
        rows = self.part(torch.where(ours, places, 0))
        return self._ranks.sum(rows.masked_fill(~ours[:, None], 0))


class SharedHead(nn.Module):
    """An output layer whose rows are divided evenly among the ranks; those from `size` on are padding."""

    def __init__(self, part: nn.Module, ranks: Ranks, size: int) -> None:
        super().__init__()
        self.part, self._ranks, self._size = part, ranks, size

    def forward(self, x: Tensor) -> Tensor:
        """[W, C] -> [W, V] on rank 0; on other ranks only their own columns."""
        logits: Tensor = self.part(x)
        return self._ranks.columns(logits)[:, : self._size]


def connect(decoder: FusedDecoder, ranks: Ranks, vocabulary: int, *, together: bool) -> None:
    """Make a rank's decoder compute the whole model's results; `together`: queries and keys have norms over
    all heads."""
    for layer in decoder.stack:
        if together:
            layer.settings = _norms_together(layer.settings, ranks)
        layer.output = SharedLinear(layer.output, ranks)
        match layer.mlp:
            case Experts():
                layer.mlp.together = ranks.sum
            case GatedMlp() | PlainMlp():
                layer.mlp.down = SharedLinear(layer.mlp.down, ranks)
            case ForeignMlp():  # which no rank has a part of
                pass
            case _:
                assert_never(layer.mlp)
    embed: Any = decoder.embed
    decoder.embed = SharedEmbedding(embed, ranks)
    decoder.head = SharedHead(decoder.head, ranks, vocabulary)


def _norms_together(settings: LayerSettings, ranks: Ranks) -> LayerSettings:
    """Return settings whose norms take means over the heads of all ranks. Ranks have equally many heads, and
    each kv head counts equally often."""
    norm = settings.head_norm
    if norm is not None:  # with one query head and one kv head it looked like a norm over each head
        queries, keys = (replace(norm, weight=weight) for weight in norm.weight)
        settings = replace(settings, head_norm=None, whole_norms=(queries, keys))
    return replace(settings, whole_means=lambda means: ranks.sum(means) / ranks.size)
