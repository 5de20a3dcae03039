"""Replicas die, hang and come back in the middle of a sentence; the tokens stay the target's."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from tests.integration.client import (
    AUTO,
    SEQUENTIAL,
    Client,
    Generation,
    collect,
    eventually,
    request,
    verify_info,
)
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster, Process
from tests.integration.collector import environment
from tests.integration.metrics import samples
from tests.integration.reference import assert_same

TOKENS = 1500
"""Greedy text repeats itself and is committed six tokens a step: long enough to be broken in the middle."""
NUMBERS = count(1)
"""Of requests."""
MAX_TEXTS = 20
"""Most texts until one meets a fault that needs a draft at work."""
SAMPLERS: list[dict[str, Any]] = [
    {"max_tokens": TOKENS},
    {"max_tokens": TOKENS // 2, "temperature": 1.0, "ignore_eos": True},
]


@dataclass
class Pair:
    """Two verify replicas and a draft that may be broken, and an orchestrator."""

    cluster: Cluster
    verify: list[Process]
    draft: Process
    orchestrator: Process
    client: Client

    def drafted_steps(self) -> float:
        """Steps of all requests so far that verified nodes of the draft."""
        counts = samples(self.orchestrator)
        steps, undrafted = "outrider_orchestrator_steps_total", "outrider_orchestrator_undrafted_steps_total"
        return counts.get(steps, 0.0) - counts.get(undrafted, 0.0)

    def serving(self) -> Process:
        """The verify replica that runs a session now."""
        return next(one for one in self.verify if verify_info(one.endpoint).sessions)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, collector) -> Iterator[Pair]:
    """Processes of this module."""
    cluster = Cluster(tmp_path_factory.mktemp("faults"), environment(collector.endpoint))
    target = {"model": DEMO_TARGET, "dtype": "float32"}
    started = [
        cluster.serve("verify", name="verify-a", **target),
        cluster.serve("verify", name="verify-b", **target),
        cluster.serve("draft", name="draft-a", model=DEMO_DRAFT, dtype="float32"),
    ]
    verify_a, verify_b, draft = (process.wait_ready() for process in started)
    orchestrator = cluster.serve(
        "orchestrator",
        verify=(verify_a.endpoint, verify_b.endpoint),
        draft=draft.endpoint,
        breaker_seconds=0.5,
        discovery_seconds=0.2,
    ).wait_ready()
    yield Pair(cluster, [verify_a, verify_b], draft, orchestrator, Client(orchestrator.endpoint))
    cluster.stop()


def new_traffic() -> dict[str, str]:
    """A task of its own for a request: nobody knows yet whether drafts pay, so it has one."""
    return {"task": f"text {next(NUMBERS)}"}


def used_again(client: Client, prompt) -> bool:
    """A draft takes part in a request that waits for its draft: in other modes one that is late may rest."""
    generation = client.generate(prompt, mode=SEQUENTIAL, max_tokens=24)
    return generation.statistics.draft_micros > 0


def without_the_draft(pair: Pair, prompt, **options: Any) -> Generation:
    """Generate, and kill the draft once it takes part; `draft_losses` tells whether it did so in time.

    The draft runs again afterwards.
    """
    before, responses = pair.drafted_steps(), []
    for response in pair.client.stream(request(prompt, mode=AUTO, **new_traffic(), **options)):
        responses.append(response)
        if pair.draft.running and pair.drafted_steps() > before:
            pair.draft.kill()
    if not pair.draft.running:
        pair.draft = pair.cluster.restart(pair.draft)
    return collect(responses)[0]


def broken_after(client: Client, prompt, break_it, chunks: int = 3, **options: Any) -> Generation:
    """Generate, and break something once some chunks have come."""
    call = client.stream(request(prompt, mode=AUTO, **{"max_tokens": TOKENS, **new_traffic(), **options}))
    responses = []
    for response in call:
        responses.append(response)
        if len(responses) == chunks:
            break_it()
    return collect(responses)[0]


@pytest.mark.parametrize(
    "sampler",
    [pytest.param(SAMPLERS[0], id="greedy", marks=pytest.mark.slow), pytest.param(SAMPLERS[1], id="T=1")],
)
def test_a_draft_killed_mid_sentence_costs_no_token(pair, reference, prompts, sampler):
    """The request goes on without its draft; a restarted draft serves the next one.

    On a busy machine blocks come late, so a draft rests, or the text ends first: then the next text meets it.
    """
    prompt = prompts(5)[4]
    expected = pair.client.generate(prompt, **sampler).tokens
    losses = 0
    for _ in range(MAX_TEXTS):
        generation = without_the_draft(pair, prompt, **sampler)
        assert_same(reference, prompt, expected, generation.tokens)
        losses = generation.statistics.draft_losses
        if losses:
            break
    assert losses == 1
    eventually(lambda: used_again(pair.client, prompt), "the restarted draft is used")


def test_a_hanging_draft_costs_no_token(pair, reference, prompts):
    """A draft that stops answering is gone on without; when it wakes up it is used again."""
    prompt = prompts(3)[2]
    expected = pair.client.generate(prompt, max_tokens=TOKENS).tokens
    try:
        generation = broken_after(pair.client, prompt, lambda: pair.draft.signal(signal.SIGSTOP))
        assert_same(reference, prompt, expected, generation.tokens)
        while_it_hangs = pair.client.generate(prompt, max_tokens=TOKENS)
        assert_same(reference, prompt, expected, while_it_hangs.tokens)
    finally:
        pair.draft.signal(signal.SIGCONT)
    eventually(lambda: used_again(pair.client, prompt), "the draft is back")


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "T=1"])
def test_a_verify_replica_killed_mid_sentence_costs_no_token(pair, reference, prompts, sampler):
    """The request moves to the other replica, which says what the first would have said."""
    prompt = prompts(6)[5]
    expected = pair.client.generate(prompt, **sampler).tokens
    lost: list[Process] = []

    def kill() -> None:
        lost.append(pair.serving())
        lost[0].kill()

    generation = broken_after(pair.client, prompt, kill, **sampler)
    pair.verify[pair.verify.index(lost[0])] = pair.cluster.restart(lost[0])
    assert_same(reference, prompt, expected, generation.tokens)
    assert generation.statistics.verify_losses == 1
    eventually(lambda: pair.client.info().verify_replicas == 2, "the restarted replica is back")


def test_a_session_of_a_lost_replica_is_refilled(pair, reference, prompts):
    """The next turn after its replica restarted gives the same tokens, without the cache."""
    prompt = prompts(7)[6]
    first = pair.client.generate(prompt, max_tokens=8, fields={"keep_session": True})
    for process in list(pair.verify):
        process.kill()
        pair.verify[pair.verify.index(process)] = pair.cluster.restart(process)
    eventually(lambda: pair.client.info().verify_replicas == 2, "both replicas are back")
    turn = [*prompt, *first.tokens, 5, 6]
    second = pair.client.generate(turn, max_tokens=8, fields={"session": first.complete.session})
    assert_same(reference, turn, reference.greedy(turn, 8), second.tokens)


def test_a_draft_that_was_never_there_costs_no_token(own_cluster, demo, reference, prompts):
    """An orchestrator whose only draft address is dead serves at once, without drafts."""
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{placeholder.getsockname()[1]}"
        orchestrator = own_cluster.serve(
            "orchestrator", verify=demo.verify.endpoint, draft=nobody
        ).wait_ready()
        prompt = prompts(2)[1]
        generation = Client(orchestrator.endpoint).generate(prompt, max_tokens=16)
    assert_same(reference, prompt, reference.greedy(prompt, 16), generation.tokens)
