"""How much the event loop may put before a draft engine that does not look at it."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from draft_service.core import DraftCore
from draft_service.engine import PENDING_PER_SESSION, DraftEngine
from outrider.config import DraftConfig
from outrider.protocol.errors import Flood, Overloaded
from outrider.telemetry.instruments import DraftInstruments
from tests.unit.draft_service.fakes import TableDrafter, request, verdict


def _asleep(max_sessions):
    """An engine whose thread has not started."""
    config = DraftConfig(max_sessions=max_sessions)
    drafter, instruments = TableDrafter(lambda tokens: ()), DraftInstruments(CollectorRegistry())
    return DraftEngine(lambda deliver: DraftCore(drafter, config, instruments, deliver), config)


def _flood(engine, stream, count):
    for number in range(count):
        engine.verdict(stream, verdict(3 + number, 9, step=1 + number))


async def test_one_session_cannot_fill_the_inbox():
    """Verdicts that the engine has not looked at end their own stream when they are too many."""
    engine = _asleep(max_sessions=2)
    greedy, other = (engine.open(request()) for _ in range(2))
    _flood(engine, greedy, PENDING_PER_SESSION)
    with pytest.raises(Flood):
        engine.verdict(greedy, verdict(3 + PENDING_PER_SESSION, 9))
    engine.verdict(other, verdict(3, 9))
    engine.start()
    while greedy.pending:  # noqa: ASYNC110 - the engine's thread
        await asyncio.sleep(0.001)
    engine.verdict(greedy, verdict(3 + PENDING_PER_SESSION, 9))
    await engine.stop()


async def test_all_sessions_together_cannot_fill_it_either():
    """Openings and verdicts are refused; closings are not, since they make room."""
    engine = _asleep(max_sessions=1)
    stream = engine.open(request())
    _flood(engine, stream, PENDING_PER_SESSION - 1)
    with pytest.raises(Overloaded, match="wait for the engine"):
        engine.verdict(stream, verdict(1000, 4))
    with pytest.raises(Overloaded, match="wait for the engine"):
        engine.open(request())
    engine.close(stream)
    assert engine.sessions == 0
