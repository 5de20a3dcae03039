"""A target with rounded or quantized weights: the tokens are its own in every mode, greedy and sampled."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests import checkpoints
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
from tests.integration.test_exactness_architectures import TOKENS, VOCABULARY, random_prompts
from tests.models import build_model

KINDS = ("int8", "int4", "awq", "fp8")
SETUPS = {
    **{kind: (kind, 1, "llama") for kind in KINDS},
    **{f"{kind} in 2 ranks": (kind, 2, "llama") for kind in ("int4", "awq")},
    "int4 experts": ("int4", 1, "qwen3_moe"),
}
"""Kinds, numbers of processes, and architectures."""
LONG = "awq in 2 ranks"
"""int4 says the same of ranks, and `tests/unit/engine/parallel/test_shard.py` of checkpoints in them."""
GROUP = 32
CHECKPOINTS = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        checkpoints.awq(GROUP),
    ),
    "fp8": ({"quant_method": "fbgemm_fp8"}, checkpoints.fp8()),
}
"""Settings and writers of those that are not rounded at load."""


@dataclass
class Stack:
    """A target with such weights, a draft that is right three times out of four, and the reference."""

    client: Client
    reference: Reference
    oracle: OracleDraft


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name == LONG else ()) for name in SETUPS],
)
def stack(request, tmp_path_factory):
    """Verify service and orchestrator for one kind of weights; gone when the next one comes."""
    kind, ranks, architecture = SETUPS[request.param]
    folder = build_model(architecture, tmp_path_factory.mktemp("whole"), vocab_size=VOCABULARY)
    weights = kind if kind.startswith("int") else "full"
    reference = Reference(folder, weights)
    if weights == "full":
        made = checkpoints.write(folder, tmp_path_factory.mktemp(kind), *CHECKPOINTS[kind])
        folder = made.folder
        for name, numbers in made.numbers.items():
            reference.model.get_submodule(name).weight.data = numbers
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    options = {"dtype": "float32", "kv_tokens": 8192, "weights": weights, "tensor_parallel": ranks}
    verify = cluster.serve("verify", model=folder, **options)
    oracle = OracleDraft(verify_info(verify.wait_ready().endpoint))
    server, endpoint = fake_drafts.serve(oracle)
    orchestrator = cluster.serve("orchestrator", verify=verify.endpoint, draft=endpoint).wait_ready()
    yield Stack(Client(orchestrator.endpoint), reference, oracle)
    cluster.stop()
    server.stop(None)


@pytest.mark.parametrize("sampler", SAMPLER_SWEEP)
def test_all_modes_say_what_the_quantized_target_says(stack, sampler):
    """Greedy equals `transformers` with what the codes stand for; speculation equals no speculation."""
    prompts, options = random_prompts(4), {"max_tokens": TOKENS, **SAMPLERS[sampler]}
    expected = [found.tokens for found in stack.client.generate_all(prompts, 4, mode=OFF, **options)]
    if sampler == "greedy":
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert_same(stack.reference, prompt, stack.reference.greedy(prompt, TOKENS), tokens)
    stack.oracle.learn(prompts, expected)

    def accepted(mode: int) -> int:
        together = stack.client.generate_all(prompts, 4, mode=mode, **options)
        for prompt, tokens, found in zip(prompts, expected, together, strict=True):
            assert_same(stack.reference, prompt, tokens, found.tokens)
        return sum(found.statistics.accepted for found in together)

    accepted(AUTO)
    eventually(lambda: accepted(SEQUENTIAL) > 4, "the oracle's right tokens are accepted")


def test_the_replica_says_how_its_weights_are_stored(stack):
    """So that two replicas that could differ are told apart."""
    assert stack.oracle.info.arithmetic.startswith(KINDS)
