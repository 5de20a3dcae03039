"""Builds the PromQL of the metrics page and of the dashboards.

Metrics of the gateway and of the orchestrator, verify and draft services are abbreviated `g:name`, `o:name`,
`v:name` and `d:name`.
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
METRIC = re.compile(r"(?:(mean|max|p\d\d) )?\b([govd]:\w+)(?:\{(.*?)\})?")


def full_name(metric: str) -> str:
    """The exported name of an abbreviated metric such as `v:steps_total`."""
    service, _, name = metric.partition(":")
    return PREFIXES[service] + name


@dataclass(frozen=True, slots=True)
class Promql:
    """Makes queries over a window, restricted to series that match."""

    window: str
    match: str = ""

    def expand(self, short: str) -> str:
        """The full query for an abbreviated one such as `v:hits_total / v:steps_total by task`.

        A counter stands for its rate and a gauge for its sum, over all replicas or by the labels at the end;
        `max`, `mean` (of a histogram) and `p95` before a metric ask for something else.
        """
        expression, _, by = short.partition(" by ")

        def rate(name: str, by: str, match: str = "") -> str:
            return f"sum{_by(by)}(rate({self._select(name, match)}[{self.window}]))"

        def metric(found: re.Match[str]) -> str:
            how, name, match = found[1], found[2], found[3] or ""
            if how == "mean":
                return f"{rate(f'{name}_sum', by)} / {rate(f'{name}_count', by)}"
            if how is not None and how[0] == "p":
                return f"histogram_quantile({int(how[1:]) / 100:g}, {rate(f'{name}_bucket', 'le')})"
            if name.endswith(COUNTERS):
                return rate(name, by, match)
            return f"{how or 'sum'}{_by(by)}({self._select(name)})"

        return METRIC.sub(metric, expression)

    def _select(self, metric: str, match: str = "") -> str:
        matches = ",".join(filter(None, (self.match, match)))
        return full_name(metric) + (f"{{{matches}}}" if matches else "")


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
