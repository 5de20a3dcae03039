"""Attention for the queries of each sequence over gathered keys and values.

    tile       up to LANES query rows of one kv head; each is one lane of the scores
    scores     key by key, up to the last key that a row of the tile sees
    weights    e^(score - largest), added up key by key
    values     LANES columns at a time: key by key into one sum per row

Every sum goes through the keys in their order, and a hidden key adds exactly 0. So a query's result depends
only on the keys it sees, not on its batch or its neighbours. Scores are sums of exact products in float32.

A score is LANES sums, each over every LANES-th word (4 bytes) of a head, which are added in a fixed order.
A tile of few rows computes the LANES sums of a row at once, a full tile one sum of LANES rows. Both get the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.epilogue import exponential
from outrider.engine.cpu.kernels.vectors import (
    VECTOR_BYTES,
    Value,
    add_step,
    add_steps,
    copy,
    copy_word,
    first_lanes,
    floats,
    four_totals,
    integers,
    load,
    maximum,
    multiply_add,
    prefetch,
    splat,
    store,
    vectors,
    zeros,
)
from outrider.engine.cpu.processor import LANES

KEYS = 4
"""Number of keys whose scores are computed at once."""
QUARTERS = 4
"""The LANES sums of a score are added within QUARTERS groups first; sums of a group are QUARTERS words
apart."""
AHEAD = 32
"""How many keys ahead memory is fetched."""
FEW = 4
"""Rows up to which a tile uses its LANES sums for more columns instead of for empty lanes, and vectors of
keys for its scores."""
ROW = 4 * LANES
"""Bytes of a tile's scores for one key."""


def room_bytes(head_bytes: int, keys: int) -> int:
    """Return the bytes of a call's scratch memory: the tile's queries, its results, their divisors, scores,
    masks."""
    return LANES * head_bytes + (LANES + 1 + 2 * (keys + KEYS)) * ROW


