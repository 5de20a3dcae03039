"""The tokens are the target's own for every supported architecture, through all three services.

The engine alone computes with each of them in `tests/unit/engine`; so most are slow tests here.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.integration.client import SAMPLER_SWEEP
from tests.integration.oracle_stack import check_modes, stack_of
from tests.integration.reference import Reference
from tests.models import ARCHITECTURES, build_model

TOKENS = 24
VOCABULARY = 300
QUICK, ALL = 4, 30
IN_RANKS = ("gpt2", "gpt_neox", "olmo2", "mixtral", "olmoe", "gpt_oss")
"""Architectures that run in several processes too."""
UNLIKE = ("llama", "mistral", "gemma2", "gpt2", "deepseek_v3", "gpt_oss", "gemma4", "bloom", "qwen3_5")
"""Those that differ in what a service keeps of a text: windows, learned positions, compressed keys, shared
ones, sinks, positions in keys, states of recurrent layers; and in experts."""
UNLIKE_IN_RANKS = ("gpt_oss",)
SETUPS = [
    pytest.param((name, ranks), marks=() if name in quick else pytest.mark.slow)
    for names, ranks, quick in ((ARCHITECTURES, 1, UNLIKE), (IN_RANKS, 2, UNLIKE_IN_RANKS))
    for name in names
]


@pytest.fixture(
    scope="module",
    params=SETUPS,
    ids=lambda one: one[0] if one[1] == 1 else f"{one[0]} in {one[1]} ranks",
)
def stack(request, tmp_path_factory):
    """Verify service and orchestrator for one architecture; gone when the next one comes."""
    architecture, ranks = request.param
    folder = build_model(architecture, tmp_path_factory.mktemp(architecture), vocab_size=VOCABULARY)
    logs = tmp_path_factory.mktemp("logs")
    with stack_of(folder, Reference(folder), logs, tensor_parallel=ranks) as served:
        yield served


def random_prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 60 random tokens: shorter and longer than the sliding windows."""
    random = Random(1)
    return [[random.randrange(2, VOCABULARY) for _ in range(random.randint(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("count", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampler", SAMPLER_SWEEP)
def test_all_modes_say_what_the_target_says(stack, sampler, count):
    """Greedy equals `transformers`; speculation equals no speculation, greedy and sampled."""
    check_modes(stack, random_prompts(count), sampler, TOKENS)
