"""What a product does with a finished sum: add the bias, open a gate (SiLU(gate) up), round and write.

e^x is 2^n e^r with n the integer nearest to x / ln 2 and |r| <= ln 2 / 2; e^r is the polynomial of the Cephes
library (expf). Its largest measured error is 0.88 units in the last place; infinity, 0, denormal results and
NaN come out right.
"""

from __future__ import annotations

from outrider.engine.cpu.kernels.compiling import inlined
from outrider.engine.cpu.kernels.vectors import (
    Value,
    first_lanes,
    load,
    load_aligned,
    maximum,
    minimum,
    multiply_add,
    nearest,
    negative,
    rounded,
    splat,
    store,
    times_power_of_two,
)
from outrider.engine.cpu.processor import LANES


@inlined
def exponential(x: Value) -> Value:
    """e^x of a vector."""
    x = maximum(minimum(x, splat(89.0)), splat(-104.0))  # results there are infinity and 0
    n = nearest(x * splat(1.44269504088896341))
    r = multiply_add(n, splat(2.12194440e-4), multiply_add(n, splat(-0.693359375), x))
    e = multiply_add(splat(1.9875691500e-4), r, splat(1.3981999507e-3))
    e = multiply_add(e, r, splat(8.3334519073e-3))
    e = multiply_add(e, r, splat(4.1665795894e-2))
    e = multiply_add(e, r, splat(1.6666665459e-1))
    e = multiply_add(e, r, splat(0.5))
    e = multiply_add(e, r, splat(1.0))
    e = multiply_add(e, r, splat(1.0))
    return times_power_of_two(e, n)


@inlined
def silu(x: Value) -> Value:
    """x / (1 + e^-x) of a vector, as torch computes it."""
    return x / (exponential(negative(x)) + splat(1.0))


@inlined
def tanh(x: Value) -> Value:
    """The hyperbolic tangent of a vector, at most 1e-7 off."""
    return splat(1.0) - splat(2.0) / (exponential(x + x) + splat(1.0))


@inlined
def write_sums(kind: str, size: int, sums: int, bias: int, y: int, left: int) -> None:
    """Write PANEL sums plus bias as numbers of a kind, `size` bytes each, as far as `left` columns go."""
    for half in range(2):
        there = first_lanes(left - LANES * half)
        total = load_aligned(sums + 4 * LANES * half)
        if bias:
            total = total + load("float32", bias + 4 * LANES * half, there)
        store(kind, y + size * LANES * half, total, there)


@inlined
def write_gated(kind: str, sums: int, bias: int, y: int, left: int) -> None:
    """Write SiLU(gate) up from PANEL sums plus bias, rounded where the modules of a model round."""
    gate, up = load_aligned(sums), load_aligned(sums + 4 * LANES)
    if bias:
        gate = gate + load_aligned(bias)
        up = up + load_aligned(bias + 4 * LANES)
    opened = rounded(kind, silu(rounded(kind, gate)))
    store(kind, y, opened * rounded(kind, up), first_lanes(left))


@inlined
def write_row(kind: str, size: int, gated: bool, sums: int, bias: int, y: int, left: int) -> None:
    """Write PANEL sums plus bias, or SiLU(gate) up if `gated`, as far as `left` columns go."""
    if gated:
        write_gated(kind, sums, bias, y, left)
    else:
        write_sums(kind, size, sums, bias, y, left)
