"""The virtual clock."""

from __future__ import annotations

import pytest

from simulator.timeline import Doorbell, Fiber, Timeline, current, pause


def test_events_happen_in_the_order_of_their_time():
    """Those of one time in the order in which they were made."""
    timeline, seen = Timeline(), []
    for time, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        timeline.at(time, lambda name=name: seen.append((timeline.now, name)))
    timeline.run()
    assert seen == [(1.0, "first"), (1.0, "second"), (2.0, "late")]


def test_a_run_ends_when_it_may():
    """What is due afterwards does not happen."""
    timeline, seen = Timeline(), []
    timeline.at(1.0, lambda: seen.append(1))
    timeline.at(2.0, lambda: seen.append(2))
    timeline.run(until=lambda: bool(seen))
    assert seen == [1]


def test_a_fiber_sleeps_while_time_passes():
    """Blocking code goes on where it paused."""
    timeline, seen = Timeline(), []

    def main():
        timeline.after(3.0, current())
        pause()
        seen.append(timeline.now)

    Fiber(main).resume()
    timeline.run()
    assert seen == [3.0]


def test_an_error_in_a_fiber_ends_the_run():
    """It is not swallowed."""
    timeline = Timeline()

    def main():
        raise ValueError("broken")

    timeline.at(1.0, Fiber(main).resume)
    with pytest.raises(ValueError, match="broken"):
        timeline.run()


@pytest.mark.parametrize(("ring_at", "woken_at"), [(1.0, 1.0), (9.0, 5.0)])
def test_a_doorbell_wakes_its_sleeper_or_time_does(ring_at, woken_at):
    """Whichever comes first."""
    timeline, seen = Timeline(), []
    bell = Doorbell(timeline)

    def main():
        bell.wait(5.0)
        seen.append(timeline.now)

    Fiber(main).resume()
    timeline.at(ring_at, bell.ring)
    timeline.run()
    assert seen == [woken_at]


def test_a_ring_while_the_fiber_is_awake_is_kept():
    """The next wait ends at once, the one after that does not."""
    timeline, seen = Timeline(), []
    bell = Doorbell(timeline)

    def main():
        bell.ring()
        for _ in range(2):
            bell.wait(5.0)
            seen.append(timeline.now)

    Fiber(main).resume()
    timeline.run()
    assert seen == [0.0, 5.0]


def test_an_old_alarm_does_not_end_a_later_sleep():
    """A ring before the time is up must not leave the alarm behind."""
    timeline, seen = Timeline(), []
    bell = Doorbell(timeline)

    def main():
        for seconds in (5.0, 10.0):
            bell.wait(seconds)
            seen.append(timeline.now)

    Fiber(main).resume()
    timeline.at(1.0, bell.ring)
    timeline.run()
    assert seen == [1.0, 11.0]
