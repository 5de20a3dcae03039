"""Models are told apart by their configuration and weights, not by their name."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.engine.loading.fingerprint import fingerprint
from tests.models import build_model


def read(folder: Path) -> PreTrainedModel:
    """A model as it is loaded."""
    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_same_model_has_the_same_fingerprint_wherever_it_lies(tmp_path: Path) -> None:
    """Two folders, loaded twice."""
    first, second = (build_model("llama", tmp_path / name) for name in ("a", "b"))
    assert fingerprint(read(first)) == fingerprint(read(first)) == fingerprint(read(second))


def test_other_weights_configuration_or_dtype_show(tmp_path: Path) -> None:
    """Another seed, a weight trained further, another rotation, and rounding."""
    folder = build_model("llama", tmp_path / "a")
    network = read(folder)
    seen = {fingerprint(network)}
    seen.add(fingerprint(read(build_model("llama", tmp_path / "b", seed=1))))
    seen.add(fingerprint(read(folder).to(torch.bfloat16)))
    with torch.no_grad():
        network.model.layers[1].mlp.up_proj.weight += 1e-4
    seen.add(fingerprint(network))
    other = read(folder)
    other.config.rms_norm_eps *= 2
    seen.add(fingerprint(other))
    assert len(seen) == 5


def test_buffers_of_the_checkpoint_show(tmp_path: Path) -> None:
    """Such as what corrects the choice of experts (DeepSeek); those that are computed at load do not."""
    network = read(build_model("llama", tmp_path))
    mlp, seen = network.model.layers[0].mlp, set()
    for bias in (0.0, 0.5):
        mlp.register_buffer("bias", torch.full((4,), bias))
        for factor in (1.0, 2.0):
            mlp.register_buffer("factor", torch.tensor(factor), persistent=False)
            seen.add(fingerprint(network))
    assert len(seen) == 2
