"""Drafting without a model."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from draft_service.checks import check_open
from draft_service.drafters.lookup import MAX_VOCABULARY, LookupDrafter
from draft_service.load import load_drafter
from outrider.config import MAX_CONTEXT, DraftConfig
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.wire import model_info_to_pb
from outrider.speculation.candidate_tree import Rerooted
from tests.unit.draft_service.fakes import request

NOTHING_MOVED = Rerooted([], [])


def test_what_followed_before_is_proposed_again():
    """Also after tokens were committed."""
    drafter = LookupDrafter(max_nodes=8, max_depth=4)
    assert drafter.open(0, request((1, 2, 3, 4, 5, 6, 1, 2))) == 8
    first = drafter.recall(0).candidates
    assert [candidate.token for candidate in first] == [3, 4, 5, 6]
    assert [candidate.parent for candidate in first] == [-1, 0, 1, 2]
    drafter.commit(0, (3, 4, 5), NOTHING_MOVED)
    assert drafter.recall(0).candidates[0].token == 6


def test_nothing_is_proposed_where_nothing_repeats():
    """A closed sequence is gone."""
    drafter = LookupDrafter(max_nodes=8, max_depth=4)
    drafter.open(0, request((1, 2, 3)))
    assert not drafter.recall(0).candidates
    drafter.close(0)
    with pytest.raises(KeyError):
        drafter.recall(0)


def test_any_vocabulary_is_accepted_without_a_tokenizer():
    """Token ids stay below 2**31."""
    _, info = load_drafter(DraftConfig(kind="lookup"), "d0")
    check_open(request((1, 2), vocabulary_hash="whatever"), info)
    with pytest.raises(InvalidRequest, match="token_ids"):
        check_open(request((1, MAX_VOCABULARY), vocabulary_hash="whatever"), info)


def test_the_model_of_a_lookup_is_warned_of():
    """It is never loaded. It is not refused: a manifest may set it for other kinds of drafts."""
    with capture_logs() as lines:
        load_drafter(DraftConfig(kind="lookup", model="draft"), "d0")
    assert [(line["log_level"], line["model"]) for line in lines] == [("warning", "draft")]


def test_torch_is_not_imported():
    """A lookup replica starts at once and fits anywhere."""
    code = (
        "import sys; from draft_service.load import load_drafter; from outrider.config import DraftConfig;"
        "load_drafter(DraftConfig(kind='lookup'), 'd'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_context_is_no_longer_than_messages_can_say():
    """A longer one would make a replica that cannot describe itself."""
    _, info = load_drafter(DraftConfig(kind="lookup", context_length=MAX_CONTEXT), "d0")
    assert model_info_to_pb(info).context_length == MAX_CONTEXT
    with pytest.raises(ValidationError, match="context_length"):
        DraftConfig(kind="lookup", context_length=2**32)
