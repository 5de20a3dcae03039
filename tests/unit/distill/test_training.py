"""A draft learns its target's distributions; a training that was stopped goes on as if it had not been."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from outrider.collected import Collected
from outrider.distill.acceptance import measure
from outrider.distill.models import MAX_LOGITS, Pair, load_pair, save_draft
from outrider.distill.traffic import Window, windows_of
from outrider.distill.training import Plan, Training, divergence, rate_at
from outrider.distill.writing import Prompt, prompts_of, write
from outrider.protocol.errors import ConfigError
from tests.models import EOS_ID, build_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft that was drawn otherwise."""
    base = tmp_path_factory.mktemp("models")
    return str(build_model("llama", base / "target")), str(build_model("qwen2", base / "draft", seed=5))


def pair_of(folders: tuple[str, str]) -> Pair:
    """Both, the draft untrained."""
    return load_pair(*folders, dtype="float32", device="cpu", threads=1)


def windows(count: int = 12) -> list[Window]:
    """Random texts."""
    draw = random.Random(3)
    texts = [Collected("", "a", 4, tuple(draw.randrange(2, 60) for _ in range(24))) for _ in range(count)]
    return windows_of(texts, 16)


ALL_OR_LOW_RANK = pytest.mark.parametrize("rank", [0, 4])


def trained(pair: Pair, steps: int, folder: Path, stop_at: int = 10**9, rank: int = 0) -> Training:
    """After so many steps, or stopped before."""
    found = windows()
    rate = 1.5e-2 if rank else 3e-3
    plan = Plan(passes=steps * 4 / len(found), seconds=0.0, batch=4, rate=rate, rank=rank)
    training = Training(pair, found, plan)
    assert training.steps == steps
    if (folder / "state.pt").exists():
        training.load(folder / "state.pt")
    training.run(folder / "state.pt", lambda: training.step >= stop_at, lambda _: None)
    return training


def weights(pair: Pair) -> torch.Tensor:
    """All of the draft's."""
    return torch.cat([weight.detach().flatten() for weight in pair.draft.parameters()])


@ALL_OR_LOW_RANK
def test_the_divergence_falls_and_the_acceptance_rises(folders, tmp_path, rank):
    """At every temperature, for the distributions themselves are learned."""
    pair, texts = pair_of(folders), windows()
    with torch.no_grad():
        before = float(divergence(pair, texts))
    accepted = [measure(pair, texts, temperature).mean for temperature in (0.0, 1.0)]
    trained(pair, 60, tmp_path, rank=rank)
    with torch.no_grad():
        assert float(divergence(pair, texts)) < 0.7 * before
    assert measure(pair, texts, 0.0).mean > accepted[0] + 0.1
    assert measure(pair, texts, 1.0).mean > accepted[1] + 0.1


@ALL_OR_LOW_RANK
def test_a_stopped_training_goes_on_as_if_it_had_not_been(folders, tmp_path, rank):
    """With the same weights at the end, bit for bit; also when it was stopped after its last step."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = pair_of(folders)
    trained(whole, 6, tmp_path / "whole", rank=rank)
    stopped = pair_of(folders)
    assert trained(stopped, 6, tmp_path / "parts", stop_at=2, rank=rank).done < 1
    for _ in range(2):
        resumed = pair_of(folders)
        assert trained(resumed, 6, tmp_path / "parts", rank=rank).step == 6
        assert torch.equal(weights(whole), weights(resumed))
    assert not torch.equal(weights(whole), weights(stopped))


@pytest.mark.parametrize("content", [b"nothing", b""])
def test_a_checkpoint_of_another_draft_is_refused(folders, tmp_path, content):
    """So is an empty one, as a machine leaves it that lost its power; the sentence says what to do."""
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="remove it"):
        trained(pair_of(folders), 6, tmp_path)


def test_time_ends_a_training_too(folders, tmp_path):
    """Its rate is then as low as after all steps."""
    ticks = iter(range(1000))
    plan = Plan(passes=100, seconds=5.0, batch=4, rate=1e-3)
    training = Training(pair_of(folders), windows(), plan, clock=lambda: float(next(ticks)))
    left: list[float] = []
    assert training.run(tmp_path / "state.pt", lambda: False, lambda p: left.append(p.seconds_left))
    assert training.step == 5
    assert left == pytest.approx([4.0, 3.0, 2.0, 1.0, 0.0])


def test_the_rate_rises_and_falls():
    """From little to all of it, and to zero."""
    rates = [rate_at(done / 100) for done in range(101)]
    assert 0 < rates[0] < 0.2
    assert max(rates) == rates[2] == 1.0
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[100] == 0.0


def test_a_model_is_its_own_best_draft(folders):
    """Everything it chooses is accepted, under noise too; by task."""
    same = load_pair(folders[0], folders[0], dtype="float32", device="cpu", threads=1)
    found = measure(same, windows(), 0.7)
    assert found.by_task() == {"a": 1.0}
    with torch.no_grad():
        assert float(divergence(same, windows())) == pytest.approx(0.0, abs=1e-3)


def test_what_is_computed_at_once_fits_into_memory(folders):
    """Whatever the vocabulary; every window is computed once."""
    pair = pair_of(folders)
    size = max(pair.size, pair.target.config.vocab_size)
    long = [Window(tuple([2] * length), 1, "") for length in (400, 16, 16, 400)]
    groups = list(pair.groups(long))
    assert [window for group in groups for window in group] == long
    for group in groups:
        longest = max(len(window.tokens) for window in group)
        assert len(group) == 1 or longest * len(group) * size <= MAX_LOGITS


def test_another_vocabulary_is_refused(folders, tmp_path):
    """Before anything is trained."""
    other = build_model("llama", tmp_path / "other", vocab_size=290)
    with pytest.raises(ConfigError, match="--draft: the vocabulary of"):
        load_pair(folders[0], str(other), dtype="float32", device="cpu", threads=1)


def test_a_saved_draft_is_one_that_can_be_loaded(folders, tmp_path):
    """With the arithmetic, the tokenizer and the vocabulary that it had."""
    pair = pair_of(folders)
    saved = weights(pair)
    save_draft(pair, tmp_path / "new")
    again = load_pair(folders[0], str(tmp_path / "new"), dtype="float32", device="cpu", threads=1)
    assert torch.equal(weights(again), saved.to(again.draft_dtype).float())
    assert not (tmp_path / "new.making").exists()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_target_writes_after_prompts_once(folders, tmp_path, temperature):
    """A run that goes on has the same texts, and computes those that are missing."""
    pair = pair_of(folders)
    prompts = [Prompt((5, 6, 7, index % 12), "code") for index in range(2, 22)]
    path = tmp_path / "texts.jsonl"
    whole = write(pair, prompts, 6, temperature, path, lambda _: None)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    assert write(pair, prompts, 6, temperature, path, lambda _: None) == whole
    assert path.read_text() == "".join(lines)
    found = {Prompt(one.tokens[:4], one.task) for one in whole}
    assert found == set(prompts) == set(prompts_of(whole))
    assert len(whole) == (len(prompts) if temperature else len(found))  # several answers to one prompt differ
    assert all(EOS_ID not in one.tokens[4:-1] for one in whole)
