"""What the dashboards show: one entry per panel, with the question it answers as its description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scripts.promql import Promql

P = Promql("$__rate_interval", 'job=~"$job", instance=~"$instance"')


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or one per label value."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture; `unit` is Grafana's name of it."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "bargauge"] = "timeseries"
    width: int = 8
    stacked: bool = False
    exemplars: bool = False
    """Show trace ids beside the line."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]


def _panel(
    title: str, unit: str, description: str, *queries: tuple[str, str], **more: bool | int | str
) -> Panel:
    lines = tuple(Query(expression, legend) for expression, legend in queries)
    return Panel(title=title, unit=unit, description=description, queries=lines, **more)  # type: ignore[arg-type]


def _quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    return tuple((P.quantile(q, histogram), f"{q:.0%}") for q in (0.5, 0.95, 0.99))


IDLE = (
    f"{P.rate('v:idle_seconds_total')} / ({P.rate('v:idle_seconds_total')} + {P.rate('v:step_seconds_sum')})"
)
WASTED_VERIFIED = f"1 - {P.share('v:nodes_accepted_total', 'v:nodes_verified_total')}"
V_ACCEPTANCE = ("v:position_accepted_total", "v:position_verified_total")
O_ACCEPTANCE = ("o:position_accepted_total", "o:position_verified_total")
FAILED = (
    P.rate("o:requests_finished_total", match='reason!~"stop|length|cancelled"')
    + " / "
    + P.rate("o:requests_finished_total")
)

PIPELINE = Row(
    "Pipeline",
    (
        _panel(
            "Pipeline efficiency",
            "percentunit",
            "The target's step as a share of a session's round. 100 %: every step begins where the last "
            "one ended. With many sessions a round also waits for the others' steps.",
            (P.share("v:round_busy_seconds_total", "v:round_seconds_total", "task"), "{{task}}"),
        ),
        _panel(
            "Target idle share",
            "percentunit",
            "Share of the time with open sessions in which the target ran no step: what waiting for "
            "candidates costs.",
            (IDLE, "idle"),
        ),
        _panel(
            "Draft step to target step",
            "percentunit",
            "Mean time of a draft step divided by that of a target step.",
            (f"({P.mean('d:step_seconds')}) / ({P.mean('v:step_seconds')})", "ratio"),
        ),
    ),
)

ACCEPTANCE = Row(
    "Acceptance",
    (
        _panel(
            "Acceptance length",
            "short",
            "Tokens committed per step, the bonus token included: the factor that speculation saves in "
            "target steps. 1 without speculation.",
            (P.share("v:tokens_total", "v:steps_total", "task"), "{{task}}"),
        ),
        _panel(
            "Acceptance by position",
            "percentunit",
            "Of the steps that verified candidates this deep, the share that accepted one; down to 8.",
            (P.share(*V_ACCEPTANCE, "position", 'position=~"1|2|3|4|5|6|7|8"'), "{{position}}"),
        ),
        _panel(
            "Acceptance by position and task",
            "percentunit",
            "The first three positions by traffic label: which traffic the draft fits.",
            (P.share(*V_ACCEPTANCE, "task, position", 'position=~"1|2|3"'), "{{task}} {{position}}"),
        ),
        _panel(
            "Acceptance by draft replica",
            "percentunit",
            "Share of steps whose first candidate was accepted, by draft replica: one that stands out "
            "has another model, or is ill.",
            (P.share(*O_ACCEPTANCE, "draft", 'position="1"'), "{{draft}}"),
        ),
        _panel(
            "Hit rate",
            "percentunit",
            "Share of steps whose bonus token was already a candidate, so that the next step had "
            "candidates at once.",
            (P.share("v:hits_total", "v:steps_total", "task"), "{{task}}"),
        ),
        _panel(
            "Drift",
            "percentunit",
            "How near each detector is to its next alarm. At 100 % acceptance has fallen for good, and "
            "the detector begins anew.",
            (P.gauge("o:drift_statistic", "task, draft", how="max"), "{{task}} {{draft}}"),
        ),
    ),
)

