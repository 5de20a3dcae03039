"""Moves a model's weights to its device, one after the other.

Until then they are pages of mapped files, unless transformers had to convert or merge them. The system can
drop such pages and read them again, so the host needs memory only for the largest weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

PROGRESS_BYTES = 4 * 2**30
"""Bytes moved between two reports of progress."""


def move_weights(network: nn.Module, place: torch.device, say: Callable[[str], None]) -> None:
    """Move parameters and buffers to `place`."""
    total, moved, told = sum(weight.nbytes for weight in network.parameters()), 0, 0
    for weight in network.parameters():
        weight.data = weight.data.to(place)
        moved += weight.nbytes
        if moved - told >= PROGRESS_BYTES:
            told = moved
            say(f"{moved / 1e9:.1f} of {total / 1e9:.1f} GB of weights are on {place}")
    network.to(place)
