"""The noise of `outrider.sampling.noise` and the weights of `outrider.sampling.truncation`, eight at a time.

The same integers, so the same bits. A table's entry and its step to the next share 64 bits: one look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from outrider.sampling.kernels.emitter import DOUBLES, INTS, Emitter, Value
from outrider.sampling.noise import (
    GAMMA,
    LN2_EXPONENTIAL,
    LN2_NOISE,
    MIX_1,
    MIX_2,
    log_table,
    ratio_table,
)
from outrider.sampling.truncation import LEAST, LOG2_E, POWER

_CELLS = 1024


def hashed(e: Emitter, key: Value, counter: Value) -> Value:
    """SplitMix64's output number `counter` of the stream that starts at `key`; numbers or vectors."""
    state = e.add(e.mul(counter, GAMMA), key)
    state = e.mul(e.xor(state, e.down(state, 30)), MIX_1)
    state = e.mul(e.xor(state, e.down(state, 27)), MIX_2)
    return e.xor(state, e.down(state, 31))


def exponential(e: Emitter, drawn: Value) -> Value:
    """Standard exponential; see `noise._exponential`."""
    geometric = e.either(e.both(e.down(drawn, 5), 2**21 - 1), 1)
    half_lives = e.sub(e.constant(INTS, 1043), e.down(_float_bits(e, geometric), 52))
    uniform = e.down(drawn, 26)
    base, step = _looked_up(e, "ratios", ratio_table(), e.down(uniform, 28))
    rest = e.add(e.down(e.mul(e.both(uniform, 2**28 - 1), step), 28), base)
    rest = e.down(e.mul(rest, e.either(e.up(uniform, 1), 1)), 5)
    return e.add(rest, e.mul(half_lives, LN2_EXPONENTIAL))


def minus_log(e: Emitter, drawn: Value) -> Value:
    """-ln of an exponential as float64; see `noise._minus_log`."""
    bits = _float_bits(e, drawn)
    base, step = _looked_up(e, "logs", log_table(), e.both(e.down(bits, 42), _CELLS - 1))
    inside = e.down(e.mul(e.both(e.down(bits, 14), 2**28 - 1), step), 16)
    inside = e.add(inside, e.up(base, 12))
    exponent = e.mul(e.sub(e.constant(INTS, 1081), e.down(bits, 52)), LN2_NOISE)
    return e.times(e.as_double(e.sub(exponent, inside)), 2.0**-44)


def weights(e: Emitter, exponent: Value) -> Value:
    """2^40 exp(x) of eight float64 x <= 0, as int64; see `truncation.weights`."""
    halvings = e.times(e.greater(exponent, LEAST), LOG2_E)
    whole = e.build.call(e.intrinsic("llvm.floor.v8f64", DOUBLES, [DOUBLES]), [halvings])
    inside = e.minus(halvings, whole)
    power = e.constant(DOUBLES, POWER[-1])
    for factor in POWER[-2::-1]:
        power = e.plus(e.times(power, inside), factor)
    integer, places = (e.build.fptosi(number, INTS) for number in (power, e.build.fneg(whole)))
    return e.down(integer, places)


def _looked_up(e: Emitter, name: str, values: Sequence[int], cell: Value) -> tuple[Value, Value]:
    """A table's entry and how far it is to the next."""
    found = e.gather(e.table(name, [here | (after - here) << 32 for here, after in pairwise(values)]), cell)
    return e.both(found, 2**32 - 1), e.down(found, 32)


def _float_bits(e: Emitter, integers: Value) -> Value:
    return e.build.bitcast(e.build.sitofp(integers, DOUBLES), INTS)
