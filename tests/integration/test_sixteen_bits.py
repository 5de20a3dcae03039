"""The demo pair in the dtypes of 16 bits, in which most checkpoints come: every mode says the same."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.cpu.backend import vector_backend
from tests.integration.client import AUTO, OFF, SAMPLERS, SEQUENTIAL, Client
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster

TOKENS = 32
DTYPES = ("bfloat16", "float16")


@pytest.fixture(scope="module", params=DTYPES)
def client(request, tmp_path_factory):
    """A client of three services whose models have a dtype; they are gone when the next one comes."""
    if vector_backend(getattr(torch, request.param)) is None:
        pytest.skip("without the project's kernels near-ties may fall differently in each batch")
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    common = {"dtype": request.param, "kv_tokens": 8192}
    verify = cluster.serve("verify", model=DEMO_TARGET, **common)
    draft = cluster.serve("draft", model=DEMO_DRAFT, **common)
    endpoints = {"verify": verify.wait_ready().endpoint, "draft": draft.wait_ready().endpoint}
    orchestrator = cluster.serve("orchestrator", **endpoints).wait_ready()
    yield Client(orchestrator.endpoint)
    cluster.stop()


@pytest.mark.parametrize("sampler", ["greedy", "T=1"])
def test_every_mode_says_the_same(client, prompts, sampler):
    """Bit for bit, with eight texts at once."""
    modes = {
        mode: client.generate_all(prompts(8), 8, mode=mode, max_tokens=TOKENS, **SAMPLERS[sampler])
        for mode in (OFF, SEQUENTIAL, AUTO)
    }
    texts = [[generation.tokens for generation in generations] for generations in modes.values()]
    assert texts[0] == texts[1] == texts[2]
    assert sum(generation.statistics.accepted for generation in modes[SEQUENTIAL]) > 0
