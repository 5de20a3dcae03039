"""Pictures of the capacity studies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("Agg")
Row = Mapping[str, Any]
"""One report, with its study and label."""
COLORS = {"auto": "#4a5fd0", "sequential": "#d9603b", "off": "#8a919e", "lockstep": "#2f9e77"}
NAMES = {
    "auto": "pipelined: 1 target + 1 draft device",
    "sequential": "sequential: 1 target + 1 draft device",
    "off": "no drafts",
    "lockstep": "both models on each device, in turns",
}
TITLES = {"h100-8b-1b": "8 B target on one H100", "h100-70b-1b": "70 B target on four H100"}


def draw(rows: Sequence[Row], folder: Path) -> None:
    """One picture per study that `rows` has."""
    for study, picture in PICTURES.items():
        chosen = [row for row in rows if row["study"] == study]
        if chosen:
            picture(chosen, folder / f"capacity-{study}.svg")


def read(folder: Path) -> list[Row]:
    """The rows of all studies in a folder."""
    return [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())]


def _worth(rows: Sequence[Row], path: Path) -> None:
    """Latency and throughput per device by sessions, a column per pair."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    for column, profile in enumerate(TITLES):
        here = [row for row in rows if row["profile"] == profile]
        for line, (axis, value) in enumerate(
            (("ms per token", _latency), ("tokens/s per device", _per_device))
        ):
            axes = figure.add_subplot(2, 2, 1 + column + 2 * line)
            for arm in dict.fromkeys(row["arm"] for row in here):
                chosen = [row for row in here if row["arm"] == arm]
                devices = chosen[0]["devices"]
                axes.plot(
                    [row["sessions"] for row in chosen],
                    [value(row) for row in chosen],
                    "o-",
                    color=COLORS[arm],
                    label=f"{NAMES[arm]} ({devices} devices)",
                )
            _label(axes, "sessions" if line else "", axis)
            axes.set_xscale("log")
            axes.set_yscale("log")
            if line == 0:
                axes.set_title(TITLES[profile], fontsize=10)
                axes.legend(fontsize=7)
    figure.savefig(path)


def _distance(rows: Sequence[Row], path: Path) -> None:
    """Latency by round trip, a panel per pair and load."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    panels = [(profile, sessions) for sessions in (1, 16) for profile in TITLES]
    for place, (profile, sessions) in enumerate(panels, 1):
        axes = figure.add_subplot(2, 2, place)
        here = [row for row in rows if row["profile"] == profile and row["sessions"] == sessions]
        for arm in ("auto", "sequential", "off"):
            chosen = [row for row in here if row["arm"] == arm]
            axes.plot(
                [1e3 * row["rtt"] for row in chosen],
                [_latency(row) for row in chosen],
                "o-",
                color=COLORS[arm],
                label=NAMES[arm].partition(":")[0],
            )
        axes.set_title(f"{TITLES[profile]}, {sessions} sessions", fontsize=10)
        axes.set_ylim(bottom=0)
        _label(axes, "round trip, ms", "ms per token")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path)


def _fan_out(rows: Sequence[Row], path: Path) -> None:
    """What sharing a draft costs: speed of a target against the same target without drafts."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for place, profile in enumerate(TITLES, 1):
        axes = figure.add_subplot(1, 2, place)
        here = [row for row in rows if row["profile"] == profile]
        alone = {row["sessions"]: row for row in here if row["arm"] == "off"}
        for each, base in alone.items():
            chosen = [row for row in here if row["label"] == str(each)]
            axes.plot(
                [row["verify_replicas"] for row in chosen],
                [base["per_token_p50"] / row["per_token_p50"] for row in chosen],
                "o-",
                label=f"{each} sessions per target",
            )
        axes.axhline(1.0, color=COLORS["off"], linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_title(TITLES[profile], fontsize=10)
        axes.set_ylim(bottom=0)
        _label(axes, "targets that share one draft device", "speed against no drafts")
        axes.legend(fontsize=8)
    figure.savefig(path)


def _host(rows: Sequence[Row], path: Path) -> None:
    """Throughput by the processor time of the services' own code."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for place, sessions in enumerate((16, 256), 1):
        axes = figure.add_subplot(1, 2, place)
        for arm in ("auto", "off"):
            chosen = [row for row in rows if row["arm"] == arm and row["sessions"] == sessions]
            axes.plot(
                [float(row["label"]) for row in chosen],
                [row["tokens_per_second"] for row in chosen],
                "o-",
                color=COLORS[arm],
                label=NAMES[arm].partition(":")[0],
            )
        axes.set_title(f"8 B target on one H100, {sessions} sessions", fontsize=10)
        axes.set_ylim(bottom=0)
        _label(axes, "host time against today's", "tokens/s")
        axes.legend(fontsize=8)
    figure.savefig(path)


def _latency(row: Row) -> float:
    return 1e3 * float(row["per_token_p50"])


def _per_device(row: Row) -> float:
    return float(row["tokens_per_second_per_device"])


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.grid(alpha=0.3)


PICTURES: Mapping[str, Callable[[Sequence[Row], Path], None]] = {
    "worth": _worth,
    "distance": _distance,
    "fan-out": _fan_out,
    "host": _host,
}
