"""Attention whose sums for a token do not depend on what else is computed; see `attention` for the rest.

A token's *text* is the committed entries, then its own ancestors by depth: entry e of a text is term e of its
sums, whether it is committed or a node of a tree. A text is cut into splits, and these into blocks, at places
that depend only on the token's position. `_joined` joins the splits from first to last: in registers where an
item has several splits, in `combine_kernel` where each split is an item. So neither the plan nor the batch
changes what is added to what.

A tile has rows of several tokens, to read committed entries once for all of them. What a row does not see
changes none of its bits: it is added with weight 0, to sums times a factor of 1.
"""

import triton
import triton.language as tl

from outrider.engine.gpu.kernels.attention import (
    ITEM_FIELDS,
    LOG2_E,
    TILE_FIELDS,
    _absorb,
    _capped,
    _fresh,
    _joined,
    _load_entries,
    _load_query,
    _tile_rows,
    _write,
    _write_part,
)
from outrider.engine.gpu.kernels.overlap import let_next_begin, wait_for_earlier


@triton.jit
def _text_block(
    state,
    q,
    positions,  # [M] of the rows
    chosen,  # [M] which rows this text belongs to
    text,
    start,
    end,
    keys,
    values,
    buffer,
    head,
    scale,
    softcap,
    SHAPE: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one block of a text to the running softmax. Its scratch is on a path, or (path 0) follows as in a
    chain."""
    length, pages_at, path_at = text
    entries = start + tl.arange(0, BLOCK_N)
    inside = entries < end
    branching = inside & (entries >= length) & (path_at > 0)
    page = tl.load(buffer + pages_at + entries // PAGE, mask=inside, other=0)
    node = tl.load(buffer + path_at + entries - length, mask=branching, other=0)
    places = tl.where(branching, node, page * PAGE + entries % PAGE) * (SHAPE[0] // CUT) + head // CUT
    k, v = _load_entries(places, inside, keys, values, q.dtype, SHAPE)
    scores = _capped(tl.dot(q, k, input_precision=PRECISION) * scale, softcap, SOFTCAP)
    seen = chosen[:, None] & inside[None, :] & (entries[None, :] <= positions[:, None])
    if WINDOW > 0:
        seen = seen & (positions[:, None] - entries[None, :] < WINDOW)
    return _absorb(state, tl.where(seen, scores, float("-inf")), v, PRECISION)


@triton.jit(do_not_specialize=["max_items"])
def attend_in_order_kernel(
    query,  # [N, Q, D] by strides
    keys,  # [S, H / CUT, D]
    values,  # [S, H / CUT, V]
    out,  # [N, Q, V]
    partial,  # [items, H, BLOCK_M, V] float32
    statistics,  # [2, items, H, BLOCK_M] float32: largest score and sum of weights
    sinks,  # [Q], or anything when SINKS is false
    buffer,
    items_at,
    tiles_at,
    positions_at,
    paths_at,
    max_items,
    query_token_stride,
    query_head_stride,
    scale,
    softcap,
    SHAPE: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute every item of every kv head, shared among the programs of a one-dimensional grid."""
    let_next_begin(OVERLAP)
    wait_for_earlier(OVERLAP)
    for unit in range(tl.program_id(0), tl.load(buffer) * SHAPE[0], tl.num_programs(0)):
        item = unit // SHAPE[0]
        head = unit % SHAPE[0]
        entry = buffer + items_at + item * ITEM_FIELDS
        fields = buffer + tiles_at + tl.load(entry) * TILE_FIELDS
        end = tl.load(entry + 2)
        split = tl.load(entry + 3)
        first = tl.load(fields)
        length = tl.load(fields + 2)
        pages_at = tl.load(fields + 3)
        # A chain's tokens share one text; a tree's tokens share the blocks of committed entries.
        is_tree = tl.load(fields + 4) > 0
        shared = tl.where(is_tree, length // BLOCK_N * BLOCK_N, end)
        members = tl.where(is_tree, tl.load(fields + 1), 0)
        token, query_head, real = _tile_rows(fields, head, SHAPE[1], BLOCK_M)
        q = _load_query(query + token * query_token_stride + query_head * query_head_stride, real, SHAPE)
        positions = tl.load(buffer + positions_at + token, mask=real, other=-1)
        nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
        found = _fresh(nothing, BLOCK_M, SHAPE)
        for begin in range(tl.load(entry + 1), end, split):
            sink = nothing
            if SINKS:
                counted = tl.where(begin == 0, real.to(tl.int32), 0) > 0
                sink = tl.load(sinks + query_head, mask=counted, other=float("-inf")).to(tl.float32) * LOG2_E
            state = _fresh(sink, BLOCK_M, SHAPE)
            stop = tl.minimum(begin + split, end)
            lowest = begin
            if WINDOW > 0:
                reach = tl.maximum(tl.load(fields + 5) - WINDOW + 1, 0)
                lowest = tl.maximum(begin, reach // BLOCK_N * BLOCK_N)
            for member in range(-1, members):
                node = first + tl.maximum(member, 0)
                last = tl.load(buffer + positions_at + node)
                path_at = tl.where(member < 0, 0, tl.load(buffer + paths_at + node))
                chosen = real & ((member < 0) | (token == node))
                low = tl.where(member < 0, lowest, tl.maximum(lowest, shared))
                high = tl.where(member < 0, tl.minimum(stop, shared), tl.minimum(stop, last + 1))
                text = (length, pages_at, path_at)
                for start in range(low, high, BLOCK_N):
                    state = _text_block(state, q, positions, chosen, text, start, high, keys, values, buffer,
                                        head, scale, softcap, SHAPE, CUT, BLOCK_N, PAGE, WINDOW,
                                        SOFTCAP, PRECISION)  # fmt: skip
            found = _joined(found, state)
        if tl.load(fields + 7) == 1:
            _write(out, found, token * (SHAPE[0] * SHAPE[1]) + query_head, real, SHAPE)
        else:
            at = (item * SHAPE[0] + head) * BLOCK_M + tl.arange(0, BLOCK_M)
            _write_part(partial, statistics, found, at, max_items * SHAPE[0] * BLOCK_M, real, SHAPE)
