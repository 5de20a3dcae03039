"""Write docs/metrics.md from the instruments: `python -m scripts.document_metrics`."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from outrider.telemetry.instruments import DraftInstruments, OrchestratorInstruments, VerifyInstruments
from outrider.telemetry.metric_parts import MAX_POSITION, MAX_REPLICAS, MAX_TASKS, Described
from scripts.promql import Promql, full_name

PAGE = Path(__file__).resolve().parents[1] / "docs/metrics.md"
TABLES: dict[str, type[VerifyInstruments] | type[DraftInstruments] | type[OrchestratorInstruments]] = {
    "orchestrator": OrchestratorInstruments,
    "verify": VerifyInstruments,
    "draft": DraftInstruments,
}
Q = Promql("5m")
HEADINGS = {"orchestrator": "Orchestrator", "verify": "Verify service", "draft": "Draft service"}
QUERIES = {
    "o:requests_admitted_total": Q.rate("o:requests_admitted_total"),
    "o:requests_rejected_total": Q.rate("o:requests_rejected_total", "reason"),
    "o:requests_finished_total": Q.rate("o:requests_finished_total", "reason"),
    "o:tokens_total": Q.rate("o:tokens_total"),
    "o:request_seconds": Q.quantile(0.95, "o:request_seconds"),
    "o:time_to_first_token_seconds": Q.quantile(0.95, "o:time_to_first_token_seconds"),
    "o:time_per_output_token_seconds": Q.mean("o:time_per_output_token_seconds"),
    "o:requests_queued": Q.gauge("o:requests_queued"),
    "o:requests_running": Q.gauge("o:requests_running"),
    "o:fallbacks_total": Q.rate("o:fallbacks_total", "kind"),
    "o:replicas": Q.gauge("o:replicas", "kind, state", how="max"),
    "o:steps_total": Q.rate("o:steps_total", "draft"),
    "o:nodes_verified_total": Q.share("o:nodes_verified_total", "o:steps_total", "draft"),
    "o:tokens_accepted_total": Q.share("o:tokens_accepted_total", "o:steps_total", "task, draft"),
    "o:hits_total": Q.share("o:hits_total", "o:steps_total", "task, draft"),
    "o:undrafted_steps_total": Q.share("o:undrafted_steps_total", "o:steps_total"),
    "o:drifts_total": "sum by (task, draft) (increase(outrider_orchestrator_drifts_total[30m])) > 0",
    "o:drift_statistic": Q.gauge("o:drift_statistic", "task, draft", how="max"),
    "o:position_verified_total": Q.rate("o:position_verified_total", "position"),
    "o:position_accepted_total": Q.share(
        "o:position_accepted_total", "o:position_verified_total", "position, draft"
    ),
    "o:draft_sessions_wanted": Q.gauge("o:draft_sessions_wanted"),
    "o:draft_sessions_waiting": Q.gauge("o:draft_sessions_waiting"),
    "o:draft_slots": Q.gauge("o:draft_slots", how="max"),
    "o:draft_wanted_seconds_total": Q.rate("o:draft_wanted_seconds_total"),
    "o:draft_missing_seconds_total": Q.share("o:draft_missing_seconds_total", "o:draft_wanted_seconds_total"),
    "o:draft_idle_seconds_total": Q.share("o:draft_idle_seconds_total", "o:draft_wanted_seconds_total"),
    "o:draft_lag_seconds": Q.mean("o:draft_lag_seconds"),
    "v:steps_total": Q.rate("v:steps_total", "task"),
    "v:tokens_total": Q.share("v:tokens_total", "v:steps_total", "task"),
    "v:nodes_accepted_total": Q.share("v:nodes_accepted_total", "v:nodes_verified_total", "task"),
    "v:hits_total": Q.share("v:hits_total", "v:steps_total", "task"),
    "v:position_verified_total": Q.rate("v:position_verified_total", "position"),
    "v:position_accepted_total": Q.share(
        "v:position_accepted_total", "v:position_verified_total", "position, task"
    ),
    "v:nodes_verified_total": f"{Q.rate('v:nodes_verified_total')} - {Q.rate('v:nodes_accepted_total')}",
    "v:lookup_nodes_verified_total": Q.share("v:lookup_nodes_verified_total", "v:nodes_verified_total"),
    "v:nodes_dropped_total": Q.rate("v:nodes_dropped_total"),
    "v:calibration_nodes_total": Q.rate("v:calibration_nodes_total", "bucket"),
    "v:calibration_predicted_total": Q.share(
        "v:calibration_predicted_total", "v:calibration_nodes_total", "bucket"
    ),
    "v:calibration_accepted_total": Q.share(
        "v:calibration_accepted_total", "v:calibration_nodes_total", "bucket"
    ),
    "v:round_seconds_total": Q.share("v:round_busy_seconds_total", "v:round_seconds_total", "task"),
    "v:round_busy_seconds_total": Q.share("v:round_busy_seconds_total", "v:steps_total"),
    "v:round_idle_seconds_total": Q.share("v:round_idle_seconds_total", "v:round_seconds_total"),
    "v:step_seconds": Q.quantile(0.95, "v:step_seconds"),
    "v:step_tokens": Q.mean("v:step_tokens"),
    "v:step_sessions": Q.mean("v:step_sessions"),
    "v:idle_seconds_total": Q.rate("v:idle_seconds_total", "instance"),
    "v:preemptions_total": Q.rate("v:preemptions_total"),
    "v:stale_handles_total": Q.rate("v:stale_handles_total", "reason"),
    "v:queued_sessions": Q.gauge("v:queued_sessions"),
    "d:steps_total": Q.rate("d:steps_total", "instance"),
    "d:tokens_total": Q.share("d:tokens_total", "d:steps_total", "instance"),
    "d:nodes_accepted_total": Q.share("d:nodes_accepted_total", "d:nodes_total", "instance"),
    "d:hits_total": Q.share("d:hits_total", "d:steps_total", "instance"),
    "d:position_verified_total": Q.rate("d:position_verified_total", "position"),
    "d:position_accepted_total": Q.share(
        "d:position_accepted_total", "d:position_verified_total", "position, instance"
    ),
    "d:position_drafted_total": Q.rate("d:position_drafted_total", "position"),
    "d:step_seconds": f"({Q.mean('d:step_seconds')}) / ({Q.mean('v:step_seconds')})",
    "d:step_nodes": Q.mean("d:step_nodes"),
    "d:step_sessions": Q.mean("d:step_sessions"),
    "d:blocks_total": Q.share("d:nodes_total", "d:blocks_total"),
    "d:nodes_total": Q.rate("d:nodes_total", "task"),
    "d:nodes_wasted_total": Q.share("d:nodes_wasted_total", "d:nodes_total", "task"),
    "d:starvations_total": Q.share("d:starvations_total", "d:steps_total", "instance"),
    "d:lag_seconds": Q.quantile(0.95, "d:lag_seconds"),
}
"""An example per metric."""


def _of_replicas(service: str) -> dict[str, str]:
    """Examples for what draft and verify services have in common."""
    sessions, limit = f"{service}:sessions", f"{service}:session_limit"
    pages, used, memory = f"{service}:pages", f"{service}:pages_used", f"{service}:device_memory"
    return {
        sessions: Q.level(sessions, limit),
        limit: Q.gauge(limit),
        pages: Q.gauge(pages),
        used: Q.level(used, pages, "instance"),
        f"{pages}_cached": Q.gauge(f"{pages}_cached"),
        f"{pages}_free": Q.gauge(f"{pages}_free", "instance"),
        f"{service}:kv_utilization": Q.gauge(f"{service}:kv_utilization", how="max"),
        f"{memory}_bytes": Q.gauge(f"{memory}_bytes", "instance"),
        f"{memory}_free_bytes": Q.level(f"{memory}_free_bytes", f"{memory}_bytes", "instance"),
    }


EXAMPLES = {
    full_name(metric): query for metric, query in (QUERIES | _of_replicas("v") | _of_replicas("d")).items()
}
INTRODUCTION = f"""\
# Metrics

