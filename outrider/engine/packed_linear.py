"""Linear layers with oneDNN-packed weights, for the CPU.

oneDNN keeps a weight in the block layout its matrix kernels read, which halves the time of small
batches; these are the operators that torch's own compiler uses. From two rows on, a row's result does not
depend on how many others there are, while plain float32 products change their order of additions at four:
so weights too small to gain speed are packed too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with a weight [out, in] that was packed once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of a model on the CPU that oneDNN takes; returns how many.

    An embedding that shares its weight with the output layer keeps it: the output layer gets a packed copy.
    """
    if not _operators_exist():
        return 0
    names = [name for name, module in model.named_modules() if _can_be_packed(module)]
    for name in names:
        parent, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(name)
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        setattr(model.get_submodule(parent), attribute, PackedLinear(weight, module.bias))
    return len(names)


def _operators_exist() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _can_be_packed(module: nn.Module) -> bool:
    if type(module) not in (nn.Linear, Conv1D):  # a subclass may compute something else
        return False
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
