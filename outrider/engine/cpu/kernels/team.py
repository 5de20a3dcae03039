"""Lets threads share the parts of a job without the interpreter.

Waking a thread takes as long as reading a megabyte of weights, and a thread that waits for Python's lock may
have to be woken too. So members stay in `serve` between the jobs of a step and watch the memory below, and no
part of a job enters the interpreter.

    job        a function, which is called once with each part, and the address of a table for it
    lead       whoever has the job: it opens it, works on it as member 0, closes it and waits for the others
    member     joins an open job, takes parts until there are none, and watches again; it stays while a
               recorded forward needs it, because nothing wakes it before the end

The memory is a line of 64 bytes for the job, one for the next part, and one per member. A member says that it
is busy before it looks whether the job is open, and the lead closes the job before it looks who is busy: so
one of them sees the other, and no member works on a job that is closed.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.vectors import I32, I64, VOID, Address, Builder, Value, call, emits

LINE = 64
"""Bytes of a line, so that members do not write to each other's."""
OPEN, FUNCTION, TABLE, COUNT, NEEDED = 0, 8, 16, 24, 32
"""Places in the job's line. OPEN: how many members may work on it, with the lead; 0 while it is closed.
NEEDED: how many members stay until it is 0 again."""
NEXT = LINE
"""Place of the number of the next part."""
MEMBERS = 2 * LINE
"""Place of the lead's line; other members' lines follow."""
BUSY, CALLED, ASLEEP = 0, 8, 16
"""Places in a member's line. CALLED: set by others when a member has to leave `serve`. ASLEEP: set by the
member when it has left."""
SPIN_CYCLES = 50_000
"""Cycles of the processor's clock for which a thread that waits spins before it yields its core. On a busy
core a thread that yields gets the core back after some milliseconds, and a step has many waits. A thread that
waits longer may wait for one that needs this core. Measured, see docs/history/performance.md."""


@emits(Address, Address)
def _load(builder: Builder, address: Value) -> Value:
    """A number that others may change; in one order with all stores."""
    return builder.load_atomic(_place(builder, address), "seq_cst", 8)


@emits(types.void, Address, Address)
def _store(builder: Builder, address: Value, value: Value) -> None:
    """Set a number that others may read."""
    builder.store_atomic(value, _place(builder, address), "seq_cst", 8)


@emits(Address, Address)
def _take(builder: Builder, address: Value) -> Value:
    """Return a number and add 1 to it."""
    return builder.atomic_rmw("add", _place(builder, address), I64(1), "seq_cst")


@emits(types.void, Address, Address, Address, Address)
def call_part(builder: Builder, function: Value, table: Value, part: Value, member: Value) -> None:
    """Call the function at an address."""
    kind = ir.FunctionType(VOID, [I64, I64, I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [table, part, member])


@emits(Address)
def _cycles(builder: Builder) -> Value:
    """Cycles of the processor's clock."""
    return call(builder, "llvm.readcyclecounter", I64)


@emits(types.void)
def _let_others_run(builder: Builder) -> None:
    """Give the core to a thread that waits for it, if there is one: the part that is waited for may be that
    thread's, where there are more threads than cores."""
    call(builder, "sched_yield", I32)


@inlined
def _wait(since: int) -> None:
    """Wait a moment, as part of a wait that began at `since`."""
    if _cycles() - since > SPIN_CYCLES:
        _let_others_run()


def _place(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, I64.as_pointer())


@inlined
def _work_off(state: int, member: int) -> None:
    """Take parts until there are none."""
    function, table, count = _load(state + FUNCTION), _load(state + TABLE), _load(state + COUNT)
    part = _take(state + NEXT)
    while part < count:
        call_part(function, table, part, member)
        part = _take(state + NEXT)


@inlined
def work_together(state: int, function: int, table: int, count: int, size: int, members: int) -> None:
    """Work off all parts of a job with up to `size` of `members` members, one of whom is the caller."""
    _store(state + FUNCTION, function)
    _store(state + TABLE, table)
    _store(state + COUNT, count)
    _store(state + NEXT, 0)
    _store(state + OPEN, size)
    _work_off(state, 0)
    _store(state + OPEN, 0)
    since = _cycles()
    for member in range(1, members):
        while _load(state + MEMBERS + LINE * member + BUSY):
            _wait(since)


@kernel("void(intp, intp, intp, intp, intp, intp)")
def run(state: int, function: int, table: int, count: int, size: int, members: int) -> None:
    """See `work_together`."""
    work_together(state, function, table, count, size, members)


@inlined
def _watch(state: int, member: int, patience: int) -> None:
    own, since = state + MEMBERS + LINE * member, _cycles()
    while not _load(own + CALLED) and (_load(state + NEEDED) > member or _cycles() - since < patience):
        if _load(state + OPEN) > member and _load(state + NEXT) < _load(state + COUNT):
            _store(own + BUSY, 1)
            if _load(state + OPEN) > member:
                _work_off(state, member)
            _store(own + BUSY, 0)
            since = _cycles()
        else:
            _wait(since)


@kernel("void(intp, intp, intp)")
def serve(state: int, member: int, patience: int) -> None:
    """Work on jobs as they come, until there is none for `patience` cycles or the member is called."""
    own = state + MEMBERS + LINE * member
    leaves = False
    while not leaves:
        _store(own + ASLEEP, 0)
        _watch(state, member, patience)
        _store(own + ASLEEP, 1)
        # Whoever sets NEEDED looks afterwards who is asleep: one of the two sees the other.
        leaves = _load(own + CALLED) or _load(state + NEEDED) <= member
