"""Tiles of few rows: the scores of a row for LANES keys lie in one vector.

Such a step reads each key and value once, so that memory bounds it: keys and values are read where they lie,
and fetched some keys ahead.
"""

from __future__ import annotations

from typing import NamedTuple

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
from outrider.engine.cpu.kernels.steps import (
    add_pair,
    add_step,
    add_steps,
    add_steps_where,
    largest_lane,
    pair,
    pair_at,
    store_in_pairs,
    totals,
    visible,
)
from outrider.engine.cpu.kernels.vectors import (
    VECTOR_BYTES,
    copy,
    first_lanes,
    floats,
    integers,
    load,
    maximum,
    splat,
    splat_at,
    store,
    vectors,
    zeros,
)
from outrider.engine.cpu.processor import LANES

FEW = 4
"""Rows up to which a tile has few."""


class Scores(NamedTuple):
    """Scores or weights: rows are `row_bytes` apart."""

    address: int
    row_bytes: int


@inlined
def copy_queries(tile: Tile, rows: Rows, queries: int) -> None:
    """Copy the queries one after the other, each followed by zeros up to a whole vector."""
    stride = padded(rows.head_bytes)
    for lane in range(tile.size):
        vectors(queries + stride * lane + stride - VECTOR_BYTES)[0] = splat(0.0)
        copy(queries + stride * lane, place_of(tile, lane, rows), rows.head_bytes)


@inlined
def score_few(
    kind: str, lanes: int, rows: int, head_bytes: int, entries: Entries, scale: Scale, queries: int,
    scores: Scores, sums: int,
) -> None:  # fmt: skip
    """Compute the scores of the rows, at most `lanes`, for all keys, and for as many more as fill a vector,
    which are -infinity. `sums` is scratch memory."""
    stride, rest = padded(head_bytes), head_bytes % VECTOR_BYTES
    whole, there = head_bytes - rest, first_lanes(rest // 4)
    for key in range(0, entries.keys, LANES):
        for k in range(LANES):
            fetch(entries, key + k, head_bytes)
            place, dots = entries.address + integers(entries.offsets)[key + k], zeros(lanes)
            for at in range(0, whole, VECTOR_BYTES):
                for row in range(lanes):
                    dots[row] = add_steps(kind, dots[row], queries + stride * row + at, place + at)
            if rest:
                for row in range(lanes):
                    own = queries + stride * row + whole
                    dots[row] = add_steps_where(kind, dots[row], own, place + whole, there)
            for row in range(lanes):
                vectors(sums)[LANES * row + k] = dots[row]
        for row in range(rows):
            found = scaled(totals(vectors(sums + ROW * LANES * row)), scale)
            seen = visible(found, first_lanes(entries.keys - key))
            vectors(scores.address + scores.row_bytes * row + 4 * key)[0] = seen


@inlined
def hide_few(tile: Tile, mask: Rows, count: int, scores: Scores) -> None:
    """Add `count` numbers of each token's row of the mask to the scores."""
    for lane in range(tile.size):
        hides, own = place_of(tile, lane, mask), scores.address + scores.row_bytes * lane
        for key in range(0, count, LANES):
            there = first_lanes(count - key)
            both = load("float32", own + 4 * key, there) + load("float32", hides + 4 * key, there)
            store("float32", own + 4 * key, both, there)


@inlined
def weigh_few(
    kind: str, size: int, together: int, rows: int, keys: int, scores: Scores, inverses: int
) -> None:
    """Replace the scores of a head with weights, and the scores of sinks in `inverses` with 1 / the total of
    each row."""
    for row in range(rows):
        own = scores.address + scores.row_bytes * row
        sink = splat_at(inverses + 4 * row)
        largest = sink
        for key in range(0, keys, LANES):
            largest = maximum(largest, vectors(own + 4 * key)[0])
        most = splat(largest_lane(largest))
        store("float32", inverses + 4 * row, exponential(sink - most), first_lanes(1))
        for key in range(0, keys, LANES):
            store_in_pairs(kind, own + size * key, exponential(vectors(own + 4 * key)[0] - most))
    sums, one = zeros(FEW), pair(kind, splat(1.0), splat(1.0))
    for row in range(FEW):
        sums[row] = splat_at(inverses + 4 * row)
    for step in range(-(-keys // together)):
        for row in range(FEW):
            if row < rows:
                place = scores.address + scores.row_bytes * row + 4 * step
                sums[row] = add_pair(kind, sums[row], splat_at(place), one)
    for row in range(FEW):
        store("float32", inverses + 4 * row, splat(1.0) / sums[row], first_lanes(1))


@inlined
def mix_few(
    kind: str, size: int, together: int, lanes: int, tile: Tile, entries: Entries, weights: Scores,
    inverses: int, columns: int, out: Rows, sums_at: int,
) -> None:  # fmt: skip
    """Write the result of each row of the tile, at most `lanes`: LANES // lanes vectors of columns at a
    time."""
    for column in range(0, columns, LANES * (LANES // lanes)):
        sums, start = zeros(LANES), entries.address + size * column
        for key in range(0, entries.keys, together):
            first = start + integers(entries.offsets)[key]
            second = start + integers(entries.offsets)[min(key + together, entries.keys) - 1]
            if column == 0:
                for k in range(together):
                    fetch(entries, key + k, size * columns)
            own = weights.address + size * key
            for part in range(LANES // lanes):
                at = LANES * part
                if at < columns - column:
                    there = first_lanes(columns - column - at)
                    numbers = pair_at(kind, first + size * at, second + size * at, there)
                    for lane in range(lanes):
                        place = lanes * part + lane
                        sums[place] = add_step(kind, sums[place], numbers, own + weights.row_bytes * lane)
        for i in range(LANES):
            vectors(sums_at)[i] = sums[i]
        for lane in range(tile.size):
            inverse, place = splat(floats(inverses)[lane]), place_of(tile, lane, out)
            for part in range(LANES // lanes):
                at = column + LANES * part
                result = vectors(sums_at)[lanes * part + lane] * inverse
                store(kind, place + size * at, result, first_lanes(columns - at))
