"""Counts for how long sessions want and lack drafts, for the metrics and for the scaler."""

from __future__ import annotations

from dataclasses import dataclass, fields

from outrider.telemetry.instruments import DraftPoolInstruments


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums since the start of the process: seconds, and the counts `lags` and `steps`."""

    wanted_seconds: float = 0.0
    """Session time between verdicts in which drafts were wanted."""
    missing_seconds: float = 0.0
    """The part of `wanted_seconds` without an open draft replica."""
    idle_seconds: float = 0.0
    """The part of `wanted_seconds` in which the session waited and its target ran no step."""
    lag_seconds: float = 0.0
    """Sum of the times from a verdict to a draft's answer; `lags` is their number."""
    lags: int = 0
    step_seconds: float = 0.0
    """Sum of the times of verify steps for sessions that have a draft; `steps` is their number."""
    steps: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: Totals) -> Totals:
        return Totals(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})


class DraftLoad:
    """Sessions that want drafts now, and sums of how well drafts served them."""

    def __init__(self, instruments: DraftPoolInstruments) -> None:
        self.wanted = 0
        """Sessions that want a draft replica."""
        self.waiting = 0
        """Sessions that want a draft replica and have none open."""
        self._instruments = instruments
        self.totals = Totals()
        """The sums so far."""

    def want(self, change: int) -> None:
        """Add `change` to the number of sessions that want a draft."""
        self.wanted += change
        self._instruments.wanted.set(self.wanted)

    def wait(self, change: int) -> None:
        """Add `change` to the number of sessions that want a draft and have none open."""
        self.waiting += change
        self._instruments.waiting.set(self.waiting)

    def parked(self) -> None:
        """Count a session that gave its draft up because its verify replica wants none."""
        self._instruments.parkings.inc()

    def round(self, seconds: float, idle: float, missing: bool) -> None:
        """Count the time between two verdicts of a session that wants drafts; `missing`: it has none open."""
        self.totals.wanted_seconds += seconds
        self.totals.missing_seconds += seconds if missing else 0.0
        self.totals.idle_seconds += idle
        self._instruments.wanted_seconds.inc(seconds)
        self._instruments.missing_seconds.inc(seconds if missing else 0.0)
        self._instruments.idle_seconds.inc(idle)

    def step(self, seconds: float) -> None:
        """Count a verify step for a session that has a draft."""
        self.totals.step_seconds += seconds
        self.totals.steps += 1

    def answered(self, seconds: float) -> None:
        """Count a draft's answer: its first block that knows of a verdict came `seconds` after it."""
        self.totals.lag_seconds += seconds
        self.totals.lags += 1
        self._instruments.lag_seconds.observe(seconds)
