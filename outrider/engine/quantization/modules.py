"""Linear layers whose weights are quantized: each has its numbers like any other layer, and its codes in
addition.

The numbers are what the codes stand for, rounded to the model's dtype. So the model computes with the numbers
when transformers runs it, while packing for kernels uses the codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.engine.linears import linears_of
from outrider.engine.quantization.rounding import rounded
from outrider.engine.quantization.stacked import (
    DOWN,
    attach_expert_codes,
    codes_of_experts,
    is_stacked,
    round_experts,
)
from outrider.engine.quantization.weight import QuantizedWeight, joined

HEAD_BITS = 8
"""Fewest bits of the output layer."""


def codes_of(module: nn.Module) -> QuantizedWeight | None:
    """Return the codes of a linear layer's weight; None if it has none."""
    codes = getattr(module, "codes", None)
    return codes if isinstance(codes, QuantizedWeight) else None


def round_linears(network: PreTrainedModel, bits: int) -> int:
    """Round the weights of all linear layers and experts that have no codes; return how many layers.

    The output layer gets at least 8 bits. An embedding that shares its weight keeps the weight unrounded.
    """
    for module in network.modules():
        if is_stacked(module) and not codes_of_experts(module, DOWN):
            round_experts(module, bits)
    wanted = [layer for layer in linears_of(network).values() if codes_of(layer) is None]
    for layer in wanted:
        transposed = isinstance(layer, Conv1D)
        weight: Any = layer.weight
        codes = rounded(weight.t() if transposed else weight, bits_of(network, layer, bits))
        values = codes.values().to(weight.dtype)
        layer.weight = nn.Parameter(values.t().contiguous() if transposed else values, requires_grad=False)
        _attach(layer, codes)
    return len(wanted)


def bits_of(network: PreTrainedModel, layer: nn.Module, bits: int) -> int:
    """Return the bits of a layer if the model is rounded to `bits`."""
    head = network.get_output_embeddings()  # type: ignore[no-untyped-call]
    return max(bits, HEAD_BITS) if layer is head else bits


def attach_codes(network: nn.Module, found: Mapping[str, QuantizedWeight], *, experts: bool) -> int:
    """Attach codes to the linear layers with their names, if they exist, and with `experts` to experts.
    Return how many.
    """
    shapes = shapes_of_linears(network)
    taken = [name for name, codes in found.items() if shapes.get(name) == codes.shape]
    for name in taken:
        _attach(network.get_submodule(name), found[name])
    layers = _experts_by_layer(found) if experts else {}
    mixtures = [(name.rsplit(".", 2)[0], part) for name, part in network.named_modules() if is_stacked(part)]
    return len(taken) + sum(attach_expert_codes(part, layers.get(layer, {})) for layer, part in mixtures)


def _experts_by_layer(found: Mapping[str, QuantizedWeight]) -> dict[str, dict[str, QuantizedWeight]]:
    """Return the codes of experts by the name of their decoder layer: the block between the two has various
    names."""
    layers: dict[str, dict[str, QuantizedWeight]] = {}
    for name, codes in found.items():
        block, _, inside = name.partition(".experts.")
        if inside:
            layers.setdefault(block.rpartition(".")[0], {})[inside] = codes
    return layers


def shapes_of_linears(network: nn.Module) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers that may have codes, by their names."""
    return {
        name: (layer.out_features, layer.in_features)
        for name, layer in linears_of(network).items()
        if isinstance(layer, nn.Linear)
    }


def carry_over(fused: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Attach the codes of several layers to the one that computes their results side by side, if they can be
    joined."""
    codes = [held for part in parts if (held := codes_of(part)) is not None]
    if len(codes) == len(parts) and (whole := joined(codes)) is not None:
        _attach(fused, whole)


def carry_rows(made: nn.Module, layer: nn.Module, order: Tensor) -> None:
    """Attach the codes of `layer`, if it has some, to `made`, which has its rows in this order [out]."""
    if (codes := codes_of(layer)) is not None:
        _attach(made, codes.rows(order))


def _attach(layer: Any, codes: QuantizedWeight) -> None:
    layer.codes = codes


def held_bytes(codes: QuantizedWeight) -> int:
    """Return the bytes of codes, scales and zeros."""
    parts: list[Tensor | None] = [codes.words, codes.scales, codes.zeros]
    return sum(part.nbytes for part in parts if part is not None)
