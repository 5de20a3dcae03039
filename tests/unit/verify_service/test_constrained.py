"""Under a grammar every way of proposing commits what the target says alone, under masks of new matchers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from llguidance import LLTokenizer

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment
from outrider.grammar.compiling import compiled
from outrider.grammar.matcher import Matcher, replay
from outrider.grammar.vocabulary import vocabulary_of
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import FinishReason, OpenVerify, SamplingParams, Verdict, VerifyPolicy
from outrider.rpc.queues import Outbox, Stream
from outrider.sampling.chooser import choose
from outrider.sampling.history import History
from outrider.sampling.processors import SamplingRow
from tests.grammars import choice, grammar, json_schema, matcher, regex, tokens_of
from tests.models import EOS_ID, build_model
from tests.unit.verify_service.fakes import LIMITS, Bench, Clock, block, chain_block, events, opening
from verify_service.mailbox import Open

VOCABULARY = 300
PROMPT = (5, 6, 7)
LARGE = replace(LIMITS, vocabulary_size=VOCABULARY, eos_token_ids=frozenset({EOS_ID}))
CONSTRAINTS = {
    "object": json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 4},
                "kind": {"enum": ["left", "right"]},
                "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
            },
            "required": ["name", "kind", "sizes"],
            "additionalProperties": False,
        }
    ),
    "regex": regex("(ab|ba|[c-f]x){3,8}!?"),
    "choice": choice("yes", "no", "perhaps", "yes please"),
    "grammar": grammar('start: "(" start ")" start | "[" start "]" | "x"'),
}
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=1.0, seed=7),
    "processed": SamplingParams(
        max_tokens=40, temperature=0.8, seed=3, top_k=20, top_p=0.9, repetition_penalty=1.2, min_tokens=9
    ),
    "endless": SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True),
}


class Setting:
    """A tiny random target with a tokenizer, and the vocabulary of its constraints."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.loaded: LoadedModel = load_model(str(folder), dtype="float32", device="cpu", threads=1)
        tokenizer = (folder / "tokenizer.json").read_bytes()
        self.words: LLTokenizer = vocabulary_of(tokenizer, [EOS_ID])
        self.alone = cache(self._alone)

    def bench(self, pages: int = 200) -> Bench:
        """A core around a new runner."""
        runner = ModelRunner(self.loaded, pages, 4)
        return Bench(runner, limits=LARGE, max_step_tokens=64, clock=Clock(tick=1e-4))

    def open(self, bench: Bench, request: OpenVerify, generated: Sequence[int] = ()) -> Stream:
        """Open a session as the servicer does, after some generated tokens."""
        stream = Stream(len(bench.streams) + 1, Outbox(1000, lambda: None))
        bench.streams[stream.id] = stream
        found = matcher(request.sampling.constraint, generated, self.words)
        assert not found.settle()
        bench.core.turn([Open(stream, request, found)])
        return stream

    def _alone(self, kind: str, sampling: str) -> tuple[list[int], FinishReason]:
        """The reference: one token after the other from a fresh forward, under the mask of a new matcher."""
        runner, tokens = ModelRunner(self.loaded, 200, 4), list[int]()
        params = replace(SAMPLINGS[sampling], constraint=CONSTRAINTS[kind])
        first = compiled(CONSTRAINTS[kind], self.words)
        while len(tokens) < params.max_tokens:
            state = Matcher(first.deep_copy())
            replay(state, tokens)
            if state.complete:
                return tokens, FinishReason.STOP
            position = len(PROMPT) + len(tokens)
            row = SamplingRow(params, position, len(tokens), History(PROMPT, tokens), state.mask(()))
            tokens += choose(fresh_logits(runner, [*PROMPT, *tokens]), [row], [EOS_ID])
        replay(state := Matcher(first.deep_copy()), tokens)
        return tokens, FinishReason.STOP if state.complete else FinishReason.LENGTH


def fresh_logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Logits [1, V] after some tokens, with nothing reused."""
    kv = SequenceKv.open(runner.pool, [])
    logits = runner.forward([Segment(kv, tokens, None, [len(tokens) - 1])])
    kv.release()
    return logits


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Built once."""
    return Setting(build_model("llama", tmp_path_factory.mktemp("llama"), vocab_size=VOCABULARY))


def said(stream: Stream) -> tuple[list[int], FinishReason]:
    """What a session committed, and why it ended."""
    verdicts = [event for event in events(stream) if isinstance(event, Verdict)]
    return [token for verdict in verdicts for token in verdict.tokens], verdicts[-1].finish_reason


