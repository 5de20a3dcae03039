"""Predicted output on the demo pair in real processes: fewer steps, the same tokens."""

from __future__ import annotations

import pytest

from outrider.client import Client, Result
from tests.integration.reference import assert_same

TOKENS = 48


@pytest.fixture(scope="module")
def client(demo):
    """Of the stack without drafts: what is saved, the prediction has saved."""
    with Client(demo.orchestrator("none").endpoint, timeout=60) as client:
        yield client


def generate(client: Client, prompt: list[int], temperature: float, **options: object) -> Result:
    """One answer with a fixed seed."""
    fixed = {"temperature": temperature, "seed": 5, "max_tokens": TOKENS, "ignore_eos": True}
    return client.generate(prompt, **fixed, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_an_edited_prediction_saves_steps_and_changes_nothing(client, reference, prompts, temperature):
    """Two tokens replaced, one inserted and three deleted: few steps more than the edits, in both modes."""
    for prompt in prompts(2):
        alone = generate(client, prompt, temperature, mode="off")
        answer = list(alone.token_ids)
        prediction = [*answer[:10], 7, 7, *answer[12:25], 7, *answer[25:35], *answer[38:]]
        for mode in ("auto", "sequential"):
            result = generate(client, prompt, temperature, mode=mode, prediction=prediction)
            assert_same(reference, prompt, answer, list(result.token_ids))
            usage, steps = result.usage, result.generations[0].end.speculation["steps"]
            assert usage.accepted_prediction_tokens > TOKENS / 6
            assert steps < 0.75 * TOKENS  # on a busy machine nodes cost more, so that fewer are verified


def test_a_predicted_text_is_tokenized(client, prompts):
    """The text of the answer serves as well as its tokens."""
    prompt = prompts(1)[0]
    alone = generate(client, prompt, 0.0, mode="off")
    result = generate(client, prompt, 0.0, prediction=alone.text)
    assert result.token_ids == alone.token_ids
    assert result.usage.accepted_prediction_tokens > TOKENS / 2
