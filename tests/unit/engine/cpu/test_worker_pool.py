"""Threads that share the work of a forward."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable

import numpy as np
import pytest
import torch

from outrider.engine.cpu import worker_pool
from outrider.engine.cpu.kernels.compiling import available
from outrider.engine.cpu.processor import AVX2, features
from outrider.engine.cpu.worker_pool import HELPED_ROWS, WorkerPool
from outrider.protocol.errors import ConfigError

with_kernels = pytest.mark.skipif(
    not (features().issuperset(AVX2) and available()), reason="the kernels need AVX2 and numba"
)
PARTS = 20


@pytest.fixture(scope="session")
def note() -> Callable[..., None]:
    """A kernel that adds 1 + 100 times its member to a number of its part."""
    from tests.unit.engine.cpu.jobs import add

    return add


def test_every_part_is_worked_off_once() -> None:
    """By as many members as were asked for, of whom the caller is one."""
    workers, done = WorkerPool(3), []
    workers.share(3, range(100), lambda member, part: done.append((part, member)))
    assert sorted(part for part, _ in done) == list(range(100))
    assert {member for _, member in done} <= {0, 1, 2}


def test_threads_work_in_every_step_and_helpers_in_long_ones() -> None:
    """Helpers join from a number of rows on."""
    workers = WorkerPool(2, [0])
    assert (workers.size(1), workers.size(HELPED_ROWS - 1), workers.size(HELPED_ROWS)) == (2, 2, 3)


@pytest.mark.parametrize(
    ("threads", "cores", "expected"),
    [(1, [], "1 thread"), (3, [], "3 threads"), (1, [0], "1 thread and 1 helper")],
)
def test_a_pool_says_how_large_it_is(threads: int, cores: list[int], expected: str) -> None:
    """In the line that says how a model was loaded."""
    assert str(WorkerPool(threads, cores)) == expected


def test_helpers_whose_cores_are_idle_work_in_every_step() -> None:
    """The draft rests, and its core has nothing else to do."""
    workers = WorkerPool(2, [0])
    workers.helpers_idle = True
    assert (workers.size(1), workers.size(HELPED_ROWS)) == (3, 3)


def test_a_member_that_is_busy_elsewhere_is_not_waited_for() -> None:
    """Its core has other work: the caller does all parts."""
    workers, done, begun, free = WorkerPool(2), [], threading.Event(), threading.Event()

    def other_work() -> None:
        begun.set()
        free.wait()

    workers._others[0].begin(other_work)
    begun.wait()
    workers.share(2, range(10), lambda member, part: done.append((part, member)))
    free.set()
    assert done == [(part, 0) for part in range(10)]


class LateLock:
    """A lock whose taker, if it is not the main thread, goes on only when the test says so: as a thread that
    has to wait for the interpreter."""

    def __init__(self) -> None:
        self._lock, self.taken, self.go_on = threading.Lock(), threading.Event(), threading.Event()
        self.release, self.locked = self._lock.release, self._lock.locked

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock."""
        taken = self._lock.acquire(blocking)
        if threading.current_thread() is not threading.main_thread():
            self.taken.set()
            self.go_on.wait()
        return taken


def test_a_job_that_has_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was handed over between a member's waking up for a kernel and its look for jobs."""
    monkeypatch.setattr(worker_pool, "Lock", LateLock)
    monkeypatch.setattr(worker_pool, "_has_team", lambda: False)
    workers, begun, free = WorkerPool(2), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        free.wait()

    member = workers._others[0]
    member._line[worker_pool._ASLEEP] = 1
    member.wake()
    member._begun.taken.wait()
    member.begin(work)
    member._begun.go_on.set()
    begun.wait()
    taken_back = member.cancel()
    free.set()
    assert not taken_back
    assert member.wait() is None


def test_a_room_that_grows_takes_the_place_of_smaller_ones() -> None:
    """Long texts leave no rooms of shorter ones behind; each member has its own bytes."""
    workers = WorkerPool(2)
    sizes = [100, 1 << 12, 70_000, 65]
    rooms = [workers.room_that_grows(size) for size in sizes]
    assert rooms[3] == rooms[2]
    assert rooms[2][1] == 1 << 17
    assert rooms[2][0] % 64 == 0
    held = [each.nbytes for each in vars(workers).values() if isinstance(each, torch.Tensor)]
    assert sum(size for size in held if size >= 1 << 10) == 2 << 17
    assert not workers._rooms


