"""What a model computes by itself, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, Gemma4TextConfig

from outrider.engine.loading.check_forward import TOLERANCE, _check_tokens, check_paged, run_plain
from outrider.engine.loading.loader import load_model
from outrider.protocol.errors import ModelError
from tests.models import build_model


def test_scores_are_bounded_whatever_attention_a_model_came_with(folder_of: Callable[[str], Path]) -> None:
    """sdpa knows no softcap: some versions of transformers refuse it then, others leave the softcap out."""
    network = AutoModelForCausalLM.from_pretrained(
        folder_of("gemma2"), dtype=torch.float32, attn_implementation="eager"
    )
    expected = run_plain(network, 512).logits
    network.config._attn_implementation = "sdpa"
    assert torch.equal(run_plain(network, 512).logits, expected)


def test_experts_that_rounding_chooses_are_no_fault(tmp_path: Path) -> None:
    """A router of random weights finds many experts equally good: the model's own rounding moves its logits
    by more than the tolerance."""
    config = Gemma4TextConfig(
        vocab_size=300,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=16,
        top_k_experts=4,
        moe_intermediate_size=48,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    folder = str(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rounding = run_plain(network, 512).rounding
    assert rounding is not None
    assert rounding.median() > TOLERANCE[torch.bfloat16]
    load_model(folder, dtype="bfloat16", device="cpu", threads=1)


def test_rounding_excuses_the_logits_that_it_moves_and_no_others(folder_of: Callable[[str], Path]) -> None:
    """Another expert at a text's first tokens moves a whole step, though few of all logits."""
    folder = str(folder_of("llama"))
    loaded = load_model(folder, dtype="bfloat16", device="cpu", threads=1, fused=False)
    plain = run_plain(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), 512)
    first = torch.zeros(plain.logits.shape[:2])
    first[0, :7] = 0.15
    moved = replace(plain, logits=plain.logits * (1 + first[..., None]), rounding=first)
    check_paged(loaded, moved)
    with pytest.raises(ModelError, match="first chunk"):
        check_paged(loaded, replace(moved, rounding=first.flip(0)))


def test_without_experts_or_16_bits_rounding_excuses_nothing(folder_of: Callable[[str], Path]) -> None:
    """The tolerance is that of the dtype."""
    for architecture, dtype in (("llama", torch.bfloat16), ("gemma4_moe", torch.float32)):
        network = AutoModelForCausalLM.from_pretrained(folder_of(architecture), dtype=dtype).eval()
        assert run_plain(network, 512).rounding is None


def test_a_text_may_begin_with_a_token_of_zeros(tmp_path: Path) -> None:
    """As padding is: its logits are all equal, and have no spread that a distance could be relative to."""
    padding = _check_tokens(300)[0][0]
    folder = build_model("llama", tmp_path, pad_token_id=padding)
    loaded = load_model(str(folder), dtype="float32", device="cpu", threads=1)
    assert (
        not run_plain(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), loaded.context_length
        )
        .logits[0, 0]
        .any()
    )


def test_an_encoder_is_refused_as_one() -> None:
    """BERT has a language-model head too, and is a decoder only where its configuration says so."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    network = AutoModelForCausalLM.from_config(BertConfig(**sizes)).eval()
    with pytest.raises(ModelError, match="keeps no keys and values of earlier tokens"):
        run_plain(network, 512)
    assert run_plain(AutoModelForCausalLM.from_config(BertConfig(**sizes, is_decoder=True)).eval(), 512)