def tiles_of(counts: Sequence[int], kv_heads: int, per_kv: int) -> int:
    """Return how many tiles a call has for sequences of `counts` tokens."""
    return kv_heads * sum(-(-count * per_kv // LANES) for count in counts)


class _Tile(NamedTuple):
    """Rows [row, row + size) of a kv head: those of its first query head are `tokens` tokens, and so on."""

    row: int
    size: int
    tokens: int


class _Seen(NamedTuple):
    """The first `keys` entries of a sequence. `address` is that of one kv head's part of slot 0."""

    address: int
    entry_bytes: int
    slots: int
    keys: int


@inlined
def _place(tile: _Tile, lane: int, token_bytes: int, head_bytes: int) -> int:
    """Return the byte offset of a row of the tile."""
    row = tile.row + lane
    return row % tile.tokens * token_bytes + row // tile.tokens * head_bytes


@inlined
def _entry(seen: _Seen, key: int) -> int:
    """Return the address of an entry; past the last entry, the address of the last."""
    place: int = seen.address + integers(seen.slots)[min(key, seen.keys - 1)] * seen.entry_bytes
    return place


@inlined
def _fetch(seen: _Seen, key: int, start: int, count: int) -> None:
    """Begin to read `count` bytes of a head from `start` on: the next keys lie too far apart for the
    processor to predict."""
    place = _entry(seen, key) + start
    for line in range(0, count, 64):
        prefetch(2, place + line)


@inlined
def _reach(tile: _Tile, ends: int, least: int) -> int:
    """How many keys the tile sees, at least `least`."""
    reach = least
    for row in range(tile.row, tile.row + tile.size):
        reach = max(reach, integers(ends)[row % tile.tokens])
    return reach


@inlined
def _into_lanes(tile: _Tile, rows: int, token_bytes: int, head_bytes: int, words: int, to: int) -> None:
    """Put 4 bytes of each row into its lane, then the next 4 bytes, and so on.

    Other lanes are 0: weights of what was there before could be denormal numbers, which are slow.
    """
    for word in range(words):
        vectors(to)[word] = splat(0.0)
    for lane in range(tile.size):
        row = rows + _place(tile, lane, token_bytes, head_bytes)
        for word in range(words):
            copy_word(to + ROW * word + 4 * lane, row + 4 * word)


@inlined
def _in_rows(tile: _Tile, rows: int, token_bytes: int, head_bytes: int, to: int) -> None:
    """Copy each row of the tile behind the one before."""
    for lane in range(tile.size):
        copy(to + head_bytes * lane, rows + _place(tile, lane, token_bytes, head_bytes), head_bytes)


@inlined
def _score(kind: str, queries: int, head_bytes: int, seen: _Seen, scale: float, scores: int) -> None:
    """Compute the scores of the keys in `seen`, KEYS at once; `queries` are in lanes."""
    for key in range(0, seen.keys, KEYS):
        for k in range(KEYS):
            _fetch(seen, key + AHEAD + k, 0, head_bytes)
        for quarter in range(QUARTERS):
            dots = zeros(LANES)
            for start in range(4 * quarter, head_bytes, VECTOR_BYTES):
                for i in range(LANES // QUARTERS):
                    at = start + 4 * QUARTERS * i
                    if at < head_bytes:
                        for k in range(KEYS):
                            place = KEYS * i + k
                            dots[place] = add_step(
                                kind, dots[place], queries + LANES * at, _entry(seen, key + k) + at
                            )
            for k in range(KEYS):
                total = dots[k] + dots[KEYS + k]
                if LANES == 16:
                    total = (dots[k] + dots[2 * KEYS + k]) + (dots[KEYS + k] + dots[3 * KEYS + k])
                before = vectors(scores)[key + k] if quarter else splat(0.0)
                vectors(scores)[key + k] = before + total
        for k in range(KEYS):
            vectors(scores)[key + k] = vectors(scores)[key + k] * splat(scale)


@inlined
def _score_few(
    kind: str, size: int, queries: int, head_bytes: int, seen: _Seen, scale: float, scores: int
) -> None:
    """Compute the scores of `size` rows, at most FEW, whose queries follow each other. A head has a multiple
    of VECTOR_BYTES."""
    for key in range(seen.keys):
        _fetch(seen, key + AHEAD, 0, head_bytes)
        place = _entry(seen, key)
        dots = zeros(FEW)
        for at in range(0, head_bytes, VECTOR_BYTES):
            for row in range(FEW):
                if row < size:
                    dots[row] = add_steps(kind, dots[row], queries + head_bytes * row + at, place + at)
        vectors(scores)[key] = four_totals(dots[0], dots[1], dots[2], dots[3]) * splat(scale)


@inlined
def _weigh(scores: int, keys: int) -> Value:
    """Turn scores into weights; return one over the weights' sums."""
    parts = vectors(scores)
    largest = parts[0]
    for key in range(1, keys):
        largest = maximum(largest, parts[key])
    total = splat(0.0)
    for key in range(keys):
        parts[key] = exponential(parts[key] - largest)
        total = total + parts[key]
    return splat(1.0) / total


@inlined
def _add_values(
    kind: str, size: int, lanes: int, seen: _Seen, weights: int, column: int, columns: int, sums_at: int
) -> None:
    """Compute LANES sums: for each of the first `lanes` rows, LANES // lanes vectors of columns from `column`
    on."""
    sums = zeros(LANES)
    for key in range(seen.keys):
        value = _entry(seen, key)
        if column:  # wide heads do not stay in the nearest caches from the first columns to the last
            _fetch(seen, key + AHEAD, size * column, size * LANES * (LANES // lanes))
        else:
            _fetch(seen, key + AHEAD, 0, size * columns)
        for block in range(LANES // lanes):
            at = column + LANES * block
            numbers = load(kind, value + size * at, first_lanes(columns - at))
            for lane in range(lanes):
                weight = splat(floats(weights)[LANES * key + lane])
                sums[lanes * block + lane] = multiply_add(weight, numbers, sums[lanes * block + lane])
    for i in range(LANES):
        vectors(sums_at)[i] = sums[i]


@inlined
def _mix(
    kind: str, size: int, lanes: int, tile: _Tile, seen: _Seen, weights: int, inverses: int, columns: int,
    out: int, out_bytes: int, sums: int,
) -> None:  # fmt: skip
    """Write the result of each row of the tile, which has at most `lanes` rows."""
    for column in range(0, columns, LANES * (LANES // lanes)):
        _add_values(kind, size, lanes, seen, weights, column, columns, sums)
        for lane in range(tile.size):
            place = out + _place(tile, lane, out_bytes, size * columns)
            inverse = splat(floats(inverses)[lane])
            for block in range(LANES // lanes):
                at = column + LANES * block
                result = vectors(sums)[lanes * block + lane] * inverse
                store(kind, place + size * at, result, first_lanes(columns - at))


@cache
def attention(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers."""
    size = 2 if kind == "bfloat16" else 4

    @kernel(f"void({'intp, ' * 19} float64, intp, intp, intp)")
    def attend(
        q: int, token_bytes: int, out: int, out_bytes: int, counts: int, sequences: int, entries: int,
        entry_bytes: int, slots: int, keys: int, hidden: int, ends: int, mask_rows: int, open_keys: int,
        kv_heads: int, per_kv: int, head_bytes: int, value_bytes: int, values_at: int, scale: float,
        begin: int, end: int, room: int,
    ) -> None:  # fmt: skip
        """Attend from Q [tokens, token_bytes] to OUT [tokens, out_bytes].

        Both have `per_kv` heads for each of `kv_heads`: queries of `head_bytes`, results of `value_bytes`.
        Sequences of `counts` [sequences] tokens follow each other. `entries` [slots, entry_bytes] hold the
        keys of all kv heads and, from byte `values_at` on, their values, which may be parts of the keys; a
        sequence sees those at its `slots` [sequences, keys]. From key `open_keys` on, `hidden`
        [sequences, mask_rows, keys] float32 is added to the scores; a sequence's tokens use the first of the
        mask_rows. The address `hidden` is 0 if there is no mask. `ends` [sequences, mask_rows] says how many
        keys a token sees. Of the tiles that `tiles_of` counts, [begin, end) are computed. `room` is scratch
        memory of `room_bytes`, at a multiple of 64. Counts, slots and ends are int64.
        """
        inverses = room
        sums = inverses + ROW
        queries = sums + LANES * ROW
        scores = queries + LANES * head_bytes
        hides = scores + (keys + KEYS) * ROW
        columns = value_bytes // size
        first = tiles = 0
        for sequence in range(sequences):
            count = integers(counts)[sequence]
            own_slots = slots + 8 * sequence * keys
            own_ends = ends + 8 * sequence * mask_rows
            own_mask = hidden + 4 * (sequence * mask_rows * keys + open_keys)
            for head in range(kv_heads):
                own_keys = entries + head * head_bytes
                own_q = q + first * token_bytes + head * per_kv * head_bytes
                own_out = out + first * out_bytes + head * per_kv * value_bytes
                for row in range(0, count * per_kv, LANES):
                    if begin <= tiles < end:
                        tile = _Tile(row, min(LANES, count * per_kv - row), count)
                        reach = _reach(tile, own_ends, open_keys + 1)
                        seen = _Seen(own_keys, entry_bytes, own_slots, reach)
                        few = tile.size <= FEW and head_bytes % VECTOR_BYTES == 0
                        if few:
                            _in_rows(tile, own_q, token_bytes, head_bytes, queries)
                            _score_few(kind, tile.size, queries, head_bytes, seen, scale, scores)
                        else:
                            _into_lanes(tile, own_q, token_bytes, head_bytes, head_bytes // 4, queries)
                            _score(kind, queries, head_bytes, seen, scale, scores)
                        if hidden:
                            _into_lanes(tile, own_mask, 4 * keys, 0, reach - open_keys, hides)
                            for key in range(open_keys, reach):
                                vectors(scores)[key] = vectors(scores)[key] + vectors(hides)[key - open_keys]
                        vectors(inverses)[0] = _weigh(scores, reach)
                        own_values = entries + values_at + head * value_bytes
                        values = _Seen(own_values, entry_bytes, own_slots, reach)
                        if tile.size <= FEW:
                            _mix(kind, size, FEW, tile, values, scores, inverses, columns, own_out,
                                 out_bytes, sums)  # fmt: skip
                        else:
                            _mix(kind, size, LANES, tile, values, scores, inverses, columns, own_out,
                                 out_bytes, sums)  # fmt: skip
                    tiles += 1
            first += count

    return attend
