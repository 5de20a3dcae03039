"""Makes a fused decoder from a transformers model whose layers are of the kind it knows.

A model is recognised by the names of its modules, and by what is left over: every weight must have found its
place. What cannot be seen there (a factor in the code, a layer without rotation) is left to the self check.

The fused weights take the place of the modules' own, which become views of them: nothing is held twice. Only
GPT-NeoX's queries, keys and values are, until the model is let go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import RopeParameters

from outrider.engine.fused_decoder import modules
from outrider.engine.fused_decoder.decoder import (
    FusedDecoder,
    FusedLayer,
    Gate,
    GatedMlp,
    LayerSettings,
    Norm,
    PlainMlp,
    Rope,
    Scores,
)
from outrider.engine.fused_decoder.joining import joined, side_by_side
from outrider.engine.fused_decoder.mixture import ForeignBlock, Mixture, is_mixture
from outrider.engine.fused_decoder.modules import NotFused
from outrider.engine.loaded_model import Geometry
from outrider.engine.loading.model_config import rope_settings

_BODY = ("model", "gpt_neox", "transformer")
_TEXT = ("language_model", "text_model")
_LAYERS = ("layers", "h")
EMBEDDING = ("embed_tokens", "embed_in", "wte")
_POSITIONS = "wpe"
_LAST_NORM = ("norm", "final_layer_norm", "final_layernorm", "ln_f")
HEAD = ("lm_head", "embed_out")
_ATTENTION = ("self_attn", "attention", "attn")
_BY_HEAD = "query_key_value"
_QKV = (("qkv_proj",), (_BY_HEAD,), ("c_attn",), ("q_proj", "k_proj", "v_proj"))
_OUTPUT = ("o_proj", "dense", "c_proj")
_GATE_UP = (("gate_up_proj",), ("gate_proj", "up_proj"))
_UP = ("dense_h_to_4h", "c_fc", "fc1")
_DOWN = ("down_proj", "dense_4h_to_h", "c_proj", "fc2")
_ACTIVATION = ("act_fn", "activation_fn", "act")
"""The names that parts go by: one module, or those that are fused to one."""
_ROTATION = {*RopeParameters.__annotations__, "type", "mrope_interleaved"}
"""Settings of a rope that say how it turns. Others may do what the check is too short to show, as in
Ministral 3, whose queries grow with their position."""
_PRE_NORM: dict[str, modules.Names] = {
    "input_norm": ("input_layernorm", "ln_1"),
    "mlp_norm": ("post_attention_layernorm", "ln_2"),
}
_POST_NORM: dict[str, modules.Names] = {
    "output_norm": ("post_attention_layernorm",),
    "down_norm": ("post_feedforward_layernorm",),
}
_BOTH: dict[str, modules.Names] = {
    "input_norm": ("input_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    **_POST_NORM,
}
"""The modules that are a layer's norms: most layers have the first, OLMo 2's the second, Gemma's all."""


def fused_decoder(
    network: PreTrainedModel, geometry: Geometry, windows: Mapping[int, int | None]
) -> FusedDecoder:
    """The fused decoder of a model; `windows` are the sliding windows of its layers.

    The model keeps computing what it computes, with the same weights.

    Raises:
        NotFused: it is not the kind of model for it.
    """
    found, text = Modules(network), network.config.get_text_config()
    places, count = found.places, len(found.layers)
    device = found.embed.weight.device
    ropes, rope_of = _no_rope(count, device) if places else _ropes(found.body, text, count)
    _check_widths(ropes, found.layers, geometry)
    _refuse_leftovers(network, found.all())
    return FusedDecoder(
        type(network).__name__,
        embed=found.embed,
        layers=[_layer(i, part, geometry, windows[i], rope_of[i]) for i, part in enumerate(found.layers)],
        norm=modules.described(found.norm),
        head=found.head,
        ropes=ropes,
        softcap=getattr(text, "final_logit_softcapping", None),
        positions=places,
    )


