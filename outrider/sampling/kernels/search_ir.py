"""LLVM IR of the search for the leading tokens of a row of logits; see `outrider.sampling.perturbed`.

    maxima   the highest logit of each group of 64 tokens
    edge     truncation as one number: the tokens that stay are those whose key is not below it
    bounds   no token of a group scores higher: its highest logit with the largest noise of the group
    visit    groups in falling order of their bound, until none can hold a leader any more: of a few of their
             tokens the noise is drawn

Of equal scores the lower token leads. NaN never leads.
"""

from __future__ import annotations

from llvmlite import ir

from outrider.sampling.kernels.emitter import (
    DOUBLES,
    F32,
    F64,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    POINTER,
    SHORTS,
    Emitter,
    Value,
    Variable,
    function,
)
from outrider.sampling.kernels.noise_ir import exponential, hashed, minus_log
from outrider.sampling.kernels.room_ir import (
    FLAGS,
    GREEDY,
    LEAST_KEY,
    NOTHING,
    POSITION,
    SCALE,
    SEED,
    TRUNCATED,
    keys_of,
    number_of,
    room_of,
)
from outrider.sampling.kernels.truncation_ir import define_edge
from outrider.sampling.noise import GAMMA, GROUP, TOKEN_STREAM

VOID = ir.VoidType()


def define_search(module: Value, total: Value) -> Value:
    """search(logits, size, row, count, leaders, scratch): returns the row's highest logit.

    `leaders` are `count` tokens, then as many scores, then the noise of each; a missing leader is token 0
    with the score -inf. Greedy rows have no noise.
    """
    maxima, edge, bounds = _maxima(module), define_edge(module, total), _bounds(module)
    best, visit = _best(module), _visit(module, _insert(module))
    e, (logits, size, params, count, leaders, scratch) = function(
        module, "search", F32, POINTER, I64, POINTER, I64, POINTER, POINTER
    )
    row = room_of(e, scratch, size)
    flags = e.load(params, FLAGS)
    top = e.build.call(maxima, [logits, size, row.groups, row.maxima])
    least = e.variable(I64(LEAST_KEY))
    with e.when(e.whole("!=", e.both(flags, TRUNCATED), 0)):
        least.set(e.build.call(edge, [logits, size, params, top, scratch]))
    e.build.call(bounds, [size, params, least.value, scratch])
    with e.each(count) as place:
        e.store(I64(0), leaders, place)
        e.store(F64(NOTHING), leaders, e.add(place, count))
        e.store(F64(0.0), leaders, e.add(place, e.mul(count, 2)))
    last = e.sub(e.mul(count, 2), 1)
    group = e.variable(e.build.call(best, [row.bounds, row.groups]))

    def may_lead() -> Value:
        bound, worst = e.load(row.bounds, group.value, F64), e.load(leaders, last, F64)
        return e.both(e.number(">=", bound, worst), e.number(">", bound, NOTHING))

    with e.loop(may_lead):
        e.build.call(visit, [logits, size, params, least.value, group.value, count, leaders, scratch])
        e.store(F64(NOTHING), row.bounds, group.value)
        group.set(e.build.call(best, [row.bounds, row.groups]))
    e.build.ret(top)
    return module.globals["search"]


def _maxima(module: Value) -> Value:
    """maxima(logits, size, groups, maxima): the highest logit of each group; returns the highest of all."""
    e, (logits, size, groups, maxima) = function(module, "maxima", F32, POINTER, I64, I64, POINTER)
    top = e.variable(F32(NOTHING))
    whole = e.div(size, GROUP)
    with e.each(whole) as group:
        first = e.mul(group, GROUP)
        _keep(e, group, [e.load(logits, e.add(first, at), FLOATS, F32) for at in _EIGHTHS], maxima, top)
    with e.each(groups, start=whole) as group:
        first = e.mul(group, GROUP)
        _keep(e, group, [e.some(logits, e.add(first, at), size) for at in _EIGHTHS], maxima, top)
    e.build.ret(top.value)
    return module.globals["maxima"]


_EIGHTHS = range(0, GROUP, LANES)


def _keep(e: Emitter, group: Value, parts: list[Value], maxima: Value, top: Variable) -> None:
    highest = e.constant(FLOATS, NOTHING)
    for part in parts:
        highest = e.greater(part, highest)
    for half in (4, 2, 1):
        order = ir.Constant(SHORTS, [lane ^ half for lane in range(LANES)])
        highest = e.greater(e.build.shuffle_vector(highest, highest, order), highest)
    one = e.build.extract_element(highest, I32(0))
    e.store(one, maxima, group)
    top.set(e.greater(one, top.value))


def _bounds(module: Value) -> Value:
    """bounds(size, row, least, scratch): draws the groups that reach the edge, and bounds their scores."""
    e, (size, params, least, scratch) = function(module, "bounds", VOID, I64, POINTER, I64, POINTER)
    row = room_of(e, scratch, size)
    scale = e.spread(e.load(params, SCALE, F64))
    edge = e.spread(number_of(e, e.build.trunc(e.down(least, 32), I32)))
    key = e.spread(_row_key(e, params))
    greedy = e.whole("!=", e.both(e.load(params, FLAGS), GREEDY), 0)
    with e.each(row.groups, LANES) as group:
        highest = e.load(row.maxima, group, FLOATS, F32)
        highest = e.pick(e.number(">=", highest, edge), highest, e.constant(FLOATS, NOTHING))
        scores = e.times(e.double(highest), scale)
        with e.choice(greedy) as (yes, no):
            with yes:
                e.store(scores, row.bounds, group, F64)
            with no:
                drawn = hashed(e, key, e.lanes(group))
                smallest = e.down(exponential(e, drawn), 6)
                e.store(drawn, row.drawn, group, I64)
                e.store(smallest, row.smallest, group, I64)
                e.store(e.plus(scores, minus_log(e, smallest)), row.bounds, group, F64)
    e.build.ret_void()
    return module.globals["bounds"]


