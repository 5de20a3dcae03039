"""Moves a model's weights to its device, one after the other.

Until then they are pages of mapped files, unless transformers had to convert or to merge them: the system
drops such pages and reads them again as it likes, so the host holds no more than the largest weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

PROGRESS_BYTES = 4 * 2**30
"""After which it is said how far the move is."""


def move_weights(network: nn.Module, place: torch.device, say: Callable[[str], None]) -> None:
    """Move parameters and buffers."""
    total, moved, told = sum(weight.nbytes for weight in network.parameters()), 0, 0
    for weight in network.parameters():
        weight.data = weight.data.to(place)
        moved += weight.nbytes
        if moved - told >= PROGRESS_BYTES:
            told = moved
            say(f"{moved / 1e9:.1f} of {total / 1e9:.1f} GB of weights are on {place}")
    network.to(place)
