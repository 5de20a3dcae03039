"""Write docs/metrics.md from the instruments: `python -m scripts.document_metrics`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from prometheus_client import CollectorRegistry

from orchestrator.gateway.instruments import GatewayInstruments
from outrider.telemetry.instruments import DraftInstruments, OrchestratorInstruments, VerifyInstruments
from outrider.telemetry.metric_parts import MAX_DRAFTS, MAX_POSITION, MAX_TASKS, Described
from outrider.telemetry.request_metrics import MAX_MODELS
from scripts.child import ROOT
from scripts.console import new_parser
from scripts.promql import Promql

PAGE = ROOT / "docs/metrics.md"
Instruments = GatewayInstruments | OrchestratorInstruments | VerifyInstruments | DraftInstruments
TABLES: dict[str, Callable[[CollectorRegistry], Instruments]] = {
    "gateway": GatewayInstruments,
    "orchestrator": OrchestratorInstruments,
    "verify": VerifyInstruments,
    "draft": DraftInstruments,
}
HEADINGS = {
    "gateway": "Gateway",
    "orchestrator": "Orchestrator",
    "verify": "Verify service",
    "draft": "Draft service",
}
Q = Promql("5m")
QUERIES = {
    name: Q.expand(short)
    for name, short in {
        "efficiency": "v:round_busy_seconds_total / v:round_seconds_total",
        "idle": "v:idle_seconds_total / (v:step_seconds_sum + v:idle_seconds_total)",
        "length": "v:tokens_total / v:steps_total by task",
        "acceptance": "v:position_accepted_total / v:position_verified_total by position, task",
        "missing": "o:draft_missing_seconds_total / o:draft_wanted_seconds_total > 0.1",
        "slow": "o:draft_idle_seconds_total / o:draft_wanted_seconds_total > 0.2 "
        "and mean o:draft_lag_seconds > mean v:step_seconds",
        "replicas": "ceil(d:replicas_desired)",
    }.items()
}
INTRODUCTION = f"""\
# Metrics

`make docs` writes this page.

Services serve a Prometheus page if `metrics_port` is set; the gateway also has it on its HTTP port.
Counters end in `_total`; the others are gauges, unless they are marked as histograms. Times are in seconds.
Dashboards are in `k8s/components/`; in these pictures both drafts are killed near the end:
[speculation](images/dashboard-speculation.png), [serving](images/dashboard-serving.png),
[capacity](images/dashboard-capacity.png). `outrider top` (`pip install '.[cli]'` in a checkout) shows the
most important figures on a terminal; `outrider up --metrics-port 9464` prints the addresses of its pages,
and `dns:name:port` stands for all addresses of a name.

Labels are bounded: {MAX_TASKS} values of `task`, and of each of a caller's `labels` (further values count as
`other`, an empty one as `none`), the {MAX_DRAFTS} last pairs of `task` and `draft` (drafts of one session are
joined by `+`), the {MAX_MODELS} last names of `model`, and positions from 1 to {MAX_POSITION}. The
orchestrator's histograms carry trace ids as exemplars (Prometheus: `--enable-feature=exemplar-storage`).

## Queries

**Pipeline efficiency**: the time of a session's steps divided by that of its rounds; 1 is the best.

```promql
{QUERIES["efficiency"]}
```

**Idle share of the target**, which is the better measure with several sessions:

```promql
{QUERIES["idle"]}
```

**Acceptance length**: tokens per step, the bonus token included.

```promql
{QUERIES["length"]}
```

**Acceptance at a position**:

```promql
{QUERIES["acceptance"]}
```

If `calibration_accepted` is below `calibration_predicted` in the same bucket, the estimates are too high.

## When the draft pool is short

The pool is too small if sessions want a draft and have none, or if the target idles and a draft takes longer
to answer a verdict than a target step. Idle time with a short lag comes from the network or the orchestrator.

```promql
{QUERIES["missing"]}
{QUERIES["slow"]}
```

## How many draft replicas are needed

`outrider_draft_replicas_desired` is the mean number of sessions that want drafts, divided by the number that
one replica serves well: four fifths of its slots, or fewer after the pool was short. Each orchestrator
exports its own share; KEDA asks one orchestrator and gets the sum.

```promql
{QUERIES["replicas"]}
```

## Names that others use

Inference gateways (Gateway API Inference Extension): TotalQueuedRequests, TotalRunningRequests and
KVCacheUtilization are `outrider_orchestrator_requests_queued`, `..._requests_running` and
`..._kv_utilization`. vLLM's `spec_decode_num_drafts_total` is
`outrider_verify_position_verified_total{{position="1"}}`, `spec_decode_num_draft_tokens_total`
`outrider_verify_nodes_verified_total`, `spec_decode_num_accepted_tokens_total`
`outrider_verify_nodes_accepted_total`, `generation_tokens_total` `outrider_orchestrator_tokens_total`,
`inter_token_latency_seconds` `outrider_orchestrator_delivery_gap_seconds`.
"""


def page() -> str:
    """The whole page."""
    shared = _shared()
    sections = [_section(HEADINGS[service], _rows(service, without=shared)) for service in TABLES]
    return "\n".join([INTRODUCTION, *sections, *(_section(*table) for table in _tables_of(shared))])


def described(service: str) -> list[Described]:
    """The metrics of a service, in the order of the instruments."""
    return TABLES[service](CollectorRegistry()).described


def _shared() -> dict[str, list[str]]:
    """Rows that several services have, with SERVICE in place of their names, and the names."""
    found: dict[str, list[str]] = {}
    for service in TABLES:
        for row in _rows(service):
            found.setdefault(row.replace(f"outrider_{service}_", "outrider_SERVICE_"), []).append(service)
    return {row: services for row, services in found.items() if len(services) > 1}


def _rows(service: str, without: Collection[str] = ()) -> list[str]:
    rows = [_row(metric) for metric in described(service)]
    return [row for row in rows if row.replace(f"outrider_{service}_", "outrider_SERVICE_") not in without]


def _tables_of(shared: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """A title and its rows for each set of services."""
    for services in dict.fromkeys(tuple(services) for services in shared.values()):
        title = f"SERVICE is {', '.join(services)}"
        yield title, [row for row, found in shared.items() if tuple(found) == services]


def _section(title: str, rows: Sequence[str]) -> str:
    return "\n".join([f"## {title}", "", *rows, ""])


def _row(metric: Described) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    kind = " (histogram)" if metric.kind == "histogram" else ""
    return f"- `{metric.name}{labels}`{kind}: {metric.text}"


if __name__ == "__main__":
    new_parser(__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
