"""What a fused decoder of one rank asks of the others: sums of products, and logits side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from outrider.engine.fused_decoder import FusedDecoder
from outrider.engine.fused_decoder.decoder import Experts, ForeignMlp, GatedMlp, LayerSettings, PlainMlp
from outrider.engine.parallel.ranks import Ranks


class SharedLinear(nn.Module):
    """A linear layer of whose input each rank has some columns."""

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part, self._ranks = part, ranks

    def forward(self, x: Tensor) -> Tensor:
        """[N, part of in] -> [N, out]."""
        product: Tensor = self.part(x)
        return self._ranks.sum(product)


class SharedEmbedding(nn.Module):
    """An embedding of whose vocabulary each rank has as many rows, from `first` on."""

    def __init__(self, part: nn.Embedding, ranks: Ranks) -> None:
        super().__init__()
        self.part, self._ranks = part, ranks
        self._first = ranks.rank * part.num_embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        """[N] int64 -> [N, C]: rows of other ranks are zeros here, and sums with zeros are exact."""
        places = tokens - self._first
        ours = (places >= 0) & (places < self.part.num_embeddings)
        rows = self.part(torch.where(ours, places, 0))
        return self._ranks.sum(rows.masked_fill(~ours[:, None], 0))


class SharedHead(nn.Module):
    """An output layer of whose vocabulary each rank has as many rows; behind `size` are none."""

    def __init__(self, part: nn.Module, ranks: Ranks, size: int) -> None:
        super().__init__()
        self.part, self._ranks, self._size = part, ranks, size

    def forward(self, x: Tensor) -> Tensor:
        """[W, C] -> [W, V] on rank 0; on the others what they have of it."""
        logits: Tensor = self.part(x)
        return self._ranks.columns(logits)[:, : self._size]


def connect(decoder: FusedDecoder, ranks: Ranks, vocabulary: int, *, together: bool) -> None:
    """Have a rank's decoder give the whole model's results; `together` tells of norms over all heads."""
    for layer in decoder.stack:
        if together:
            layer.settings = _norms_together(layer.settings, ranks)
        layer.output = SharedLinear(layer.output, ranks)
        match layer.mlp:
            case Experts():
                layer.mlp.together = ranks.sum
            case GatedMlp() | PlainMlp():
                layer.mlp.down = SharedLinear(layer.mlp.down, ranks)
            case ForeignMlp():  # of which no rank has a part
                pass
            case _:
                assert_never(layer.mlp)
    embed: Any = decoder.embed
    decoder.embed = SharedEmbedding(embed, ranks)
    decoder.head = SharedHead(decoder.head, ranks, vocabulary)


def _norms_together(settings: LayerSettings, ranks: Ranks) -> LayerSettings:
    """With means over the heads of all ranks, who have as many; each kv head counts equally often."""
    norm = settings.head_norm
    if norm is not None:  # of one query head and one kv head: it looked like one over each head
        queries, keys = (replace(norm, weight=weight) for weight in norm.weight)
        settings = replace(settings, head_norm=None, whole_norms=(queries, keys))
    return replace(settings, whole_means=lambda means: ranks.sum(means) / ranks.size)
