"""Models whose layers are not like Llama's run as fused decoders that compute what their modules compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from outrider.engine.fused_decoder import FusedDecoder, NotFused, fused_decoder
from outrider.engine.fused_decoder.joining import joined, side_by_side
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.check_forward import run_plain
from outrider.engine.loading.loader import load_model
from outrider.engine.quantization.modules import codes_of, round_linears
from outrider.engine.runner import ModelRunner, Segment
from tests.models import build_model, build_tokenizer

Folders = Callable[[str], Path]


def loaded(folder: Path, dtype: str = "float32", **options: Any) -> tuple[FusedDecoder, list[str]]:
    """A model that the check at load has let run fused, and what was said."""
    said: list[str] = []
    made = load_model(str(folder), dtype=dtype, device="cpu", threads=1, say=said.append, **options).model
    assert isinstance(made, FusedDecoder), said
    return made, said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_gpt_neox_runs_fused(tmp_path: Path, share: float, parallel: bool, dtype: str) -> None:
    """With the MLP beside attention or behind it; heads turn in part or whole."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    folder = build_model("gpt_neox", tmp_path, use_parallel_residual=parallel, rope_parameters=rope)
    decoder, _ = loaded(folder, dtype)
    assert [layer.settings.parallel for layer in decoder.stack] == [parallel] * 3
    assert [2 * len(rope.frequencies) for rope in decoder.ropes] == [16 * share]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("by_layer", [True, False])
def test_gpt2_runs_fused(tmp_path: Path, by_layer: bool, dtype: str) -> None:
    """Also where scores are scaled by the layer's number; nothing turns, and positions are embedded."""
    folder = build_model("gpt2", tmp_path, scale_attn_by_inverse_layer_idx=by_layer)
    decoder, _ = loaded(folder, dtype)
    scales = [layer.settings.scores.scaling for layer in decoder.stack]
    assert scales == [0.25, 0.125, 0.25 / 3] if by_layer else [0.25] * 3
    assert decoder.positions is not None
    assert not len(decoder.ropes[0].frequencies)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["olmo2", "phi", "starcoder2"])
def test_others_run_fused(folder_of: Folders, architecture: str, dtype: str) -> None:
    """Norms behind attention and MLP; one norm for both; norms that centre rows, and windows."""
    decoder, _ = loaded(folder_of(architecture), dtype)
    assert [layer.settings.parallel for layer in decoder.stack] == [architecture == "phi"] * 3
    assert (decoder.stack[0].settings.input_norm is None) == (architecture == "olmo2")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["gemma4", "gemma4_dense"])
def test_gemma4_runs_fused(folder_of: Folders, architecture: str, dtype: str) -> None:
    """Heads differ by layer, keys may be values, and later layers see keys and values of earlier ones."""
    decoder, _ = loaded(folder_of(architecture), dtype)
    settings, shared = [layer.settings for layer in decoder.stack], architecture == "gemma4"
    assert [(one.kv_heads, one.head_dim) for one in settings] == [
        (2, 16),
        (1, 32),
        *([(0, 16), (0, 32)] if shared else [(2, 16), (1, 32)]),
    ]
    assert [one.value_norm is None for one in settings] == [False, False, shared, shared]
    assert [layer.inputs is not None for layer in decoder.stack] == [shared] * 4
    assert len({one.factor for one in settings}) == 4
    assert [one.scores.window for one in settings] == [12, None, 12, None]


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["gemma4", "gemma4_dense"])
def test_rounded_weights_of_gemma4_run_fused(folder_of: Folders, architecture: str, weights: str) -> None:
    """Keys that are values too have their codes twice."""
    _, said = loaded(folder_of(architecture), weights=weights)
    assert any("all weights are codes" in line for line in said)


