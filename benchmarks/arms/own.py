"""Outrider's own arms: one mode of real services, through gRPC as any client would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from benchmarks.arms.base import OWN
from benchmarks.samples import SampledRequest
from benchmarks.timeline import pipeline_figures
from benchmarks.workload import SEED, Cell, Tokens
from outrider import __version__
from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2
from scripts.local_services import LocalServices

MODES = {"off": "MODE_OFF", "sequential": "MODE_SEQUENTIAL", "auto": "MODE_AUTO"}
TIMEOUT = 600.0


class OwnArm:
    """One mode. All arms of a run share the services, an event loop and its channels."""

    kind = OWN
    engine = f"outrider {__version__}"

    def __init__(self, mode: str, client: Client, draft: str = "demo", name: str = "") -> None:
        self.mode = mode
        self.name = name or mode
        self.draft = draft
        self.speculates = mode != "off"
        self.devices = 2  # without drafts, too: long steps use the draft's core
        self._client = client

    def runs(self, cell: Cell) -> bool:
        """All of them."""
        return True

    def run(self, cell: Cell, prompts: Sequence[Tokens], tokens: int) -> list[SampledRequest]:
        """Send the prompts, as many at once as the cell says; the next one goes when one has ended."""
        stub = self._client.stub(self.draft, cell.round_trip_ms)
        messages = [message(prompt, self.mode, tokens, cell.temperature, self.draft) for prompt in prompts]
        return self._client.run(stub, messages, cell.concurrency)


class Client:
    """Calls a fleet's orchestrators from one event loop."""

    def __init__(self, fleet: LocalServices, runner: asyncio.Runner) -> None:
        self._fleet = fleet
        self._runner = runner
        self._stubs: dict[str, generation_pb2_grpc.GenerationServiceStub] = {}
        self._round_trip_ms = 0.0

    def stub(self, draft: str, round_trip_ms: float = 0.0) -> generation_pb2_grpc.GenerationServiceStub:
        """The orchestrator for a draft, with this network between it and its replicas."""
        endpoint = self._fleet.endpoint(draft, remote=round_trip_ms > 0)
        if round_trip_ms not in (0.0, self._round_trip_ms):
            self._fleet.set_round_trip(round_trip_ms)
            self._round_trip_ms = round_trip_ms
        if endpoint not in self._stubs:
            self._stubs[endpoint] = self._runner.run(_connect(endpoint))
        return self._stubs[endpoint]

    def run(
        self,
        stub: generation_pb2_grpc.GenerationServiceStub,
        messages: Sequence[generation_pb2.GenerateRequest],
        at_once: int,
    ) -> list[SampledRequest]:
        """Send the messages in order, so many at a time."""
        return self._runner.run(_all(stub, messages, asyncio.Semaphore(at_once)))


def message(
    prompt: Sequence[int], mode: str, tokens: int, temperature: float, task: str
) -> generation_pb2.GenerateRequest:
    """A request with a timeline. Drafts of one task are judged together, so each draft has its own."""
    return generation_pb2.GenerateRequest(
        token_ids=tokens_pb2.TokenIds(ids=prompt),
        sampling=tokens_pb2.SamplingParams(
            max_tokens=tokens, temperature=temperature, seed=SEED, ignore_eos=True
        ),
        speculation=generation_pb2.SpeculationParams(mode=MODES[mode]),
        record_timeline=True,
        task=task,
    )


async def _connect(endpoint: str) -> generation_pb2_grpc.GenerationServiceStub:
    channel = grpc.aio.insecure_channel(endpoint)
    return generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]


async def _all(
    stub: generation_pb2_grpc.GenerationServiceStub,
    messages: Sequence[generation_pb2.GenerateRequest],
    room: asyncio.Semaphore,
) -> list[SampledRequest]:
    started = time.perf_counter()
    return await asyncio.gather(*(_one(stub, one, started, room) for one in messages))


async def _one(
    stub: generation_pb2_grpc.GenerationServiceStub,
    request: generation_pb2.GenerateRequest,
    started: float,
    room: asyncio.Semaphore,
) -> SampledRequest:
    tokens: list[int] = []
    arrivals: list[tuple[float, int]] = []
    complete = generation_pb2.Complete()
    async with room:
        sent = time.perf_counter() - started
        async for response in stub.Generate(request, timeout=TIMEOUT):
            if new := response.chunk.token_ids:
                arrivals.append((time.perf_counter() - started, len(new)))
                tokens += new
            complete.MergeFrom(response.complete)
    return SampledRequest(
        tuple(tokens), tuple(arrivals), complete.speculation.steps - 1, figures(complete), sent
    )


def figures(complete: generation_pb2.Complete) -> dict[str, float]:
    """What the services say of one request."""
    counts = complete.speculation
    steps = max(1, counts.steps - 1)
    return {
        "verified": counts.verified / steps,
        "drafted": counts.drafted / steps,
        **pipeline_figures(complete),
    }
