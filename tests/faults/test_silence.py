"""More than a minute in which nobody says anything, with keepalives at every hop: nothing is lost by it."""

from __future__ import annotations

import asyncio
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes import FakeDraft, FakeVerify
from tests.integration.client import Client, collect, request
from tests.integration.cluster import DEMO_TARGET
from tests.integration.reference import assert_same
from tests.unit.orchestrator.rig import Rig

SILENCE_SECONDS = 75.0
"""Longer than three pings of a client, after which gRPC cuts off one that pings too often."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_streams_may_be_silent() -> None:
    """While a step takes more than a minute, its streams stay, nobody is blamed, and a request that waits for
    the place is served after it."""
    verify, draft = FakeVerify(), FakeDraft()
    verify.hold.clear()
    async with Rig(verify, draft, max_running=1, recovery_seconds=300) as rig:
        running, waiting = (asyncio.create_task(rig.generate(deadline=300)) for _ in range(2))
        await rig.until(lambda: verify.sessions == 1)
        await asyncio.sleep(SILENCE_SECONDS)
        assert not running.done()
        verify.hold.set()
        first, second = await asyncio.gather(running, waiting)
        assert first.tokens == second.tokens
        assert first.completes[0].speculation.verify_losses == 0
        assert len(verify.openings) == 2


def test_a_replica_that_hangs_for_more_than_a_minute(own_cluster, reference, prompts) -> None:
    """The only verify replica is stopped for so long that keepalive gives its connections up: requests that
    run and new ones wait, and end with the right tokens when it goes on."""
    verify = own_cluster.serve("verify", model=DEMO_TARGET, dtype="float32").wait_ready()
    settings = {"verify": verify.endpoint, "recovery_seconds": 300}
    client = Client(own_cluster.serve("orchestrator", **settings).wait_ready().endpoint)
    prompt = prompts(9)[8]
    with ThreadPoolExecutor(2) as pool:
        call = client.stream(request(prompt, max_tokens=400), timeout=400)
        responses = [next(call)]
        verify.signal(signal.SIGSTOP)
        try:
            later = pool.submit(client.generate, prompt, max_tokens=20)
            time.sleep(SILENCE_SECONDS)
        finally:
            verify.signal(signal.SIGCONT)
        responses += list(call)
        assert_same(reference, prompt, reference.greedy(prompt, 20), later.result(300).tokens)
    assert_same(reference, prompt, reference.greedy(prompt, 400), collect(responses)[0].tokens)


def test_a_reader_that_sleeps(demo, reference, prompts) -> None:
    """A client that reads nothing for more than a minute gets the rest of its text afterwards."""
    prompt = prompts(9)[7]
    call = demo.client("real").stream(request(prompt, max_tokens=600), timeout=400)
    responses = [next(call)]
    time.sleep(SILENCE_SECONDS)
    responses += list(call)
    assert_same(reference, prompt, reference.greedy(prompt, 600), collect(responses)[0].tokens)
