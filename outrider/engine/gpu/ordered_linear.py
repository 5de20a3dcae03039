"""Linear layers on a GPU whose rows have the same bits in every batch, and the function that puts them into a
model.

Layers with codes have such sums already (`coded_product`).
"""

from __future__ import annotations

from typing import Any, assert_never

import torch
from torch import Tensor, nn

from outrider.engine.fused_decoder.decoder import Experts, ForeignMlp, FusedDecoder, GatedMlp, PlainMlp
from outrider.engine.gpu.coded_linear import SideBySide
from outrider.engine.gpu.kernels.product import product_kernel
from outrider.engine.gpu.shapes import check_shape
from outrider.engine.linears import is_linear, linear_weight

BLOCK_ROWS = 64
"""Rows of a tile, padded with zeros: reading the weight takes longer than multiplying this many rows."""
NARROW, WIDE = (64, 128), (128, 64)
"""Columns of a tile, and numbers of a row that a program multiplies at a time: as many as fit the shared
memory."""
WIDE_FROM = 16384
"""Columns of a weight from which on there are enough programs with wide tiles for that."""


class OrderedLinear(nn.Module):
    """`x @ weight.T + bias`, [M, in] -> [M, out], with the same bits for a row whatever M is."""

    ordered = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` is [out, in] without gaps, and is not copied."""
        super().__init__()
        check_shape("weight", weight, *weight.shape)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self._block, self._numbers = WIDE if self.out_features >= WIDE_FROM else NARROW
        self._precision = "ieee" if weight.dtype == torch.float32 else "tf32"

    def forward(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out]."""
        rows = len(x)
        check_shape("what a product takes", x, rows, self.in_features)
        out = x.new_empty((rows, self.out_features))
        product_kernel[(-(-rows // BLOCK_ROWS), -(-self.out_features // self._block))](
            x,
            self.weight,
            x if self.bias is None else self.bias,
            out,
            rows,
            IN=self.in_features,
            OUT=self.out_features,
            BIAS=self.bias is not None,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_N=self._block,
            BLOCK_K=self._numbers,
            PRECISION=self._precision,
            num_warps=4,
            num_stages=4,
        )
        return out


def order_linears(decoder: FusedDecoder) -> None:
    """Replace the linear layers of a fused decoder. Layers with codes and those of experts have a fixed order
    already."""
    for layer in decoder.stack:
        layer.qkv, layer.output = _ordered(layer.qkv), _ordered(layer.output)
        mlp = layer.mlp
        match mlp:
            case Experts():
                mlp.router.scores = _ordered(mlp.router.scores)
            case GatedMlp():
                mlp.gate.gate_up, mlp.down = _ordered(mlp.gate.gate_up), _ordered(mlp.down)
            case PlainMlp():
                _order_plain(mlp)
            case ForeignMlp():
                pass
            case _:
                assert_never(mlp)
        if layer.inputs is not None:
            _order_plain(layer.inputs)
    if decoder.inputs is not None:
        decoder.inputs.projection = _ordered(decoder.inputs.projection)
    decoder.head = _ordered(decoder.head)


def _order_plain(mlp: PlainMlp) -> None:
    mlp.up, mlp.down = _ordered(mlp.up), _ordered(mlp.down)


def _ordered(module: nn.Module) -> nn.Module:
    if isinstance(module, SideBySide):
        return SideBySide([_ordered(part) for part in module.parts])
    if not is_linear(module):
        return module
    bias: Any = module.bias
    return OrderedLinear(linear_weight(module).detach().contiguous(), None if bias is None else bias.detach())
