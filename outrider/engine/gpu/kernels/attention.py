"""Attention over pages with tree masks: flash attention split along the keys (flash-decoding).

A *tile* is up to BLOCK_M rows: some new tokens of one sequence, each with the query heads of one kv head.
An *item* is one tile and one range of its sequence's entries; the programs of the launch share items and
kv heads. A tile with one item writes its result, one with several writes partial sums that
`combine_kernel` joins. One int64 buffer says where everything is; see `outrider.engine.gpu.layout`.

Softmax runs in base 2 and float32 (Milakov and Gimelshein 2018; Dao et al. 2022, 2023).

A kv head with many query heads may be *cut*: its query heads are then computed apart, as if there were CUT
times as many kv heads, each with a share of the query heads.

Shapes: N tokens, Q query heads, H kv heads after the cut, D and V widths of keys and values, S slots; SHAPE
is H, Q / H, D, V, and the powers of two that D and V fit in.
"""

import triton
import triton.language as tl

from outrider.engine.gpu import layout
from outrider.engine.gpu.kernels.eight_bits import as_read, as_stored
from outrider.engine.gpu.kernels.overlap import let_next_begin, wait_for_earlier

LOG2_E = tl.constexpr(1.4426950408889634)
TILE_FIELDS = tl.constexpr(layout.TILE_FIELDS)
ITEM_FIELDS = tl.constexpr(layout.ITEM_FIELDS)
PARTS = tl.constexpr(16)
"""Number of items joined at once."""


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):
    """Scores in base 2, bounded by tanh when the model asks for it (Gemma 2)."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which needs no library and saturates correctly
        scores = (1 - 2 / (tl.exp2(scores * (2 * LOG2_E) / softcap) + 1)) * softcap
    return scores * LOG2_E


@triton.jit
def _fresh(sink, BLOCK_M: tl.constexpr, SHAPE: tl.constexpr):
    """A running softmax before its first key; a sink [M] (-inf: none) takes part in it (gpt-oss)."""
    BLOCK_V: tl.constexpr = SHAPE[5]
    total = tl.where(sink == float("-inf"), 0.0, 1.0)
    return sink, total, tl.zeros([BLOCK_M, BLOCK_V], tl.float32)


@triton.jit
def _absorb(state, scores, v, PRECISION: tl.constexpr):
    """Add a block of keys to the running softmax: scores [M, n] in base 2, -inf where hidden; v [n, V]."""
    largest, total, mixed = state
    raised = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(raised == float("-inf"), 0.0, raised)  # a row may have seen nothing yet
    faded = tl.exp2(largest - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * faded + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * faded[:, None], input_precision=PRECISION)
    return raised, total, mixed


@triton.jit
def _tile_rows(fields, head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the packed token and the query head of each row of a tile [M], and which rows are real."""
    rows = tl.arange(0, BLOCK_M)
    real = rows < tl.load(fields + 1) * GROUP
    return tl.load(fields) + rows // GROUP, head * GROUP + rows % GROUP, real


@triton.jit
def _load_query(places, real, SHAPE: tl.constexpr):
    """Load queries [M, D]; `places` [M] are where they begin."""
    columns = tl.arange(0, SHAPE[4])
    return tl.load(
        places[:, None] + columns[None, :], mask=real[:, None] & (columns < SHAPE[2])[None, :], other=0.0
    )


