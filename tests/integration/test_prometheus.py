"""Every panel, alert and documented query, asked of a real Prometheus that scrapes services under load."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.dashboard_panels import DASHBOARDS
from scripts.document_metrics import TABLES, described
from tests.integration.client import Client, eventually
from tests.integration.cluster import ROOT, Process
from tests.integration.prometheus import Prometheus, needs, prometheus, write_rules
from tests.runbook import METRICS, blocks

CLIENTS = 3
SCRAPES = 12
"""After the load has begun, of every target."""
WINDOW = "1m"
TRACEPARENT = "00-5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e-00f067aa0ba902b7-01"
PANEL_QUERIES = [
    pytest.param(query.expression, id=f"{dashboard.name}: {panel.title}: {query.legend}")
    for dashboard in DASHBOARDS
    for row in dashboard.rows
    for panel in row.panels
    for query in panel.queries
]


@dataclass(frozen=True, slots=True)
class Watched:
    """The demo services after some seconds of load, and the Prometheus that saw it."""

    prometheus: Prometheus
    processes: list[Process]

    def pages(self) -> Iterator[str]:
        """The services' own pages."""
        for process in self.processes:
            with urlopen(process.ready["metrics"], timeout=5) as response:
                yield response.read().decode()


@pytest.fixture(scope="module")
def watched(demo, prompts, tmp_path_factory) -> Iterator[Watched]:
    """Load the demo services from several clients until Prometheus has scraped them often enough."""
    shadow = demo.cluster.serve("draft", kind="lookup", shadow=True, name="draft-shadow").wait_ready()
    drafts = ",".join((demo.draft("real"), shadow.endpoint))
    endpoint = (
        demo.cluster.serve("orchestrator", verify=demo.verify.endpoint, draft=drafts, shadow_share=1.0)
        .wait_ready()
        .endpoint
    )
    gateway = demo.cluster.serve("gateway", orchestrator=endpoint).wait_ready()
    replicas = {demo.verify.endpoint, demo.draft("real"), endpoint, gateway.endpoint}
    # Tests that ran before may have started one of them again at the address of a process that has ended.
    running = [process for process in demo.cluster.processes if process.ready and process.running]
    processes = [process for process in running if process.endpoint in replicas]
    targets = {
        f"outrider-{process.ready['service']}": process.ready["metrics"].split("/")[2]
        for process in processes
    }
    with prometheus(targets, tmp_path_factory.mktemp("prometheus")) as server:
        with load(endpoint, gateway.endpoint, prompts(20)):
            scraped = f"min(count_over_time(up[{WINDOW}])) >= {SCRAPES} and min(up) == 1 and count(up) == 4"
            eventually(lambda: server.query(scraped), "every service was scraped", 30)
        yield Watched(server, processes)


class load:  # noqa: N801 - reads as a verb
    """Clients that keep generating, under two traffic labels and one over HTTP, until the block ends."""

    def __init__(self, endpoint: str, url: str, prompts: list[list[int]]) -> None:
        self._endpoint = endpoint
        self._url = url
        self._prompts = prompts
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(CLIENTS)]
        self._threads.append(threading.Thread(target=self._run_http))

    def __enter__(self) -> None:
        Client(self._endpoint).generate(self._prompts[0], max_tokens=8, traceparent=TRACEPARENT)
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, index: int) -> None:
        client = Client(self._endpoint)
        task = ("code", "chat")[index % 2]
        while not self._over.is_set():
            for prompt in self._prompts:
                client.generate(prompt, max_tokens=24, task=task, temperature=0.5 * index)
                if self._over.is_set():
                    break
        client.close()

    def _run_http(self) -> None:
        body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 24}).encode()
        while not self._over.is_set():
            asked = Request(f"{self._url}/v1/completions", body, {"content-type": "application/json"})
            with urlopen(asked, timeout=60) as answer:
                answer.read()


def filled_in(expression: str) -> str:
    """A panel's query as Grafana would send it."""
    return expression.replace("$__rate_interval", WINDOW).replace("$job", ".+").replace("$instance", ".+")


