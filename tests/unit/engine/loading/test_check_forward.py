"""What a model computes by itself, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from outrider.engine.loading.check_forward import run_plain


def test_scores_are_bounded_whatever_attention_a_model_came_with(folder_of: Callable[[str], Path]) -> None:
    """sdpa knows no softcap: some versions of transformers refuse it then, others leave the softcap out."""
    network = AutoModelForCausalLM.from_pretrained(
        folder_of("gemma2"), dtype=torch.float32, attn_implementation="eager"
    )
    expected = run_plain(network, 512).logits
    network.config._attn_implementation = "sdpa"
    assert torch.equal(run_plain(network, 512).logits, expected)
