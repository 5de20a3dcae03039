"""Counts by the labels that callers put on requests, bounded like those of `task`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from outrider.telemetry.metric_parts import OTHER, Maker, Tasks


class LabelInstruments:
    """Counts by name and value of labels. The first names, and the first values of each name, are counted by
    themselves; later ones share "other"."""

    def __init__(self, make: Maker) -> None:
        labels = ("label", "value")
        self._requests = make.counter("labelled_requests", "Requests that ended, by label.", *labels)
        self._tokens = make.counter("labelled_tokens", "Tokens generated, by label.", *labels)
        self._names = Tasks()
        self._values: defaultdict[str, Tasks] = defaultdict(Tasks)

    def finished(self, labels: Mapping[str, str], tokens: int) -> None:
        """Record the end of a request with these labels, for which `tokens` tokens were generated."""
        for name, value in labels.items():
            key = self._key(name, value)
            self._requests.labels(*key).inc()
            self._tokens.labels(*key).inc(tokens)

    def _key(self, name: str, value: str) -> tuple[str, str]:
        known = self._names.name(name)
        return known, OTHER if known == OTHER else self._values[known].name(value)