This page is written by `make docs` from the instruments; a test checks that it is current, and another that
running services export what it lists.

Every service serves a Prometheus page when `metrics_port` is set. Counters are raw: ratios belong into the
query, because only sums can be added up over replicas. Times are seconds. Dashboards and alerts that use
these metrics are in `k8s/components/`; what to do about an alert is in the [runbook](runbook.md). Where no
Grafana is at hand, `python -m scripts.draw_dashboards` draws the panels from a Prometheus. Made so, with one,
three and six clients on the widened demo pair; one of two draft replicas is killed 40 seconds before the end:
[speculation](dashboards/speculation.png), [serving](dashboards/serving.png),
[capacity](dashboards/capacity.png). Other work ran on the two cores meanwhile: look at the shapes, not at the
speed.

**Exemplars.** The histograms of the orchestrator carry the trace id of a sampled request (with
`--enable-feature=exemplar-storage` in Prometheus), so that a slow bucket leads to its trace.

**Labels are bounded.** `task` is what callers write into a request: the first {MAX_TASKS} are told apart,
the rest is `other`, none at all is `none`. `draft` is the endpoint of a draft replica; of more than
{MAX_REPLICAS} the series of the one unused longest end. Positions count from 1 and stop at {MAX_POSITION}.

## How well the pipeline works

