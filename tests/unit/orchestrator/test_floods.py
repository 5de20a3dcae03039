"""Replicas that send without end: right tokens, others are served, and who floods is kept out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.protocol.errors import Overloaded
from outrider.protocol.messages import VerifyPolicy
from tests.fakes import Context, FakeVerify, continuation
from tests.floods import FLOODS, FloodingDraft, FloodingVerify
from tests.unit.orchestrator.rig import AUTO, OFF, PROMPT, Rig

BESIDE_SECONDS = 30.0
"""In which a small request without a draft is served beside a flood."""


class SlowVerify(FakeVerify):
    """The first step of sessions that draft waits, as that of a long prompt does."""

    def __init__(self) -> None:
        super().__init__(patience=0.001)
        self.prefilled = asyncio.Event()

    async def _steps(self, session: Any, context: Context) -> None:
        if session.opening.policy is not VerifyPolicy.OFF:
            await self.prefilled.wait()
        await super()._steps(session, context)


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_draft_that_floods_costs_only_speed(flood: str) -> None:
    """Its sessions and those beside them get their tokens, it is cut off and kept out, and the healthy verify
    replica is not blamed."""
    verify, draft = SlowVerify(), FloodingDraft(flood)
    async with Rig(verify, draft, breaker_failures=3) as rig:
        flooded = [asyncio.create_task(rig.generate(mode=AUTO)) for _ in range(3)]
        await rig.until(lambda: bool(draft.openings))
        async with asyncio.timeout(BESIDE_SECONDS):
            beside = await rig.generate(mode=OFF)
        await rig.until(lambda: rig.metric("replicas", kind="draft", state="broken") == 1)
        verify.prefilled.set()
        answers = [beside, *(await asyncio.gather(*flooded)), await rig.generate()]
        assert [answer.tokens[0] for answer in answers] == [continuation(PROMPT, 40)] * len(answers)
        assert len(draft.openings) <= 2 * len(flooded), "each was connected at once a second time"
        assert rig.metric("fallbacks_total", kind="verify") == 0
        assert not any(block.tokens for block in verify.blocks if flood == "old_nodes")


@pytest.mark.parametrize("flood", ["opened", "blank", "closed", "empty", "ahead", "same", "many"])
async def test_a_verify_replica_that_floods_is_left(flood: str) -> None:
    """Its session goes on at another one with the same tokens, and does not come back to it."""
    flooding, healthy = FloodingVerify(flood), FakeVerify(patience=0.0)
    healthy.refuse = Overloaded("full", retry_after=0.0)
    async with Rig(flooding, healthy, breaker_failures=1) as rig:
        asking = asyncio.create_task(rig.generate(mode=OFF, max_tokens=6))
        await rig.until(lambda: bool(flooding.openings))
        healthy.refuse = None
        async with asyncio.timeout(BESIDE_SECONDS):
            assert (await asking).tokens[0] == continuation(PROMPT, 6)
        assert (await rig.generate()).tokens[0] == continuation(PROMPT, 40)
        assert (len(flooding.openings), rig.metric("fallbacks_total", kind="verify") >= 1) == (1, True)
