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
    "o:queue_seconds": Q.quantile(0.95, "o:queue_seconds"),
    "o:request_seconds": Q.quantile(0.95, "o:request_seconds"),
    "o:time_to_first_token_seconds": Q.quantile(0.95, "o:time_to_first_token_seconds"),
    "o:time_per_output_token_seconds": Q.mean("o:time_per_output_token_seconds"),
    "o:requests_queued": Q.gauge("o:requests_queued"),
    "o:requests_running": Q.gauge("o:requests_running"),
    "o:kv_utilization": Q.gauge("o:kv_utilization", how="max"),
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
    "o:draft_parkings_total": Q.rate("o:draft_parkings_total"),
    "o:draft_slots": Q.gauge("o:draft_slots", how="max"),
    "o:draft_sessions_per_replica": Q.gauge("o:draft_sessions_per_replica", how="min"),
    "d:replicas_desired": f"ceil({Q.gauge('d:replicas_desired')})",
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


def _of_files(service: str) -> dict[str, str]:
    """Examples for certificates and tokens, which all services have in common."""
    refused, expires = f"{service}:files_refused_total", f"{service}:certificate_expires_timestamp_seconds"
    page = full_name(expires)
    return {
        refused: Q.rate(refused, "files"),
        expires: f"min by (files) ({page} - time() and {page} > 0)",
    }


_SHARED = _of_replicas("v") | _of_replicas("d") | _of_files("o") | _of_files("v") | _of_files("d")
EXAMPLES = {full_name(metric): query for metric, query in (QUERIES | _SHARED).items()}
INTRODUCTION = f"""\
# Metrics

This page is written by `make docs` from the instruments; a test checks that it is current, and another that
running services export what it lists.

Every service serves a Prometheus page when `metrics_port` is set. Counters are raw: ratios belong into the
query, because only sums can be added up over replicas. Times are seconds. Dashboards and alerts that use
these metrics are in `k8s/components/`; what to do about an alert is in the [runbook](runbook.md). Where no
Grafana is at hand, `python -m scripts.draw_dashboards` draws the panels from a Prometheus. Made so, with
three, eight and three clients on the widened demo pair, with prompts of code and of prose; 80 seconds before
the end both draft replicas are killed, one after the other, and one of them comes back:
[speculation](images/dashboard-speculation.png), [serving](images/dashboard-serving.png),
[capacity](images/dashboard-capacity.png). Much other work ran on the two cores meanwhile: look at the shapes,
not at the speed.

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

## How many draft replicas are needed

`outrider_draft_replicas_desired` is the mean number of sessions that want drafts over the last seconds,
divided by the number that one replica serves well (`outrider_orchestrator_draft_sessions_per_replica`): four
fifths of its slots, and less once the pool was short by the definition above, so that the same load gets more
replicas. `orchestrator/scaler.py` has the rule and where it comes from.

Every orchestrator exports its own sessions' share, so **add them up and round up**:

    ceil(sum(outrider_draft_replicas_desired))

An orchestrator that has no sessions reports 0; one that is gone takes its share along. The least and the most
replicas, and how long fewer have to suffice before one goes, are settings of the autoscaler. Whoever asks one
orchestrator over gRPC (`externalscaler.ExternalScaler`, as KEDA does) gets the sum: the sessions of the other
orchestrators are seen at the draft replicas. See [Kubernetes](kubernetes.md#scale).

## Names that others use

An inference gateway chooses among pods by three gauges (Gateway API Inference Extension, model server
protocol). Pods that it can choose among are orchestrators:

| gateway | here |
|---|---|
| TotalQueuedRequests | `outrider_orchestrator_requests_queued` |
| TotalRunningRequests | `outrider_orchestrator_requests_running` |
| KVCacheUtilization | `outrider_orchestrator_kv_utilization` |

A dashboard made for vLLM's speculation finds the same counts under these names. There a draft is one round
of a sequence; here one may verify several branches, so that *this deep* is the depth of the verified tree.
Positions count from 0 there and from 1 here:

| vLLM | here |
|---|---|
| `vllm:spec_decode_num_drafts_total` | `outrider_verify_position_verified_total{{position="1"}}` |
| `vllm:spec_decode_num_draft_tokens_total` | `outrider_verify_nodes_verified_total` |
| `vllm:spec_decode_num_accepted_tokens_total` | `outrider_verify_nodes_accepted_total` |
| `vllm:spec_decode_num_accepted_tokens_per_pos_total` | `outrider_verify_position_accepted_total` |
| `vllm:num_requests_waiting`, `vllm:num_requests_running` | the gateway's gauges above |
| `vllm:kv_cache_usage_perc` | `outrider_verify_kv_utilization` |
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