**Pipeline efficiency** is the time of the target's step divided by the mean period of a session's rounds,
1 when every step begins where the last one ended:

    sum(rate(outrider_verify_round_busy_seconds_total[5m]))
      / sum(rate(outrider_verify_round_seconds_total[5m]))

With several sessions a round also waits while the target works for others. What matters then is the
device's own time, of which idle is what speculation lost:

    sum(rate(outrider_verify_step_seconds_sum[5m]))
      / (sum(rate(outrider_verify_step_seconds_sum[5m])) + sum(rate(outrider_verify_idle_seconds_total[5m])))

**Acceptance length** is tokens per step; it counts the bonus token, so it is 1 without speculation. Wasted
nodes are those verified and not accepted (target time), and those drafted and dropped (draft time).

**Calibration.** A step takes the nodes whose estimates promise most. `calibration_predicted` and
`calibration_accepted`, both divided by `calibration_nodes`, should be the same in every bucket; where
accepted is lower, drafts promise too much.

## When the draft pool is short

A draft engine always finds something to expand, so its own load says little. The pool is short when *target*
time is lost for want of drafts. Two things can be missing:

1. **Replicas.** Sessions run that want drafts and have no open stream to a replica:

       sum(rate(outrider_orchestrator_draft_missing_seconds_total[5m]))
         / sum(rate(outrider_orchestrator_draft_wanted_seconds_total[5m])) > 0.1

2. **Speed.** Drafts are at hand but answer late, so that the target runs dry: it idles *and* the mean lag
   from a verdict to the draft's answer is longer than a target step. Idle with a short lag is the network's
   or the orchestrator's doing; a long lag without idle costs nothing, because other sessions fill the gap:

       sum(rate(outrider_orchestrator_draft_idle_seconds_total[5m]))
         / sum(rate(outrider_orchestrator_draft_wanted_seconds_total[5m])) > 0.2
       and
       sum(rate(outrider_orchestrator_draft_lag_seconds_sum[5m]))
         / sum(rate(outrider_orchestrator_draft_lag_seconds_count[5m]))
         > sum(rate(outrider_verify_step_seconds_sum[5m])) / sum(rate(outrider_verify_step_seconds_count[5m]))

Either makes the pool short; `outrider_orchestrator_draft_sessions_wanted` against
`outrider_orchestrator_draft_slots` says how far demand is from room before it comes to that. A draft replica
sees the same from its side: `outrider_draft_lag_seconds` is what of the lag passes inside of it.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_section(service) for service in TABLES)])


def described(service: str) -> list[Described]:
    """The metrics of a service, in the order of the instruments."""
    return TABLES[service](CollectorRegistry()).described


def _section(service: str) -> str:
    rows = [_row(metric) for metric in described(service)]
    head = ["| metric | type | labels | meaning | example |", "|---|---|---|---|---|"]
    return "\n".join([f"## {HEADINGS[service]}", "", *head, *rows, ""])


def _row(metric: Described) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} | `{EXAMPLES[metric.name]}` |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
