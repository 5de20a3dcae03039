"""Write the Grafana dashboards: `python -m scripts.dashboards`.

`scripts.dashboard_panels` says what they show; this module converts it to Grafana's JSON, which follows the
dashboard model of Grafana 11 and later (schema version 39) and the rules of grafana/dashboard-linter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from scripts.child import ROOT
from scripts.console import new_parser
from scripts.dashboard_panels import DASHBOARDS, Dashboard, Panel, PanelRow

FOLDER = ROOT / "k8s/components/dashboards"
SCHEMA_VERSION = 39
COLUMNS, HEIGHT = 24, 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN_DATASOURCE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
}


def render(dashboard: Dashboard) -> str:
    """One dashboard as a file, with a line for each of its fields and panels."""
    fields = model(dashboard)
    panels = ",\n".join(json.dumps(panel) for panel in fields.pop("panels"))
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    return "{\n" + ",\n".join([*lines, f'"panels": [\n{panels}\n]']) + "\n}\n"


def model(dashboard: Dashboard) -> dict[str, Any]:
    """One dashboard as Grafana's JSON model."""
    return {
        "uid": f"outrider-{dashboard.name}",
        "title": f"Outrider / {dashboard.title}",
        "description": dashboard.description,
        "tags": ["outrider"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [CHOSEN_DATASOURCE, _variable("job"), _variable("instance")]},
        "links": [_link()],
        "annotations": {"list": [_drift_annotation()]},
        "panels": list(_panels(dashboard.rows)),
    }


def _panels(rows: tuple[PanelRow, ...]) -> Iterator[dict[str, Any]]:
    """Row headers and their panels, laid out from left to right."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield _header(number, row.title, y)
        y += 1
        x = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            number += 1
            yield _panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": HEIGHT})
            x += panel.width
        y += HEIGHT


def _header(number: int, title: str, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        "panels": [],
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [_target(index, panel) for index in range(len(panel.queries))],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.unit == "percentunit":
        defaults["max"] = 1
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": stacking,
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "basic"}


def _target(index: int, panel: Panel) -> dict[str, Any]:
    query = panel.queries[index]
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        "range": panel.kind == "timeseries",
        "instant": panel.kind != "timeseries",
        "exemplar": panel.exemplars,
    }


def _variable(name: str) -> dict[str, Any]:
    """A variable to choose jobs or instances, among those that export our metrics."""
    chosen = 'job=~"$job", ' if name == "instance" else ""
    gauges = "gateway_requests_running|orchestrator_requests_running|verify_sessions|draft_sessions"
    selector = f'{{{chosen}__name__=~"outrider_({gauges})"}}'
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({selector}, {name})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _link() -> dict[str, Any]:
    """A link to the other dashboards, which keeps the time range and the variables."""
    return {
        "type": "dashboards",
        "title": "Outrider",
        "tags": ["outrider"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }


def _drift_annotation() -> dict[str, Any]:
    """A mark at times at which a fall of acceptance was detected."""
    return {
        "name": "Drift",
        "enable": True,
        "iconColor": "orange",
        "datasource": DATASOURCE,
        "expr": "sum by (task, draft) (increase(outrider_orchestrator_drifts_total[1m])) > 0",
        "titleFormat": "Acceptance has fallen",
        "textFormat": "task {{task}}, draft {{draft}}",
    }


def main() -> None:
    """Write all dashboards."""
    new_parser(__doc__).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(render(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
