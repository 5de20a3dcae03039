"""Tiles of many rows: a row in each lane, LANES scores of a key at once.

Keys and values of a head are packed first, and all its tiles read them from there: entries that are kilobytes
apart push each other out of the caches.
"""

from __future__ import annotations

from outrider.engine.cpu.kernels.attention_tiles import (
    ROW,
    Entries,
    Rows,
    Scale,
    Tile,
    fetch,
    padded,
    place_of,
    scaled,
)
from outrider.engine.cpu.kernels.compiling import inlined
from outrider.engine.cpu.kernels.epilogue import exponential
from outrider.engine.cpu.kernels.steps import add_pair, add_step, pair, pair_at
from outrider.engine.cpu.kernels.vectors import (
    VECTOR_BYTES,
    copy,
    copy_word,
    first_lanes,
    floats,
    integers,
    maximum,
    splat,
    store,
    vectors,
    zeros,
)
from outrider.engine.cpu.processor import LANES

KEYS = 4
"""Keys whose scores are computed at once."""
QUARTERS = 4
"""Parts of LANES / QUARTERS sums that are computed one after another, for all of KEYS keys."""


@inlined
def pack_keys(entries: Entries, head_bytes: int, packed: int) -> None:
    """Copy a head's keys one after the other, each followed by zeros up to a whole vector."""
    stride = padded(head_bytes)
    for key in range(entries.keys):
        fetch(entries, key, head_bytes)
        own = packed + stride * key
        vectors(own + stride - VECTOR_BYTES)[0] = splat(0.0)
        copy(own, entries.address + integers(entries.offsets)[key], head_bytes)


@inlined
def pack_values(
    kind: str, size: int, together: int, entries: Entries, columns: int, steps: int, packed: int
) -> None:
    """Write the values of each step of keys as vectors of LANES columns: [columns / LANES, steps, LANES]."""
    for key in range(0, entries.keys, together):
        first = entries.address + integers(entries.offsets)[key]
        second = entries.address + integers(entries.offsets)[key + together - 1]
        for k in range(together):
            fetch(entries, key + k, size * columns)
        for column in range(0, columns, LANES):
            place = packed + ROW * (column // LANES * steps + key // together)
            there = first_lanes(columns - column)
            vectors(place)[0] = pair_at(kind, first + size * column, second + size * column, there)


@inlined
def _into_lanes(tile: Tile, rows: Rows, words: int, to: int) -> None:
    """Put 4 bytes of each row into its lane, then the next 4 bytes, and so on.

    Other lanes are 0: weights of what was there before could be denormal numbers, which are slow.
    """
    for word in range(words):
        vectors(to)[word] = splat(0.0)
    for lane in range(tile.size):
        row = place_of(tile, lane, rows)
        for word in range(words):
            copy_word(to + ROW * word + 4 * lane, row + 4 * word)


@inlined
def score_many(
    kind: str, tile: Tile, rows: Rows, packed: int, keys: int, scale: Scale, queries: int, scores: int
) -> None:
    """Compute the scores of each packed key for the tile's rows; `queries` is scratch memory."""
    stride = padded(rows.head_bytes)
    for word in range(rows.head_bytes // 4, stride // 4):
        vectors(queries)[word] = splat(0.0)
    _into_lanes(tile, rows, rows.head_bytes // 4, queries)
    for key in range(0, keys, KEYS):
        own = packed + stride * key
        halves = zeros(KEYS)
        found = zeros(KEYS)
        for turn in range(QUARTERS):
            quarter = turn % 2 * 2 + turn // 2  # 0, 2, 1, 3: two that are added follow each other
            dots = zeros(LANES)
            for start in range(4 * quarter, stride, VECTOR_BYTES):
                for i in range(LANES // QUARTERS):
                    at = start + 4 * QUARTERS * i
                    query = vectors(queries + LANES * at)[0]
                    for k in range(KEYS):
                        place = KEYS * i + k
                        dots[place] = add_step(kind, dots[place], query, own + stride * k + at)
            for k in range(KEYS):
                total = dots[k] + dots[KEYS + k]
                if LANES == 16:
                    total = (dots[k] + dots[2 * KEYS + k]) + (dots[KEYS + k] + dots[3 * KEYS + k])
                halves[k] = halves[k] + total if turn % 2 else total
                if turn == 1:
                    found[k] = halves[k]
        for k in range(KEYS):
            vectors(scores)[key + k] = scaled(found[k] + halves[k], scale)


@inlined
def hide_many(tile: Tile, mask: Rows, count: int, scratch: int, scores: int) -> None:
    """Add `count` numbers of each token's row of the mask to the scores at `scores`."""
    _into_lanes(tile, mask, count, scratch)
    for key in range(count):
        vectors(scores)[key] = vectors(scores)[key] + vectors(scratch)[key]


@inlined
def weigh_many(kind: str, together: int, scores: int, keys: int, inverses: int) -> None:
    """Replace scores with weights, and the scores of sinks in `inverses` with 1 / the total of each row."""
    parts, sink = vectors(scores), vectors(inverses)[0]
    largest = sink
    for key in range(keys):
        largest = maximum(largest, parts[key])
    total, one = exponential(sink - largest), pair(kind, splat(1.0), splat(1.0))
    for key in range(0, keys, together):
        weight, following = exponential(parts[key] - largest), splat(0.0)
        if together > 1 and key + 1 < keys:
            following = exponential(parts[key + 1] - largest)
        step = pair(kind, weight, following)
        parts[key // together] = step
        total = add_pair(kind, total, step, one)
    vectors(inverses)[0] = splat(1.0) / total


@inlined
def mix_many(
    kind: str, size: int, tile: Tile, packed: int, all_steps: int, steps: int, weights: int, inverses: int,
    columns: int, out: Rows, sums_at: int,
) -> None:  # fmt: skip
    """Write the result of each row of the tile from the values of its first `steps` steps."""
    for column in range(0, columns, LANES):
        own = packed + ROW * (column // LANES * all_steps)
        sums = zeros(LANES)
        for step in range(steps):
            numbers = vectors(own)[step]
            for lane in range(LANES):
                sums[lane] = add_step(kind, sums[lane], numbers, weights + ROW * step + 4 * lane)
        for lane in range(LANES):
            vectors(sums_at)[lane] = sums[lane]
        for lane in range(tile.size):
            result = vectors(sums_at)[lane] * splat(floats(inverses)[lane])
            store(kind, place_of(tile, lane, out) + size * column, result, first_lanes(columns - column))
