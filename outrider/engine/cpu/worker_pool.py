"""The threads that share the work of a forward on the CPU.

`threads` of them belong to the service. Helpers run on cores that belong to others, such as the draft's.
While these cores are idle, helpers take part in every step. Otherwise they take part only in long steps, such
as a prompt or a large batch: the draft needs its core more. Parts are handed out one by one, and the pool
does not wait for a helper that has not begun when all parts are taken: a busy core does not delay the rest.

Kernels hand out their own parts (`outrider.engine.cpu.kernels.team`), Python those of the library. After each
job a member watches for PATIENCE whether there is another one; then it sleeps until it is woken.
"""

from __future__ import annotations

import os
import weakref
from _thread import LockType
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from threading import Lock, Thread, current_thread
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.engine.cpu.kernels import compiling
from outrider.engine.cpu.panels import aligned
from outrider.engine.cpu.processor import AVX2, LANES, features
from outrider.engine.cpu.recording import recording, unrecorded
from outrider.protocol.errors import ConfigError

_T = TypeVar("_T")
_Job: TypeAlias = Callable[[], None]
HELPED_ROWS = 15 if LANES == 16 else 7
"""Rows from which on helpers join while their cores have other work: more than `row_matmul` multiplies in one
pass, so that arithmetic takes the time, not the reading of the weights. With drafts at work and one session,
helpers from 1 row on made AUTO slower on a Xeon with AMX: 0.95 (T = 0), 0.74 (T = 1) of the tokens/s."""
MIN_SHARE = 2**21
"""Bytes that a thread to which Python hands a part should have to read: waking it takes as long as reading
half of them."""
PATIENCE = 1_000_000
"""Cycles of the processor's clock for which a member watches for the next job: longer than it takes from
product to product of a step, and a few times as long as waking it on a virtual machine."""
END_SECONDS = 10.0
"""How long a member has for its last job when its pool or the process ends."""
_LINE, _NEEDED, _CALLED, _ASLEEP = 8, 4, 1, 2
"""int64 numbers of a line, and places in the job's and a member's; see `outrider.engine.cpu.kernels.team`."""


class WorkerPool:
    """`threads` threads for every step, and a helper pinned to each of `helper_cores` for long steps.

    One thread at a time may call it, and is a member itself.

    Raises:
        ConfigError: a helper cannot run on its core.
    """

    def __init__(self, threads: int = 1, helper_cores: Sequence[int] = ()) -> None:
        self.threads = threads
        self._state = aligned(torch.zeros(2 + threads + len(helper_cores), _LINE, dtype=torch.int64))
        self._state_at = self._state.data_ptr()
        self._job = self._state.numpy()[0]
        self.largest = threads + len(helper_cores)
        """Number of members including all helpers."""
        makers = [_worker] * (threads - 1) + [partial(_helper, core) for core in helper_cores]
        self._others = [make(self._state, member) for member, make in enumerate(makers, 1)]
        self._rooms: dict[int, Tensor] = {}
        self._grown = torch.empty(self.largest, 0, dtype=torch.uint8)
        self.helpers_idle = False
        """True while nothing else runs on the helpers' cores."""

    def __str__(self) -> str:
        helpers = self.largest - self.threads
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{threads} and {helpers} helper{'s' * (helpers > 1)}" if helpers else threads

    def size(self, rows: int) -> int:
        """Number of members that work on `rows` rows."""
        return self.largest if self.helpers_idle or rows >= HELPED_ROWS else self.threads

    def room(self, size: int) -> tuple[int, int]:
        """Return the address of `size` bytes of scratch memory of the first member, and how many bytes later
        the next one's are. All products share it: one runs at a time."""
        size += -size % 64
        if size not in self._rooms:
            self._rooms[size] = aligned(torch.zeros(self.largest, size, dtype=torch.uint8))
        return self._rooms[size].data_ptr(), size

    def room_that_grows(self, size: int) -> tuple[int, int]:
        """Do as `room`, for sizes that grow with the text, from 64 bytes on. A larger room takes the place of
        a smaller one: addresses are good until the next call."""
        if self._grown.shape[1] < size:
            with unrecorded():
                self._grown = torch.empty(self.largest, 1 << (size - 1).bit_length(), dtype=torch.uint8)
        return self._grown.data_ptr(), self._grown.shape[1]

    def run(self, kernel: Callable[..., None], table: array[int], parts: int, size: int) -> None:
        """Call a kernel that is `for_kernels` once for every part, on `size` members: with the address of the
        table, the part's number, and the member's."""
        if (under_way := recording()) is not None:
            under_way.add_job(kernel, table, parts, size)
        self._run(kernel, table.buffer_info()[0], parts, size)

    def run_written(self, kernel: Callable[..., None], table: Tensor, parts: Tensor, size: int) -> None:
        """Do as `run`, with a table and a number of parts [1] that another kernel has written."""
        if (under_way := recording()) is not None:
            under_way.add_written_job(kernel, table, parts, size)
        self._run(kernel, table.data_ptr(), int(parts.numpy()[0]), size)

    def _run(self, kernel: Callable[..., None], address: int, parts: int, size: int) -> None:
        self._wake(size)
        _team().run(self._state_at, compiling.address_of(kernel), address, parts, size, self.largest)

    def replay(self, program: np.ndarray[Any, Any], rows: int) -> None:
        """Make the recorded calls [calls, LINE] of a forward of `rows` rows."""
        from outrider.engine.cpu.kernels.replay import replay

        members = self.size(rows)
        self._job[_NEEDED] = members
        try:
            self._wake(members)
            replay(program.ctypes.data, len(program), self._state_at, self.largest)
        finally:
            self._job[_NEEDED] = 0

    def _wake(self, size: int) -> None:
        for other in self._others[: size - 1]:
            other.wake()

    def share(self, size: int, parts: Sequence[_T], work: Callable[[int, _T], None]) -> None:
        """Call work(member, part) once for every part, on `size` members numbered from 0."""
        left = iter(parts)  # its next() is atomic

        def work_off(member: int) -> None:
            for part in left:
                work(member, part)

        others = self._others[: size - 1]
        for member, other in enumerate(others, 1):
            other.begin(partial(work_off, member))
        try:
            work_off(0)
        finally:
            begun = [other for other in others if not other.cancel()]
            errors = [error for other in begun if (error := other.wait()) is not None]
        if errors:
            raise errors[0]


