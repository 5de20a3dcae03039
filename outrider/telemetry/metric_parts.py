"""Parts of the services' metrics: families with a common prefix, and children with bounded labels.

Labels that come from outside are bounded in two ways. Callers invent traffic labels ("task"): the first
`MAX_TASKS` keep their names, later ones share "other". Replicas come and go regularly: the one unused longest
makes room, and its series end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.recent import Recent

MAX_POSITION = 16
MAX_TASKS = 32
MAX_REPLICAS = 64
MAX_DRAFTS = 4 * MAX_REPLICAS
"""Most pairs of task and draft."""
NO_TASK = "none"
OTHER = "other"

STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

disable_created_metrics()  # type: ignore[no-untyped-call]  # else every counter has a series of creation times


@dataclass(frozen=True, slots=True)
class Described:
    """One metric as the documentation shows it; as in exports, a counter's name ends in `_total`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Maker:
    """Makes metrics with a common prefix in one registry, and keeps a list of them."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self.prefix = prefix
        self.registry = registry
        self.made: list[Described] = []

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Make a metric that counts since the start."""
        full = self.describe(f"{name}_total", "counter", text, labels)
        return Counter(full, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Make a metric of a present value."""
        full = self.describe(name, "gauge", text, labels)
        return Gauge(full, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """Make a metric of a distribution."""
        full = self.describe(name, "histogram", text, labels)
        return Histogram(full, text, labels, buckets=buckets, registry=self.registry)

    def describe(self, name: str, kind: str, text: str, labels: Iterable[str]) -> str:
        """Add a metric to the list; returns its full name."""
        full = f"{self.prefix}_{name}"
        self.made.append(Described(full, kind, tuple(labels), text))
        return full


class Tasks:
    """The names under which traffic labels are counted."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def name(self, label: str) -> str:
        """The label itself, "none" if it is empty, "other" if too many have been seen."""
        if label in self._known:
            return label
        if not label:
            return NO_TASK
        if len(self._known) >= MAX_TASKS:
            return OTHER
        self._known.add(label)
        return label


class ByTask:
    """A counter by task that costs only one lookup in a dict on the hot path."""

    def __init__(self, tasks: Tasks, counter: Counter) -> None:
        self._tasks = tasks
        self._counters = Bundle(MAX_TASKS + 2, counter=counter)

    def inc(self, task: str, amount: float) -> None:
        """Count for a traffic label."""
        self._counters.of(self._tasks.name(task)).counter.inc(amount)


class Bundle:
    """Metrics with the same labels, by name. Beyond `limit` combinations of values, the series of the one
    unused longest end."""

    def __init__(self, limit: int, **metrics: Counter | Gauge | Histogram) -> None:
        self._metrics = metrics
        self._children = Recent[tuple[str, ...], Any](limit, self._end)

    def of(self, *labels: str) -> Any:
        """The metrics with these values of their labels, as attributes."""
        return self._children.use(labels, lambda: self._bind(labels))

    def _bind(self, key: tuple[str, ...]) -> SimpleNamespace:
        return SimpleNamespace(**{name: metric.labels(*key) for name, metric in self._metrics.items()})

    def _end(self, key: tuple[str, ...]) -> None:
        for metric in self._metrics.values():
            metric.remove(*key)


class Positions:
    """A counter by task and position, from 1 on; positions beyond `MAX_POSITION` are not counted."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._counters = Recent[str, list[Counter]](MAX_TASKS + 2)

    def reach(self, task: str, depth: int) -> None:
        """Count one at every position down to `depth`."""
        for counter in self._counters.use(task, lambda: self._of(task))[:depth]:
            counter.inc()

    def _of(self, task: str) -> list[Counter]:
        return [self._counter.labels(str(position), task) for position in range(1, MAX_POSITION + 1)]


class PageMetrics:
    """Metrics of the KV memory of one service."""

    def __init__(self, make: Maker) -> None:
        self._total = make.gauge("pages", "KV pages in all.")
        self._used = make.gauge("pages_used", "KV pages of sessions and leases.")
        self._cached = make.gauge("pages_cached", "KV pages kept for reuse.")
        self._free = make.gauge("pages_free", "KV pages that hold nothing.")
        self._utilization = make.gauge("kv_utilization", "Share of the KV pages in use.")

    def set(self, total: int, used: int, cached: int) -> None:
        """Set the present numbers of pages."""
        self._total.set(total)
        self._used.set(used)
        self._cached.set(cached)
        self._free.set(total - used - cached)
        self._utilization.set(used / total if total else 0.0)


class Capacity:
    """Metrics of the sessions that a replica has room for, and of its device's memory, which is measured when
    the page is read."""

    def __init__(self, make: Maker) -> None:
        self._limit = make.gauge("session_limit", "Most sessions.")
        self._total = make.gauge("device_memory_bytes", "Memory of the device.")
        self._free = make.gauge("device_memory_free_bytes", "Free memory of the device.")

    def set(self, sessions: int, free_and_total: Callable[[], tuple[int, int]]) -> None:
        """Set the sessions, and the function that returns the device's present free and total bytes."""
        self._limit.set(sessions)
        self._free.set_function(lambda: free_and_total()[0])
        self._total.set_function(lambda: free_and_total()[1])


class Estimates(Collector):
    """Metrics that compare predicted and observed acceptance: how often the walk reached nodes whose estimate
    lay in a bucket.

    They are plain sums, since a step adds to them for every node, and become metrics when the page is read.
    """

    BUCKETS = 10
    NAMES = (
        ("calibration_nodes", "Verified nodes by estimated reach."),
        ("calibration_predicted", "Sum of the estimates of verified nodes."),
        ("calibration_accepted", "Verified nodes that were accepted."),
    )

    def __init__(self, make: Maker) -> None:
        self._columns = [[0.0] * self.BUCKETS for _ in self.NAMES]
        self._names = [
            (make.describe(f"{name}_total", "counter", text, ("bucket",)), text) for name, text in self.NAMES
        ]
        make.registry.register(self)

    def add(self, reach: float, accepted: bool) -> None:
        """Add one verified node and whether it was accepted."""
        reach = min(max(0.0, reach), 1.0)  # this order makes NaN, from a broken draft, count as zero
        bucket = min(int(reach * self.BUCKETS), self.BUCKETS - 1)
        nodes, predicted, taken = self._columns
        nodes[bucket] += 1.0
        predicted[bucket] += reach
        taken[bucket] += accepted

    def collect(self) -> Iterator[Metric]:
        """The sums as metrics; `bucket` is its lower bound."""
        for (name, text), column in zip(self._names, self._columns, strict=True):
            family = CounterMetricFamily(name, text, labels=("bucket",))
            for bucket, value in enumerate(column):
                family.add_metric((f"{bucket / self.BUCKETS:.1f}",), value)
            yield family


def start_at_zero(counter: Counter, values: Iterable[str]) -> None:
    """Put the children of a counter with one label on the page before anything happens."""
    for value in values:
        counter.labels(value)
