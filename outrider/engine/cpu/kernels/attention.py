"""Attention for the queries of each sequence over gathered keys and values, tile by tile.

A query's result depends only on the keys it sees, not on its batch or its neighbours. Scores are sums of
exact products in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from outrider.engine.cpu.kernels.attention_few import (
    FEW,
    Scores,
    copy_queries,
    hide_few,
    mix_few,
    score_few,
    weigh_few,
)
from outrider.engine.cpu.kernels.attention_many import (
    hide_many,
    mix_many,
    pack_keys,
    pack_values,
    score_many,
    weigh_many,
)
from outrider.engine.cpu.kernels.attention_tiles import (
    AHEAD,
    ROW,
    Entries,
    Rows,
    Scale,
    Tile,
    find_offsets,
    find_sinks,
    reach_of,
)
from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.steps import TOGETHER
from outrider.engine.cpu.kernels.vectors import BYTES, VECTOR_BYTES, float_of, integers
from outrider.engine.cpu.processor import LANES


class Room(NamedTuple):
    """Addresses of the parts of the scratch memory, and its `end`."""

    inverses: int
    sums: int
    queries: int
    offsets: int
    scores: int
    mask: int
    packed_keys: int
    packed_values: int
    end: int
    several: int
    """The keys that there is room for."""


def lay_out(start: int, head_bytes: int, value_bytes: int, keys: int) -> Room:
    """Lay out the scratch memory of a call from `start` on, a multiple of VECTOR_BYTES."""
    several = keys + AHEAD + 2 * LANES - keys % LANES
    head = -(-head_bytes // VECTOR_BYTES) * VECTOR_BYTES
    values = -(-value_bytes // VECTOR_BYTES) * VECTOR_BYTES
    sums = start + ROW
    queries = sums + FEW * LANES * ROW
    offsets = queries + LANES * head
    scores = offsets + 8 * several
    mask = scores + LANES * 4 * several
    packed_keys = scores + 2 * LANES * 4 * several
    packed_values = packed_keys + head * several
    end = packed_values + values * several
    return Room(start, sums, queries, offsets, scores, mask, packed_keys, packed_values, end, several)


_lay_out = inlined(lay_out)


def room_bytes(head_bytes: int, value_bytes: int, keys: int) -> int:
    """Return the bytes of a call's scratch memory."""
    return lay_out(0, head_bytes, value_bytes, keys).end


