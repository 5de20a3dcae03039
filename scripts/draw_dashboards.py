"""Draw the dashboards' panels from what a Prometheus holds: `python -m scripts.draw_dashboards --minutes 5`.

A look at the panels where no Grafana is at hand; the queries are the dashboards' own.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from scripts.dashboard_panels import DASHBOARDS, Dashboard, Panel, Query

COLUMNS = 3
POINTS = 150
MAX_LINES = 8
"""In a legend."""
UNITS = {
    "percentunit": lambda value: f"{100 * value:.3g} %",
    "s": lambda value: f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s",
    "bytes": lambda value: f"{value / 2**20:.0f} MiB",
    "ops": lambda value: f"{value:.3g}/s",
    "reqps": lambda value: f"{value:.3g}/s",
    "short": lambda value: f"{value:.3g}",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One line: seconds before the end, and values."""

    name: str
    times: list[float]
    values: list[float]


@dataclass(frozen=True, slots=True)
class Source:
    """A Prometheus, and the time that is drawn."""

    url: str
    seconds: float
    window: str
    """What `$__rate_interval` stands for."""
    end: float

    def range(self, query: Query) -> list[Series]:
        """The lines of a query over the time drawn."""
        step = self.seconds / POINTS
        found = self._get("query_range", query, start=self.end - self.seconds, end=self.end, step=step)
        return [self._series(query, entry["metric"], entry["values"]) for entry in found]

    def instant(self, query: Query) -> list[Series]:
        """The values of a query at the end."""
        found = self._get("query", query, time=self.end)
        return [self._series(query, entry["metric"], [entry["value"]]) for entry in found]

    def _get(self, path: str, query: Query, **parameters: float) -> list[dict[str, Any]]:
        expression = query.expression.replace("$__rate_interval", self.window)
        expression = expression.replace("$job", ".+").replace("$instance", ".+")
        address = f"{self.url}/api/v1/{path}?{urlencode({'query': expression, **parameters})}"
        with urlopen(address, timeout=30) as response:
            return list(json.load(response)["data"]["result"])

    def _series(self, query: Query, labels: dict[str, str], points: list[tuple[float, str]]) -> Series:
        name = query.legend
        for label, value in labels.items():
            name = name.replace("{{" + label + "}}", value)
        return Series(name, [at - self.end for at, _ in points], [float(value) for _, value in points])


def draw(dashboard: Dashboard, source: Source) -> Figure:
    """All panels of a dashboard, row by row."""
    panels = [panel for row in dashboard.rows for panel in row.panels]
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(6 * COLUMNS, 3 * rows), layout="constrained")
    figure.suptitle(f"Outrider / {dashboard.title}", fontsize=14)
    grid = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for panel, axes in zip(panels, grid, strict=False):
        _draw_panel(panel, axes, source)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def _draw_panel(panel: Panel, axes: Axes, source: Source) -> None:
    axes.set_title(panel.title, fontsize=10)
    axes.tick_params(labelsize=7)
    if panel.kind == "bargauge":
        _draw_bars(panel, axes, source)
        return
    lines = [line for query in panel.queries for line in sorted(source.range(query), key=lambda s: s.name)]
    if panel.stacked and lines:
        at = max((line.times for line in lines), key=len)
        columns = [dict(zip(line.times, line.values, strict=True)) for line in lines]
        values = [[column.get(time, 0.0) for time in at] for column in columns]
        axes.stackplot(at, values, labels=[line.name for line in lines], alpha=0.6)
    else:
        for line in lines:
            axes.plot(line.times, line.values, label=line.name, linewidth=1)
    axes.set_xlim(-source.seconds, 0)
    axes.set_ylim(bottom=0)
    if panel.unit == "percentunit":
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.02))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: UNITS[panel.unit](value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles[:MAX_LINES], labels[:MAX_LINES], fontsize=6, loc="lower left", ncols=2)


def _draw_bars(panel: Panel, axes: Axes, source: Source) -> None:
    bars = sorted((line.name, line.values[0]) for query in panel.queries for line in source.instant(query))
    finite = [(name, value) for name, value in bars if math.isfinite(value)]
    colors = ["tab:blue" if index % 2 else "tab:orange" for index in range(len(finite))]
    axes.barh([name for name, _ in finite], [value for _, value in finite], color=colors)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: UNITS[panel.unit](value)))
    axes.invert_yaxis()


def main() -> None:
    """Draw every dashboard into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--window", default="1m", help="what $__rate_interval stands for")
    parser.add_argument("--out", type=Path, default=Path("out/dashboards"))
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    source = Source(flags.prometheus, 60 * flags.minutes, flags.window, time.time())
    for dashboard in DASHBOARDS:
        draw(dashboard, source).savefig(flags.out / f"{dashboard.name}.png", dpi=80)


if __name__ == "__main__":
    main()
