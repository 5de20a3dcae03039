"""LLVM IR of attention for the queries of each sequence over gathered keys and values.

    tile       up to LANES query rows of one kv head; each is one lane
    scores     key by key, up to the last that one of the tile sees: a key's numbers in all lanes times the
               tile's, LANES scores at once
    weights    e^(score - largest), added up key by key
    values     LANES columns at a time: key by key into one sum per row

Every sum goes through the keys in their order, and a hidden key adds exactly 0. So what a query gets depends
on the keys it sees alone, not on its batch or on what stands beside it. Scores are sums of exact products in
float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outrider.engine.kernels import silu_ir
from outrider.engine.kernels.numbers_ir import (
    LANES,
    STEP_BYTES,
    SUM,
    Numbers,
    declarations,
    masked,
    multiply_add,
    read,
    splat,
    write,
)

KEYS = 4
"""Keys whose scores are computed side by side."""
ROW = 4 * LANES
"""Bytes of a tile's scores for one key."""
_LANES = f"<{LANES} x i32>"


def module(numbers: Numbers) -> str:
    """IR with the function `attend`."""
    dot = numbers.declaration.format(sum=SUM, weights=numbers.weights)
    shared = declarations(numbers)
    return "\n".join([shared, "" if dot in shared else dot, _DECLARATIONS, _HEAD, *_body(numbers), "}"])


_DECLARATIONS = f"""{silu_ir.DECLARATIONS}
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
declare {SUM} @llvm.maxnum.v16f32({SUM}, {SUM})"""

_HEAD = f"""
; Q [tokens, row_bytes] queries, OUT [tokens, out_bytes]: `per_kv` heads for each of `kv_heads`, a head of
; head_bytes. Sequences of counts [sequences] tokens follow each other. Each sees of entries [slots,
; entry_bytes], which hold the keys and then the values of all kv heads, at slots [sequences, keys]. What
; hidden [sequences, mask_rows, keys] float32 says for its tokens, in the first of mask_rows, is added to the
; scores from key `open` on; it may be null. ends [sequences, mask_rows] says behind which key a token sees
; nothing more. room: head_bytes * {LANES} + (keys + {KEYS}) * {ROW} bytes, aligned to 64.
define void @attend(ptr %q, i64 %row_bytes, ptr %out, i64 %out_bytes, ptr %counts, i64 %sequences,
                    ptr %entries, i64 %entry_bytes, ptr %slots, i64 %keys, ptr %hidden, ptr %ends,
                    i64 %mask_rows, i64 %open, i64 %kv_heads, i64 %per_kv, i64 %head_bytes, float %scale,
                    ptr %room) {{
  %places = alloca [{LANES} x ptr], align 64
  %inverses = alloca {SUM}, align 64
  %words = udiv i64 %head_bytes, {STEP_BYTES}
  %tile_bytes = mul i64 %head_bytes, {LANES}
  %scores = getelementptr i8, ptr %room, i64 %tile_bytes
  %least_reach = add i64 %open, 1
  %last_key = sub i64 %keys, 1
  %value_offset = mul i64 %kv_heads, %head_bytes
  %scales_one = insertelement {SUM} poison, float %scale, i32 0
  %scales = shufflevector {SUM} %scales_one, {SUM} poison, <{LANES} x i32> zeroinitializer
  %hides = icmp ne ptr %hidden, null"""


def _body(numbers: Numbers) -> Iterator[str]:
    sequence = [
        *_at("%count_at", "%counts", ("%sequence_i", 8)),
        "  %count = load i64, ptr %count_at, align 8",
        "  %tokens_next = add i64 %first, %count",
        "  %rows = mul i64 %count, %per_kv",
        *_at("%sequence_slots", "%slots", ("%sequence_i", "%keys", 8)),
        *_at("%sequence_mask", "%hidden", ("%sequence_i", "%mask_rows", "%keys", 4)),
        *_at("%sequence_ends", "%ends", ("%sequence_i", "%mask_rows", 8)),
        *_loop("head", "%kv_heads", _loop("tile", "%rows", _tile(numbers), step=LANES)),
    ]
    carried = [("%first", "i64", "0", "%tokens_next")]
    yield from _loop("sequence", "%sequences", sequence, carried=carried)
    yield "  ret void"


