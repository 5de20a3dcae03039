"""LLVM IR of truncation, as `outrider.sampling.truncation` defines it: the least key that stays.

Which tokens stay is decided on a list of those that may: the lower ones are left out by a bound. The list is
cut in half again and again, never sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.sampling.kernels.emitter import (
    F32,
    F64,
    FLOATS,
    I8,
    I64,
    INTS,
    LANES,
    POINTER,
    Emitter,
    Value,
    Variable,
    function,
)
from outrider.sampling.kernels.noise_ir import weights
from outrider.sampling.kernels.room_ir import (
    LEAST_KEY,
    LOG_MIN_P,
    NOTHING,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Room,
    greatest_key,
    keys_of,
    numbers_of,
    room_of,
    value_of,
)
from outrider.sampling.noise import GROUP


@dataclass(frozen=True, slots=True)
class _Parts:
    """Functions that `edge` calls."""

    total: Value
    collect: Value
    bisect: Value


def define_edge(module: Value, total_of: Value) -> Value:
    """edge(logits, size, row, top, scratch): the least key that truncation leaves."""
    parts = _Parts(total_of, _collect(module), _bisect(module))
    e, (logits, size, params, top, scratch) = function(
        module, "edge", I64, POINTER, I64, POINTER, F32, POINTER
    )
    row = room_of(e, scratch, size)
    temperature = e.build.fptrunc(e.load(params, TEMPERATURE, F64), F32)
    top_k, top_p = e.load(params, TOP_K), e.load(params, TOP_P, F64)
    log_min_p = e.load(params, LOG_MIN_P, F64)
    short, nucleus = e.whole("<", top_k, size), e.number("<", top_p, 1.0)
    floor, total = e.variable(F64(NOTHING)), e.variable(I64(0))
    with e.choice(short) as (yes, no):
        with yes:
            floor.set(_kth(e, parts, row, [logits, size, top_k, top, scratch]))
        with no, e.choice(nucleus) as (narrow, wide):
            with narrow:
                total.set(e.build.call(parts.total, [logits, size, top, temperature]))
                floor.set(_nucleus_floor(e, top, temperature, top_p, total.value, size))
            with wide:
                below = e.times(e.times(e.double(temperature), log_min_p), 1.0 + 1e-5)
                floor.set(e.plus(e.double(top), below))
    found = e.build.call(parts.collect, [logits, size, floor.value, scratch])
    least = e.variable(I64(LEAST_KEY))
    with e.when(short):  # and no token below has been listed
        least.set(e.both(greatest_key(e, e.build.fptrunc(floor.value, F32)), -(2**32)))
    with e.when(e.number(">", log_min_p, NOTHING)):
        least.set(_least_likely(e, row, found, top, temperature, log_min_p, least.value))
    with e.when(nucleus):
        listed = _weigh(e, row, found, top, temperature)
        whole = e.pick(e.whole("!=", total.value, 0), total.value, listed)
        limit = e.times(top_p, e.as_double(whole))
        last = e.build.call(parts.bisect, [found, limit, greatest_key(e, top), scratch, size])
        least.set(e.pick(e.whole(">", last, least.value), last, least.value))
    e.build.ret(least.value)
    return module.globals["edge"]


def _kth(e: Emitter, parts: _Parts, row: Room, call: list[Value]) -> Value:
    """The k-th highest logit.

    Where there are so many groups, it is not below the k-th of their highest ones: few tokens are listed.
    """
    logits, size, top_k, top, scratch = call
    floor = e.variable(F64(NOTHING))
    with e.when(e.whole("<=", top_k, row.groups)):
        listed = e.variable(I64(0))
        with e.each(row.groups, LANES) as group:
            highest = e.load(row.maxima, group, FLOATS, F32)
            there = e.number(">", highest, NOTHING)
            _put(e, row, listed, keys_of(e, highest, group), e.constant(INTS, 1), there)
        _close(e, row, listed.value)
        floor.set(value_of(e, _lowest_of(e, parts, listed.value, [top_k, top, scratch, size])))
    listed = e.build.call(parts.collect, [logits, size, floor.value, scratch])
    return value_of(e, _lowest_of(e, parts, listed, [top_k, top, scratch, size]))


def _lowest_of(e: Emitter, parts: _Parts, listed: Value, call: list[Value]) -> Value:
    """The k-th highest of the listed keys, or a lower one where there are fewer."""
    top_k, top, scratch, size = call
    return e.build.call(parts.bisect, [listed, e.as_double(top_k), greatest_key(e, top), scratch, size])


def _nucleus_floor(
    e: Emitter, top: Value, temperature: Value, top_p: Value, total: Value, size: Value
) -> Value:
    """No token below stays: so few weigh all of them together that they lie outside of the nucleus.

    Half of what is outside, shared among all tokens: rounding is far smaller. -inf when that is nothing.
    """
    outside = e.times(e.minus(e.constant(F64, 1.0), top_p), e.as_double(total))
    share = e.over(outside, e.as_double(e.mul(size, 2)))
    exponent = e.sub(e.down(e.build.bitcast(share, I64), 52), 1023)
    halvings = e.plus(e.as_double(e.sub(I64(40), exponent)), 0.01)
    depth = e.times(e.times(e.double(temperature), halvings), math.log(2.0))
    return e.pick(e.number("<", share, 1.0), F64(NOTHING), e.minus(e.double(top), depth))


def define_total(module: Value) -> Value:
    """total(logits, size, top, temperature): the weight of all tokens."""
    e, (logits, size, top, temperature) = function(module, "total", I64, POINTER, I64, F32, F32)
    whole = e.variable(e.constant(INTS, 0))

    def count_in(part: Value) -> None:
        heat = e.over(e.minus(part, e.spread(top)), e.spread(temperature))
        whole.set(e.add(whole.value, weights(e, e.double(heat))))

    even = e.both(size, -LANES)
    with e.each(even, LANES) as at:
        count_in(e.load(logits, at, FLOATS, F32))
    with e.each(size, LANES, start=even) as at:
        count_in(e.some(logits, at, size))
    e.build.ret(e.sum(whole.value))
    return module.globals["total"]


def _collect(module: Value) -> Value:
    """collect(logits, size, floor, scratch): lists the keys of tokens not below; returns how many.

    Each weighs 1. Behind them are eight keys 0 that weigh nothing.
    """
    e, (logits, size, floor, scratch) = function(module, "collect", I64, POINTER, I64, F64, POINTER)
    row = room_of(e, scratch, size)
    listed, floors = e.variable(I64(0)), e.spread(floor)
    with e.each(row.groups) as group:
        highest = e.double(e.load(row.maxima, group, F32))
        with (
            e.when(e.both(e.number(">=", highest, floor), e.number(">", highest, NOTHING))),
            e.each(I64(GROUP), LANES) as place,
        ):
            token = e.add(e.mul(group, GROUP), place)
            part = e.some(logits, token, size)
            there = e.both(e.number(">", part, NOTHING), e.number(">=", e.double(part), floors))
            _put(e, row, listed, keys_of(e, part, token), e.constant(INTS, 1), there)
    _close(e, row, listed.value)
    e.build.ret(listed.value)
    return module.globals["collect"]


def _put(e: Emitter, row: Room, end: Variable, keys: Value, weight: Value, where: Value) -> None:
    """Add some of eight keys at the end of the list, and move it."""
    for values, place in ((keys, row.keys), (weight, row.weights)):
        e.store(e.compressed(values, where), place, end.value, I64)
    count = e.build.call(e.intrinsic("llvm.ctpop.i8", I8, [I8]), [e.build.bitcast(where, I8)])
    end.set(e.add(end.value, e.build.zext(count, I64)))


def _close(e: Emitter, row: Room, end: Value) -> None:
    """Behind a list are eight keys 0 that weigh nothing."""
    for place in (row.keys, row.weights):
        e.store(e.constant(INTS, 0), place, end, I64)


def _weigh(e: Emitter, row: Room, found: Value, top: Value, temperature: Value) -> Value:
    """Give the listed tokens their weight; returns the sum."""
    total = e.variable(e.constant(INTS, 0))
    with e.each(found, LANES) as at:
        keys = e.load(row.keys, at, INTS, I64)
        heat = e.over(e.minus(numbers_of(e, keys), e.spread(top)), e.spread(temperature))
        weight = e.pick(e.whole("!=", keys, 0), weights(e, e.double(heat)), e.constant(INTS, 0))
        e.store(weight, row.weights, at, I64)
        total.set(e.add(total.value, weight))
    return e.sum(total.value)


def _least_likely(
    e: Emitter, row: Room, found: Value, top: Value, temperature: Value, log_min_p: Value, least: Value
) -> Value:
    """The least key from `least` on that min-p leaves."""
    lowest = e.variable(e.constant(INTS, -1))
    with e.each(found, LANES) as at:
        keys = e.load(row.keys, at, INTS, I64)
        difference = e.double(e.minus(numbers_of(e, keys), e.spread(top)))
        likely = e.number(">=", e.over(difference, e.spread(e.double(temperature))), e.spread(log_min_p))
        stays = e.both(likely, e.whole(">=", keys, e.spread(least)))
        lower = e.both(stays, e.whole("<", keys, lowest.value))
        lowest.set(e.pick(lower, keys, lowest.value))
    lowest_of_all = e.intrinsic("llvm.vector.reduce.umin.v8i64", I64, [INTS])
    return e.build.call(lowest_of_all, [lowest.value])


def _bisect(module: Value) -> Value:
    """bisect(listed, limit, high, scratch, size): the least key with less than `limit` of weight above it.

    The list goes: of each half, what cannot hold the key.
    """
    e, (count, limit, last, scratch, size) = function(module, "bisect", I64, I64, F64, I64, POINTER, I64)
    row = room_of(e, scratch, size)
    low, high = e.variable(I64(LEAST_KEY)), e.variable(last)
    listed, above = e.variable(count), e.variable(I64(0))
    with e.loop(lambda: e.whole("<", low.value, high.value)):
        middle = e.add(low.value, e.down(e.sub(high.value, low.value), 1))
        edge, upper = e.spread(middle), e.variable(e.constant(INTS, 0))
        with e.each(listed.value, LANES) as at:
            keys, weight = e.load(row.keys, at, INTS, I64), e.load(row.weights, at, INTS, I64)
            counted = e.pick(e.whole(">", keys, edge), weight, e.constant(INTS, 0))
            upper.set(e.add(upper.value, counted))
        weight_above = e.add(above.value, e.sum(upper.value))
        little = e.number("<", e.as_double(weight_above), limit)
        above.set(e.pick(little, weight_above, above.value))
        high.set(e.pick(little, middle, high.value))
        low.set(e.pick(little, low.value, e.add(middle, 1)))
        left, end = e.variable(I64(0)), listed.value
        with e.each(end, LANES) as at:
            keys, weight = e.load(row.keys, at, INTS, I64), e.load(row.weights, at, INTS, I64)
            from_low = e.whole(">=", keys, e.spread(low.value))
            to_high = e.whole("<=", keys, e.spread(high.value))
            _put(e, row, left, keys, weight, e.both(from_low, to_high))
        listed.set(left.value)
        _close(e, row, left.value)
    e.build.ret(low.value)
    return module.globals["bisect"]
