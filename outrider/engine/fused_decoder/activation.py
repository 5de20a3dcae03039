"""What lies between the products of an MLP without a gate: by a kernel where there is one, else by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from outrider.engine.cpu.layer import GeluKernel, runs

Activation: TypeAlias = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by an approximation with tanh, as GPT-2 has it."""
    return gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """The square of what is positive (So et al. 2021, "Primer")."""
    return relu(x).square_()


_IS_TANH: Mapping[Activation, bool] = {gelu: False, gelu_tanh: True}
"""The activations with a kernel."""
ON_GPUS: Mapping[Activation, str] = {
    silu: "silu",
    gelu: "gelu",
    gelu_tanh: "gelu_tanh",
    relu: "relu",
    relu_squared: "relu_squared",
}
"""Those with one on GPUs, and what it calls them."""


def make_activation(activation: Activation, dtype: torch.dtype, device: torch.device) -> Activation:
    """The activation of a model of this dtype on a device; it may overwrite its argument."""
    if not has_kernel(activation, dtype, device):
        return activation
    return partial(_run, GeluKernel(dtype, tanh=_IS_TANH[activation]), dtype, activation)


def has_kernel(activation: Activation, dtype: torch.dtype, device: torch.device) -> bool:
    """True where a kernel of ours computes it."""
    return activation in _IS_TANH and runs(dtype, device)


def is_steady(activation: Activation, dtype: torch.dtype, device: torch.device) -> bool:
    """True where a number becomes the same wherever it stands: by a kernel of ours, or rounded once."""
    return activation in (relu, relu_squared) or has_kernel(activation, dtype, device)


def _run(kernel: GeluKernel, dtype: torch.dtype, plain: Activation, x: Tensor) -> Tensor:
    return kernel(x) if x.dtype == dtype and x.is_contiguous() else plain(x)
