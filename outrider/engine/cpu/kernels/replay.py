"""Makes the calls of a recorded forward, one after the other, without the interpreter.

A program has a line of int64 numbers for each call. A job gets its table and the number of a part, as in
`team`. Other kernels get the numbers of their table as arguments.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.team import call_part, work_together
from outrider.engine.cpu.kernels.vectors import I64, VOID, Address, Builder, Value, copy, emits, integers

KIND, FUNCTION, TABLE, PARTS, SIZE = range(5)
"""Places in a line. KIND: 0 for a job; for others 1 + the place of what they take in ARGUMENTS. PARTS, SIZE:
of a job, and how many members may work on it."""
LINE = 8
"""Numbers of a line."""
ARGUMENTS = ((8, 2), (14, 2), (8, 0), (3, 0), (2, 0), (5, 0), (3, 1))
"""How many int64 and then float64 numbers kernels take: norms, rotations, preparing rows for codes, sums and
changes of the dtype, activations, gates, multiples."""


def _caller(kind: int) -> Any:
    """Return a function that calls the kernel at an address with the numbers at another one."""
    count, floats = ARGUMENTS[kind - 1]
    taken = [I64] * count + [ir.DoubleType()] * floats

    @emits(types.void, Address, Address)
    def call_with(builder: Builder, function: Value, table: Value) -> None:
        """Load the arguments, and call."""
        places = [builder.add(table, I64(8 * place)) for place in range(len(taken))]
        given = [
            builder.load(builder.inttoptr(place, each.as_pointer()), typ=each)
            for place, each in zip(places, taken, strict=True)
        ]
        builder.call(builder.inttoptr(function, ir.FunctionType(VOID, taken).as_pointer()), given)

    return call_with


_norm, _rotate, _prepare, _add, _activate, _open, _multiply = map(_caller, range(1, 1 + len(ARGUMENTS)))


@inlined
def _call(kind: int, function: int, table: int) -> None:
    if kind == 1:
        _norm(function, table)
    elif kind == 2:
        _rotate(function, table)
    elif kind == 3:
        _prepare(function, table)
    elif kind == 4:
        _add(function, table)
    elif kind == 5:
        _activate(function, table)
    elif kind == 6:
        _open(function, table)
    else:
        _multiply(function, table)


@kernel("void(intp, intp, intp, intp)")
def replay(program: int, count: int, state: int, members: int) -> None:
    """Make the `count` calls of a program; jobs with the members of a pool, see `team.work_together`."""
    for number in range(count):
        line = integers(program + 8 * LINE * number)
        function, table = line[FUNCTION], line[TABLE]
        if line[KIND]:
            _call(line[KIND], function, table)
        elif line[PARTS] == 1:
            call_part(function, table, 0, 0)
        else:
            work_together(state, function, table, line[PARTS], line[SIZE], members)


@kernel("void(intp, intp, intp)", for_kernels=True)
def copy_rows(table: int, part: int, member: int) -> None:
    """Copy rows, as a job of one part.

    The table: how many; bytes of a row; the source, and bytes from row to row there; the address of int64
    numbers of rows there, or 0 for the first ones; the target, and bytes from row to row there.
    """
    numbers = integers(table)
    rows, size, source, apart = numbers[0], numbers[1], numbers[2], numbers[3]
    chosen, target, target_apart = numbers[4], numbers[5], numbers[6]
    for row in range(rows):
        first = integers(chosen)[row] if chosen else row
        copy(target + row * target_apart, source + first * apart, size)
