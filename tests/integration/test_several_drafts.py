"""Several drafts feed one session, in real processes: the tokens are those of the target alone."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest

from tests.integration.client import (
    AUTO,
    OFF,
    SAMPLERS,
    SEQUENTIAL,
    Client,
    collect,
    draft_info,
    eventually,
    request,
)
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET
from tests.integration.reference import assert_same

TOKENS = 24
CHOSEN = ("greedy", "T=0.7 top-p 0.9", "T=1")
PATIENT = {"breaker_failures": 1_000_000, "breaker_seconds": 0.001, "draft_open_timeout_ms": 1000}
"""A refused attack must not keep the next one out."""


@pytest.fixture(scope="module")
def alone(demo, prompts):
    """What MODE_OFF says to the first prompts under a sampler; computed once."""

    @cache
    def generate(count: int, sampler: str) -> list[list[int]]:
        options = {"mode": OFF, "max_tokens": TOKENS, **SAMPLERS[sampler]}
        return [one.tokens for one in demo.client("none").generate_all(prompts(count), 4, **options)]

    return generate


@pytest.fixture(scope="module")
def with_drafts(demo):
    """A client of an orchestrator whose sessions have all of these drafts at once."""

    @cache
    def start(*endpoints: str) -> Client:
        process = demo.cluster.serve(
            "orchestrator",
            verify=demo.verify.endpoint,
            draft=",".join(endpoints),
            drafts_per_session=len(endpoints),
            **PATIENT,
        ).wait_ready()
        client = Client(process.endpoint)
        eventually(lambda: client.info().draft_replicas == len(endpoints), "the drafts are known")
        return client

    return start


def check(reference, client, prompts, expected, at_once=3, **options):
    """Generate for every prompt and compare; the generations."""
    found = client.generate_all(prompts, at_once, max_tokens=TOKENS, **options)
    for prompt, tokens, one in zip(prompts, expected, found, strict=True):
        assert_same(reference, prompt, tokens, one.tokens)
    return found


@pytest.mark.parametrize("sampler", CHOSEN)
def test_merged_drafts_change_nothing(demo, reference, prompts, alone, with_drafts, sampler):
    """A model and a lookup at once, in both modes."""
    client = with_drafts(demo.draft("real"), demo.draft("lookup"))
    for mode in (SEQUENTIAL, AUTO):
        found = check(reference, client, prompts(4), alone(4, sampler), mode=mode, **SAMPLERS[sampler])
        if mode == SEQUENTIAL:
            assert sum(one.statistics.accepted for one in found) > 0


@pytest.mark.parametrize("attack", ["random_chain", "same_token", "never_ready", "flood", "fails", "silent"])
def test_one_that_lies_among_honest_ones(demo, reference, prompts, alone, with_drafts, attack):
    """The honest draft's nodes are accepted all the same. Its first session may be too late: the other one is
    lost before it has opened, and the target goes on without waiting."""
    client = with_drafts(demo.draft("real"), demo.draft("hostile"))
    before, accepted = demo.hostile.sessions.get(attack, 0), 0
    for sampler in CHOSEN:
        options = {"task": attack, "mode": SEQUENTIAL, **SAMPLERS[sampler]}
        found = check(reference, client, prompts(2), alone(2, sampler), 2, **options)
        accepted += sum(one.statistics.accepted for one in found)
        check(reference, client, prompts(2), alone(2, sampler), 2, **options | {"mode": AUTO})
    assert accepted > 0
    assert demo.hostile.sessions[attack] > before, "the attack never ran"


def test_one_that_is_killed(demo, reference, prompts, with_drafts):
    """The sessions go on with the other draft, and the tokens are those of the target alone."""
    settings = {"model": DEMO_TARGET, "skip_layers": "3-5", "dtype": "float32", "name": "draft-doomed"}
    doomed = demo.cluster.serve("draft", **settings).wait_ready()
    client = with_drafts(demo.draft("real"), doomed.endpoint)
    options = {"max_tokens": 200, "temperature": 0.7}
    expected = demo.client("none").generate_all(prompts(2), 2, mode=OFF, **options)
    streams = [client.stream(request(prompt, mode=SEQUENTIAL, **options)) for prompt in prompts(2)]
    begun = [[*islice(stream, 8)] for stream in streams]
    eventually(lambda: draft_info(doomed.endpoint).sessions == 2, "the doomed draft has its sessions")
    doomed.kill()
    found = [collect([*start, *rest])[0] for start, rest in zip(begun, streams, strict=True)]
    for prompt, one, other in zip(prompts(2), expected, found, strict=True):
        assert_same(reference, prompt, one.tokens, other.tokens)
    assert sum(one.statistics.draft_losses for one in found) >= 1
    assert all(one.statistics.accepted > 0 for one in found)


def test_drafts_of_one_model_are_taken_where_there_is_no_other(demo, reference, prompts, alone, with_drafts):
    """Two replicas of it draft for one session."""
    settings = {"model": DEMO_DRAFT, "dtype": "float32", "name": "draft-twin"}
    twin = demo.cluster.serve("draft", **settings).wait_ready()
    client = with_drafts(demo.draft("real"), twin.endpoint)
    check(reference, client, prompts(3), alone(3, "T=1"), mode=SEQUENTIAL, **SAMPLERS["T=1"])
