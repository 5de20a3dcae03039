"""With a real model: every way of proposing commits the tokens of a run without proposals."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner
from outrider.protocol.messages import SamplingParams, TokenBlock, VerifyPolicy
from tests.models import build_model
from tests.unit.verify_service.fakes import LIMITS, Bench, Clock, block, chain_block, opening, text, verdicts
from verify_service.mailbox import VerifyStream
from verify_service.speculation.measure import measure_costs

VOCABULARY = 300
COUNT = 24
OVERFLOWING = 222
PROMPTS = [(5, 6, 7), (40,), tuple(range(50, 90)), (9, 8, 9, 8, 9, 8)]
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=COUNT, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=COUNT, temperature=1.0, seed=7),
    "processed": SamplingParams(
        max_tokens=COUNT,
        temperature=0.8,
        seed=2**63 + 1,
        top_k=40,
        top_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        min_tokens=4,
        logit_bias={11: 4.0},
    ),
}
LARGE = replace(LIMITS, vocabulary_size=VOCABULARY, eos_token_ids=frozenset({1}))


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny random model, with attention alone and with recurrent layers."""
    torch.set_num_threads(1)
    folder: Path = build_model(request.param, tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY)
    return load_model(str(folder), dtype="float32", device="cpu", threads=1)


def bench_of(loaded: LoadedModel, pages: int = 200, max_step_tokens: int = 64) -> Bench:
    """A core around a new runner; its clock moves at every look."""
    runner = ModelRunner(loaded, pages, 4)
    return Bench(runner, limits=LARGE, max_step_tokens=max_step_tokens, clock=Clock(tick=1e-4))


@pytest.fixture(scope="module")
def truths(loaded: LoadedModel) -> dict[tuple[str, int], list[int]]:
    """What each prompt gets alone and without proposals."""
    found = {}
    for name, sampling in SAMPLINGS.items():
        for index, prompt in enumerate(PROMPTS):
            bench = bench_of(loaded)
            stream = bench.open(opening(prompt, sampling=sampling, policy=VerifyPolicy.OFF))
            bench.run()
            found[name, index] = text(verdicts(stream))
    return found


def propose(
    kind: str, draw: random.Random, first_id: int, committed: list[int], truth: list[int]
) -> TokenBlock:
    """A block of one of four kinds of draft."""
    base = len(committed)
    if kind == "perfect":
        return chain_block(first_id, base, truth[base : base + 6])
    if kind == "random":
        parents = [draw.choice([-base, first_id + draw.randrange(i + 1)]) for i in range(10)]
        return block(first_id, [(p, draw.randrange(VOCABULARY), 1.0) for p in parents], base=base)
    start = max(1, base - draw.randrange(3))
    right = truth[start : start + 5]
    mixed = [(-start, draw.randrange(400), 0.9)] + [
        (-start if i == 0 else first_id + i, token, 0.8) for i, token in enumerate(right)
    ]
    return block(first_id, [*mixed, (first_id + 2, 7, 0.5), (2**40, 3, 1.0)], draw.random() < 0.5, start)


def run_together(
    bench: Bench, truths: list[list[int]], sampling: SamplingParams, kind: str
) -> list[list[int]]:
    """All prompts at once; returns what each committed."""
    draw = random.Random(11)
    streams: list[VerifyStream] = [
        bench.open(opening(prompt, sampling=sampling, lookup=index % 2 == 0))
        for index, prompt in enumerate(PROMPTS)
    ]
    first_id = 0
    for _ in range(2000):
        bench.core.turn([])
        running = [(s, bench.core.sessions[s.id]) for s in streams if not bench.core.sessions[s.id].finished]
        if not running:
            return [text(verdicts(stream)) for stream in streams]
        for stream, session in running:
            full = [*PROMPTS[stream.id - 1], *truths[stream.id - 1]]
            bench.propose(stream, propose(kind, draw, first_id, session.tree.committed, full))
            first_id += 20
    raise AssertionError("the sessions do not end")


@pytest.mark.parametrize("pages", [200, 22])
@pytest.mark.parametrize("kind", ["perfect", "random", "adversarial"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_speculation_commits_what_the_target_says_alone(
    loaded: LoadedModel, truths: dict[tuple[str, int], list[int]], name: str, kind: str, pages: int
) -> None:
    """Several sessions at once, with room for all or with pages so scarce that sessions are paused."""
    expected = [truths[name, index] for index in range(len(PROMPTS))]
    bench = bench_of(loaded, pages, max_step_tokens=64 if pages == 200 else 24)
    assert run_together(bench, expected, SAMPLINGS[name], kind) == expected
    for stream in bench.streams.values():
        bench.close(stream)
    bench.core.turn([])
    assert bench.core.statistics.used == 0


def test_scarce_pages_do_pause_sessions(
    loaded: LoadedModel, truths: dict[tuple[str, int], list[int]]
) -> None:
    """The pool of the test above is too small for all: the guard that it tests what it says."""
    bench = bench_of(loaded, 22, max_step_tokens=24)
    run_together(bench, [truths["greedy", i] for i in range(4)], SAMPLINGS["greedy"], "perfect")
    assert bench.core._instruments.preempted._value.get() > 0


def test_costs_are_measured_on_the_runner(loaded: LoadedModel) -> None:
    """Every time is positive, none falls, and the pool is as it was."""
    runner = ModelRunner(loaded, 16, 4)
    cost = measure_costs(runner, 64)
    assert 0.0 < cost.seconds(1) <= cost.seconds(8) <= cost.seconds(64)
    assert runner.pool.available == 16


@pytest.mark.parametrize("backend", ["auto", "onednn"])
def test_a_candidate_that_overflows_costs_no_token(backend: str, tmp_path: Path) -> None:
    """In float16 its keys and values are no numbers, which spoils the rows beside it: all are computed again
    without candidates. A later session on the same pages is not harmed.
    """
    plain = build_model("llama", tmp_path / "plain", vocab_size=VOCABULARY)
    network = AutoModelForCausalLM.from_pretrained(plain)
    with torch.no_grad():
        network.get_input_embeddings().weight[OVERFLOWING] = torch.finfo(torch.float16).max
    network.save_pretrained(tmp_path / "model")
    loaded = load_model(
        str(tmp_path / "model"), dtype="float16", device="cpu", threads=1, cpu_backend=backend
    )
    sampling = replace(SAMPLINGS["greedy"], max_tokens=8)
    prompt, bench = opening(PROMPTS[0], sampling=sampling), bench_of(loaded, pages=12)
    stream = bench.open(prompt)
    bench.run()
    truth = text(verdicts(stream))
    bench.close(stream)
    for _ in range(2):
        stream, verified = bench.open(prompt), 0
        told = text(verdicts(stream))
        for _ in range(4 * len(truth)):
            if len(told) == len(truth):
                break
            base = len(PROMPTS[0]) + len(told)
            nodes = [(-base, OVERFLOWING, 0.9), (-base, truth[len(told)], 0.5)]
            bench.propose(stream, block(8 * base, nodes, base=base))
            bench.core.turn([])
            received = verdicts(stream)
            told += text(received)
            verified += sum(verdict.verified for verdict in received)
        assert told == truth
        assert verified == 0, "no step with the candidate gave a token"
        bench.close(stream)
