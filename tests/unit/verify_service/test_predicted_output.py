"""Predicted output: it saves steps, is counted, and changes no token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.protocol.messages import SamplingParams, Verdict, VerifyPolicy
from tests.unit.verify_service.fakes import VOCABULARY, Bench, greedy_text, opening, text, verdicts

PROMPT = (1, 2, 3)
COUNT = 60
POLICIES = (VerifyPolicy.PIPELINED, VerifyPolicy.SEQUENTIAL, VerifyPolicy.OFF)


def run(
    prediction: Sequence[int], policy: VerifyPolicy = VerifyPolicy.PIPELINED, **changes: float
) -> list[Verdict]:
    """The verdicts of one session alone; nothing else proposes."""
    bench = Bench()
    sampling = SamplingParams(max_tokens=COUNT, ignore_eos=True, **changes)
    stream = bench.open(opening(PROMPT, sampling=sampling, policy=policy, prediction=tuple(prediction)))
    bench.run()
    return verdicts(stream)


def edited(tokens: Sequence[int]) -> list[int]:
    """A text that differs from `tokens` in every twelfth token: replaced, inserted or left out."""
    source, found = random.Random(6), list[int]()
    for index, token in enumerate(tokens):
        other = (token + 1 + source.randrange(VOCABULARY - 1)) % VOCABULARY
        kinds = ([token], [token], [other], [other, token], [])
        found += kinds[2 + source.randrange(3)] if index % 12 == 11 else [token]
    return found


def test_a_right_prediction_saves_most_steps() -> None:
    """As many tokens a step as the session may verify, once the prediction has proven itself."""
    truth = greedy_text(PROMPT, COUNT)
    found = run(truth)
    assert text(found) == truth
    assert len(found) < COUNT / 4


def test_an_edited_text_still_saves_steps() -> None:
    """It is followed again after each edit."""
    truth = greedy_text(PROMPT, COUNT)
    found = run(edited(truth))
    assert text(found) == truth
    assert len(found) < COUNT / 2


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["right", "edited", "wrong"])
def test_tokens_are_those_without_a_prediction(kind: str, temperature: float) -> None:
    """In every mode, whatever was predicted."""
    truth = text(run((), VerifyPolicy.OFF, temperature=temperature, seed=3))
    source = random.Random(1)
    predictions = {
        "right": truth,
        "edited": edited(truth),
        "wrong": [source.randrange(VOCABULARY) for _ in truth],
    }
    for policy in POLICIES:
        assert text(run(predictions[kind], policy, temperature=temperature, seed=3)) == truth


def test_what_it_brought_is_counted() -> None:
    """Verified nodes of the prediction, and those that were accepted; without drafts there are no others."""
    found = run(edited(greedy_text(PROMPT, COUNT)))
    accepted = sum(verdict.predicted_accepted for verdict in found)
    assert accepted == sum(verdict.accepted for verdict in found) > 0
    assert (
        sum(verdict.predicted for verdict in found) == sum(verdict.verified for verdict in found) > accepted
    )
    none = run(())
    assert not any(verdict.predicted or verdict.predicted_accepted for verdict in none)


def test_off_verifies_no_prediction() -> None:
    """The target alone."""
    assert not any(verdict.verified for verdict in run(greedy_text(PROMPT, COUNT), VerifyPolicy.OFF))


def test_it_goes_on_where_a_session_is_opened_again() -> None:
    """After a move the new replica is at the same place of the prediction."""
    truth = greedy_text(PROMPT, COUNT)
    bench = Bench()
    sampling = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    request = opening((*PROMPT, *truth[:30]), sampling=sampling, prediction=tuple(edited(truth)))
    stream = bench.open(replace(request, prompt_length=len(PROMPT)))
    bench.run()
    found = verdicts(stream)
    assert text(found) == truth[30:]
    assert len(found) < 15
