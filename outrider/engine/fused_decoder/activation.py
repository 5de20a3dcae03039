"""What is between the products of an MLP: by a kernel where there is one, otherwise by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from outrider.engine.cpu.layer import ActivationKernel, GateKernel, runs
from outrider.engine.fused_decoder.decoder import Gate

Activation: TypeAlias = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by an approximation with tanh, as in GPT-2."""
    return gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """The square of positive numbers, 0 for others (So et al. 2021, "Primer")."""
    return relu(x).square_()


NAMES: Mapping[Activation, str] = {
    silu: "silu",
    gelu: "gelu",
    gelu_tanh: "gelu_tanh",
    relu: "relu",
    relu_squared: "relu_squared",
}
"""The activations that have kernels, on CPUs and on GPUs, and the kernels' names for them."""


def make_activation(activation: Activation, dtype: torch.dtype, device: torch.device) -> Activation:
    """The activation of a model of this dtype on a device; it may overwrite its argument."""
    if not has_kernel(activation, dtype, device):
        return activation
    return partial(_run, ActivationKernel(dtype, NAMES[activation]), dtype, activation)


def make_gate(gate: Gate, dtype: torch.dtype, device: torch.device) -> Activation:
    """The product followed by the gate, of a model of this dtype on a device."""
    product: Activation = gate.gate_up.forward
    if gate.opened:
        return product
    if not has_kernel(gate.activation, dtype, device):
        return cast(Activation, gate.forward)
    opened = GateKernel(dtype, NAMES[gate.activation])
    return lambda x: opened(product(x))


def has_kernel(activation: Activation, dtype: torch.dtype, device: torch.device) -> bool:
    """True where one of the project's CPU kernels computes the activation."""
    return activation in NAMES and runs(dtype, device)


def _run(kernel: ActivationKernel, dtype: torch.dtype, plain: Activation, x: Tensor) -> Tensor:
    return kernel(x) if x.dtype == dtype and x.is_contiguous() else plain(x)
