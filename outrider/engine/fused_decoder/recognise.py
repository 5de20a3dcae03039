"""Makes a fused decoder from a transformers model whose layers are of the kind it knows.

A model is recognised by the names of its modules, and by what is left over: every weight must have found its
place. What cannot be seen there (a factor in the code, a layer without rotation) is left to the self check.

The fused weights take the place of the modules' own, which become views of them: nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from outrider.engine.fused_decoder.decoder import (
    Experts,
    FusedDecoder,
    FusedLayer,
    Gate,
    GatedMlp,
    LayerSettings,
    Norm,
    Rope,
    Scores,
)
from outrider.engine.gpu.coded_linear import CodedLinear, joined_layers
from outrider.engine.loaded_model import Geometry
from outrider.engine.quantization.modules import carry_over

_QKV = (("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
_GATE_UP = (("gate_up_proj",), ("gate_proj", "up_proj"))
"""The names that parts go by: one module, or those that are fused to one."""
_LLAMA = {"mlp_norm": "post_attention_layernorm"}
_GEMMA = {
    "output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "down_norm": "post_feedforward_layernorm",
}
"""The modules that are a layer's norms, besides its first. Only Gemma's layers have `down_norm`."""
_WEIGHT_PLUS_ONE = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")
"""Norms whose factor is their weight and 1, in float32."""


class NotFused(Exception):
    """The model has parts that the fused decoder does not compute; the text names one."""


def fused_decoder(
    network: PreTrainedModel, geometry: Geometry, windows: Mapping[int, int | None]
) -> FusedDecoder:
    """The fused decoder of a model; `windows` are the sliding windows of its layers.

    The model keeps computing what it computes, with the same weights.

    Raises:
        NotFused: it is not the kind of model for it.
    """
    body, unused = _text_body(_child(network, "model"))
    head, embed, norm = _linear(network, "lm_head"), _embedding(body), _norm(body, "norm")
    text, layers = network.config.get_text_config(), list(_child(body, "layers").children())
    ropes, rope_of = _ropes(_child(body, "rotary_emb"), text, len(layers))
    if {2 * len(rope.frequencies) for rope in ropes} | {geometry.value_dim} != {geometry.head_dim}:
        raise NotFused("its rotary embedding does not turn whole heads")
    parts = [_Parts(layer) for layer in layers]
    used = [head, embed, norm, *(module for part in parts for module in part.all())]
    _refuse_leftovers(network, [*used, *unused])
    return FusedDecoder(
        type(network).__name__,
        embed=embed,
        layers=[_layer(i, part, geometry, windows[i], rope_of[i]) for i, part in enumerate(parts)],
        norm=_rms_norm(norm),
        head=head,
        ropes=ropes,
        softcap=getattr(text, "final_logit_softcapping", None),
    )


class _Parts:
    """The modules of one decoder layer by their place in a fused one."""

    def __init__(self, layer: nn.Module) -> None:
        self.attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        self.qkv = _linears(self.attention, _QKV)
        heads = ("q_norm", "k_norm") if hasattr(self.attention, "q_norm") else ()
        self.head_norms = [_norm(self.attention, name) for name in heads]
        self.output = _linear(self.attention, "o_proj")
        self.mlp = _Experts(mlp) if hasattr(mlp, "experts") else _Mlp(mlp)
        names = {"input_norm": "input_layernorm"}
        names |= _GEMMA if hasattr(layer, _GEMMA["down_norm"]) else _LLAMA
        self.norms = {place: _norm(layer, name) for place, name in names.items()}
        self.sinks: Any = getattr(self.attention, "sinks", None)

    def all(self) -> Iterator[nn.Module | nn.Parameter]:
        """Every module with weights, and weights that are in none of them."""
        yield from (*self.qkv, *self.head_norms, self.output, *self.mlp.all(), *self.norms.values())
        if self.sinks is not None:
            yield self.sinks


class _Mlp:
    """The modules of an MLP with a gate."""

    def __init__(self, mlp: nn.Module) -> None:
        self.gate_up = _linears(mlp, _GATE_UP)
        self.down = _linear(mlp, "down_proj")
        activation: Any = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
        if not callable(activation):
            raise NotFused("its MLP has no activation")
        self.activation = silu if isinstance(activation, nn.SiLU | SiLUActivation) else activation

    def all(self) -> list[nn.Module]:
        """Every module with weights."""
        return [*self.gate_up, self.down]

    def fused(self) -> GatedMlp:
        """With one product for gate and up."""
        return GatedMlp(Gate(_fused(self.gate_up), self.activation), self.down)


class _Experts:
    """A mixture of experts, which stays what it is."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def all(self) -> list[nn.Module]:
        """See `_Mlp.all`."""
        return [self._block]

    def fused(self) -> Experts:
        """As it is."""
        return Experts(self._block)


def _ropes(rotary: Any, text: Any, layers: int) -> tuple[list[Rope], list[int]]:
    """The ropes of a model, one for all layers or for each type of layer, and which one each layer has."""
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


