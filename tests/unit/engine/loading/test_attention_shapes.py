"""What layers hand to attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.loading.attention_shapes import attention_calls
from outrider.protocol.errors import ModelError

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


def test_a_layer_that_runs_again_for_a_token_is_refused(folder_of: Callable[[str], Path]) -> None:
    """As those of HRM do: its keys and values would take the place of the first ones."""
    network = AutoModelForCausalLM.from_pretrained(folder_of("llama")).eval()
    network.model.layers[1] = network.model.layers[0]
    with pytest.raises(ModelError, match="LlamaAttention is called several times for a token"):
        attention_calls(network)
