"""Streams that are killed at random places: their connection, the gateway or the orchestrator before them.

    HTTP client --> proxy --> gateway --> orchestrator --> verify, draft
    gRPC client --> proxy ---------------> orchestrator

Both clients take up their stream as a user's would: HTTP with `Last-Event-ID`, gRPC with `outrider.client`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx2

from outrider.cli.bench.openai_target import lines
from outrider.client import AsyncClient, Chunk, Complete, Retries, Started
from outrider.client.request import Mode
from scripts.proxy import Proxy
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster, Process

CONNECTION = "connection"
HTTP_KILLS = (CONNECTION, "gateway", "orchestrator")
GRPC_KILLS = (CONNECTION, "orchestrator")
MAX_EVENTS = 12
"""Of a stream between two kills."""
PATIENT = Retries(begin=(0.25,) * 40, resume=(0.1,) * 300)
"""A killed orchestrator is back within some seconds; a busy machine takes longer."""
MODES: tuple[Mode, ...] = ("auto", "sequential", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One stream: what is asked, and after how many events what is killed."""

    prompt: str
    mode: Mode
    temperature: float
    max_tokens: int
    kills: tuple[tuple[int, str], ...]

    @property
    def options(self) -> dict[str, Any]:
        """Of the client's request."""
        return {
            "mode": self.mode,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }


@dataclass(slots=True)
class Told:
    """What a client was given of one stream."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Over gRPC."""
    seed: int = 0


def plans(seed: int, kinds: tuple[str, ...], tokens: int) -> Iterator[Plan]:
    """Streams without end; the kinds of kills take turns, all else is drawn."""
    rng, kind, mode = random.Random(seed), cycle(kinds), cycle(MODES)
    while True:
        yield Plan(
            prompt=f"def function_{rng.randrange(1000)}(values):\n",
            mode=next(mode),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            max_tokens=tokens,
            kills=tuple((rng.randint(0, MAX_EVENTS), next(kind)) for _ in range(rng.randint(2, 6))),
        )


class Killing:
    """The processes, and kills on them. All methods belong to one event loop."""

    def __init__(self, cluster: Cluster, processes: dict[str, Process]) -> None:
        self._cluster = cluster
        self._processes = processes
        self.proxies = {name: Proxy(address(processes[name])) for name in ("gateway", "orchestrator")}
        self.done: Counter[str] = Counter()

    @classmethod
    @asynccontextmanager
    async def started(cls, folder: Path) -> AsyncGenerator[Killing, None]:
        """The demo pair behind an orchestrator and a gateway, until the block ends."""
        cluster = Cluster(folder, {"OMP_NUM_THREADS": "1"})
        try:
            killing = cls(cluster, await asyncio.to_thread(_serve, cluster))
            for proxy in killing.proxies.values():
                await proxy.start()
            yield killing
            for proxy in killing.proxies.values():
                await proxy.close()
        finally:
            cluster.stop()

    @property
    def orchestrator(self) -> str:
        """Its own endpoint, for requests that nothing cuts."""
        return self._processes["orchestrator"].endpoint

    async def kill(self, kind: str, proxy: Proxy) -> None:
        """End what is named, at once; a process is started again on its port."""
        self.done[kind] += 1
        if kind == CONNECTION:
            proxy.cut()
            return
        process = self._processes[kind]
        await asyncio.to_thread(process.kill)
        self._processes[kind] = await asyncio.to_thread(self._cluster.restart, process)

    async def read_http(self, plan: Plan) -> Told:
        """The whole text over HTTP, however often the stream is cut."""
        told, kills, proxy, last = Told(), list(plan.kills), self.proxies["gateway"], ""
        while True:
            try:
                async with aclosing(_events(proxy.endpoint, plan, last)) as events:
                    async for event in self._until_killed(events, kills, proxy):
                        if event.data is None:
                            return told
                        last, told.seed = event.id, int(event.id.partition(".")[0], 16)
                        told.text += event.data["choices"][0]["text"]
            except (httpx2.TransportError, ConnectionError):
                await asyncio.sleep(0.02)

    async def read_grpc(self, plan: Plan) -> Told:
        """The whole text over gRPC, by a client that takes up what was cut."""
        told, kills, proxy = Told(), list(plan.kills), self.proxies["orchestrator"]
        async with AsyncClient(proxy.endpoint, retries=PATIENT, timeout=240) as client:
            events = client.stream(plan.prompt, **plan.options)
            async with aclosing(events):
                async for event in self._until_killed(events, kills, proxy):
                    match event:
                        case Started():
                            told.seed = event.seed
                        case Chunk():
                            told.text += event.text
                            told.tokens += event.token_ids
                        case Complete():
                            pass
        return told

    async def unbroken(self, plan: Plan, seed: int) -> Told:
        """The same with nothing in between."""
        async with AsyncClient(self.orchestrator, retries=PATIENT, timeout=240) as client:
            generation = (await client.generate(plan.prompt, seed=seed, **plan.options)).generations[0]
        return Told(generation.text, list(generation.token_ids), seed)

    async def _until_killed(
        self, events: AsyncGenerator[Any, None], kills: list[tuple[int, str]], proxy: Proxy
    ) -> AsyncGenerator[Any, None]:
        """The events, with the planned kills between them."""
        passed = 0
        if kills and kills[0][0] == 0:
            await self.kill(kills.pop(0)[1], proxy)
        async for event in events:
            yield event
            passed += 1
            if kills and passed >= kills[0][0]:
                passed = 0
                await self.kill(kills.pop(0)[1], proxy)


