"""The shape of what is measured; times themselves are the machine's."""

from __future__ import annotations

import pytest

from outrider.engine.runner import ModelRunner
from simulator.measure import profile_of
from simulator.pair import draft_times, steps
from simulator.pair.messages import ECHO, RESTED_ECHO, scaled
from simulator.pair.models import ModelChoice
from simulator.pair.target_times import HelpedTimes, kv_tokens, measure_target
from simulator.pair.texts import write_texts
from simulator.profile import Profile
from tests.models import build_model


@pytest.fixture
def runner(tmp_path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """A tiny random model; every step is timed once."""
    monkeypatch.setattr(steps, "ROUNDS", 1)
    monkeypatch.setattr(draft_times, "VERDICTS", 3)
    folder = build_model("llama", tmp_path, num_hidden_layers=1)
    return ModelChoice(str(folder), "float32").load(kv_tokens(20, 40))


def test_one_target_does_for_many_drafts(runner: ModelRunner) -> None:
    """Its times are part of every profile, and the memory is free after each measurement."""
    texts = write_texts(runner, [[5, 6, 7], [8, 9]], 0.0, 5)
    target = measure_target(runner, HelpedTimes({}, ()), texts, 20)
    looking = draft_times.measure_lookup(texts, lambda: None)
    small = draft_times.measure_draft(runner, texts, lambda: None, 20)
    assert runner.pool.statistics().used == 0
    counts = [count for count, _ in target.forward]
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert [count for count, _ in small.forward] == [1, 8, 256]
    assert 0 < small.forward[0][1] <= small.forward[1][1]
    profiles = [
        profile_of("a", "", "", target, draft, scaled(ECHO, RESTED_ECHO), draft_kind=kind)
        for draft, kind in ((small, "model"), (looking, "lookup"))
    ]
    assert profiles[0].target_forward == profiles[1].target_forward
    assert Profile.model_validate_json(profiles[1].model_dump_json()).draft_kind == "lookup"


def test_a_context_shorter_than_what_is_measured(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed at positions that a model does not have, as GPT-2 would notice, and texts that fill
    the context are measured too."""
    monkeypatch.setattr(steps, "ROUNDS", 1)
    folder = build_model("gpt2", tmp_path, n_layer=1, n_positions=100)
    runner = ModelChoice(str(folder), "float32").load(kv_tokens(99, 100))
    texts = write_texts(runner, [[2 + place for place in range(99)]], 0.0, 1)
    target = measure_target(runner, HelpedTimes(), texts, 99)
    steps.one_step(runner, 100)
    draft = draft_times.measure_draft(runner, texts, lambda: None, 99)
    assert min(seconds for _, seconds in (*target.forward, *draft.forward)) > 0
    assert draft.verdict >= 0


def test_what_a_helper_takes_is_a_share_of_the_long_steps() -> None:
    """Half of what is saved twice over; none where there is no helper."""
    alone = {1: 1.0, 32: 3.0, 64: 5.0, 128: 9.0}
    assert HelpedTimes({32: 2.5, 64: 4.0, 128: 7.0}).share(alone) == pytest.approx(0.5)
    assert HelpedTimes({32: 9.0}).share(alone) == 0.0
    assert HelpedTimes().share(alone) == 0.0
