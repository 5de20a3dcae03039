"""Linear layers of which a device holds only the codes.

They are called like torch's layers, and compute in one of two ways: with numbers that are decoded in each
call and rounded to the model's dtype, as transformers does; or from the codes, by the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from outrider.engine.gpu.accelerator import missing
from outrider.engine.quantization.planes import PlanarWeight, joined_planes

Product = Callable[[Tensor, PlanarWeight, Tensor | None], Tensor]


class CodedLinear(nn.Module):
    """`x @ weight.T + bias`, [..., in] -> [..., out], in 16 bits (or float32, in tests)."""

    def __init__(self, weight: PlanarWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self._kind = dtype, (weight.bits, weight.group, weight.numbers, weight.e4m3)
        # Parameters, so that they move with the model and count as its weights.
        self.words, self.scales = _kept(weight.words), _kept(weight.scales)
        self.zeros = None if weight.zeros is None else _kept(weight.zeros)
        self.bias = None if bias is None else _kept(bias)
        self.product: Product | None = None
        """The kernel's product; None: numbers are decoded."""

    @property
    def planes(self) -> PlanarWeight:
        """The codes."""
        return PlanarWeight(self.words, self.scales, self.zeros, *self._kind)

    @property
    def weight(self) -> Tensor:
        """The decoded numbers [out, in]; made at each access."""
        return self.planes.values(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.product is None:
            return linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return self.product(rows, self.planes, self.bias).view(*x.shape[:-1], self.out_features)

    def hold(self, weight: PlanarWeight) -> None:
        """Use other memory that holds the same numbers."""
        self.words.data, self.scales.data = weight.words, weight.scales
        self.zeros = None if weight.zeros is None else _kept(weight.zeros)


class SideBySide(nn.Module):
    """The results of several layers next to each other, for layers whose codes cannot be joined to one
    weight."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        layers: Sequence[Any] = parts
        self.out_features: int = sum(part.out_features for part in layers)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return torch.cat([part(x) for part in self.parts], -1)


def without_codes(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights cannot be codes on a device other than the CPU; None when they can."""
    if device.type != "cuda":
        return f"there are no kernels for {device.type}; set device to cpu or cuda"
    if (lacking := missing(device)) is not None:
        return f"{lacking}; see docs/gpu.md, or set device to cpu"
    if dtype.itemsize != 2:
        return f"the kernels take 16 bits, and this model is {dtype}; set dtype to bfloat16"
    return None


def compute_from_codes(model: nn.Module, wanted: bool) -> None:
    """Let the coded layers of a model compute by the kernel if `wanted`, otherwise with decoded numbers."""
    product: Product | None = None
    for layer in model.modules():
        if isinstance(layer, CodedLinear):
            product = (product or _kernel()) if wanted else None
            layer.product = product


def joined_layers(parts: Sequence[nn.Module]) -> nn.Module:
    """Return one layer for several, at least one of which has codes. Layers that share one weight then become
    views of it."""
    coded = [part for part in parts if isinstance(part, CodedLinear)]
    whole = joined_planes([part.planes for part in coded]) if len(coded) == len(parts) else None
    if whole is None:
        return SideBySide(parts)
    fused, start = CodedLinear(whole, _biases(coded), coded[0].dtype), 0
    for part in coded:
        part.hold(whole.rows(slice(start, start + part.out_features)))
        start += part.out_features
    return fused


def _biases(parts: Sequence[CodedLinear]) -> Tensor | None:
    if all(part.bias is None for part in parts):
        return None
    return torch.cat([_bias(part) for part in parts])


def _bias(part: CodedLinear) -> Tensor:
    zeros: Tensor = part.scales.new_zeros(part.out_features, dtype=part.dtype)
    return zeros if part.bias is None else part.bias.detach()


def _kernel() -> Product:
    from outrider.engine.gpu.coded_product import coded_product  # imports Triton

    return coded_product


def _kept(tensor: Tensor) -> Any:
    return nn.Parameter(tensor.detach(), requires_grad=False)
