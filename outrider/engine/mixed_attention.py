"""Paged attention of models whose layers differ in the shapes of their heads, or share keys and values.

Layers of one shape have their own memory and attention. A layer that sees another layer's keys and values
(Gemma 4) has that layer's place: its module stores the same numbers there again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from outrider.engine.attention import Attention, PagedAttention
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.fused_decoder.decoder import Scores
from outrider.engine.loaded_model import Geometry
from outrider.engine.step import PackedStep

PartT = TypeVar("PartT", bound=Attention)


class AttentionByPart(Attention, Generic[PartT]):
    """One attention for each part of a geometry, and the attention function that passes each layer to its
    part."""

    def make_part(self, shape: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> PartT:
        """Make the attention of the layers of one part."""
        raise NotImplementedError

    def step_of(self, shape: Geometry, step: Any) -> Any:
        """Return what a step is to a part."""
        return step

    def allocate(self, geometry: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """See `Attention.allocate`."""
        self._shapes = geometry.parts
        self.parts = [self.make_part(part, num_slots, dtype, device) for part in geometry.parts]
        self._places = {
            layer: (self.parts[place[0]], place[1])
            for layer, place in enumerate(geometry.places)
            if place is not None
        }

    def stores(self) -> tuple[Tensor, ...]:
        """See `Attention.stores`."""
        return tuple(store for part in self.parts for store in part.stores())

    @contextmanager
    def during(self, step: Any) -> Iterator[None]:
        """See `Attention.during`."""
        with ExitStack() as stack:
            for shape, part in zip(self._shapes, self.parts, strict=True):
                stack.enter_context(part.during(self.step_of(shape, step)))
            yield

    def place(self, layer: int) -> tuple[PartT, int]:
        """Return the object that holds a layer's keys and values, and the layer's number in it."""
        return self._places[layer]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `Attention.store`."""
        part, place = self.place(layer)
        part.store(place, key, value)

    def mix(self, layer: int, queries: Tensor, scores: Scores) -> Tensor:
        """See `Attention.mix`."""
        part, place = self.place(layer)
        return part.mix(place, queries, scores)


class MixedAttention(AttentionByPart[PagedAttention]):
    """See `AttentionByPart`; the parts are computed by CPU kernels or torch."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        workers: WorkerPool | None = None,
    ) -> None:
        self._workers = workers
        self.dtype, self.device = dtype, device
        super().__init__(geometry, num_slots, dtype, device)

    def make_part(
        self, shape: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> PagedAttention:
        """See `AttentionByPart.make_part`."""
        return PagedAttention(shape, num_slots, dtype, device, self._workers)

    def step_of(self, shape: Geometry, step: PackedStep) -> PackedStep:
        """See `AttentionByPart.step_of`; a step is packed for one number of query heads per kv head."""
        return replace(step, queries_per_kv=shape.queries_per_kv)