def test_a_model_of_images_runs_gemma4_for_texts(folder_of: Folders, tmp_path: Path) -> None:
    """What reads images and sounds is left out; a token in place of an image is padding to the model."""
    text = transformers.AutoConfig.from_pretrained(folder_of("gemma4"))
    views = {**SMALL, "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 16}
    config = transformers.Gemma4Config(
        text_config=text.to_dict(), vision_config=views, audio_config=None, image_token_id=299
    )
    torch.manual_seed(0)
    network = transformers.Gemma4ForConditionalGeneration(config).eval()
    network.save_pretrained(tmp_path)
    build_tokenizer(tmp_path)
    made = load_model(str(tmp_path), dtype="float32", device="cpu", threads=1)
    assert isinstance(made.model, FusedDecoder)
    tokens, runner = [5, 9, 299, 7, 30, 299, 8], ModelRunner(made, 8, 4)
    logits = runner.forward([Segment(SequenceKv.open(runner.pool, []), tokens, None, range(7))])
    with torch.no_grad():
        expected = network(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_llama_like_model_may_turn_parts_of_heads(tmp_path: Path) -> None:
    """As Phi 4 mini does."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    decoder, _ = loaded(build_model("phi3", tmp_path, rope_parameters=rope))
    assert {2 * len(rope.frequencies) for rope in decoder.ropes} != {decoder.stack[0].settings.head_dim}


def test_experts_may_stand_behind_other_norms(folder_of: Folders) -> None:
    """OLMoE norms queries and keys before they are divided into heads."""
    decoder, _ = loaded(folder_of("olmoe"))
    assert all(layer.settings.whole_norms for layer in decoder.stack)


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
}


@pytest.mark.parametrize("parts", ["language_model", "text_model"])
def test_a_model_of_images_and_texts_runs_for_texts(tmp_path: Path, parts: str) -> None:
    """Also one that transformers has no class for texts alone of."""
    texts = {**SMALL, "vocab_size": 300, "num_key_value_heads": 2, "max_position_embeddings": 512}
    views = {**SMALL, "image_size": 32, "patch_size": 16, "head_dim": 16}
    config: PretrainedConfig
    if parts == "language_model":
        config = transformers.Mistral3Config(
            text_config={**texts, "model_type": "mistral", "head_dim": 16},
            vision_config={**views, "model_type": "pixtral"},
            image_token_index=299,
        )
    else:
        text_config = {**texts, "model_type": "llama", "pad_token_id": 1}
        config = transformers.Idefics3Config(
            text_config=text_config, vision_config=views, image_token_id=299, pad_token_id=1
        )
    torch.manual_seed(0)
    network = transformers.AutoModelForImageTextToText.from_config(config)
    assert isinstance(network.model.get_submodule(parts), torch.nn.Module)
    network.save_pretrained(tmp_path)
    decoder, _ = loaded(tmp_path)
    assert decoder.kind == type(network).__name__


@pytest.mark.parametrize("activation", ["relu", "gelu_fast", "gelu_pytorch_tanh", "gelu", "silu"])
def test_an_mlp_without_a_gate_has_any_activation(tmp_path: Path, activation: str) -> None:
    """Those that torch computes in one operation, and others."""
    loaded(build_model("gpt2", tmp_path, activation_function=activation))


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_run_fused(folder_of: Folders, architecture: str, weights: str) -> None:
    """Codes are carried over to every product, transposed weights and those in another order too."""
    _, said = loaded(folder_of(architecture), weights=weights)
    assert not [line for line in said if "without" in line]
    assert any("all weights are codes" in line for line in said)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_layers_may_be_left_out(folder_of: Folders, architecture: str) -> None:
    """A draft without some of its target's layers."""
    decoder, _ = loaded(folder_of(architecture), skipped_layers=[1])
    assert len(decoder.stack) == 2


def plain_model(folder: Path) -> PreTrainedModel:
    """A model as transformers loads it."""
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return made.eval().requires_grad_(False)


def test_a_model_keeps_its_own_order_of_heads(folder_of: Folders) -> None:
    """GPT-NeoX's modules compute what they computed before."""
    network = plain_model(folder_of("gpt_neox"))
    plain = run_plain(network, 512)
    fused_decoder(network, plain.geometry, plain.windows, plain.observed)
    assert torch.equal(run_plain(network, 512).logits, plain.logits)


def test_rows_go_side_by_side_with_their_codes() -> None:
    """[H, 3, D] becomes [3, H, D], in the weight, the bias and the codes."""

    class Holder(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.layer = torch.nn.Linear(32, 2 * 3 * 4)

        def get_output_embeddings(self) -> None:
            return None

    holder = Holder().requires_grad_(False)
    round_linears(holder, 4)
    layer = holder.layer
    made = side_by_side(layer, 2)
    for ours, theirs in ((made.weight, layer.weight), (made.bias, layer.bias)):
        expected = theirs.view(2, 3, 4, -1).transpose(0, 1).reshape(theirs.shape)
        assert torch.equal(ours, expected)
    codes = codes_of(made)
    assert codes is not None
    torch.testing.assert_close(codes.values(), made.weight)


def test_rows_of_other_heads_are_refused() -> None:
    """Where queries have more heads than keys, and where weights are transposed."""
    with pytest.raises(NotFused, match="not of as many heads each"):
        side_by_side(torch.nn.Linear(8, 20), 2)
    conv: Any = plain_conv()
    with pytest.raises(NotFused, match="several layers of Conv1D"):
        joined([conv, conv])


def plain_conv() -> torch.nn.Module:
    """A linear layer with a transposed weight."""
    from transformers.pytorch_utils import Conv1D

    return Conv1D(4, 8)
