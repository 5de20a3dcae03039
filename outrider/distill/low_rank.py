"""LoRA: low-rank updates of a network's linear layers, in place of all its weights (Hu and others 2021).

The network stays as it is. A layer with the weight W [out, in] computes (W + s B A) x, with A [rank, in] and
B [out, rank], which are trained. B begins with zeros, so the network computes what it did before. `merge`
adds the products to the weights: the result is an ordinary network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.protocol.errors import ConfigError

ALPHA = 32.0
"""The scale s of an update times its rank. With it, the best learning rate hardly depends on the rank."""
RATE_TIMES = 10.0
"""LoRA's best learning rate, divided by that of training all weights (Schulman and others 2025)."""


def check_rank(network: Any, rank: int) -> None:
    """Refuse updates with at least as many numbers as the weights that they change.

    Raises:
        ConfigError: the updates have so many, or the network has no linear layers.
    """
    sizes = [_sizes(layer) for layer in _linear_layers(network)]
    if not sizes:
        raise ConfigError("--lora: this draft has no linear layers to update; leave it out")
    whole = sum(rows * columns for rows, columns in sizes)
    trained = sum(rank * (rows + columns) for rows, columns in sizes)
    if trained >= whole:
        raise ConfigError(
            f"--lora: updates of rank {rank} have {trained:,} numbers, the layers themselves {whole:,}; "
            "take a smaller rank, or leave it out to train all weights"
        )


class LowRankUpdates(nn.Module):
    """Updates of all linear layers of a network except its output layer, which may also be the embedding.

    Only the updates have gradients.
    """

    def __init__(self, network: Any, rank: int) -> None:
        """Attach the updates to the network's layers.

        Raises:
            ConfigError: see `check_rank`.
        """
        super().__init__()
        check_rank(network, rank)
        draw = torch.Generator().manual_seed(0)
        self._pairs = [(layer, _Update(layer, rank, draw)) for layer in _linear_layers(network)]
        self.updates = nn.ModuleList(update for _, update in self._pairs)
        network.requires_grad_(False)
        self._hooks = [layer.register_forward_hook(update.added) for layer, update in self._pairs]

    @torch.no_grad()
    def merge(self) -> None:
        """Add the updates to the weights, once; the network then computes the same up to rounding."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for layer, update in self._pairs:
            change = update.scale * update.up @ update.down
            layer.weight += change.T if isinstance(layer, Conv1D) else change


class _Update(nn.Module):
    """The update of one layer, which is added to the layer's results."""

    def __init__(self, layer: Any, rank: int, draw: torch.Generator) -> None:
        super().__init__()
        rows, columns = _sizes(layer)
        self.scale = ALPHA / rank
        edge = 1.0 / math.sqrt(columns)
        place = layer.weight.device
        self.down = nn.Parameter(torch.empty(rank, columns).uniform_(-edge, edge, generator=draw).to(place))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=place))

    def added(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The output of a layer with its update; a forward hook."""
        return output + self.scale * F.linear(F.linear(inputs[0], self.down), self.up)


def _linear_layers(network: Any) -> Iterator[Any]:
    """The linear layers without the output layer, in the order of the network."""
    output = network.get_output_embeddings()
    for module in network.modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not output:
            yield module


def _sizes(layer: Any) -> tuple[int, int]:
    """Number of outputs and inputs of a layer; GPT-2's Conv1D holds its weight transposed."""
    rows, columns = layer.weight.shape
    return (columns, rows) if isinstance(layer, Conv1D) else (rows, columns)
