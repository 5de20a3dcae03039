"""Experts as transformers holds them: gated MLPs whose weights are stacked in one tensor for all.

Shapes: E experts, each with a weight [out, in].
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
"""Names of the weights; names of biases end with `_bias`."""
LAYERS = {GATE_UP: (("gate_proj", "up_proj"), ("w1", "w3")), DOWN: (("down_proj",), ("w2",))}
"""Names in checkpoints of an expert's layers that make up each weight, in the order of its rows: first those
of most families, then Mixtral's."""


def is_stacked(module: Any) -> bool:
    """True for such a module, whose arguments are rows, their experts and the experts' shares."""
    weights = [getattr(module, name, None) for name in WEIGHTS]
    if not all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights):
        return False
    known = {*WEIGHTS, *(f"{name}_bias" for name in WEIGHTS)}
    normed = getattr(module, "has_post_expert_norm", False)  # transformers 5.17 has no such norm
    gated = getattr(module, "has_gate", False) and not normed
    return gated and known.issuperset(name for name, _ in module.named_parameters())


def weights_of(module: Any, name: str) -> Tensor:
    """Return the weights [E, out, in], a view of the module's own."""
    weight: Tensor = getattr(module, name).detach()
    return weight.transpose(1, 2) if module.is_transposed else weight


def bias_of(module: Any, name: str) -> Tensor | None:
    """Return the bias [E, out], or None."""
    bias: Tensor | None = getattr(module, f"{name}_bias") if module.has_bias else None
    return None if bias is None else bias.detach()


def codes_of_experts(module: Any, name: str) -> Sequence[QuantizedWeight] | None:
    """Return the codes of each expert's weight, all of one kind; None if there are none."""
    codes: Sequence[QuantizedWeight] | None = getattr(module, "codes", {}).get(name)
    return codes


def opens_by_silu(module: Any) -> bool:
    """True where the gate is SiLU of the first half of the result times the second half."""
    usual: bool = module._apply_gate.__func__.__name__ == "_default_apply_gate"
    return usual and isinstance(module.act_fn, nn.SiLU | SiLUActivation)


def round_experts(module: Any, bits: int) -> None:
    """Round the weights of all experts, each row by itself."""
    module.codes = {name: [_round(each, bits) for each in weights_of(module, name)] for name in WEIGHTS}


def attach_expert_codes(module: Any, found: Mapping[str, QuantizedWeight]) -> int:
    """Attach a checkpoint's codes, with names such as `0.gate_proj`, to experts; return for how many layers.

    Nothing is attached if some layers have no codes or codes of another kind.
    """
    codes = {name: _of_layers(module, name, found) for name in WEIGHTS}
    if not all(codes.values()):
        return 0
    module.codes = codes
    return len(codes[DOWN] or ()) * sum(len(ways[0]) for ways in LAYERS.values())


def _of_layers(module: Any, name: str, found: Mapping[str, QuantizedWeight]) -> list[QuantizedWeight] | None:
    """Return the codes of each expert's weight, joined from its layers' codes."""
    (count, out, width), every = weights_of(module, name).shape, range(module.num_experts)
    ways = ([f"{one}.{layer}" for one in every for layer in layers] for layers in LAYERS[name])
    wanted = next((names for names in ways if found.keys() >= {*names}), [])
    whole = joined([found[one] for one in wanted]) if wanted else None
    if whole is None or whole.shape != (count * out, width):
        return None
    return [whole.rows(some) for some in torch.arange(count * out).view(count, -1)]


def _round(weight: Tensor, bits: int) -> QuantizedWeight:
    """Round a weight [out, in] in place, and return its codes."""
    codes = rounded(weight, bits)
    weight.copy_(codes.values())
    return codes