def tiles_of(counts: Sequence[int], kv_heads: int, per_kv: int) -> int:
    """Return how many tiles a call has for sequences of `counts` tokens."""
    return kv_heads * sum(-(-count * per_kv // LANES) for count in counts)


class Heads(NamedTuple):
    """Where a kv head's queries, keys, values and results begin, and how many query heads share it."""

    queries: Rows
    keys: int
    values: int
    results: Rows
    per_kv: int
    sinks: int
    """Where the scores of its sinks begin; 0 if there are none."""


class Mask(NamedTuple):
    """What is added to the scores from key `open_keys` on; the address is 0 if that is nothing."""

    rows: Rows
    open_keys: int


@inlined
def _few(
    kind: str, size: int, together: int, lanes: int, tile: Tile, head: Heads, reach: int, mask: Mask,
    scale: Scale, room: Room,
) -> None:  # fmt: skip
    """Compute a tile of few rows, at most `lanes`."""
    scores = Scores(room.scores, 4 * room.several)
    copy_queries(tile, head.queries, room.queries)
    keys = Entries(head.keys, room.offsets, reach)
    width = head.queries.head_bytes
    score_few(kind, lanes, tile.size, width, keys, scale, room.queries, scores, room.sums)
    if mask.rows.address:
        hidden = Scores(scores.address + 4 * mask.open_keys, scores.row_bytes)
        hide_few(tile, mask.rows, reach - mask.open_keys, hidden)
    find_sinks(tile, head.sinks, room.inverses)
    weigh_few(kind, size, together, tile.size, reach, scores, room.inverses)
    values, columns = Entries(head.values, room.offsets, reach), head.results.head_bytes // size
    mix_few(
        kind, size, together, lanes, tile, values, scores, room.inverses, columns, head.results, room.sums
    )


@inlined
def _many(
    kind: str, size: int, together: int, tile: Tile, head: Heads, steps: int, reach: int, mask: Mask,
    scale: Scale, room: Room,
) -> None:  # fmt: skip
    """Compute a tile of many rows, whose keys and values are packed."""
    score_many(kind, tile, head.queries, room.packed_keys, reach, scale, room.queries, room.scores)
    if mask.rows.address:
        hidden = room.scores + ROW * mask.open_keys
        hide_many(tile, mask.rows, reach - mask.open_keys, room.mask, hidden)
    find_sinks(tile, head.sinks, room.inverses)
    weigh_many(kind, together, room.scores, reach, room.inverses)
    mix_many(
        kind, size, tile, room.packed_values, steps, -(-reach // together), room.scores, room.inverses,
        head.results.head_bytes // size, head.results, room.sums,
    )  # fmt: skip


(
    Q,
    Q_STRIDE,
    OUT,
    OUT_STRIDE,
    COUNTS,
    SEQUENCES,
    ENTRIES,
    ENTRY_BYTES,
    SLOTS,
    KEYS,
    HIDDEN,
    ENDS,
    MASK_ROWS,
    OPEN_KEYS,
    KV_HEADS,
    PER_KV,
    HEAD_BYTES,
    VALUE_BYTES,
    VALUES_AT,
    TILES,
    PARTS,
    ROOM,
    ROOM_APART,
    SCALE,
    SOFTCAP,
    SINKS,
) = range(26)
"""Places of a call's numbers, which are int64; the scale and the softcap are float64."""
SEEN = (
    COUNTS, SEQUENCES, SLOTS, KEYS, HIDDEN, ENDS, MASK_ROWS, OPEN_KEYS, TILES, PARTS, ROOM, ROOM_APART
)  # fmt: skip
"""Places of those that a step determines, for all layers with equal windows."""


@cache
def attention(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers. It attends from Q [tokens, Q_STRIDE bytes] to OUT [tokens, OUT_STRIDE
    bytes].

    Both have PER_KV heads for each of KV_HEADS: queries of HEAD_BYTES, results of VALUE_BYTES. Sequences of
    COUNTS [SEQUENCES] tokens follow each other. ENTRIES [slots, ENTRY_BYTES] hold the keys of all kv heads
    and, from byte VALUES_AT on, their values, which may be parts of the keys; a sequence sees those at its
    SLOTS [SEQUENCES, KEYS]. From key OPEN_KEYS on, HIDDEN [SEQUENCES, MASK_ROWS, KEYS] float32 is added to
    the scores; a sequence's tokens use the first of the MASK_ROWS. The address HIDDEN is 0 if there is no
    mask. ENDS [SEQUENCES, MASK_ROWS] says how many keys a token sees. SOFTCAP bounds the scores, unless it is
    0. SINKS [query heads] float32 are the scores of sinks; the address is 0 if there are none. The TILES,
    which `tiles_of` counts, are cut into PARTS. ROOM is memory of `room_bytes`, at a multiple of 64; the next
    member's is ROOM_APART bytes later. Counts, slots and ends are int64.
    """
    size, together = BYTES[kind], TOGETHER[kind]

    @kernel("void(intp, intp, intp)", for_kernels=True)
    def attend(table: int, part: int, member: int) -> None:
        call = integers(table)
        q, token_bytes, out, out_bytes = call[Q], call[Q_STRIDE], call[OUT], call[OUT_STRIDE]
        counts, sequences, entries, entry_bytes = (
            call[COUNTS],
            call[SEQUENCES],
            call[ENTRIES],
            call[ENTRY_BYTES],
        )
        slots, keys, hidden, ends = call[SLOTS], call[KEYS], call[HIDDEN], call[ENDS]
        mask_rows, open_keys, kv_heads, per_kv = (
            call[MASK_ROWS],
            call[OPEN_KEYS],
            call[KV_HEADS],
            call[PER_KV],
        )
        head_bytes, value_bytes, values_at = call[HEAD_BYTES], call[VALUE_BYTES], call[VALUES_AT]
        begin, end = call[TILES] * part // call[PARTS], call[TILES] * (part + 1) // call[PARTS]
        scratch, sinks = call[ROOM] + member * call[ROOM_APART], call[SINKS]
        scale = Scale(float_of(call[SCALE]), float_of(call[SOFTCAP]))
        room = _lay_out(scratch, head_bytes, value_bytes, keys)
        steps, columns = -(-keys // together), value_bytes // size
        first = tiles = 0
        for sequence in range(sequences):
            count = integers(counts)[sequence]
            of_head = -(-count * per_kv // LANES)
            begun, last = max(begin - tiles, 0), min(end - tiles, of_head * kv_heads)
            if begun < last:
                find_offsets(slots + 8 * sequence * keys, keys, entry_bytes, room.offsets)
            row = hidden + 4 * (sequence * mask_rows * keys + open_keys) if hidden else 0
            mask, packed = Mask(Rows(row, 4 * keys, 0), open_keys), -1
            for now in range(begun, last):
                number, index = now // of_head, now % of_head
                tile = Tile(LANES * index, min(LANES, count * per_kv - LANES * index), count)
                reach = reach_of(tile, ends + 8 * sequence * mask_rows, open_keys + 1)
                head = Heads(
                    Rows(q + first * token_bytes + number * per_kv * head_bytes, token_bytes, head_bytes),
                    entries + number * head_bytes,
                    entries + values_at + number * value_bytes,
                    Rows(out + first * out_bytes + number * per_kv * value_bytes, out_bytes, value_bytes),
                    per_kv,
                    sinks + 4 * number * per_kv if sinks else 0,
                )
                if tile.size > FEW:
                    if packed != number:
                        pack_keys(Entries(head.keys, room.offsets, keys), head_bytes, room.packed_keys)
                        own = Entries(head.values, room.offsets, keys)
                        pack_values(kind, size, together, own, columns, steps, room.packed_values)
                        packed = number
                    _many(kind, size, together, tile, head, steps, reach, mask, scale, room)
                else:
                    if tile.size <= 2 and columns > LANES * (LANES // FEW):
                        _few(kind, size, together, 2, tile, head, reach, mask, scale, room)
                    else:
                        _few(kind, size, together, FEW, tile, head, reach, mask, scale, room)
            tiles += of_head * kv_heads
            first += count

    return attend
