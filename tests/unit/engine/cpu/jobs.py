"""Kernels for tests of the worker pool. Importing this compiles them."""

from __future__ import annotations

from outrider.engine.cpu.kernels import team
from outrider.engine.cpu.kernels.compiling import kernel
from outrider.engine.cpu.kernels.vectors import integers


@kernel("void(intp, intp, intp)", for_kernels=True)
def add(table: int, part: int, member: int) -> None:
    """Add 1 + 100 times the member to the part's number."""
    integers(table)[part] += 1 + 100 * member


@kernel("void(intp, intp, intp)", for_kernels=True)
def meet(table: int, part: int, member: int) -> None:
    """End when two members have met in the job, or after a long time; note whether they have."""
    team._store(table + 8 * part, 1)
    begun = team._cycles()
    while not team._load(table + 8 * (1 - part)) and team._cycles() - begun < 10**11:
        team._let_others_run()
    team._store(table + 8 * (2 + part), team._load(table + 8 * (1 - part)))
