"""The tokens are the target's own for every supported architecture, through all three services.

The engine alone computes with each of them in `tests/unit/engine`; so most are slow tests here.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from tests.integration import fake_drafts
from tests.integration.client import (
    AUTO,
    OFF,
    SAMPLER_SWEEP,
    SAMPLERS,
    SEQUENTIAL,
    Client,
    eventually,
    verify_info,
)
from tests.integration.cluster import Cluster
from tests.integration.oracle_draft import OracleDraft
from tests.integration.reference import Reference, assert_same
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


@dataclass
class Stack:
    """A random target with a draft that is right three times out of four."""

    client: Client
    reference: Reference
    oracle: OracleDraft


@pytest.fixture(
    scope="module",
    params=SETUPS,
    ids=lambda one: one[0] if one[1] == 1 else f"{one[0]} in {one[1]} ranks",
)
def stack(request, tmp_path_factory):
    """Verify service and orchestrator for one architecture; gone when the next one comes."""
    architecture, ranks = request.param
    folder = build_model(architecture, tmp_path_factory.mktemp(architecture), vocab_size=VOCABULARY)
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    settings = {"model": folder, "dtype": "float32", "kv_tokens": 8192, "tensor_parallel": ranks}
    verify = cluster.serve("verify", **settings).wait_ready()
    oracle = OracleDraft(verify_info(verify.endpoint))
    server, endpoint = fake_drafts.serve(oracle)
    orchestrator = cluster.serve("orchestrator", verify=verify.endpoint, draft=endpoint).wait_ready()
    yield Stack(Client(orchestrator.endpoint), Reference(folder), oracle)
    cluster.stop()
    server.stop(None)


def random_prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 60 random tokens: shorter and longer than the sliding windows."""
    random = Random(1)
    return [[random.randrange(2, VOCABULARY) for _ in range(random.randint(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("count", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampler", SAMPLER_SWEEP)
def test_all_modes_say_what_the_target_says(stack, sampler, count):
    """Greedy equals `transformers`; speculation equals no speculation, greedy and sampled."""
    prompts = random_prompts(count)
    alone = stack.client.generate_all(prompts, 4, mode=OFF, max_tokens=TOKENS, **SAMPLERS[sampler])
    expected = [generation.tokens for generation in alone]
    if sampler == "greedy":
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert_same(stack.reference, prompt, stack.reference.greedy(prompt, TOKENS), tokens)
    stack.oracle.learn(prompts, expected)

    def accepted(mode: int) -> int:
        """Tokens of the oracle that the target took; every text has to be right."""
        together = stack.client.generate_all(prompts, 4, mode=mode, max_tokens=TOKENS, **SAMPLERS[sampler])
        for prompt, tokens, generation in zip(prompts, expected, together, strict=True):
            assert_same(stack.reference, prompt, tokens, generation.tokens)
        return sum(generation.statistics.accepted for generation in together)

    accepted(AUTO)  # a pipelined step of these tiny targets does not wait for an oracle in Python
    # on a busy machine a text may be at its end before its draft has opened
    eventually(lambda: accepted(SEQUENTIAL) > count, "the oracle's right tokens are accepted")
