"""Finds out what a norm of a transformers model computes by running one of its class with random weights.

Classes differ in whether they centre rows, whether they add 1 to their weight, and whether they round before
or after the weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from outrider.engine.fused_decoder.decoder import Norm
from outrider.engine.fused_decoder.modules import TOLERANCE, NotFused

_Factor: TypeAlias = Callable[[Tensor], Tensor]
_FACTORS: tuple[_Factor, ...] = (
    lambda weight: weight,
    lambda weight: weight.float(),  # rounds after the weight (OLMo 2)
    lambda weight: weight + 1,
    lambda weight: weight.float() + 1,  # Gemma
)
"""What normalised rows may be multiplied by, the likeliest first."""


NO_EPS = 1e-5
"""The eps of norms that do not name theirs, which is torch's default."""


def described(module: nn.Module, like: Tensor, width: int = 0) -> Norm:
    """Return what a norm computes. A norm without weights gets ones `like` a tensor, `width` of them unless
    it has a shape.

    Raises:
        NotFused: it computes none of the known norms.
    """
    probe = _with_random_weights(module)
    tried = _weight(probe, torch.empty(0), width)
    rows = _rows(tried)
    try:
        with torch.no_grad():
            given = probe(rows)
    except Exception as error:
        raise NotFused(f"{type(module).__name__} does not run by itself ({error})") from error
    ways = list(product((False, True), _FACTORS))
    distances = [_distance(_computed(_norm(probe, tried, *way), rows), given) for way in ways]
    best = min(range(len(ways)), key=distances.__getitem__)
    if not distances[best] <= TOLERANCE:
        raise NotFused(f"{type(module).__name__} computes none of the known norms")
    return _norm(module, _weight(module, like, width), *ways[best])


def _norm(module: Any, weight: Tensor, centred: bool, factor: _Factor) -> Norm:
    bias = getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", NO_EPS)) or 0.0
    return Norm(factor(weight), eps, centred, None if bias is None else bias.detach())


def _weight(module: Any, like: Tensor, width: int) -> Tensor:
    weight: Tensor | None = getattr(module, "weight", None)
    if weight is None:
        return like.new_ones(getattr(module, "normalized_shape", width))
    return weight.detach()


def _with_random_weights(module: nn.Module) -> nn.Module:
    """Return a copy with random weights on the CPU, of the same class and dtype: loaded weights may be all
    ones."""
    probe, generator = copy.deepcopy(module).to_empty(device="cpu"), torch.Generator().manual_seed(0)
    for weight in probe.parameters():
        weight.data.normal_(generator=generator)
    return probe


def _rows(weight: Tensor) -> Tensor:
    """Return rows [2, C] whose mean is not 0: one of usual size, and one so small that eps matters."""
    rows = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(1)) + 0.5
    return (rows * torch.tensor([[1.0], [1e-3]])).to(weight.dtype)


def _computed(norm: Norm, rows: Tensor) -> Tensor:
    """Return the norm of rows as the kernels compute it."""
    exact = rows.float()
    if norm.centred:
        exact = exact - exact.mean(-1, keepdim=True)
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + norm.eps)
    if not norm.centred and norm.weight.dtype != torch.float32:
        return exact.to(rows.dtype) * norm.weight
    shift = 0.0 if norm.bias is None else norm.bias.float()
    return (exact * norm.weight.float() + shift).to(rows.dtype)


def _distance(computed: Tensor, given: Tensor) -> float:
    """Return the relative distance of the worse row."""
    exact = given.float()
    return float(((computed.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
