"""The largest prompts that the wire lets in, many at once: nobody else waits for them, and memory comes back.

The orchestrator is a process of its own. Its verify replica is scripted and lives here, so that what is
measured is the orchestrator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import generation_pb2, tokens_pb2
from tests.fakes import INFO, FakeVerify
from tests.integration.cluster import DEMO_TARGET, Cluster
from tests.unit.orchestrator.text.test_tokenizer import TEMPLATE

POSITIONS = 2048
METHOD = "/outrider.v1.GenerationService/Generate"
CLIENTS = 40
LOST_SECONDS = 30.0
"""A small request or a question for health without an answer for so long is lost; docs/faults.md has the
seconds that they take on a quiet machine."""
GROWTH = 400 << 20
"""Bytes that the orchestrator may grow by while it receives forty messages of 3.6 MB, each read twice."""
KEPT = 100 << 20
"""Bytes that it may keep."""
RETURN_SECONDS = 20.0
LINE = "\n" + " " * 40
"""One token of the demo's tokenizer, and nearly its longest."""


def sampling() -> tokens_pb2.SamplingParams:
    """Two tokens."""
    return tokens_pb2.SamplingParams(max_tokens=2)


def text(content: str) -> bytes:
    """A request with a text prompt, as it travels."""
    return generation_pb2.GenerateRequest(text=content, sampling=sampling()).SerializeToString()


def chat(messages: Sequence[tuple[str, str]]) -> bytes:
    """A request with a conversation, as it travels."""
    made = [generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    request = generation_pb2.GenerateRequest(chat=generation_pb2.Chat(messages=made), sampling=sampling())
    return request.SerializeToString()


def ids(count: int) -> bytes:
    """A request with token ids, as it travels."""
    prompt = tokens_pb2.TokenIds(ids=[1] * count)
    return generation_pb2.GenerateRequest(token_ids=prompt, sampling=sampling()).SerializeToString()


FLOODS: dict[str, tuple[Callable[[], bytes], int, set[str]]] = {
    "texts that cannot fit": (lambda: text("def f(x):\n" * 360_000), CLIENTS, {"INVALID_ARGUMENT"}),
    "texts that might fit": (lambda: text("def f(x):\n" * 16_000), CLIENTS, {"INVALID_ARGUMENT"}),
    "texts that fit": (lambda: text(LINE * 2000), CLIENTS, {"OK"}),
    "700,000 messages": (lambda: chat([("u", "x")] * 700_000), 1, {"INVALID_ARGUMENT"}),
    "a role of 8 MB": (lambda: chat([("u" * 8_000_000, "x")]), 1, {"INVALID_ARGUMENT"}),
    "conversations that might fit": (
        lambda: chat([("user", "def f(x):" * 8)] * POSITIONS),
        CLIENTS,
        {"INVALID_ARGUMENT"},
    ),
    "8,000,000 token ids": (lambda: ids(8_000_000), 4, {"INVALID_ARGUMENT"}),
}


@dataclass
class Felt:
    """What the others felt beside a flood."""

    small: list[float] = field(default_factory=list)
    """Seconds of small requests, one after another."""
    health: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    """Statuses of the flood."""
    memory: tuple[int, int, int] = (0, 0, 0)
    """Bytes of the orchestrator before, at the peak and after."""

    def __str__(self) -> str:
        small, health = (sorted(seconds) for seconds in (self.small, self.health))
        before, peak, after = (size >> 20 for size in self.memory)
        return (
            f"{len(small)} small: median {median(small) * 1e3:.0f} ms, worst {small[-1] * 1e3:.0f} ms; "
            f"health: {median(health) * 1e3:.0f} and {health[-1] * 1e3:.0f} ms; "
            f"memory {before} / {peak} / {after} MB; {set(self.answers)}"
        )


def resident(pid: int, name: str = "VmRSS") -> int:
    """Bytes of memory of a process; VmHWM is the most it had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(name))) << 10


def forget_peak(pid: int) -> None:
    """Let VmHWM begin again."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def generate(channel: grpc.aio.Channel) -> Callable[..., grpc.aio.UnaryStreamCall]:
    """The method, for requests that are bytes already."""
    return channel.unary_stream(METHOD, response_deserializer=generation_pb2.GenerateResponse.FromString)


async def flood(endpoint: str, message: bytes, clients: int) -> list[str]:
    """As many clients at once, each with its own connection; how each ended."""

    async def one() -> str:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(endpoint, options) as channel:
            try:
                async for _ in generate(channel)(message, timeout=60):
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

    return list(await asyncio.gather(*[one() for _ in range(clients)]))


async def watch(endpoint: str, felt: Felt, over: Callable[[], bool]) -> None:
    """Small requests and health, one after another, until it is over and some more."""
    message = text("hello")
    async with grpc.aio.insecure_channel(endpoint) as channel:
        call, health = generate(channel), health_pb2_grpc.HealthStub(channel)
        more = 5
        while more:
            more -= over()
            started = time.perf_counter()
            await health.Check(health_pb2.HealthCheckRequest(), timeout=LOST_SECONDS)
            asked = time.perf_counter()
            ends = [part async for part in call(message, timeout=LOST_SECONDS) if part.HasField("complete")]
            assert ends[0].complete.usage.completion_tokens == 2
            felt.health.append(asked - started)
            felt.small.append(time.perf_counter() - asked)


async def settled(pid: int, wanted: int) -> int:
    """Memory of a process once it has so little, or after a while."""
    end = time.monotonic() + RETURN_SECONDS
    while resident(pid) > wanted and time.monotonic() < end:  # noqa: ASYNC110 - no event says it
        await asyncio.sleep(0.1)
    return resident(pid)


async def beside(endpoint: str, pid: int, message: bytes, clients: int) -> Felt:
    """What a flood does to others."""
    felt = Felt()
    await watch(endpoint, Felt(), lambda: True)
    forget_peak(pid)
    before = resident(pid)
    running = asyncio.create_task(flood(endpoint, message, clients))
    await watch(endpoint, felt, running.done)
    felt.answers = await running
    felt.memory = before, resident(pid, "VmHWM"), await settled(pid, before + KEPT)
    return felt


def attacked(folder: Path, message: bytes, clients: int) -> Felt:
    """A flood on a new orchestrator."""
    tokenizer_json = (DEMO_TARGET / "tokenizer.json").read_bytes()

    async def scenario() -> Felt:
        served = replace(INFO, vocabulary_size=4096, context_length=POSITIONS)
        verify = FakeVerify(served, tokenizer_json=tokenizer_json, chat_template=TEMPLATE)
        endpoint = await verify.start()
        cluster = Cluster(folder)
        try:
            process = cluster.serve("orchestrator", verify=endpoint)
            await asyncio.to_thread(process.wait_ready)
            return await beside(process.endpoint, process.pid, message, clients)
        finally:
            cluster.stop()
            await verify.kill()

    return asyncio.run(scenario())


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_large_prompts_is_felt_by_nobody_else(tmp_path: Path, name: str) -> None:
    """Each has its status; beside them health answers, no small request is lost, and memory comes back."""
    message, clients, statuses = FLOODS[name]
    felt = attacked(tmp_path, message(), clients)
    print(f"\n{name}: {felt}")
    assert set(felt.answers) <= statuses, felt
    before, peak, after = felt.memory
    assert peak - before < GROWTH, felt
    assert after - before <= KEPT, felt
