"""Builds the PromQL of the metrics page and of the dashboards.

Metrics are written `g:name`, `o:name`, `v:name` and `d:name` for those of the gateway and of the
orchestrator, verify and draft services.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIXES = {
    "g": "outrider_gateway_",
    "o": "outrider_orchestrator_",
    "v": "outrider_verify_",
    "d": "outrider_draft_",
}

COUNTERS = ("_total", "_sum", "_count", "_bucket")
METRIC = re.compile(r"(?:(mean|max|min|p\d\d) )?\b([govd]:\w+)(?:\{(.*?)\})?")


def full_name(metric: str) -> str:
    """`v:steps_total` as it is exported."""
    service, _, name = metric.partition(":")
    return PREFIXES[service] + name


@dataclass(frozen=True, slots=True)
class Promql:
    """Queries over a window, restricted to series that match."""

    window: str
    match: str = ""

    def expand(self, short: str) -> str:
        """The query that is written short: `v:hits_total / v:steps_total by task`.

        A counter stands for its rate and a gauge for its sum, over all replicas or by the labels at the end;
        `max`, `min`, `mean` (of a histogram) and `p95` before a metric ask for something else.
        """
        expression, _, by = short.partition(" by ")

        def metric(found: re.Match[str]) -> str:
            how, name, match = found[1], found[2], found[3] or ""
            if how == "mean":
                return self.mean(name, by)
            if how is not None and how[0] == "p":
                return self.quantile(int(how[1:]) / 100, name)
            if name.endswith(COUNTERS):
                return self.rate(name, by, match)
            return self.gauge(name, by, how or "sum")

        return METRIC.sub(metric, expression)

    def gauge(self, metric: str, by: str = "", how: str = "sum") -> str:
        """A gauge over all replicas, or by labels."""
        return f"{how}{_by(by)}({self._select(metric)})"

    def rate(self, metric: str, by: str = "", match: str = "") -> str:
        """A counter per second."""
        return f"sum{_by(by)}(rate({self._select(metric, match)}[{self.window}]))"

    def share(self, part: str, whole: str, by: str = "", match: str = "") -> str:
        """Rate of one counter divided by that of another."""
        return f"{self.rate(part, by, match)} / {self.rate(whole, by, match)}"

    def mean(self, histogram: str, by: str = "") -> str:
        """Mean of a histogram."""
        return self.share(f"{histogram}_sum", f"{histogram}_count", by)

    def quantile(self, quantile: float, histogram: str) -> str:
        """Quantile of a histogram."""
        return f"histogram_quantile({quantile:g}, {self.rate(f'{histogram}_bucket', 'le')})"

    def level(self, part: str, whole: str, by: str = "") -> str:
        """One gauge divided by another."""
        return f"{self.gauge(part, by)} / {self.gauge(whole, by)}"

    def _select(self, metric: str, match: str = "") -> str:
        matches = ",".join(filter(None, (self.match, match)))
        return full_name(metric) + (f"{{{matches}}}" if matches else "")


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
