"""A stream that is killed at random places goes on with the same tokens.

A failure prints its seed; `pytest tests/faults/test_killed_streams.py --fault-seed N` draws the same again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.harness.streams import GRPC_KILLS, HTTP_KILLS, Killing, plans

SEED = 20261122
TOKENS = 160


def survives(folder: Path, seed: int, kills: int) -> None:
    """Kill streams of both clients so often; each text is that of an unbroken stream with its seed."""

    async def run() -> None:
        async with Killing.started(folder) as killing:
            await over_http(killing, seed, kills - kills // 2)
            await over_grpc(killing, seed, kills)
            assert set(killing.done) == set(HTTP_KILLS)

    asyncio.run(run())


async def over_http(killing: Killing, seed: int, kills: int) -> None:
    """With `Last-Event-ID`: the connection, the gateway and the orchestrator in turn."""
    for plan in plans(seed, HTTP_KILLS, TOKENS):
        if killing.done.total() >= kills:
            return
        told = await killing.read_http(plan)
        expected = await killing.unbroken(plan, told.seed)
        assert told.text == expected.text, f"seed {seed}: {plan}"


async def over_grpc(killing: Killing, seed: int, kills: int) -> None:
    """With `outrider.client`, token by token."""
    for plan in plans(seed + 1, GRPC_KILLS, TOKENS):
        if killing.done.total() >= kills:
            return
        told = await killing.read_grpc(plan)
        expected = await killing.unbroken(plan, told.seed)
        assert (told.tokens, told.text) == (expected.tokens, expected.text), f"seed {seed}: {plan}"


def test_some_kills(tmp_path: Path, fault_seed: int | None) -> None:
    """A few of each kind."""
    survives(tmp_path, fault_seed or SEED, kills=6)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_kills(tmp_path: Path, fault_seed: int | None) -> None:
    """Fifty over HTTP and fifty over gRPC."""
    survives(tmp_path, fault_seed or SEED, kills=100)
