"""Sampled through all three services, two-token continuations follow the target's exact distribution."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import power_divergence
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integration.client import AUTO, SEQUENTIAL, Client, collect, request
from tests.integration.reference import Reference

VOCABULARY = 7
PROMPT = [1, 4, 2, 6, 3]
CONTINUATIONS = 16
MIN_EXPECTED = 5.0


def tiny_llama(folder, seed: int, hidden: int):
    """A random model with strong preferences over seven tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden // 2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.35,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(cluster, tmp_path_factory):
    """A tiny target and an unrelated tiny draft behind an orchestrator; (client, reference)."""
    folder = tmp_path_factory.mktemp("tiny")
    target, draft = tiny_llama(folder / "target", 11, 16), tiny_llama(folder / "draft", 12, 8)
    processes = [
        cluster.serve("verify", model=target, dtype="float32", kv_tokens=4096),
        cluster.serve("draft", model=draft, dtype="float32", kv_tokens=8192),
    ]
    verify, drafter = (process.wait_ready() for process in processes)
    orchestrator = cluster.serve("orchestrator", verify=verify.endpoint, draft=drafter.endpoint).wait_ready()
    return Client(orchestrator.endpoint), Reference(target)


def exact_pairs(reference: Reference, temperature: float, top_k: int) -> np.ndarray:
    """Probability [first, second] of every two-token continuation of the prompt."""

    def distribution(tokens):
        logits = reference.logits(tokens)[-1].double() / temperature
        kept = logits.topk(top_k or VOCABULARY).values[-1]
        return logits.masked_fill(logits < kept, -torch.inf).softmax(-1)

    first = distribution(PROMPT)
    second = torch.stack([distribution([*PROMPT, token]) for token in range(VOCABULARY)])
    return (first[:, None] * second).numpy()


@pytest.fixture(scope="module")
def counts(tiny):
    """How often each two-token continuation came; every continuation has a seed of its own."""
    client, _ = tiny

    @cache
    def count(requests: int, **options) -> np.ndarray:
        found = np.zeros((VOCABULARY, VOCABULARY))
        for index in range(requests):
            seed = 1 + index * CONTINUATIONS
            message = request(PROMPT, max_tokens=2, n=CONTINUATIONS, seed=seed, **options)
            for generation in collect(client.stream(message)):
                first, second = generation.tokens
                found[first, second] += 1
        return found

    return count


def g_test(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of a G-test; cells that are expected less than five times are pooled."""
    expected = probabilities.ravel() * observed.sum()
    rare = expected < MIN_EXPECTED
    pooled_observed = np.append(observed.ravel()[~rare], observed.ravel()[rare].sum())
    pooled_expected = np.append(expected[~rare], expected[rare].sum())
    if pooled_expected[-1] == 0:
        assert pooled_observed[-1] == 0, "tokens outside the distribution's support were sampled"
        pooled_observed, pooled_expected = pooled_observed[:-1], pooled_expected[:-1]
    return float(power_divergence(pooled_observed, pooled_expected, lambda_="log-likelihood").pvalue)


@pytest.mark.parametrize("requests", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mode", "temperature", "top_k"), [(AUTO, 1.0, 0), (SEQUENTIAL, 0.7, 0), (AUTO, 1.4, 4)]
)
def test_two_token_continuations_follow_the_target(tiny, counts, mode, temperature, top_k, requests):
    """A G-test over all 49 continuations finds no difference from the exact probabilities."""
    _, reference = tiny
    observed = counts(requests, mode=mode, temperature=temperature, top_k=top_k)
    p_value = g_test(observed, exact_pairs(reference, temperature, top_k))
    assert p_value > 1e-3, f"p = {p_value:.2g}; seeds are fixed, so this is no bad luck that comes and goes"


def test_the_g_test_would_notice(tiny, counts):
    """Samples at another temperature fail the same test: it has the power to see a bias."""
    _, reference = tiny
    observed = counts(60, mode=AUTO, temperature=1.0, top_k=0)
    assert g_test(observed, exact_pairs(reference, 0.8, 0)) < 1e-3
