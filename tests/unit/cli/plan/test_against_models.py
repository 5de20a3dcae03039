"""Sizes from files are those that the engine finds when it loads the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.cli.plan.checkpoint import read_checkpoint
from outrider.engine.loading.loader import load_model
from outrider.protocol.errors import ModelError
from tests.models import ARCHITECTURES, UNSUPPORTED, build_model
from tests.mtp import build_target


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture(architecture: str, tmp_path: Path) -> None:
    """Keys and values, context, vocabulary and the number of weights."""
    folder = str(build_model(architecture, tmp_path / "model"))
    found = read_checkpoint(folder)
    loaded = load_model(folder, dtype="auto", device="cpu", threads=1, cpu_backend="onednn")
    assert found.kv_numbers == loaded.geometry.numbers_per_token
    assert found.context_length == loaded.context_length
    assert found.vocabulary_size == loaded.vocabulary_size
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    stored = sum(buffer.numel() for name, buffer in model.named_buffers() if name in model.state_dict())
    assert found.parameters == model.num_parameters() + stored


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_5"])
def test_mtp_layers_are_not_the_targets(architecture: str, tmp_path: Path) -> None:
    """They are read for a draft only."""
    without = read_checkpoint(str(build_model(architecture, tmp_path / "without")))
    build_target(architecture, tmp_path / "with")
    assert read_checkpoint(str(tmp_path / "with")) == replace(without, name="with")


@pytest.mark.parametrize("architecture", sorted(UNSUPPORTED))
def test_models_that_cannot_run_are_refused(architecture: str, tmp_path: Path) -> None:
    """An overlay for one would only make pods that do not start."""
    with pytest.raises(ModelError, match="use a"):
        read_checkpoint(str(build_model(architecture, tmp_path)))
