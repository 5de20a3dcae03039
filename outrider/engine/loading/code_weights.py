"""Brings the weights of linear layers to a device as codes, one layer after the other.

At any time the device holds only codes and a part of one layer's numbers, however large the model is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.engine.gpu.coded_linear import CodedLinear
from outrider.engine.linears import linear_weight, linears_of
from outrider.engine.loading.move_weights import PROGRESS_BYTES
from outrider.engine.quantization.modules import bits_of, codes_of
from outrider.engine.quantization.planes import PlanarWeight, in_planes, rounded_in_planes


def code_weights(
    network: PreTrainedModel, place: torch.device, bits: int | None, say: Callable[[str], None]
) -> int:
    """Replace the layers that have codes; with `bits` replace all others too, rounded to that many bits.
    Return how many were replaced.
    """
    layers = linears_of(network)
    wanted = [name for name, layer in layers.items() if bits is not None or codes_of(layer) is not None]
    read = told = 0
    for name in wanted:
        layer = layers.pop(name)  # so that its numbers are freed with it
        read += linear_weight(layer).nbytes
        _replace(network, name, _planes(network, layer, place, bits or 0), place)
        if read - told >= PROGRESS_BYTES:
            told = read
            say(f"{read / 1e9:.1f} GB of weights are codes on {place}")
    return len(wanted)


def _planes(network: PreTrainedModel, layer: nn.Module, place: torch.device, bits: int) -> PlanarWeight:
    codes = codes_of(layer)
    if codes is not None:
        return in_planes(codes, place)
    return rounded_in_planes(linear_weight(layer).detach(), bits_of(network, layer, bits), place)


def _replace(network: PreTrainedModel, name: str, weight: PlanarWeight, place: torch.device) -> None:
    parent, _, attribute = name.rpartition(".")
    layer: Any = network.get_submodule(name)
    bias = None if layer.bias is None else layer.bias.detach().to(place)
    setattr(network.get_submodule(parent), attribute, CodedLinear(weight, bias, layer.weight.dtype))
