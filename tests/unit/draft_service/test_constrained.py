"""Under a grammar a draft proposes what can be, and first what must be."""

from __future__ import annotations

import pytest

from draft_service.drafters.base import Candidate, CandidateSource, Proposal
from draft_service.drafters.text import forced, possible
from outrider.engine.loading.loader import load_model
from outrider.grammar.matcher import allowed
from outrider.grammar.vocabulary import vocabulary_of
from outrider.protocol.messages import SamplingParams
from tests.grammars import choice, ids, json_schema, matcher, regex
from tests.models import EOS_ID, build_model
from tests.unit.draft_service.fakes import request, verdict
from tests.unit.draft_service.model_rig import Rig

PROMPT = (5, 9, 30, 31, 77, 5, 9, 120)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A random Llama of 300 tokens, and its vocabulary."""
    folder = build_model("llama", tmp_path_factory.mktemp("llama"))
    words = vocabulary_of((folder / "tokenizer.json").read_bytes(), [EOS_ID])
    return load_model(str(folder), dtype="float32", device="cpu", threads=1), words


def lookup(*parents_and_tokens: tuple[int, int]) -> Proposal:
    """A small tree of a lookup."""
    return Proposal(
        [Candidate(token, CandidateSource.LOOKUP, 3, 0, parent) for parent, token in parents_and_tokens]
    )


def test_what_cannot_be_is_left_out_with_what_is_below():
    """Parents are numbered anew."""
    yes, no, other = ids("yes")[0], ids("no")[0], ids("maybe")[0]
    below = ids("yes")[1]
    tree = lookup((-1, other), (0, yes), (-1, yes), (2, other), (2, below), (-1, no))
    found = possible(matcher(choice("yes!", "nope")), tree)
    assert [(each.token, each.parent) for each in found.candidates] == [(yes, -1), (below, 0), (no, -1)]


def test_what_must_be_is_a_chain():
    """Each certain; where the grammar leaves a choice there is none."""
    chain = forced(matcher(choice("yes indeed")), ())
    assert [each.token for each in chain.candidates] == ids("yes indeed")[:-1]
    assert [each.parent for each in chain.candidates] == list(range(-1, len(chain.candidates) - 1))
    assert {each.source for each in chain.candidates} == {CandidateSource.GRAMMAR}
    assert forced(matcher(choice("yes", "no")), ()) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_candidates_follow_the_grammar(setting, temperature):
    """Over several verdicts, whatever the model itself would say."""
    loaded, words = setting
    kinds = {"type": "object", "properties": {"kind": {"enum": ["left", "right"]}}, "required": ["kind"]}
    constraint = json_schema(kinds)
    rig, state = Rig(loaded, num_pages=256), matcher(constraint, words=words)
    sampling = SamplingParams(temperature=temperature, seed=4, constraint=constraint)
    stream, _ = rig.open(request(PROMPT, sampling=sampling), matcher=matcher(constraint, words=words))
    length, looked_at = len(PROMPT), 0
    for step in range(1, 12):
        rig.run(8)
        for node in rig.tree(stream).nodes():
            path = tuple(each.token for each in node.path())
            assert allowed(state.mask(path[:-1]) or b"", path[-1])
            looked_at += 1
        best = max(rig.tree(stream).children.values(), key=lambda node: node.reach).token
        rig.verdict(stream, verdict(length, best, step=step))
        length += 1
        if state.advance(best):
            break
    assert looked_at > 20


def test_a_forced_run_needs_no_forward_of_its_own(setting):
    """The draft does not compute token by token what the grammar says at once."""
    loaded, words = setting
    constraint = json_schema({"const": "a text that is known"})
    rig = Rig(loaded, num_pages=256)
    opening = request(PROMPT, sampling=SamplingParams(constraint=constraint))
    stream, _ = rig.open(opening, matcher=matcher(constraint, words=words))
    rig.run(1)
    nodes = list(rig.tree(stream).nodes())
    assert max(node.depth for node in nodes) > 8
    assert all(node.reach == pytest.approx(1.0) for node in nodes)


def test_a_grammar_that_fails_leaves_the_draft_without(setting):
    """It goes on unconstrained: the verify side decides."""
    loaded, words = setting
    constraint = regex("[ab]{40}")
    rig = Rig(loaded, num_pages=256)
    opening = request(PROMPT, sampling=SamplingParams(constraint=constraint))
    stream, _ = rig.open(opening, matcher=matcher(constraint, words=words))
    rig.run(2)
    rig.verdict(stream, verdict(len(PROMPT), 299, step=1))
    rig.run(3)
    assert rig.drafter._sequences[stream.id].text.matcher is None
    assert list(rig.tree(stream).nodes())
