"""The drift detector: silent on steady streams, alarmed by falls that matter, and by nothing else."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.observing.drift import MAX_WATCHED, MIN_STEPS, TOLERANCE, DriftWatch, PageHinkley
from outrider.protocol.messages import Verdict


def feed(detector: PageHinkley, rate: float, steps: int, random: Random) -> list[int]:
    """Steps at which independent outcomes of a rate raised the alarm."""
    return [step for step in range(steps) if detector.observe(random.random() < rate).alarm]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
def test_a_steady_stream_raises_no_alarm(rate) -> None:
    """Chance alone is no drift, whatever the acceptance."""
    assert feed(PageHinkley(), rate, 20_000, Random(1)) == []


def test_a_fall_is_noticed_once() -> None:
    """0.7 to 0.5 is reported within some hundred steps; afterwards 0.5 is the new normal."""
    random, detector = Random(2), PageHinkley()
    feed(detector, 0.7, 2_000, random)
    alarms = feed(detector, 0.5, 5_000, random)
    assert len(alarms) == 1
    assert alarms[0] < 400


def test_a_slow_fall_is_noticed_too() -> None:
    """The mean that outcomes are compared with is over everything since the detector began."""
    random, detector = Random(3), PageHinkley()
    feed(detector, 0.7, 2_000, random)
    assert any(detector.observe(random.random() < 0.7 - step * 1e-4).alarm for step in range(2_500))


def test_neither_a_rise_nor_a_small_fall_is_reported() -> None:
    """A draft that fits better is no alarm, nor is one that is worse by less than the tolerance."""
    random, detector = Random(4), PageHinkley()
    feed(detector, 0.6, 2_000, random)
    assert feed(detector, 0.9, 2_000, random) == []
    random, detector = Random(5), PageHinkley()
    feed(detector, 0.7, 3_000, random)
    assert feed(detector, 0.7 - TOLERANCE / 2, 3_000, random) == []


def test_no_alarm_before_there_is_something_to_compare_with() -> None:
    """The first alarm comes no sooner than `MIN_STEPS`."""
    random, detector = Random(6), PageHinkley()
    alarms = [*feed(detector, 1.0, MIN_STEPS // 2, random)]
    assert alarms == []
    readings = [detector.observe(0.0) for _ in range(MIN_STEPS)]
    first = next(index for index, reading in enumerate(readings) if reading.alarm)
    assert first == MIN_STEPS - MIN_STEPS // 2 - 1
    assert readings[first].statistic == 1.0
    assert (readings[first + 1].statistic, readings[first + 1].steps) == (0.0, 1)


def test_tasks_and_replicas_are_watched_apart() -> None:
    """A draft that fits code no longer says nothing about prose, or about another draft."""
    watch, random = DriftWatch(), Random(7)
    alarms: dict[tuple[str, str], int] = {}
    for step in range(4_000):
        for key in (("code", "a"), ("code", "b"), ("prose", "a")):
            rate = 0.3 if key == ("code", "a") and step >= 2_000 else 0.7
            reading = watch.observe(*key, Verdict(1, 1, (1,), verified=3, accepted=random.random() < rate))
            alarms[key] = alarms.get(key, 0) + reading.alarm
    assert alarms == {("code", "a"): 1, ("code", "b"): 0, ("prose", "a"): 0}


def test_steps_without_nodes_of_a_draft_say_nothing() -> None:
    """Nothing was verified, or only what the verify service found by itself."""
    watch = DriftWatch()
    assert watch.observe("", "a", Verdict(1, 1, (1,))) is None
    assert watch.observe("", "a", Verdict(1, 1, (1,), verified=2, lookup_verified=2)) is None
    assert watch.observe("", "a", Verdict(1, 1, (1,), verified=3, lookup_verified=2)).steps == 1


def test_detectors_are_bounded() -> None:
    """Of more pairs than `MAX_WATCHED`, the one unused longest begins anew."""
    watch, verdict = DriftWatch(), Verdict(1, 1, (1,), verified=1)
    for number in range(MAX_WATCHED + 1):
        watch.observe("", str(number), verdict)
    assert watch.observe("", "1", verdict).steps == 2
    assert watch.observe("", "0", verdict).steps == 1
