"""What the dashboards show: one entry per panel, with the question it answers as its description.

Queries are abbreviated (`Promql.expand`). The text before ` = ` is the legend; without one, the labels are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from scripts.promql import Promql

MATCH = 'job=~"$job", instance=~"$instance"'
P = Promql("$__rate_interval", MATCH)


@dataclass(frozen=True, slots=True)
class Query:
    """A query that draws one line, or one per label value."""

    expression: str
    legend: str

    @classmethod
    def of(cls, short: str) -> Query:
        """`legend = query`, or a query whose labels are the legend."""
        legend, named, query = short.partition(" = ")
        query = query if named else short
        labels = query.partition(" by ")[2].split(", ")
        return cls(P.expand(query), legend if named else " ".join(f"{{{{{label}}}}}" for label in labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; `unit` is Grafana's name of its unit."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "bargauge"] = "timeseries"
    width: int = 8
    stacked: bool = False
    exemplars: bool = False
    """Whether to show trace ids at the line."""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A row of panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard, in a file of its own."""

    name: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]


def _panel(unit: str, title: str, description: str, *queries: str, **more: bool | str | int) -> Panel:
    lines = tuple(map(Query.of, queries))
    return Panel(title=title, unit=unit, description=description, queries=lines, **more)  # type: ignore[arg-type]


def _quantiles(title: str, description: str, histogram: str, unit: str = "s", **more: bool | int) -> Panel:
    lines = (f"{quantile}% = p{quantile} {histogram}" for quantile in (50, 95, 99))
    return _panel(unit, title, description, *lines, **more)


_share = partial(_panel, "percentunit")
_number = partial(_panel, "short")
_events = partial(_panel, "ops")
_requests = partial(_panel, "reqps")
_seconds = partial(_panel, "s")

PIPELINE = (
    _share(
        "Pipeline efficiency",
        "The target's step as a share of a session's round. 100 %: every step begins where the last one "
        "ended. With many sessions a round also waits for the others' steps.",
        "v:round_busy_seconds_total / v:round_seconds_total by task",
    ),
    _share(
        "Target idle share",
        "Share of the time with open sessions in which the target ran no step: what waiting for candidates "
        "costs.",
        "idle = v:idle_seconds_total / (v:idle_seconds_total + v:step_seconds_sum)",
    ),
    _share(
        "Draft step to target step",
        "Mean time of a draft step divided by that of a target step.",
        "ratio = (mean d:step_seconds) / (mean v:step_seconds)",
    ),
)

ACCEPTANCE = (
    _number(
        "Acceptance length",
        "Tokens committed per step, the bonus token included: the factor that speculation saves in target "
        "steps. 1 without speculation.",
        "v:tokens_total / v:steps_total by task",
    ),
    _share(
        "Acceptance by position",
        "Of the steps that verified candidates this deep, the share that accepted one; down to 8.",
        'v:position_accepted_total{position=~"1|2|3|4|5|6|7|8"}'
        ' / v:position_verified_total{position=~"1|2|3|4|5|6|7|8"} by position',
    ),
    _share(
        "Acceptance by position and task",
        "The first three positions by traffic label: which traffic the draft fits.",
        'v:position_accepted_total{position=~"1|2|3"} / v:position_verified_total{position=~"1|2|3"}'
        " by task, position",
    ),
    _share(
        "Acceptance by draft replica",
        "Share of the verified candidates that were accepted, by draft replica. One that stands out has "
        "another model or a fault.",
        "o:tokens_accepted_total / o:nodes_verified_total by draft",
    ),
    _share(
        "Hit rate",
        "Share of steps whose bonus token was already a candidate, so that the next step had candidates at "
        "once.",
        "v:hits_total / v:steps_total by task",
    ),
    _share(
        "Drift",
        "How near each detector is to its next alarm. At 100 % acceptance has fallen for good, and the "
        "detector begins anew.",
        "max o:drift_statistic by task, draft",
    ),
)

VERSIONS = (
    _share(
        "Foreseen",
        "In sessions with a shadow, the share of tokens that a draft proposed first and in time, by its "
        "weights. Promote a shadow that is above the draft at work.",
        "o:compared_foreseen_total / o:compared_tokens_total by version, role",
    ),
    _share(
        "Right when it proposed",
        "Of the tokens that a draft had a proposal for, the share that it foresaw: how well its weights fit "
        "the traffic, apart from its speed.",
        "o:compared_foreseen_total / o:compared_proposed_total by task, version, role",
    ),
    _events(
        "Learning",
        "Continuations kept for drafts to learn from, by outcome; shadows that failed, which no session "
        "notices; and promotions.",
        "collected, {{outcome}} = o:collected_total by outcome",
        "shadow failed = o:shadow_failures_total",
        "promoted = o:promotions_total",
    ),
)

