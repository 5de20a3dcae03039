"""The weights of a lean model: what its layers are made of, fused where one product can do for several.

`outrider.engine.lean.forward` computes with them, `recognise` makes them from a transformers model.

Shapes: C hidden width, Q query heads, H kv heads, D head width, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import silu

from outrider.engine.kernels.layer import NormKernel, runs


class RmsNorm:
    """Scales rows to a root mean square of 1, in float32, then each column by its weight.

    (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".)
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """The weight is [C], or [heads, C] for rows of heads."""
        width = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self._scaled = weight.float() * width**0.5
        self._floor = torch.tensor([(eps * width) ** 0.5], device=weight.device)
        self._kernel = NormKernel(weight, eps) if weight.ndim == 1 and runs(weight) else None
        self._torch_has_one = weight.device.type != "cpu" and weight.ndim == 1

    def __call__(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        if self._kernel is not None and x.dtype == self.weight.dtype:
            return self._kernel(x)
        if self._torch_has_one:
            return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # |x| / sqrt(C) is the root mean square; hypot adds eps below the root.
        exact = x.float()
        length = torch.hypot(vector_norm(exact, 2, -1, True), self._floor)
        return exact.div(length).mul_(self._scaled).to(x.dtype)

    def after(self, x: Tensor, added: Tensor) -> Tensor:
        """Add `added` to x, both [..., C] contiguous, and return the norm of the sum."""
        if self._kernel is not None and x.dtype == added.dtype == self.weight.dtype:
            return self._kernel.after(x, added)
        return self(x.add_(added))


@dataclass(frozen=True, slots=True)
class Settings:
    """What a layer is besides its linear layers."""

    input_norm: RmsNorm
    mlp_norm: RmsNorm
    head_norm: RmsNorm | None
    """Over each head of queries and keys."""
    activation: Callable[[Tensor], Tensor]
    query_heads: int
    kv_heads: int
    scaling: float
    """Factor of the scores."""
    window: int | None
    """Positions that attention reaches back, itself included."""


class LeanLayer(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        index: int,
        settings: Settings,
        *,
        qkv: nn.Linear,
        output: nn.Linear,
        gate_up: nn.Linear,
        down: nn.Linear,
    ) -> None:
        """`qkv` is [(Q + 2 H) * D, C], `gate_up` [2 F, C]."""
        super().__init__()
        self.layer_idx, self.settings = index, settings
        self.qkv, self.output, self.gate_up, self.down = qkv, output, gate_up, down


class LeanDecoder(nn.Module):
    """Embedding, layers, last norm and output layer; `kind` is the model's class in transformers.

    `frequencies` [D / 2] are the radians that a pair turns per position, `stretch` the factor of queries
    and keys that some rope kinds have.
    """

    def __init__(
        self,
        kind: str,
        *,
        embed: nn.Embedding,
        layers: list[LeanLayer],
        norm: RmsNorm,
        head: nn.Linear,
        frequencies: Tensor,
        stretch: float,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.norm, self.head = embed, norm, head
        self.layers = nn.ModuleList(layers)
        self.stack = layers
        self.frequencies, self.stretch = frequencies, stretch

    @property
    def gates(self) -> list[str]:
        """Names of the linear layers that SiLU opens."""
        opened = [layer for layer in self.stack if layer.settings.activation is silu]
        return [f"layers.{layer.layer_idx}.gate_up" for layer in opened]
