"""One linear layer in place of several, or with its rows in another order.

Shapes: C columns, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.fused_decoder.modules import NotFused
from outrider.engine.gpu.coded_linear import CodedLinear, joined_layers
from outrider.engine.quantization.modules import carry_over, carry_rows


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """Return one layer that computes the results of all parts side by side; their weights become views of its
    weight.

    Raises:
        NotFused: there are several, and one is not a plain linear layer or one with codes.
    """
    if len(parts) == 1:
        return parts[0]
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    if len(layers) == len(parts):
        return _joined_linears(layers)
    if any(not isinstance(part, nn.Linear | CodedLinear) for part in parts):
        raise NotFused(f"it has several layers of {type(parts[0]).__name__} in place of one")
    return joined_layers(parts)


def _joined_linears(layers: Sequence[nn.Linear]) -> nn.Linear:
    weight = torch.cat([part.weight.detach() for part in layers])
    biased = any(part.bias is not None for part in layers)
    whole = linear_of(weight, torch.cat([_bias(part) for part in layers]) if biased else None)
    start = 0
    for part in layers:
        part.weight = nn.Parameter(weight[start : start + part.out_features], requires_grad=False)
        start += part.out_features
    carry_over(whole, layers)
    return whole


def side_by_side(layer: Any, heads: int) -> nn.Module:
    """Return a layer whose rows [H, 3, D], queries, keys and values of each head, are reordered to [3, H, D].

    Raises:
        NotFused: it has other rows.
    """
    if not isinstance(layer, nn.Linear | CodedLinear) or layer.out_features % (3 * heads):
        raise NotFused("its queries, keys and values are not of as many heads each")
    return with_rows(layer, torch.arange(layer.out_features).view(heads, 3, -1).transpose(0, 1).flatten())


def with_rows(layer: Any, order: Tensor) -> nn.Module:
    """Return a layer that has the rows of `layer` in this order [out].

    The weight is a copy, because a view cannot have such an order.

    Raises:
        NotFused: it is not of the common kind.
    """
    if not isinstance(layer, nn.Linear | CodedLinear):
        raise NotFused(f"rows of {type(layer).__name__} have no other order")
    order = order.to(next(layer.parameters()).device)
    bias = None if layer.bias is None else layer.bias.detach()[order]
    if isinstance(layer, CodedLinear):
        return CodedLinear(layer.planes.rows(order), bias, layer.dtype)
    made = linear_of(layer.weight.detach()[order], bias)
    carry_rows(made, layer, order)
    return made


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer that holds these weights without a copy."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
