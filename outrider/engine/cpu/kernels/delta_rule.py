"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks") for candidates of one sequence.

A head's state S [K, V] decays and then learns the value v of a key k: S = a S + k (b (v - k^T a S))^T; a
query q reads q^T S. Keys, queries and values come out of a short convolution. What is read is normalised and
opened by a gate. Numbers are rounded where transformers rounds those of a single token. A node is computed by
itself from the inputs of its path: its bits do not depend on what else is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.epilogue import silu
from outrider.engine.cpu.kernels.norm import one_over_root
from outrider.engine.cpu.kernels.paths import Convolution, begin_path, convolved, number, softplus
from outrider.engine.cpu.kernels.vectors import (
    Value,
    first_lanes,
    floats,
    integers,
    load,
    multiply_add,
    rounded,
    splat,
    splat_at,
    store,
    zeros,
)
from outrider.engine.cpu.processor import LANES

COLUMNS = 4
"""Vectors of a state's row that are computed side by side."""
NORM_EPS = 1e-6
"""Of keys and queries."""


def room_bytes(taps: int, nodes: int, levels: int, key_width: int, value_width: int, group: int) -> int:
    """Of a call's room: for the inputs of a path, a query, a key, a value, what is read, and states."""
    rows = 2 * (key_width + value_width + 2 * LANES)
    return 8 * (taps + nodes) + 4 * (rows + levels * group * key_width * value_width)


@inlined
def _to_length(x: int, width: int, length: float) -> None:
    """Make a float32 row as long as `length`."""
    squares = splat(0.0)
    for column in range(0, width, LANES):
        numbers = load("float32", x + 4 * column, first_lanes(width - column))
        squares = multiply_add(numbers, numbers, squares)
    inverse = one_over_root(squares, 1.0, NORM_EPS)
    for column in range(0, width, LANES):
        there = first_lanes(width - column)
        store(
            "float32", x + 4 * column, load("float32", x + 4 * column, there) * inverse * splat(length), there
        )


@inlined
def _learned(
    before: int, after: int, rows: int, width: int, column: int, key: int, query: int, value: int,
    decay: Value, beta: Value, out: int,
) -> None:  # fmt: skip
    """COLUMNS vectors of a state's rows, from `column` on: write those behind a token, and what is read."""
    known, told, read = zeros(COLUMNS), zeros(COLUMNS), zeros(COLUMNS)
    for row in range(rows):
        k = splat_at(key + 4 * row)
        for i in range(COLUMNS):
            at, there = column + LANES * i, first_lanes(width - column - LANES * i)
            state = load("float32", before + 4 * (row * width + at), there) * decay
            known[i] = multiply_add(state, k, known[i])
    for i in range(COLUMNS):
        at, there = column + LANES * i, first_lanes(width - column - LANES * i)
        told[i] = (load("float32", value + 4 * at, there) - known[i]) * beta
    for row in range(rows):
        k, q = splat_at(key + 4 * row), splat_at(query + 4 * row)
        for i in range(COLUMNS):
            at, there = column + LANES * i, first_lanes(width - column - LANES * i)
            state = load("float32", before + 4 * (row * width + at), there) * decay
            state = multiply_add(k, told[i], state)
            store("float32", after + 4 * (row * width + at), state, there)
            read[i] = multiply_add(state, q, read[i])
    for i in range(COLUMNS):
        at = column + LANES * i
        store("float32", out + 4 * at, read[i], first_lanes(width - at))


@inlined
def _opened(kind: str, size: int, x: int, gate: int, scale: int, width: int, eps: float, y: int) -> None:
    """Write the norm of a float32 row X times `scale`, opened by `gate`, as numbers of a kind."""
    squares = splat(0.0)
    for column in range(0, width, LANES):
        numbers = rounded(kind, load("float32", x + 4 * column, first_lanes(width - column)))
        squares = multiply_add(numbers, numbers, squares)
    inverse = one_over_root(squares, 1.0 / width, eps)
    for column in range(0, width, LANES):
        there = first_lanes(width - column)
        numbers = rounded(kind, rounded(kind, load("float32", x + 4 * column, there)) * inverse)
        numbers = rounded(kind, load("float32", scale + 4 * column, there) * numbers)
        opening = silu(load(kind, gate + size * column, there))
        store(kind, y + size * column, numbers * opening, there)