BUDGET = (
    _events(
        "Nodes",
        "Nodes drafted, verified and accepted per second, and those that a step verified because prompt "
        "lookup found them.",
        "drafted = d:nodes_total",
        "verified = v:nodes_verified_total",
        "accepted = v:nodes_accepted_total",
        "verified, from lookup = v:lookup_nodes_verified_total",
    ),
    _share(
        "Wasted nodes",
        "Nodes verified but not accepted cost target time; nodes drafted but dropped cost draft time. Some "
        "waste is the price of long blocks.",
        "verified, not accepted = 1 - v:nodes_accepted_total / v:nodes_verified_total",
        "drafted, dropped = d:nodes_wasted_total / d:nodes_total",
    ),
    _share(
        "Calibration",
        "Expected and real acceptance, by bucket of the estimate. The nearer they are, the better the budget "
        "chooses nodes.",
        "{{bucket}} expected = v:calibration_predicted_total / v:calibration_nodes_total by bucket",
        "{{bucket}} accepted = v:calibration_accepted_total / v:calibration_nodes_total by bucket",
        kind="bargauge",
    ),
    _number(
        "Step size",
        "Tokens and sessions of a target step. More sessions should bring fewer nodes for each.",
        "tokens = mean v:step_tokens",
        "sessions = mean v:step_sessions",
    ),
    _share(
        "Steps without drafts",
        "Share of steps that verified no node of a draft replica: none was there, or verifying none was "
        "expected to be best.",
        "o:undrafted_steps_total / o:steps_total by task",
    ),
    _events(
        "Fallbacks",
        "Requests per second that lost a draft or a verify replica and went on.",
        "o:fallbacks_total by kind",
    ),
)

LATENCY = (
    _quantiles(
        "Time to first token",
        "From a request's arrival to its first token, the queue included. Exemplars lead to traces.",
        "o:time_to_first_token_seconds",
        exemplars=True,
        width=6,
    ),
    _quantiles(
        "Time in the queue",
        "How long admitted requests waited for their admission: a part of the time to first token.",
        "o:queue_seconds",
        width=6,
    ),
    _quantiles(
        "Time per output token",
        "Mean over a request's tokens after the first.",
        "o:time_per_output_token_seconds",
        exemplars=True,
        width=6,
    ),
    _quantiles(
        "Request duration",
        "From a request's arrival to its end, the queue included.",
        "o:request_seconds",
        exemplars=True,
        width=6,
    ),
)

LENGTHS = (
    _quantiles(
        "Pauses in a text",
        "From one delivery of tokens to the next of its continuation, as callers see them come.",
        "o:delivery_gap_seconds",
        width=6,
    ),
    _quantiles("Prompt length", "Tokens of a prompt.", "o:prompt_tokens", "short", width=6),
    _quantiles("Output length", "Tokens of a continuation.", "o:output_tokens", "short", width=6),
    _share(
        "Prompt tokens from the cache",
        "Share of the prompts' tokens whose keys and values were at hand.",
        "cached = o:prompt_tokens_cached_total / o:prompt_tokens_sum",
        width=6,
    ),
)

THROUGHPUT = (
    _number("Tokens", "Tokens generated per second.", "tokens per second = o:tokens_total"),
    _requests(
        "Requests",
        "Requests admitted, and how they ended.",
        "admitted = o:requests_admitted_total",
        "o:requests_finished_total by reason",
    ),
    _number(
        "Queue",
        "Requests that run, and requests that wait for admission.",
        "running = o:requests_running",
        "queued = o:requests_queued",
    ),
)

ERRORS = (
    _requests(
        "Refused",
        "Requests refused before they ran, by reason.",
        "o:requests_rejected_total by reason",
        stacked=True,
    ),
    _share(
        "Failed",
        "Share of continuations that were ended by no stop token, no limit of length and no caller.",
        'failed = o:requests_finished_total{reason!~"stop|length|cancelled|not_read"}'
        " / o:requests_finished_total",
    ),
    _number(
        "Replicas",
        "Replicas by kind and state, as the orchestrators see them.",
        "{{kind}} {{state}} = max o:replicas > 0 by kind, state",
    ),
)

HTTP = (
    _requests("HTTP requests", "Requests answered by the gateways, by status.", "g:requests_total by status"),
    _quantiles(
        "Time to first text",
        "From a request's body to its first text, as the gateway sees it.",
        "g:time_to_first_token_seconds",
    ),
    _number(
        "HTTP load",
        "Requests that run in the gateways, and callers per second that left before the end.",
        "running = g:requests_running",
        "gone = g:requests_aborted_total",
    ),
)

STEPS = (
    _quantiles("Target step", "Time of a verify step.", "v:step_seconds"),
    _quantiles("Draft step", "Time of a draft forward.", "d:step_seconds"),
    _events(
        "Stale handles",
        "KV handles that were refused; their tokens were prefilled again.",
        "v:stale_handles_total by reason",
    ),
    _events(
        "Keys and values of other replicas",
        "When a session moves: they moved with it, or were computed again because that failed.",
        "o:kv_moves_total by outcome",
    ),
)