class _Member:
    """A thread that does one job at a time. A lock wakes it: futures take longer
    (docs/history/performance.md).
    """

    def __init__(self, name: str, state: Tensor, member: int) -> None:
        self._begun, self._done = Lock(), Lock()
        self._begun.acquire()
        self._done.acquire()
        self._jobs: list[_Job | None] = []
        self._errors: list[BaseException] = []
        self._line = state.numpy()[2 + member]
        serve = partial(_team().serve, state.data_ptr(), member, PATIENCE) if _has_team() else None
        arguments = self._begun, self._done, self._jobs, self._errors, self._line, serve
        thread = Thread(target=_work, args=arguments, name=name, daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, self._begun, self._jobs, self._line)

    def wake(self) -> None:
        """Let the member watch for jobs of kernels."""
        if self._line[_ASLEEP] and self._begun.locked():
            self._begun.release()

    def begin(self, job: _Job) -> None:
        """Hand over a job; `cancel` or `wait` has to follow."""
        _hand(job, self._begun, self._jobs, self._line)

    def cancel(self) -> bool:
        """Take the job back; False when it has begun."""
        try:
            self._jobs.pop()  # the lock does not tell: the member may have been woken twice
        except IndexError:
            return False
        self._line[_CALLED] = 0
        self._begun.acquire(blocking=False)  # let it sleep on, unless it is awake
        return True

    def wait(self) -> BaseException | None:
        """Wait until the job is done; return what it raised."""
        self._done.acquire()
        return self._errors.pop() if self._errors else None


def _hand(job: _Job | None, begun: LockType, jobs: list[_Job | None], line: np.ndarray[Any, Any]) -> None:
    """Hand a job over to a member's thread; None ends it."""
    jobs.append(job)
    line[_CALLED] = 1
    if begun.locked():  # otherwise it has been woken just now
        begun.release()


def _end(thread: Thread, begun: LockType, jobs: list[_Job | None], line: np.ndarray[Any, Any]) -> None:
    """End a member's thread, and wait for it: where the process ends while a thread runs a kernel, Python
    unwinds its stack, which aborts the process."""
    _hand(None, begun, jobs, line)
    if thread is not current_thread():
        thread.join(END_SECONDS)


def _work(
    begun: LockType,
    done: LockType,
    jobs: list[_Job | None],
    errors: list[BaseException],
    line: np.ndarray[Any, Any],
    serve: Callable[[], None] | None,
) -> None:
    """Run the thread of a member. It holds no reference to the member, so that the member can be freed."""
    while True:
        if serve is not None:
            serve()
        begun.acquire()
        try:
            job = jobs.pop()
        except IndexError:  # woken for a kernel, or for a job that was taken back
            continue
        line[_CALLED] = 0
        if job is None:
            return
        try:
            job()
        except BaseException as error:  # the caller's to raise
            errors.append(error)
        done.release()


def _has_team() -> bool:
    """True where kernels can hand out parts."""
    return features().issuperset(AVX2) and compiling.available()


@cache
def _team() -> Any:
    from outrider.engine.cpu.kernels import team

    return team


def _worker(state: Tensor, member: int) -> _Member:
    return _Member("worker", state, member)


def _helper(core: int, state: Tensor, member: int) -> _Member:
    """Start a thread on a core, and check that it runs there."""
    helper = _Member("helper", state, member)
    helper.begin(partial(os.sched_setaffinity, 0, {core}))
    if (error := helper.wait()) is not None:
        raise ConfigError(f"helper_cpus: core {core} cannot be used by this process; name others") from error
    return helper
