"""A target's own MTP layer drafts for it, in real processes: the tokens are those of the target alone."""

from __future__ import annotations

from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.client import AUTO, OFF, SAMPLERS, SEQUENTIAL, Client, draft_info, eventually
from tests.integration.cluster import Cluster
from tests.integration.reference import Reference, assert_same
from tests.models import build_model
from tests.mtp import PlainMtp, add_weights, build_target

TOKENS = 32
VOCABULARY = 300
ADDED = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
"""Weights of what a layer adds to its input."""


def build_right(architecture, folder):
    """Save a target whose next token depends on the last one alone, and an MTP layer that says the same: no
    layer adds anything, and the MTP layer passes the token's embedding on."""
    path = build_model(architecture, folder) / "model.safetensors"
    weights = without_additions(load_file(path))
    save_file(weights, path, {"format": "pt"})
    layer = without_additions(PlainMtp(folder).layer.state_dict())
    layer["eh_proj.weight"].copy_(torch.eye(64, 128))
    add_weights(folder, layer)


def without_additions(weights):
    """The weights of layers that add nothing to their input."""
    added = (name for name in weights if name.endswith(ADDED))
    return weights | {name: torch.zeros_like(weights[name]) for name in added}


@pytest.fixture(
    scope="module",
    params=[
        *(("deepseek_v3", build_right), ("deepseek_v3", build_target), ("qwen3_5", build_right)),
        pytest.param(("qwen3_5", build_target), marks=pytest.mark.slow),
    ],
    ids=lambda one: f"{one[0]}, {one[1].__name__}",
)
def services(request, tmp_path_factory):
    """A client of services with a target, what the target says alone, and whether its MTP layer is right. One
    target runs fused, the other has recurrent layers and runs as modules."""
    architecture, build = request.param
    folder, cluster = tmp_path_factory.mktemp(architecture), Cluster(tmp_path_factory.mktemp("logs"))
    build(architecture, folder)
    settings = {"model": folder, "dtype": "float32"}
    verify = cluster.serve("verify", kv_tokens=8192, lookup=False, **settings).wait_ready()
    draft = cluster.serve("draft", kind="mtp", **settings).wait_ready()
    assert draft_info(draft.endpoint).kind == "mtp"
    orchestrator = cluster.serve("orchestrator", verify=verify.endpoint, draft=draft.endpoint)
    client = Client(orchestrator.wait_ready().endpoint)
    eventually(lambda: client.info().draft_replicas == 1, "the draft is known")
    yield client, Reference(folder), build is build_right
    cluster.stop()


def generated(client, prompts, mode, sampler):
    """Two at a time. Each mode has a task of its own: drafts that rest in one mode, because the machine is
    busy, do not rest in the others."""
    options = {"mode": mode, "task": str(mode), "max_tokens": TOKENS, **SAMPLERS[sampler]}
    return client.generate_all(prompts, 2, **options)


def prompts_of(count):
    """Random tokens."""
    random = Random(3)
    return [[random.randrange(2, VOCABULARY) for _ in range(random.randint(2, 40))] for _ in range(count)]


@pytest.mark.parametrize("sampler", ["greedy", "T=1"])
def test_a_layer_changes_nothing(services, sampler):
    """Whether it is right or random; much of what the right one proposes is accepted."""
    (client, reference, right), prompts = services, prompts_of(3)
    alone = [one.tokens for one in generated(client, prompts, OFF, sampler)]
    if sampler == "greedy":
        for prompt, tokens in zip(prompts, alone, strict=True):
            assert_same(reference, prompt, reference.greedy(prompt, TOKENS), tokens)

    def accepted(mode):
        """Tokens of the layer that the target took; every text has to be right."""
        found = generated(client, prompts, mode, sampler)
        for prompt, tokens, one in zip(prompts, alone, found, strict=True):
            assert_same(reference, prompt, tokens, one.tokens)
        return sum(one.statistics.accepted for one in found)

    accepted(AUTO)
    accepted(SEQUENTIAL)
    if right:  # on a busy machine a text may be at its end before its draft has opened
        enough = sum(map(len, alone)) / 3
        eventually(lambda: accepted(SEQUENTIAL) > enough, "a third of the tokens is the layer's", seconds=60)
