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

from outrider.engine.fused_decoder.decoder import FusedDecoder, FusedLayer, Gate, LayerSettings, Norm
from outrider.engine.loaded_model import Geometry

_QKV = (("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
_GATE_UP = (("gate_up_proj",), ("gate_proj", "up_proj"))
"""The names that parts go by: one module, or those that are fused to one."""


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
    body = _child(network, "model")
    head, embed, norm = _linear(network, "lm_head"), _child(body, "embed_tokens"), _norm(body, "norm")
    if type(embed) is not nn.Embedding:
        raise NotFused(f"embed_tokens is a {type(embed).__name__}")
    rotary: Any = _child(body, "rotary_emb")
    if {2 * len(getattr(rotary, "inv_freq", ())), geometry.value_dim} != {geometry.head_dim}:
        raise NotFused("its rotary embedding does not turn whole heads")
    parts = [_Parts(layer) for layer in _child(body, "layers").children()]
    _refuse_leftovers(network, [head, embed, norm, *(module for part in parts for module in part.all())])
    return FusedDecoder(
        type(network).__name__,
        embed=embed,
        layers=[_layer(index, part, geometry, windows[index]) for index, part in enumerate(parts)],
        norm=_rms_norm([norm], [1]),
        head=head,
        frequencies=rotary.inv_freq,
        stretch=float(getattr(rotary, "attention_scaling", 1.0)),
    )


class _Parts:
    """The modules of one decoder layer by their place in a fused one."""

    def __init__(self, layer: nn.Module) -> None:
        self.attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
        self.qkv = _linears(self.attention, _QKV)
        names = ("q_norm", "k_norm") if hasattr(self.attention, "q_norm") else ()
        self.head_norms = [_norm(self.attention, name) for name in names]
        self.output = _linear(self.attention, "o_proj")
        self.gate_up = _linears(mlp, _GATE_UP)
        self.down = _linear(mlp, "down_proj")
        self.activation: Any = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
        if not callable(self.activation):
            raise NotFused("its MLP has no activation")
        self.input_norm = _norm(layer, "input_layernorm")
        self.mlp_norm = _norm(layer, "post_attention_layernorm")

    def all(self) -> Iterator[nn.Module]:
        """Every module with weights."""
        yield from (*self.qkv, *self.head_norms, self.output, *self.gate_up, self.down)
        yield from (self.input_norm, self.mlp_norm)


def _layer(index: int, parts: _Parts, geometry: Geometry, window: int | None) -> FusedLayer:
    heads = (geometry.query_heads, geometry.kv_heads)
    declared = getattr(parts.attention, "sliding_window", window)
    if declared != window:
        raise NotFused(f"layer {index} has a window of {declared}, its cache one of {window}")
    activation = silu if isinstance(parts.activation, nn.SiLU | SiLUActivation) else parts.activation
    settings = LayerSettings(
        input_norm=_rms_norm([parts.input_norm], [1]),
        mlp_norm=_rms_norm([parts.mlp_norm], [1]),
        head_norm=_rms_norm(parts.head_norms, heads) if parts.head_norms else None,
        query_heads=geometry.query_heads,
        kv_heads=geometry.kv_heads,
        scaling=float(getattr(parts.attention, "scaling", geometry.head_dim**-0.5)),
        window=window,
    )
    return FusedLayer(
        index,
        settings,
        qkv=_fused(parts.qkv),
        output=parts.output,
        gate=Gate(_fused(parts.gate_up), activation),
        down=parts.down,
    )


def _child(parent: nn.Module, name: str) -> nn.Module:
    child = getattr(parent, name, None)
    if not isinstance(child, nn.Module):
        raise NotFused(f"{type(parent).__name__} has no {name}")
    return child


def _linear(parent: nn.Module, name: str) -> nn.Linear:
    child = _child(parent, name)
    if type(child) is not nn.Linear:  # a subclass may compute something else
        raise NotFused(f"{name} is a {type(child).__name__}")
    return child


def _linears(parent: nn.Module, alternatives: Sequence[Sequence[str]]) -> list[nn.Linear]:
    names = next((names for names in alternatives if hasattr(parent, names[0])), alternatives[-1])
    return [_linear(parent, name) for name in names]


def _norm(parent: nn.Module, name: str) -> nn.Module:
    child = _child(parent, name)
    if not type(child).__name__.endswith("RMSNorm") or not hasattr(child, "variance_epsilon"):
        raise NotFused(f"{name} is a {type(child).__name__}")
    return child


def _refuse_leftovers(network: nn.Module, known: Sequence[nn.Module]) -> None:
    found = {id(weight) for module in known for weight in module.parameters()}
    for name, weight in network.named_parameters():
        if id(weight) not in found:
            raise NotFused(f"{name} has no place in it")


def _rms_norm(norms: Sequence[Any], repeats: Sequence[int]) -> Norm:
    """One norm, or several side by side with a row of weights for each of their heads."""
    weight = norms[0].weight.detach()
    if len(norms) > 1:
        rows = [norm.weight.detach().expand(count, -1) for norm, count in zip(norms, repeats, strict=True)]
        weight = torch.cat(rows)
    return Norm(weight, norms[0].variance_epsilon)


def _fused(parts: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that computes the results of all side by side; their weights become views of its own."""
    if len(parts) == 1:
        return parts[0]
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
    return fused


def _bias(linear: nn.Linear) -> torch.Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
