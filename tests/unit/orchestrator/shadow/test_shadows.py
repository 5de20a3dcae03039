"""Shadows beside sessions: they are heard, compared and never waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.shadow import comparison
from outrider.protocol.messages import Mode
from outrider.v1 import generation_pb2
from tests.fakes import INFO, FakeDraft, FakeVerify, continuation
from tests.unit.orchestrator.rig import AUTO, OFF, PROMPT, SEQUENTIAL, Rig

LIVE = {"shadow_share": 1.0}


def draft(version: str, shadow: bool = False, behaviour: str = "right") -> FakeDraft:
    """A draft replica."""
    made = FakeDraft(replace(INFO, version=version))
    made.info = replace(made.info, shadow=shadow)
    made.behaviour = behaviour
    return made


def compared(rig: Rig, what: str, version: str, role: str) -> float:
    """A count of the comparison."""
    return rig.metric(f"compared_{what}_total", task="none", version=version, role=role)


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL])
async def test_a_shadow_hears_all_verdicts_and_its_nodes_go_nowhere(mode):
    """The tokens are the target's, and both are counted by their weights."""
    old, new = draft("old", behaviour="wrong"), draft("new", shadow=True)
    async with Rig(FakeVerify(), old, new, **LIVE) as rig:
        while compared(rig, "tokens", "new", "shadow") < 100:
            answer = await rig.generate(mode=mode, max_tokens=60)
            assert answer.tokens[0] == continuation(PROMPT, 60)
            assert answer.completes[0].speculation.accepted == 0
            await rig.quiet()
        tokens = compared(rig, "tokens", "new", "shadow")
        assert tokens == compared(rig, "tokens", "old", "serving")
        assert compared(rig, "foreseen", "new", "shadow") > 0.5 * tokens
        assert compared(rig, "foreseen", "old", "serving") == 0
        tally = rig.orchestrator.servicer.shadows.comparisons.of("new", "old")
        assert tally.gain == compared(rig, "foreseen", "new", "shadow") / tokens
        await rig.until(lambda: rig.metric("replicas", kind="draft", state="shadow") == 1)


@pytest.mark.parametrize("behaviour", ["garbage", "columns", "orphans", "repeated", "silent", "unopened"])
async def test_a_bad_shadow_costs_its_session_nothing(behaviour):
    """Its failure is counted, no fallback is, and the good draft's nodes are accepted."""
    new, reason = draft("new", shadow=True, behaviour=behaviour), "INTERNAL_ERROR"
    async with Rig(FakeVerify(), draft("old"), new, **LIVE) as rig:
        answer = await rig.generate(max_tokens=60)
        assert answer.tokens[0] == continuation(PROMPT, 60)
        assert answer.completes[0].speculation.accepted > 0
        assert answer.completes[0].speculation.draft_losses == 0
        assert rig.metric("fallbacks_total", kind="draft") == 0
        if behaviour not in ("silent", "unopened", "garbage"):
            await rig.until(lambda: rig.metric("shadow_failures_total", reason=reason) == 1)


async def test_a_shadow_that_dies_is_not_missed():
    """In the middle of a session."""
    new = draft("new", shadow=True)
    new.die_at_block = 3
    async with Rig(FakeVerify(), draft("old"), new, **LIVE) as rig:
        answer = await rig.generate(max_tokens=60)
        assert answer.tokens[0] == continuation(PROMPT, 60)
        assert answer.completes[0].speculation.draft_losses == 0
        await rig.until(lambda: rig.metric("shadow_failures_total", reason="UNAVAILABLE") == 1)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [({"shadow_share": 0.0}, AUTO), ({"shadow_share": 1.0}, OFF)],
    ids=["no share", "off"],
)
async def test_others_have_no_shadow(settings: dict[str, Any], mode: Mode):
    """Those that are not of the share, and those without a draft."""
    new = draft("new", shadow=True)
    async with Rig(FakeVerify(), draft("old"), new, **settings) as rig:
        await rig.generate(mode=mode)
        assert not new.openings


async def test_a_shadow_alone_is_no_draft():
    """Without another draft the target goes on by itself."""
    new = draft("new", shadow=True)
    async with Rig(FakeVerify(), new, **LIVE) as rig:
        answer = await rig.generate()
        assert answer.completes[0].speculation.accepted == 0
        assert not new.openings
        assert (await rig.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())).draft_replicas == 0


async def test_the_better_draft_is_promoted_by_itself(monkeypatch):
    """The other one becomes the shadow, and running sessions move to the better one."""
    monkeypatch.setattr(comparison, "MIN_TOKENS", 100)
    old, new = draft("old", behaviour="wrong"), draft("new", shadow=True)
    async with Rig(FakeVerify(), old, new, promote_shadows=True, **LIVE) as rig:
        while not old.info.shadow:
            assert (await rig.generate(max_tokens=60)).tokens[0] == continuation(PROMPT, 60)
        assert not new.info.shadow
        await rig.until(lambda: rig.metric("replicas", kind="draft", state="shadow") == 1)
        answer = await rig.generate(max_tokens=60)
        assert answer.tokens[0] == continuation(PROMPT, 60)
        assert answer.completes[0].speculation.accepted > 0
        assert rig.metric("promotions_total") == 1


async def test_nothing_is_promoted_unless_it_is_asked_for(monkeypatch):
    """By default the figures are for whoever decides."""
    monkeypatch.setattr(comparison, "MIN_TOKENS", 100)
    old, new = draft("old", behaviour="wrong"), draft("new", shadow=True)
    async with Rig(FakeVerify(), old, new, **LIVE) as rig:
        for _ in range(5):
            await rig.generate(max_tokens=60)
        assert rig.orchestrator.servicer.shadows.comparisons.of("new", "old").won
        assert new.info.shadow
