"""Attention by kernels in models whose layers differ in the shapes of their heads, or share keys and values.

All layers compute the same tiles and items: a step is planned once, for the layers with the fewest query
heads per kv head. Others cut the query heads of a kv head where a tile would have too many rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.layout import BufferLayout, DeviceStep
from outrider.engine.loaded_model import Geometry
from outrider.engine.mixed_attention import AttentionByPart


class MixedKernelAttention(AttentionByPart[KernelAttention]):
    """One attention for each part of a geometry; they take turns in the memory of a step."""

    def __init__(
        self,
        geometry: Geometry,
        num_slots: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        ordered: bool = False,
        fp8: bool = False,
    ) -> None:
        """See `KernelAttention`."""
        self.trash = num_slots
        self._page_size, self._ordered, self._fp8 = page_size, ordered, fp8
        self._planned = geometry.queries_per_kv
        super().__init__(geometry, num_slots, dtype, device)

    def make_part(
        self, shape: Geometry, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> KernelAttention:
        """See `AttentionByPart.make_part`."""
        return KernelAttention(
            *(shape, num_slots, self._page_size, dtype, device),
            ordered=self._ordered,
            fp8=self._fp8,
            planned=self._planned,
        )

    def open_step(self, buffer: Tensor, layout: BufferLayout, wanted: int) -> DeviceStep:
        """See `KernelAttention.open_step`."""
        partial, statistics = map(max, zip(*(part.room(layout) for part in self.parts), strict=True))
        return DeviceStep.with_room(buffer, layout, wanted, partial, statistics)

    def move_in_step(self, step: DeviceStep) -> None:
        """See `KernelAttention.move_in_step`."""
        for part in self.parts:
            part.move_in_step(step)
