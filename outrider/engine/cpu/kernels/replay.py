"""Makes the calls of a recorded forward, one after the other, without the interpreter.

A program has a line of int64 numbers for each call: a job, whose kernel gets the address of its table and the
numbers of the part and of the member, as in `team`. A negative number of parts is minus the address where an
earlier call writes it.
"""

from __future__ import annotations

from outrider.engine.cpu.kernels.compiling import kernel
from outrider.engine.cpu.kernels.team import call_part, work_together
from outrider.engine.cpu.kernels.vectors import copy, integers

FUNCTION, TABLE, PARTS, SIZE = range(4)
"""Places in a line. SIZE: how many members may work on the job."""
LINE = 4
"""Numbers of a line."""


@kernel("void(intp, intp, intp, intp)")
def replay(program: int, count: int, state: int, members: int) -> None:
    """Make the `count` calls of a program with the members of a pool, see `team.work_together`."""
    for number in range(count):
        line = integers(program + 8 * LINE * number)
        parts = line[PARTS]
        if parts < 0:
            parts = integers(-parts)[0]
        if parts == 1:
            call_part(line[FUNCTION], line[TABLE], 0, 0)
        else:
            work_together(state, line[FUNCTION], line[TABLE], parts, line[SIZE], members)


@kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
def copy_rows(table: int, part: int, member: int) -> None:
    """Copy rows.

    The table: how many; bytes of a row; the source, and bytes from row to row there; the address of int64
    numbers of rows there, or 0 for the first ones; the target, and bytes from row to row there.
    """
    numbers = integers(table)
    rows, size, source, apart = numbers[0], numbers[1], numbers[2], numbers[3]
    chosen, target, target_apart = numbers[4], numbers[5], numbers[6]
    for row in range(rows):
        first = integers(chosen)[row] if chosen else row
        copy(target + row * target_apart, source + first * apart, size)