def _tile(numbers: Numbers) -> Iterator[str]:
    """What a tile of query rows gets."""
    yield "  %tile_left = sub i64 %rows, %tile_i"
    yield f"  %size = call i64 @llvm.umin.i64(i64 {LANES}, i64 %tile_left)"
    yield from _loop("empty", str(LANES), [*_at("%empty_at", "%places", ("%empty_i", 8)), _KEEP_EMPTY])
    yield from _loop("lane", "%size", _gathered(), carried=[("%seen_end", "i64", "%least_reach", "%reach")])
    yield "  %closed = sub i64 %reach, %open"
    yield from _loop("key", "%reach", _scored(numbers), step=KEYS)
    yield "  br i1 %hides, label %hiding, label %seen"
    yield "hiding:"
    yield from _loop("hiding_row", "%size", _hidden())
    yield "  br label %seen"
    yield "seen:"
    yield f"  %first_score = load {SUM}, ptr %scores, align 64"
    yield from _loop("peak", "%reach", _largest(), carried=[("%most", SUM, "%first_score", "%most_next")])
    yield from _loop("weigh", "%reach", _weighed(), carried=[("%sum", SUM, "zeroinitializer", "%sum_next")])
    yield f"  %inverse = fdiv {SUM} {splat(1.0)}, %sum_next"
    yield f"  store {SUM} %inverse, ptr %inverses, align 64"
    yield f"  %columns = udiv i64 %head_bytes, {numbers.bytes}"
    yield from _loop("column", "%columns", _mixed(numbers), step=LANES)


_KEEP_EMPTY = "  store ptr %out, ptr %empty_at, align 8"


def _gathered() -> Iterator[str]:
    """One row of the tile: its numbers into its lane, where its result goes, and how far it sees."""
    yield "  %row = add i64 %tile_i, %lane_i"
    yield "  %group = udiv i64 %row, %count"
    yield "  %index = urem i64 %row, %count"
    yield "  %token = add i64 %first, %index"
    yield "  %kv_first = mul i64 %head_i, %per_kv"
    yield "  %query_head = add i64 %kv_first, %group"
    yield from _at("%query", "%q", ("%token", "%row_bytes"), ("%query_head", "%head_bytes"))
    yield from _at("%place", "%out", ("%token", "%out_bytes"), ("%query_head", "%head_bytes"))
    yield from _at("%place_at", "%places", ("%lane_i", 8))
    yield "  store ptr %place, ptr %place_at, align 8"
    yield from _at("%end_at", "%sequence_ends", ("%index", 8))
    yield "  %row_end = load i64, ptr %end_at, align 8"
    yield "  %reach = call i64 @llvm.umax.i64(i64 %seen_end, i64 %row_end)"
    word = [
        *_at("%word_from", "%query", ("%word_i", STEP_BYTES)),
        *_at("%word_to", "%room", ("%word_i", ROW), ("%lane_i", STEP_BYTES)),
        "  %word = load i32, ptr %word_from, align 2",
        "  store i32 %word, ptr %word_to, align 4",
    ]
    yield from _loop("word", "%words", word)


