"""Norms of rows, with a kernel of ours where it runs, else with torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import layer_norm

from outrider.engine.cpu.layer import LayerNormKernel, NormKernel, runs
from outrider.engine.fused_decoder.decoder import Norm


class RowNorm(ABC):
    """A norm as it is computed on the CPU, and where a GPU has no Triton."""

    def __init__(self, norm: Norm, dtype: torch.dtype | None = None) -> None:
        """The kernel takes rows of `dtype`, the weight's unless given; torch takes others."""
        self._weight, self._eps = norm.weight, norm.eps
        self._dtype = norm.weight.dtype if dtype is None else dtype
        kernel_runs = norm.weight.ndim == 1 and runs(self._dtype, norm.weight.device)
        self._kernel = self._made_kernel(norm) if kernel_runs else None

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[..., C] -> [..., C], of the sum with `added`, which x becomes; both are contiguous then."""
        if self._kernel is not None and x.dtype == self._dtype:
            if added is None:
                return self._kernel(x)
            if added.dtype == x.dtype:
                return self._kernel.after(x, added)
        return self._plain(x if added is None else x.add_(added))

    def inside(self, x: Tensor) -> None:
        """Normalise rows [N, C] of a wider tensor where they are."""
        x.copy_(self(x))

    @abstractmethod
    def _made_kernel(self, norm: Norm) -> NormKernel:
        """The kernel for rows of `_dtype`."""

    @abstractmethod
    def _plain(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C] by torch."""


class RmsNorm(RowNorm):
    """A norm that does not centre rows."""

    def __init__(self, norm: Norm, dtype: torch.dtype | None = None) -> None:
        """See `RowNorm`."""
        super().__init__(norm, dtype)
        weight, width = norm.weight, norm.weight.shape[-1]
        self._scaled = weight.float() * width**0.5
        self._floor = torch.tensor([(norm.eps * width) ** 0.5], device=weight.device)
        self._torch_has_one = weight.device.type != "cpu" and weight.ndim == 1 and weight.dtype == self._dtype

    def _made_kernel(self, norm: Norm) -> NormKernel:
        return NormKernel(norm.weight, norm.eps, self._dtype)

    def inside(self, x: Tensor) -> None:
        """See `RowNorm.inside`."""
        if self._kernel is not None and x.dtype == self._dtype:
            self._kernel.inside(x)
        else:
            super().inside(x)

    def _plain(self, x: Tensor) -> Tensor:
        if self._torch_has_one:
            return torch.rms_norm(x, self._weight.shape, self._weight, self._eps)
        # |x| / sqrt(C) is the root mean square; hypot adds eps below the root.
        exact = x.float()
        length = torch.hypot(vector_norm(exact, 2, -1, True), self._floor)
        return exact.div(length).mul_(self._scaled).to(x.dtype)


class LayerNorm(RowNorm):
    """A norm that centres rows, with a weight [C]."""

    def __init__(self, norm: Norm, dtype: torch.dtype | None = None) -> None:
        """See `RowNorm`."""
        super().__init__(norm, dtype)
        self._bias = norm.bias

    def _made_kernel(self, norm: Norm) -> NormKernel:
        return LayerNormKernel(norm.weight, norm.bias, norm.eps, self._dtype)

    def _plain(self, x: Tensor) -> Tensor:
        return layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


def make_norm(norm: Norm, dtype: torch.dtype) -> RowNorm:
    """A norm for rows of a model of this dtype."""
    return (LayerNorm if norm.centred else RmsNorm)(norm, dtype)


def only_add(x: Tensor, added: Tensor | None) -> Tensor:
    """In place of a norm: the sum itself, which x becomes."""
    return x if added is None else x.add_(added)
