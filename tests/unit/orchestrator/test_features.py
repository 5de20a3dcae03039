"""What the target makes of a text on its way from a verify replica to the drafts that read it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.replicas.served import mismatch_of
from orchestrator.session import MAX_INTERNAL_ERRORS
from outrider.protocol.errors import InternalError
from tests.fakes import INFO, FakeDraft, FakeVerify, continuation
from tests.unit.orchestrator.rig import AUTO, OFF, PROMPT, SEQUENTIAL, Rig

LAYERS = (1, 3)
TARGET = replace(INFO, hidden_size=8, num_layers=5)
HEAD = replace(INFO, feature_layers=LAYERS, hidden_size=8)
TOKENS = continuation(PROMPT, 40)


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL])
async def test_a_draft_that_reads_them_gets_them(mode: int) -> None:
    """Those of the text, then with each verdict its own; the tokens are the target's."""
    verify, draft = FakeVerify(TARGET), FakeDraft(HEAD)
    async with Rig(verify, draft) as rig:
        answer = await rig.generate(mode=mode)
        assert answer.tokens[0] == TOKENS
        assert [opening.feature_layers for opening in verify.openings] == [LAYERS]
        assert [opening.feature_layers for opening in draft.openings] == [LAYERS]
        assert [(part.position, part.rows) for part in draft.features] == [(1, b"ff")]
        assert draft.verdicts
        assert all(verdict.features == b"f" * len(verdict.tokens) for verdict in draft.verdicts)


async def test_nobody_asks_where_no_draft_reads_them() -> None:
    """Nor in MODE_OFF."""
    for draft, mode in ((FakeDraft(INFO), AUTO), (FakeDraft(HEAD), OFF)):
        verify = FakeVerify(TARGET)
        async with Rig(verify, draft) as rig:
            assert (await rig.generate(mode=mode)).tokens[0] == TOKENS
            assert verify.openings[0].feature_layers == ()
            assert not draft.features


async def test_a_draft_that_reads_none_is_told_none() -> None:
    """Beside one that does, its verdicts are small."""
    verify, reader, other = FakeVerify(TARGET), FakeDraft(HEAD), FakeDraft(INFO)
    async with Rig(verify, reader, other, drafts_per_session=2) as rig:
        assert (await rig.generate()).tokens[0] == TOKENS
        assert reader.features
        assert any(verdict.features for verdict in reader.verdicts)
        assert not other.features
        assert other.verdicts
        assert not any(verdict.features for verdict in other.verdicts)


async def test_a_shadow_that_reads_them_gets_them() -> None:
    """So a head can be compared with the draft that serves, which is told none."""
    verify, draft, shadow = FakeVerify(TARGET), FakeDraft(INFO), FakeDraft(replace(HEAD, shadow=True))
    async with Rig(verify, draft, shadow, shadow_share=1.0) as rig:
        assert (await rig.generate()).tokens[0] == TOKENS
        await rig.quiet()
        assert any(verdict.features for verdict in shadow.verdicts)
        assert draft.verdicts
        assert not any(verdict.features for verdict in draft.verdicts)
        assert not draft.features


async def test_another_verify_replica_tells_them_anew() -> None:
    """The draft hears the whole text once more, and goes on."""
    verify, draft = FakeVerify(TARGET), FakeDraft(HEAD)
    verify.die_at_verdict = 3
    async with Rig(verify, draft) as rig:
        assert (await rig.generate(mode=SEQUENTIAL)).tokens[0] == TOKENS
        assert len(verify.openings) == 2
        length = len(verify.openings[1].token_ids)
        assert [(part.position, len(part.rows)) for part in draft.features] == [(1, 2), (1, length - 1)]


async def test_a_draft_that_refuses_them_costs_only_itself() -> None:
    """The request goes on without drafts."""
    verify, draft = FakeVerify(TARGET), FakeDraft(HEAD)
    draft.behaviour = "picky"
    async with Rig(verify, draft) as rig:
        assert (await rig.generate()).tokens[0] == TOKENS
        assert draft.openings
        assert len(verify.openings) == 1


@pytest.mark.parametrize("position", [0, 5])
async def test_features_of_no_text_are_a_fault_of_the_verify_replica(position: int) -> None:
    """It is left, as for a wrong verdict."""
    verify, draft = FakeVerify(TARGET), FakeDraft(HEAD)
    verify.features_from = position
    async with Rig(verify, draft) as rig:
        with pytest.raises(InternalError, match=f"features from {position} on"):
            await rig.generate()
        assert len(verify.openings) == MAX_INTERNAL_ERRORS


async def test_a_head_for_another_target_is_kept_out() -> None:
    """The log says why."""
    verify, draft = FakeVerify(TARGET), FakeDraft(replace(HEAD, hidden_size=16))
    async with Rig(verify, draft) as rig:
        assert rig.fleet.misfits()
        assert "width 16" in rig.fleet.misfits()[0]
        assert rig.fleet.feature_layers() == ()
        assert (await rig.generate()).tokens[0] == TOKENS
        assert not draft.openings


def test_a_head_must_read_layers_that_there_are() -> None:
    """Of the width that it was trained for; a replica that says neither tells nothing."""
    assert mismatch_of("draft", HEAD, TARGET) == ""
    assert mismatch_of("draft", INFO, TARGET) == ""
    assert mismatch_of("draft", HEAD, replace(TARGET, num_layers=3)) == "", "3 is the output layer"
    assert "layers" in mismatch_of("draft", HEAD, replace(TARGET, num_layers=2))
    assert mismatch_of("draft", HEAD, INFO)
