"""Callers who ask for too much; a process of their own, so that they slow nobody else's clock.

    python -m tests.faults.harness.attacks NAME ENDPOINT [TOKEN]

Goes on until it is killed. What the services answer is counted, and printed as JSON when SIGTERM comes.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import count

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2

GREEDY_TOKENS = 1500
PROMPT = tokens_pb2.TokenIds(ids=[5, 6, 7, 8])
CONNECTIONS = 500
Request = generation_pb2.GenerateRequest


def asking(**fields: object) -> Request:
    """A request for a few tokens; `fields` take the place of the prompt of ids."""
    given: dict[str, object] = {"token_ids": PROMPT, "sampling": sampling(8), **fields}
    if {"text", "chat"} & fields.keys():
        del given["token_ids"]
    return Request(**given)


def sampling(max_tokens: int, **fields: object) -> tokens_pb2.SamplingParams:
    """Sampling that goes on to the last token."""
    return tokens_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, **fields)


def chat(*messages: tuple[str, str]) -> generation_pb2.Chat:
    """A chat of (role, content)."""
    return generation_pb2.Chat(
        messages=[generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )


ASKS: dict[str, tuple[int, Callable[[], Request]]] = {
    "texts of 3.6 MB": (40, lambda: asking(text="def f(n): return n\n" * 190_000)),
    "texts that just fit": (40, lambda: asking(text="x = 1\n" * 500)),
    "a word of 3.6 MB": (8, lambda: asking(text="a" * 3_600_000)),
    "700,000 messages": (1, lambda: asking(chat=chat(*([("user", "a")] * 700_000)))),
    "a role of 8 MB": (1, lambda: asking(chat=chat(("r" * 8_000_000, "a")))),
    "a content of 8 MB": (4, lambda: asking(chat=chat(("user", "a b " * 2_000_000)))),
    "2,000,000 ids": (8, lambda: asking(token_ids=tokens_pb2.TokenIds(ids=[5] * 2_000_000))),
    "700,000 biases": (
        4, lambda: asking(sampling=sampling(8, logit_bias=dict.fromkeys(range(700_000), 1.0))),
    ),
    "1,000,000 stop strings": (4, lambda: asking(sampling=sampling(8, stop=["ab"] * 1_000_000))),
    "8 MB to resume from": (8, lambda: asking(resume_token_ids=[5] * 2_000_000)),
    "n = 16, long": (6, lambda: asking(sampling=sampling(GREEDY_TOKENS, n=16))),
    "many small requests": (400, lambda: asking()),
}  # fmt: skip
"""By name: how many callers, each of whom asks again when it was answered, and for what."""


class Attack:
    """Calls to one endpoint and what became of them."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.endpoint = endpoint
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.answers: Counter[str] = Counter()

    async def ask(self, callers: int, build: Callable[[], Request]) -> None:
        """So many callers, with a connection each, that ask for the same again and again."""
        message = await asyncio.to_thread(build)
        await asyncio.gather(*(self._caller(message) for _ in range(callers)))

    async def _caller(self, message: Request) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ]
        async with grpc.aio.insecure_channel(self.endpoint, options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            while True:
                await self._call(stub.Generate(message, metadata=self.metadata))

    async def _call(self, call: grpc.aio.UnaryStreamCall) -> None:
        try:
            async for _ in call:
                pass
            self.answers["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.answers[error.code().name] += 1
            await asyncio.sleep(0.05)  # it does not wait as long as it is told to

    async def watch_health(self) -> None:
        """One connection with as many health watches as it may have, and another, ..."""
        async with grpc.aio.insecure_channel(self.endpoint) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await asyncio.gather(*(self._watch(stub) for _ in range(2000)))

    async def _watch(self, stub: health_pb2_grpc.HealthStub) -> None:
        while True:
            await self._call(stub.Watch(health_pb2.HealthCheckRequest()))

    async def connect(self) -> None:
        """Connections that say nothing, opened again when they are closed."""
        host, _, port = self.endpoint.rpartition(":")

        async def one() -> None:
            while True:
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    await reader.read()
                    writer.close()
                self.answers["closed"] += 1

        await asyncio.gather(*(one() for _ in range(CONNECTIONS)))

    async def label(self) -> None:
        """Every request with a task label of its own."""
        labels: Iterator[int] = count()
        async with grpc.aio.insecure_channel(self.endpoint) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)

            async def one() -> None:
                while True:
                    message = asking(task=f"task {next(labels)}", sampling=sampling(1))
                    await self._call(stub.Generate(message, metadata=self.metadata))

            await asyncio.gather(*(one() for _ in range(16)))

    async def garble(self) -> None:
        """Long metadata, and bytes that are no message."""
        async with grpc.aio.insecure_channel(self.endpoint) as channel:
            method = channel.unary_stream("/outrider.v1.GenerationService/Generate")
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            while True:
                await self._call(method(b"\xff" * 1_000_000, metadata=self.metadata))
                long = (*self.metadata, ("x-long", "a" * 60_000))
                await self._call(stub.Generate(asking(), metadata=long))


OTHERS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    "2,000 health watches": Attack.watch_health,
    "500 silent connections": Attack.connect,
    "10,000 task labels": Attack.label,
    "garbage and long headers": Attack.garble,
}
NAMES = (*ASKS, *OTHERS)


async def attack(name: str, endpoint: str, token: str = "") -> Counter[str]:
    """Attack until SIGTERM; statuses and how often each came."""
    one = Attack(endpoint, token)
    running = asyncio.ensure_future(one.ask(*ASKS[name]) if name in ASKS else OTHERS[name](one))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with suppress(asyncio.CancelledError):
        await running
    return one.answers


if __name__ == "__main__":
    print(json.dumps(asyncio.run(attack(*sys.argv[1:]))))