def proposals(draw: random.Random, first_id: int, base: int, right: Sequence[int]):
    """The tokens that will be right, among others that may be or cannot be."""
    wrong = [(-base, draw.randrange(VOCABULARY), 0.95) for _ in range(3)]
    chain = [(-base if i == 0 else first_id + 2 + i, token, 0.9) for i, token in enumerate(right[:6])]
    below = [(first_id + 3, draw.randrange(VOCABULARY), 0.9) for _ in range(3)] if chain else []
    return block(first_id, [*wrong, *chain, *below], base=base)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_speculation_commits_what_the_target_says_alone(setting: Setting, kind: str, sampling: str) -> None:
    """Off, without drafts, with right and with hostile ones; with plenty of pages and with few."""
    params = replace(SAMPLINGS[sampling], constraint=CONSTRAINTS[kind])
    expected = setting.alone(kind, sampling)
    for policy, pages, drafting in (
        (VerifyPolicy.OFF, 200, False),
        (VerifyPolicy.PIPELINED, 200, False),
        (VerifyPolicy.PIPELINED, 24, True),
        (VerifyPolicy.SEQUENTIAL, 200, True),
    ):
        bench, draw, first_id = setting.bench(pages), random.Random(3), 0
        request = opening(PROMPT, sampling=params, policy=policy, lookup=True)
        stream = setting.open(bench, request)
        session = bench.core.sessions[stream.id]
        while drafting and not session.finished:
            base = session.tree.committed_length
            bench.propose(stream, proposals(draw, first_id, base, expected[0][base - len(PROMPT) :]))
            first_id += 20
        bench.run()
        assert said(stream) == expected
        bench.close(stream)
        assert bench.core.statistics.used == 0


def test_the_texts_above_end_in_both_ways(setting: Setting) -> None:
    """The guard that the test above tests what it says."""
    ends = {setting.alone(kind, sampling)[1] for kind in CONSTRAINTS for sampling in SAMPLINGS}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_session_moves_to_another_replica(setting: Setting) -> None:
    """After every number of tokens the rest is the same."""
    params = replace(SAMPLINGS["sampled"], constraint=CONSTRAINTS["object"])
    expected, reason = setting.alone("object", "sampled")
    for count in range(0, len(expected), 3):
        bench = setting.bench()
        request = opening([*PROMPT, *expected[:count]], sampling=params, prompt_length=len(PROMPT))
        stream = setting.open(bench, request, expected[:count])
        bench.run()
        assert said(stream) == (expected[count:], reason)


def test_what_is_forced_is_verified_without_a_draft(setting: Setting) -> None:
    """Tokens that the grammar leaves no choice about are committed several at a time."""
    constraint = json_schema({"const": "a text that is known to its end"})
    params = SamplingParams(max_tokens=60, constraint=constraint)
    bench = setting.bench()
    stream = setting.open(bench, opening(PROMPT, sampling=params))
    bench.run()
    verdicts = [event for event in events(stream) if isinstance(event, Verdict)]
    tokens = [token for verdict in verdicts for token in verdict.tokens]
    assert matcher(constraint, tokens, setting.words).complete
    assert len(verdicts) < len(tokens) / 3
    assert all(verdict.accepted == verdict.verified for verdict in verdicts)


def test_what_cannot_be_is_not_verified(setting: Setting) -> None:
    """A draft that does not know the grammar costs the target nothing."""
    bench = setting.bench()
    params = SamplingParams(max_tokens=40, constraint=regex("[abc]{12}"))
    stream = setting.open(bench, opening(PROMPT, sampling=params))
    session = bench.core.sessions[stream.id]
    possible = set(tokens_of(matcher(params.constraint, words=setting.words).mask(())))
    wrong = next(token for token in range(2, VOCABULARY) if token not in possible)
    session.propose(chain_block(0, session.tree.committed_length, [wrong, *sorted(possible)[:3]]), 0.0)
    assert session.tree.children[wrong].children
    assert session.eligible() == []


def test_a_grammar_that_has_become_too_costly_ends_its_session_alone(setting: Setting) -> None:
    """Its error names the field and where; another session of the step goes on."""
    bench = setting.bench()
    params = SamplingParams(max_tokens=8, constraint=choice("yes", "no"))
    failing = setting.open(bench, opening(PROMPT, sampling=replace(params, min_tokens=8)))
    bench.core.sessions[failing.id]._matcher.problem = "Lexer too complex"
    other = bench.open(opening((8, 9), sampling=SamplingParams(max_tokens=4)))
    bench.run()
    (error,) = [event for event in events(failing) if isinstance(event, InvalidRequest)]
    assert error.field == "sampling.choice"
    assert "Lexer too complex" in error.problem
    assert said(other)[1] is FinishReason.LENGTH
