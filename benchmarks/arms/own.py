"""Outrider's own arms: one mode of real services, through the client library."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.arms.base import OWN
from benchmarks.samples import SampledRequest
from benchmarks.timeline import pipeline_figures
from benchmarks.workload import SEED, Cell, Tokens
from outrider import __version__
from outrider.client import NEVER, AsyncClient, Chunk, Complete, Options
from outrider.client.request import Mode
from scripts.local_services import LocalServices

MODES: tuple[Mode, ...] = ("off", "sequential", "auto")


class OwnArm:
    """One mode. All arms of a run share the services, an event loop and its channels."""

    kind = OWN
    engine = f"outrider {__version__}"

    def __init__(self, mode: Mode, client: Client, draft: str = "demo", name: str = "") -> None:
        self.mode = mode
        self.name = name or mode
        self.draft = draft
        self.speculates = mode != "off"
        self.devices = 2  # without drafts, too: long steps use the draft's core
        self._client = client

    def runs(self, cell: Cell) -> bool:
        """True for all cells."""
        return True

    def run(self, cell: Cell, prompts: Sequence[Tokens], tokens: int) -> list[SampledRequest]:
        """Send the prompts, as many at once as the cell says; the next one goes when one has ended.

        Drafts of one task are judged together, so each draft has its own.
        """
        options = Options(mode=self.mode, task=self.draft, record_timeline=True)
        options |= Options(max_tokens=tokens, temperature=cell.temperature, seed=SEED, ignore_eos=True)
        return self._client.run(self.draft, cell, prompts, options)


class Client:
    """Calls a fleet's orchestrators from one event loop."""

    def __init__(self, fleet: LocalServices, runner: asyncio.Runner) -> None:
        self._fleet = fleet
        self._runner = runner
        self._clients: dict[str, AsyncClient] = {}
        self._round_trip_ms = 0.0

    def run(
        self, draft: str, cell: Cell, prompts: Sequence[Tokens], options: Options
    ) -> list[SampledRequest]:
        """Send the prompts in order to the orchestrator of a draft, with the cell's network before its
        replicas.
        """
        endpoint = self._fleet.endpoint(draft, remote=cell.round_trip_ms > 0)
        if cell.round_trip_ms not in (0.0, self._round_trip_ms):
            self._fleet.set_round_trip(cell.round_trip_ms)
            self._round_trip_ms = cell.round_trip_ms
        client = self._clients.setdefault(endpoint, AsyncClient(endpoint, retries=NEVER))
        return self._runner.run(_all(client, prompts, options, cell.concurrency))


async def _all(
    client: AsyncClient, prompts: Sequence[Tokens], options: Options, at_once: int
) -> list[SampledRequest]:
    started, room = time.perf_counter(), asyncio.Semaphore(at_once)
    return await asyncio.gather(*(_one(client, prompt, options, started, room) for prompt in prompts))


async def _one(
    client: AsyncClient, prompt: Tokens, options: Options, started: float, room: asyncio.Semaphore
) -> SampledRequest:
    tokens: list[int] = []
    arrivals: list[tuple[float, int]] = []
    end: Complete | None = None
    async with room:
        sent = time.perf_counter() - started
        async for event in client.stream(prompt, **options):
            if isinstance(event, Chunk) and event.token_ids:
                arrivals.append((time.perf_counter() - started, len(event.token_ids)))
                tokens += event.token_ids
            elif isinstance(event, Complete):
                end = event
    assert end is not None, "a stream without an end is an error"
    passes = int(end.speculation["steps"]) - 1
    return SampledRequest(tuple(tokens), tuple(arrivals), passes, figures(end), sent)


def figures(end: Complete) -> dict[str, float]:
    """The figures that the services report of one request."""
    counts = end.speculation
    steps = max(1, counts["steps"] - 1)
    nodes = {name: counts[name] / steps for name in ("verified", "drafted")}
    return nodes | pipeline_figures(end)