@triton.jit
def _write(out, state, rows, real, SHAPE: tl.constexpr):
    """Write the result of a tile that one item covers."""
    columns = tl.arange(0, SHAPE[5])
    tl.store(
        out + rows[:, None] * SHAPE[3] + columns[None, :],
        (state[2] / state[1][:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (columns < SHAPE[3])[None, :],
    )


@triton.jit
def _write_part(partial, statistics, state, rows, totals_at, real, SHAPE: tl.constexpr):
    """Write the result of one of several items, for `combine_kernel`."""
    columns = tl.arange(0, SHAPE[5])
    tl.store(statistics + rows, state[0], mask=real)
    tl.store(statistics + totals_at + rows, state[1], mask=real)
    tl.store(
        partial + rows[:, None] * SHAPE[3] + columns[None, :],
        state[2],
        mask=real[:, None] & (columns < SHAPE[3])[None, :],
    )


@triton.jit
def _ancestors(buffer, masks_at, first, scratch, BLOCK_N: tl.constexpr):
    """Return [M, n]: which scratch entries `first` + [n] are ancestors of the rows; entries below 0 are not.

    A word of a mask [M] holds 64 entries, so the bits of a block are in two words.
    """
    tl.static_assert(BLOCK_N <= 64)
    tree = masks_at > 0
    low = first >> 6
    shift = (first & 63).to(tl.uint64)
    early = tl.load(buffer + masks_at + low, mask=tree & (low >= 0), other=0)
    late = tl.load(buffer + masks_at + low + 1, mask=tree & ((low + 1) * 64 < scratch), other=0)
    # Shifted twice, because a shift by 64 is undefined.
    lower = early.to(tl.uint64, bitcast=True) >> shift
    bits = lower | (late.to(tl.uint64, bitcast=True) << (63 - shift) << 1)
    return ((bits[:, None] >> tl.arange(0, BLOCK_N).to(tl.uint64)[None, :]) & 1) == 1


@triton.jit
def _visible(buffer, rows, sequence, start, end, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return [M, n]: which entries of a block the rows [M] see, where some entries may be scratch.

    A row of a chain (no mask) sees the entries up to itself; a row of a tree sees those in its ancestor mask.
    """
    position, own, masks_at = rows
    length, _, depths_at = sequence
    entries = start + tl.arange(0, BLOCK_N)
    inside = entries < end
    branching = inside & (entries >= length)
    ancestor = _ancestors(buffer, masks_at, start - length, end - length, BLOCK_N)
    is_tree = (masks_at > 0)[:, None] & branching[None, :]
    seen = tl.where(is_tree, ancestor, entries[None, :] <= own[:, None]) & inside[None, :]
    if WINDOW > 0:
        branching = branching & (depths_at > 0)
        depth = tl.load(buffer + depths_at + entries - length, mask=branching, other=0).to(tl.int32)
        where = tl.where(branching, length - 1 + depth, entries)
        seen = seen & (position[:, None] - where[None, :] < WINDOW)
    return seen


@triton.jit
def _load_entries(places, inside, keys, values, dtype: tl.constexpr, SHAPE: tl.constexpr):
    """Load keys [D, n] and values [n, V] of one kv head at these places [n]; zeros where not inside."""
    columns = tl.arange(0, SHAPE[4])
    value_columns = tl.arange(0, SHAPE[5])
    k = tl.load(
        keys + places[None, :] * SHAPE[2] + columns[:, None],
        mask=(columns < SHAPE[2])[:, None] & inside[None, :],
        other=0,
    )
    v = tl.load(
        values + places[:, None] * SHAPE[3] + value_columns[None, :],
        mask=(value_columns < SHAPE[3])[None, :] & inside[:, None],
        other=0,
    )
    return as_read(k, dtype), as_read(v, dtype)


@triton.jit
def _block(
    state, q, rows, sequence, start, end, keys, values, buffer, head, scale, softcap,
    SHAPE: tl.constexpr, CUT: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, SCRATCH: tl.constexpr,
):  # fmt: skip
    """Add one block of a sequence's entries to the running softmax; SCRATCH: not all rows see all of them."""
    entries = start + tl.arange(0, BLOCK_N)
    inside = entries < end
    page = tl.load(buffer + sequence[1] + entries // PAGE, mask=inside, other=0).to(tl.int32)
    places = (page * PAGE + entries % PAGE).to(tl.int64) * (SHAPE[0] // CUT) + head // CUT
    k, v = _load_entries(places, inside, keys, values, q.dtype, SHAPE)
    scores = _capped(tl.dot(q, k, input_precision=PRECISION) * scale, softcap, SOFTCAP)
    seen = inside[None, :]
    if SCRATCH:
        seen = _visible(buffer, rows, sequence, start, end, WINDOW, BLOCK_N)
    elif WINDOW > 0:
        seen = seen & (rows[0][:, None] - entries[None, :] < WINDOW)
    return _absorb(state, tl.where(seen, scores, float("-inf")), v, PRECISION)


@triton.jit(do_not_specialize=["max_items"])
def attend_kernel(
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
    own_at,
    masks_at,
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
    for unit in range(tl.program_id(0), tl.load(buffer) * SHAPE[0], tl.num_programs(0)):
        item = unit // SHAPE[0]
        head = unit % SHAPE[0]
        entry = buffer + items_at + item * ITEM_FIELDS
        fields = buffer + tiles_at + tl.load(entry) * TILE_FIELDS
        begin = tl.load(entry + 1).to(tl.int32)
        end = tl.load(entry + 2).to(tl.int32)
        sequence = (tl.load(fields + 2).to(tl.int32), tl.load(fields + 3), tl.load(fields + 4))
        shared = tl.load(fields + 8).to(tl.int32)
        token, query_head, real = _tile_rows(fields, head, SHAPE[1], BLOCK_M)
        rows = (
            tl.load(buffer + positions_at + token, mask=real, other=0).to(tl.int32),
            tl.load(buffer + own_at + token, mask=real, other=-1).to(tl.int32),
            tl.load(buffer + masks_at + token, mask=real, other=-1),
        )
        wait_for_earlier(OVERLAP)
        q = _load_query(query + token * query_token_stride + query_head * query_head_stride, real, SHAPE)
        sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if SINKS:
            first = tl.where(tl.load(fields + 6) == item, real.to(tl.int32), 0) > 0
            sink = tl.load(sinks + query_head, mask=first, other=float("-inf")).to(tl.float32) * LOG2_E
        state = _fresh(sink, BLOCK_M, SHAPE)
        if WINDOW > 0:
            lowest = tl.load(fields + 5).to(tl.int32)
            begin = tl.maximum(begin, tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N)
        middle = tl.where(end <= shared, end, shared // BLOCK_N * BLOCK_N)
        for start in range(begin, middle, BLOCK_N):
            state = _block(state, q, rows, sequence, start, end, keys, values, buffer, head, scale, softcap,
                           SHAPE, CUT, BLOCK_N, PAGE, WINDOW, SOFTCAP, PRECISION, False)  # fmt: skip
        for start in range(tl.maximum(begin, middle), end, BLOCK_N):
            state = _block(state, q, rows, sequence, start, end, keys, values, buffer, head, scale, softcap,
                           SHAPE, CUT, BLOCK_N, PAGE, WINDOW, SOFTCAP, PRECISION, True)  # fmt: skip
        if tl.load(fields + 7) == 1:
            _write(out, state, token * (SHAPE[0] * SHAPE[1]) + query_head, real, SHAPE)
        else:
            at = (item * SHAPE[0] + head) * BLOCK_M + tl.arange(0, BLOCK_M)
            _write_part(partial, statistics, state, at, max_items * SHAPE[0] * BLOCK_M, real, SHAPE)
    wait_for_earlier(OVERLAP)  # programs without an item too


@triton.jit
def _joined(earlier, later):
    """Join two running softmaxes. Additions are fused explicitly: a compiler might otherwise fuse them in one
    of the two kernels that do this, and not in the other."""
    raised = tl.maximum(earlier[0], later[0])
    base = tl.where(raised == float("-inf"), 0.0, raised)  # perhaps neither has seen anything
    first = tl.exp2(earlier[0] - base)
    second = tl.exp2(later[0] - base)
    total = tl.fma(earlier[1], first, later[1] * second)
    mixed = tl.fma(earlier[2], first[:, None], later[2] * second[:, None])
    return raised, total, mixed


@triton.jit
def _joined_at_once(partial, statistics, first, splits, step, totals_at, SHAPE: tl.constexpr):
    """Return the result [V] of one row from its parts; part i is at row `first + i * step`."""
    BLOCK_V: tl.constexpr = SHAPE[5]
    columns = tl.arange(0, BLOCK_V)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, splits, PARTS):
        part = start + tl.arange(0, PARTS)
        rows = first + part * step
        peaks = tl.load(statistics + rows, mask=part < splits, other=float("-inf"))
        totals = tl.load(statistics + totals_at + rows, mask=part < splits, other=0.0)
        parts = tl.load(
            partial + rows[:, None] * SHAPE[3] + columns[None, :],
            mask=(part < splits)[:, None] & (columns < SHAPE[3])[None, :],
            other=0.0,
        )
        raised = tl.maximum(largest, tl.max(peaks, 0, keep_dims=True))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(peaks - base)
        faded = tl.exp2(largest - base)
        total = total * faded + tl.sum(weights * totals, 0, keep_dims=True)
        mixed = mixed * faded + tl.sum(weights[:, None] * parts, 0)
        largest = raised
    return mixed / total


@triton.jit
def _joined_in_order(partial, statistics, first, splits, step, totals_at, SHAPE: tl.constexpr):
    """Return the result [V] of one row, joined from its first part to its last, as `ordered_attention`
    requires."""
    columns = tl.arange(0, SHAPE[5])[None, :]
    place = first + tl.zeros([1], tl.int64)
    found = _fresh(tl.full([1], float("-inf"), tl.float32), 1, SHAPE)
    for _ in range(splits):
        largest = tl.load(statistics + place)
        total = tl.load(statistics + totals_at + place)
        mixed = tl.load(partial + place[:, None] * SHAPE[3] + columns, mask=columns < SHAPE[3], other=0.0)
        found = _joined(found, (largest, total, mixed))
        place += step
    return tl.reshape(found[2] / found[1][:, None], [SHAPE[5]])


@triton.jit(do_not_specialize=["max_items"])
def combine_kernel(
    out,  # [N, Q, V]
    partial,
    statistics,
    buffer,
    tile_of_at,
    tiles_at,
    max_items,
    SHAPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ORDERED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the items of one token and query head (grid [N, Q]), one by one if ORDERED; padding gets zeros."""
    let_next_begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    query_head = tl.program_id(1)
    columns = tl.arange(0, SHAPE[5])
    result = out + (token * (SHAPE[0] * SHAPE[1]) + query_head) * SHAPE[3] + columns
    tile = tl.load(buffer + tile_of_at + token)
    fields = buffer + tiles_at + tl.maximum(tile, 0) * TILE_FIELDS
    splits = tl.where(tile < 0, 0, tl.load(fields + 7))
    wait_for_earlier(OVERLAP)
    if splits == 0:
        tl.store(result, tl.zeros_like(columns).to(out.dtype.element_ty), mask=columns < SHAPE[3])
    if splits > 1:
        row = (token - tl.load(fields)) * SHAPE[1] + query_head % SHAPE[1]
        first = (tl.load(fields + 6) * SHAPE[0] + query_head // SHAPE[1]) * BLOCK_M + row
        step = SHAPE[0] * BLOCK_M
        if ORDERED:
            mixed = _joined_in_order(partial, statistics, first, splits, step, max_items * step, SHAPE)
        else:
            mixed = _joined_at_once(partial, statistics, first, splits, step, max_items * step, SHAPE)
        tl.store(result, mixed.to(out.dtype.element_ty), mask=columns < SHAPE[3])


@triton.jit
def store_kernel(
    key,  # [N, H, D] by strides
    value,  # [N, H, V] by strides
    keys,  # [S, H, D]
    values,  # [S, H, V]
    buffer,
    slots_at,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    SHAPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put one token's key and value of one kv head into its slot (grid [N, H])."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    place = tl.load(buffer + slots_at + token) * SHAPE[0] + head
    k_columns = columns < SHAPE[2]
    v_columns = columns < SHAPE[3]
    k = tl.load(key + token * key_token_stride + head * key_head_stride + columns, mask=k_columns)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + columns, mask=v_columns)
    tl.store(keys + place * SHAPE[2] + columns, as_stored(k, keys), mask=k_columns)
    tl.store(values + place * SHAPE[3] + columns, as_stored(v, values), mask=v_columns)


@triton.jit
def move_kernel(
    entries,  # [layers, S, WIDTH]
    buffer,
    moves_at,
    layer_stride,
    WIDTH: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy entries between slots (grid [layers, WIDTH / BLOCK]): a program copies some columns of all
    moves."""
    moves = tl.arange(0, MOVES)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (moves < tl.load(buffer + 1))[:, None] & (columns < WIDTH)[None, :]
    sources = tl.load(buffer + moves_at + moves)[:, None] * WIDTH + columns[None, :]
    targets = tl.load(buffer + moves_at + MOVES + moves)[:, None] * WIDTH + columns[None, :]
    layer = entries + tl.program_id(0).to(tl.int64) * layer_stride
    held = tl.load(layer + sources, mask=there, other=0)
    tl.debug_barrier()  # threads write what others read
    tl.store(layer + targets, held, mask=there)
