"""An MTP layer as a draft head: the layer that a target's checkpoint brings to predict a token more.

DeepSeek V3, GLM 4.5 and Qwen 3.5 are trained with such layers (multi-token prediction). The layer joins a
token's embedding with the target's hidden state of the token before, runs one of the target's own decoder
layers, and shares the target's embedding and output layer. Its result is the feature of the next row of a
chain: the same layer predicts each further token. The modules are those of transformers; only their attention
is replaced.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2.

Shapes: as in `outrider.engine.heads.base`; H kv heads.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from outrider.engine.attention import NEUTRAL, register_attention
from outrider.engine.heads.base import Attend, Head, Rows
from outrider.protocol.errors import ModelError

_names = itertools.count()


class MtpHead(Head):
    """The first MTP layer of a target, with its embedding and output layer."""

    kind = "mtp"

    def __init__(
        self,
        layer: nn.Module,
        config: Any,
        rotary: nn.Module,
        embedding: nn.Embedding,
        head: nn.Linear,
        output_layer: int,
    ) -> None:
        """`layer` is transformers' `MtpLayer`, `config` the one that it was made with. `output_layer` is the
        number of the target's layers, the number that its output layer has as a feature layer."""
        super().__init__()
        self.layer, self.rotary, self.embedding, self.head = layer, rotary, embedding, head
        self.feature_layers = (output_layer,)
        kinds = "layer_type" in inspect.signature(rotary.forward).parameters
        self._kind = {"layer_type": config.layer_types[0]} if kinds else {}
        """For rotary positions that differ between kinds of layers, as in Mellum: the layer's kind."""
        self.vocab_size, self.target_hidden_size = embedding.weight.shape
        self.dtype, self.device = embedding.weight.dtype, embedding.weight.device
        self._call: tuple[Attend, Rows] | None = None
        """What the running forward's attention uses; None: no forward runs, or its attention was computed."""
        config._attn_implementation = f"outrider_mtp_{next(_names)}"
        register_attention(config._attn_implementation, self.attention)

    def fuse(self, features: Tensor) -> Tensor:
        """See Head."""
        return features.to(self.device, self.dtype)

    def compute(self, rows: Rows, attend: Attend) -> tuple[Tensor, Tensor] | None:
        """See Head.

        Raises:
            ModelError: the layer's attention cannot be computed here.
        """
        positions, embedded = rows.positions[None], self.embedding(rows.tokens)[None]
        # Rotary positions of models that also take images have three axes; a text's are equal on all.
        axes = positions.expand(3, *positions.shape) if hasattr(self.rotary, "mrope_section") else positions
        with self._attending(attend, rows):
            hidden = self.layer(
                embedded,
                rows.features[None],
                position_embeddings=self.rotary(embedded, position_ids=axes, **self._kind),
                position_ids=positions,
                attention_mask=None,
                past_key_values=None,
            )
        if not rows.asked:
            return None
        asked: Tensor = hidden[0, rows.asked]
        return asked, self.head(asked).float()

    @contextmanager
    def _attending(self, attend: Attend, rows: Rows) -> Iterator[None]:
        self._call = attend, rows
        try:
            yield
            if self._call is not None:
                raise ModelError("model: its MTP layer has no attention; use another draft")
        finally:
            self._call = None

    def attention(
        self,
        _: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: query [1, Q, N, D], key and value [1, H, N, ...] -> [1, N, Q, V].
        Rows that nobody asked for are zero."""
        if unknown := sorted({name for name, given in others.items() if given is not None} - NEUTRAL):
            raise ModelError(f"model: attention of its MTP layer takes {unknown}; use another draft")
        assert self._call is not None, "an MTP layer has one attention"
        (attend, rows), self._call = self._call, None
        mix = partial(_mix, query.shape[-1], scaling, sliding_window)
        entries = torch.cat((key[0], value[0]), -1).transpose(0, 1)
        mixed = attend(query[0].transpose(0, 1), entries, mix)
        result = query.new_zeros((query.shape[2], query.shape[1], value.shape[-1]))
        if rows.asked:
            result[rows.asked] = mixed.view(-1, *result.shape[1:])
        return result[None], None


def _mix(
    width: int, scaling: float | None, window: int | None, queries: Tensor, entries: Tensor, seen: Tensor
) -> Tensor:
    """See `Mix`. `entries` [L, H, D + V] begin with keys of `width` D; with a window, a query sees the newest
    of what it sees."""
    heads = entries.transpose(0, 1)
    keys, values = heads[..., :width], heads[..., width:]
    if window is not None:
        seen = seen & (seen.flip(-1).cumsum(-1).flip(-1) <= window)
    mixed = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=seen,
        scale=scaling,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1).flatten(1)
