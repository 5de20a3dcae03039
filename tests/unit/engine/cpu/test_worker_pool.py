"""Threads that share the work of a forward."""

from __future__ import annotations

import threading

import pytest
import torch

from outrider.engine.cpu.worker_pool import HELPED_ROWS, WorkerPool
from outrider.protocol.errors import ConfigError


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


def test_a_room_that_grows_takes_the_place_of_smaller_ones() -> None:
    """Long texts leave no rooms of shorter ones behind; each member has its own bytes."""
    workers = WorkerPool(2)
    sizes = [100, 1 << 12, 70_000, 65]
    rooms = [workers.room_that_grows(size) for size in sizes]
    assert rooms[3] == rooms[2]
    assert rooms[2][1] - rooms[2][0] == 1 << 17
    assert all(room % 64 == 0 for room in rooms[2])
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
