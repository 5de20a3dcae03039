"""Norms of rows, by a kernel of the project where it runs, otherwise by torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import layer_norm

from outrider.engine.cpu.layer import NormKernel, runs
from outrider.engine.fused_decoder.decoder import Norm


class RowNorm:
    """A norm as it is computed on the CPU and on GPUs without Triton."""

    def __init__(self, norm: Norm, dtype: torch.dtype | None = None) -> None:
        """The kernel takes rows of `dtype`, by default the weight's; torch takes others."""
        self._norm, weight = norm, norm.weight
        self._dtype = weight.dtype if dtype is None else dtype
        kernel_runs = weight.ndim == 1 and runs(self._dtype, weight.device)
        self._kernel = None
        if kernel_runs:
            self._kernel = NormKernel(weight, norm.eps, self._dtype, centred=norm.centred, bias=norm.bias)
        width = weight.shape[-1]
        self._scaled = weight.float() * width**0.5
        self._floor = torch.tensor([(norm.eps * width) ** 0.5], device=weight.device)
        self._torch_has_one = weight.device.type != "cpu" and weight.ndim == 1 and weight.dtype == self._dtype

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Return the norm of x [..., C]. With `added`, first add it to x in place; both must then be
        contiguous."""
        if self._kernel is not None and x.dtype == self._dtype:
            if added is None:
                return self._kernel(x)
            if added.dtype == x.dtype:
                return self._kernel.after(x, added)
        return self._plain(x if added is None else x.add_(added))

    def inside(self, x: Tensor) -> None:
        """Normalise rows [N, C] of a wider tensor in place."""
        if self._kernel is not None and x.dtype == self._dtype:
            self._kernel.inside(x)
        else:
            x.copy_(self(x))

    def _plain(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C] by torch."""
        norm, shape = self._norm, self._norm.weight.shape
        if norm.centred:
            return layer_norm(x, shape, norm.weight, norm.bias, norm.eps)
        if self._torch_has_one:
            return torch.rms_norm(x, shape, norm.weight, norm.eps)
        # |x| / sqrt(C) is the root mean square; hypot adds eps below the root.
        exact = x.float()
        length = torch.hypot(vector_norm(exact, 2, -1, True), self._floor)
        return exact.div(length).mul_(self._scaled).to(x.dtype)


def only_add(x: Tensor, added: Tensor | None) -> Tensor:
    """Add in place and return the sum; stands where a layer has no norm."""
    return x if added is None else x.add_(added)