BUDGET = Row(
    "Budget",
    (
        _panel(
            "Nodes",
            "ops",
            "Nodes drafted, verified and accepted per second, and those that a step verified because "
            "prompt lookup found them.",
            (P.rate("d:nodes_total"), "drafted"),
            (P.rate("v:nodes_verified_total"), "verified"),
            (P.rate("v:nodes_accepted_total"), "accepted"),
            (P.rate("v:lookup_nodes_verified_total"), "verified, from lookup"),
        ),
        _panel(
            "Wasted nodes",
            "percentunit",
            "Verified and not accepted costs target time, drafted and dropped draft time. Some waste is "
            "the price of long blocks.",
            (WASTED_VERIFIED, "verified, not accepted"),
            (P.share("d:nodes_wasted_total", "d:nodes_total"), "drafted, dropped"),
        ),
        _panel(
            "Calibration",
            "percentunit",
            "By bucket of the estimate, what was expected and what came. The budget is only as good as "
            "their agreement.",
            (
                P.share("v:calibration_predicted_total", "v:calibration_nodes_total", "bucket"),
                "{{bucket}} expected",
            ),
            (
                P.share("v:calibration_accepted_total", "v:calibration_nodes_total", "bucket"),
                "{{bucket}} accepted",
            ),
            kind="bargauge",
        ),
        _panel(
            "Step size",
            "short",
            "Tokens and sessions of a target step. More sessions should bring fewer nodes for each.",
            (P.mean("v:step_tokens"), "tokens"),
            (P.mean("v:step_sessions"), "sessions"),
        ),
        _panel(
            "Steps without drafts",
            "percentunit",
            "Share of steps that verified no node of a draft replica: none was there, or verifying none "
            "was expected to be best.",
            (P.share("o:undrafted_steps_total", "o:steps_total", "task"), "{{task}}"),
        ),
        _panel(
            "Fallbacks",
            "ops",
            "Requests per second that lost a draft or a verify replica and went on without.",
            (P.rate("o:fallbacks_total", "kind"), "{{kind}}"),
        ),
    ),
)

SPECULATION = Dashboard(
    "speculation",
    "Speculation",
    "Do drafts pay, and do they still fit the traffic?",
    (
        PIPELINE,
        ACCEPTANCE,
        BUDGET,
    ),
)

LATENCY = Row(
    "Latency",
    (
        _panel(
            "Time to first token",
            "s",
            "From admission to the first token. Exemplars lead to traces.",
            *_quantiles("o:time_to_first_token_seconds"),
            exemplars=True,
        ),
        _panel(
            "Time per output token",
            "s",
            "Mean over a request's tokens after the first.",
            *_quantiles("o:time_per_output_token_seconds"),
            exemplars=True,
        ),
        _panel(
            "Request duration",
            "s",
            "From admission to the end.",
            *_quantiles("o:request_seconds"),
            exemplars=True,
        ),
    ),
)

THROUGHPUT = Row(
    "Throughput",
    (
        _panel(
            "Tokens",
            "short",
            "Tokens generated per second.",
            (P.rate("o:tokens_total"), "tokens per second"),
        ),
        _panel(
            "Requests",
            "reqps",
            "Requests admitted, and how they ended.",
            (P.rate("o:requests_admitted_total"), "admitted"),
            (P.rate("o:requests_finished_total", "reason"), "{{reason}}"),
        ),
        _panel(
            "Queue",
            "short",
            "Requests that run, and requests that wait for admission.",
            (P.gauge("o:requests_running"), "running"),
            (P.gauge("o:requests_queued"), "queued"),
        ),
    ),
)

