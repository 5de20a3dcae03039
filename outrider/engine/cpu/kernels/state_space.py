"""Mamba-2's state space (Dao and Gu 2024, "Transformers are SSMs") for candidates of one sequence.

A head's state [P, S] decays and takes in a token: S = e^(t A) S + x (t B)^T; what is read is S C + D x. The
x, B and C come out of a short convolution; the step t is softplus of an input. Numbers are rounded where
transformers rounds those of a single token. A node is computed by itself from the inputs of its path: its
bits do not depend on what else is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.epilogue import exponential, silu
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
    added_up,
    first_lanes,
    floats,
    integers,
    kept,
    load,
    multiply_add,
    rounded,
    splat,
    splat_at,
    store,
)
from outrider.engine.cpu.processor import LANES


def room_bytes(taps: int, nodes: int, levels: int, head_width: int, state_width: int) -> int:
    """Return the bytes of a call's scratch memory: for the inputs of a path, an x, what is read, B and C of
    nodes, a t B, and states."""
    rows = 2 * (head_width + LANES) + (2 * nodes + 1) * (state_width + LANES)
    return 8 * (taps + nodes) + 4 * (rows + levels * head_width * state_width)


@inlined
def _first(x: Value) -> float:
    """The number in the first lane."""
    found: float = added_up(kept(x, first_lanes(1)))
    return found


@inlined
def _moved(
    kind: str, before: int, after: int, rows: int, width: int, x: int, taken: int, asked: int, decay: Value,
    out: int,
) -> None:  # fmt: skip
    """Write the state after a token to `after`, unless that is 0, and what is read, unless `out` is 0."""
    for row in range(rows):
        share, total = splat_at(x + 4 * row), splat(0.0)
        for column in range(0, width, LANES):
            at, there = 4 * (row * width + column), first_lanes(width - column)
            added = rounded(kind, load("float32", taken + 4 * column, there) * share)
            state = load("float32", before + at, there) * decay + added
            if after:
                store("float32", after + at, state, there)
            if out:
                total = multiply_add(rounded(kind, state), load("float32", asked + 4 * column, there), total)
        if out:
            floats(out)[row] = added_up(total)


@inlined
def _written(kind: str, size: int, read: int, x: int, direct: float, gate: int, width: int, y: int) -> None:
    """Write what a head reads, with `direct` x, opened by `gate` unless that is 0, as numbers of a kind."""
    for column in range(0, width, LANES):
        there = first_lanes(width - column)
        past = rounded(kind, load("float32", x + 4 * column, there) * splat(direct))
        numbers = rounded(kind, rounded(kind, load("float32", read + 4 * column, there)) + past)
        if gate:
            numbers = numbers * rounded(kind, silu(load(kind, gate + size * column, there)))
        store(kind, y + size * column, numbers, there)


@inlined
def _shared(
    kind: str, size: int, convolution: Convolution, window: int, first: int, step: int, width: int, to: int
) -> None:
    """Write a node's B, channels from `first` on, and C, `step` channels later, to rows side by side."""
    convolved(kind, size, convolution, window, first, width, to)
    convolved(kind, size, convolution, window, first + step, width, to + 4 * (width + LANES))


@inlined
def _step(kind: str, at: int, offset: float) -> Value:
    """Return the step t: softplus of one number of the inputs plus `offset`."""
    total = rounded(kind, splat(number(kind, at) + offset))
    return rounded(kind, splat(softplus(_first(total))))


@inlined
def _scaled(kind: str, x: int, by: Value, width: int, y: int) -> None:
    """Write a float32 row times a number."""
    for column in range(0, width, LANES):
        there = first_lanes(width - column)
        store("float32", y + 4 * column, rounded(kind, by * load("float32", x + 4 * column, there)), there)


(
    WEIGHTS,
    BIAS,
    TAPS,
    RATES,
    OFFSETS,
    DIRECT,
    GATED,
    HEADS,
    GROUPS,
    HEAD_WIDTH,
    STATE_WIDTH,
) = range(OWN, OWN + 11)
"""Places in a job."""


