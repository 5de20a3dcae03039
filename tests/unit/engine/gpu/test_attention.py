"""The attention kernels against the reference attention, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.layout import MOVES, BufferLayout, Capacity
from outrider.engine.gpu.plan import PlanSettings, fill, graph_capacity, plan_tiles
from outrider.engine.loaded_model import Geometry
from tests.unit.engine.gpu.cases import PAGE, SLOTS, Case, chain, geometry, tree


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


@pytest.mark.parametrize(
    ("heads", "planned", "fp8"),
    [((6, 1), 1, False), ((6, 1), 2, True), ((12, 2), 4, False), ((7, 1), 2, False), ((4, 4), 8, False)],
)
def test_query_heads_are_cut_where_other_layers_plan_the_tiles(heads, planned, fp8):
    """Tiles of 64 tokens and of 16 with 6 or 7 heads each, some in several items; one token is not cut."""
    case = Case(geometry(query_heads=heads[0], kv_heads=heads[1]), fp8=fp8, planned=planned)
    segments = [tree(case.sequence(66), 45), chain(case.sequence(200), 20)]
    check(*case.attend(segments, padding=3))
    check(*case.attend([chain(case.sequence(200), 1)]))


@pytest.mark.parametrize("widths", [(24, 24), (32, 16), (16, 40), (200, 256), (512, 512), (272, 260)])
def test_heads_of_any_width(widths):
    """No power of two, values of another width than keys, wide ones in blocks of their own."""
    case = Case(geometry(head_dim=widths[0], value_dim=widths[1]))
    check(*case.attend([tree(case.sequence(98), 5)]))


@pytest.mark.parametrize("items", [1, 8])
@pytest.mark.parametrize("window", [None, 20])
def test_softcap_sinks_and_scale(items, window):
    """What Gemma 2 and gpt-oss ask for; a sink counts once, however many items a tile has."""
    case = Case(geometry())
    segments = [tree(case.sequence(300), 5), chain(case.sequence(2), 4)]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    check(*case.attend(segments, items=items, softcap=3.0, s_aux=sinks, scaling=0.4, sliding_window=window))


def test_another_width_is_refused():
    """A kernel that reads heads of 16 columns would read beside those of 8."""
    case = Case(geometry())
    kv = case.sequence(3)
    case.geometry = geometry(head_dim=8)
    with pytest.raises(ValueError, match=r"key is \[1, 2, 8\]"):
        case.attend([chain(kv, 1)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_stays_close(dtype, tolerance):
    """Products of 16-bit keys are summed in float32."""
    case = Case(geometry(head_dim=32, value_dim=32), dtype=dtype)
    check(*case.attend([tree(case.sequence(130), 7)]), tolerance=tolerance)


def test_a_long_context_is_split():
    """One token over a long context becomes several items, no more than asked for."""
    case = Case(geometry())
    kv = case.sequence(900)
    segment = chain(kv, 1)
    kv.reserve(1)
    kv.append(segment.tokens, None)
    plan = plan_tiles([segment], 1, PlanSettings(2, PAGE, SLOTS, items=4))
    assert [item[1:3] for item in plan.items] == [(0, 256), (256, 512), (512, 768), (768, 901)]
    assert plan.capacity == Capacity(1, 1, 4)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("count", [0, 1, 40, MOVES])
def test_moves_of_a_step_are_those_of_the_reference(count, fp8):
    """All reads before all writes, in all layers; entries that do not move stay, wide ones too."""
    shape = Geometry(3, 6, 3, 24, 40)
    kernel = KernelAttention(shape, SLOTS, PAGE, torch.float32, torch.device("cpu"), fp8=fp8)
    for entries in kernel.stores():
        entries.copy_(torch.randint(256, entries.shape))
    expected = [entries.clone() for entries in kernel.stores()]
    order = torch.randperm(100)[: 2 * count] if count < 50 else torch.randperm(SLOTS)[: 2 * count]
    moves = list(zip(order[:count].tolist(), order.roll(1)[:count].tolist(), strict=True))
    for entries in expected:
        entries[:, [to for _, to in moves]] = entries[:, [source for source, _ in moves]]
    settings = PlanSettings(2, PAGE, kernel.trash, items=1)
    layout = BufferLayout(graph_capacity(4, settings))
    words = torch.from_numpy(fill(plan_tiles([], 4, settings), layout, [], moves, settings))
    kernel.move_in_step(kernel.open_step(words, layout, 1))
    assert all(torch.equal(*pair) for pair in zip(kernel.stores(), expected, strict=True))
