"""Attention over blocks of keys that are cut by position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.arithmetic import KEYS_PER_BLOCK
from outrider.engine.ordered_attention import SHARED, Run, add_in_order, mix, plan_batches, plan_runs
from outrider.engine.pages import PagePool, SequenceKv
from outrider.engine.row_blocks import RowBlocks
from outrider.engine.step import FOLD_LIMIT, Segment, Step, plan_step

HEADS, COPIES, WIDTH, PAGE_SIZE = 2, 3, 8, 16
BLOCKS = RowBlocks((4, 8, 16, 64, 128, 256))
CPU = torch.device("cpu")


def segment(pool: PagePool, committed: int, nodes: int, parents: list[int] | None) -> Segment:
    """New tokens of a sequence that has some already."""
    kv = SequenceKv.open(pool, [1])
    for count, above in ((committed, None), (nodes, parents)):
        kv.reserve(count)
        kv.append([1] * count, above)
        if count and above is None and kv.length == 0:
            kv.commit(range(count), [1] * count)
    return Segment(kv, [1] * nodes, parents, [])


def step_of(segments: list[Segment]) -> Step:
    """The plan of one forward."""
    return plan_step(segments, queries_per_kv=COPIES, dtype=torch.float32, device=CPU)


def expected(
    step: Step, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """[N, Q, D] softmax attention, one query at a time: [Q, N, D] over [S, H, D]."""
    result = torch.zeros(query.shape[1], HEADS * COPIES, WIDTH)
    for group in step.groups:
        first = group.start
        for kv, count in zip(group.members, group.counts, strict=True):
            for i in range(count):
                offset = kv.scratch - count + i
                path = np.flatnonzero(kv.ancestors(offset)[0])
                slots = np.concatenate([kv.slots[: kv.length], kv.slots[kv.length + path]])[
                    -(window or 10**6) :
                ]
                k, v = (entries[slots.tolist()].repeat_interleave(COPIES, 1) for entries in (keys, values))
                weights = torch.einsum("qd,sqd->qs", query[:, first + i], k).div(WIDTH**0.5).softmax(-1)
                result[first + i] = torch.einsum("qs,sqd->qd", weights, v)
            first += count
    return result


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("committed", [0, 3, KEYS_PER_BLOCK - 4, KEYS_PER_BLOCK, 150])
def test_it_is_attention(committed: int, window: int | None) -> None:
    """Chains, trees that part inside of a block and at its end, long chunks, several sequences."""
    pool = PagePool(100, PAGE_SIZE)
    tree = [-1, 0, 1, 2, 0, 4, -1, 3, 3]
    segments = [
        segment(pool, committed, 9, tree),
        segment(pool, committed + 2, 1, None),
        segment(pool, 5, FOLD_LIMIT + 7, None),
        segment(pool, committed, FOLD_LIMIT + 3, [-1, *range(FOLD_LIMIT), 5, 5]),
    ]
    step = step_of(segments)
    torch.manual_seed(0)
    query = torch.randn(HEADS * COPIES, step.tokens.shape[1], WIDTH)
    keys, values = torch.randn(2, 100 * PAGE_SIZE, HEADS, WIDTH)
    batches = plan_batches(plan_runs(step.groups), window, CPU)
    found = mix(batches, query, keys, values, BLOCKS, WIDTH**-0.5, None)
    torch.testing.assert_close(found, expected(step, query, keys, values, window))


def runs_of(committed: int, nodes: int, parents: list[int] | None) -> list[Run]:
    """The runs of one segment."""
    return plan_runs(step_of([segment(PagePool(40, PAGE_SIZE), committed, nodes, parents)]).groups)


def test_keys_stand_where_their_position_says() -> None:
    """In every branch the key of position p is number p of a block, counted round."""
    (run,) = runs_of(KEYS_PER_BLOCK + 10, 5, [-1, 0, 0, 2, -1])
    real = run.key_positions < 1000
    numbers = np.arange(len(run.slots)) % KEYS_PER_BLOCK
    assert (numbers[real] == run.key_positions[real] % KEYS_PER_BLOCK).all()
    assert run.branches.tolist() == [0, 0, 1, 1, 2]
    assert np.count_nonzero(run.key_branches == SHARED) == KEYS_PER_BLOCK


def test_a_chain_has_one_branch_and_long_ones_are_cut() -> None:
    """Runs are bounded, and see no further than their last query."""
    runs = runs_of(10, FOLD_LIMIT + 5, None)
    assert [len(run.rows) for run in runs] == [FOLD_LIMIT, 5]
    assert [int(run.key_positions[run.key_positions < 1000].max()) for run in runs] == [
        10 + FOLD_LIMIT - 1,
        10 + FOLD_LIMIT + 4,
    ]
    assert all(set(run.branches.tolist()) == {0} for run in runs)


def test_a_window_leaves_out_whole_blocks() -> None:
    """What no query sees is not even read."""
    (run,) = runs_of(3 * KEYS_PER_BLOCK + 2, 2, None)
    assert run.from_block(None) == 0
    assert run.from_block(10) == 2 * KEYS_PER_BLOCK
    assert run.from_block(2 * KEYS_PER_BLOCK) == KEYS_PER_BLOCK


def test_blocks_of_zeros_change_nothing() -> None:
    """In front, between and behind: the sum has the same bits."""
    torch.manual_seed(0)
    parts = torch.randn(1, 1, 5, 4, 4) * 1e3
    zeros = torch.zeros(1, 1, 1, 4, 4)
    more = torch.cat([zeros, parts[:, :, :2], zeros, zeros, parts[:, :, 2:], zeros], 2)
    assert torch.equal(add_in_order(parts.clone()), add_in_order(more))
    assert not torch.equal(add_in_order(parts.clone()), add_in_order(parts.flip(2)))
