"""What a model's layers hand to attention: the shapes of queries, keys and values.

A model's own cache does not say: with latent attention (DeepSeek) it keeps a smaller form, which becomes keys
and values before attention sees them.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "record_shapes"
_recorded: ContextVar[dict[int, HeadShapes]] = ContextVar("recorded_shapes")
"""Of the forward that runs; several threads may load models at once."""


class HeadShapes(NamedTuple):
    """Numbers of heads, and their widths."""

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def attention_shapes(network: PreTrainedModel) -> dict[int, HeadShapes]:
    """The shapes of each layer, from a forward of one token whose attention gives zeros.

    Raises:
        Exception: the model does not run with another attention, whatever it raises then.
    """
    found: dict[int, HeadShapes] = {}
    token, before = _recorded.set(found), network.config._attn_implementation
    network.set_attn_implementation(NAME)
    try:
        network(torch.zeros((1, 1), dtype=torch.int64, device=network.device), use_cache=False)
    finally:
        network.set_attn_implementation(before)
        _recorded.reset(token)
    return found


def _record(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    """An attention function of transformers: notes the shapes, and mixes nothing."""
    shapes = HeadShapes(query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    _recorded.get()[module.layer_idx] = shapes
    return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


AttentionInterface.register(NAME, _record)
