"""What layers hand to attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.loading.attention_shapes import attention_calls

SHAPES = {"llama": (4, 2, 16, 16), "deepseek_v3": (4, 4, 16, 12)}


@pytest.mark.parametrize("architecture", SHAPES)
def test_each_layer_tells_its_heads_and_widths(folder_of: Callable[[str], Path], architecture: str) -> None:
    """Also those of a model whose cache keeps something else; the model computes what it did before."""
    network = AutoModelForCausalLM.from_pretrained(folder_of(architecture)).eval().requires_grad_(False)
    tokens = torch.tensor([[5, 6, 7]])
    before = network(tokens).logits
    assert {i: call.shapes for i, call in attention_calls(network).items()} == dict.fromkeys(
        range(3), SHAPES[architecture]
    )
    assert torch.equal(network(tokens).logits, before)
