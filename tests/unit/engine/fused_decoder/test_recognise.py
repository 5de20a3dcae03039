"""Which models run as a fused decoder, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.engine.fused_decoder import FusedDecoder, NotFused, fused_decoder
from outrider.engine.loading.check_forward import Plain, run_plain
from outrider.engine.loading.loader import load_model
from tests.models import ARCHITECTURES, BOS_ID, EOS_ID, OWN_ATTENTION, RECURRENT, build_model, build_tokenizer

Folders = Callable[[str], Path]
PLAIN = {"gemma3n", "gemma4_moe", "hunyuan_moe", *OWN_ATTENTION, *RECURRENT}


def plain_model(folder: Path) -> tuple[PreTrainedModel, Plain]:
    """A model as transformers loads it, and what it computes."""
    network = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    return network, run_plain(network, 512)


def decoder_of(network: PreTrainedModel, plain: Plain) -> FusedDecoder:
    """Its fused decoder."""
    return fused_decoder(network, plain.geometry, plain.windows, plain.observed)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_who_is_fused(folder_of: Folders, architecture: str) -> None:
    """The common decoder layer is; the others run their own modules, and one line says why."""
    said: list[str] = []
    loaded = load_model(
        str(folder_of(architecture)), dtype="float32", device="cpu", threads=1, say=said.append
    )
    fused = isinstance(loaded.model, FusedDecoder)
    assert fused == (architecture not in PLAIN)
    assert [line for line in said if line.startswith("without the fused decoder: ")] == [
        line for line in said if "fused" in line
    ]
    assert len([line for line in said if "fused" in line]) == (0 if fused else 1)


@pytest.mark.parametrize(("architecture", "bound"), [("gemma2", 5.0), ("gemma3", None)])
def test_scores_are_bounded_where_the_layers_ask_for_it(
    tmp_path: Path, architecture: str, bound: float | None
) -> None:
    """Gemma 3 computes without the bound that its configuration names, unlike Gemma 2."""
    network, plain = plain_model(build_model(architecture, tmp_path, attn_logit_softcapping=5.0))
    assert [layer.settings.scores.softcap for layer in decoder_of(network, plain).stack] == [bound] * 3


def test_the_modules_are_kept_when_asked_for(folder_of: Folders) -> None:
    """`fused=False` leaves the transformers model in place."""
    loaded = load_model(str(folder_of("llama")), dtype="float32", device="cpu", threads=1, fused=False)
    assert isinstance(loaded.model, PreTrainedModel)
    assert loaded.kind == "LlamaForCausalLM"


def loaded_as(
    kind: type[transformers.PretrainedConfig], folder: Path, **changes: Any
) -> tuple[Any, list[str]]:
    """A small random model of a kind as it is loaded, and what was said meanwhile."""
    config = kind(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        **changes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer(folder)
    said: list[str] = []
    loaded = load_model(str(folder), dtype="float32", device="cpu", threads=1, say=said.append)
    return loaded.model, said


def test_a_factor_in_the_code_is_found_by_the_check(tmp_path: Path) -> None:
    """HyperCLOVA X multiplies logits by what Granite divides them by: it loads, with its own modules."""
    factors = {"logits_scaling": 2.0, "use_post_norm": False}
    model, said = loaded_as(transformers.HyperCLOVAXConfig, tmp_path, **factors)
    assert isinstance(model, PreTrainedModel)
    assert any("without the fused decoder" in line and "gives other logits" in line for line in said)


def test_bounded_queries_are_refused(tmp_path: Path) -> None:
    """The check's own need not reach the bound, so nothing else would show it."""
    model, said = loaded_as(transformers.OlmoConfig, tmp_path, clip_qkv=100.0)
    assert isinstance(model, PreTrainedModel)
    assert any("its queries, keys and values are bounded" in line for line in said)


def test_norms_of_other_widths_are_refused(folder_of: Folders) -> None:
    """They are over a head or over all heads; over half a head nothing is known of them."""
    network, plain = plain_model(folder_of("qwen3"))
    network.model.layers[0].self_attn.q_norm.weight = nn.Parameter(torch.ones(8))
    with pytest.raises(NotFused, match="neither over a head nor over all"):
        decoder_of(network, plain)


def test_a_model_that_also_takes_images_is_fused_for_texts(folder_of: Folders, tmp_path: Path) -> None:
    """What reads images is left out; the text model is the one inside."""
    text = transformers.AutoConfig.from_pretrained(folder_of("gemma3"))
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14}
    )
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    build_tokenizer(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu", threads=1)
    assert isinstance(loaded.model, FusedDecoder)
    assert loaded.kind == "Gemma3ForConditionalGeneration"


def test_a_weight_without_a_place_is_named(folder_of: Folders) -> None:
    """What the fused layer does not know of may change what the layer computes."""
    network, plain = plain_model(folder_of("llama"))
    network.model.layers[1].self_attn.gate = nn.Linear(4, 4)
    with pytest.raises(NotFused, match=r"model\.layers\.1\.self_attn\.gate\.weight has no place"):
        decoder_of(network, plain)


def test_a_subclass_of_a_linear_layer_is_refused(folder_of: Folders) -> None:
    """It may compute something else."""

    class Odd(nn.Linear):
        pass

    network, plain = plain_model(folder_of("llama"))
    network.model.layers[0].mlp.down_proj.__class__ = Odd
    with pytest.raises(NotFused, match="down_proj is a Odd"):
        decoder_of(network, plain)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_modules_weights_become_views(folder_of: Folders, architecture: str) -> None:
    """Nothing is held twice, and the model still computes the same."""
    network, plain = plain_model(folder_of(architecture))
    decoder = decoder_of(network, plain)
    for ours, theirs in zip(decoder.stack, network.model.layers, strict=True):
        fused = ours.qkv.weight.untyped_storage().data_ptr()
        for part in (theirs.self_attn.q_proj, theirs.self_attn.k_proj, theirs.self_attn.v_proj):
            assert part.weight.untyped_storage().data_ptr() == fused
    again = run_plain(network, 512)
    torch.testing.assert_close(again.logits, plain.logits)
