"""Pictures of the dashboards, from a Prometheus that answers the same to everything."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from scripts.dashboard_panels import DASHBOARDS, Query
from scripts.draw_dashboards import Source, draw


@dataclass(frozen=True, slots=True)
class FixedSource(Source):
    """Two series, one of them with a gap and a value that is no number."""

    def _get(self, path: str, query: Query, **parameters: float) -> list[dict[str, object]]:
        points = [(90.0, "1"), (95.0, "NaN"), (100.0, "3")]
        if path == "query":
            return [{"metric": {"bucket": "0.5"}, "value": points[2]}]
        return [{"metric": {"task": "code"}, "values": points}, {"metric": {}, "values": points[2:]}]


SOURCE = FixedSource("", seconds=60, window="1m", end=100.0)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_panel_is_drawn(dashboard) -> None:
    """Under its title; what is left of the grid stays empty."""
    figure = draw(dashboard, SOURCE)
    figure.canvas.draw()
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert titles == [panel.title for row in dashboard.rows for panel in row.panels]


def test_legends_name_the_series() -> None:
    """Labels are filled in, and times count back from the end."""
    first, second = SOURCE.range(Query("up", "{{task}} at work"))
    assert (first.name, first.times, first.values[2]) == ("code at work", [-10.0, -5.0, 0.0], 3.0)
    assert second.times == [0.0]
