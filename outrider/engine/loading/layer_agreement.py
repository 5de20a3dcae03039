"""Measures how often a model without some layers predicts what the whole model predicts, on texts that the
whole model wrote."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.loading.layers import layers_of, without


class LayerAgreement:
    """Texts that a model wrote, and its predictions at each of their tokens."""

    def __init__(
        self, network: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float
    ) -> None:
        """Writes `new_tokens` after each prompt. Raises ModelError for a model whose layers are not found."""
        self._network: Any = network
        self._temperature, self._new_tokens = temperature, new_tokens
        self._layers = layers_of(network)
        self._texts = [self._written(prompt) for prompt in prompts]
        self._said = [self._says(text) for text in self._texts]

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return len(self._layers)

    def acceptance(self, skipped: Collection[int]) -> float:
        """Mean probability that a token of the model without these layers is accepted by the whole model.

        Greedy, it is the share of equal tokens; otherwise the mean overlap of both distributions.
        """
        with without(self._network, self._layers, skipped):
            said = [self._says(text) for text in self._texts]
        agreed = [self._agreement(ours, theirs) for ours, theirs in zip(said, self._said, strict=True)]
        return float(torch.cat(agreed).mean())

    @torch.inference_mode()
    def _written(self, prompt: Sequence[int]) -> Tensor:
        tokens = torch.tensor([list(prompt)], device=self._network.device)
        sampled = {"do_sample": True, "temperature": self._temperature, "top_k": 0}
        chosen = sampled if self._temperature else {"do_sample": False}
        length = {"max_new_tokens": self._new_tokens, "min_new_tokens": self._new_tokens}
        whole: Tensor = self._network.generate(
            tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **length, **chosen
        )
        return whole

    @torch.inference_mode()
    def _says(self, text: Tensor) -> Tensor:
        """Return tokens [T] if greedy, otherwise probabilities [T, V], for the T new tokens of a text."""
        logits: Tensor = self._network(text, use_cache=False).logits[0, -self._new_tokens - 1 : -1].float()
        return logits.argmax(-1) if not self._temperature else (logits / self._temperature).softmax(-1)

    def _agreement(self, ours: Tensor, theirs: Tensor) -> Tensor:
        return (ours == theirs).float() if not self._temperature else torch.minimum(ours, theirs).sum(-1)
