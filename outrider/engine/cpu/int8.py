"""Linear layers with weights of 8 bits: half the memory of bfloat16, and slower than the project's kernels.

For drafts: the weights are rounded, so the model is another one, and what is drafted need not be right.
Weights alone are rounded, each row of a weight with a factor of its own; products are those of bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.engine.cpu.linear import CpuLinear, is_linear, linear_weight

STEP = 32
"""Numbers that torch's operator takes at once; it is wrong where a row of a weight has a part of a step."""
PASS_ROWS = 8
"""Rows of one product; more take several. Measured, 2,048 x 2,048, an EPYC with AVX2: 16 rows at once take
3.5 times as long as 8."""
LARGEST = 127


class Int8Linear(CpuLinear):
    """`x @ weight.T + bias`, [..., in] -> [..., out], in the dtype of x."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out, in], `in` a multiple of STEP."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        exact = weight.detach().float()
        factors = exact.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        self._numbers = (exact / factors[:, None]).round().to(torch.int8).contiguous()
        self._factors = factors.bfloat16()
        self._bias = None if bias is None else bias.detach()
        self.dtype, self.nbytes = torch.int8, self._numbers.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features).bfloat16().contiguous()
        products = [self._product(part) for part in rows.split(PASS_ROWS)]  # type: ignore[no-untyped-call]
        y = products[0] if len(products) == 1 else torch.cat(products)
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if self._bias is None else y.add_(self._bias)

    def _product(self, rows: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self._numbers, self._factors)
        return y


def quantize_linears(model: nn.Module) -> int:
    """Replace the linear layers of a model on the CPU by such of 8 bits, where they fit; returns how many."""
    names = [name for name, module in model.named_modules() if is_linear(module) and _fits(module)]
    for name in names:
        parent, _, attribute = name.rpartition(".")
        module = model.get_submodule(name)
        bias = module.bias
        made = Int8Linear(linear_weight(module), bias if isinstance(bias, Tensor) else None)
        setattr(model.get_submodule(parent), attribute, made)
    return len(names)


def _fits(module: nn.Module) -> bool:
    weight = linear_weight(module)
    return weight.device.type == "cpu" and weight.shape[1] % STEP == 0
