"""How one packed forward is planned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.engine.step import PackedStep, Segment, View, pack_step, padded_size
from tests.allocations import allocated


def segment(pool: PagePool, length: int, count: int, wanted: list[int] | None = None) -> Segment:
    """`count` new tokens behind `length` committed ones, appended already."""
    kv = SequenceKv.open(pool, [])
    for tokens, committed in ((list(range(length)), True), (list(range(100, 100 + count)), False)):
        kv.reserve(len(tokens))
        kv.append(tokens, None)
        if committed:
            kv.commit(range(length), tokens)
    return Segment(kv, list(range(100, 100 + count)), None, wanted or [])


def plan(segments: list[Segment], queries_per_kv: int = 4) -> PackedStep:
    """Plan for a model in bfloat16 on the CPU."""
    return pack_step(
        segments, queries_per_kv=queries_per_kv, dtype=torch.bfloat16, device=torch.device("cpu")
    )


@pytest.fixture
def pool() -> PagePool:
    """Memory for a few sequences."""
    return PagePool(512, 4)


def test_tokens_positions_slots_and_wanted_rows(pool: PagePool) -> None:
    """Every token has its position and slot; wanted rows come in the order of the segments."""
    long, short = segment(pool, 7, 3, [2, 0]), segment(pool, 2, 1, [0])
    step = plan([long, short])
    assert step.tokens.tolist() == [[100, 100, 101, 102]]
    assert step.positions.tolist() == [[2, 7, 8, 9]]
    assert step.slots.tolist() == [short.kv.slots[2], *long.kv.slots[7:10]]
    assert step.wanted.tolist() == [3, 1, 0]


def test_sessions_alike_share_one_attention_call(pool: PagePool) -> None:
    """Eight decoding sessions are one group; a long chunk is its own."""
    step = plan([segment(pool, 90 + i, 1) for i in range(8)] + [segment(pool, 0, 100)])
    assert [group.counts for group in step.groups] == [[1] * 8, [100]]


def test_sessions_too_different_do_not_pad_each_other(pool: PagePool) -> None:
    """Where padding costs more than a call, there are two calls."""
    step = plan([segment(pool, 10, 32), segment(pool, 900, 32)])
    assert [group.counts for group in step.groups] == [[32], [32]]


def test_a_single_query_sees_everything_without_a_mask(pool: PagePool) -> None:
    """Decoding with enough query heads per kv head needs neither mask nor padding."""
    one = segment(pool, 9, 1)
    step = plan([one])
    view = step.view(step.groups[0], None, fold=False)
    assert (view.mask, view.causal, view.folded) == (None, False, True)
    assert view.slots.tolist() == one.kv.slots[:10].tolist()


def test_few_query_rows_are_padded(pool: PagePool) -> None:
    """A single query head gets three more rows, which no token takes its result from."""
    group = plan([segment(pool, 9, 1)], queries_per_kv=1).groups[0]
    assert group.width == 4
    assert group.rows is not None
    assert group.rows.tolist() == [0, 0, 0, 0]
    assert group.valid is not None
    assert group.valid.tolist() == [0]


def test_a_first_chunk_is_causal_without_a_mask(pool: PagePool) -> None:
    """A long chunk from the first position on needs no mask; behind a prefix it does."""
    fresh, behind = plan([segment(pool, 0, 100)]), plan([segment(pool, 5, 100)])
    view = fresh.view(fresh.groups[0], None, fold=False)
    assert (view.mask, view.causal) == (None, True)
    view = behind.view(behind.groups[0], None, fold=False)
    assert not view.causal
    assert view.mask is not None
    assert view.mask.shape == (1, 1, 100, 105)


def test_a_kernel_gets_a_row_of_the_mask_for_each_query_and_its_end(pool: PagePool) -> None:
    """Three new tokens behind five: however many heads there are, three rows, which see 6, 7 and 8 keys."""
    step = plan([segment(pool, 5, 3)], queries_per_kv=4)
    view = step.plain_view(step.groups[0], None)
    assert view.mask is not None
    assert view.mask.shape == (1, 1, 3, 8)
    assert (view.open_keys, view.ends.tolist()) == (6, [6, 7, 8])
    assert step.plain_view(step.groups[0], None) is view
    first = plan([segment(pool, 0, 100)])
    assert first.plain_view(first.groups[0], None).ends.tolist() == [*range(1, 101)]


def test_a_window_gathers_only_what_it_reaches(pool: PagePool) -> None:
    """Two new tokens behind 50, with a window of 8: nine entries, of which each sees eight."""
    two = segment(pool, 50, 2)
    step = plan([two], queries_per_kv=2)
    view = step.view(step.groups[0], 8, fold=False)
    assert view.slots.tolist() == two.kv.slots[43:52].tolist()
    assert view.mask is not None
    seen = np.isfinite(view.mask.numpy())[0, 0]
    assert seen.shape == (4, 9)
    assert seen[0].tolist() == [True] * 8 + [False]
    assert seen[1].tolist() == [False] + [True] * 8


def test_views_are_made_once_for_all_layers(pool: PagePool) -> None:
    """Layers with the same window share the view."""
    step = plan([segment(pool, 9, 2)])
    group = step.groups[0]
    assert step.view(group, None, fold=False) is step.view(group, None, fold=False)
    assert step.view(group, 4, fold=False) is not step.view(group, None, fold=False)


def test_sizes_are_few() -> None:
    """Small sizes are exact, larger ones are rounded up by at most a quarter, float32 has no single row."""
    sizes = {padded_size(count, torch.bfloat16) for count in range(513)}
    assert len(sizes) == 16 + 12 + 28
    assert all(count <= padded_size(count, torch.bfloat16) <= 1.25 * count for count in range(1, 513))
    assert padded_size(0, torch.bfloat16) == 1
    assert [padded_size(count, torch.float32) for count in (0, 1, 2, 3)] == [2, 2, 2, 3]


def test_a_step_without_padding_has_its_tokens_alone(pool: PagePool) -> None:
    """Neither tokens nor wanted rows are rounded up where any size is as good."""
    tokens = segment(pool, 9, 21, list(range(19)))
    cpu = torch.device("cpu")
    exact = pack_step([tokens], queries_per_kv=4, dtype=torch.float32, device=cpu, padded=False)
    assert (exact.tokens.numel(), len(exact.wanted)) == (21, 19)
    rounded = plan([tokens])
    assert (rounded.tokens.numel(), len(rounded.wanted)) == (24, 20)


def test_a_view_takes_memory_for_its_mask_and_slots_alone() -> None:
    """A tree behind 32,000 tokens takes no more to plan than one behind 1,000, but for what kernels read."""
    beside = []
    for length in (1_000, 32_000):
        tree = segment(PagePool(length // 16 + 8, 16), length, 32)
        step = plan([tree])
        views: list[View] = []
        used = allocated(lambda step=step, views=views: views.append(step.plain_view(step.groups[0], None)))
        (view,) = views
        assert view.mask is not None
        assert view.mask.shape == (1, 1, 32, length + 32)
        beside.append(used - view.mask.nbytes - view.slots.nbytes)
    assert beside[1] < beside[0] + 4096


def test_a_mask_hides_what_lies_behind_the_shorter_of_two_sequences(pool: PagePool) -> None:
    """In a group, every row sees the tokens of its own sequence up to itself, and no padding."""
    long, short = segment(pool, 90, 3), segment(pool, 84, 2)
    step = plan([long, short])
    (group,) = step.groups
    view = step.plain_view(group, None)
    assert view.mask is not None
    seen = np.isfinite(view.mask.numpy())[:, 0]
    for row, kv in enumerate(group.members):
        for token in range(kv.scratch):
            expected = np.arange(seen.shape[2]) <= kv.length + token
            assert (seen[row, token] == expected).all()
    assert view.open_keys <= 85
