"""Tiny random models of every supported architecture, with a tiny tokenizer, saved to a folder.

The weights are drawn wide enough that the logits of different tokens are far apart: greedy choices do not
hang on rounding. Sliding windows, and ranges behind which something changes, are shorter than the sequences
of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PretrainedConfig, PreTrainedModel

BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
WINDOW = 12

_TEXT = (
    "The quick brown fox jumps over the lazy dog. A scout rides ahead and reports what it sees; "
    "the riders behind follow where the scout was right, and choose their own way where it was not. "
)

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
}
_GPT2_SIZES: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.25,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_HYBRID: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_GEMMA4: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": False,
}
_GEMMA4_WHOLE: dict[str, Any] = {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "head_dim": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
_DEEPSEEK: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}

ARCHITECTURES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": lambda **common: transformers.LlamaConfig(**_SIZES, **common),
    "qwen2": lambda **common: transformers.Qwen2Config(**_SIZES, **common),
    "qwen3": lambda **common: transformers.Qwen3Config(**_SIZES, head_dim=16, **common),
    "mistral": lambda **common: transformers.MistralConfig(**_SIZES, sliding_window=WINDOW, **common),
    "gemma": lambda **common: transformers.GemmaConfig(**_SIZES, head_dim=16, **common),
    "gemma2": lambda **common: transformers.Gemma2Config(
        **_SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        attn_logit_softcapping=5.0,
        tie_word_embeddings=False,
        **common,
    ),
    "gemma3": lambda **common: transformers.Gemma3TextConfig(
        **_SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        tie_word_embeddings=False,
        **common,
    ),
    "phi3": lambda **common: transformers.Phi3Config(**_SIZES, **common),
    "gpt_neox": lambda **common: transformers.GPTNeoXConfig(
        **{name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}, **common
    ),
    "gpt2": lambda **common: transformers.GPT2Config(**_GPT2_SIZES, **common),
    "olmo": lambda **common: transformers.OlmoConfig(**_SIZES, **common),
    "olmo2": lambda **common: transformers.Olmo2Config(**_SIZES, **common),
    "phi": lambda **common: transformers.PhiConfig(**_SIZES, **common),
    "starcoder2": lambda **common: transformers.Starcoder2Config(**_SIZES, sliding_window=WINDOW, **common),
    "mixtral": lambda **common: transformers.MixtralConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2, **common
    ),
    "qwen3_moe": lambda **common: transformers.Qwen3MoeConfig(
        **_SIZES,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        decoder_sparse_step=2,
        **common,
    ),
    "olmoe": lambda **common: transformers.OlmoeConfig(
        **_SIZES, num_experts=4, num_experts_per_tok=2, **common
    ),
    "granite_moe": lambda **common: transformers.GraniteMoeConfig(
        **_SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        embedding_multiplier=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.125,
        logits_scaling=3.0,
        **common,
    ),
    "hunyuan_moe": lambda **common: transformers.HunYuanMoEV1Config(
        **_SIZES, head_dim=16, num_experts=4, moe_topk=2, **common
    ),
    "deepseek_v2": lambda **common: transformers.DeepseekV2Config(
        **{**_DEEPSEEK, "q_lora_rank": None, "rope_parameters": _YARN, **common}
    ),
    "deepseek_v3": lambda **common: transformers.DeepseekV3Config(**{**_DEEPSEEK, **common}),
    "glm4_moe_lite": lambda **common: transformers.Glm4MoeLiteConfig(
        **{**_DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "sparse"], **common}
    ),
    "gpt_oss": lambda **common: transformers.GptOssConfig(
        **_SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **common,
    ),
    "gemma3n": lambda **common: transformers.Gemma3nTextConfig(
        **{**_SIZES, "num_hidden_layers": 6},
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=common["vocab_size"],
        laurel_rank=8,
        activation_sparsity_pattern=[0.5] + [0.0] * 5,
        tie_word_embeddings=False,
        **common,
    ),
    # As the models E2B and E4B, the one of 31B, and the one with experts.
    "gemma4": lambda **common: transformers.Gemma4TextConfig(
        **_GEMMA4,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=common["vocab_size"],
        use_double_wide_mlp=True,
        **common,
    ),
    "gemma4_dense": lambda **common: transformers.Gemma4TextConfig(**_GEMMA4, **_GEMMA4_WHOLE, **common),
    "gemma4_moe": lambda **common: transformers.Gemma4TextConfig(
        **_GEMMA4,
        **_GEMMA4_WHOLE,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=48,
        **common,
    ),
    "stablelm": lambda **common: transformers.StableLmConfig(**_SIZES, **common),
    "granite": lambda **common: transformers.GraniteConfig(
        **_SIZES,
        embedding_multiplier=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.125,
        logits_scaling=3.0,
        **common,
    ),
    "smollm3": lambda **common: transformers.SmolLM3Config(**_SIZES, no_rope_layers=[1, 0, 1], **common),
    "glm4": lambda **common: transformers.Glm4Config(**_SIZES, head_dim=16, **common),
    "cohere2": lambda **common: transformers.Cohere2Config(
        **_SIZES, sliding_window=WINDOW, layer_types=_ALTERNATING, logit_scale=0.25, **common
    ),
    "exaone4": lambda **common: transformers.Exaone4Config(
        **_SIZES, sliding_window=WINDOW, sliding_window_pattern=2, layer_types=_ALTERNATING, **common
    ),
    "nemotron": lambda **common: transformers.NemotronConfig(**_SIZES, head_dim=16, **common),
    "opt": lambda **common: transformers.OPTConfig(
        **{name: size for name, size in _SIZES.items() if name != "num_key_value_heads"},
        ffn_dim=96,
        word_embed_proj_dim=64,
        init_std=0.25,
        **common,
    ),
    "ernie4_5": lambda **common: transformers.Ernie4_5Config(**_SIZES, head_dim=16, **common),
    # Its queries grow with their position, from one on that is behind the self check's.
    "ministral3": lambda **common: transformers.Ministral3Config(
        **_SIZES,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": WINDOW,
            "llama_4_scaling_beta": 0.1,
        },
        **common,
    ),
    "apertus": lambda **common: transformers.ApertusConfig(**_SIZES, **common),
    "gpt_neo": lambda **common: transformers.GPTNeoConfig(
        **{name: size for name, size in _SIZES.items() if name != "num_key_value_heads"},
        attention_types=[[["global", "local"], 1], [["local"], 1]],
        window_size=WINDOW,
        **common,
    ),
    "gptj": lambda **common: transformers.GPTJConfig(**_GPT2_SIZES, rotary_dim=8, **common),
    "codegen": lambda **common: transformers.CodeGenConfig(**_GPT2_SIZES, rotary_dim=8, **common),
    "gpt_neox_japanese": lambda **common: transformers.GPTNeoXJapaneseConfig(
        **{name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}, **common
    ),
    "xglm": lambda **common: transformers.XGLMConfig(
        d_model=64,
        ffn_dim=96,
        num_layers=3,
        attention_heads=4,
        max_position_embeddings=512,
        init_std=0.25,
        **common,
    ),
    "falcon": lambda **common: transformers.FalconConfig(
        **{
            name: size
            for name, size in _SIZES.items()
            if name not in ("num_key_value_heads", "intermediate_size")
        },
        num_kv_heads=2,
        new_decoder_architecture=True,
        **common,
    ),
    "bloom": lambda **common: transformers.BloomConfig(
        hidden_size=64, n_layer=3, n_head=4, seq_length=512, initializer_range=0.25, **common
    ),
    "mpt": lambda **common: transformers.MptConfig(
        d_model=64, n_layers=3, n_heads=4, max_seq_len=512, initializer_range=0.25, **common
    ),
    "diffllama": lambda **common: transformers.DiffLlamaConfig(**_SIZES, **common),
    "qwen3_5": lambda **common: transformers.Qwen3_5TextConfig(**_HYBRID, **_DELTA, head_dim=16, **common),
    "qwen3_next": lambda **common: transformers.Qwen3NextConfig(
        **_HYBRID,
        **_DELTA,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **common,
    ),
    "olmo_hybrid": lambda **common: transformers.OlmoHybridConfig(**_HYBRID, **_DELTA, **common),
    "kimi_linear": lambda **common: transformers.KimiLinearConfig(**{**_HYBRID, **_LATENT}, **common),
    "bailing_hybrid": lambda **common: transformers.BailingHybridConfig(
        **{**_HYBRID, **_LATENT}, n_group=1, num_expert_group=1, topk_group=1, **common
    ),
    "lfm2": lambda **common: transformers.Lfm2Config(
        **{**_HYBRID, "layer_types": ["conv", "full_attention"] * 2}, block_auto_adjust_ff_dim=False, **common
    ),
    "lfm2_moe": lambda **common: transformers.Lfm2MoeConfig(
        **{**_HYBRID, "layer_types": ["conv", "full_attention"] * 2},
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        **common,
    ),
    "lfm3": lambda **common: transformers.Lfm3Config(
        **{**_HYBRID, "layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
        head_dim=16,
        sliding_window=WINDOW,
        **common,
    ),
    "granitemoehybrid": lambda **common: transformers.GraniteMoeHybridConfig(
        **{**_HYBRID, "layer_types": ["mamba", "attention"] * 2},
        **_MAMBA,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        **common,
    ),
    "bamba": lambda **common: transformers.BambaConfig(**_SIZES, **_MAMBA, attn_layer_indices=[1], **common),
    "falcon_h1": lambda **common: transformers.FalconH1Config(**_SIZES, **_MAMBA, mamba_d_ssm=128, **common),
    "nemotron_h": lambda **common: transformers.NemotronHConfig(
        **_SIZES,
        hybrid_override_pattern="M*-",
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        chunk_size=8,
        n_groups=2,
        head_dim=16,
        time_step_min=1e-9,  # transformers bounds steps in prompts alone: logits then depend on what is one
        **common,
    ),
    "jamba": lambda **common: transformers.JambaConfig(
        **_SIZES,
        mamba_d_state=8,
        mamba_dt_rank=8,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        **common,
    ),
    "zamba": lambda **common: transformers.ZambaConfig(
        **{**_SIZES, "num_hidden_layers": 5},
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
        **common,
    ),
    # Two blocks take turns; each third layer with attention has the first one's weights.
    "zamba2": lambda **common: transformers.Zamba2Config(
        **{**_SIZES, "num_hidden_layers": 6, "num_key_value_heads": 4, "initializer_range": 0.1},
        layers_block_type=["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"],
        hybrid_layer_ids=[1, 2, 4, 5],
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        adapter_rank=8,
        mamba_d_state=16,
        n_mamba_heads=4,
        chunk_size=8,
        time_step_min=1e-9,  # see nemotron_h
        **common,
    ),
}
"""Configurations by short name; tokens and vocabulary are added by `build_model`."""

RECURRENT = (
    *("qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
    *("lfm2", "lfm2_moe", "lfm3"),
    *("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "jamba", "zamba", "zamba2"),
)
"""Those with recurrent layers beside attention."""

OWN_ATTENTION = (
    *("gpt_neo", "gptj", "codegen", "gpt_neox_japanese", "xglm", "falcon", "bloom", "mpt", "diffllama"),
)
"""Those whose modules compute attention themselves."""

UNSUPPORTED: dict[str, Callable[..., PretrainedConfig]] = {
    "t5": lambda **common: transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **common
    ),
    "mamba": lambda **common: transformers.MambaConfig(
        hidden_size=32, state_size=4, num_hidden_layers=2, **common
    ),
    "rembert": lambda **common: transformers.RemBertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, is_decoder=True, **common
    ),
    "bart": lambda **common: transformers.BartConfig(
        d_model=32, decoder_layers=2, decoder_attention_heads=4, is_encoder_decoder=False, **common
    ),
    "zaya": lambda **common: transformers.ZayaConfig(
        **_SIZES, head_dim=16, num_experts=2, moe_intermediate_size=32, router_hidden_size=16, **common
    ),
}
"""Configurations of models that cannot run here."""

LATEST = {"bailing_hybrid": "BailingHybridConfig", "lfm3": "Lfm3Config", "zaya": "ZayaConfig"}
"""Models that not every version of transformers from 5.17 on knows, with their configurations' names."""


