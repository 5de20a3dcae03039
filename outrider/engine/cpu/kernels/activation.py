"""GELU in place, as MLPs without a gate use it (Hendrycks and Gimpel 2016, "Gaussian Error
Linear Units").

A number's result does not depend on its position. The normal distribution's tail below -a is
e^(-a^2 / 2) t P(t) / 2 with t = 1 / (1 + 0.2291026 a) and a polynomial P, fitted for equal relative errors up
to a = 10.6, which are below 2e-7 in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.epilogue import exponential
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    Value,
    first_lanes,
    load,
    maximum,
    minimum,
    multiply_add,
    negative,
    splat,
    store,
)
from outrider.engine.cpu.processor import LANES


@inlined
def _tail(a: Value) -> Value:
    """The probability that a standard normal number is below -a, for a >= 0."""
    t = splat(1.0) / multiply_add(a, splat(0.2291025971044414), splat(1.0))
    p = multiply_add(splat(-0.07832758128643036), t, splat(0.2920641601085663))
    p = multiply_add(p, t, splat(-0.275012731552124))
    p = multiply_add(p, t, splat(0.2909986674785614))
    p = multiply_add(p, t, splat(-0.021341053768992424))
    p = multiply_add(p, t, splat(0.11233800649642944))
    p = multiply_add(p, t, splat(0.08764820545911789))
    p = multiply_add(p, t, splat(0.09163230657577515))
    return exponential(splat(-0.5) * a * a) * t * p


@inlined
def exact_gelu(x: Value) -> Value:
    """x times the probability that a standard normal number is below x."""
    a = minimum(maximum(x, negative(x)), splat(20.0))  # the tail is 0 there
    return maximum(x, splat(0.0)) - a * _tail(a)


@inlined
def tanh_gelu(x: Value) -> Value:
    """x (1 + tanh u) / 2, which is x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    inner = multiply_add(splat(0.044715) * x * x, x, x)
    return x / (exponential(splat(-1.5957691216057308) * inner) + splat(1.0))


@cache
def gelu(kind: str, tanh: bool) -> Callable[..., None]:
    """The kernel of GELU, or of its approximation with `tanh`, for a kind of numbers."""
    size, function = BYTES[kind], tanh_gelu if tanh else exact_gelu

    @kernel("void(intp, intp)", keeps_lock=True, for_kernels=True)
    def activate(x: int, count: int) -> None:
        """Overwrite `count` numbers at X."""
        for at in range(0, count, LANES):
            there = first_lanes(count - at)
            store(kind, x + size * at, function(load(kind, x + size * at, there)), there)

    return activate


@cache
def convert(kind: str, made: str) -> Callable[..., None]:
    """The kernel that makes numbers of one kind from those of another."""
    size, made_size = BYTES[kind], BYTES[made]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def convert_all(x: int, y: int, count: int) -> None:
        """Make `count` numbers Y from X."""
        for at in range(0, count, LANES):
            there = first_lanes(count - at)
            store(made, y + made_size * at, load(kind, x + size * at, there), there)

    return convert_all
