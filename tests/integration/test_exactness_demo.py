"""The tokens are the target's own, whatever the drafts do: the demo pair in real processes."""

from __future__ import annotations

from functools import cache

import pytest

from tests.integration.client import AUTO, FEW, OFF, SAMPLERS, SEQUENTIAL, Client, collect, request
from tests.integration.hostile_draft import ATTACKS, PROTOCOL_ATTACKS
from tests.integration.prompts import long_prompt
from tests.integration.reference import assert_same
from tests.integration.stack import DRAFTS

TOKENS = 24
QUICK_PROMPTS = 6
ALL_PROMPTS = 100
DRAFTED = [
    pytest.param(kind, sampler, marks=() if kind == "real" or sampler in FEW else pytest.mark.slow)
    for kind in DRAFTS
    if kind != "hostile"
    for sampler in SAMPLERS
]
"""Drafts know nothing of samplers but what the target accepts by them: one kind has all of them."""


@pytest.fixture(scope="module")
def alone(demo, prompts):
    """What MODE_OFF says to the first prompts under a sampler; computed once."""

    @cache
    def generate(count: int, sampler: str) -> list[list[int]]:
        client = demo.client("none")
        generations = client.generate_all(prompts(count), 4, mode=OFF, max_tokens=TOKENS, **SAMPLERS[sampler])
        return [generation.tokens for generation in generations]

    return generate


def check(reference, client: Client, prompts, expected, at_once=4, max_tokens=TOKENS, **options):
    """Generate for every prompt, compare, and return the generations."""
    generations = client.generate_all(prompts, at_once, max_tokens=max_tokens, **options)
    for prompt, tokens, generation in zip(prompts, expected, generations, strict=True):
        assert_same(reference, prompt, tokens[:max_tokens], generation.tokens)
    return generations


@pytest.mark.parametrize("count", [12, pytest.param(ALL_PROMPTS, marks=pytest.mark.slow)])
def test_off_equals_transformers(demo, reference, prompts, count):
    """Greedy decoding without speculation gives the tokens of `transformers` generate()."""
    chosen = prompts(count)
    expected = [reference.greedy(prompt, TOKENS) for prompt in chosen]
    check(reference, demo.client("none"), chosen, expected, mode=OFF)


@pytest.mark.parametrize(("kind", "sampler"), DRAFTED)
def test_drafts_change_nothing(demo, reference, prompts, alone, kind, sampler):
    """Sequential and pipelined speculation give the target's own tokens with good, bad and no drafts."""
    chosen = prompts(QUICK_PROMPTS)
    expected = alone(QUICK_PROMPTS, sampler)
    for mode in (SEQUENTIAL, AUTO):
        generations = check(reference, demo.client(kind), chosen, expected, mode=mode, **SAMPLERS[sampler])
        if kind == "real" and mode == SEQUENTIAL:  # in the other mode, drafts of a busy machine may rest
            assert sum(generation.statistics.accepted for generation in generations) > 0


@pytest.mark.parametrize("attack", [*ATTACKS, *PROTOCOL_ATTACKS])
def test_hostile_drafts_change_nothing(demo, reference, prompts, alone, attack):
    """A draft that lies in every way can cost time, never a token, and never another session."""
    client = demo.client("hostile")
    for sampler, mode in (("greedy", AUTO), ("T=1", AUTO), ("T=1", SEQUENTIAL)):
        options = {"mode": mode, "task": attack, "max_tokens": 10, **SAMPLERS[sampler]}
        check(reference, client, prompts(3), alone(3, sampler), **options)
    assert demo.hostile is not None
    assert demo.hostile.sessions[attack] > 0, "the attack never ran"


@pytest.mark.parametrize("at_once", [1, 16])
def test_concurrency_changes_nothing(demo, reference, prompts, alone, at_once):
    """One request alone and sixteen in one batch give the same tokens."""
    for sampler in ("greedy", "T=1"):
        options = {"mode": AUTO, **SAMPLERS[sampler]}
        check(reference, demo.client("real"), prompts(16), alone(16, sampler), at_once, **options)


def test_long_prompts_are_prefilled_in_chunks(demo, reference):
    """A prompt longer than one step's budget gives the same tokens as in one piece."""
    prompt = long_prompt(1200)
    expected = reference.greedy(prompt, TOKENS)
    for mode in (OFF, AUTO):
        assert_same(reference, prompt, expected, demo.client("real").generate(prompt, mode=mode).tokens)


def test_cached_prefixes_change_nothing(demo, reference):
    """A prompt whose beginning is in the prefix cache gives the same tokens as one that is not."""
    prompt = long_prompt(300)
    client = demo.client("real")
    first = client.generate(prompt, mode=AUTO)
    second = client.generate(prompt, mode=AUTO)
    assert second.complete.usage.cached_tokens > 0
    assert_same(reference, prompt, first.tokens, second.tokens)


def test_continuations_use_consecutive_seeds(demo, reference, prompts):
    """Continuation i of a request with n = 4 is that of a single request with seed + i."""
    prompt = prompts(1)[0]
    client = demo.client("real")
    together = collect(client.stream(request(prompt, temperature=1.0, n=4, seed=40)))
    assert len(together) == 4
    for index, generation in enumerate(together):
        alone = client.generate(prompt, temperature=1.0, seed=40 + index)
        assert_same(reference, prompt, alone.tokens, generation.tokens)
        assert generation.complete.seed == 40 + index


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("at_once", [1, 16])
def test_a_hundred_prompts(demo, reference, prompts, alone, sampler, at_once):
    """A hundred prompts under every sampler, alone and sixteen at a time."""
    chosen = prompts(ALL_PROMPTS)
    expected = alone(ALL_PROMPTS, sampler)
    for mode in (SEQUENTIAL, AUTO):
        check(reference, demo.client("real"), chosen, expected, at_once, mode=mode, **SAMPLERS[sampler])
