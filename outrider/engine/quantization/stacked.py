"""Experts as transformers holds them: gated MLPs whose weights are stacked in one tensor for all.

Shapes: E experts, of which a weight is [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from outrider.engine.quantization.rounding import rounded
from outrider.engine.quantization.weight import QuantizedWeight, joined

GATE_UP, DOWN = WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the weights; biases have `_bias` behind."""
LAYERS = {GATE_UP: (("gate_proj", "up_proj"), ("w1", "w3")), DOWN: (("down_proj",), ("w2",))}
"""What checkpoints call the layers of one expert that make up each weight, in the order of its rows: most
families, and Mixtral's."""


def is_stacked(module: Any) -> bool:
    """True for such a module, which takes rows, their experts and the shares of these."""
    weights = [getattr(module, name, None) for name in WEIGHTS]
    if not all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights):
        return False
    known = {*WEIGHTS, *(f"{name}_bias" for name in WEIGHTS)}
    normed = getattr(module, "has_post_expert_norm", False)  # transformers 5.17 knows no such norm
    gated = getattr(module, "has_gate", False) and not normed
    return gated and known.issuperset(name for name, _ in module.named_parameters())


def weights_of(module: Any, name: str) -> Tensor:
    """[E, out, in], a view of the module's own."""
    weight: Tensor = getattr(module, name).detach()
    return weight.transpose(1, 2) if module.is_transposed else weight


def bias_of(module: Any, name: str) -> Tensor | None:
    """[E, out], where there is one."""
    bias: Tensor | None = getattr(module, f"{name}_bias") if module.has_bias else None
    return None if bias is None else bias.detach()


def codes_of_experts(module: Any, name: str) -> Sequence[QuantizedWeight] | None:
    """The codes of each expert's weight, where there are some; they are of one kind."""
    codes: Sequence[QuantizedWeight] | None = getattr(module, "codes", {}).get(name)
    return codes


def opens_by_silu(module: Any) -> bool:
    """True where the gate is SiLU of what comes out first times the second half."""
    usual: bool = module._apply_gate.__func__.__name__ == "_default_apply_gate"
    return usual and isinstance(module.act_fn, nn.SiLU | SiLUActivation)


def round_experts(module: Any, bits: int) -> None:
    """Round the weights of all experts, each row by itself."""
    module.codes = {name: [_round(each, bits) for each in weights_of(module, name)] for name in WEIGHTS}


def attach_expert_codes(module: Any, found: Mapping[str, QuantizedWeight]) -> int:
    """Give experts the codes of a checkpoint, by names such as `0.gate_proj`; returns of how many layers.

    None are given where some have no codes or another kind of them.
    """
    codes = {name: _of_layers(module, name, found) for name in WEIGHTS}
    if not all(codes.values()):
        return 0
    module.codes = codes
    return len(codes[DOWN] or ()) * sum(len(ways[0]) for ways in LAYERS.values())


def _of_layers(module: Any, name: str, found: Mapping[str, QuantizedWeight]) -> list[QuantizedWeight] | None:
    """The codes of each expert's weight, put together from its layers'."""
    (count, out, width), every = weights_of(module, name).shape, range(module.num_experts)
    ways = ([f"{one}.{layer}" for one in every for layer in layers] for layers in LAYERS[name])
    wanted = next((names for names in ways if found.keys() >= {*names}), [])
    whole = joined([found[one] for one in wanted]) if wanted else None
    if whole is None or whole.shape != (count * out, width):
        return None
    return [whole.rows(some) for some in torch.arange(count * out).view(count, -1)]


def _round(weight: Tensor, bits: int) -> QuantizedWeight:
    """The codes of a weight [out, in], which becomes what they stand for."""
    codes = rounded(weight, bits)
    weight.copy_(codes.values())
    return codes
