"""Layers whose heads differ, or that see keys and values of another layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment
from tests.models import build_tokenizer
from tests.unit.engine.conftest import Pair

PAGE, PROMPT = 4, [5, 9, 2, 7, 30, 31, 32, 33, 40]


def test_shared_keys_and_values_are_kept_once(pair_of: Callable[..., Pair]) -> None:
    """The last two layers of four see those of the first two, one of two kv heads, one of a wider one."""
    loaded = pair_of("gemma4").loaded
    assert loaded.geometry.places == ((0, 0), (1, 0), (0, 0), (1, 0))
    memory = ModelRunner(loaded, 8, PAGE).page_memory()
    assert memory is not None
    assert memory.page_bytes == PAGE * loaded.kv_bytes_per_token == PAGE * 4 * (2 * 2 * 16 + 2 * 1 * 32)


@pytest.mark.parametrize("architecture", ["gemma4", "deepseek_v3"])
def test_pages_mean_the_same_at_another_replica(pair_of: Callable[..., Pair], architecture: str) -> None:
    """A runner that has only the bytes of the pages goes on as the one that computed them."""
    loaded = pair_of(architecture).loaded
    runner = ModelRunner(loaded, 16, PAGE)
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, PROMPT, None, [])])
    runner.commit(kv, range(len(PROMPT)), PROMPT)
    memory = runner.page_memory()
    assert memory is not None
    pages = [memory.read(page, PAGE) for page in range(16)]
    expected = runner.forward([Segment(kv, [3, 4, 8], [-1, 0, 0], range(3))])
    kv.rollback()
    for page in range(16):
        memory.write(page, bytes(len(pages[page])))
    for page, content in enumerate(pages):
        memory.write(page, content)
    assert torch.equal(runner.forward([Segment(kv, [3, 4, 8], [-1, 0, 0], range(3))]), expected)


def test_values_may_have_another_width_than_keys(tmp_path: Path) -> None:
    """Layers with other numbers of kv heads, whose values are narrower, run as the model's own modules."""
    config = transformers.MiMoV2FlashConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        initializer_range=0.25,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    build_tokenizer(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu", threads=1)
    assert [(part.kv_heads, part.head_dim, part.value_dim) for part in loaded.geometry.parts] == [
        (2, 16, 12),
        (4, 16, 12),
    ]
