"""Drafting with a model: the incremental tree is worth what a fresh forward is, and nothing leaks."""

from __future__ import annotations

import random

import pytest

from outrider.engine.loading.loader import load_model
from outrider.protocol.errors import Overloaded
from outrider.protocol.messages import SamplingParams
from tests.models import build_model
from tests.unit.draft_service.fakes import RankCalibration, request, verdict
from tests.unit.draft_service.model_rig import Rig

PROMPT = (5, 9, 30, 31, 77, 5, 9, 120)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A random Llama of 300 tokens."""
    folder = build_model("llama", tmp_path_factory.mktemp("llama"))
    return load_model(str(folder), dtype="float32", device="cpu", threads=1)


def _walk(tree, chance):
    """Some tokens that a target might commit: down the tree for a while, then a bonus."""
    tokens, level = [], tree.children
    while level and chance.random() < 0.5:
        nodes = sorted(level.values(), key=lambda node: -node.reach)
        node = nodes[0] if chance.random() < 0.6 else chance.choice(nodes)
        tokens.append(node.token)
        level = node.children
    if not tokens or chance.random() < 0.3:
        tokens.append(chance.randrange(2, 300))  # mostly a token that is no node
    return tokens


def test_every_forward_over_the_tree_equals_a_fresh_one(loaded):
    """Hits, misses, partial walks and survivors leave keys and values where the next forward needs them."""
    chance = random.Random(7)
    rig = Rig(loaded, num_pages=256)
    rig.core.calibration = RankCalibration(0.6, 0.25)
    openings = [
        request(PROMPT[: 5 + i], sampling=SamplingParams(temperature=0.7 * i, seed=i)) for i in range(3)
    ]
    streams = [rig.open(opening)[0] for opening in openings]
    rig.run(2)
    for step in range(1, 15):
        for stream in streams:
            tree = rig.tree(stream)
            tokens = _walk(tree, chance)
            rig.verdict(stream, verdict(tree.committed_length, *tokens, step=step))
        rig.step()
        rig.check_pages()
        rig.run(chance.randrange(2, 8))
    assert rig.runner.checked > 100
    assert rig.runner.sessions == 3
    assert rig.runner.survivors > 30
    for stream in streams:
        rig.close(stream)
    rig.step()
    assert rig.runner.pool.statistics().used == 0


def test_a_long_prompt_is_computed_in_pieces(loaded, monkeypatch):
    """No forward takes more than the budget, and the root is answered at the end."""
    monkeypatch.setattr("draft_service.drafters.model.PREFILL_CHUNK", 4)
    rig = Rig(loaded)
    stream, _ = rig.open(request(PROMPT))
    rig.step()
    assert not len(rig.tree(stream))
    rig.step()
    assert len(rig.tree(stream))


def test_long_prompts_hold_nobody_up(loaded, monkeypatch):
    """A younger session has drafts while older ones compute their prompts, however many these are."""
    monkeypatch.setattr("draft_service.drafters.model.PREFILL_CHUNK", 8)
    rig = Rig(loaded, num_pages=512, expansions=4)
    rig.runner.checking = False
    older = [rig.open(request(range(2 + at, 102 + at)))[0] for at in range(4)]
    young, _ = rig.open(request((5, 6, 7)))
    rig.step()
    rig.step()
    assert len(rig.tree(young))
    assert not any(len(rig.tree(stream)) for stream in older)
    rig.run(100)
    assert all(len(rig.tree(stream)) for stream in older)


def test_a_shared_beginning_is_not_computed_again(loaded):
    """The second session finds the pages of the first by their content."""
    rig = Rig(loaded)
    first, _ = rig.open(request(PROMPT))
    rig.run(2)
    rig.close(first)
    _, outbox = rig.open(request(PROMPT))
    rig.run(2)
    assert outbox.cached_length == 4


def test_out_of_pages_suspends_the_newest_session_and_it_comes_back(loaded):
    """The older one goes on; when it is gone, the other is computed anew."""
    rig = Rig(loaded, num_pages=6, max_nodes=8, children=4)
    rig.runner.checking = False
    old, _ = rig.open(request(PROMPT))
    new, _ = rig.open(request((*PROMPT[::-1], 40, 41, 42, 43)))
    rig.run(60)
    older, newer = (rig.session(stream) for stream in (old, new))
    assert (older.suspended, newer.suspended) == (False, True)
    rig.check_pages()
    rig.close(old)
    rig.verdict(new, verdict(12, 7))
    rig.run(3)
    assert not newer.suspended
    assert len(newer.tree)


def test_a_sequence_that_does_not_fit_is_refused(loaded):
    """Another replica may have room."""
    rig = Rig(loaded, num_pages=4, max_nodes=8)
    _, outbox = rig.open(request(tuple(range(2, 12))))
    rig.step()
    assert isinstance(outbox.error, Overloaded)


def test_a_prompt_longer_than_the_context_opens_and_says_ready(loaded):
    """The session goes on without this draft instead of failing."""
    chance = random.Random(3)
    rig = Rig(loaded)
    _, outbox = rig.open(request([chance.randrange(2, 300) for _ in range(600)]))
    rig.run()
    assert outbox.cached_length is not None
    assert [(len(block), block.ready) for block in outbox.blocks] == [(0, True)]


def test_long_matches_of_a_lookup_join_the_tree(loaded):
    """A repeated passage is proposed as it stood before, besides what the model thinks."""
    rig = Rig(loaded, num_pages=256)
    passage = tuple(range(40, 60))
    stream, _ = rig.open(request((*passage, 3, *passage[:10])))
    rig.run(3)
    level = rig.tree(stream).children
    for token in passage[10:14]:
        assert token in level
        level = level[token].children


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_is_nearly_always_right(loaded, temperature):
    """Positions and noise line up: what the draft ranks first is what the target samples."""
    opening = request(PROMPT, sampling=SamplingParams(temperature=temperature, seed=11))
    rig = Rig(loaded, num_pages=256)
    stream, _ = rig.open(opening)
    accepted = rejected = 0
    for step in range(1, 9):
        rig.run(6)
        tree = rig.tree(stream)
        base, level, tokens = tree.committed_length, tree.children, []
        while level:
            token = rig.target_token(opening, [*tree.committed, *tokens])
            tokens.append(token)
            node = level.get(token)
            accepted += node is not None
            rejected += node is None
            level = node.children if node else {}
        tokens = tokens or [rig.target_token(opening, tree.committed)]
        rig.verdict(stream, verdict(base, *tokens, step=step))
    assert accepted > 20
    assert accepted / (accepted + rejected) > 0.97


def test_a_session_that_outgrows_the_context_gives_its_memory_back(loaded):
    """It drafts up to its limit, then says ready at every verdict and computes nothing."""
    chance = random.Random(3)
    rig = Rig(loaded, num_pages=400)
    rig.runner.checking = False
    context = loaded.context_length
    stream, outbox = rig.open(request([chance.randrange(2, 300) for _ in range(context - 2)]))
    rig.run()
    assert sum(map(len, outbox.blocks)) > 0
    assert rig.runner.pool.statistics().used > 0
    for step, base in enumerate(range(context - 2, context + 7, 3), 1):
        outbox.blocks.clear()
        rig.verdict(stream, verdict(base, *(chance.randrange(2, 300) for _ in range(3)), step=step))
        rig.run()
        assert outbox.blocks[-1].ready
        assert rig.runner.pool.statistics().used == 0
        rig.check_pages()


def test_after_a_failed_forward_nothing_is_shared(loaded, monkeypatch):
    """What it was to move may lie in the wrong place: a text with the same beginning is computed anew."""

    def exhausted(*_):
        raise MemoryError

    rig = Rig(loaded)
    stream, _ = rig.open(request(PROMPT))
    rig.run(2)
    rig.verdict(stream, verdict(len(PROMPT), 7))
    with monkeypatch.context() as patch:
        patch.setattr(rig.runner, "forward", exhausted)
        rig.step()
    _, again = rig.open(request(PROMPT))
    rig.run(2)
    assert again.cached_length == 0
    rig.check_pages()
