"""The linear layers of a model that may be rounded, packed, or held as codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.engine.quantization.stacked import is_stacked

_READ_BY_OTHERS = {"dt_proj", "classifier"}
"""Layers whose weights other modules read directly: those of Mamba's time steps, and of LongCat's routers."""


class HeadLinears(nn.Module):
    """A linear layer for each of Q heads, [N, Q, in] -> [N, Q, out]."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [Q, out, in], whatever the order of its strides."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with torch."""
        return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)


def linears_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return these layers by their names, without routers of experts, some of which check their weight's
    dtype (HunYuan), and without layers that have no numbers, as those of no shared experts."""
    routers = {
        part
        for block in model.modules()
        if is_stacked(getattr(block, "experts", None))
        for part in block.modules()
        if getattr(part, "out_features", 0) == getattr(block.experts, "num_experts", None)
    }
    return {
        name: part
        for name, part in model.named_modules()
        if is_linear(part)
        and linear_weight(part).numel()
        and part not in routers
        and name.rpartition(".")[2] not in _READ_BY_OTHERS
    }


def is_linear(module: nn.Module) -> bool:
    """True for a linear layer of a known kind. Other subclasses may compute something else."""
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"


def linear_weight(module: nn.Module) -> Tensor:
    """Return the weight [out, in] of a linear layer."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.t() if isinstance(module, Conv1D) else weight