def _row_key(e: Emitter, params: Value) -> Value:
    """The key of the row's group stream; see `noise.row_keys`."""
    seed = hashed(e, e.load(params, SEED), I64(1))
    return hashed(e, e.add(seed, e.mul(e.load(params, POSITION), GAMMA)), I64(1))


def _best(module: Value) -> Value:
    """best(bounds, groups): the group with the highest bound, the first of equal ones."""
    e, (bounds, groups) = function(module, "best", I64, POINTER, I64)
    highest, where = e.variable(e.constant(DOUBLES, NOTHING)), e.variable(e.constant(INTS, 0))
    with e.each(groups, LANES) as group:
        bound = e.load(bounds, group, DOUBLES, F64)
        higher = e.number(">", bound, highest.value)
        highest.set(e.pick(higher, bound, highest.value))
        where.set(e.pick(higher, e.lanes(group), where.value))
    bound, at = highest.value, where.value
    for half in (4, 2, 1):
        order = ir.Constant(SHORTS, [lane ^ half for lane in range(LANES)])
        other, there = (e.build.shuffle_vector(one, one, order) for one in (bound, at))
        same = e.both(e.number("==", other, bound), e.whole("<", there, at))
        higher = e.either(e.number(">", other, bound), same)
        bound, at = e.pick(higher, other, bound), e.pick(higher, there, at)
    e.build.ret(e.build.extract_element(at, I32(0)))
    return module.globals["best"]


def _visit(module: Value, insert: Value) -> Value:
    """visit(logits, size, row, least, group, count, leaders, scratch): tokens that lead become leaders."""
    e, (logits, size, params, least, group, count, leaders, scratch) = function(
        module, "visit", VOID, POINTER, I64, POINTER, I64, I64, I64, POINTER, POINTER
    )
    row = room_of(e, scratch, size)
    scale = e.spread(e.load(params, SCALE, F64))
    greedy = e.whole("!=", e.both(e.load(params, FLAGS), GREEDY), 0)
    last = e.sub(e.mul(count, 2), 1)
    key = e.spread(_row_key(e, params))
    token_key = hashed(e, e.xor(key, TOKEN_STREAM), e.constant(INTS, 1))
    smallest = e.spread(e.load(row.smallest, group))
    member = e.spread(e.both(e.load(row.drawn, group), GROUP - 1))
    peak = e.pick(greedy, F64(0.0), e.build.extract_element(minus_log(e, smallest), I32(0)))
    drawn = e.variable(e.constant(DOUBLES, 0.0))
    scores = e.variable(e.constant(DOUBLES, 0.0))
    with e.each(I64(GROUP), LANES) as place:
        first = e.add(e.mul(group, GROUP), place)
        part = e.some(logits, first, size)
        scaled = e.times(e.double(part), scale)
        floor = e.spread(e.load(leaders, last, F64))
        bound = e.plus(scaled, e.spread(peak))
        inside = e.both(e.whole(">=", keys_of(e, part, first), e.spread(least)), e.number(">", part, NOTHING))
        inside = e.both(inside, e.number(">=", bound, floor))
        with e.when(e.any(inside)):
            with e.when(e.xor(greedy, 1)):
                tokens = e.lanes(first)
                own = exponential(e, hashed(e, token_key, tokens))
                at_peak = e.whole("==", e.both(tokens, GROUP - 1), member)
                own = e.add(e.pick(at_peak, e.constant(INTS, 0), own), smallest)
                drawn.set(minus_log(e, own))
            scores.set(e.plus(scaled, drawn.value))
            lead = e.both(inside, e.number(">=", scores.value, floor))
            with e.each_lane(lead) as lane:
                score = e.build.extract_element(scores.value, lane)
                noise = e.build.extract_element(drawn.value, lane)
                e.build.call(insert, [e.add(first, lane), score, noise, count, leaders])
    e.build.ret_void()
    return module.globals["visit"]


def _insert(module: Value) -> Value:
    """insert(token, score, noise, count, leaders): it takes its place among them, if it has one."""
    e, (token, score, noise, count, leaders) = function(module, "insert", VOID, I64, F64, F64, I64, POINTER)
    scores, noises = e.at(leaders, count), e.at(leaders, e.mul(count, 2))
    place = e.variable(count)

    def better() -> Value:
        """Than the one before the place."""
        before = e.sub(e.pick(e.whole("==", place.value, 0), I64(1), place.value), 1)
        other, there = e.load(scores, before, F64), e.load(leaders, before)
        same = e.both(e.number("==", score, other), e.whole("<", token, there))
        return e.both(e.either(e.number(">", score, other), same), e.whole(">", place.value, 0))

    with e.loop(better):
        before = e.sub(place.value, 1)
        with e.when(e.whole("<", place.value, count)):
            for row, kind in ((leaders, I64), (scores, F64), (noises, F64)):
                e.store(e.load(row, before, kind), row, place.value)
        place.set(before)
    with e.when(e.whole("<", place.value, count)):
        for value, row in ((token, leaders), (score, scores), (noise, noises)):
            e.store(value, row, place.value)
    e.build.ret_void()
    return module.globals["insert"]
