"""Paged attention of models whose layers differ in the shapes of their heads, or share keys and values.

Layers of one shape have their own memory and attention. A layer that sees another layer's keys and values
(Gemma 4) has that layer's place: its module stores the same numbers there again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.attention import Attention, PagedAttention
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.fused_decoder.decoder import Scores
from outrider.engine.loaded_model import Geometry
from outrider.engine.step import PackedStep


class MixedAttention(Attention):
    """One attention for each part of a geometry, and the attention function that passes each layer to its
    part."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        workers: WorkerPool | None = None,
    ) -> None:
        self._workers = workers
        super().__init__(geometry, num_slots, dtype, device)

    def allocate(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """See `Attention.allocate`."""
        self.dtype, self.device = dtype, device
        self._shapes = geometry.parts
        memory = num_slots, dtype, device, self._workers
        self._parts = [PagedAttention(part, *memory) for part in geometry.parts]
        self._places = {
            layer: (self._parts[place[0]], place[1])
            for layer, place in enumerate(geometry.places)
            if place is not None
        }

    def stores(self) -> tuple[Tensor, ...]:
        """See `Attention.stores`."""
        return tuple(store for part in self._parts for store in part.stores())

    @contextmanager
    def during(self, step: PackedStep) -> Iterator[None]:
        """See `Attention.during`."""
        with ExitStack() as stack:
            for shape, part in zip(self._shapes, self._parts, strict=True):
                stack.enter_context(part.during(replace(step, queries_per_kv=shape.queries_per_kv)))
            yield

    def place(self, layer: int) -> tuple[PagedAttention, int]:
        """See `PagedAttention.place`."""
        return self._places[layer]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `Attention.store`."""
        part, place = self.place(layer)
        part.store(place, key, value)

    def mix(self, layer: int, queries: Tensor, scores: Scores) -> Tensor:
        """See `Attention.mix`."""
        part, place = self.place(layer)
        return part.mix(place, queries, scores)
