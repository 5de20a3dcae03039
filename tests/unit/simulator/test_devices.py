"""Accelerators, shared cores, event loops."""

from __future__ import annotations

import pytest

from simulator.devices import COOLING_SECONDS, Accelerator, Core, Floating, Thread, work, work_shared
from simulator.timeline import Fiber, Timeline


def ends(timeline, device, jobs):
    """When each (start, seconds) is done."""
    done = {}
    for name, (start, seconds) in enumerate(jobs):
        timeline.at(
            start,
            lambda name=name, seconds=seconds: device.submit(
                seconds, lambda: done.__setitem__(name, timeline.now)
            ),
        )
    timeline.run()
    return [done[name] for name in range(len(jobs))]


def test_an_accelerator_does_one_thing_after_the_other():
    """Work that comes meanwhile waits."""
    timeline = Timeline()
    device = Accelerator(timeline)
    assert ends(timeline, device, [(0.0, 2.0), (1.0, 2.0), (9.0, 1.0)]) == [2.0, 4.0, 10.0]


def test_a_core_is_shared_equally():
    """Two jobs at once go at half speed, the shorter one leaves the rest to the longer."""
    timeline = Timeline()
    assert ends(timeline, Core(timeline), [(0.0, 1.0), (0.0, 2.0)]) == [2.0, 3.0]


def test_a_job_that_joins_slows_the_one_that_runs():
    """One second alone, then two seconds at half speed."""
    timeline = Timeline()
    assert ends(timeline, Core(timeline), [(0.0, 2.0), (1.0, 1.0)]) == [3.0, 3.0]


def test_floating_work_takes_the_core_with_less_to_do():
    """A pinned job keeps its core to itself while the other one is free."""
    timeline = Timeline()
    cores = [Core(timeline), Core(timeline)]
    cores[0].submit(10.0, lambda: None)
    assert ends(timeline, Floating(cores), [(0.0, 1.0), (5.0, 1.0)]) == [1.0, 6.0]


def test_a_thread_does_its_jobs_in_order():
    """A short job does not pass a long one of the same thread, though the core is shared."""
    timeline, seen = Timeline(), []
    thread = Thread(timeline, Core(timeline))
    thread.do(2.0, lambda: seen.append(("long", timeline.now)))
    thread.do(0.5, lambda: seen.append(("short", timeline.now)))
    timeline.run()
    assert seen == [("long", 2.0), ("short", 2.5)]


def test_a_fiber_works_on_a_device():
    """It goes on when the work is done; no work takes no time."""
    timeline, seen = Timeline(), []
    device = Accelerator(timeline)

    def main():
        for seconds in (1.5, 0.0):
            work(device, seconds)
            seen.append(timeline.now)

    Fiber(main).resume()
    timeline.run()
    assert seen == [1.5, 1.5]


def test_a_thread_that_paused_begins_cold():
    """The first job after a pause takes longer, after half of one half as much, behind another not at all."""
    timeline, seen = Timeline(), []
    thread = Thread(timeline, Core(timeline), rewarm=0.004)

    def note():
        seen.append(timeline.now)

    thread.do(1.0, note)
    thread.do(1.0, note)
    timeline.run()
    timeline.after(COOLING_SECONDS / 2, lambda: thread.do(1.0, note))
    timeline.run()
    assert seen == pytest.approx([1.004, 2.004, 3.006 + COOLING_SECONDS / 2])


def share(timeline, devices, seconds):
    """When work that devices share is done."""
    done = []

    def main():
        work_shared(devices, seconds)
        done.append(timeline.now)

    timeline.at(0.0, Fiber(main).resume)
    timeline.run()
    return done[0]


def test_shared_work_takes_half_as_long_on_two_cores():
    """Neither waits for the other."""
    timeline = Timeline()
    assert share(timeline, [Core(timeline), Core(timeline)], 2.4) == pytest.approx(1.2)


def test_a_busy_core_takes_fewer_parts():
    """The free one does most; together they are quicker than one, and slower than two."""
    timeline = Timeline()
    busy = Core(timeline)
    for _ in range(3):
        busy.submit(100.0, lambda: None)
    assert 2.4 * 24 / 30 <= share(timeline, [Core(timeline), busy], 2.4) < 2.2
