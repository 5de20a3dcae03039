"""Simulates how soon a fall of acceptance is noticed, and how often one is reported that was none.

    python -m benchmarks.drift

Outcomes are independent. False alarms are counted per 10,000 steps of a steady stream, delays in steps from
the beginning of the fall to the first alarm, over runs that begin with `BEFORE` steady steps. Alarms of real
services: `python -m benchmarks.learning`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import median, quantiles

from orchestrator.observing.drift import PageHinkley
from scripts.console import new_parser, run

BEFORE, STEADY = 2_000, 20_000
"""Steps of a stream before a fall, and of a stream without one."""
PATIENCE = 4_000
"""Steps after which a fall counts as missed."""
RATES = (0.3, 0.5, 0.7, 0.9)

Rate = Callable[[int], float]
"""Acceptance at a step, counted from the beginning of the fall."""
FALLS: dict[str, Rate] = {
    "0.7 to 0.5": lambda step: 0.5,
    "0.7 to 0.6": lambda step: 0.6,
    "0.7 to 0.65": lambda step: 0.65,
    "0.7 to 0.5 within 2,000 steps": lambda step: 0.7 - 0.2 * min(step / 2_000, 1.0),
    "0.9 to 0.8": lambda step: 0.8,
}


def false_alarms(rate: float, runs: int, random: Random) -> float:
    """Alarms per 10,000 steps of steady streams."""
    alarms = 0
    for _ in range(runs):
        detector = PageHinkley()
        alarms += sum(detector.observe(random.random() < rate).alarm for _ in range(STEADY))
    return alarms * 10_000 / (runs * STEADY)


def delays(before: float, fall: Rate, runs: int, random: Random) -> list[float]:
    """Steps to the first alarm after the fall; infinite where there was none in time."""
    return [_delay(before, fall, random) for _ in range(runs)]


def _delay(before: float, fall: Rate, random: Random) -> float:
    detector = PageHinkley()
    for _ in range(BEFORE):
        detector.observe(random.random() < before)
    for step in range(PATIENCE):
        if detector.observe(random.random() < fall(step)).alarm:
            return step + 1
    return float("inf")


def simulate(runs: int) -> None:
    """Print both tables."""
    random = Random(1)
    print(f"{'steady acceptance':32}{'false alarms per 10,000 steps':>30}")
    for rate in RATES:
        print(f"{rate:<32}{false_alarms(rate, runs, random):>30.3f}")
    print(f"\n{'fall':32}{'median steps':>14}{'95 % within':>14}{'missed':>10}")
    for name, fall in FALLS.items():
        found = delays(float(name[:3]), fall, runs, random)
        missed = sum(delay == float("inf") for delay in found) / runs
        print(f"{name:32}{median(found):>14.0f}{quantiles(found, n=20)[-1]:>14.0f}{missed:>10.1%}")


def main() -> int:
    """Print both tables."""
    parser = new_parser(__doc__)
    parser.add_argument("--runs", type=int, default=200, help="simulated streams per row")
    simulate(parser.parse_args().runs)
    return 0


if __name__ == "__main__":
    run(main)
