"""Dashboards, metrics page, alerts and runbook agree with the instruments and with each other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from outrider.config import DraftConfig, GatewayConfig, OrchestratorConfig, VerifyConfig
from scripts import dashboards, document_metrics
from scripts.dashboard_panels import DASHBOARDS, Dashboard, Panel
from scripts.document_metrics import TABLES, described
from scripts.promql import Promql
from tests.runbook import METRICS, RUNBOOK, blocks
from tests.unit.test_architecture import ROOT

KNOWN = {metric.name for service in TABLES for metric in described(service)}
SERVICES = {
    "VERIFY": VerifyConfig,
    "DRAFT": DraftConfig,
    "ORCHESTRATOR": OrchestratorConfig,
    "GATEWAY": GatewayConfig,
}
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "k8s/components/alerts/rules.yaml").read_text())["spec"]["groups"]
    for rule in group["rules"]
]
UNITS = {"bytes", "ops", "percentunit", "reqps", "s", "short"}
PANELS = [
    pytest.param(panel, id=f"{dashboard.name}: {panel.title}")
    for dashboard in DASHBOARDS
    for row in dashboard.rows
    for panel in row.panels
]


def used(expression: str) -> set[str]:
    """Our metrics in an expression; of a histogram, the metric itself."""
    names = set(re.findall(r"\boutrider_\w+", expression))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_the_metrics_page_is_current() -> None:
    """docs/metrics.md is what `make docs` would write now."""
    assert document_metrics.PAGE.read_text(encoding="utf-8") == document_metrics.page(), "run `make docs`"


def test_the_metrics_page_names_every_metric() -> None:
    """In the table of its service, or in one of several services."""
    rows = set(re.findall(r"^- `(outrider_\w+)", METRICS, re.M))
    names = rows | {row.replace("SERVICE", service) for row in rows for service in TABLES}
    assert names >= KNOWN


def test_the_metrics_pages_queries_ask_for_metrics_that_exist() -> None:
    """Those of the blocks; that they are understood is tested with a real Prometheus."""
    queries = blocks("promql", METRICS)
    assert len(queries) > 5
    assert [query for query in queries if not used(query) <= KNOWN] == []


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_the_dashboards_are_current(dashboard: Dashboard) -> None:
    """The JSON files are what `make docs` would write now."""
    path = dashboards.FOLDER / f"{dashboard.name}.json"
    assert path.read_text(encoding="utf-8") == dashboards.render(dashboard), "run `make docs`"


def test_every_dashboard_is_delivered() -> None:
    """The component makes a labelled ConfigMap of each file."""
    component = yaml.safe_load((dashboards.FOLDER / "kustomization.yaml").read_text())
    generated = {file: entry for entry in component["configMapGenerator"] for file in entry["files"]}
    assert set(generated) == {f"{dashboard.name}.json" for dashboard in DASHBOARDS}
    assert all(entry["options"]["labels"]["grafana_dashboard"] == "1" for entry in generated.values())


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_explains_itself(panel: Panel) -> None:
    """It has a title, a description and a unit, and asks only for metrics that exist."""
    assert panel.title
    assert panel.description.endswith(".")
    assert panel.unit in UNITS
    for query in panel.queries:
        assert query.legend
        assert used(query.expression) <= KNOWN


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_obeys_the_variables(panel: Panel) -> None:
    """Every series is restricted to the chosen jobs and instances, and rates fit the zoom."""
    for query in panel.queries:
        series = re.findall(r"\b(?:outrider|process)_\w+(.?)", query.expression)
        assert series
        assert set(series) == {"{"}
        assert query.expression.count('job=~"$job", instance=~"$instance"') == len(series)
        assert set(re.findall(r"\[(.*?)\]", query.expression)) <= {"$__rate_interval"}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_panels_do_not_overlap(dashboard: Dashboard) -> None:
    """Ids are unique, and every cell of Grafana's grid belongs to one panel at most."""
    panels = json.loads(dashboards.render(dashboard))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < dashboards.COLUMNS
        taken |= cells


