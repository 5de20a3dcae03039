"""Features that a verify replica tells: those of the committed tokens as transformers computes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.features import from_bytes
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import PromptFeatures, SamplingParams, Verdict, VerifyPolicy
from tests.models import build_model
from tests.unit.verify_service.fakes import LIMITS, REPLICA, Bench, Clock, chain_block, events, opening, text
from verify_service import features
from verify_service.admission import check_open

PROMPT = tuple(range(5, 45))
LAYERS = (1, 2)
WIDTH = 64
COUNT = 12
SAMPLING = SamplingParams(max_tokens=COUNT, ignore_eos=True)
LARGE = replace(LIMITS, vocabulary_size=300, eos_token_ids=frozenset({1}), hidden_size=WIDTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    torch.set_num_threads(1)
    return build_model("llama", tmp_path_factory.mktemp("llama"), vocab_size=300)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    """The same on our engine."""
    return load_model(str(folder), dtype="float32", device="cpu", threads=1)


def truth(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Rows [T - 1, layers C] for the tokens after the first, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0, :-1] for layer in LAYERS], -1)


def bench_of(loaded: LoadedModel, pages: int = 200, **options: object) -> Bench:
    """A core around a new runner."""
    return Bench(ModelRunner(loaded, pages, 4), limits=LARGE, clock=Clock(tick=1e-4), **options)


def told(received: list[object]) -> tuple[dict[int, torch.Tensor], list[int]]:
    """Rows by the position of their token, and the text; no position is told twice."""
    rows: dict[int, torch.Tensor] = {}
    for event in received:
        if isinstance(event, PromptFeatures):
            found, first = from_bytes(event.rows, len(LAYERS) * WIDTH), event.position
        elif isinstance(event, Verdict) and event.features:
            found = from_bytes(event.features, len(LAYERS) * WIDTH)
            first = event.base_length + len(event.tokens) - len(found)
        else:
            continue
        for position, row in enumerate(found, first):
            assert position not in rows, "told twice"
            rows[position] = row
    return rows, text([event for event in received if isinstance(event, Verdict)])


def check(rows: dict[int, torch.Tensor], expected: torch.Tensor, positions: range) -> None:
    """They are those of these tokens, as near as 16 bits come."""
    assert sorted(rows) == list(positions)
    for position in positions:
        torch.testing.assert_close(rows[position].float(), expected[position - 1], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("step_tokens", [512, 16])
def test_every_token_but_the_first_has_its_row(folder, loaded, step_tokens):
    """The prompt's, in one piece or in chunks, before the first verdict; then those of every verdict."""
    bench = bench_of(loaded, max_step_tokens=step_tokens)
    stream = bench.open(opening(PROMPT, sampling=SAMPLING, feature_layers=LAYERS))
    bench.run()
    received = events(stream)
    rows, tokens = told(received)
    check(rows, truth(folder, [*PROMPT, *tokens]), range(1, len(PROMPT) + COUNT))
    kinds = [type(event) for event in received]
    assert kinds.index(Verdict) > kinds.index(PromptFeatures)


def test_accepted_nodes_have_the_rows_of_their_path(folder, loaded):
    """A verdict of several tokens brings as many rows; nodes beside the path bring none."""
    plain = bench_of(loaded)
    alone = plain.open(opening(PROMPT, sampling=SAMPLING))
    plain.run()
    expected = told(events(alone))[1]
    bench = bench_of(loaded)
    stream = bench.open(
        opening(PROMPT, sampling=SAMPLING, feature_layers=LAYERS, policy=VerifyPolicy.SEQUENTIAL)
    )
    length = len(PROMPT) + 1
    bench.propose(stream, chain_block(200, length, [7, 8], 0.3, ready=False))
    bench.propose(stream, chain_block(100, length, expected[1:5], 0.9))
    received = events(stream)
    assert max(len(event.tokens) for event in received if isinstance(event, Verdict)) >= 4
    rows, tokens = told(received)
    assert tokens == expected[: len(tokens)]
    check(rows, truth(folder, [*PROMPT, *tokens]), range(1, len(PROMPT) + len(tokens)))


def test_nothing_is_taken_that_nobody_wants(loaded, monkeypatch):
    """Without layers, in MODE_OFF, and while no draft is wanted."""
    bench = bench_of(loaded)
    monkeypatch.setattr(ModelRunner, "forward_with_features", None)
    for options in ({}, {"feature_layers": LAYERS, "policy": VerifyPolicy.OFF}):
        stream = bench.open(opening(PROMPT, sampling=SAMPLING, **options))
        bench.run()
        assert told(events(stream))[0] == {}


def test_while_no_draft_is_wanted_none_are_told(loaded):
    """They go on when one is."""
    bench = bench_of(loaded)
    stream = bench.open(opening(PROMPT, sampling=SAMPLING, feature_layers=LAYERS))
    session = bench.core.sessions[stream.id]
    before = len(told(events(stream))[0])
    assert before
    bench.core._controller.decide_drafts = lambda sessions, now: None
    session.draft_wanted = False
    bench.core.turn([])
    assert told(events(stream))[0] == {}
    session.draft_wanted = True
    bench.core.turn([])
    assert len(told(events(stream))[0]) == 1


def test_two_sessions_hear_of_layers_of_their_own(folder, loaded):
    """One reads two layers, one another, one none, in the same steps."""
    bench = bench_of(loaded)
    layers = [LAYERS, (0,), ()]
    streams = [bench.open(opening(PROMPT[:20], sampling=SAMPLING, feature_layers=own)) for own in layers]
    bench.run()
    received = [events(stream) for stream in streams]
    rows, tokens = told(received[0])
    check(rows, truth(folder, [*PROMPT[:20], *tokens]), range(1, 20 + COUNT))
    sizes = {len(event.features) for event in received[1] if isinstance(event, Verdict)}
    assert WIDTH * 2 in sizes
    assert sizes <= {0, WIDTH * 2}, "none while no draft is wanted"
    assert told(received[2])[0] == {}


def test_what_is_cached_is_not_computed_for_them(loaded):
    """The second session has rows from where its own computing begins."""
    bench = bench_of(loaded)
    for expected in (range(1, len(PROMPT) + COUNT), range(37, len(PROMPT) + COUNT)):
        stream = bench.open(opening(PROMPT, sampling=SAMPLING, feature_layers=LAYERS))
        bench.run()
        assert sorted(told(events(stream))[0]) == list(expected)
        bench.close(stream)


def test_messages_are_bounded(loaded, monkeypatch):
    """Of a long text only the end is told, and of many accepted tokens only the last."""
    monkeypatch.setattr(features, "MAX_FEATURE_BYTES", 5 * 2 * WIDTH * 2 + 7)
    bench = bench_of(loaded)
    stream = bench.open(opening(PROMPT, sampling=SAMPLING, feature_layers=LAYERS))
    bench.run()
    rows = told(events(stream))[0]
    assert min(rows) == len(PROMPT) - 5 + 1
    assert sorted(rows) == list(range(min(rows), len(PROMPT) + COUNT))


@pytest.mark.parametrize("layers", [(1, 0), (1, 1), (4,), tuple(range(9))])
def test_layers_must_be_those_of_the_target(layers):
    """Ascending, different, few enough, and there."""
    with pytest.raises(InvalidRequest) as caught:
        check_open(opening(feature_layers=layers), replace(REPLICA, num_layers=3 if len(layers) < 9 else 20))
    assert caught.value.field == "feature_layers"
    check_open(opening(feature_layers=(2, 3)), replace(REPLICA, num_layers=3))  # 3 is the output layer