@pytest.mark.parametrize("expression", PANEL_QUERIES)
def test_a_panel_shows_something(watched, expression) -> None:
    """The query is understood and answered with numbers."""
    values = watched.prometheus.query(filled_in(expression))
    assert [value for value in values if math.isfinite(value)], filled_in(expression)


def test_every_documented_query_is_understood(watched) -> None:
    """And answered, unless it asks for what did not happen."""
    silent = [
        query
        for query in blocks("promql", METRICS)
        if not watched.prometheus.query(query) and " > " not in query
    ]
    assert silent == []


def test_every_query_of_the_runbook_is_understood(watched) -> None:
    """And those that do not ask for trouble are answered."""
    silent = [query for query in blocks("promql") if not watched.prometheus.query(query)]
    assert [
        query for query in silent if " > " not in query and "== 0" not in query and "offset" not in query
    ] == []


def test_every_alert_is_evaluated(watched) -> None:
    """Prometheus finds no fault with a rule, and the series that it needs exist."""

    def groups() -> list[dict[str, object]]:
        return watched.prometheus.get("rules")["groups"]

    eventually(lambda: all(r["health"] == "ok" for g in groups() for r in g["rules"]), "all are evaluated")
    rules = [rule for group in groups() for rule in group["rules"]]
    assert len(rules) > 10
    names = {name for rule in rules for name in re.findall(r"\b(?:outrider_\w+|up)\b", rule["query"])}
    assert [name for name in names if not watched.prometheus.query(f"count({name})")] == []


def test_no_alert_fires_on_a_healthy_system(watched) -> None:
    """Pending is allowed: thresholds are for minutes, not for a moment of load."""
    assert watched.prometheus.query('ALERTS{alertstate="firing", severity="critical"}') == []


def test_services_export_what_the_page_lists(watched) -> None:
    """Names and types are those that docs/metrics.md is made from, neither more nor less."""
    exported = {
        (family.name + ("_total" if family.type == "counter" else ""), family.type)
        for page in watched.pages()
        for family in text_string_to_metric_families(page)
        if family.name.startswith("outrider_")
    }
    documented = {(metric.name, metric.kind) for service in TABLES for metric in described(service)}
    assert exported == documented


def test_a_slow_bucket_leads_to_a_trace(watched) -> None:
    """The histogram of first tokens carries the trace id of the sampled request."""
    found = watched.prometheus.get(
        "query_exemplars",
        query="outrider_orchestrator_time_to_first_token_seconds_bucket",
        start="2000-01-01T00:00:00Z",
        end="2100-01-01T00:00:00Z",
    )
    ids = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert TRACEPARENT.split("-")[1] in ids


def test_demand_ends_with_the_requests(watched) -> None:
    """When nothing runs, no session wants a draft or waits for one."""
    orchestrator = next(page for page in watched.pages() if "outrider_orchestrator" in page)
    assert "outrider_orchestrator_draft_sessions_wanted 0.0" in orchestrator
    assert "outrider_orchestrator_draft_sessions_waiting 0.0" in orchestrator


def test_efficiency_is_a_share(watched) -> None:
    """The target's step is a part of the round, and so is its idle time."""

    def share(part: str) -> float:
        (found,) = watched.prometheus.query(
            f"sum(outrider_verify_round_{part}_seconds_total) / sum(outrider_verify_round_seconds_total)"
        )
        return found

    efficiency, idle = share("busy"), share("idle")
    assert 0 < efficiency <= 1
    assert 0 <= idle < 1
    assert efficiency + idle <= 1.001


def test_the_rules_pass_their_unit_tests(tmp_path) -> None:
    """What fires, and what does not, on series made for it."""
    promtool = needs("promtool")
    rules = write_rules(tmp_path)
    tests = tmp_path / "alerts_test.yaml"
    shutil.copy(ROOT / "tests/integration/alerts_test.yaml", tests)
    for arguments in (("check", "rules", str(rules)), ("test", "rules", str(tests))):
        done = subprocess.run(
            [promtool, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test() -> None:
    """No rule is left out."""
    tested = set(re.findall(r"alertname: (\w+)", (ROOT / "tests/integration/alerts_test.yaml").read_text()))
    rules = set(re.findall(r"- alert: (\w+)", (ROOT / "k8s/components/alerts/rules.yaml").read_text()))
    assert tested == rules
