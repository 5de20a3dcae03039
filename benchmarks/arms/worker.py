"""Arms that run in a worker process of their own (`benchmarks/workers/`), kept alive over the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.arms.base import PEER
from benchmarks.samples import SampledRequest
from benchmarks.workload import SEED, Cell, Tokens
from scripts.child import Child


class WorkerArm:
    """One way to use a worker: `options` go with every request."""

    def __init__(
        self,
        name: str,
        worker: Child,
        *,
        devices: int,
        speculates: bool,
        engine: str,
        kind: str = PEER,
        options: Mapping[str, Any] | None = None,
        largest: int = 0,
    ) -> None:
        self.name = name
        self.kind = kind
        self.devices = devices
        self.speculates = speculates
        self.engine = engine
        self._worker = worker
        self._options = dict(options or {})
        self._largest = largest
        """Most prompts that the worker serves at once; 0: any number."""

    def runs(self, cell: Cell) -> bool:
        """True for cells without a network, up to the largest batch."""
        return not cell.round_trip_ms and (not self._largest or cell.concurrency <= self._largest)

    def run(self, cell: Cell, prompts: Sequence[Tokens], tokens: int) -> list[SampledRequest]:
        """Let the worker serve all prompts at once."""
        wanted = {"prompts": prompts, "tokens": tokens, "temperature": cell.temperature, "seed": SEED}
        answer = self._worker.ask({**wanted, **self._options})
        return [request_of(one) for one in answer["requests"]]


def engine_of(ready: Mapping[str, Any]) -> str:
    """The versions in a worker's first line."""
    return ", ".join(f"{name} {version}" for name, version in ready["versions"].items())


def request_of(answer: Mapping[str, Any]) -> SampledRequest:
    """A worker's answer for one prompt."""
    arrivals = tuple((float(at), int(count)) for at, count in answer["arrivals"])
    return SampledRequest(tuple(answer["tokens"]), arrivals, int(answer.get("passes", 0)))
