"""LLVM IR of what is exported: the choices at rows of logits, and a draft's rankings of them."""

from __future__ import annotations

from llvmlite import ir

from outrider.acceptance import BUCKETS, EDGES, FLATNESS, SHARPNESS_GRID
from outrider.sampling.kernels.emitter import (
    DOUBLES,
    F32,
    F64,
    I64,
    INTS,
    LANES,
    POINTER,
    Emitter,
    Value,
    function,
)
from outrider.sampling.kernels.noise_ir import weights
from outrider.sampling.kernels.room_ir import FLAGS, GREEDY, ROW_FORMAT, SLOPE, TEMPERATURE
from outrider.sampling.kernels.search_ir import VOID, define_search
from outrider.sampling.kernels.truncation_ir import define_total

ROW_WORDS = len(ROW_FORMAT)
GRID_WORDS = -(-len(SHARPNESS_GRID) // LANES) * LANES


def ranking_words(count: int) -> int:
    """64-bit numbers of a ranking: `count` tokens, their buckets, how many there are, the grid's winners."""
    return 2 * count + 1 + GRID_WORDS


def module() -> str:
    """IR with the functions `choose` and `rank`; see them for their arguments."""
    made = ir.Module("sampling")
    total = define_total(made)
    search = define_search(made, total)
    _choose(made, search)
    _rank(made, search, total)
    return str(made)


def _choose(module: Value, search: Value) -> None:
    """choose(logits, stride, size, rows, count_rows, tokens, leaders, scratch): the token of each row.

    Rows of `size` float32 are `stride` of them apart. `leaders` has room for three numbers.
    """
    e, (logits, stride, size, rows, count_rows, tokens, leaders, scratch) = function(
        module, "choose", VOID, POINTER, I64, I64, POINTER, I64, POINTER, POINTER, POINTER, exported=True
    )
    with e.each(count_rows) as row:
        line, params = e.at(logits, e.mul(row, stride), F32), e.at(rows, e.mul(row, ROW_WORDS))
        e.build.call(search, [line, size, params, I64(1), leaders, scratch])
        e.store(e.load(leaders, 0), tokens, row)
    e.build.ret_void()


def _rank(module: Value, search: Value, total: Value) -> None:
    """rank(logits, stride, size, rows, count_rows, count, rankings, leaders, scratch).

    A ranking is made of `ranking_words`. `leaders` has room for three times `count` numbers and eight more.
    """
    e, (logits, stride, size, rows, count_rows, count, rankings, leaders, scratch) = function(
        module, "rank", VOID, POINTER, I64, I64, POINTER, I64, I64, POINTER, POINTER, POINTER, exported=True
    )
    with e.each(count_rows) as row:
        line, params = e.at(logits, e.mul(row, stride), F32), e.at(rows, e.mul(row, ROW_WORDS))
        ranking = e.at(rankings, e.mul(row, e.add(e.mul(count, 2), 1 + GRID_WORDS)))
        top = e.build.call(search, [line, size, params, count, leaders, scratch])
        greedy = e.whole("!=", e.both(e.load(params, FLAGS), GREEDY), 0)
        with e.each(count) as place:
            e.store(e.load(leaders, place), ranking, place)
        found = e.variable(I64(0))
        with e.each(count) as place:
            there = e.number(">", e.load(leaders, e.add(place, count), F64), float("-inf"))
            found.set(e.add(found.value, e.build.zext(there, I64)))
        e.store(found.value, ranking, e.mul(count, 2))
        sum_of_all = e.variable(_sum(e, leaders, count, params))
        with e.when(greedy):
            sum_of_all.set(e.build.call(total, [line, size, top, F32(1.0)]))
        _store_buckets(e, leaders, count, params, sum_of_all.value, e.at(ranking, count))
        _store_winners(e, leaders, count, params, e.at(ranking, e.add(e.mul(count, 2), 1)))
    e.build.ret_void()


def _shares(e: Emitter, leaders: Value, count: Value, at: Value, params: Value) -> Value:
    """Weights of eight leaders from `at` on: exp(score / flatness), at low temperatures flatter."""
    scores = e.load(leaders, e.add(at, count), DOUBLES, F64)
    heat = e.load(params, TEMPERATURE, F64)
    heat = e.pick(e.number("<", heat, 1.0), heat, F64(1.0))
    greedy = e.whole("!=", e.both(e.load(params, FLAGS), GREEDY), 0)
    flat = e.pick(greedy, F64(1.0), e.over(F64(FLATNESS), heat))
    behind = e.minus(scores, e.spread(e.load(leaders, count, F64)))
    inside = e.whole("<", e.lanes(at), e.spread(count))
    return e.pick(inside, weights(e, e.over(behind, e.spread(flat))), e.constant(INTS, 0))


def _sum(e: Emitter, leaders: Value, count: Value, params: Value) -> Value:
    total = e.variable(e.constant(INTS, 0))
    with e.each(count, LANES) as at:
        total.set(e.add(total.value, _shares(e, leaders, count, at, params)))
    return e.sum(total.value)


def _store_buckets(
    e: Emitter, leaders: Value, count: Value, params: Value, total: Value, buckets: Value
) -> None:
    """The bucket of each leader's share of the total: see `acceptance.bucket`."""
    sampled = e.xor(e.both(e.load(params, FLAGS), GREEDY), GREEDY)
    with e.each(count, LANES) as at:
        weight = _shares(e, leaders, count, at, params)
        share = e.over(e.as_double(weight), e.spread(e.as_double(total)))
        bucket = e.spread(e.mul(sampled, BUCKETS // 2))
        for edge in EDGES:
            bucket = e.add(bucket, e.build.zext(e.number(">=", share, edge), INTS))
        held = e.variable(bucket)
        with e.each_lane(e.whole("<", e.lanes(at), e.spread(count))) as lane:
            e.store(e.build.extract_element(held.value, lane), buckets, e.add(at, lane))


def _store_winners(e: Emitter, leaders: Value, count: Value, params: Value, winners: Value) -> None:
    """The leader that each sharpness of the grid would put first."""
    grid = e.table("grid", [*SHARPNESS_GRID, *[1.0] * (GRID_WORDS - len(SHARPNESS_GRID))], F64)
    slope = e.load(params, SLOPE, F64)
    for part in range(0, GRID_WORDS, LANES):
        sharpness = e.load(grid, part, DOUBLES, F64)
        best = e.variable(e.constant(DOUBLES, float("-inf")))
        first = e.variable(e.spread(e.load(leaders, 0)))
        with e.each(count) as place:
            score = e.load(leaders, e.add(place, count), F64)
            noise = e.load(leaders, e.add(place, e.mul(count, 2)), F64)
            logit = e.over(e.minus(score, noise), slope)
            other = e.plus(e.times(e.spread(logit), sharpness), e.spread(noise))
            higher = e.number(">", other, best.value)
            best.set(e.pick(higher, other, best.value))
            first.set(e.pick(higher, e.spread(e.load(leaders, place)), first.value))
        e.store(first.value, winners, part, I64)