def _memory(service: str, name: str) -> tuple[Panel, ...]:
    """Pages, sessions and device memory of one kind of replica."""
    return (
        _number(
            f"KV pages, {name}",
            "Used by sessions and leases, kept for reuse, and empty. Headroom is what is kept and what is "
            "empty.",
            f"used = {service}:pages_used",
            f"kept for reuse = {service}:pages_cached",
            f"empty = {service}:pages_free",
            stacked=True,
        ),
        _share(
            f"Sessions, {name}",
            "Open sessions as a share of those that may be open.",
            f"{service}:sessions / {service}:session_limit by instance",
        ),
        _share(
            f"Device memory headroom, {name}",
            "Unused memory of the model's device: VRAM, or the machine's if the model runs on the CPU.",
            f"{service}:device_memory_free_bytes / {service}:device_memory_bytes by instance",
        ),
    )


PRESSURE = (
    _share(
        "KV utilization",
        "Share of KV pages in use, by replica and over all usable ones. An inference gateway balances by it.",
        "max v:kv_utilization by instance",
        "all usable = max o:kv_utilization",
    ),
    _number(
        "Waiting for pages",
        "Sessions that were admitted and have no KV pages.",
        "v:queued_sessions by instance",
    ),
    _events(
        "Preemptions",
        "Sessions paused per second because no KV page was left; they are prefilled again later.",
        "v:preemptions_total by instance",
    ),
)

DRAFT_POOL = (
    _number(
        "Demand and room",
        "Sessions that want drafts, those of them without, and the room of all usable replicas.",
        "wanted = o:draft_sessions_wanted",
        "waiting = o:draft_sessions_waiting",
        "room = max o:draft_slots",
        width=6,
    ),
    _number(
        "Draft replicas",
        "What the sessions need, which the autoscaler follows, and what the orchestrators can use.",
        "desired = ceil(d:replicas_desired)",
        f'usable = max(outrider_orchestrator_replicas{{{MATCH},kind="draft",state="usable"}})',
        width=6,
    ),
    _share(
        "Pool shortage",
        "Share of the sessions' time without a draft replica, and share in which they waited while the "
        "target idled. docs/metrics.md says when the pool is short.",
        "no replica = o:draft_missing_seconds_total / o:draft_wanted_seconds_total",
        "target idle = o:draft_idle_seconds_total / o:draft_wanted_seconds_total",
        width=6,
    ),
    _seconds(
        "Draft lag",
        "From a verdict to the draft's answer, as the orchestrator and the draft see it, beside the target's "
        "step. Short of drafts: the lag is longer than the step and the target idles.",
        "lag = mean o:draft_lag_seconds",
        "of it in the draft = mean d:lag_seconds",
        "target step = mean v:step_seconds",
        width=6,
    ),
)

PROCESSES = (
    _panel(
        "bytes",
        "Memory",
        "Resident memory of every process.",
        f"{{{{instance}}}} = process_resident_memory_bytes{{{MATCH}}}",
    ),
    _number(
        "CPU",
        "Cores in use by every process.",
        f"{{{{instance}}}} = rate(process_cpu_seconds_total{{{MATCH}}}[$__rate_interval])",
    ),
    _share(
        "File descriptors",
        "Open file descriptors as a share of the limit.",
        f"{{{{instance}}}} = process_open_fds{{{MATCH}}} / process_max_fds{{{MATCH}}}",
    ),
)

SPECULATION = Dashboard(
    "speculation",
    "Speculation",
    "Do drafts pay, and do they still fit the traffic?",
    (
        PanelRow("Pipeline", PIPELINE),
        PanelRow("Acceptance", ACCEPTANCE),
        PanelRow("Versions", VERSIONS),
        PanelRow("Budget", BUDGET),
    ),
)
SERVING = Dashboard(
    "serving",
    "Serving",
    "What callers see.",
    (
        PanelRow("Latency", LATENCY),
        PanelRow("Texts", LENGTHS),
        PanelRow("Throughput", THROUGHPUT),
        PanelRow("Errors", ERRORS),
        PanelRow("HTTP", HTTP),
        PanelRow("Steps", STEPS),
    ),
)
CAPACITY = Dashboard(
    "capacity",
    "Capacity",
    "How much room is left, and of what.",
    (
        PanelRow("Verify", (*_memory("v", "verify"), *PRESSURE)),
        PanelRow("Draft pool", (*DRAFT_POOL, *_memory("d", "draft"))),
        PanelRow("Processes", PROCESSES),
    ),
)
DASHBOARDS = (SPECULATION, SERVING, CAPACITY)
