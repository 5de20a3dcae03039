"""LoRA: what is trained is small, and what comes out is an ordinary draft."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from outrider.distill.low_rank import ALPHA, LowRankUpdates
from outrider.distill.models import Pair, load_pair
from outrider.distill.traffic import Window
from outrider.distill.training import Plan, Training, divergence
from outrider.protocol.errors import ConfigError
from tests.heads import head_config
from tests.models import build_model

RANK = 2
TEXTS = [Window((5, 9, 3, 17, 8, 2), 2, ""), Window((4, 6, 11), 1, "")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=["qwen2", "gpt2", "gpt_neox", "gpt_oss"])
def loaded(request: pytest.FixtureRequest, base: Path) -> Pair:
    """Drafts with separate weights and biases, with Conv1D, with joined weights, and with experts."""
    target = build_model("llama", base / f"target-{request.param}")
    draft = build_model(request.param, base / request.param, seed=5)
    return load_pair(str(target), str(draft), dtype="float32", device="cpu", threads=1)


@pytest.fixture
def pair(loaded: Pair) -> Pair:
    """The same, to be changed."""
    return copy.deepcopy(loaded)


def drawn(updates: LowRankUpdates) -> LowRankUpdates:
    """The updates after some training, as it were."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in updates.parameters():
            parameter.uniform_(-0.1, 0.1, generator=draw)
    return updates


@torch.no_grad()
def said(pair: Pair) -> torch.Tensor:
    """The draft's logits."""
    return pair.logits(pair.draft, TEXTS)


def test_updates_change_nothing_at_first(pair: Pair) -> None:
    """Bit for bit."""
    before = said(pair)
    LowRankUpdates(pair.draft, RANK)
    assert torch.equal(said(pair), before)


def test_merged_weights_are_the_old_ones_and_the_products(pair: Pair) -> None:
    """And compute what the network did with the updates beside it; once, however often they are merged."""
    before, old = said(pair), copy.deepcopy(pair.draft.state_dict())
    updates = drawn(LowRankUpdates(pair.draft, RANK))
    beside = said(pair)
    assert not torch.allclose(beside, before, atol=0.1)
    updates.merge()
    updates.merge()
    assert torch.allclose(said(pair), beside, atol=1e-3)
    names = {module: name for name, module in pair.draft.named_modules()}
    for layer, update in updates._pairs:
        product = ALPHA / RANK * update.up @ update.down
        expected = old.pop(f"{names[layer]}.weight") + (product.T if isinstance(layer, Conv1D) else product)
        assert torch.allclose(layer.weight, expected, atol=1e-6)
    new = pair.draft.state_dict()
    assert {*old} < {*new}, "nothing is added to the network"
    assert all(torch.equal(new[name], weight) for name, weight in old.items())
    assert any("embed" in name or "wte" in name for name in old), "embeddings stay"


def test_gradients_and_the_optimizers_state_are_those_of_the_updates(pair: Pair, tmp_path: Path) -> None:
    """The network has none, and a checkpoint holds the updates alone."""
    training = Training(pair, TEXTS, Plan(passes=2, seconds=0, batch=2, rate=0, rank=RANK))
    divergence(pair, TEXTS).backward()
    assert all(parameter.grad is None for parameter in pair.draft.parameters())
    trained = list(training._trained.parameters())
    assert all(parameter.grad is not None for parameter in trained)
    assert training.run(tmp_path / "state.pt", lambda: False, lambda _: None)
    numbers = sum(parameter.numel() for parameter in trained)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert sum(weight.numel() for weight in state["trained"].values()) == numbers
    moments = [held["exp_avg"].numel() for held in state["optimizer"]["state"].values()]
    assert sum(moments) == numbers
    layers = [layer for layer, _ in training._trained._pairs]
    assert numbers == RANK * sum(sum(layer.weight.shape) for layer in layers)
    assert len(layers) % pair.draft.config.num_hidden_layers == 0, "as many of each layer"


@pytest.mark.parametrize("rank", [64, 10**4])
def test_updates_that_save_nothing_are_refused(pair: Pair, rank: int) -> None:
    """Training all weights is simpler then."""
    with pytest.raises(ConfigError, match=r"--lora: .* take a smaller rank"):
        LowRankUpdates(pair.draft, rank)


def test_eagle_heads_are_refused(base: Path) -> None:
    """With the command that trains them."""
    head = base / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(head_config()))
    with pytest.raises(ConfigError, match=r"is an EAGLE head; .*scripts\.train_eagle"):
        load_pair("", str(head), dtype="float32", device="cpu", threads=1)
