"""Nothing leaks: whatever clients do, sessions, pages and tasks return to where they were."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

import grpc
import pytest

from tests.integration.client import (
    AUTO,
    CALL_SECONDS,
    OFF,
    SEQUENTIAL,
    Client,
    draft_info,
    eventually,
    request,
    verify_info,
)
from tests.integration.metrics import gauges


def idle(info) -> bool:
    """No session is open and every page is free or can be reclaimed."""
    return info.sessions == 0 and info.pages_free == info.pages


def behave(endpoint: str, message, manner: str, messages: int) -> None:
    """One client: reads to the end, cancels after some messages, disconnects, or runs out of time."""
    client = Client(endpoint)
    call = client.stream(message, timeout=0.02 * messages if manner == "deadline" else CALL_SECONDS)
    try:
        for index, _ in enumerate(call):
            if index >= messages and manner == "cancel":
                call.cancel()
            if index >= messages and manner == "disconnect":
                client.close()
    except (grpc.RpcError, ValueError):  # the channel's own ValueError when it was closed under the call
        assert manner != "finish"
    finally:
        client.close()


@pytest.mark.parametrize("requests", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_cancels_and_disconnects_leave_nothing(demo, prompts, requests):
    """After many requests that ended in every way, all three services are as empty as before."""
    random = Random(5)
    endpoint = demo.orchestrator("real").endpoint
    manners = [random.choice(("finish", "cancel", "disconnect", "deadline")) for _ in range(requests)]
    messages = [
        request(
            random.choice(prompts(30)),
            mode=random.choice((AUTO, AUTO, SEQUENTIAL, OFF)),
            max_tokens=random.randint(1, 60),
            temperature=random.choice((0.0, 1.0)),
            n=random.choice((1, 1, 3)),
        )
        for _ in range(requests)
    ]
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(behave, endpoint, message, manner, random.randint(0, 6))
            for message, manner in zip(messages, manners, strict=True)
        ]
        for job in jobs:
            job.result()
    eventually(lambda: idle(verify_info(demo.verify.endpoint)), "the verify replica is idle")
    eventually(lambda: idle(draft_info(demo.draft("real"))), "the draft replica is idle")
    for process in (demo.verify, demo.orchestrator("real")):
        eventually(
            lambda process=process: not any(gauges(process).values()), f"{gauges(process)} are all zero"
        )
    assert demo.client("real").generate(prompts(1)[0], max_tokens=4).tokens
