"""Llama 4, whose layers without rotation scale queries by position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment
from tests.models import plain_model
from tests.unit.engine.test_runner import assert_same, tokens_of

FLOOR = 40
"""The scale is 1 up to this position."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose scales begin to grow within the chunks of its attention."""
    made = tmp_path_factory.mktemp("llama4")
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        intermediate_size_mlp=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        max_position_embeddings=256,
        attention_chunk_size=128,
        no_rope_layers=[1, 0],
        floor_scale=FLOOR,
        attn_scale=0.7,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    transformers.Llama4ForCausalLM(config).save_pretrained(made)
    return made


def test_the_context_ends_where_the_scales_begin_to_grow(folder: Path) -> None:
    """Which a line of progress says. A row's place in a step, which may be later, does not count."""
    said: list[str] = []
    loaded = load_model(str(folder), dtype="float32", device="cpu", threads=1, say=said.append)
    assert loaded.context_length == FLOOR
    assert any(f"cut from 128 to {FLOOR}" in line for line in said)
    runner, plain = ModelRunner(loaded, 64, 4), plain_model(folder)
    texts = [tokens_of(seed, FLOOR - 1) for seed in (1, 2, 3)]
    rows = list(range(FLOOR - 1))
    segments = [Segment(SequenceKv.open(runner.pool, text), text, None, rows) for text in texts]
    found = runner.forward(segments)
    with torch.no_grad():
        expected = [plain(torch.tensor([text])).logits[0] for text in texts]
    assert_same(found, torch.cat(expected))
