"""Which cores this process may use, and how many threads are worth starting on them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.control_groups import control_groups

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Cores:
    """What `find_cores` finds."""

    numbers: tuple[int, ...]
    """Cores to pin processes to, as the system numbers them: one hardware thread of each physical core, then
    the other ones. Empty where the system cannot pin or refuses to, or where a CPU limit is below the cores:
    others have the same cores then, and would be pinned to the same ones."""
    threads: int
    """How many threads can compute at full speed at once."""


def allowed_cores() -> list[int]:
    """The cores that the system lets this process run on, in the order of their numbers."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_exists(core: int) -> bool:
    """True for a core of this machine. Where some are off or hidden, numbers go beyond their count."""
    return core < (os.cpu_count() or 1) or (TOPOLOGY / f"cpu{core}").exists()


def find_cores() -> Cores:
    """The cores of this process as it is pinned now, and within its CPU limit."""
    cores = _found()
    return cores if _can_pin() else Cores((), cores.threads)


def default_threads() -> int:
    """How many threads a process starts that was not told: one for each core that it may use, and at most
    OMP_NUM_THREADS."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    threads = _found().threads
    return min(threads, int(told)) if told.isdecimal() and int(told) else threads


def arranged(siblings: Mapping[int, str], limit: float | None) -> Cores:
    """The cores with these numbers, each with the name of its physical core; `limit` is how many may be
    used at once."""
    first = {name: core for core, name in sorted(siblings.items(), reverse=True)}
    whole = sorted(first.values())
    if limit is not None and limit < len(siblings):
        return Cores((), min(len(whole), max(1, math.ceil(limit))))
    return Cores((*whole, *sorted(set(siblings) - set(whole))), len(whole))


def _siblings(core: int) -> str:
    """The hardware threads of a core's physical core, as the system lists them."""
    try:
        return (TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(core)


def _found() -> Cores:
    return arranged({core: _siblings(core) for core in allowed_cores()}, _limit())


def _can_pin() -> bool:
    """False where the system cannot pin, and where a sandbox does not let it."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return False
    return True


def _limit() -> float | None:
    """How many cores' time this process gets: the least limit of its groups; None without one."""
    limits = [limit for folder in control_groups("cpu") if (limit := _limit_of(folder)) is not None]
    return min(limits, default=None)


def _limit_of(folder: Path) -> float | None:
    newer = folder / "cpu.max"
    try:
        if newer.exists():
            quota, period = newer.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # "max"
        return None
