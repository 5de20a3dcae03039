"""Which tiny models the tests run on the kernels of GPUs."""

from __future__ import annotations

ON_KERNELS = (
    *("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"),
    *("gpt_neox", "gpt2", "olmo", "olmo2", "phi", "starcoder2"),
    *("mixtral", "qwen3_moe", "olmoe", "granite_moe"),
    *("granite", "glm4", "exaone4", "nemotron", "ministral3"),
    *("gemma4", "gemma4_dense"),
)
LAYERS = {
    **dict.fromkeys(("llama", "gemma2", "gemma3", "gpt_oss", "exaone4"), 2),
    **dict.fromkeys(("gemma4", "gemma4_dense"), 4),
}
"""Numbers of layers of models whose layers differ, and of one more: what one layer says is what the next one
reads. Others have one."""