def test_members_end_with_their_pool() -> None:
    """A model that is let go leaves no thread behind."""
    before = set(threading.enumerate())
    workers = WorkerPool(3)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del workers
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_members_take_turns_for_a_long_time() -> None:
    """No job is lost or done twice, whoever wakes first."""
    workers, done = WorkerPool(3), []
    for turn in range(2000):
        workers.share(3, range(3), lambda member, part, turn=turn: done.append(3 * turn + part))
    assert sorted(done) == list(range(6000))


def test_a_helper_needs_its_core() -> None:
    """A core that is not there, or not for this process, is named at load and not in the first long step."""
    with pytest.raises(ConfigError, match="core 4095"):
        WorkerPool(1, [4095])


def test_a_member_s_failure_is_the_caller_s() -> None:
    """Nothing is lost in a thread."""

    def fail(member: int, part: int) -> None:
        raise ValueError(part)

    with pytest.raises(ValueError, match=r"[12]"):
        WorkerPool(2).share(2, [1, 2], fail)


@with_kernels
@pytest.mark.parametrize("patience", [0, worker_pool.PATIENCE, 10**12])
def test_kernels_work_off_every_part_once(
    note: Callable[..., None], patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many jobs, whether members sleep, watch or do both between them; Python's jobs come in between."""
    monkeypatch.setattr(worker_pool, "PATIENCE", patience)
    workers, done, seen = WorkerPool(3), 0, set()
    for turn in range(1500):
        table = array("q", [0] * PARTS)
        workers.run(note, table, PARTS, 3)
        assert all(number % 100 == 1 for number in table)
        seen |= {number // 100 for number in table}
        if turn % 7 == 0:
            found: list[int] = []
            workers.share(3, range(4), lambda member, part, found=found: found.append(part))
            done += sorted(found) == [0, 1, 2, 3]
    assert done == len(range(0, 1500, 7))
    assert seen <= {0, 1, 2}


@with_kernels
def test_kernels_take_no_more_members_than_the_job_may_have(note: Callable[..., None]) -> None:
    """A helper whose core is needed elsewhere watches, and leaves short steps alone."""
    workers = WorkerPool(2)
    workers.run(note, array("q", [0] * PARTS), PARTS, 2)
    for _ in range(100):
        table = array("q", [0] * PARTS)
        workers.run(note, table, PARTS, 1)
        assert list(table) == [1] * PARTS


@with_kernels
def test_helpers_join_what_takes_more_than_one_pass() -> None:
    """There arithmetic takes the time, and a core that has other work shortens it."""
    from outrider.engine.cpu.kernels.row_matmul import GROUP

    workers = WorkerPool(1, [min(os.sched_getaffinity(0))])
    assert (workers.size(GROUP), workers.size(GROUP + 1)) == (1, 2)


@with_kernels
def test_members_stay_for_a_whole_recorded_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing wakes them between its jobs. Here each job ends when two members have met in it."""
    from outrider.engine.cpu.kernels import replay
    from outrider.engine.cpu.kernels.compiling import address_of
    from tests.unit.engine.cpu.jobs import meet

    monkeypatch.setattr(worker_pool, "PATIENCE", 0)
    workers, jobs = WorkerPool(2), 3
    for _ in range(100):
        tables = np.zeros((jobs, 4), dtype=np.int64)
        program = np.zeros((jobs, replay.LINE), dtype=np.int64)
        program[:, replay.FUNCTION], program[:, [replay.PARTS, replay.SIZE]] = address_of(meet), 2
        program[:, replay.TABLE] = tables.ctypes.data + tables.strides[0] * np.arange(jobs)
        workers.replay(program, rows=1)
        assert tables.all()


@with_kernels
def test_kernels_do_not_wait_for_a_member_that_is_busy_elsewhere(note: Callable[..., None]) -> None:
    """Its core has other work: the caller does all parts."""
    workers, begun, free = WorkerPool(2), threading.Event(), threading.Event()

    def other_work() -> None:
        begun.set()
        free.wait()

    workers._others[0].begin(other_work)
    begun.wait()
    table = array("q", [0] * PARTS)
    workers.run(note, table, PARTS, 2)
    free.set()
    assert list(table) == [1] * PARTS


ENDS = """
import torch
from outrider.engine.cpu.backend import matmul_type, preferred
from outrider.engine.cpu.worker_pool import WorkerPool

workers = WorkerPool(3)
product = matmul_type(preferred(torch.float32))(torch.ones(4096, 512), None, workers)
print(product(torch.ones(1, 512)).sum().item())
"""


@with_kernels
def test_a_process_may_end_right_after_a_job() -> None:
    """Members that still watch for the next one do not abort it."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{4096.0 * 512}\n", "")
