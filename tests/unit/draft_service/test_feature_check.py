"""Features are checked before they reach the engine; what is wrong costs the session its draft, and says
why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draft_service.checks import MAX_MISSING, FeatureCheck
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import ModelInfo, PromptFeatures
from tests.unit.draft_service.fakes import request, verdict

INFO = ModelInfo("head", "", 100, 1000, kind="eagle", feature_layers=(1, 3), hidden_size=8)
ROW = 2 * 8 * 2


def check(layers=(1, 3)) -> FeatureCheck:
    """Of a session that tells these layers."""
    return FeatureCheck(request(feature_layers=layers), INFO)


@pytest.mark.parametrize("size", [1, ROW - 2, ROW + 2, 3 * ROW])
def test_a_verdict_has_whole_rows_for_its_tokens(size):
    """Neither broken rows nor more than tokens."""
    with pytest.raises(InvalidRequest) as caught:
        check().verdict(verdict(3, 5, 6, features=bytes(size)))
    assert caught.value.field == "verdict.features"


def test_sound_ones_pass():
    """As many rows as tokens, or fewer; all layers that the session tells count."""
    check().verdict(verdict(3, 5, 6, features=bytes(2 * ROW)))
    check().verdict(verdict(3, 5, 6, features=bytes(ROW)))
    check((0, 1, 3)).verdict(verdict(3, 5, features=bytes(3 * 8 * 2)))
    check().prompt(PromptFeatures(2, bytes(3 * ROW)), 5)


def test_missing_ones_are_borne_for_a_while():
    """As long as no draft is wanted; else a replica that never tells any is found out."""
    tried = check()
    for _ in range(2 * MAX_MISSING):
        tried.verdict(verdict(3, 5, draft_wanted=False))
    for _ in range(MAX_MISSING):
        tried.verdict(verdict(3, 5))
    with pytest.raises(InvalidRequest, match="missing"):
        tried.verdict(verdict(3, 5))


@pytest.mark.parametrize(("position", "size"), [(0, ROW), (5, ROW), (4, 2 * ROW), (2, ROW + 1), (2, 0)])
def test_features_of_the_text_are_of_the_text(position, size):
    """From its second token to its last."""
    with pytest.raises(InvalidRequest) as caught:
        check().prompt(PromptFeatures(position, bytes(size)), 5)
    assert caught.value.field.startswith("prompt_features")


def test_who_reads_none_is_told_none():
    """A session that does not tell the draft's layers, and a draft that reads none."""
    for tried in (check((1,)), FeatureCheck(request(), replace(INFO, feature_layers=()))):
        for _ in range(2 * MAX_MISSING):
            tried.verdict(verdict(3, 5))
        with pytest.raises(InvalidRequest):
            tried.verdict(verdict(3, 5, features=bytes(ROW)))
        with pytest.raises(InvalidRequest):
            tried.prompt(PromptFeatures(2, bytes(ROW)), 5)
