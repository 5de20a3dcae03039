"""RMS norm and layer norm of rows, with the residual add before it.

A row is computed by itself in one order of additions, so its bits do not depend on its batch. The sum of the
add is rounded where the modules of a model round it; the norm is rounded once, after the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    Value,
    added_up,
    first_lanes,
    float_of,
    integers,
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
    """One over the root of the mean square plus eps, in all lanes; `share` is 1 / the number of squares."""
    return splat(1.0) / root(splat(added_up(squares)) * splat(share) + splat(eps))


@cache
def norm(kind: str, centred: bool) -> Callable[..., None]:
    """The kernel for a kind of numbers: layer norm if `centred`, otherwise RMS norm."""
    size = BYTES[kind]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def normalise(table: int, part: int, member: int) -> None:
        """Y = (X - mean(X)) / sqrt(mean((X - mean(X))^2) + eps) * scale + shift, or without the means.

        X, Y and `added` are [rows, width], rows `stride` numbers apart; `scale` and `shift` are [width]
        float32. First `added` is added to X. It and `shift` may be 0, Y may be X. `share` is 1 / width.

        The table: x, added, scale, shift, y; width, stride, rows; share, eps.
        """
        call = integers(table)
        x, added, scale, shift, y = call[0], call[1], call[2], call[3], call[4]
        width, stride, rows = call[5], call[6], call[7]
        share, eps = float_of(call[8]), float_of(call[9])
        # The choices by `centred` are made when this is compiled.
        for first in range(0, rows * stride, stride):
            total, squares, mean = splat(0.0), splat(0.0), splat(0.0)
            for column in range(0, width, LANES):
                at, there = size * (first + column), first_lanes(width - column)
                numbers = load(kind, x + at, there)
                if added:
                    numbers = rounded(kind, numbers + load(kind, added + at, there))
                    store(kind, x + at, numbers, there)
                if centred:
                    total = total + numbers
                else:
                    squares = multiply_add(numbers, numbers, squares)
            if centred:
                mean = splat(added_up(total)) * splat(share)
                for column in range(0, width, LANES):
                    there = first_lanes(width - column)
                    numbers = kept(load(kind, x + size * (first + column), there) - mean, there)
                    squares = multiply_add(numbers, numbers, squares)
            inverse = one_over_root(squares, share, eps)
            for column in range(0, width, LANES):
                at, there = size * (first + column), first_lanes(width - column)
                numbers = load(kind, x + at, there)
                if centred:
                    numbers = numbers - mean
                numbers = numbers * inverse * load("float32", scale + 4 * column, there)
                if centred and shift:
                    numbers = numbers + load("float32", shift + 4 * column, there)
                store(kind, y + at, numbers, there)

    return normalise
