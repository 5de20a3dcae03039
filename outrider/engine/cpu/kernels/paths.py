"""What kernels of recurrent layers share: the nodes of a sequence, the short convolution along their paths,
and single numbers.

A node's inputs are one row of numbers: the channels of the convolution, then some of each head. Its gates and
its results are one row each, of all heads; the first `certain` nodes have neither.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from outrider.engine.cpu.kernels.compiling import inlined
from outrider.engine.cpu.kernels.epilogue import silu
from outrider.engine.cpu.kernels.parts import SHARES
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

(TABLE, NODES, CERTAIN, BEFORE, AFTER, PAST, ROOM, ROOM_APART, OWN) = range(SHARES + 1, SHARES + 10)
"""Places in the job (see `parts`) of a sequence's nodes. OWN: the first of the numbers that only one kernel
has."""


class Convolution(NamedTuple):
    """A short convolution over `taps` tokens of `channels` numbers."""

    weights: int
    """[taps, channels] float32."""
    bias: int
    """[channels] float32, or 0."""
    taps: int
    channels: int


class States(NamedTuple):
    """Addresses of the states along a path, float32."""

    before: int
    """[heads, ...], before the first node."""
    after: int
    """[heads, ...], after the last of the `certain` nodes."""
    certain: int
    levels: int
    """[places, heads_at_once, ...], scratch memory for the states after other nodes."""
    heads_at_once: int
    size: int
    """Bytes of a head's state."""


@inlined
def columns(table: int, nodes: int) -> tuple[Any, Any, Any, Any]:
    """Return the columns of a table [4, nodes] int64: addresses of each node's inputs, gates and results, and
    its place, counted from 0 along its path. Nodes are in depth-first order."""
    inputs, gates = integers(table), integers(table + 8 * nodes)
    return inputs, gates, integers(table + 16 * nodes), integers(table + 24 * nodes)


@inlined
def begin_path(size: int, convolution: Convolution, line: int, past: int) -> None:
    """Write the addresses of all rows of `past` [taps, channels] but the first to the start of `line`."""
    for tap in range(1, convolution.taps):
        integers(line)[tap - 1] = past + size * tap * convolution.channels


@inlined
def window_of(convolution: Convolution, line: int, place: int, inputs: int) -> int:
    """Add the inputs at a place of the path to `line`; return the [taps] addresses that the convolution reads
    there."""
    integers(line)[convolution.taps - 1 + place] = inputs
    return line + 8 * place


@inlined
def state_after(states: States, place: int, head: int) -> int:
    """Return the address of a head's state after the node at a place of the path; -1: before all nodes."""
    if place < 0:
        return states.before + head * states.size
    if place < states.certain:
        return states.after + head * states.size
    level = (place - states.certain) * states.heads_at_once + head % states.heads_at_once
    return states.levels + level * states.size


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
