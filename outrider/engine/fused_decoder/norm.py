"""RMS norms with a kernel of ours where it runs, else with torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from outrider.engine.cpu.layer import NormKernel, runs
from outrider.engine.fused_decoder.decoder import Norm


class RmsNorm:
    """A norm as it is computed on the CPU, and where a GPU has no Triton."""

    def __init__(self, norm: Norm, dtype: torch.dtype | None = None) -> None:
        """The kernel takes rows of `dtype`, the weight's unless given; torch takes others."""
        self._weight, self._eps = weight, eps = norm.weight, norm.eps
        self._dtype = dtype = weight.dtype if dtype is None else dtype
        width = weight.shape[-1]
        self._scaled = weight.float() * width**0.5
        self._floor = torch.tensor([(eps * width) ** 0.5], device=weight.device)
        kernel_runs = weight.ndim == 1 and runs(dtype, weight.device)
        self._kernel = NormKernel(weight, eps, dtype) if kernel_runs else None
        self._torch_has_one = weight.device.type != "cpu" and weight.ndim == 1 and weight.dtype == dtype

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[..., C] -> [..., C], of the sum with `added`, which x becomes; both are contiguous then."""
        if self._kernel is not None and x.dtype == self._dtype:
            if added is None:
                return self._kernel(x)
            if added.dtype == x.dtype:
                return self._kernel.after(x, added)
        if added is not None:
            x.add_(added)
        if self._torch_has_one:
            return torch.rms_norm(x, self._weight.shape, self._weight, self._eps)
        # |x| / sqrt(C) is the root mean square; hypot adds eps below the root.
        exact = x.float()
        length = torch.hypot(vector_norm(exact, 2, -1, True), self._floor)
        return exact.div(length).mul_(self._scaled).to(x.dtype)
