"""What a model's layers pass to attention: queries, keys and values, which of these layers share, and
windows.

A model's own cache does not show this: with latent attention (DeepSeek) it keeps a smaller form, from which
keys and values are computed before attention sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from outrider.engine.fused_decoder.turning import Observed
from outrider.engine.loaded_model import Geometry
from outrider.engine.loading.own_attention import set_attention
from outrider.protocol.errors import ModelError

NAME = "record_shapes"
_recorded: ContextVar[dict[int, LayerCall]] = ContextVar("recorded_shapes")
"""The calls of the running forward, by layer. Several threads may load models at once."""


class HeadShapes(NamedTuple):
    """Numbers of heads, and their widths."""

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer passed to attention for one token."""

    shapes: HeadShapes
    rotated: Tensor
    """Queries and keys [Q + H, D], after rotation."""
    key: Tensor
    """The key [H, D]."""
    value: Tensor
    """The value [H, V]."""
    window: int | None
    """The sliding window that the layer asks for."""
    softcap: float | None
    """The bound of scores that it asks for."""

    @property
    def memory(self) -> tuple[int, int]:
        """The addresses of key and value: equal for layers that share them."""
        return self.key.data_ptr(), self.value.data_ptr()


def attention_calls(network: PreTrainedModel, position: int = 0) -> dict[int, LayerCall]:
    """Return what each layer passes to attention, in a forward of one token in which attention returns zeros.

    Raises:
        Exception: whatever a model raises that does not run with another attention.
    """
    found: dict[int, LayerCall] = {}
    recorded, before = _recorded.set(found), network.config._attn_implementation
    _number_layers(network)
    set_attention(network, NAME)
    try:
        at = torch.full((1, 1), position, dtype=torch.int64, device=network.device)
        # A token from the middle: the first and last tokens may be padding, whose rows are zeros.
        token = torch.full_like(at, network.config.get_text_config().vocab_size // 2)
        network(token, position_ids=at, use_cache=False)
    finally:
        set_attention(network, before)
        _recorded.reset(recorded)
    return dict(sorted(found.items()))


def _number_layers(network: PreTrainedModel) -> None:
    """Tell modules the number of their layer, where only calls tell it (Zamba)."""
    for name, module in network.named_modules():
        if getattr(module, "layer_idx", 0) in (None, -1):
            module.layer_idx = next((int(part) for part in name.split(".") if part.isdigit()), -1)


def observed(network: PreTrainedModel, position: int) -> list[Observed]:
    """Return what each layer passes to attention at position 0 and at `position`; see `attention_calls`.

    A layer's input is the same at both, unless the model embeds positions, because attention returns zeros.
    """
    calls, others = attention_calls(network), attention_calls(network, position)
    return [
        Observed(position, call.shapes.query_heads, call.rotated, others[layer].rotated, call.softcap)
        for layer, call in calls.items()
    ]


def embedded_instead(network: PreTrainedModel) -> dict[int, int]:
    """Return, for special tokens that the model does not embed, the tokens that it embeds in their place.

    Gemma 4 embeds padding where images would be. This is found out from the calls of its embedding.
    """
    if network.config is (text := network.config.get_text_config()):
        return {}
    given = {one for name, one in network.config.to_dict().items() if name.endswith(("_token_id", "_index"))}
    special = sorted(one for one in given if isinstance(one, int) and 0 <= one < text.vocab_size)
    asked: list[int] = []

    def note(module: Any, arguments: tuple[Tensor, ...]) -> None:
        asked.extend(arguments[0].flatten().tolist())
        raise _Seen

    hook = network.get_input_embeddings().register_forward_pre_hook(note)
    try:
        network(torch.tensor([special], device=network.device), use_cache=False)
    except _Seen:
        return {one: other for one, other in zip(special, asked, strict=True) if one != other}
    except Exception:  # the model refuses such tokens, so they will not occur
        pass
    finally:
        hook.remove()
    return {}


class _Seen(Exception):
    """Ends a forward whose rest is not needed."""


def geometry_of(calls: Mapping[int, LayerCall]) -> Geometry:
    """Return the shapes of the keys and values to keep for layers that made these calls."""
    owners: dict[tuple[int, int], int] = {}
    sources = {layer: owners.setdefault(call.memory, layer) for layer, call in calls.items()}
    shapes = {layer: call.shapes for layer, call in calls.items()}
    kinds, first = [*dict.fromkeys(shapes.values())], next(iter(shapes.values()))
    if len(owners) == len(calls) == max(calls) + 1 and len(kinds) == 1:
        return Geometry(len(calls), *first)
    # Query heads distinguish parts too: they determine how rows are folded.
    kept = [[layer for layer in owners.values() if shapes[layer] == kind] for kind in kinds]
    where = {layer: (part, i) for part, layers in enumerate(kept) for i, layer in enumerate(layers)}
    parts = tuple(Geometry(len(layers), *kind) for layers, kind in zip(kept, kinds, strict=True))
    places = tuple(where[sources[i]] if i in sources else None for i in range(max(calls) + 1))
    return Geometry(len(places), *first, parts, places)


def _record(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
    """An attention function for transformers that notes its arguments and returns zeros.

    Raises:
        ModelError: a layer calls it again.
    """
    calls, layer = _recorded.get(), module.layer_idx
    if layer in calls:
        raise ModelError(
            f"model: {type(module).__name__} is called several times for a token, and keys and values are "
            "kept for one call; use another architecture"
        )
    shapes = HeadShapes(query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    rotated = torch.cat([query[0, :, 0], key[0, :, 0]])
    asked = options.get("sliding_window"), options.get("softcap")
    calls[layer] = LayerCall(shapes, rotated, key[0, :, 0], value[0, :, 0], *asked)
    return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


AttentionInterface.register(NAME, _record)