class Modules:
    """The modules of a model by their place in a fused decoder.

    Raises:
        NotFused: one is missing.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        self.body, self._unused = _text_body(modules.child(network, *_BODY))
        self.head, self.embed = modules.linear(network, *HEAD), modules.embedding(self.body, *EMBEDDING)
        self.places = modules.embedding(self.body, _POSITIONS) if hasattr(self.body, _POSITIONS) else None
        self.norm = modules.norm(self.body, *_LAST_NORM)
        self.layers = [Parts(layer) for layer in modules.child(self.body, *_LAYERS).children()]

    def all(self) -> list[nn.Module | nn.Parameter]:
        """Every module with weights, and weights that are in none of them."""
        outside = [self.head, self.embed, self.norm, *([self.places] if self.places else ()), *self._unused]
        return [*outside, *chain(*(parts.all() for parts in self.layers))]


class Parts:
    """The modules of one decoder layer by their place in a fused one."""

    def __init__(self, layer: nn.Module) -> None:
        self.attention, mlp = modules.child(layer, *_ATTENTION), modules.child(layer, "mlp")
        self.qkv = modules.linears(self.attention, _QKV)
        self.by_head = hasattr(self.attention, _BY_HEAD)
        heads = ("q_norm", "k_norm") if hasattr(self.attention, "q_norm") else ()
        self.head_norms = [modules.norm(self.attention, name) for name in heads]
        self.output = modules.linear(self.attention, *_OUTPUT)
        self.mlp = _mlp(mlp)
        self.norms = {place: modules.norm(layer, *names) for place, names in _norm_names(layer).items()}
        # Without a norm of its own an MLP reads what attention reads.
        shared = [*self.norms] == ["input_norm"]
        self.parallel = bool(getattr(layer, "use_parallel_residual", shared))
        self.mlp_norm = "input_norm" if shared else "mlp_norm"
        self.sinks: Any = getattr(self.attention, "sinks", None)

    def all(self) -> Iterator[nn.Module | nn.Parameter]:
        """Every module with weights, and weights that are in none of them."""
        yield from (*self.qkv, *self.head_norms, self.output, *self.mlp.all(), *self.norms.values())
        if self.sinks is not None:
            yield self.sinks

    def fused_qkv(self, heads: int) -> nn.Module:
        """One product for queries, keys and values, in this order."""
        return side_by_side(self.qkv[0], heads) if self.by_head else joined(self.qkv)


def _norm_names(layer: nn.Module) -> dict[str, modules.Names]:
    """The names of a layer's norms by their place."""
    if hasattr(layer, *_POST_NORM["down_norm"]):
        return _BOTH if hasattr(layer, *_BOTH["mlp_norm"]) else _POST_NORM
    alone = all(getattr(layer, name, None) is None for name in _PRE_NORM["mlp_norm"])
    return {place: names for place, names in _PRE_NORM.items() if not (alone and place == "mlp_norm")}


class _GatedMlp:
    """The modules of an MLP with a gate."""

    def __init__(self, mlp: nn.Module) -> None:
        self.up, self.down = modules.linears(mlp, _GATE_UP), modules.linear(mlp, *_DOWN)
        self.activation = modules.activation(mlp, *_ACTIVATION)

    def all(self) -> list[nn.Module]:
        """Every module with weights."""
        return [*self.up, self.down]

    def fused(self) -> GatedMlp:
        """With one product for gate and up."""
        return GatedMlp(Gate(joined(self.up), self.activation), self.down)


class _PlainMlp:
    """The modules of an MLP without a gate."""

    def __init__(self, mlp: nn.Module) -> None:
        self.up, self.down = [modules.linear(mlp, *_UP)], modules.linear(mlp, *_DOWN)
        self.activation = modules.activation(mlp, *_ACTIVATION)

    def all(self) -> list[nn.Module]:
        """See `_GatedMlp.all`."""
        return [*self.up, self.down]

    def fused(self) -> PlainMlp:
        """As it is."""
        return PlainMlp(self.up[0], self.activation, self.down)


def _mlp(mlp: nn.Module) -> _GatedMlp | _PlainMlp | Mixture | ForeignBlock:
    if hasattr(mlp, "experts"):
        return Mixture(mlp) if is_mixture(mlp) else ForeignBlock(mlp)
    return _PlainMlp(mlp) if any(hasattr(mlp, name) for name in _UP) else _GatedMlp(mlp)


