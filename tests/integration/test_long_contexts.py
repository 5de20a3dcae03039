"""Long contexts in real processes: drafts that end before the target does, and 32,000 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.client import AUTO, OFF, SEQUENTIAL, Client, collect, eventually, request
from tests.integration.cluster import Cluster
from tests.models import build_model

DRAFT_CONTEXT, TARGET_CONTEXT = 1_024, 4_096
SAMPLERS: dict[str, dict[str, Any]] = {"greedy": {}, "T=1": {"temperature": 1.0}}


def started(cluster: Cluster, target, draft, **target_settings: object) -> Client:
    """A target, a draft and an orchestrator."""
    verify = cluster.serve("verify", model=target, dtype="float32", **target_settings)
    drafts = cluster.serve("draft", model=draft, dtype="float32", name="draft")
    endpoints = {"verify": verify.wait_ready().endpoint, "draft": drafts.wait_ready().endpoint}
    orchestrator = cluster.serve("orchestrator", draft_open_timeout_ms=60_000, **endpoints).wait_ready()
    client = Client(orchestrator.endpoint)
    eventually(lambda: client.info().draft_replicas == 1, "the draft is known")
    return client


def prompt(length: int) -> list[int]:
    """A prompt in which little repeats."""
    return [2 + place * place * 31 % 290 for place in range(length)]


@pytest.fixture(scope="module")
def short_draft(tmp_path_factory):
    """A client of a target whose draft, the same model, has a quarter of its context."""
    folder = tmp_path_factory.mktemp("long")
    cluster = Cluster(folder)
    target = build_model("llama", folder / "target", max_position_embeddings=TARGET_CONTEXT)
    draft = build_model("llama", folder / "draft", max_position_embeddings=DRAFT_CONTEXT)
    yield started(cluster, target, draft)
    cluster.stop()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL])
def test_a_draft_ends_gently_at_its_context(short_draft: Client, mode: Any, sampler: str) -> None:
    """The text crosses the draft's limit and goes on: nothing is lost, the tokens are the target's."""
    options = {"max_tokens": 500, **SAMPLERS[sampler]}
    begun = prompt(DRAFT_CONTEXT - 200)
    generation = short_draft.generate(begun, mode=mode, **options)
    assert generation.statistics.draft_losses == 0
    assert generation.statistics.accepted > 50 or mode == AUTO  # there a slow draft may miss its turns
    assert generation.tokens == short_draft.generate(begun, mode=OFF, **options).tokens
    assert len(generation.tokens) == 500


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL])
def test_a_prompt_beyond_the_drafts_context_is_served_without_it(short_draft: Client, mode: Any) -> None:
    """No draft is lost, and later requests have one."""
    begun = prompt(DRAFT_CONTEXT + 300)
    generation = short_draft.generate(begun, mode=mode, max_tokens=40)
    assert generation.statistics.draft_losses == 0
    assert generation.tokens == short_draft.generate(begun, mode=OFF, max_tokens=40).tokens
    eventually(lambda: short_draft.info().draft_replicas == 1, "the draft answers its probes")

    def drafted() -> bool:
        return short_draft.generate(prompt(50), mode=SEQUENTIAL, max_tokens=40).statistics.accepted > 5

    eventually(drafted, "a request has candidates accepted")


@pytest.mark.slow
def test_32_thousand_tokens(tmp_path) -> None:
    """A prompt of 32,000 tokens in chunks, then trees behind it: the tokens are those of the target alone."""
    cluster = Cluster(tmp_path)
    model = build_model("llama", tmp_path / "model", max_position_embeddings=40_960, num_hidden_layers=1)
    try:
        client = started(cluster, model, model, kv_tokens=81_920)
        texts = []
        for mode in (OFF, AUTO):
            message = request(prompt(32_000), mode=mode, max_tokens=60)
            texts.append(collect(client.stream(message, timeout=600))[0])
        assert texts[0].tokens == texts[1].tokens
        assert len(texts[0].tokens) == 60
        assert texts[1].statistics.verified > 0
    finally:
        cluster.stop()
