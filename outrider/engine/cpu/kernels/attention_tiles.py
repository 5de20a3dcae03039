"""What both ways to compute a tile of attention share: rows, entries, and how memory is fetched.

A tile is up to LANES rows of one kv head over the keys of their sequence; a row is a query of one head. Tiles
of many rows (`attention_many`) and of few (`attention_few`) get the same bits. A score has LANES sums, each
over every LANES-th step of a head, which are added by halves. Weights are e^(score - largest), rounded to the
dtype as transformers rounds them; their total and the sums of values go through the keys in order, so that a
hidden key, which has the weight 0, changes nothing. A sink is a score whose weight is the first number of the
total, and that has no value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from outrider.engine.cpu.kernels.compiling import inlined
from outrider.engine.cpu.kernels.epilogue import tanh
from outrider.engine.cpu.kernels.vectors import (
    VECTOR_BYTES,
    Value,
    floats,
    integers,
    prefetch,
    splat,
    vectors,
)
from outrider.engine.cpu.processor import LANES

AHEAD = 32
"""How many keys ahead memory is fetched."""
ROW = 4 * LANES
"""Bytes of a step of all lanes."""


class Tile(NamedTuple):
    """Rows [row, row + size) of a kv head: those of its first query head are `tokens` tokens, and so on."""

    row: int
    size: int
    tokens: int


class Rows(NamedTuple):
    """Queries or results of a kv head: of `head_bytes`, tokens `token_bytes` apart."""

    address: int
    token_bytes: int
    head_bytes: int


class Scale(NamedTuple):
    """What becomes of a product of query and key: `factor` times it, and its `softcap` by tanh; 0: none."""

    factor: float
    softcap: float


class Entries(NamedTuple):
    """Keys or values of a kv head. `offsets` [keys + AHEAD + LANES] says for each key how many bytes after
    `address` its entry begins."""

    address: int
    offsets: int
    keys: int


@inlined
def padded(count: int) -> int:
    """The bytes of as many vectors as `count` bytes take."""
    return -(-count // VECTOR_BYTES) * VECTOR_BYTES


@inlined
def place_of(tile: Tile, lane: int, rows: Rows) -> int:
    """Return the address of a row of the tile."""
    row = tile.row + lane
    place: int = rows.address + row % tile.tokens * rows.token_bytes + row // tile.tokens * rows.head_bytes
    return place


@inlined
def reach_of(tile: Tile, ends: int, least: int) -> int:
    """How many keys the tile sees, at least `least`."""
    reach = least
    for row in range(tile.row, tile.row + tile.size):
        reach = max(reach, integers(ends)[row % tile.tokens])
    return reach


@inlined
def scaled(x: Value, scale: Scale) -> Value:
    """Return the scores of products."""
    x = x * splat(scale.factor)
    if scale.softcap != 0.0:
        x = tanh(x / splat(scale.softcap)) * splat(scale.softcap)
    return x


@inlined
def find_sinks(tile: Tile, sinks: int, to: int) -> None:
    """Write the score of each row's sink: `sinks` has one for each query head, and is 0 if there are none."""
    vectors(to)[0] = splat(-math.inf)
    if sinks:
        for lane in range(tile.size):
            floats(to)[lane] = floats(sinks)[(tile.row + lane) // tile.tokens]


@inlined
def find_offsets(slots: int, keys: int, entry_bytes: int, offsets: int) -> None:
    """Write the offsets of a sequence's entries; past the last one, that of the last."""
    for key in range(keys + AHEAD + LANES):
        integers(offsets)[key] = integers(slots)[min(key, keys - 1)] * entry_bytes


@inlined
def fetch(entries: Entries, key: int, count: int) -> None:
    """Begin to read `count` bytes of a later key: entries lie too far apart for the processor to predict."""
    place = entries.address + integers(entries.offsets)[key + AHEAD]
    for line in range(0, count, 64):
        prefetch(2, place + line)