@dataclass(frozen=True, slots=True)
class _Event:
    id: str
    data: Any
    """None: [DONE]."""


async def _events(endpoint: str, plan: Plan, last: str) -> AsyncGenerator[_Event, None]:
    """Whole server-sent events of one connection.

    Raises:
        TransportError, ConnectionError: it ended before the stream did.
    """
    headers = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
    options = plan.options | {"speculation": {"mode": plan.mode}}
    del options["mode"]
    body = {"prompt": plan.prompt, "stream": True, **options}
    url = f"http://{endpoint}/v1/completions"
    async with (
        httpx2.AsyncClient(timeout=None, trust_env=False) as http,
        http.stream("POST", url, json=body, headers=headers) as response,
    ):
        if response.status_code == 503:  # the gateway is up before it has found the orchestrator
            raise ConnectionError(await response.aread())
        assert response.status_code == 200, await response.aread()
        name, data = "", ""
        async for line in lines(response):
            field_, _, value = line.decode().partition(": ")
            match field_:
                case "id":
                    name = value
                case "data":
                    data = value
                case "":
                    yield _Event(name, _value(data))
                    if data == "[DONE]":
                        return
    raise ConnectionError("the stream ended before its end")


def _value(data: str) -> Any:
    """What an event says; an error of a stream that the gateway gave up is a broken stream."""
    if data == "[DONE]":
        return None
    value = json.loads(data)
    if "error" in value:
        raise ConnectionError(value["error"]["message"])
    return value


def _serve(cluster: Cluster) -> dict[str, Process]:
    """All four processes; drafts are used."""
    verify = cluster.serve("verify", model=DEMO_TARGET, dtype="float32")
    draft = cluster.serve("draft", model=DEMO_DRAFT, dtype="float32")
    replicas = {"verify": verify.wait_ready().endpoint, "draft": draft.wait_ready().endpoint}
    orchestrator = cluster.serve("orchestrator", discovery_seconds=0.3, **replicas).wait_ready()
    gateway = cluster.serve("gateway", orchestrator=orchestrator.endpoint).wait_ready()
    return {"orchestrator": orchestrator, "gateway": gateway}


def address(process: Process) -> str:
    """host:port, of a gateway too."""
    return process.endpoint.removeprefix("http://")


__all__ = ["GRPC_KILLS", "HTTP_KILLS", "Killing", "Plan", "Told", "plans"]
