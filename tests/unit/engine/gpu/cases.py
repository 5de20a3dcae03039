"""One step's attention over the same random keys and values, by kernels and by the reference."""

from __future__ import annotations

from itertools import count

import numpy as np
import torch

from outrider.engine.attention import PagedAttention
from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.layout import BufferLayout
from outrider.engine.gpu.ordered_plan import plan_in_order
from outrider.engine.gpu.plan import PlanSettings, fill, graph_capacity, plan_tiles
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.loaded_model import Geometry
from outrider.engine.loading.fp8_kv import rounded
from outrider.engine.step import Segment, pack_step

CPU = torch.device("cpu")
PAGE = 4
SLOTS = 1024


class Layer(torch.nn.Module):
    """What the attention function is told of the layer that calls."""

    layer_idx = 0


class Case:
    """A pool with sequences, and both attentions over the same keys and values."""

    def __init__(
        self,
        geometry: Geometry,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        page: int = PAGE,
        *,
        ordered: bool = False,
        fp8: bool = False,
        planned: int | None = None,
    ) -> None:
        """With `fp8` the kernels' memory has 8 bits, and the reference is given numbers of 8 bits. Steps are
        planned for other layers, with `planned` query heads per kv head, or for this one.
        """
        self.held = rounded if fp8 else lambda numbers: numbers
        self.geometry, self.dtype, self.page, self.ordered = geometry, dtype, page, ordered
        self.slots = SLOTS // page * page
        self.pool = PagePool(SLOTS // page, page)
        self.pool.allocate(3)  # pages of a sequence are not simply its numbers
        self.generator = torch.Generator().manual_seed(seed)
        self.reference = PagedAttention(geometry, self.slots, dtype, CPU)
        self.planned = planned or geometry.queries_per_kv
        kinds = {"ordered": ordered, "fp8": fp8, "planned": planned}
        self.kernel = KernelAttention(geometry, self.slots, page, dtype, CPU, **kinds)
        self.entries = self.reference.keys, self.reference.values
        for ours, theirs in zip(self.kernel.stores(), self.entries, strict=True):
            theirs.copy_(self.held(self.random(theirs.shape)))
            ours[:, : self.slots] = theirs.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else theirs

    def random(self, shape) -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def sequence(self, committed: int, earlier: list[int] | None = None) -> SequenceKv:
        """A sequence with committed entries and, before this step, a scratch tree with these parents."""
        kv = SequenceKv.open(self.pool, [])
        kv.reserve(committed)
        kv.append([1] * committed, None)
        kv.commit(range(committed), [1] * committed)
        if earlier:
            kv.reserve(len(earlier))
            kv.append([2] * len(earlier), earlier)
        return kv

    def attend(self, segments: list[Segment], padding: int = 0, items: int = 6, **options):
        """Both attentions' results over the segments' tokens, and the kernel's over the padding."""
        for segment in segments:
            segment.kv.reserve(len(segment.tokens))
            segment.kv.append(segment.tokens, segment.parents)
        shape = self.geometry
        total = sum(len(segment.tokens) for segment in segments)
        query = self.random((1, shape.query_heads, total, shape.head_dim))
        key = self.random((1, shape.kv_heads, total, shape.head_dim))
        value = self.random((1, shape.kv_heads, total, shape.value_dim))
        settings = PlanSettings(self.planned, self.page, self.kernel.trash, items, self.ordered)
        plan = (plan_in_order if self.ordered else plan_tiles)(segments, total + padding, settings)
        layout = BufferLayout(graph_capacity(total + padding, settings) if padding else plan.capacity)
        buffer = torch.from_numpy(fill(plan, layout, segments, [], settings))
        self.kernel.step = self.kernel.open_step(buffer, layout, 1)
        padded = [torch.nn.functional.pad(part, (0, 0, 0, padding)) for part in (query, key, value)]
        found, _ = self.kernel.attend(Layer(), *padded, None, **options)
        expected, packed = self.expected(segments, query, key, value, options)
        for name, ours, theirs in zip(("keys", "values"), self.kernel.stores(), self.entries, strict=True):
            stored = ours[:, : self.slots]
            if stored.dtype == torch.uint8:
                stored = stored.view(torch.float8_e4m3fn).to(self.dtype)
            assert torch.equal(stored, theirs), f"stored {name} differ"
        return found[0, packed].float(), expected.float(), found[0, total:]

    def expected(self, segments, query, key, value, options):
        """The reference's results in its own order, and which packed positions those are."""
        step = pack_step(segments, queries_per_kv=self.geometry.queries_per_kv, dtype=self.dtype, device=CPU)
        order = self.packed_order(segments, step)
        with self.reference.during(step):
            parts = (part[:, :, order] for part in (query, self.held(key), self.held(value)))
            mixed, _ = self.reference.attend(Layer(), *parts, None, **options)
        return mixed[0], order

    @staticmethod
    def packed_order(segments, step) -> list[int]:
        """Packed positions, in the order of the segments, of the reference's tokens."""
        place = {}
        first = count()
        for segment in segments:
            kv, new = segment.kv, len(segment.tokens)
            for slot in kv.slots[kv.length + kv.scratch - new : kv.length + kv.scratch]:
                place[int(slot)] = next(first)
        return [place[int(slot)] for slot in step.slots]


def geometry(query_heads=4, kv_heads=2, head_dim=16, value_dim=16) -> Geometry:
    """One layer."""
    return Geometry(1, query_heads, kv_heads, head_dim, value_dim)


def chain(kv: SequenceKv, tokens: int) -> Segment:
    """So many new tokens, one behind the other."""
    return Segment(kv, [3] * tokens, None, range(tokens))


def tree(kv: SequenceKv, nodes: int, seed: int = 0) -> Segment:
    """New tokens with random parents among the scratch and themselves."""
    random = np.random.default_rng(seed)
    parents = [int(random.integers(-1, kv.scratch + index)) for index in range(nodes)]
    return Segment(kv, [3] * nodes, parents, range(nodes))