def _scored(numbers: Numbers) -> Iterator[str]:
    """Scores of KEYS keys; those behind the last key repeat it and are not read."""
    for k in range(KEYS):
        yield f"  %key{k} = add i64 %key_i, {k}"
        yield f"  %real{k} = call i64 @llvm.umin.i64(i64 %key{k}, i64 %last_key)"
        yield from _at(f"%slot{k}_at", "%sequence_slots", (f"%real{k}", 8))
        yield f"  %slot{k} = load i64, ptr %slot{k}_at, align 8"
        yield from _at(f"%entry{k}", "%entries", (f"%slot{k}", "%entry_bytes"), ("%head_i", "%head_bytes"))
    body = [
        *_at("%part_at", "%room", ("%part_i", ROW)),
        f"  %part = load {numbers.weights}, ptr %part_at, align 64",
        *(line for k in range(KEYS) for line in _dot(numbers, k)),
    ]
    carried = [(f"%dot{k}", SUM, "zeroinitializer", f"%dot{k}_next") for k in range(KEYS)]
    yield from _loop("part", "%words", body, carried=carried)
    for k in range(KEYS):
        yield f"  %score{k} = fmul {SUM} %dot{k}_next, %scales"
        yield from _at(f"%score{k}_at", "%scores", (f"%key{k}", ROW))
        yield f"  store {SUM} %score{k}, ptr %score{k}_at, align 64"


def _dot(numbers: Numbers, k: int) -> Iterator[str]:
    yield from _at(f"%one{k}_at", f"%entry{k}", ("%part_i", STEP_BYTES))
    yield f"  %one{k} = load i32, ptr %one{k}_at, align 2"
    yield f"  %lane{k} = insertelement {_LANES} poison, i32 %one{k}, i32 0"
    yield f"  %lanes{k} = shufflevector {_LANES} %lane{k}, {_LANES} poison, {_LANES} zeroinitializer"
    yield f"  %spread{k} = bitcast {_LANES} %lanes{k} to {numbers.weights}"
    places = {"a": f"%dot{k}", "w": "%part", "x": f"%spread{k}", "sum": SUM, "weights": numbers.weights}
    yield f"  %dot{k}_next = {numbers.multiply_add.format(**places)}"


def _hidden() -> Iterator[str]:
    """Add one row's mask to its lane."""
    yield "  %hidden_row = add i64 %tile_i, %hiding_row_i"
    yield "  %hidden_index = urem i64 %hidden_row, %count"
    yield from _at("%row_mask", "%sequence_mask", ("%hidden_index", "%keys", 4))
    one = [
        "  %hide_key = add i64 %hide_i, %open",
        *_at("%hide_from", "%row_mask", ("%hide_key", 4)),
        *_at("%hide_to", "%scores", ("%hide_key", ROW), ("%hiding_row_i", 4)),
        "  %hide = load float, ptr %hide_from, align 4",
        "  %shown = load float, ptr %hide_to, align 4",
        "  %both = fadd float %shown, %hide",
        "  store float %both, ptr %hide_to, align 4",
    ]
    yield from _loop("hide", "%closed", one)


def _largest() -> Iterator[str]:
    yield from _at("%most_at", "%scores", ("%peak_i", ROW))
    yield f"  %most_score = load {SUM}, ptr %most_at, align 64"
    yield f"  %most_next = call {SUM} @llvm.maxnum.v16f32({SUM} %most, {SUM} %most_score)"


def _weighed() -> Iterator[str]:
    yield from _at("%weigh_at", "%scores", ("%weigh_i", ROW))
    yield f"  %weigh_score = load {SUM}, ptr %weigh_at, align 64"
    yield f"  %below = fsub {SUM} %weigh_score, %most_next"
    yield from silu_ir.exponential("%below", "%weight")
    yield f"  store {SUM} %weight, ptr %weigh_at, align 64"
    yield f"  %sum_next = fadd {SUM} %sum, %weight"


