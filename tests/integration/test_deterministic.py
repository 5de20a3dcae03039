"""Deterministic arithmetic in 16 bits, in real processes: tokens and log probabilities to the last bit."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from outrider.engine.cpu.backend import vector_backend
from tests.integration.client import (
    AUTO,
    OFF,
    SEQUENTIAL,
    Client,
    Generation,
    collect,
    eventually,
    request,
    verify_info,
)
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster, Process

pytestmark = pytest.mark.skipif(
    vector_backend(torch.bfloat16) is None,
    reason="`deterministic` needs AVX2 or AVX-512 and the package numba",
)
TOKENS = 32
PROMPTS = 8
SAMPLERS = {"greedy": {}, "T=0.7": {"temperature": 0.7}}
LONG = {"temperature": 0.7, "max_tokens": 600, "logprobs": 2}
"""Long enough to be broken in the middle."""


@dataclass(frozen=True)
class Replicas:
    """Two targets, a client of each alone, and one of both."""

    verifies: list[Process]
    alone: list[Client]
    both: Client


@pytest.fixture(scope="module")
def replicas(cluster: Cluster) -> Replicas:
    """Processes of this module, with the demo draft."""
    common = {"dtype": "bfloat16", "device": "cpu"}
    # One after the other: the first compiles the kernels, and the others find them in the cache.
    verifies = [
        cluster.serve(
            "verify", model=DEMO_TARGET, name=f"verify-bits-{i}", deterministic=True, **common
        ).wait_ready()
        for i in range(2)
    ]
    draft = cluster.serve("draft", model=DEMO_DRAFT, name="draft-bits", **common).wait_ready()
    endpoints = [verify.endpoint for verify in verifies]
    clients = []
    for verify in (*endpoints, tuple(endpoints)):
        process = cluster.serve("orchestrator", verify=verify, draft=draft.endpoint).wait_ready()
        clients.append(Client(process.endpoint))
        eventually(lambda: clients[-1].info().draft_replicas == 1, "the draft is known")
    return Replicas(verifies, clients[:2], clients[2])


def bits(generations: Iterable[Generation]) -> list[list[bytes]]:
    """Tokens with their log probabilities and those of the runners-up."""
    return [[entry.SerializeToString() for entry in generation.logprobs] for generation in generations]


def generate(client: Client, prompts, at_once: int, mode, sampler: str) -> tuple[list[list[bytes]], int]:
    """The bits of every text, and how many candidates were accepted."""

    def one(prompt):
        return client.generate(prompt, mode=mode, max_tokens=TOKENS, logprobs=2, **SAMPLERS[sampler])

    with ThreadPoolExecutor(at_once) as pool:
        generations = list(pool.map(one, prompts))
    assert all(len(text) == TOKENS for text in bits(generations))
    return bits(generations), sum(generation.statistics.accepted for generation in generations)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_modes_batches_and_replicas_agree_in_every_bit(replicas, prompts, sampler):
    """Without speculation, with it, eight at once, on another replica: nothing differs."""
    chosen = prompts(PROMPTS)
    expected, accepted = generate(replicas.alone[0], chosen, 1, OFF, sampler)
    assert accepted == 0
    for replica, at_once, mode in (
        (0, 1, SEQUENTIAL),
        (0, 1, AUTO),
        (0, 8, OFF),
        (0, 8, SEQUENTIAL),
        (0, 8, AUTO),
        (1, 8, AUTO),
    ):
        texts, accepted = generate(replicas.alone[replica], chosen, at_once, mode, sampler)
        assert texts == expected, (replica, at_once, mode)
        if mode != AUTO:  # there a slow draft may come too late for all of so short a text
            assert (accepted > 0) == (mode == SEQUENTIAL)


def test_a_failover_changes_no_bit(replicas, prompts):
    """The replica dies in the middle of a sentence; the other goes on as if it had begun it."""
    prompt = prompts(3)[2]
    expected = replicas.alone[0].generate(prompt, mode=OFF, **LONG)
    responses = []
    for response in replicas.both.stream(request(prompt, mode=AUTO, **LONG)):
        responses.append(response)
        if len(responses) == 3:
            next(one for one in replicas.verifies if verify_info(one.endpoint).sessions).kill()
    broken = collect(responses)[0]
    assert broken.statistics.verify_losses == 1
    assert bits([broken]) == bits([expected])
