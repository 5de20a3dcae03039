"""Models of real shapes on the stand-in device: no weights, one or two layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from outrider.engine.fused_decoder import fused_decoder, recognise
from outrider.engine.fused_decoder.decoder import Rope
from outrider.engine.fused_decoder.turning import Turn
from outrider.engine.gpu.coded_linear import CodedLinear
from outrider.engine.gpu.ordered_linear import order_linears
from outrider.engine.loaded_model import Geometry, LoadedModel
from outrider.engine.quantization.planes import PlanarWeight
from tests.unit.engine.gpu.stand_in import DEVICE

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64}
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "head_dim": 128}
SHARED = {"num_key_value_heads": 8, "vocab_size": 128256}


FAMILIES: dict[str, Callable[[int], PretrainedConfig]] = {
    "gpt_neox": lambda layers: GPTNeoXConfig(
        num_hidden_layers=layers, hidden_size=4096, intermediate_size=16384, num_attention_heads=32
    ),
    "gpt2": lambda layers: GPT2Config(n_layer=layers, n_embd=1600, n_head=25),
    "olmo2": lambda layers: Olmo2Config(num_hidden_layers=layers, **LLAMA_8B | {"intermediate_size": 11008}),
    "phi": lambda layers: PhiConfig(
        num_hidden_layers=layers,
        hidden_size=2560,
        intermediate_size=10240,
        num_attention_heads=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
    ),
    "starcoder2": lambda layers: Starcoder2Config(
        num_hidden_layers=layers,
        hidden_size=4608,
        intermediate_size=18432,
        num_attention_heads=36,
        num_key_value_heads=4,
        sliding_window=4096,
    ),
    "gemma3": lambda layers: Gemma3TextConfig(
        num_hidden_layers=layers,
        hidden_size=2560,
        intermediate_size=10240,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
    ),
}
"""Pythia 6.9B, GPT-2 XL, OLMo 2 7B, Phi 2, Starcoder2 7B and Gemma 3 4B, with as many layers as one likes."""

_GEMMA4 = {
    "vocab_size": 262144,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "head_dim": 256,
    "global_head_dim": 512,
}
MIXED: dict[str, PretrainedConfig] = {
    "gemma4_dense": Gemma4TextConfig(
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        sliding_window=1024,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
        **_GEMMA4,
    ),
    "gemma4": Gemma4TextConfig(
        hidden_size=2560,
        intermediate_size=10240,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=512,
        num_kv_shared_layers=2,
        **_GEMMA4,
    ),
}
"""Like Gemma 4 31B and E4B, of four layers with two shapes of heads."""

MIXTURES: dict[str, Callable[[int], PretrainedConfig]] = {
    "mixtral": lambda layers: MixtralConfig(
        num_hidden_layers=layers, num_local_experts=8, **LLAMA_8B, num_key_value_heads=8
    ),
    "qwen3_moe": lambda layers: Qwen3MoeConfig(
        num_hidden_layers=layers,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "gpt_oss": lambda layers: GptOssConfig(
        num_hidden_layers=layers,
        num_local_experts=32,
        layer_types=["full_attention"] * layers,
        sliding_window=None,
    ),
}
"""Mixtral 8x7B, Qwen 3 30B A3B and gpt-oss 20B."""


def model(
    sizes: dict[str, int],
    layers: int = 1,
    *,
    head_norms: bool = False,
    bits: int | None = None,
    ordered: bool = False,
) -> LoadedModel:
    """A fused decoder in bfloat16, with a norm over each head as Qwen 3 has it or without one.

    With `bits` its linear layers have codes in groups of 32; `ordered` is as with `deterministic`.
    """
    settings = Qwen3Config if head_norms else LlamaConfig
    return model_of(settings(num_hidden_layers=layers, **sizes, **SHARED), bits=bits, ordered=ordered)


def model_of(config: Any, *, bits: int | None = None, ordered: bool = False) -> LoadedModel:
    """The same of any configuration."""
    with DEVICE:
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    for name, _ in list(network.named_buffers()):
        if name.endswith("layer_scalar"):  # is read at load
            network.get_submodule(name.removesuffix(".layer_scalar")).layer_scalar = torch.tensor([0.5])
    if bits is not None:
        _code(network, bits)
    layers = config.num_hidden_layers
    windows = dict.fromkeys(range(layers), getattr(config, "sliding_window", None))
    if isinstance(config, Gemma4TextConfig):
        geometry, windows = _mixed(config), windows | {1: None, 3: None}
    else:
        geometry = _heads(config, layers)
    with patch.object(recognise, "turns_of", _turns) if geometry.parts else nullcontext():
        decoder = fused_decoder(network, geometry, windows)
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


def _heads(config: Any, layers: int) -> Geometry:
    """The heads of so many layers."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(layers, heads, getattr(config, "num_key_value_heads", None) or heads, width, width)


def _turns(_: Any, __: Any, widths: list[int], *, whole: bool) -> list[Turn]:
    """Layers that turn all columns of their heads: how they do cannot be observed on this device."""
    assert whole
    turns = {width: Turn(Rope(torch.empty(width // 2, device=DEVICE), 1.0), None) for width in widths}
    return [turns[width] for width in widths]


def _mixed(config: Any) -> Geometry:
    """The heads of four layers, where the last two may see the keys and values of the first two."""
    kept = 1 if config.num_kv_shared_layers else 2
    first, second = (_heads(config.per_layer_config[layer], kept) for layer in range(2))
    places = ((0, 0), (1, 0), (0, kept - 1), (1, kept - 1))
    return replace(first, num_layers=4, parts=(first, second), places=places)


def planar(
    bits: int, out: int, width: int, group: int = 32, *, zeros: bool = False, e4m3: bool = False
) -> PlanarWeight:
    """Codes of a weight [out, in]; with zeros or e4m3 the scales are float32, as those of checkpoints are."""
    kept = torch.float32 if zeros or e4m3 else torch.bfloat16
    of_groups = [torch.empty(-(-width // group), out, dtype=kept, device=DEVICE) for _ in range(2)]
    words = torch.empty(-(-width * bits // 1024) * 32, out, dtype=torch.int32, device=DEVICE)
    return PlanarWeight(words, of_groups[0], of_groups[1] if zeros else None, bits, group, width, e4m3)


def _code(network: torch.nn.Module, bits: int) -> None:
    for name, layer in list(network.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            parent, _, attribute = name.rpartition(".")
            weight = planar(bits, layer.out_features, layer.in_features)
            setattr(network.get_submodule(parent), attribute, CodedLinear(weight, None, torch.bfloat16))
