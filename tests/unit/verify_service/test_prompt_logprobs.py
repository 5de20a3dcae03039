"""Log probabilities of prompts, with a real model: those of a whole forward, whatever is cached or paused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import (
    KvHandle,
    PromptLogprobs,
    SamplingParams,
    TokenLogprob,
    Verdict,
    VerifyPolicy,
)
from tests.models import build_model
from tests.unit.verify_service.fakes import LIMITS, REPLICA, Bench, Clock, events, opening, text
from verify_service.admission import check_open
from verify_service.scheduler import MAX_PROMPT_ROWS

VOCABULARY = 300
COUNT = 12
PROMPT = tuple(range(5, 165))
SAMPLING = SamplingParams(max_tokens=COUNT, ignore_eos=True, prompt_logprobs=2)
PLAIN = replace(SAMPLING, prompt_logprobs=None)
LARGE = replace(LIMITS, vocabulary_size=VOCABULARY, eos_token_ids=frozenset({1}))
POLICIES = (VerifyPolicy.PIPELINED, VerifyPolicy.SEQUENTIAL, VerifyPolicy.OFF)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    torch.set_num_threads(1)
    return build_model("llama", tmp_path_factory.mktemp("llama"), vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    """The same on our engine."""
    return load_model(str(folder), dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def truth(folder: Path) -> torch.Tensor:
    """Log probabilities [P - 1, V] of what follows each token of the prompt, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)


def bench_of(loaded: LoadedModel, pages: int = 400, max_step_tokens: int = 512) -> Bench:
    """A core around a new runner; its clock moves at every look."""
    runner = ModelRunner(loaded, pages, 4)
    return Bench(runner, limits=LARGE, max_step_tokens=max_step_tokens, clock=Clock(tick=1e-4))


def told(bench: Bench, number: int) -> tuple[list[TokenLogprob], list[int]]:
    """What a session said: of the prompt, in order and before all verdicts, and its text."""
    received = events(bench.streams[number])
    parts = [event for event in received if isinstance(event, PromptLogprobs)]
    verdicts = [event for event in received if isinstance(event, Verdict)]
    assert not verdicts or all(received.index(part) < received.index(verdicts[0]) for part in parts)
    position = parts[0].position if parts else 0
    for part in parts:
        assert part.position == position
        assert len(part.logprobs) <= MAX_PROMPT_ROWS
        position += len(part.logprobs)
    return [logprob for part in parts for logprob in part.logprobs], text(verdicts)


def check(found: list[TokenLogprob], truth: torch.Tensor, first: int = 1) -> None:
    """They are those of the prompt from position `first` on, with the two best of each."""
    assert [one.token for one in found] == list(PROMPT[first:])
    expected = truth[first - 1 :]
    own = expected.gather(1, torch.tensor(PROMPT[first:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([one.logprob for one in found]), own, atol=2e-4, rtol=1e-4)
    best = expected.topk(2).values
    tops = torch.tensor([[value for _, value in one.top] for one in found])
    torch.testing.assert_close(tops, best, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_they_are_those_of_the_model(loaded: LoadedModel, truth: torch.Tensor, policy: VerifyPolicy) -> None:
    """In chunks, and the text is that of a session without them, in every mode."""
    bench = bench_of(loaded)
    bench.open(opening(PROMPT, sampling=SAMPLING, policy=policy))
    bench.run()
    found, tokens = told(bench, 1)
    check(found, truth)
    alone = bench_of(loaded)
    alone.open(opening(PROMPT, sampling=PLAIN, policy=VerifyPolicy.OFF))
    alone.run()
    assert told(alone, 1) == ([], tokens)


def test_a_cached_prompt_is_computed_all_the_same(loaded: LoadedModel, truth: torch.Tensor) -> None:
    """The beginning that another session left is not skipped; what is known already may be."""
    bench = bench_of(loaded)
    bench.open(opening(PROMPT, sampling=PLAIN))
    bench.run()
    bench.open(opening(PROMPT, sampling=SAMPLING))
    bench.run()
    check(told(bench, 2)[0], truth)
    bench.open(opening(PROMPT, sampling=SAMPLING, first_prompt_logprob=100))
    (opened, *_) = bench.streams[3].outbox._events._queue  # type: ignore[attr-defined]
    assert 0 < opened.cached_length <= 99
    bench.run()
    check(told(bench, 3)[0], truth, 100)
    bench.open(opening(PROMPT, sampling=PLAIN))
    (opened, *_) = bench.streams[4].outbox._events._queue  # type: ignore[attr-defined]
    assert opened.cached_length > 99, "others use the cache as before"


def test_sessions_share_the_rows_of_a_step(loaded: LoadedModel, truth: torch.Tensor) -> None:
    """Several at once, beside one that wants none: all are told everything, and no step has too many rows."""
    bench = bench_of(loaded)
    widest: list[int] = []
    forward = bench.runner.forward

    def counted(segments):  # type: ignore[no-untyped-def]
        widest.append(sum(len(segment.wanted) for segment in segments))
        return forward(segments)

    bench.runner.forward = counted  # type: ignore[method-assign]
    for sampling in (SAMPLING, PLAIN, SAMPLING):
        bench.open(opening(PROMPT, sampling=sampling))
    bench.run()
    for number in (1, 3):
        check(told(bench, number)[0], truth)
    assert told(bench, 2)[0] == []
    assert MAX_PROMPT_ROWS <= max(widest) <= MAX_PROMPT_ROWS + 3 * (1 + LIMITS.max_nodes)


def test_a_paused_session_is_told_once(loaded: LoadedModel, truth: torch.Tensor) -> None:
    """Paused in the middle of its prompt, as for want of pages: nothing comes twice, nothing is missing."""
    bench = bench_of(loaded)
    bench.open(opening(PROMPT, sampling=SAMPLING))
    session = bench.core.sessions[1]
    assert session.prompt_logprobs_left
    assert session.kv is not None
    assert session.kv.length == MAX_PROMPT_ROWS
    session.release_pages()
    bench.run()
    check(told(bench, 1)[0], truth)


def test_short_prompts(loaded: LoadedModel, truth: torch.Tensor) -> None:
    """Of one token nothing is told, of two the second."""
    bench = bench_of(loaded)
    bench.open(opening(PROMPT[:1], sampling=SAMPLING))
    bench.open(opening(PROMPT[:2], sampling=SAMPLING))
    bench.run()
    assert told(bench, 1)[0] == []
    (one,) = told(bench, 2)[0]
    assert one.logprob == pytest.approx(float(truth[0, PROMPT[1]]), abs=2e-4)


def test_a_handle_says_nothing_of_its_tokens() -> None:
    """So that it does not go with log probabilities of the prompt."""
    handle = KvHandle("here", "life", "1", 4, b"", 0)
    with pytest.raises(InvalidRequest) as caught:
        check_open(opening((1, 2), prompt_length=6, sampling=SAMPLING, kv_handle=handle), REPLICA)
    assert caught.value.field == "kv_handle"
