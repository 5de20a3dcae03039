"""RMS norm and layer norm of rows, with the residual add before it.

A row is computed by itself in one order of additions, so its bits do not depend on its batch. The sum of the
add is rounded where the modules of a model round it; the norm is rounded once, behind the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.vectors import (
    Value,
    added_up,
    first_lanes,
    kept,
    load,
    multiply_add,
    root,
    rounded,
    splat,
    store,
)
from outrider.engine.cpu.processor import LANES


@inlined
def one_over_root(squares: Value, share: float, eps: float) -> Value:
    """One over the root of the mean square plus eps, in all lanes; `share` is 1 / the numbers squared."""
    return splat(1.0) / root(splat(added_up(squares)) * splat(share) + splat(eps))


@cache
def norm(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers."""
    size = 2 if kind == "bfloat16" else 4

    @kernel("void(intp, intp, intp, intp, intp, intp, intp, float64, float64)", keeps_lock=True)
    def normalise(
        x: int, added: int, scale: int, y: int, width: int, stride: int, rows: int, share: float, eps: float
    ) -> None:
        """Y = X / sqrt(mean(X^2) + eps) * scale; X, Y and `added` are [rows, width], `scale` [width] float32.

        Rows begin `stride` numbers apart. First `added` is added to X, unless it is 0. `share` is 1 / width.
        Y may be X.
        """
        for first in range(0, rows * stride, stride):
            squares = splat(0.0)
            for column in range(0, width, LANES):
                at, there = size * (first + column), first_lanes(width - column)
                numbers = load(kind, x + at, there)
                if added:
                    numbers = rounded(kind, numbers + load(kind, added + at, there))
                    store(kind, x + at, numbers, there)
                squares = multiply_add(numbers, numbers, squares)
            inverse = one_over_root(squares, share, eps)
            for column in range(0, width, LANES):
                at, there = size * (first + column), first_lanes(width - column)
                weights = load("float32", scale + 4 * column, there)
                store(kind, y + at, load(kind, x + at, there) * inverse * weights, there)

    return normalise


@cache
def layer_norm(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers."""
    size = 2 if kind == "bfloat16" else 4

    @kernel("void(intp, intp, intp, intp, intp, intp, intp, float64, float64)", keeps_lock=True)
    def centre(
        x: int,
        added: int,
        scale: int,
        shift: int,
        y: int,
        width: int,
        rows: int,
        share: float,
        eps: float,
    ) -> None:
        """Y = (X - mean(X)) / sqrt(variance(X) + eps) * scale + shift; see `norm`.

        `shift` is [width] float32, and may be 0. The variance is of the centred numbers.
        """
        for first in range(0, rows * width, width):
            total = splat(0.0)
            for column in range(0, width, LANES):
                at, there = size * (first + column), first_lanes(width - column)
                numbers = load(kind, x + at, there)
                if added:
                    numbers = rounded(kind, numbers + load(kind, added + at, there))
                    store(kind, x + at, numbers, there)
                total = total + numbers
            mean, squares = splat(added_up(total)) * splat(share), splat(0.0)
            for column in range(0, width, LANES):
                there = first_lanes(width - column)
                numbers = kept(load(kind, x + size * (first + column), there) - mean, there)
                squares = multiply_add(numbers, numbers, squares)
            inverse = one_over_root(squares, share, eps)
            for column in range(0, width, LANES):
                at, there = size * (first + column), first_lanes(width - column)
                numbers = (load(kind, x + at, there) - mean) * inverse
                numbers = numbers * load("float32", scale + 4 * column, there)
                if shift:
                    numbers = numbers + load("float32", shift + 4 * column, there)
                store(kind, y + at, numbers, there)

    return centre
