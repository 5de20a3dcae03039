"""Mixtures of experts: which are taken apart, and what their router chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from outrider.engine.fused_decoder.mixture import Mixture, is_mixture

SIZES: dict[str, Any] = {"hidden_size": 32, "num_experts_per_tok": 3, "intermediate_size": 24}
BLOCKS: dict[str, tuple[type[torch.nn.Module], PretrainedConfig]] = {
    "mixtral": (MixtralSparseMoeBlock, transformers.MixtralConfig(**SIZES, num_local_experts=8)),
    "gpt_oss": (GptOssMLP, transformers.GptOssConfig(**SIZES, num_local_experts=8)),
    "olmoe": (OlmoeSparseMoeBlock, transformers.OlmoeConfig(**SIZES, num_experts=8)),
    "olmoe, normalised": (
        OlmoeSparseMoeBlock,
        transformers.OlmoeConfig(**SIZES, num_experts=8, norm_topk_prob=True),
    ),
    "qwen3": (
        Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=24, norm_topk_prob=True),
    ),
}


def block_of(name: str) -> Any:
    """A random block of a kind."""
    kind, config = BLOCKS[name]
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block: Any = kind(config)
    for weight in block.parameters():
        weight.data.normal_(std=0.25)
    return block.requires_grad_(False).eval()


@pytest.mark.parametrize("name", BLOCKS)
def test_parts_give_what_the_block_gives(name: str) -> None:
    """The router chooses the same experts with the same shares, and the weights are each expert's."""
    block, x = block_of(name), torch.randn(7, 32)
    assert is_mixture(block)
    experts = Mixture(block).fused()
    chosen, shares = experts.router(x)
    expected = torch.zeros_like(x)
    for row in range(len(x)):
        for expert, share in zip(chosen[row], shares[row], strict=True):
            up, down = experts.gate_up, experts.down
            inner = experts.gate(_linear(x[row], up.weight[expert], up.bias, expert))
            expected[row] += share * _linear(inner, down.weight[expert], down.bias, expert)
    whole = block(x[None])
    whole = whole[0] if isinstance(whole, tuple) else whole
    torch.testing.assert_close(expected, whole[0])
    torch.testing.assert_close(experts.own(x, chosen, shares), whole[0])


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert: torch.Tensor) -> Any:
    return torch.nn.functional.linear(x, weight, None if bias is None else bias[expert])


def test_others_stay_what_they_are() -> None:
    """Qwen 2 MoE has an expert that all tokens go through."""
    config = transformers.Qwen2MoeConfig(**SIZES, num_experts=8)
    assert not is_mixture(Qwen2MoeSparseMoeBlock(config))