def config_of(architecture: str, vocab_size: int = 300, **changes: Any) -> PretrainedConfig:
    """The configuration of a model, with `changes`. Skips the test if transformers has no such model."""
    if (missing := LATEST.get(architecture)) and not hasattr(transformers, missing):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
    configure = ARCHITECTURES.get(architecture) or UNSUPPORTED[architecture]
    config = configure(vocab_size=vocab_size, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def build_model(
    architecture: str, folder: Path, *, seed: int = 0, vocab_size: int = 300, **changes: Any
) -> Path:
    """Save a random float32 model of `ARCHITECTURES` or `UNSUPPORTED` and its tokenizer into `folder`.

    `changes` are set on the configuration. Returns `folder`.
    """
    config = config_of(architecture, vocab_size, **changes)
    if len(getattr(config, "layer_types", None) or ()) > config.num_hidden_layers:
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(seed)
    kind = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    model: PreTrainedModel = kind.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # 1 unless it is set
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    build_tokenizer(folder, vocab_size=vocab_size)
    return folder


def plain_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model as transformers loads and runs it."""
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        network.set_attn_implementation("eager")  # sdpa omits it, in some versions silently
    plain: PreTrainedModel = network.eval()
    return plain


def build_tokenizer(folder: Path, *, vocab_size: int = 300) -> None:
    """Save a byte-level BPE tokenizer of exactly `vocab_size` tokens into `folder`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "the training text is too short for this vocabulary"
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        f'{{"bos_token": "{BOS}", "eos_token": "{EOS}", "add_bos_token": false}}\n'
    )
