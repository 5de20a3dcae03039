"""EAGLE-3 heads draft for the demo target, in real processes: the tokens are those of the target alone."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file, save_file

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
    verify_info,
)
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET
from tests.integration.reference import assert_same

DEMO_HEAD = DEMO_DRAFT.parent / "eagle"
TOKENS = 32
CHOSEN = ("greedy", "T=1")


@pytest.fixture(scope="module")
def serve_head(demo):
    """Starts a draft replica with a head."""

    def start(name, folder=DEMO_HEAD, **settings):
        given = {"model": folder, "target": DEMO_TARGET, "dtype": "float32", "name": name, **settings}
        return demo.cluster.serve("draft", **given).wait_ready()

    return start


@pytest.fixture(scope="module")
def head(serve_head):
    """A replica with the demo head, which is found out by its config.json."""
    return serve_head("draft-eagle")


@pytest.fixture(scope="module")
def client_of(demo):
    """A client of an orchestrator with these drafts, and with the demo target's replica or others."""

    @cache
    def start(*drafts, verify=None, **settings):
        endpoints = verify or demo.verify.endpoint
        process = demo.cluster.serve("orchestrator", verify=endpoints, draft=",".join(drafts), **settings)
        client = Client(process.wait_ready().endpoint)
        eventually(lambda: client.info().draft_replicas == len(drafts), "the drafts are known")
        return client

    return start


@pytest.fixture(scope="module")
def alone(demo, prompts):
    """What MODE_OFF says to the first prompts; computed once."""

    @cache
    def generate(count, sampler, tokens=TOKENS):
        options = {"mode": OFF, "max_tokens": tokens, **SAMPLERS[sampler]}
        return [one.tokens for one in demo.client("none").generate_all(prompts(count), 3, **options)]

    return generate


def check(reference, found, prompts, expected):
    """The tokens are those that are expected; returns how many were accepted."""
    for prompt, tokens, one in zip(prompts, expected, found, strict=True):
        assert_same(reference, prompt, tokens, one.tokens)
    return sum(one.statistics.accepted for one in found)


def generated(client, prompts, mode, sampler, tokens=TOKENS):
    """Of an orchestrator, two at a time."""
    return client.generate_all(prompts, 2, mode=mode, max_tokens=tokens, **SAMPLERS[sampler])


@pytest.mark.parametrize("sampler", CHOSEN)
def test_a_head_changes_nothing(reference, prompts, alone, head, client_of, sampler):
    """In both modes; some of what it proposes is accepted."""
    client = client_of(head.endpoint)
    assert draft_info(head.endpoint).kind == "eagle"
    for mode in (SEQUENTIAL, AUTO):
        found = generated(client, prompts(3), mode, sampler)
        accepted = check(reference, found, prompts(3), alone(3, sampler))
        if mode == SEQUENTIAL:
            assert accepted > 0


@pytest.mark.parametrize("sampler", CHOSEN)
def test_beside_another_draft(demo, reference, prompts, alone, head, client_of, sampler):
    """A head and a model feed one session."""
    client = client_of(head.endpoint, demo.draft("real"), drafts_per_session=2)
    for mode in (SEQUENTIAL, AUTO):
        found = generated(client, prompts(3), mode, sampler)
        check(reference, found, prompts(3), alone(3, sampler))


def test_a_head_that_knows_nothing(reference, prompts, alone, serve_head, client_of, tmp_path):
    """Random weights propose nonsense, and nothing of it is committed."""
    draw = torch.Generator().manual_seed(5)
    tensors = load_file(DEMO_HEAD / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = torch.randn(tensor.shape, generator=draw).to(tensor.dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((DEMO_HEAD / "config.json").read_bytes())
    client = client_of(serve_head("draft-noise", tmp_path, kind="eagle").endpoint)
    for mode in (SEQUENTIAL, AUTO):
        check(reference, generated(client, prompts(2), mode, "T=1"), prompts(2), alone(2, "T=1"))


def test_a_head_that_is_killed(reference, prompts, alone, serve_head, client_of):
    """The sessions go on without it, and with one that takes its place: it reads what comes from then on."""
    doomed = serve_head("draft-doomed-eagle")
    client = client_of(doomed.endpoint, breaker_seconds=0.1)
    options = {"mode": SEQUENTIAL, "max_tokens": 200, **SAMPLERS["T=1"]}
    streams = [client.stream(request(prompt, **options)) for prompt in prompts(2)]
    begun = [[*islice(stream, 6)] for stream in streams]
    eventually(lambda: draft_info(doomed.endpoint).sessions == 2, "the head has its sessions")
    doomed.kill()
    found = [collect([*start, *rest])[0] for start, rest in zip(begun, streams, strict=True)]
    check(reference, found, prompts(2), alone(2, "T=1", 200))
    assert sum(one.statistics.draft_losses for one in found) >= 1


def test_a_target_replica_that_is_lost(demo, reference, prompts, alone, head, client_of):
    """Another one computes the texts again and tells their features, and candidates are accepted as
    before."""
    settings = {"model": DEMO_TARGET, "dtype": "float32", "name": "verify-doomed-eagle"}
    doomed = demo.cluster.serve("verify", **settings).wait_ready()
    client = client_of(head.endpoint, verify=f"{doomed.endpoint},{demo.verify.endpoint}")
    options = {"mode": SEQUENTIAL, "max_tokens": 200, **SAMPLERS["greedy"]}
    streams = [client.stream(request(prompt, **options)) for prompt in prompts(3)]
    begun = [[*islice(stream, 6)] for stream in streams]
    eventually(lambda: verify_info(doomed.endpoint).sessions > 0, "the doomed target has a session")
    doomed.kill()
    rest = [[*stream] for stream in streams]
    found = [collect([*start, *more])[0] for start, more in zip(begun, rest, strict=True)]
    check(reference, found, prompts(3), alone(3, "greedy", 200))
    lost = [index for index, one in enumerate(found) if one.statistics.verify_losses]
    assert lost
    for index in lost:
        chunks = [len(response.chunk.token_ids) for response in rest[index] if response.HasField("chunk")]
        assert max(chunks) > 1, "nothing was accepted after the loss"
