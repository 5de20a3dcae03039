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
from outrider.engine.cpu.kernels.parts import job_of, share_of
from outrider.engine.cpu.kernels.paths import (
    AFTER,
    BEFORE,
    CERTAIN,
    NODES,
    OWN,
    PAST,
    ROOM,
    ROOM_APART,
    TABLE,
    Convolution,
    States,
    begin_path,
    columns,
    convolved,
    number,
    softplus,
    state_after,
    window_of,
)
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    Value,
    first_lanes,
    float_of,
    floats,
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
"""Epsilon of the norm of keys and queries."""


def room_bytes(taps: int, nodes: int, levels: int, key_width: int, value_width: int, group: int) -> int:
    """Return the bytes of a call's scratch memory: for the inputs of a path, a query, a key, a value, what is
    read, and states."""
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
    """Write COLUMNS vectors of the rows of the state after a token, from `column` on, and what is read."""
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
def _beta(kind: str, at: int, most: float) -> Value:
    """`most` times the sigmoid of one number."""
    return rounded(kind, splat(1.0 / (1.0 + math.exp(-number(kind, at))))) * splat(most)


@inlined
def _asked(
    kind: str, size: int, convolution: Convolution, window: int, first: int, step: int, width: int,
    query: int, key: int,
) -> None:  # fmt: skip
    """Write a node's query, channels from `first` on, and its key, `step` channels later, as unit rows."""
    convolved(kind, size, convolution, window, first, width, query)
    convolved(kind, size, convolution, window, first + step, width, key)
    _to_length(query, width, 1.0 / math.sqrt(width))
    _to_length(key, width, 1.0)


(
    WEIGHTS,
    BIAS,
    TAPS,
    RATES,
    OFFSETS,
    SCALE,
    KEY_HEADS,
    GROUP,
    KEY_WIDTH,
    VALUE_WIDTH,
    MOST,
    EPS,
) = range(OWN, OWN + 12)
"""Places in a job; MOST and EPS are float64."""


@cache
def delta_rule(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers. It computes a part (see `parts`): some key heads of all nodes, with
    the GROUP value heads of each.

    Channels are queries, keys and values of all heads; after them inputs hold what becomes each value head's
    beta, at most MOST, and its decay. PAST [TAPS, channels] is what the convolution keeps before the first
    node. RATES and OFFSETS [value heads] and SCALE [V] are float32. States are [K, V]. ROOM has `room_bytes`;
    the next member's is ROOM_APART bytes later.
    """
    size = BYTES[kind]

    @kernel("void(intp, intp, intp)", for_kernels=True)
    def learn(table: int, part: int, member: int) -> None:
        job = job_of(table, part)
        nodes, certain, key_heads, group = job[NODES], job[CERTAIN], job[KEY_HEADS], job[GROUP]
        key_width, value_width, taps = job[KEY_WIDTH], job[VALUE_WIDTH], job[TAPS]
        rates, offsets, scale = job[RATES], job[OFFSETS], job[SCALE]
        most, eps = float_of(job[MOST]), float_of(job[EPS])
        room = job[ROOM] + member * job[ROOM_APART]
        first_head, end_head = share_of(job, part, key_heads)
        heads, keys = key_heads * group, key_heads * key_width
        convolution = Convolution(job[WEIGHTS], job[BIAS], taps, 2 * keys + heads * value_width)
        query = room + 8 * (taps + nodes)
        key = query + 4 * (key_width + LANES)
        value = key + 4 * (key_width + LANES)
        read = value + 4 * (value_width + LANES)
        levels = read + 4 * (value_width + LANES)
        states = States(job[BEFORE], job[AFTER], certain, levels, group, 4 * key_width * value_width)
        inputs, gates, results, places = columns(job[TABLE], nodes)
        begin_path(size, convolution, room, job[PAST])
        for head in range(first_head, end_head):
            for node in range(nodes):
                place, steps = places[node], inputs[node] + size * convolution.channels
                window = window_of(convolution, room, place, inputs[node])
                _asked(kind, size, convolution, window, head * key_width, keys, key_width, query, key)
                for own in range(head * group, (head + 1) * group):
                    first = 2 * keys + own * value_width
                    convolved(kind, size, convolution, window, first, value_width, value)
                    beta = _beta(kind, steps + size * own, most)
                    step = number(kind, steps + size * (heads + own)) + floats(offsets)[own]
                    decay = splat(math.exp(-floats(rates)[own] * softplus(step)))
                    source, target = state_after(states, place - 1, own), state_after(states, place, own)
                    for column in range(0, value_width, COLUMNS * LANES):
                        _learned(source, target, key_width, value_width, column, key, query, value, decay,
                                 beta, read)  # fmt: skip
                    if node >= certain:
                        at = size * own * value_width
                        gate, result = gates[node] + at, results[node] + at
                        _opened(kind, size, read, gate, scale, value_width, eps, result)

    return learn
