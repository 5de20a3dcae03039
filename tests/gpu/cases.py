"""One attention call over the same random keys and values by kernels and by the reference."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.attention import PagedAttention
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.loaded_model import Geometry
from outrider.engine.step import Segment, pack_step

PAGE = 16
SLOTS = 1024 * PAGE


class Layer(torch.nn.Module):
    """What the attention function is told of the layer that calls."""

    layer_idx = 0


class Case:
    """A pool with sequences, and both attentions over the same keys and values."""

    def __init__(self, geometry: Geometry, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        from outrider.engine.gpu.attention import KernelAttention

        self.geometry, self.device, self.dtype = geometry, device, dtype
        self.pool = PagePool(SLOTS // PAGE, PAGE)
        self.generator = torch.Generator(device).manual_seed(0)
        self.reference = PagedAttention(geometry, SLOTS, dtype, device)
        self.kernel = KernelAttention(geometry, SLOTS, PAGE, dtype, device)
        for ours, theirs in (
            (self.kernel.keys, self.reference.keys),
            (self.kernel.values, self.reference.values),
        ):
            theirs.copy_(self.random(theirs.shape))
            ours[:, :SLOTS] = theirs

    def random(self, shape) -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def sequence(self, committed: int) -> SequenceKv:
        """A sequence with so many committed entries."""
        kv = SequenceKv.open(self.pool, [])
        kv.reserve(committed)
        kv.append([1] * committed, None)
        kv.commit(range(committed), [1] * committed)
        return kv

    def attend(self, segments: list[Segment], **options) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel's and the reference's results, in the reference's order."""
        from outrider.engine.gpu.layout import BufferLayout
        from outrider.engine.gpu.plan import PlanSettings, fill, plan_tiles

        for segment in segments:
            segment.kv.reserve(len(segment.tokens))
            segment.kv.append(segment.tokens, segment.parents)
        shape, total = self.geometry, sum(len(segment.tokens) for segment in segments)
        query, key, value = (
            self.random((1, heads, total, width))
            for heads, width in (
                (shape.query_heads, shape.head_dim),
                (shape.kv_heads, shape.head_dim),
                (shape.kv_heads, shape.value_dim),
            )
        )
        settings = PlanSettings(shape.queries_per_kv, PAGE, self.kernel.trash, items=33)
        plan = plan_tiles(segments, total, settings)
        layout = BufferLayout(plan.capacity)
        words = torch.from_numpy(fill(plan, layout, segments, [], settings)).to(self.device)
        self.kernel.step = self.kernel.open_step(words, layout, 1)
        found, _ = self.kernel.attend(Layer(), query, key, value, None, **options)
        step = pack_step(segments, queries_per_kv=shape.queries_per_kv, dtype=self.dtype, device=self.device)
        order = _order(segments, step)
        self.query, self.order = query[0].transpose(0, 1), order
        with self.reference.during(step):
            parts = (part[:, :, order] for part in (query, key, value))
            expected, _ = self.reference.attend(Layer(), *parts, None, **options)
        return found[0, order].float(), expected[0, : len(order)].float()


def _order(segments: list[Segment], step) -> list[int]:
    """Packed positions, in the order of the segments, of the reference's tokens."""
    slots = np.concatenate(
        [
            s.kv.slots[s.kv.length + s.kv.scratch - len(s.tokens) : s.kv.length + s.kv.scratch]
            for s in segments
        ]
    )
    place = {int(slot): index for index, slot in enumerate(slots)}
    return [place[int(slot)] for slot in step.slots]


def chain(kv: SequenceKv, tokens: int) -> Segment:
    """So many new tokens, one behind the other."""
    return Segment(kv, [3] * tokens, None, range(tokens))


def tree(kv: SequenceKv, nodes: int) -> Segment:
    """New tokens with random parents among themselves."""
    random = np.random.default_rng(nodes)
    parents = [int(random.integers(-1, max(index, 0) or 1) if index else -1) for index in range(nodes)]
    return Segment(kv, [3] * nodes, parents, range(nodes))
