"""Shadows, promotions and new weights in running sessions, in real processes: the target's tokens stay."""

from __future__ import annotations

import os
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.cli.main import main
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
from tests.integration.cluster import DEMO_DRAFT, Process
from tests.integration.metrics import samples
from tests.integration.reference import assert_same

TOKENS = 24
CHOSEN = ("greedy", "T=1")


@pytest.fixture(scope="module")
def worse(tmp_path_factory) -> Path:
    """The demo draft with noise in its weights: other weights of the same shape."""
    folder = tmp_path_factory.mktemp("worse") / "draft"
    shutil.copytree(DEMO_DRAFT, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name, weight in weights.items():
        weights[name] = weight + 0.5 * weight.float().std() * torch.randn_like(weight)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def started(demo, *drafts: Process, **settings: object) -> tuple[Process, Client]:
    """An orchestrator with these drafts, which waits for them on a busy machine too."""
    patient = {"discovery_seconds": 0.2, "draft_open_timeout_ms": 60_000, **settings}
    endpoints = ",".join(draft.endpoint for draft in drafts)
    process = demo.cluster.serve(
        "orchestrator", verify=demo.verify.endpoint, draft=endpoints, **patient
    ).wait_ready()
    return process, Client(process.endpoint)


def check(demo, reference, client: Client, prompts, **options) -> int:
    """Generate for every prompt and compare with the target alone; accepted tokens."""
    expected = demo.client("none").generate_all(prompts, 3, mode=OFF, max_tokens=TOKENS, **options)
    accepted = 0
    for mode in (SEQUENTIAL, AUTO):
        found = client.generate_all(prompts, 3, mode=mode, max_tokens=TOKENS, **options)
        for prompt, one, other in zip(prompts, expected, found, strict=True):
            assert_same(reference, prompt, one.tokens, other.tokens)
        accepted += sum(one.statistics.accepted for one in found)
    return accepted


def test_shadow_and_promotion_change_no_token(demo, reference, prompts, worse, capsys):
    """Beside a bad draft; with the shadow at work, with both, and after the shadow was killed."""
    serving = demo.cluster.serve("draft", model=worse, dtype="float32", name="draft-worse").wait_ready()
    shadow = demo.cluster.serve(
        "draft", model=DEMO_DRAFT, dtype="float32", name="draft-new", shadow=True
    ).wait_ready()
    assert draft_info(shadow.endpoint).shadow
    assert draft_info(shadow.endpoint).version != draft_info(serving.endpoint).version
    process, client = started(demo, serving, shadow, shadow_share=1.0, drafts_per_session=2)
    eventually(lambda: client.info().draft_replicas == 1, "the draft is known, and the shadow is none")
    for sampler in CHOSEN:
        check(demo, reference, client, prompts(3), **SAMPLERS[sampler])
    counted = samples(process)
    assert counted["outrider_orchestrator_compared_tokens_total"] > 0
    assert counted["outrider_orchestrator_shadow_failures_total"] == 0

    assert main(["drafts", "list", serving.endpoint, shadow.endpoint]) == 0
    assert f"{draft_info(shadow.endpoint).version}  shadow" in capsys.readouterr().out
    assert main(["drafts", "promote", shadow.endpoint]) == 0
    assert f"{draft_info(shadow.endpoint).version}  serving" in capsys.readouterr().out
    eventually(lambda: client.info().draft_replicas == 2, "the promoted draft is used")
    for sampler in CHOSEN:
        assert check(demo, reference, client, prompts(3), **SAMPLERS[sampler]) > 0

    assert main(["drafts", "demote", serving.endpoint]) == 0
    eventually(lambda: client.info().draft_replicas == 1, "the other one is the shadow")
    stream = client.stream(request(prompts(1)[0], mode=SEQUENTIAL, max_tokens=150))
    begun = [*islice(stream, 8)]
    serving.kill()
    found = collect([*begun, *stream])[0]
    (expected,) = demo.client("none").generate_all(prompts(1), 1, mode=OFF, max_tokens=150)
    assert_same(reference, prompts(1)[0], expected.tokens, found.tokens)
    assert found.statistics.draft_losses == 0
    for one in (process, shadow):
        one.kill()


@pytest.mark.parametrize("sampler", [pytest.param("greedy", marks=pytest.mark.slow), "T=1"])
def test_new_weights_in_a_running_session_change_no_token(demo, reference, prompts, worse, tmp_path, sampler):
    """The draft stays the session's; files that are no model are refused, and it goes on."""
    current = tmp_path / "current"
    current.symlink_to(worse)
    draft = demo.cluster.serve(
        "draft", model=current, dtype="float32", name="draft-exchanged", reload_model=True
    ).wait_ready()
    process, client = started(demo, draft)
    eventually(lambda: client.info().draft_replicas == 1, "the draft is known")
    options = {"max_tokens": 400, **SAMPLERS[sampler]}
    expected = demo.client("none").generate_all(prompts(2), 2, mode=OFF, **options)
    streams = [client.stream(request(prompt, mode=AUTO, **options)) for prompt in prompts(2)]
    begun = [[*islice(stream, 8)] for stream in streams]
    before = draft_info(draft.endpoint)
    point(current, DEMO_DRAFT)
    eventually(
        lambda: draft_info(draft.endpoint).version != before.version, "the new weights are taken up", 60
    )
    found = [collect([*start, *rest])[0] for start, rest in zip(begun, streams, strict=True)]
    for prompt, one, other in zip(prompts(2), expected, found, strict=True):
        assert_same(reference, prompt, one.tokens, other.tokens)
    assert draft_info(draft.endpoint).incarnation == before.incarnation
    assert sum(one.statistics.draft_losses for one in found) == 0
    assert check(demo, reference, client, prompts(2), **SAMPLERS[sampler]) > 0

    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{}")
    (tmp_path / "broken/model.safetensors").write_bytes(b"")
    point(current, tmp_path / "broken")
    refused = "outrider_draft_files_refused_total"
    eventually(lambda: samples(draft).get(refused) == 1, "what is no model is refused", 60)
    assert check(demo, reference, client, prompts(1), **SAMPLERS[sampler]) > 0
    for one in (process, draft):
        one.kill()


def point(link: Path, folder: Path) -> None:
    """Have a link lead elsewhere, at one stroke."""
    new = link.with_name("next")
    new.symlink_to(folder)
    os.replace(new, link)