@inlined
def _decay(rate: float, step: float) -> float:
    """e^(-rate softplus(step))."""
    return math.exp(-rate * softplus(step))


@inlined
def _share(step: float) -> float:
    """The sigmoid."""
    return 1.0 / (1.0 + math.exp(-step))


@cache
def delta_rule(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers."""
    size = 2 if kind == "bfloat16" else 4

    @kernel(f"void({'intp, ' * 19} float64, float64)")
    def learn(
        table: int, nodes: int, certain: int, before: int, after: int, past: int, weights: int, bias: int,
        taps: int, rates: int, offsets: int, scale: int, key_heads: int, group: int, key_width: int,
        value_width: int, first_head: int, end_head: int, lines: int, most: float, eps: float,
    ) -> None:  # fmt: skip
        """Compute key heads [first_head, end_head) of all nodes, with the `group` value heads of each.

        `table` [4, nodes] int64 holds the addresses of each node's inputs, gates and results, and its place,
        counted from 0 along its path; nodes are in depth-first order. Inputs are rows of a kind: queries,
        keys and values of all heads, then what becomes each value head's beta, at most `most`, and its
        decay. Gates and results are rows [value heads, V]. The first `certain` nodes have neither: the state
        behind them is written to `after`. `before` is the state before the first node, [value heads, K, V]
        float32 as `after`, and `past` [taps, channels] what the convolution keeps there, with weights [taps,
        channels] float32, and a bias [channels] or 0. `rates` and `offsets` [value heads] and `scale` [V] are
        float32. `lines` is a room of `room_bytes`.
        """
        value_heads = key_heads * group
        keys, values = key_heads * key_width, value_heads * value_width
        convolution = Convolution(weights, bias, taps, 2 * keys + values)
        state_bytes = 4 * key_width * value_width
        query = lines + 8 * (taps + nodes)
        key = query + 4 * (key_width + LANES)
        value = key + 4 * (key_width + LANES)
        read = value + 4 * (value_width + LANES)
        states = read + 4 * (value_width + LANES)
        line, inputs, gates = integers(lines), integers(table), integers(table + 8 * nodes)
        results, places = integers(table + 16 * nodes), integers(table + 24 * nodes)
        begin_path(size, convolution, lines, past)
        for head in range(first_head, end_head):
            for node in range(nodes):
                place = places[node]
                line[taps - 1 + place] = inputs[node]
                window = lines + 8 * place
                convolved(kind, size, convolution, window, head * key_width, key_width, query)
                convolved(kind, size, convolution, window, keys + head * key_width, key_width, key)
                _to_length(query, key_width, 1.0 / math.sqrt(key_width))
                _to_length(key, key_width, 1.0)
                for own in range(head * group, (head + 1) * group):
                    convolved(
                        kind, size, convolution, window, 2 * keys + own * value_width, value_width, value
                    )
                    steps = inputs[node] + size * (convolution.channels + own)
                    beta = rounded(kind, splat(_share(number(kind, steps)))) * splat(most)
                    step = number(kind, steps + size * value_heads) + floats(offsets)[own]
                    decay = splat(_decay(floats(rates)[own], step))
                    level = states + ((place - certain) * group + own % group) * state_bytes
                    source = before + own * state_bytes
                    if place > certain:
                        source = level - group * state_bytes
                    elif place > 0:
                        source = after + own * state_bytes
                    target = after + own * state_bytes if place < certain else level
                    for column in range(0, value_width, COLUMNS * LANES):
                        _learned(source, target, key_width, value_width, column, key, query, value, decay,
                                 beta, read)  # fmt: skip
                    if place >= certain:
                        at = size * own * value_width
                        _opened(
                            kind, size, read, gates[node] + at, scale, value_width, eps, results[node] + at
                        )

    return learn
