"""Attention over latents computes what the modules compute with whole keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.engine.cpu.backend import vector_backend
from outrider.engine.cpu.heads import PackedHeads
from outrider.engine.fused_decoder import FusedDecoder, NotFused, fused_decoder
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.linears import HeadLinears
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.check_forward import run_plain
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment
from tests.models import build_model, build_tokenizer
from tests.unit.engine.conftest import Pair

LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
KEPT = 3 * (16 + 8)
PAGE = 4
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "queries from a narrow row": ("deepseek_v2", {"q_lora_rank": 16}),
    "groups of experts": ("deepseek_v2", {**GROUPS, "topk_method": "group_limited_greedy"}),
    "groups by their best two": ("deepseek_v3", GROUPS),
    "queries from the row": ("deepseek_v3", {"q_lora_rank": None}),
    "turned by halves": ("deepseek_v3", {"rope_interleave": False}),
    "biases": ("deepseek_v3", {"attention_bias": True}),
    "a longer range": (
        "glm4_moe_lite",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 128}},
    ),
}
needs_kernels = pytest.mark.skipif(vector_backend(torch.float32) is None, reason="needs AVX2 or AVX-512")


def loaded_from(folder: Path, dtype: str = "float32", **options: Any) -> LoadedModel:
    """A model that the check at load has let run fused."""
    said: list[str] = []
    loaded = load_model(str(folder), dtype=dtype, device="cpu", threads=1, say=said.append, **options)
    assert isinstance(loaded.model, FusedDecoder), said
    return loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_keep_latents(variant: str, dtype: str, tmp_path: Path) -> None:
    """Whatever makes queries, turns heads, and chooses experts."""
    architecture, changes = VARIANTS[variant]
    loaded = loaded_from(build_model(architecture, tmp_path, **changes), dtype)
    assert loaded.geometry.numbers_per_token == KEPT


def test_a_model_of_images_keeps_latents(tmp_path: Path) -> None:
    """Mistral 4, whose queries grow with their position too."""
    rope = YARN | {"original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1}
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = transformers.Mistral4Config(
        **sizes, intermediate_size=96, max_position_embeddings=512, initializer_range=0.25, vocab_size=300,
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1,
        topk_group=1, first_k_dense_replace=1, rope_parameters=rope,
    )  # fmt: skip
    views = {**sizes, "model_type": "pixtral", "image_size": 32, "patch_size": 16, "head_dim": 16}
    config = transformers.Mistral3Config(
        text_config=text.to_dict(), vision_config=views, image_token_index=299
    )
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    build_tokenizer(tmp_path)
    assert loaded_from(tmp_path).geometry.numbers_per_token == KEPT


@pytest.mark.parametrize("architecture", LATENTS)
def test_a_page_holds_latents_alone(pair_of: Callable[..., Pair], architecture: str) -> None:
    """In every layer, once for keys and values; logits at far positions are those of transformers."""
    pair = pair_of(architecture)
    runner, tokens = ModelRunner(pair.loaded, 32, PAGE), [(7 * i) % 300 for i in range(100)]
    memory = runner.page_memory()
    assert memory is not None
    assert memory.page_bytes == PAGE * pair.loaded.kv_bytes_per_token == PAGE * KEPT * 4
    kv = SequenceKv.open(runner.pool, [])
    logits = runner.forward([Segment(kv, tokens, None, range(100))])
    torch.testing.assert_close(logits, pair.expected(tokens), rtol=1e-4, atol=1e-4)


def test_a_chunk_of_a_prompt_needs_no_logits(tmp_path: Path) -> None:
    """Where kernels compute all products, such a step has not one row behind the last attention."""
    loaded = loaded_from(build_model("deepseek_v3", tmp_path, first_k_dense_replace=3))
    runner = ModelRunner(loaded, 32, PAGE)
    kv = SequenceKv.open(runner.pool, [])
    assert runner.forward([Segment(kv, range(2, 42), None, [])]).shape == (0, 300)


@needs_kernels
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_heads_are_the_library_s(pair_of: Callable[..., Pair], dtype: torch.dtype, count: int) -> None:
    """Each head's rows times its weight, whatever the order of the rows in memory."""
    loaded = pair_of("deepseek_v3", str(dtype).removeprefix("torch.")).loaded
    assert loaded.choice is not None
    assert any(isinstance(module, PackedHeads) for module in loaded.model.modules())
    assert not any(isinstance(module, HeadLinears) for module in loaded.model.modules())
    packed: Any = loaded.model.stack[1].output.values  # type: ignore[index,union-attr]
    plain: Any = pair_of("deepseek_v3", str(dtype).removeprefix("torch.")).plain
    weight = plain.model.layers[1].self_attn.kv_b_proj.weight.detach().view(4, 20, 16)[:, 8:]
    x = torch.randn(count, 4, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.testing.assert_close(packed(x), HeadLinears(weight)(x))


def decoder_of(network: PreTrainedModel) -> FusedDecoder:
    """Its fused decoder."""
    plain = run_plain(network, 512)
    return fused_decoder(network, plain.geometry, plain.windows, plain.observed)


def test_the_modules_compute_what_they_did(folder_of: Callable[[str], Path]) -> None:
    """The check at load runs them again."""
    network = AutoModelForCausalLM.from_pretrained(folder_of("deepseek_v3")).eval().requires_grad_(False)
    before = run_plain(network, 512).logits
    decoder_of(network)
    torch.testing.assert_close(run_plain(network, 512).logits, before)


def test_another_product_of_latents_is_refused(folder_of: Callable[[str], Path]) -> None:
    """It is taken apart by heads, so it has to be a matrix."""
    network = AutoModelForCausalLM.from_pretrained(folder_of("deepseek_v3")).eval().requires_grad_(False)
    product = network.model.layers[1].self_attn.kv_b_proj
    product.bias = nn.Parameter(torch.zeros(product.out_features), requires_grad=False)
    with pytest.raises(NotFused, match="is quantized or has a bias"):
        decoder_of(network)
