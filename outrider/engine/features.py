"""The inputs of some of the target's layers, for drafts that read them: taken from a forward, and as bytes on
the wire.

A row holds the wanted layers' inputs at one token side by side, in bfloat16, little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class FeatureTap:
    """Takes the inputs of some layers at some rows of the running forward; idle while `layers` is empty.

    Layer i's input is `hidden_states[i]` of transformers. The number after the last layer's stands for the
    output layer, whose input is what the last norm returns. Shapes: N packed tokens, F wanted rows, C width.
    """

    def __init__(self) -> None:
        self.layers: tuple[int, ...] = ()
        self.rows: Sequence[int] = ()
        """Packed positions of the wanted rows, which the runner sets before a forward."""
        self.taken: dict[int, Tensor] = {}
        """The inputs [F, C] taken so far, by layer."""

    @contextmanager
    def open(self, layers: Sequence[int]) -> Iterator[None]:
        """Take these layers' inputs while the `with` block runs."""
        self.layers, self.taken = tuple(layers), {}
        try:
            yield
        finally:
            self.layers, self.rows = (), ()

    def take(self, layer: int, hidden: Tensor) -> None:
        """Copy the wanted rows of a layer's input `hidden` [N, C], if the layer is wanted."""
        if layer in self.layers:
            rows = torch.tensor(self.rows, dtype=torch.int64, device=hidden.device)
            self.taken[layer] = hidden.index_select(0, rows)


def to_bytes(rows: Tensor) -> bytes:
    """Rows [F, layers C] for the wire."""
    numbers = rows.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy()
    return bytes(numbers.astype("<i2", copy=False).tobytes())


def from_bytes(data: bytes, width: int) -> Tensor:
    """Return a copy of rows [F, width] bfloat16 from the wire; the caller has checked the length of
    `data`."""
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, width)