ERRORS = Row(
    "Errors",
    (
        _panel(
            "Refused",
            "reqps",
            "Requests refused before they ran, by reason.",
            (P.rate("o:requests_rejected_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
        _panel(
            "Failed",
            "percentunit",
            "Share of continuations that ended otherwise than by a stop token, a length or the caller.",
            (
                FAILED,
                "failed",
            ),
        ),
        _panel(
            "Replicas",
            "short",
            "Replicas by kind and state, as the orchestrators see them.",
            (f"{P.gauge('o:replicas', 'kind, state', how='max')} > 0", "{{kind}} {{state}}"),
        ),
    ),
)

STEPS = Row(
    "Steps",
    (
        _panel("Target step", "s", "Time of a verify step.", *_quantiles("v:step_seconds")),
        _panel("Draft step", "s", "Time of a draft forward.", *_quantiles("d:step_seconds")),
        _panel(
            "Stale handles",
            "ops",
            "KV handles that were refused; their tokens were prefilled again.",
            (P.rate("v:stale_handles_total", "reason"), "{{reason}}"),
        ),
    ),
)

SERVING = Dashboard(
    "serving",
    "Serving",
    "What callers see.",
    (
        LATENCY,
        THROUGHPUT,
        ERRORS,
        STEPS,
    ),
)


def _pages(service: str, name: str) -> Panel:
    return _panel(
        f"KV pages, {name}",
        "short",
        "Used by sessions and leases, kept for reuse, and empty. Headroom is what is kept and what is empty.",
        (P.gauge(f"{service}:pages_used"), "used"),
        (P.gauge(f"{service}:pages_cached"), "kept for reuse"),
        (P.gauge(f"{service}:pages_free"), "empty"),
        stacked=True,
    )


def _sessions(service: str, name: str) -> Panel:
    return _panel(
        f"Sessions, {name}",
        "percentunit",
        "Open sessions as a share of those that may be open.",
        (P.level(f"{service}:sessions", f"{service}:session_limit", "instance"), "{{instance}}"),
    )


def _memory(service: str, name: str) -> Panel:
    free, total = f"{service}:device_memory_free_bytes", f"{service}:device_memory_bytes"
    return _panel(
        f"Device memory headroom, {name}",
        "percentunit",
        "Unused memory of the model's device (VRAM; of the machine where the model runs on the CPU).",
        (P.level(free, total, "instance"), "{{instance}}"),
    )


VERIFY = Row(
    "Verify",
    (
        _pages("v", "verify"),
        _sessions("v", "verify"),
        _memory("v", "verify"),
        _panel(
            "KV utilization",
            "percentunit",
            "Share of KV pages in use by replica; what an inference gateway balances by.",
            (P.gauge("v:kv_utilization", "instance", how="max"), "{{instance}}"),
        ),
        _panel(
            "Waiting for pages",
            "short",
            "Sessions that were admitted and have no KV pages.",
            (P.gauge("v:queued_sessions", "instance"), "{{instance}}"),
        ),
        _panel(
            "Preemptions",
            "ops",
            "Sessions paused per second because no KV page was left; they are prefilled again later.",
            (P.rate("v:preemptions_total", "instance"), "{{instance}}"),
        ),
    ),
)

DRAFT_POOL = Row(
    "Draft pool",
    (
        _panel(
            "Demand and room",
            "short",
            "Sessions that want drafts, those of them without, and the room of all usable replicas.",
            (P.gauge("o:draft_sessions_wanted"), "wanted"),
            (P.gauge("o:draft_sessions_waiting"), "waiting"),
            (P.gauge("o:draft_slots", how="max"), "room"),
        ),
        _panel(
            "Pool shortage",
            "percentunit",
            "Share of the sessions' time without a draft replica, and share in which they waited while "
            "the target idled. docs/metrics.md says when the pool is short.",
            (P.share("o:draft_missing_seconds_total", "o:draft_wanted_seconds_total"), "no replica"),
            (P.share("o:draft_idle_seconds_total", "o:draft_wanted_seconds_total"), "target idle"),
        ),
        _panel(
            "Draft lag",
            "s",
            "From a verdict to the draft's answer, as the orchestrator and the draft see it, beside the "
            "target's step. Short of drafts: the lag is longer than the step and the target idles.",
            (P.mean("o:draft_lag_seconds"), "lag"),
            (P.mean("d:lag_seconds"), "of it in the draft"),
            (P.mean("v:step_seconds"), "target step"),
        ),
        _pages("d", "draft"),
        _sessions("d", "draft"),
        _memory("d", "draft"),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        _panel(
            "Memory",
            "bytes",
            "Resident memory of every process.",
            ('process_resident_memory_bytes{job=~"$job", instance=~"$instance"}', "{{instance}}"),
        ),
        _panel(
            "CPU",
            "short",
            "Cores in use by every process.",
            (
                'rate(process_cpu_seconds_total{job=~"$job", instance=~"$instance"}[$__rate_interval])',
                "{{instance}}",
            ),
        ),
        _panel(
            "File descriptors",
            "percentunit",
            "Open file descriptors as a share of the limit.",
            (
                'process_open_fds{job=~"$job", instance=~"$instance"}'
                ' / process_max_fds{job=~"$job", instance=~"$instance"}',
                "{{instance}}",
            ),
        ),
    ),
)

CAPACITY = Dashboard(
    "capacity",
    "Capacity",
    "How much room is left, and of what.",
    (
        VERIFY,
        DRAFT_POOL,
        PROCESSES,
    ),
)

DASHBOARDS = (SPECULATION, SERVING, CAPACITY)
