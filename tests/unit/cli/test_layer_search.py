"""`outrider layers`: which layers go first, when it ends, and what it prints."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from outrider.cli.layer_search import Trial, search
from outrider.cli.main import main
from tests.models import build_model

WEIGHTS = (0.5, 0.01, 0.2, 0.02)
"""What the loss of each layer costs."""


def acceptance(skipped: frozenset[int]) -> float:
    """As if layers were independent."""
    return 1.0 - sum(WEIGHTS[layer] for layer in skipped)


def test_the_layer_that_is_missed_least_goes_first() -> None:
    """Until one is left."""
    found = [set(trial.skipped) for trial in search(4, acceptance, lambda: False)]
    assert found == [{1}, {1, 3}, {1, 2, 3}]


def test_costs_are_the_layers_that_stay() -> None:
    """As a share of all."""
    assert [trial.cost for trial in search(4, acceptance, lambda: False)] == [0.75, 0.5, 0.25]


@pytest.mark.parametrize("most", [0, 1, 2, 5, 6])
def test_it_ends_when_the_time_is_over(most: int) -> None:
    """In the middle of a round with the best of those tried."""
    tried = []

    def counted(skipped: frozenset[int]) -> float:
        tried.append(skipped)
        return acceptance(skipped)

    found = list(search(4, counted, lambda: len(tried) >= most))
    assert len(tried) == most
    assert all(trial.skipped in tried for trial in found)


def test_speed_up_is_that_of_the_best_length() -> None:
    """A draft that is always right and costs nothing brings its length; one never right brings none."""
    assert Trial(frozenset({0}), 1.0, 0.0).speed_up == 17.0
    assert Trial(frozenset({0}), 0.0, 0.5).speed_up == pytest.approx(1 / 1.5)
    assert Trial(frozenset({0}), 0.8, 0.1).speed_up == pytest.approx(2.4696, abs=1e-4)


@pytest.mark.parametrize("pays", [True, False])
def test_a_model_is_searched_and_the_command_to_use_it_printed(
    pays: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From prompts of a file, texts and token ids; without a command where no layer can be spared."""
    folder = build_model("llama", tmp_path / "a model")
    if pays:
        weights = load_file(folder / "model.safetensors")
        for layer, part in product((1, 2), ("self_attn.o_proj", "mlp.down_proj")):
            weights[f"model.layers.{layer}.{part}.weight"].zero_()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "prompts.json").write_text(json.dumps(["The quick brown fox", [5, 6, 7]]))
    prompts = str(tmp_path / "prompts.json")
    status = main(["layers", "--target", str(folder), "--prompts", prompts, "--tokens", "4"])
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines[1:3]] == ["2", "1"]
    named = f"outrider up --target '{folder}' --draft '{folder}' --draft-skip-layers 1-2"
    assert (lines[-1] == named) is pays
    assert ("no draft with fewer layers is expected to pay" in output.err) is not pays
    assert "trial 5" in output.err


def test_prompts_that_cannot_be_read_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Before a model is loaded."""
    assert main(["layers", "--target", "none", "--prompts", "/none.json"]) == 2
    assert "--prompts" in capsys.readouterr().err


def test_texts_beyond_the_context_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would take hours, and are nothing that the model was trained for."""
    folder = build_model("llama", tmp_path / "model")
    (tmp_path / "prompts.json").write_text("[[5, 6, 7]]")
    flags = ("--target", str(folder), "--prompts", str(tmp_path / "prompts.json"), "--tokens", "99997")
    assert main(["layers", *flags]) == 2
    assert "--prompts: a prompt and its text have up to 100000 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("token", [-1, 999_999])
def test_tokens_that_the_model_does_not_have_are_refused(
    token: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table of embeddings has no row for them."""
    folder = build_model("llama", tmp_path / "model")
    (tmp_path / "prompts.json").write_text(f"[[5, {token}]]")
    assert main(["layers", "--target", str(folder), "--prompts", str(tmp_path / "prompts.json")]) == 2
    assert f"--prompts: token {token} is not in the vocabulary of {folder}" in capsys.readouterr().err
