"""A target with rounded or quantized weights: the tokens are its own in every mode, greedy and sampled."""

from __future__ import annotations

import pytest

from tests import checkpoints
from tests.integration.client import SAMPLER_SWEEP
from tests.integration.oracle_stack import check_modes, stack_of
from tests.integration.reference import Reference
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
    logs = tmp_path_factory.mktemp("logs")
    with stack_of(folder, reference, logs, weights=weights, tensor_parallel=ranks) as served:
        yield served


@pytest.mark.parametrize("sampler", SAMPLER_SWEEP)
def test_all_modes_say_what_the_quantized_target_says(stack, sampler):
    """Greedy equals `transformers` with what the codes stand for; speculation equals no speculation."""
    check_modes(stack, random_prompts(4), sampler, TOKENS)


def test_the_replica_says_how_its_weights_are_stored(stack):
    """So that two replicas that could differ are told apart."""
    assert stack.oracle.info.arithmetic.startswith(KINDS)
