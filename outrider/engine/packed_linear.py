"""Linear layers with packed weights, for the CPU.

With AVX-512 kernels of our own (`outrider.engine.kernels`) take fourteen rows in the time of
one, and give a row the same bits in every batch. Elsewhere oneDNN keeps a weight in the block layout that
its kernels read, which halves the time of small batches; these are the operators that torch's own compiler
uses. From two rows on, a row's result then does not depend on how many others there are, while plain float32
products change their order of additions at four: so weights too small to gain speed are packed too.

A layer with `rows` set computes in blocks of these sizes alone; see `outrider.engine.arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from outrider.engine.kernels.crew import Crew
from outrider.engine.kernels.rows import PackedRows, fits
from outrider.engine.row_blocks import RowBlocks

KEPT_BYTES = 16 * 2**20
"""Weights of a model up to which they may stay in the cache that the cores share: half of a common one."""


class RowLinear(nn.Module):
    """`x @ weight.T + bias`, a row at a time as far as results go, where `rows` is set."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.biased = bias is not None
        self.rows: RowBlocks | None = None
        self._weight = self._prepared(weight.detach())
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if self.rows is None:
            return self.compute(x)
        y = self.rows.apply(x.reshape(-1, self.in_features), self.compute)
        return y.view(*x.shape[:-1], self.out_features)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in one product."""
        return linear(x, self._weight, self._bias)

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _prepared(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] as `compute` takes it."""
        return weight


class PackedLinear(RowLinear):
    """The same with a weight that was packed once."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in one product."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def _prepared(self, weight: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed


class StreamedLinear(RowLinear):
    """The same with kernels that read the weights once for up to fourteen rows."""

    gated = False

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, crew: Crew | None = None, kept: bool = True
    ) -> None:
        super().__init__(weight.new_empty(weight.shape[0], 0), None)
        self.in_features, self.biased = weight.shape[1], bias is not None
        self.crew = crew or Crew()
        bias = None if bias is None else bias.detach()
        self._packed = PackedRows(weight.detach(), bias, self.crew, gated=self.gated, kept=kept)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in one product."""
        if x.ndim == 2 and x.is_contiguous():
            return self._packed.product(x)
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._packed.product(rows).view(*x.shape[:-1], -1)


class StreamedGate(StreamedLinear):
    """SiLU(gate) up, where the layer's result is the gate and up side by side."""

    gated = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out / 2]; no row needs others, so there are no blocks of them."""
        return self.compute(x)


def pack_linears(model: nn.Module, crew: Crew | None = None, gates: Collection[str] = ()) -> int:
    """Replace the linear layers of a model on the CPU by packed ones, where there is a way; returns how many.

    Kernels of our own are run by the crew, without one by the calling thread alone; with them the layers
    named in `gates` become a `StreamedGate`.
    An embedding that shares its weight with the output layer keeps it: the output layer gets a packed copy.
    """
    streamed = [name for name, module in model.named_modules() if _can_be_streamed(module)]
    opened = [name for name in streamed if name in gates]
    others = [name for name in streamed if name not in gates]
    kept = sum(_weight(model.get_submodule(name)).nbytes for name in streamed) <= KEPT_BYTES
    count = _replace(model, opened, partial(StreamedGate, crew=crew, kept=kept))
    count += _replace(model, others, partial(StreamedLinear, crew=crew, kept=kept))
    if _operators_exist():
        packed = [name for name, module in model.named_modules() if _can_be_packed(module)]
        count += _replace(model, packed, PackedLinear)
    return count


def wrap_linears(model: nn.Module) -> int:
    """Replace the linear layers that are not packed by ones that can compute in blocks; returns how many."""
    return _replace(model, [name for name, module in model.named_modules() if _is_linear(module)], RowLinear)


def _replace(model: nn.Module, names: list[str], kind: Callable[..., RowLinear]) -> int:
    for name in names:
        parent, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(name)
        setattr(model.get_submodule(parent), attribute, kind(_weight(module), module.bias))
    return len(names)


def _operators_exist() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D)  # a subclass may compute something else


def _weight(module: nn.Module) -> torch.Tensor:
    """[out, in] of a linear layer."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.t() if isinstance(module, Conv1D) else weight


def _can_be_streamed(module: nn.Module) -> bool:
    return _is_linear(module) and fits(_weight(module))


def _can_be_packed(module: nn.Module) -> bool:
    if not _is_linear(module):
        return False
    weight = _weight(module)
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
