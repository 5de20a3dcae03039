"""What `outrider top` shows: computes one frame from two snapshots of the pages. Pure.

None stands for an unknown value: nothing happened between the snapshots, or no page has the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.cli.top.pages import Change, Snapshot, changes

KINDS = {
    "orchestrator": "outrider_orchestrator_requests_running",
    "verify": "outrider_verify_sessions",
    "draft": "outrider_draft_sessions",
}
"""A metric by which the page of each kind of service is recognised."""
ORCHESTRATOR = "outrider_orchestrator_"
FIRST_TOKEN = f"{ORCHESTRATOR}time_to_first_token_seconds_bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What callers see, summed over all orchestrators."""

    running: float
    waiting: float
    finished: float | None
    """Per second."""
    refused: float | None
    """Per second."""
    tokens: float | None
    """Per second."""
    first_token: float | None
    """Median, in seconds."""
    first_token_95: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kind of traffic."""

    name: str
    tokens: float
    """Per second."""
    per_step: float
    accepted: float | None
    """Share of the verified candidates."""
    hits: float
    """Share of the steps whose bonus token was a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Draft replicas as the orchestrators see them."""

    wanted: float
    """Sessions that want a draft."""
    waiting: float
    """Sessions that want a draft and have none."""
    slots: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """One verify or draft replica."""

    kind: str
    address: str
    sessions: float
    limit: float
    tokens: float | None
    """Tokens per second that a target commits, or that a draft sends in blocks."""
    step: float | None
    """Mean time of a step in seconds."""
    efficiency: float | None
    """Share of the time between verdicts that the target's step takes."""
    pages_used: float
    pages: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Everything that is shown at one time."""

    requests: Requests | None
    pool: Pool | None
    states: dict[str, dict[str, float]]
    """Numbers of replicas by kind and state; states without replicas are left out."""
    efficiency: float | None
    """Share of the time between verdicts that the steps of all targets take."""
    tasks: tuple[Task, ...]
    replicas: tuple[ReplicaRow, ...]
    problems: dict[str, str]


def frame_of(before: Snapshot, now: Snapshot) -> Frame:
    """What happened between two snapshots."""
    by_kind: dict[str, dict[str, Change]] = {kind: {} for kind in KINDS}
    problems = dict(now.problems)
    for address, change in changes(before, now).items():
        kind = next((kind for kind, name in KINDS.items() if change.now.total(name) is not None), None)
        if kind is None:
            problems[address] = "is no page of an orchestrator, a verify or a draft service"
        else:
            by_kind[kind][address] = change
    orchestrators, targets = list(by_kind["orchestrator"].values()), list(by_kind["verify"].values())
    return Frame(
        requests=_requests(orchestrators) if orchestrators else None,
        pool=_pool(orchestrators) if orchestrators else None,
        states={kind: _states(orchestrators, kind) for kind in ("verify", "draft")},
        efficiency=_efficiency(targets),
        tasks=tuple(_tasks(orchestrators)),
        replicas=tuple(
            _replica(kind, address, change)
            for kind in ("verify", "draft")
            for address, change in sorted(by_kind[kind].items())
        ),
        problems=problems,
    )


def quantile(share: float, buckets: Sequence[tuple[float, float]]) -> float | None:
    """The value below which `share` of the observations lie; None without observations.

    `buckets` are (bound, number of observations up to it). Within a bucket the observations are taken to be
    spread evenly; beyond the last finite bound the answer is that bound.
    """
    total = max((count for _, count in buckets), default=0.0)
    if total <= 0.0:
        return None
    low = below = 0.0
    for bound, count in sorted(buckets):
        if count >= share * total:
            inside = (share * total - below) / (count - below) if count > below else 0.0
            return low if bound == float("inf") else low + (bound - low) * inside
        low, below = bound, count
    return low


def _requests(pages: Sequence[Change]) -> Requests:
    buckets = [(float(bound), count) for bound, count in _buckets(pages)]
    return Requests(
        running=_now(pages, f"{ORCHESTRATOR}requests_running"),
        waiting=_now(pages, f"{ORCHESTRATOR}requests_queued"),
        finished=_rate(pages, f"{ORCHESTRATOR}requests_finished_total"),
        refused=_rate(pages, f"{ORCHESTRATOR}requests_rejected_total"),
        tokens=_sum(_rate(pages, f"{ORCHESTRATOR}{name}_total") for name in ("steps", "tokens_accepted")),
        first_token=quantile(0.5, buckets),
        first_token_95=quantile(0.95, buckets),
    )


def _buckets(pages: Sequence[Change]) -> Iterable[tuple[str, float]]:
    bounds = {bound for page in pages for bound in page.now.labels(FIRST_TOKEN, "le")}
    for bound in bounds:
        yield bound, _increase(pages, FIRST_TOKEN, le=bound) or 0.0


def _pool(pages: Sequence[Change]) -> Pool:
    return Pool(
        wanted=_now(pages, f"{ORCHESTRATOR}draft_sessions_wanted"),
        waiting=_now(pages, f"{ORCHESTRATOR}draft_sessions_waiting"),
        slots=_now(pages, f"{ORCHESTRATOR}draft_slots"),
    )


def _states(pages: Sequence[Change], kind: str) -> dict[str, float]:
    """Replicas by state, as the orchestrator that knows most of them sees them: all see the same replicas."""
    name = f"{ORCHESTRATOR}replicas"
    seen = [
        {
            state: page.now.total(name, kind=kind, state=state) or 0.0
            for state in page.now.labels(name, "state")
        }
        for page in pages
    ]
    most = max(seen, key=lambda states: sum(states.values()), default={})
    return {state: count for state, count in sorted(most.items()) if count}


def _tasks(pages: Sequence[Change]) -> Iterable[Task]:
    names = {name for page in pages for name in page.now.labels(f"{ORCHESTRATOR}steps_total", "task")}
    for name in sorted(names):
        found = {
            key: _increase(pages, f"{ORCHESTRATOR}{key}_total", task=name) or 0.0
            for key in ("steps", "tokens_accepted", "nodes_verified", "hits")
        }
        if found["steps"]:
            yield _task(name, found, pages[0].seconds)


def _task(name: str, found: dict[str, float], seconds: float) -> Task:
    """One kind of traffic; every step commits the accepted tokens and one more."""
    steps, accepted, verified = found["steps"], found["tokens_accepted"], found["nodes_verified"]
    return Task(
        name=name,
        tokens=(steps + accepted) / seconds,
        per_step=(steps + accepted) / steps,
        accepted=accepted / verified if verified else None,
        hits=found["hits"] / steps,
    )


def _replica(kind: str, address: str, change: Change) -> ReplicaRow:
    prefix, page = f"outrider_{kind}_", [change]
    seconds = _increase(page, f"{prefix}step_seconds_sum")
    steps = _increase(page, f"{prefix}step_seconds_count")
    return ReplicaRow(
        kind=kind,
        address=address,
        sessions=_now(page, f"{prefix}sessions"),
        limit=_now(page, f"{prefix}session_limit"),
        tokens=_rate(page, f"{prefix}{'tokens' if kind == 'verify' else 'nodes'}_total"),
        step=seconds / steps if seconds and steps else None,
        efficiency=_efficiency(page) if kind == "verify" else None,
        pages_used=_now(page, f"{prefix}pages_used"),
        pages=_now(page, f"{prefix}pages"),
    )


def _efficiency(targets: Sequence[Change]) -> float | None:
    busy = _increase(targets, "outrider_verify_round_busy_seconds_total")
    whole = _increase(targets, "outrider_verify_round_seconds_total")
    return busy / whole if busy is not None and whole else None


def _now(pages: Sequence[Change], name: str) -> float:
    return sum(page.now.total(name) or 0.0 for page in pages)


def _increase(pages: Sequence[Change], name: str, **labels: str) -> float | None:
    return _sum(page.increase(name, **labels) for page in pages)


def _rate(pages: Sequence[Change], name: str) -> float | None:
    found = _increase(pages, name)
    return None if found is None or pages[0].seconds <= 0 else found / pages[0].seconds


def _sum(values: Iterable[float | None]) -> float | None:
    """Sum of the values that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
