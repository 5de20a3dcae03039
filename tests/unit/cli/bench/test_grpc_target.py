"""Outrider's own service as a target, against a fake orchestrator."""

from __future__ import annotations

from contextlib import aclosing

import grpc
import pytest

from outrider.cli.bench.grpc_target import GrpcTarget
from outrider.cli.bench.target import Ask, Delivered, Ended, Event, Sampling
from outrider.client import NEVER, AsyncClient, Message
from outrider.protocol.errors import Unavailable
from outrider.v1 import generation_pb2
from tests.unit.cli.bench.worlds import in_a_loop
from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving


async def ask(endpoint: str, one: Ask, sampling: Sampling | None = None) -> tuple[GrpcTarget, list[Event]]:
    """The target, and what came of one request."""
    async with AsyncClient(endpoint, retries=NEVER) as client:
        target = await GrpcTarget.reach(client, sampling or Sampling(max_tokens=5), "off", "")
        async with aclosing(target.stream(one)) as stream:
            return target, [event async for event in stream]


@in_a_loop
async def test_an_answer() -> None:
    """A delivery for each chunk with tokens, then the counts of the service."""
    with serving(FakeOrchestrator()) as (_, endpoint):
        target, events = await ask(endpoint, Ask(0, "count"))
    assert events[:-1] == [Delivered()] * 3
    end = events[-1]
    assert isinstance(end, Ended)
    assert (end.input_tokens, end.output_tokens, end.finish_reason) == (3, 3, "stop")
    assert end.speculation["acceptance_length"] == 2.0
    assert (target.served.address, target.served.model) == (f"gRPC {endpoint}", "demo")
    assert target.served.vocabulary == 100


@in_a_loop
async def test_what_is_sent() -> None:
    """The sampling of the load, the mode, and the seed of the request."""
    sampling = Sampling(max_tokens=9, temperature=0.5, ignore_eos=True)
    with serving(FakeOrchestrator()) as (fake, endpoint):
        await ask(endpoint, Ask(0, (1, 2), seed=4), sampling)
        await ask(endpoint, Ask(1, (Message("user", "hi"),)))
    ids, chat = fake.requests
    assert list(ids.token_ids.ids) == [1, 2]
    assert (ids.sampling.max_tokens, ids.sampling.temperature, ids.sampling.ignore_eos) == (9, 0.5, True)
    assert (ids.sampling.seed, ids.speculation.mode) == (4, generation_pb2.MODE_OFF)
    assert chat.chat.messages[0].content == "hi"
    assert not chat.sampling.HasField("seed")


@in_a_loop
async def test_a_broken_stream_is_not_mended() -> None:
    """A benchmark counts it as failed."""
    fake = FakeOrchestrator()
    fake.breaks = [(1, grpc.StatusCode.UNAVAILABLE)]
    with serving(fake) as (_, endpoint), pytest.raises(Unavailable):
        await ask(endpoint, Ask(0, "count"))
    assert len(fake.requests) == 1