@cache
def state_space(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers. It computes a part (see `parts`): some heads of all nodes.

    Channels are x of all heads, B and C of all groups; after them inputs hold what becomes each head's step.
    Gates are not read unless GATED. PAST [TAPS, channels] is what the convolution keeps before the first
    node. RATES, OFFSETS and DIRECT [heads] are float32. States are [P, S]. ROOM has `room_bytes`; the next
    member's is ROOM_APART bytes later.
    """
    size = BYTES[kind]

    @kernel("void(intp, intp, intp)", for_kernels=True)
    def move(table: int, part: int, member: int) -> None:
        job = job_of(table, part)
        nodes, certain, heads, groups = job[NODES], job[CERTAIN], job[HEADS], job[GROUPS]
        head_width, state_width, taps, gated = job[HEAD_WIDTH], job[STATE_WIDTH], job[TAPS], job[GATED]
        rates, offsets, direct = job[RATES], job[OFFSETS], job[DIRECT]
        room = job[ROOM] + member * job[ROOM_APART]
        first_head, end_head = share_of(job, part, heads)
        inner, groups_width = heads * head_width, groups * state_width
        convolution = Convolution(job[WEIGHTS], job[BIAS], taps, inner + 2 * groups_width)
        row_bytes = 4 * (state_width + LANES)
        x = room + 8 * (taps + nodes)
        read = x + 4 * (head_width + LANES)
        shared = read + 4 * (head_width + LANES)
        taken = shared + 2 * nodes * row_bytes
        levels = taken + row_bytes
        states = States(job[BEFORE], job[AFTER], certain, levels, 1, 4 * head_width * state_width)
        inputs, gates, results, places = columns(job[TABLE], nodes)
        begin_path(size, convolution, room, job[PAST])
        group = -1
        for head in range(first_head, end_head):
            if group != head // (heads // groups):
                group = head // (heads // groups)
                first = inner + group * state_width
                for node in range(nodes):
                    window = window_of(convolution, room, places[node], inputs[node])
                    row = shared + 2 * node * row_bytes
                    _shared(kind, size, convolution, window, first, groups_width, state_width, row)
            for node in range(nodes):
                place = places[node]
                window = window_of(convolution, room, place, inputs[node])
                convolved(kind, size, convolution, window, head * head_width, head_width, x)
                at = inputs[node] + size * (convolution.channels + head)
                step = _step(kind, at, floats(offsets)[head])
                decay = exponential(step * splat(floats(rates)[head]))
                row = shared + 2 * node * row_bytes
                _scaled(kind, row, step, state_width, taken)
                source, target, out = state_after(states, place - 1, head), 0, 0
                if node < certain or (node + 1 < nodes and places[node + 1] > place):
                    target = state_after(states, place, head)
                if node >= certain:
                    out = read
                asked = row + row_bytes
                _moved(kind, source, target, head_width, state_width, x, taken, asked, decay, out)
                if out:
                    own = size * head * head_width
                    gate, result = gates[node] + own if gated else 0, results[node] + own
                    _written(kind, size, read, x, floats(direct)[head], gate, head_width, result)

    return move


@cache
def gated_norm(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers."""
    size = BYTES[kind]

    @kernel(f"void({'intp, ' * 6} float64)")
    def open_and_norm(
        table: int, nodes: int, certain: int, scale: int, groups: int, width: int, eps: float
    ) -> None:
        """Open what has been read by its gates, and norm each group of `width`, in place.

        `table` and `certain` are those of `state_space`; `scale` [groups, width] is float32.
        """
        gates, results = integers(table + 8 * nodes), integers(table + 16 * nodes)
        for node in range(certain, nodes):
            for first in range(0, groups * width, width):
                squares, gate = splat(0.0), gates[node] + size * first
                y = results[node] + size * first
                for column in range(0, width, LANES):
                    at, there = size * column, first_lanes(width - column)
                    numbers = load(kind, y + at, there) * silu(load(kind, gate + at, there))
                    squares = multiply_add(numbers, numbers, squares)
                inverse = one_over_root(squares, 1.0 / width, eps)
                for column in range(0, width, LANES):
                    at, there = size * column, first_lanes(width - column)
                    numbers = load(kind, y + at, there) * silu(load(kind, gate + at, there))
                    numbers = rounded(kind, numbers * inverse)
                    weights = load("float32", scale + 4 * (first + column), there)
                    store(kind, y + at, weights * numbers, there)

    return open_and_norm
