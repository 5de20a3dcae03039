"""What one row's search works with: its description, room in memory, and the order of its tokens.

A key orders the tokens of a row as truncation does: logit first, token id second.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.sampling.kernels.emitter import F32, FLOATS, I32, I64, INTS, LANES, SHORTS, Emitter, Value
from outrider.sampling.noise import GROUP

GREEDY, TRUNCATED = 1, 2
"""Flags of a row."""
SEED, POSITION, FLAGS, TOP_K, SCALE, SLOPE, TEMPERATURE, TOP_P, LOG_MIN_P = range(9)
"""The 64-bit words that describe a row: four integers, then float64. SCALE is slope / temperature; a limit
that is off has a value that drops nothing, and a greedy row has the temperature 1."""
ROW_FORMAT = "Qqqqddddd"

NOTHING = float("-inf")
LEAST_KEY = 0x007FFFFF << 32
"""The key of -inf."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where one row's search works."""

    groups: Value
    """Their number, filled up to a multiple of eight."""
    maxima: Value
    """[groups] float32"""
    bounds: Value
    """[groups] float64"""
    drawn: Value
    """[groups] int64, the hash that each group is drawn from."""
    smallest: Value
    """[groups] int64, its smallest exponential."""
    keys: Value
    """[size + 8] int64, a list of tokens that may stay."""
    weights: Value
    """[size + 8] int64, of the listed."""


def words_of_scratch(size: int, truncated: bool) -> int:
    """64-bit numbers that `search` needs for a vocabulary of `size` tokens."""
    groups = _filled(-(-size // GROUP))
    return 4 * groups + (2 * (size + LANES) if truncated else 0)


def _filled(groups: int) -> int:
    return -(-groups // LANES) * LANES


def room_of(e: Emitter, scratch: Value, size: Value) -> Room:
    """The parts of `scratch`, which has `words_of_scratch`."""
    groups = e.mul(e.div(e.add(size, GROUP * LANES - 1), GROUP * LANES), LANES)
    maxima, bounds, drawn, smallest, keys = (e.at(scratch, e.mul(groups, part)) for part in range(5))
    return Room(groups, maxima, bounds, drawn, smallest, keys, e.at(keys, e.add(size, LANES)))


def keys_of(e: Emitter, logits: Value, first: Value) -> Value:
    """Keys of eight tokens from `first` on."""
    high = e.build.zext(ordered(e, logits), INTS)
    return e.either(e.up(high, 32), e.lanes(first))


def greatest_key(e: Emitter, logit: Value) -> Value:
    """The greatest key that a logit can have."""
    return e.either(e.up(e.build.zext(ordered(e, logit), I64), 32), 2**32 - 1)


def value_of(e: Emitter, key: Value) -> Value:
    """The logit of a key, as float64."""
    return e.double(number_of(e, e.build.trunc(e.down(key, 32), I32)))


def numbers_of(e: Emitter, keys: Value) -> Value:
    """The logits of eight keys."""
    return number_of(e, e.build.trunc(e.down(keys, 32), SHORTS))


def ordered(e: Emitter, logits: Value) -> Value:
    """float32 as unsigned integers of the same order; both zeros are one."""
    kind = SHORTS if logits.type == FLOATS else I32
    bits = e.build.bitcast(e.plus(logits, 0.0), kind)
    return e.xor(bits, e.either(e.sign_down(bits, 31), -(2**31)))


def number_of(e: Emitter, ordered: Value) -> Value:
    """The float32 again."""
    bits = e.xor(ordered, e.either(e.xor(e.sign_down(ordered, 31), -1), -(2**31)))
    return e.build.bitcast(bits, FLOATS if ordered.type == SHORTS else F32)
