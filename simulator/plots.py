"""Pictures of the capacity studies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("Agg")
Row = Mapping[str, Any]
"""One report, with its study and label."""
Point = tuple[float, float]
COLORS = {"auto": "#4a5fd0", "sequential": "#d9603b", "off": "#8a919e", "lockstep": "#2f9e77"}
NAMES = {
    "auto": "pipelined: 1 target + 1 draft device",
    "sequential": "sequential: 1 target + 1 draft device",
    "off": "no drafts",
    "lockstep": "both models on each device, in turns",
}
TITLES = {"h100-8b-1b": "8 B target on one H100", "h100-70b-1b": "70 B target on four H100"}


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw one picture per study in `rows`."""
    for study, picture in PICTURES.items():
        chosen = [row for row in rows if row["study"] == study]
        if chosen:
            picture(chosen, folder / f"capacity-{study}.svg")


def read(folder: Path) -> list[Row]:
    """The rows of all studies in a folder."""
    return [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())]


def _worth(rows: Sequence[Row], path: Path) -> None:
    """Latency and throughput per device by number of sessions, with a column per pair."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    values = {"ms per token": _latency, "tokens/s per device": _per_device}
    for place, ((name, value), profile) in enumerate(product(values.items(), TITLES), 1):
        axes = _panel(figure.add_subplot(2, 2, place), TITLES[profile], "sessions", name)
        here = [row for row in rows if row["profile"] == profile]
        for arm in dict.fromkeys(row["arm"] for row in here):
            chosen = [row for row in here if row["arm"] == arm]
            label = f"{NAMES[arm]} ({chosen[0]['devices']} devices)"
            points = [(row["sessions"], value(row)) for row in chosen]
            axes.plot(*zip(*points, strict=True), "o-", color=COLORS[arm], label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(fontsize=7)
    figure.savefig(path)


def _distance(rows: Sequence[Row], path: Path) -> None:
    """Latency by round trip, a panel per pair and load."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    for place, (sessions, profile) in enumerate(product((1, 16), TITLES), 1):
        title = f"{TITLES[profile]}, {sessions} sessions"
        axes = _panel(figure.add_subplot(2, 2, place), title, "round trip, ms", "ms per token")
        here = [row for row in rows if row["profile"] == profile and row["sessions"] == sessions]
        _arms(axes, here, ("auto", "sequential", "off"), lambda row: (1e3 * row["rtt"], _latency(row)))
    figure.savefig(path)


def _fan_out(rows: Sequence[Row], path: Path) -> None:
    """The cost of sharing a draft: speed of a target against the same target without drafts."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for place, profile in enumerate(TITLES, 1):
        names = "targets that share one draft device", "speed against no drafts"
        axes = _panel(figure.add_subplot(1, 2, place), TITLES[profile], *names)
        here = [row for row in rows if row["profile"] == profile]
        alone = {row["sessions"]: row for row in here if row["arm"] == "off"}
        for each, base in alone.items():
            chosen = [row for row in here if row["label"] == str(each)]
            points = [(row["verify_replicas"], _latency(base) / _latency(row)) for row in chosen]
            axes.plot(*zip(*points, strict=True), "o-", label=f"{each} sessions per target")
        axes.axhline(1.0, color=COLORS["off"], linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    figure.savefig(path)


def _host(rows: Sequence[Row], path: Path) -> None:
    """Throughput by the processor time of the services' own code."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for place, sessions in enumerate((16, 256), 1):
        title = f"8 B target on one H100, {sessions} sessions"
        axes = _panel(figure.add_subplot(1, 2, place), title, "host time against today's", "tokens/s")
        here = [row for row in rows if row["sessions"] == sessions]
        _arms(axes, here, ("auto", "off"), lambda row: (float(row["label"]), row["tokens_per_second"]))
    figure.savefig(path)


def _panel(axes: Axes, title: str, x: str, y: str) -> Axes:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.grid(alpha=0.3)
    return axes


def _arms(axes: Axes, rows: Sequence[Row], arms: Sequence[str], point: Callable[[Row], Point]) -> None:
    """A line per arm; the axis begins at zero."""
    for arm in arms:
        points = [point(row) for row in rows if row["arm"] == arm]
        label = NAMES[arm].partition(":")[0]
        axes.plot(*zip(*points, strict=True), "o-", color=COLORS[arm], label=label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _latency(row: Row) -> float:
    return 1e3 * float(row["per_token_p50"])


def _per_device(row: Row) -> float:
    return float(row["tokens_per_second_per_device"])


PICTURES: Mapping[str, Callable[[Sequence[Row], Path], None]] = {
    "worth": _worth,
    "distance": _distance,
    "fan-out": _fan_out,
    "host": _host,
}