def _layer(index: int, parts: _Parts, geometry: Geometry, window: int | None, rope: int) -> FusedLayer:
    heads = (geometry.query_heads, geometry.kv_heads)
    declared = getattr(parts.attention, "sliding_window", window)
    if declared != window:
        raise NotFused(f"layer {index} has a window of {declared}, its cache one of {window}")
    norms = {place: _rms_norm(norm) for place, norm in parts.norms.items()}
    settings = LayerSettings(
        input_norm=norms["input_norm"],
        mlp_norm=norms["mlp_norm"],
        output_norm=norms.get("output_norm"),
        down_norm=norms.get("down_norm"),
        head_norm=_head_norm(parts.head_norms, heads, geometry.head_dim) if parts.head_norms else None,
        query_heads=geometry.query_heads,
        kv_heads=geometry.kv_heads,
        rope=rope,
        scores=Scores(
            scaling=float(getattr(parts.attention, "scaling", geometry.head_dim**-0.5)),
            window=window,
            softcap=getattr(parts.attention, "attn_logit_softcapping", None),
            sinks=None if parts.sinks is None else parts.sinks.detach(),
        ),
    )
    return FusedLayer(index, settings, qkv=_fused(parts.qkv), output=parts.output, mlp=parts.mlp.fused())


def _child(parent: nn.Module, name: str) -> nn.Module:
    child = getattr(parent, name, None)
    if not isinstance(child, nn.Module):
        raise NotFused(f"{type(parent).__name__} has no {name}")
    return child


def _text_body(body: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """What computes texts, and what does not: a model that also takes images has parts for these."""
    text = getattr(body, "language_model", None)
    if not isinstance(text, nn.Module):
        return body, []
    return text, [child for child in body.children() if child is not text]


def _embedding(body: nn.Module) -> nn.Embedding:
    """The embedding, whose own forward is used: Gemma's scales what it gives."""
    child = _child(body, "embed_tokens")
    if not isinstance(child, nn.Embedding) or (
        type(child) is not nn.Embedding and not hasattr(child, "embed_scale")
    ):
        raise NotFused(f"embed_tokens is a {type(child).__name__}")
    return child


def _linear(parent: nn.Module, name: str) -> nn.Module:
    child = _child(parent, name)
    if type(child) not in (nn.Linear, CodedLinear):  # a subclass may compute something else
        raise NotFused(f"{name} is a {type(child).__name__}")
    return child


def _linears(parent: nn.Module, alternatives: Sequence[Sequence[str]]) -> list[nn.Module]:
    names = next((names for names in alternatives if hasattr(parent, names[0])), alternatives[-1])
    return [_linear(parent, name) for name in names]


def _norm(parent: nn.Module, name: str) -> nn.Module:
    child = _child(parent, name)
    kind = type(child).__name__
    if kind not in _WEIGHT_PLUS_ONE and not (kind.endswith("RMSNorm") and hasattr(child, "variance_epsilon")):
        raise NotFused(f"{name} is a {kind}")
    return child


def _refuse_leftovers(network: nn.Module, known: Sequence[nn.Module | nn.Parameter]) -> None:
    found: set[int] = set()
    for one in known:
        found.update(map(id, one.parameters() if isinstance(one, nn.Module) else [one]))
    for name, weight in network.named_parameters():
        if id(weight) not in found:
            raise NotFused(f"{name} has no place in it")


def _rms_norm(norm: Any) -> Norm:
    weight = norm.weight.detach()
    if type(norm).__name__ in _WEIGHT_PLUS_ONE:
        return Norm(weight.float() + 1.0, norm.eps)
    return Norm(weight, norm.variance_epsilon)


def _head_norm(norms: Sequence[Any], heads: Sequence[int], width: int) -> Norm:
    """The norms of queries and keys as one, with a row of weights for each of their heads."""
    found = [_rms_norm(norm) for norm in norms]
    if any(norm.weight.shape != (width,) for norm in found):
        raise NotFused("its norms of queries and keys are not over heads")
    rows = [norm.weight.expand(count, -1) for norm, count in zip(found, heads, strict=True)]
    return Norm(torch.cat(rows), found[0].eps)


def _fused(parts: Sequence[nn.Module]) -> nn.Module:
    """One layer that computes the results of all side by side; their weights become views of its own."""
    if len(parts) == 1:
        return parts[0]
    plain = [part for part in parts if isinstance(part, nn.Linear)]
    return _fused_plain(plain) if len(plain) == len(parts) else joined_layers(parts)


def _fused_plain(parts: Sequence[nn.Linear]) -> nn.Linear:
    weight = torch.cat([part.weight.detach() for part in parts])
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if any(part.bias is not None for part in parts):
        biases = [_bias(part) for part in parts]
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    start = 0
    for part in parts:
        part.weight = nn.Parameter(weight[start : start + part.out_features], requires_grad=False)
        start += part.out_features
    carry_over(fused, parts)
    return fused


def _bias(linear: nn.Linear) -> torch.Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
