"""Experts on kernels of the project: what transformers computes, from the chosen ones alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from outrider.engine.cpu import matmul
from outrider.engine.cpu.backend import preferred, vector_backend
from outrider.engine.cpu.linear import pack_linears
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.quantization.stacked import WEIGHTS, is_stacked, round_experts

if vector_backend(torch.float32) is None:
    pytest.skip("needs AVX2 or AVX-512 and the package numba", allow_module_level=True)

EXPERTS, CHOSEN, WIDTH = 8, 3, 64
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 40, "moe_intermediate_size": 40}
KINDS: dict[str, tuple[Any, Any]] = {
    "qwen3_moe": (Qwen3MoeExperts, transformers.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS)),
    "gelu": (
        MixtralExperts,
        transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS, hidden_act="gelu"),
    ),
    "gpt_oss": (GptOssExperts, transformers.GptOssConfig(**SIZES, num_local_experts=EXPERTS)),
}
"""A gate that products open, one that torch opens, and one of its own with turned weights and biases."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = [dtype for dtype in TOLERANCE if vector_backend(dtype) is not None]


def experts_of(kind: str, dtype: torch.dtype, bits: int = 0) -> Any:
    """Random ones as transformers computes them, perhaps rounded."""
    torch.manual_seed(0)
    made, config = KINDS[kind]
    config._experts_implementation = "eager"
    experts: Any = made(config).to(dtype).requires_grad_(False)
    for weight in experts.parameters():
        weight.normal_(std=0.2)
    if bits:
        round_experts(experts, bits)
    return experts


def packed(experts: Any, workers: WorkerPool | None = None) -> Any:
    """The same on kernels; the weights of `experts` stay."""
    model = nn.ModuleDict({"experts": copy.deepcopy(experts)})
    pack_linears(model, preferred(experts.down_proj.dtype), workers)
    assert not list(model.parameters())
    return model["experts"]


def some(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the experts of each, and their shares."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    best, chosen = torch.randn(rows, EXPERTS, generator=generator).topk(CHOSEN)
    return x, chosen, best.softmax(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_they_give_what_transformers_gives(kind: str, bits: int, dtype: torch.dtype) -> None:
    """With the numbers that the codes stand for, rounded to the dtype; for one row and for many."""
    theirs = experts_of(kind, dtype, bits)
    ours = packed(theirs)
    for rows in (1, 2, 30):
        x, chosen, shares = some(rows, dtype)
        expected = theirs(x, chosen, shares.to(dtype))
        distance = (ours(x, chosen, shares) - expected).float().norm() / expected.float().norm()
        assert distance < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_bits_do_not_depend_on_the_batch(bits: int, dtype: torch.dtype) -> None:
    """Whichever rows share an expert, and wherever they stand."""
    experts = packed(experts_of("qwen3_moe", dtype, bits))
    given = some(40, dtype)
    alone = torch.cat([experts(*(part[row : row + 1] for part in given)) for row in range(40)])
    for count in (2, 7, 40):
        assert torch.equal(experts(*(part[:count] for part in given)), alone[:count])
    assert torch.equal(experts(*(part.flip(0) for part in given)), alone.flip(0))


def test_experts_that_nobody_chose_are_not_read() -> None:
    """Numbers that are none would be seen."""
    theirs = experts_of("qwen3_moe", torch.float32)
    x, chosen, shares = some(1, torch.float32)
    expected = packed(theirs)(x, chosen, shares)
    others = [one for one in range(EXPERTS) if one not in chosen]
    for name in WEIGHTS:
        getattr(theirs, name)[others] = float("nan")
    assert torch.equal(packed(theirs)(x, chosen, shares), expected)


@pytest.mark.parametrize("bits", [0, 4])
def test_workers_share_them(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of one."""
    monkeypatch.setattr(matmul, "MIN_SHARE", 1)
    theirs, given = experts_of("qwen3_moe", torch.float32, bits), some(9, torch.float32)
    assert torch.equal(packed(theirs, WorkerPool(3))(*given), packed(theirs)(*given))


def test_no_rows_make_no_result() -> None:
    """An empty batch has the right shape."""
    experts = packed(experts_of("qwen3_moe", torch.float32))
    assert experts(*(part[:0] for part in some(1, torch.float32))).shape == (0, WIDTH)


def test_experts_of_older_versions_are_known() -> None:
    """transformers 5.17 does not say whether a norm follows."""
    experts = experts_of("qwen3_moe", torch.float32)
    assert is_stacked(experts)
    vars(experts).pop("has_post_expert_norm", None)
    assert is_stacked(experts)
    experts.has_post_expert_norm = True
    assert not is_stacked(experts)
