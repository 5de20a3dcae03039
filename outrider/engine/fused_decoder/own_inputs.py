"""Finds the modules that give each layer inputs of its own, made from a token's id and its row (Gemma 4)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outrider.engine.fused_decoder import modules
from outrider.engine.fused_decoder.decoder import Norm, PlainMlp, TokenInputs
from outrider.engine.fused_decoder.known_norms import described

_EMBEDDING = "embed_tokens_per_layer"
_FACTOR = "per_layer_model_projection_scale"
"""Gemma 3n names it otherwise, and mixes these inputs into its rows in another way."""
_UP = "per_layer_input_gate"


class InputParts:
    """The modules that make these inputs for all layers."""

    def __init__(self, body: Any) -> None:
        self.embed = modules.embedding(body, _EMBEDDING)
        self.projection = modules.linear(body, "per_layer_model_projection")
        self.norm = modules.norm(body, "per_layer_projection_norm")
        if not hasattr(body, _FACTOR):
            raise modules.NotFused(f"its layers' own inputs have no {_FACTOR}")
        self.factors = getattr(body, _FACTOR), body.per_layer_input_scale

    def all(self) -> list[nn.Module]:
        """Every module with weights."""
        return [self.embed, self.projection, self.norm]

    def fused(self, like: Tensor) -> TokenInputs:
        """Return the fused inputs, made of the same modules."""
        row_factor, factor = self.factors
        norm = described(self.norm, like)
        return TokenInputs(self.embed, self.projection, norm, row_factor=row_factor, factor=factor)


class TakingParts:
    """The modules of a layer that use these inputs."""

    def __init__(self, layer: nn.Module) -> None:
        self.up, self.down = modules.linear(layer, _UP), modules.linear(layer, "per_layer_projection")
        self.norm = modules.norm(layer, "post_per_layer_input_norm")
        self.activation = modules.activation(layer, "act_fn")

    def all(self) -> list[nn.Module]:
        """Every module with weights."""
        return [self.up, self.down, self.norm]

    def fused(self, like: Tensor) -> tuple[PlainMlp, Norm]:
        """Return the fused products, and the norm of their result."""
        return PlainMlp(self.up, self.activation, self.down), described(self.norm, like)


def input_parts(body: nn.Module) -> InputParts | None:
    """Return the modules that make layers' own inputs; None where a model has none."""
    return InputParts(body) if getattr(body, _EMBEDDING, None) is not None else None


def taking_parts(layer: nn.Module) -> TakingParts | None:
    """Return the modules that use a layer's own inputs; None where a layer has none."""
    return TakingParts(layer) if getattr(layer, _UP, None) is not None else None
