"""Finds the parts of a mixture of experts in its transformers module."""

from __future__ import annotations

from typing import Any

from torch import nn

from outrider.engine.fused_decoder import modules
from outrider.engine.fused_decoder.decoder import BoundedGate, ExpertLinears, Experts, ForeignMlp, Router
from outrider.engine.fused_decoder.joining import linear_of
from outrider.engine.quantization.stacked import DOWN, GATE_UP, bias_of, is_stacked, weights_of

_ROUTERS = (
    "GptOssTopKRouter",
    "GraniteMoeTopKRouter",
    "MixtralTopKRouter",
    "OlmoeTopKRouter",
    "Qwen3MoeTopKRouter",
)
"""Routers that choose as `Router` does."""


def is_mixture(block: nn.Module) -> bool:
    """True where a block consists of a router and experts of the known kinds, and nothing else."""
    parts = dict(block.named_children())
    experts = parts.pop("experts", None)
    return is_stacked(experts) and [type(part).__name__ in _ROUTERS for part in parts.values()] == [True]


class Mixture:
    """The modules of a mixture of experts."""

    def __init__(self, block: nn.Module) -> None:
        """`is_mixture(block)` must be true."""
        self.experts: Any = block.get_submodule("experts")
        (self.router,) = (part for part in block.children() if part is not self.experts)

    def all(self) -> list[nn.Module]:
        """Every module with weights."""
        return [self.router, self.experts]

    @property
    def alternating(self) -> bool:
        """True where columns of gate and up alternate, as in gpt-oss; otherwise one half is the gate, the
        other up."""
        return not hasattr(self.experts, "act_fn")

    @property
    def widths(self) -> tuple[int, int]:
        """C and F."""
        hidden, columns = weights_of(self.experts, DOWN).shape[1:]
        return hidden, columns

    def weights(self, name: str) -> list[nn.Parameter]:
        """The weights of a name, and the biases if there are any."""
        found = (getattr(self.experts, each, None) for each in (name, f"{name}_bias"))
        return [weight for weight in found if weight is not None]

    def fused(self) -> Experts:
        """Return the fused experts, with the weights of transformers' module."""
        own = self.experts
        return Experts(
            _router(self.router),
            own,
            gate_up=self._linears(GATE_UP),
            down=self._linears(DOWN),
            activation=None if self.alternating else modules.activation(own, "act_fn"),
            gate=BoundedGate(own.alpha, own.limit) if self.alternating else own._apply_gate,
        )

    def _linears(self, name: str) -> ExpertLinears:
        return ExpertLinears(weights_of(self.experts, name), bias_of(self.experts, name))


class ForeignBlock:
    """A mixture of experts of another kind, which transformers keeps computing."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def all(self) -> list[nn.Module]:
        """See `Mixture.all`."""
        return [self._block]

    def fused(self) -> ForeignMlp:
        """Return the block as it is, in place of an MLP."""
        return ForeignMlp(self._block)


def _router(found: Any) -> Router:
    scores = linear_of(found.weight, getattr(found, "bias", None))
    return Router(scores, found.top_k, normalised=getattr(found, "norm_topk_prob", True))
