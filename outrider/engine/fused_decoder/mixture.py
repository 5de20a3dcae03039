"""Finds the parts of a mixture of experts in transformers' module of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outrider.engine.fused_decoder import modules
from outrider.engine.fused_decoder.decoder import BoundedGate, ExpertLinears, Experts, ForeignMlp, Router
from outrider.engine.fused_decoder.joining import linear_of

_ROUTERS = ("GptOssTopKRouter", "MixtralTopKRouter", "OlmoeTopKRouter", "Qwen3MoeTopKRouter")
"""Routers that choose as `Router` does."""
_WEIGHTS = ("gate_up_proj", "down_proj")
"""Of all experts, stacked, in transformers' module."""


def is_mixture(block: nn.Module) -> bool:
    """True where a block is a router and experts of the kind that is known, and nothing else."""
    parts = dict(block.named_children())
    experts = parts.pop("experts", None)
    if experts is None or [type(part).__name__ in _ROUTERS for part in parts.values()] != [True]:
        return False
    known = {*_WEIGHTS, *(f"{name}_bias" for name in _WEIGHTS)}
    found = {name for name, _ in experts.named_parameters()}
    return known >= found >= {*_WEIGHTS}


class Mixture:
    """The modules of a mixture of experts."""

    def __init__(self, block: nn.Module) -> None:
        """`is_mixture` holds."""
        self.experts: Any = block.get_submodule("experts")
        (self.router,) = (part for part in block.children() if part is not self.experts)

    def all(self) -> list[nn.Module]:
        """Every module with weights."""
        return [self.router, self.experts]

    def fused(self) -> Experts:
        """With the weights that transformers' module has."""
        own, usual = self.experts, hasattr(self.experts, "act_fn")
        return Experts(
            _router(self.router),
            own,
            gate_up=self._linears("gate_up_proj"),
            down=self._linears("down_proj"),
            activation=modules.activation(own, "act_fn") if usual else None,
            gate=own._apply_gate if usual else BoundedGate(own.alpha, own.limit),
        )

    def _linears(self, name: str) -> ExpertLinears:
        weight: Tensor = getattr(self.experts, name).detach()
        bias: Tensor | None = getattr(self.experts, f"{name}_bias", None)
        turned = weight.transpose(1, 2) if self.experts.is_transposed else weight
        return ExpertLinears(turned, None if bias is None else bias.detach())


class ForeignBlock:
    """A mixture of experts of another kind, which stays what it is."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def all(self) -> list[nn.Module]:
        """See `Mixture.all`."""
        return [self._block]

    def fused(self) -> ForeignMlp:
        """As it is."""
        return ForeignMlp(self._block)


def _router(found: Any) -> Router:
    scores = linear_of(found.weight, getattr(found, "bias", None))
    return Router(scores, found.top_k, normalised=getattr(found, "norm_topk_prob", True))