def _ropes(body: nn.Module, text: Any, layers: int) -> tuple[list[Rope], list[int]]:
    """The ropes of a model, one for all layers or for each type of layer, and which one each layer has."""
    if others := {name for rope in rope_settings(text) for name in rope} - _ROTATION:
        raise NotFused(f"its rope has settings of its own ({', '.join(sorted(others))})")
    rotary: Any = modules.child(body, "rotary_emb")
    if hasattr(rotary, "inv_freq"):
        return [Rope(rotary.inv_freq, float(getattr(rotary, "attention_scaling", 1.0)))], [0] * layers
    types: list[str] = list(getattr(text, "layer_types", None) or ())
    found = sorted({one for one in types if hasattr(rotary, f"{one}_inv_freq")})
    if set(types) != set(found) or len(types) != layers:
        raise NotFused("its rotary embedding has no frequencies of a known name")
    ropes = [
        Rope(getattr(rotary, f"{one}_inv_freq"), float(getattr(rotary, f"{one}_attention_scaling", 1.0)))
        for one in found
    ]
    return ropes, [found.index(one) for one in types]


def _no_rope(layers: int, device: torch.device) -> tuple[list[Rope], list[int]]:
    return [Rope(torch.empty(0, device=device), 1.0)], [0] * layers


def _check_widths(ropes: Sequence[Rope], parts: Sequence[Parts], geometry: Geometry) -> None:
    if geometry.parts:
        raise NotFused("its layers differ in their heads, or share keys and values")
    if geometry.value_dim != geometry.head_dim:
        raise NotFused("its values are not as wide as its keys")
    turned = {2 * len(rope.frequencies) for rope in ropes}
    if max(turned) > geometry.head_dim:
        raise NotFused("its rotary embedding turns more than a head")
    if turned != {geometry.head_dim} and any(part.head_norms for part in parts):
        raise NotFused("its rotary embedding turns parts of heads that have norms")


def _layer(index: int, parts: Parts, geometry: Geometry, window: int | None, rope: int) -> FusedLayer:
    declared = getattr(parts.attention, "sliding_window", window)
    if declared != window:
        raise NotFused(f"layer {index} has a window of {declared}, its cache one of {window}")
    norms = {place: modules.described(norm) for place, norm in parts.norms.items()}
    head_norm, whole_norms = _query_norms(parts.head_norms, geometry)
    settings = LayerSettings(
        input_norm=norms.get("input_norm"),
        mlp_norm=norms.get(parts.mlp_norm),
        output_norm=norms.get("output_norm"),
        down_norm=norms.get("down_norm"),
        head_norm=head_norm,
        whole_norms=whole_norms,
        whole_means=None,
        query_heads=geometry.query_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        rope=rope,
        scores=_scores(parts, geometry, window),
        parallel=parts.parallel,
    )
    qkv = parts.fused_qkv(geometry.query_heads)
    return FusedLayer(index, settings, qkv=qkv, output=parts.output, mlp=parts.mlp.fused())


def _scores(parts: Parts, geometry: Geometry, window: int | None) -> Scores:
    attention = parts.attention
    return Scores(
        scaling=float(getattr(attention, "scaling", geometry.head_dim**-0.5)),
        window=window,
        softcap=getattr(attention, "attn_logit_softcapping", None),
        sinks=None if parts.sinks is None else parts.sinks.detach(),
    )


def _text_body(body: nn.Module) -> tuple[nn.Module, list[nn.Module | nn.Parameter]]:
    """What computes texts, and what does not: a model that also takes images has parts for these."""
    parts = dict(body.named_children())
    text = next((parts.pop(name) for name in _TEXT if name in parts), None)
    if text is None:
        return body, []
    return text, [*parts.values(), *body.parameters(recurse=False)]


def _refuse_leftovers(network: nn.Module, known: Sequence[nn.Module | nn.Parameter]) -> None:
    found: set[int] = set()
    for one in known:
        found.update(map(id, one.parameters() if isinstance(one, nn.Module) else [one]))
    for name, weight in network.named_parameters():
        if id(weight) not in found:
            raise NotFused(f"{name} has no place in it")


def _query_norms(
    found: Sequence[nn.Module], geometry: Geometry
) -> tuple[Norm | None, tuple[Norm, Norm] | None]:
    """The norms of queries and keys: as one, with weights for each head, or each over all of its heads."""
    if not found:
        return None, None
    queries, keys = (modules.described(norm) for norm in found)
    heads, width = (geometry.query_heads, geometry.kv_heads), geometry.head_dim
    widths = (len(queries.weight), len(keys.weight))
    if widths == (width, width) and not (queries.centred or keys.centred):
        rows = [norm.weight.expand(count, -1) for norm, count in zip((queries, keys), heads, strict=True)]
        return Norm(torch.cat(rows), queries.eps), None
    if widths == tuple(count * width for count in heads):
        return None, (queries, keys)
    raise NotFused("its norms of queries and keys are neither over a head nor over all")
