"""LLVM IR of e^x and SiLU on vectors of float32.

    e^x       2^n e^r with n the nearest integer to x / ln 2 and |r| <= ln 2 / 2; e^r by a polynomial
    SiLU      x / (1 + e^-x), as torch computes it

The polynomial is the one of the Cephes library (expf). Against the exact value e^x was at most 0.88 units in
the last place off; infinity, zero, denormal results and NaN come out right.

Lines are generated for inlining: a name that starts a line's result begins with the prefix given.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.engine.kernels.numbers_ir import MASK, SUM, multiply_add, splat

_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""Of r^7 to r^2; then come r and 1."""
_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LEAST, _MOST = -104.0, 89.0
"""Below and above, results are 0 and infinity."""

DECLARATIONS = f"""
declare {SUM} @llvm.roundeven.v16f32({SUM})
declare {SUM} @llvm.x86.avx512.mask.scalef.ps.512({SUM}, {SUM}, {SUM}, i16, i32)"""
"""What the lines call, besides llvm.fma.v16f32."""


def exponential(x: str, prefix: str) -> Iterator[str]:
    """Lines that make {prefix} = e^{x}."""
    p = prefix
    yield f"  {p}_high = fcmp ogt {SUM} {x}, {splat(_MOST)}"
    yield f"  {p}_below = select {MASK} {p}_high, {SUM} {splat(_MOST)}, {SUM} {x}"
    yield f"  {p}_low = fcmp olt {SUM} {p}_below, {splat(_LEAST)}"
    yield f"  {p}_x = select {MASK} {p}_low, {SUM} {splat(_LEAST)}, {SUM} {p}_below"
    yield f"  {p}_turns = fmul {SUM} {p}_x, {splat(_LOG2_E)}"
    yield f"  {p}_n = call {SUM} @llvm.roundeven.v16f32({SUM} {p}_turns)"
    yield multiply_add(f"{p}_coarse", f"{p}_n", splat(-_LN2_HIGH), f"{p}_x")
    yield multiply_add(f"{p}_r", f"{p}_n", splat(-_LN2_LOW), f"{p}_coarse")
    before = splat(_COEFFICIENTS[0])
    for power, coefficient in enumerate((*_COEFFICIENTS[1:], 1.0, 1.0)):
        yield multiply_add(f"{p}_{power}", before, f"{p}_r", splat(coefficient))
        before = f"{p}_{power}"
    yield (
        f"  {p} = call {SUM} @llvm.x86.avx512.mask.scalef.ps.512({SUM} {before}, {SUM} {p}_n,"
        f" {SUM} zeroinitializer, i16 -1, i32 4)"
    )


def silu(x: str, prefix: str) -> Iterator[str]:
    """Lines that make {prefix} = {x} / (1 + e^-{x})."""
    yield f"  {prefix}_minus = fneg {SUM} {x}"
    yield from exponential(f"{prefix}_minus", f"{prefix}_e")
    yield f"  {prefix}_below = fadd {SUM} {prefix}_e, {splat(1.0)}"
    yield f"  {prefix} = fdiv {SUM} {x}, {prefix}_below"
