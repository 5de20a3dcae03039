"""Draws pictures of the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.calibration import Bin
from benchmarks.report import ResultRow
from benchmarks.samples import Spread

mpl.use("Agg")
SMOOTH = 30
"""Requests whose mean is one point of a curve over time."""
GOOD_COLOR, BAD_COLOR = "#4a5fd0", "#d9603b"


def draw_load(
    rows: Sequence[ResultRow], calibration: Mapping[str, Sequence[Bin]], title: str, path: Path
) -> None:
    """Speed against OFF and verified nodes over concurrency, and predicted against observed acceptance."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    speed, nodes, trust = figure.subplots(1, 3)
    arms = [arm for arm in dict.fromkeys(row.arm for row in rows) if arm != "off"]
    for arm, color in zip(arms, (GOOD_COLOR, BAD_COLOR), strict=True):
        mine = [row for row in rows if row.arm == arm]
        concurrency = [row.cell.concurrency for row in mine]
        ratios = [row.against_off or Spread(0.0, 0.0, 0.0) for row in mine]
        speed.plot(concurrency, [ratio.middle for ratio in ratios], "o-", color=color, label=arm)
        lows, highs = [ratio.low for ratio in ratios], [ratio.high for ratio in ratios]
        speed.fill_between(concurrency, lows, highs, color=color, alpha=0.2)
        verified = [row.figures["verified"].middle for row in mine]
        nodes.plot(concurrency, verified, "o-", color=color, label=arm)
    speed.axhline(1.0, color="#888", linewidth=1)
    _label(speed, "requests at once", "tokens/s against OFF", log=True)
    _label(nodes, "requests at once", "nodes verified per session and step", log=True)
    for (draft, bins), color in zip(calibration.items(), (GOOD_COLOR, BAD_COLOR), strict=True):
        sizes = [4 + 2 * one.nodes**0.5 for one in bins]
        trust.scatter(
            [one.predicted for one in bins], [one.observed for one in bins], sizes, color, label=draft
        )
    trust.plot([0, 1], [0, 1], color="#888", linewidth=1)
    _label(trust, "estimated probability of a verified node", "share accepted", log=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)


def draw_learning(events: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Acceptance over requests, as a mean over `SMOOTH` of them, and what happened when."""
    requests = [event for event in events if event["kind"] == "request"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panel = figure.subplots()
    panel.plot(smoothed(requests), color=GOOD_COLOR)
    for count, happened in marks(events).items():
        panel.axvline(count, color=BAD_COLOR, linewidth=0.8)
        text, place = ", ".join(happened), ("data", "axes fraction")
        panel.annotate(text, (count, 1.0), xycoords=place, rotation=90, va="top", fontsize=8)
    panel.set_xlabel("requests", fontsize=9)
    panel.set_ylabel("steps that accepted a candidate", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def marks(events: Sequence[Mapping[str, Any]]) -> dict[int, list[str]]:
    """Events, and beginnings of phases, by the number of requests before them."""
    found: dict[int, list[str]] = {}
    count, phase = 0, ""
    for event in events:
        if event["kind"] != "request":
            found.setdefault(count, []).append(event["kind"])
            continue
        if event["phase"] != phase:
            phase = event["phase"]
            found.setdefault(count, []).append(phase)
        count += 1
    return found


def smoothed(requests: Sequence[Mapping[str, Any]]) -> list[float]:
    """The acceptance of each request and those before it, `SMOOTH` in all."""
    found = []
    for last in range(1, len(requests) + 1):
        some = requests[max(0, last - SMOOTH) : last]
        found.append(sum(one["accepted"] for one in some) / max(1, sum(one["steps"] for one in some)))
    return found


def _label(panel: Axes, x: str, y: str, *, log: bool) -> None:
    if log:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
    panel.set_xlabel(x, fontsize=9)
    panel.set_ylabel(y, fontsize=9)
    panel.legend(fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
