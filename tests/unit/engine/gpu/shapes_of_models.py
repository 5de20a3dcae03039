"""Models of real shapes on the stand-in device: no weights, one or two layers."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from outrider.engine.fused_decoder import fused_decoder
from outrider.engine.gpu.ordered_linear import order_linears
from outrider.engine.loaded_model import Geometry, LoadedModel
from tests.unit.engine.gpu.stand_in import DEVICE

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64}
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "head_dim": 128}
SHARED = {"num_key_value_heads": 8, "vocab_size": 128256}


def model(
    sizes: dict[str, int], layers: int = 1, *, head_norms: bool = False, ordered: bool = False
) -> LoadedModel:
    """A fused decoder in bfloat16, with a norm over each head as Qwen 3 has it or without one; `ordered` as
    with `deterministic`.
    """
    kind, settings = (Qwen3ForCausalLM, Qwen3Config) if head_norms else (LlamaForCausalLM, LlamaConfig)
    config = settings(num_hidden_layers=layers, **sizes, **SHARED)
    with DEVICE:
        network = kind._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    geometry = Geometry(layers, config.num_attention_heads, 8, config.head_dim, config.head_dim)
    decoder = fused_decoder(network, geometry, dict.fromkeys(range(layers)))
    if ordered:
        order_linears(decoder)
    return LoadedModel(
        model=decoder,
        name="shape",
        vocabulary_size=config.vocab_size,
        context_length=8192,
        eos_token_ids=(),
        bos_token_id=None,
        dtype=torch.bfloat16,
        device=DEVICE,
        geometry=geometry,
        kernels=True,
        ordered=ordered,
    )
