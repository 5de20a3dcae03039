"""Drafts made of the target itself, in real processes: part of its layers, rounded weights. Tokens stay."""

from __future__ import annotations

import pytest

from tests.integration.client import AUTO, OFF, SAMPLER_SWEEP, SAMPLERS, SEQUENTIAL, Client, eventually
from tests.integration.cluster import DEMO_TARGET
from tests.integration.reference import assert_same

TOKENS = 24
KINDS = {
    "early exit": {"skip_layers": "4-5"},
    "rounded to 8 bits": {"weights": "int8"},
    "rounded to 4 bits, skipped": {"weights": "int4", "skip_layers": "2,4"},
}


@pytest.fixture(scope="module", params=KINDS)
def client(request, demo):
    """Of an orchestrator whose draft is made of the target."""
    settings = {"model": DEMO_TARGET, "dtype": "float32", "name": "draft-of-target", **KINDS[request.param]}
    draft = demo.cluster.serve("draft", **settings).wait_ready()
    process = demo.cluster.serve(
        "orchestrator", verify=demo.verify.endpoint, draft=draft.endpoint, name="orchestrator-kinds"
    ).wait_ready()
    client = Client(process.endpoint)
    eventually(lambda: client.info().draft_replicas == 1, "the draft is known")
    yield client
    for one in (process, draft):
        one.kill()


@pytest.mark.parametrize("sampler", SAMPLER_SWEEP)
def test_drafts_of_the_target_change_nothing(client, demo, reference, prompts, sampler):
    """Their nodes are accepted, and the tokens are those of the target alone."""
    chosen = prompts(3)
    options = {"max_tokens": TOKENS, **SAMPLERS[sampler]}
    expected = demo.client("none").generate_all(chosen, 3, mode=OFF, **options)
    for mode in (SEQUENTIAL, AUTO):
        found = client.generate_all(chosen, 3, mode=mode, **options)
        for prompt, one, other in zip(chosen, expected, found, strict=True):
            assert_same(reference, prompt, one.tokens, other.tokens)
        if mode == SEQUENTIAL:  # in AUTO a draft as slow as these may rest
            assert sum(generation.statistics.accepted for generation in found) > 0
