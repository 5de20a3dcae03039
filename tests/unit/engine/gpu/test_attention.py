"""The attention kernels against the reference attention, through Triton's interpreter."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch

from outrider.engine.attention import PagedAttention
from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.layout import BufferLayout, Capacity
from outrider.engine.gpu.plan import PlanSettings, fill, graph_capacity, plan_tiles
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.loaded_model import Geometry
from outrider.engine.step import Segment, plan_step

CPU = torch.device("cpu")
PAGE = 4
SLOTS = 256 * PAGE


class Layer(torch.nn.Module):
    """What the attention function is told of the layer that calls."""

    layer_idx = 0


class Case:
    """A pool with sequences, and both attentions over the same keys and values."""

    def __init__(self, geometry: Geometry, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.geometry, self.dtype = geometry, dtype
        self.pool = PagePool(SLOTS // PAGE, PAGE)
        self.pool.allocate(3)  # pages of a sequence are not simply its numbers
        self.generator = torch.Generator().manual_seed(seed)
        self.reference = PagedAttention(geometry, SLOTS, dtype, CPU)
        self.kernel = KernelAttention(geometry, SLOTS, PAGE, dtype, CPU)
        self.reference.keys.copy_(self.random(self.reference.keys.shape))
        self.reference.values.copy_(self.random(self.reference.values.shape))
        self.kernel.keys[:, :SLOTS] = self.reference.keys
        self.kernel.values[:, :SLOTS] = self.reference.values

    def random(self, shape) -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def sequence(self, committed: int, earlier: list[int] | None = None) -> SequenceKv:
        """A sequence with committed entries and, before this step, a scratch tree with these parents."""
        kv = SequenceKv.open(self.pool, [], reuse=False)
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
        settings = PlanSettings(shape.queries_per_kv, PAGE, self.kernel.trash, items)
        plan = plan_tiles(segments, total + padding, settings)
        layout = BufferLayout(graph_capacity(total + padding, settings) if padding else plan.capacity)
        buffer = torch.from_numpy(fill(plan, layout, segments, [], settings))
        self.kernel.current = self.kernel.open_step(buffer, layout, 1)
        padded = [torch.nn.functional.pad(part, (0, 0, 0, padding)) for part in (query, key, value)]
        found, _ = self.kernel.attend(Layer(), *padded, None, **options)
        expected, packed = self.expected(segments, query, key, value, options)
        assert torch.equal(self.kernel.keys[:, :SLOTS], self.reference.keys), "stored keys differ"
        assert torch.equal(self.kernel.values[:, :SLOTS], self.reference.values), "stored values differ"
        return found[0, packed].float(), expected.float(), found[0, total:]

    def expected(self, segments, query, key, value, options):
        """The reference's results in its own order, and which packed positions those are."""
        step = plan_step(segments, queries_per_kv=self.geometry.queries_per_kv, dtype=self.dtype, device=CPU)
        order = self.packed_order(segments, step)
        with self.reference.during(step):
            parts = (part[:, :, order] for part in (query, key, value))
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


def check(found, expected, _padding=None, tolerance=2e-5) -> None:
    """The same up to the order of additions."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("committed", [0, 1, 63, 64, 65, 300])
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_chain_sees_what_is_before_it(committed, tokens):
    """Contexts below, at and above the block size; one item and several."""
    case = Case(geometry())
    check(*case.attend([chain(case.sequence(committed), tokens)]))


@pytest.mark.parametrize(("committed", "nodes"), [(0, 2), (3, 17), (62, 17), (129, 2), (10, 70)])
def test_a_tree_node_sees_its_ancestors_alone(committed, nodes):
    """Random trees, also wider than a mask word and than a tile."""
    case = Case(geometry())
    check(*case.attend([tree(case.sequence(committed), nodes, seed=nodes)]))


def test_nodes_see_scratch_of_earlier_steps():
    """A tree that has grown over several steps, as the draft's does."""
    case = Case(geometry())
    kv = case.sequence(40, earlier=[-1, -1, 0, 1, 2, 2])
    check(*case.attend([tree(kv, 9)]))


def test_sequences_of_a_batch_see_only_themselves():
    """Chains and trees of different lengths in one step, in any order."""
    case = Case(geometry())
    check(
        *case.attend(
            [
                tree(case.sequence(70), 6),
                chain(case.sequence(0), 33),
                chain(case.sequence(200), 1),
                tree(case.sequence(9, earlier=[-1, 0, 0]), 5),
            ]
        )
    )


def test_padding_changes_nothing_and_is_zero():
    """A step in a larger graph's layout gives the same; padding rows are zeros and write no slot in use."""
    case = Case(geometry())
    found, expected, padding = case.attend(
        [tree(case.sequence(70), 6), chain(case.sequence(3), 2)], padding=8
    )
    check(found, expected)
    assert len(padding) == 8
    assert not padding.any()


@pytest.mark.parametrize(("window", "committed"), [(1, 0), (7, 30), (64, 150), (100, 150), (1000, 30)])
def test_a_sliding_window_counts_positions(window, committed):
    """Nodes at one depth have one position: the window is over depths, not over entries."""
    case = Case(geometry())
    segments = [tree(case.sequence(committed, earlier=[-1, 0, 1, 2]), 12), chain(case.sequence(committed), 5)]
    check(*case.attend(segments, sliding_window=window))


@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (6, 2), (71, 1)])
def test_any_number_of_query_heads_shares_a_kv_head(heads):
    """Groups of 1, 7, 3 and 71 heads."""
    case = Case(geometry(query_heads=heads[0], kv_heads=heads[1]))
    check(*case.attend([tree(case.sequence(66), 5), chain(case.sequence(2), 4)]))


@pytest.mark.parametrize("widths", [(24, 24), (32, 16), (16, 40)])
def test_heads_of_any_width(widths):
    """Widths that are no power of two, and values of another width than keys."""
    case = Case(geometry(head_dim=widths[0], value_dim=widths[1]))
    check(*case.attend([tree(case.sequence(66), 5)]))


@pytest.mark.parametrize("items", [1, 8])
@pytest.mark.parametrize("window", [None, 20])
def test_softcap_sinks_and_scale(items, window):
    """What Gemma 2 and gpt-oss ask for; a sink counts once, however many items a tile has."""
    case = Case(geometry())
    segments = [tree(case.sequence(300), 5), chain(case.sequence(2), 4)]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    check(*case.attend(segments, items=items, softcap=3.0, s_aux=sinks, scaling=0.4, sliding_window=window))


def test_half_precision_stays_close():
    """Products of 16-bit keys are summed in float32."""
    case = Case(geometry(head_dim=32, value_dim=32), dtype=torch.float16)
    check(*case.attend([tree(case.sequence(130), 7)]), tolerance=2e-3)


def test_a_long_context_is_split():
    """One token over a long context becomes several items, no more than asked for."""
    case = Case(geometry())
    kv = case.sequence(900)
    segment = chain(kv, 1)
    kv.reserve(1)
    kv.append(segment.tokens, None)
    plan = plan_tiles([segment], 1, PlanSettings(2, PAGE, SLOTS, items=4))
    assert [item[1:] for item in plan.items] == [(0, 256), (256, 512), (512, 768), (768, 901)]
    assert plan.capacity == Capacity(1, 1, 4)
