"""Activations, in place or as what opens a gate, and the bound of logits.

A number's result does not depend on its position. GELU (Hendrycks and Gimpel 2016, "Gaussian Error Linear
Units") is computed by the normal distribution's tail below -a, which is
e^(-a^2 / 2) t P(t) / 2 with t = 1 / (1 + 0.2291026 a) and a polynomial P, fitted for equal relative errors up
to a = 10.6, which are below 2e-7 in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.epilogue import exponential, silu, tanh
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    Value,
    first_lanes,
    float_of,
    integers,
    load,
    maximum,
    minimum,
    multiply_add,
    negative,
    rounded,
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


_NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
"""A kernel encloses the index of its activation, so that the compiler leaves out the others."""


@inlined
def _activated(index: int, x: Value) -> Value:
    if index == 0:
        return silu(x)
    if index == 1:
        return exact_gelu(x)
    if index == 2:
        return tanh_gelu(x)
    positive = maximum(x, splat(0.0))
    return positive if index == 3 else positive * positive


@cache
def activation_of(kind: str, name: str) -> Callable[..., None]:
    """The kernel of an activation, by its name in `outrider.engine.fused_decoder.activation`, for a kind of
    numbers."""
    size, index = BYTES[kind], _NAMES.index(name)

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def activate(table: int, part: int, member: int) -> None:
        """Overwrite `count` numbers at X. The table: x, count."""
        call = integers(table)
        x, count = call[0], call[1]
        for at in range(0, count, LANES):
            there = first_lanes(count - at)
            store(kind, x + size * at, _activated(index, load(kind, x + size * at, there)), there)

    return activate


@cache
def gate_of(kind: str, name: str) -> Callable[..., None]:
    """The kernel of a gate that an activation opens, for a kind of numbers."""
    size, index = BYTES[kind], _NAMES.index(name)

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def open_gate(table: int, part: int, member: int) -> None:
        """Y [rows, width] = activation(gate) up, rounded where the modules of a model round. X has the gate
        and up side by side, [rows, 2 width], its rows `stride` numbers apart. The table: x, stride, y, rows,
        width.
        """
        call = integers(table)
        x, stride, y, rows, width = call[0], call[1], call[2], call[3], call[4]
        for row in range(rows):
            gate, to = x + size * row * stride, y + size * row * width
            for column in range(0, width, LANES):
                there, at = first_lanes(width - column), size * column
                opened = rounded(kind, _activated(index, load(kind, gate + at, there)))
                store(kind, to + at, opened * load(kind, gate + size * width + at, there), there)

    return open_gate


@cache
def bound_of(kind: str) -> Callable[..., None]:
    """The kernel that bounds numbers of a kind by tanh."""
    size = BYTES[kind]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def bound(table: int, part: int, member: int) -> None:
        """Y = softcap tanh(X / softcap), rounded where the modules of a model round. The table: x, y, count,
        softcap."""
        call = integers(table)
        x, y, count, softcap = call[0], call[1], call[2], splat(float_of(call[3]))
        for at in range(0, count, LANES):
            there = first_lanes(count - at)
            share = rounded(kind, load(kind, x + size * at, there) / softcap)
            store(kind, y + size * at, rounded(kind, tanh(share)) * softcap, there)

    return bound
