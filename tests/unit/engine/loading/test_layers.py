"""Models without some of their layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    InternVLConfig,
    InternVLVisionConfig,
    Qwen2Config,
)

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.layer_agreement import LayerAgreement
from outrider.engine.loading.layers import layers_of, leave_out, without
from outrider.engine.loading.loader import load_model, load_network
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError
from tests.models import build_model

TOKENS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of three layers."""
    return build_model("llama", tmp_path_factory.mktemp("llama"))


def _logits(folder: Path, **options: object) -> torch.Tensor:
    """[T, V] of TOKENS over paged memory."""
    loaded = load_model(str(folder), dtype="float32", device="cpu", threads=1, **options)
    runner = ModelRunner(loaded, 8, 4)
    kv = SequenceKv.open(runner.pool, [])
    return runner.forward([Segment(kv, TOKENS, None, range(len(TOKENS)))])


def test_a_layer_left_out_is_passed_by(llama: Path) -> None:
    """The model computes what one does whose layer adds nothing."""
    network = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    silent = network.model.layers[1]
    silent.self_attn.o_proj.weight.data.zero_()
    silent.mlp.down_proj.weight.data.zero_()
    with torch.inference_mode():
        expected = network(torch.tensor([TOKENS])).logits[0]
    assert torch.allclose(_logits(llama, skipped_layers={1}), expected, atol=1e-4)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "gpt_neox", "qwen3", "qwen3_5"])
def test_other_architectures_load_without_layers(architecture: str, tmp_path: Path) -> None:
    """Windows and memory are those of the layers that stay; the self check has passed."""
    folder = build_model(architecture, tmp_path)
    loaded = load_model(str(folder), dtype="float32", device="cpu", threads=1, skipped_layers={0})
    whole = load_model(str(folder), dtype="float32", device="cpu", threads=1)
    assert loaded.geometry.num_layers == whole.geometry.num_layers - 1


def test_layers_of_images_are_not_taken_for_those_of_the_text() -> None:
    """Even where there are as many, in front of them: of InternVL's smallest model 24 and 24."""
    config = InternVLConfig(
        text_config=Qwen2Config(num_hidden_layers=3), vision_config=InternVLVisionConfig(num_hidden_layers=3)
    )
    with torch.device("meta"):
        network = AutoModelForImageTextToText.from_config(config)
    assert layers_of(network) is network.model.language_model.layers


@pytest.mark.parametrize("skipped", [{3}, {0, 1, 2}])
def test_layers_that_are_not_there_are_refused(llama: Path, skipped: set[int]) -> None:
    """And so is a model without any."""
    with pytest.raises(ModelError, match="layers 0 to 2"):
        load_model(str(llama), dtype="float32", device="cpu", threads=1, skipped_layers=skipped)


def test_leaving_out_for_a_while(llama: Path) -> None:
    """The model is as before afterwards; meanwhile it is the one without them."""
    network = load_network(str(llama), dtype="float32", device="cpu", threads=1)
    tokens, layers = torch.tensor([TOKENS]), layers_of(network)
    with torch.inference_mode():
        whole = network(tokens, use_cache=True).logits
        with without(network, layers, {0, 2}):
            part = network(tokens, use_cache=False).logits
        assert torch.equal(network(tokens, use_cache=True).logits, whole)
        leave_out(network, {0, 2})
        assert torch.allclose(network(tokens, use_cache=False).logits, part)
    assert not torch.allclose(part, whole)


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_next"])
def test_the_layers_that_stay_keep_their_kinds(tmp_path: Path, architecture: str) -> None:
    """Their masks and rotary positions, for a while as for good."""
    folder = str(build_model(architecture, tmp_path))
    network = load_network(folder, dtype="float32", device="cpu", threads=1)
    tokens = torch.arange(10, 40)[None]
    with torch.inference_mode():
        whole = network(tokens, use_cache=False).logits
        with without(network, layers_of(network), {0}):
            part = network(tokens, use_cache=False).logits
        assert torch.equal(network(tokens, use_cache=False).logits, whole)
        leave_out(network, {0})
        assert torch.equal(network(tokens, use_cache=False).logits, part)


def test_embeddings_of_a_layer_cannot_be_left_out(tmp_path: Path) -> None:
    """Those that Gemma 4's small models have in each."""
    folder = str(build_model("gemma4", tmp_path))
    network = load_network(folder, dtype="float32", device="cpu", threads=1)
    with pytest.raises(ModelError, match="skip_layers: each layer of Gemma4ForCausalLM has embeddings"):
        layers_of(network)


def test_kinds_of_layers_that_cannot_be_set_are_named(tmp_path: Path) -> None:
    """Jamba's follow from a period."""
    folder = str(build_model("jamba", tmp_path))
    with pytest.raises(
        ModelError, match="skip_layers: the kinds of layers of JambaForCausalLM cannot be set"
    ):
        load_model(folder, dtype="float32", device="cpu", threads=1, skipped_layers={2})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_agreement_of_a_model_with_itself(llama: Path, temperature: float) -> None:
    """Is complete with all layers and less without."""
    network = load_network(str(llama), dtype="float32", device="cpu", threads=1)
    agreement = LayerAgreement(network, [TOKENS, TOKENS[:2]], 12, temperature)
    assert agreement.layers == 3
    assert agreement.acceptance(()) == pytest.approx(1.0, abs=1e-4)
    assert 0.0 <= agreement.acceptance({1}) < 0.99
