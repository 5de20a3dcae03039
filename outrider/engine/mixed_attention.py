"""Paged attention of models whose layers differ in the shapes of their heads, or share keys and values.

Layers of one shape have a memory of their own, with the attention for it. A layer that sees keys and values
of another one (Gemma 4) has that one's place: it stores the same numbers there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outrider.engine.attention import PagedAttention
from outrider.engine.kv.pages import Move
from outrider.engine.loaded_model import Geometry
from outrider.engine.step import PackedStep


class MixedAttention(PagedAttention):
    """An attention for each part of a geometry, and the attention function that hands layers to them."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[[Geometry], PagedAttention],
    ) -> None:
        """`make` gives the attention of a part, with as many slots, dtype and device."""
        self._make = make
        super().__init__(geometry, num_slots, dtype, device)

    def allocate(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """See `PagedAttention.allocate`."""
        self._shapes = geometry.parts
        self._parts = [self._make(part) for part in geometry.parts]
        self._places = [
            (self._parts[part], SimpleNamespace(layer_idx=layer)) for part, layer in geometry.places
        ]

    def stores(self) -> tuple[Tensor, ...]:
        """See `PagedAttention.stores`."""
        return tuple(store for part in self._parts for store in part.stores())

    @contextmanager
    def during(self, step: PackedStep) -> Iterator[None]:
        """See `PagedAttention.during`."""
        with ExitStack() as stack:
            for shape, part in zip(self._shapes, self._parts, strict=True):
                stack.enter_context(part.during(replace(step, queries_per_kv=shape.queries_per_kv)))
            yield

    def move(self, moves: Sequence[Move]) -> None:
        """See `PagedAttention.move`."""
        for part in self._parts:
            part.move(moves)

    def attend(self, module: torch.nn.Module, *states: Any, **options: Any) -> tuple[Tensor, None]:
        """See `PagedAttention.attend`."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        part, place = self._places[layer]
        result = part.attend(place, *states, **options)  # type: ignore[arg-type]
        self.unknown.update(part.unknown)
        return result
