"""The interface of draft heads: one layer over rows. A row is a token and the target's feature of the token
before it.

Shapes: N rows, A rows whose results are asked for, C width of the head, Q query heads, D width of keys, V
width of values (of logits: number of tokens), L rows that are seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

Mix: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [A, Q, D], entries [L, ...] and what each query sees [A, L] bool -> the result of attention,
[A, Q * V]."""
Attend: TypeAlias = Callable[[Tensor, Tensor, Mix], Tensor]
"""Takes the queries [N, Q, D] of all rows, their entries (keys and values) [N, ...], and the head's `Mix`.
Keeps the entries, and returns the result of attention of the rows that are asked for, [A, Q * V]."""


class Rows(NamedTuple):
    """The rows of one forward."""

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64, of the tokens in their texts."""
    features: Tensor
    """[N, C], of the tokens before."""
    asked: Sequence[int]
    """[A] indices of the rows whose results are wanted."""


class Head(nn.Module, ABC):
    """A head with its weights; for inference, on one thread."""

    kind: str
    """How the draft service names it."""
    feature_layers: tuple[int, ...]
    """Layers of the target whose inputs are read, in the order of a feature's parts."""
    target_hidden_size: int
    """Width of one of these inputs."""
    vocab_size: int
    """Number of the target's tokens."""
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Inputs of the target's layers, side by side [N, layers * their width] -> features [N, C]."""

    @abstractmethod
    def compute(self, rows: Rows, attend: Attend) -> tuple[Tensor, Tensor] | None:
        """Return features [A, C] of the rows below the asked ones, and float32 logits [A, V] of the target's
        tokens, minus infinity for tokens that the head does not propose; None if no row is asked for."""
