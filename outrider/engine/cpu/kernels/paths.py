"""What kernels of recurrent layers share: the short convolution along a path, and single numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

from outrider.engine.cpu.kernels.compiling import inlined
from outrider.engine.cpu.kernels.epilogue import silu
from outrider.engine.cpu.kernels.vectors import (
    added_up,
    first_lanes,
    integers,
    load,
    multiply_add,
    rounded,
    splat,
    store,
)
from outrider.engine.cpu.processor import LANES


class Convolution(NamedTuple):
    """A short convolution over `taps` tokens of `channels` numbers."""

    weights: int
    """[taps, channels] float32."""
    bias: int
    """[channels] float32, or 0."""
    taps: int
    channels: int


@inlined
def begin_path(size: int, convolution: Convolution, line: int, past: int) -> None:
    """Write the addresses of all rows of `past` [taps, channels] but the first to the start of `line`."""
    for tap in range(1, convolution.taps):
        integers(line)[tap - 1] = past + size * tap * convolution.channels


@inlined
def convolved(
    kind: str, size: int, convolution: Convolution, inputs: int, first: int, width: int, to: int
) -> None:
    """Write `width` channels from `first` on as float32; `inputs` [taps] are the addresses of rows."""
    for column in range(0, width, LANES):
        there, channel, total = first_lanes(width - column), first + column, splat(0.0)
        for tap in range(convolution.taps):
            weights = convolution.weights + 4 * (tap * convolution.channels + channel)
            numbers = load(kind, integers(inputs)[tap] + size * channel, there)
            total = multiply_add(load("float32", weights, there), numbers, total)
        if convolution.bias:
            total = total + load("float32", convolution.bias + 4 * channel, there)
        store("float32", to + 4 * column, rounded(kind, silu(rounded(kind, total))), there)


@inlined
def number(kind: str, address: int) -> float:
    """Read one number of a kind."""
    found: float = added_up(load(kind, address, first_lanes(1)))
    return found


@inlined
def softplus(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
