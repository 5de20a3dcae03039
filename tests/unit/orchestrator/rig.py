"""A whole orchestrator in this process, between scripted replicas and a real client."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from orchestrator.main import SERVICE, Orchestrator
from outrider.config import OrchestratorConfig
from outrider.rpc.channels import error_of, open_channel
from outrider.rpc.serving import GrpcServer
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2
from tests.fakes import FakeDraft, FakeReplica, FakeVerify

AUTO, SEQUENTIAL, OFF = generation_pb2.MODE_AUTO, generation_pb2.MODE_SEQUENTIAL, generation_pb2.MODE_OFF
PROMPT = (10, 20, 30)


@dataclass(slots=True)
class Answer:
    """What a client received."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: list[tokens_pb2.TokenLogprob] = field(default_factory=list)
    origins: list[tokens_pb2.TokenOrigin] = field(default_factory=list)
    steps: list[generation_pb2.StepDetail] = field(default_factory=list)
    prompt_logprobs: list[tokens_pb2.TokenLogprob] = field(default_factory=list)
    starts: dict[int, generation_pb2.Started] = field(default_factory=dict)
    completes: dict[int, generation_pb2.Complete] = field(default_factory=dict)

    def add(self, response: generation_pb2.GenerateResponse) -> None:
        """One message of the stream."""
        if response.HasField("started"):
            assert response.started.index not in {*self.starts, *self.tokens}, (
                "it begins once, before its tokens"
            )
            self.starts[response.started.index] = response.started
            return
        if response.HasField("complete"):
            assert response.complete.index in self.starts
            self.completes[response.complete.index] = response.complete
            return
        chunk = response.chunk
        assert chunk.index not in self.completes, "no chunk follows the completion"
        self.tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
        self.text[chunk.index] = self.text.get(chunk.index, "") + chunk.text
        self.logprobs.extend(chunk.logprobs)
        self.origins.extend(chunk.origins)
        self.steps += [chunk.step] if chunk.HasField("step") else []
        assert not (chunk.prompt_logprobs and self.tokens[chunk.index]), "the prompt comes before new tokens"
        self.prompt_logprobs.extend(chunk.prompt_logprobs)


class Rig:
    """Replicas, orchestrator and client; `async with` starts, stops, and checks that nothing is left."""

    def __init__(
        self, *replicas: FakeReplica, clock: Callable[[], float] = time.monotonic, **settings: Any
    ) -> None:
        self.replicas = replicas
        self.clock = clock
        """Of requests; replicas are watched on the real one."""
        self.settings = {
            "draft_open_timeout_ms": 300,
            "discovery_seconds": 0.1,
            "breaker_seconds": 60,
            "recovery_seconds": 5,
        } | settings
        self.registry = CollectorRegistry()

    async def __aenter__(self) -> Rig:
        for replica in self.replicas:
            await replica.start()
        self.config = OrchestratorConfig(
            host="127.0.0.1",
            port=0,
            reflection=False,
            **{
                "verify": tuple(r.endpoint for r in self.replicas if isinstance(r, FakeVerify)),
                "draft": tuple(r.endpoint for r in self.replicas if isinstance(r, FakeDraft)),
            }
            | self.settings,
        )
        self.server = GrpcServer(self.config, [SERVICE])
        await self.server.start()
        self.orchestrator = Orchestrator(self.config, OrchestratorInstruments(self.registry), self.clock)
        await self.orchestrator.start(self.server)
        self.server.set_serving(True)
        self.fleet = self.orchestrator.fleet
        self.channel = open_channel(self.server.endpoint)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            await self.quiet()
        await self.channel.close()
        await self.orchestrator.close()
        await self.server.stop()
        for replica in self.replicas:
            await replica.kill()

    async def quiet(self) -> None:
        """Nothing is left of any request: no sessions, reservations, running slots or stream tasks."""
        await self.until(lambda: self.leftovers() == [])

    def leftovers(self) -> list[str]:
        """What still runs."""
        left = [f"{replica.sessions} sessions" for replica in self.replicas if replica.sessions]
        replicas = [replica for pool in self.fleet.pools.values() for replica in pool]
        left += [f"reservation on {replica.endpoint}" for replica in replicas if replica.reservations]
        left += ["running"] * self.orchestrator.running()
        names = ("Pipeline.", "Generation.", "ReplicaStream.", "GenerationServicer.")
        tasks = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
        return left + [name for name in tasks if name.startswith(names)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """See the function of this name."""
        await until(condition)

    async def generate(
        self, prompt: Sequence[int] = PROMPT, deadline: float | None = 60.0, **fields: Any
    ) -> Answer:
        """Run one request to its end; raises the OutriderError that the status stands for."""
        answer = Answer()
        call = self.stub.Generate(request(prompt, **fields), timeout=deadline)
        try:
            async for response in call:
                answer.add(response)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
        finally:
            call.cancel()  # gRPC does not, where a task is cancelled before the first message
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the orchestrator's metrics."""
        return self.registry.get_sample_value(f"outrider_orchestrator_{name}", labels) or 0.0


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Let the event loop turn until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - no one event says it
            await asyncio.sleep(0.002)


def request(
    prompt: Sequence[int] = PROMPT, mode: int = AUTO, **fields: Any
) -> generation_pb2.GenerateRequest:
    """A request; fields that are not of GenerateRequest are sampling parameters."""
    own = {
        name: fields.pop(name)
        for name in list(fields)
        if name in generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    }
    if "text" not in own and "chat" not in own:
        own["token_ids"] = tokens_pb2.TokenIds(ids=prompt)
    return generation_pb2.GenerateRequest(
        speculation=generation_pb2.SpeculationParams(mode=mode),
        sampling=tokens_pb2.SamplingParams(**{"max_tokens": 40} | fields),
        **own,
    )


def runs(pid: int) -> bool:
    """True while a process runs."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@contextmanager
def no_more_files(spare: int) -> Iterator[None]:
    """A context in which this process can open only `spare` further file descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