@pytest.mark.parametrize(
    ("short", "query"),
    [
        (
            "v:hits_total / v:steps_total by task",
            'sum by (task) (rate(outrider_verify_hits_total{a="b"}[1m]))'
            ' / sum by (task) (rate(outrider_verify_steps_total{a="b"}[1m]))',
        ),
        (
            "1 - mean d:lag_seconds",
            '1 - sum(rate(outrider_draft_lag_seconds_sum{a="b"}[1m]))'
            ' / sum(rate(outrider_draft_lag_seconds_count{a="b"}[1m]))',
        ),
        (
            "p95 d:step_seconds",
            'histogram_quantile(0.95, sum by (le) (rate(outrider_draft_step_seconds_bucket{a="b"}[1m])))',
        ),
        ("v:pages_used", 'sum(outrider_verify_pages_used{a="b"})'),
        ("max o:replicas > 0 by kind", 'max by (kind) (outrider_orchestrator_replicas{a="b"}) > 0'),
        ('o:hits_total{task="x"}', 'sum(rate(outrider_orchestrator_hits_total{a="b",task="x"}[1m]))'),
    ],
)
def test_a_query_can_be_written_short(short: str, query: str) -> None:
    """A metric stands for what is usually asked of its kind; ratios are of summed rates."""
    assert Promql("1m", 'a="b"').expand(short) == query


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_runbook_entry(rule: dict[str, Any]) -> None:
    """What it means, what to look at, what to do; and it asks only for metrics that exist."""
    entry = RUNBOOK.partition(f"### {rule['alert']}\n")[2].partition("\n##")[0]
    assert [part for part in ("**Means:**", "**Look at:**", "**Do:**") if part not in entry] == []
    assert "```promql" in entry or "```sh" in entry
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"]
    assert used(rule["expr"]) <= KNOWN


def test_the_runbook_names_no_alert_that_is_gone() -> None:
    """Its entries are the alerts."""
    assert set(re.findall(r"^### (\w+)$", RUNBOOK, re.M)) == {rule["alert"] for rule in RULES}


def test_the_runbook_refers_to_its_own_entries() -> None:
    """ "As for ..." leads somewhere."""
    assert set(re.findall(r"\bOutrider[A-Z]\w+", RUNBOOK)) == {rule["alert"] for rule in RULES}


def test_the_runbooks_queries_ask_for_metrics_that_exist() -> None:
    """Those of the blocks; that they are understood is tested with a real Prometheus."""
    queries = blocks("promql")
    assert len(queries) > 30
    assert [query for query in queries if not used(query) <= KNOWN] == []


def test_the_runbook_names_settings_and_log_lines_that_exist() -> None:
    """A setting is a field of its service's class; an event is in the source of a service."""
    settings = re.findall(r"OUTRIDER_([A-Z]+)_(\w+)", RUNBOOK)
    assert [pair for pair in settings if pair[1].lower() not in SERVICES[pair[0]].model_fields] == []
    sources = [ROOT / package for package in ("orchestrator", "verify_service", "draft_service", "outrider")]
    source = "".join(path.read_text() for folder in sources for path in folder.rglob("*.py"))
    events = re.findall(r'\.event == "(.+?)"', RUNBOOK)
    assert len(events) > 3
    assert [event for event in events if f'"{event}"' not in source] == []


def test_the_runbook_names_panels_that_exist() -> None:
    """*Dashboard → Panel* leads somewhere."""
    titles = {
        (dashboard.title, panel.title)
        for dashboard in DASHBOARDS
        for row in dashboard.rows
        for panel in row.panels
    }
    named = re.findall(r"\*(\w+) → ([^*]+)\*", " ".join(RUNBOOK.split()))
    assert len(named) > 10
    assert [pair for pair in named if pair not in titles] == []