def _mixed(numbers: Numbers) -> Iterator[str]:
    """LANES columns of every row's result."""
    yield "  %left = sub i64 %columns, %column_i"
    yield from masked("%left")
    body = [
        *_at("%value_slot_at", "%sequence_slots", ("%value_i", 8)),
        "  %value_slot = load i64, ptr %value_slot_at, align 8",
        *_at(
            "%value_at",
            "%entries",
            ("%value_slot", "%entry_bytes"),
            ("%value_offset", 1),
            ("%head_i", "%head_bytes"),
            ("%column_i", numbers.bytes),
        ),
        *read(numbers, "%numbers", "%value_at"),
        *_at("%weights_at", "%scores", ("%value_i", ROW)),
        *(line for lane in range(LANES) for line in _added(lane)),
    ]
    carried = [(f"%mix{lane}", SUM, "zeroinitializer", f"%mix{lane}_next") for lane in range(LANES)]
    yield from _loop("value", "%reach", body, carried=carried)
    for lane in range(LANES):
        yield from _placed(numbers, lane)


def _added(lane: int) -> Iterator[str]:
    yield from _spread(f"%weight{lane}", "%weights_at", lane)
    yield multiply_add(f"%mix{lane}_next", f"%weight{lane}", "%numbers", f"%mix{lane}")


def _placed(numbers: Numbers, lane: int) -> Iterator[str]:
    """Write a row's columns if there is such a row."""
    yield from _spread(f"%share{lane}", "%inverses", lane)
    yield f"  %result{lane} = fmul {SUM} %mix{lane}_next, %share{lane}"
    yield f"  %there{lane} = icmp ult i64 {lane}, %size"
    yield f"  %some{lane} = select i1 %there{lane}, <{LANES} x i1> %mask, <{LANES} x i1> zeroinitializer"
    yield from _at(f"%place{lane}_at", "%places", (lane, 8))
    yield f"  %place{lane} = load ptr, ptr %place{lane}_at, align 8"
    yield from _at(f"%target{lane}", f"%place{lane}", ("%column_i", numbers.bytes))
    yield from write(numbers, f"%result{lane}", f"%target{lane}", f"%some{lane}")


def _spread(name: str, base: str, lane: int) -> Iterator[str]:
    """Make {name} the float32 number `lane` of {base} in all lanes."""
    yield from _at(f"{name}_at", base, (lane, 4))
    yield f"  {name}_float = load float, ptr {name}_at, align 4"
    yield f"  {name}_first = insertelement {SUM} poison, float {name}_float, i32 0"
    yield f"  {name} = shufflevector {SUM} {name}_first, {SUM} poison, <{LANES} x i32> zeroinitializer"


def _at(name: str, base: str, *terms: tuple[str | int, ...]) -> Iterator[str]:
    """Make {name} the address {base} plus, in bytes, the product of each term's factors."""
    place = base
    for number, (factor, *others) in enumerate(terms):
        for other_number, other in enumerate(others):
            product = f"{name}_{number}_{other_number}"
            yield f"  {product} = mul i64 {factor}, {other}"
            factor = product
        result = name if number == len(terms) - 1 else f"{name}_{number}"
        yield f"  {result} = getelementptr i8, ptr {place}, i64 {factor}"
        place = result


def _loop(
    name: str,
    count: str,
    body: Iterable[str],
    *,
    step: int = 1,
    carried: Iterable[tuple[str, str, str, str]] = (),
) -> Iterator[str]:
    """`body` for %{name}_i from 0 in steps below `count`, which is at least 1.

    What is carried from one turn to the next is given as name, type, first value, and the next one's name,
    which holds the last one behind the loop.
    """
    yield f"  br label %{name}_before\n{name}_before:\n  br label %{name}_turn\n{name}_turn:"
    yield f"  %{name}_i = phi i64 [ 0, %{name}_before ], [ %{name}_more, %{name}_next ]"
    for value, kind, first, following in carried:
        yield f"  {value} = phi {kind} [ {first}, %{name}_before ], [ {following}, %{name}_next ]"
    yield from body
    yield f"  br label %{name}_next\n{name}_next:"
    yield f"  %{name}_more = add i64 %{name}_i, {step}"
    yield f"  %{name}_again = icmp ult i64 %{name}_more, {count}"
    yield f"  br i1 %{name}_again, label %{name}_turn, label %{name}_end\n{name}_end:"
