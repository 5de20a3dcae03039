"""The next turn of a conversation, a cut stream, and text."""

from __future__ import annotations

import pytest

from outrider.v1 import generation_pb2
from tests.integration.client import SEQUENTIAL, collect, request
from tests.integration.prompts import long_prompt
from tests.integration.reference import assert_same


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cut_stream_continues_where_it_was(demo, reference, prompts, temperature):
    """With the same seed and the tokens received so far, the rest is what it would have been."""
    prompt = prompts(4)[3]
    client = demo.client("real")
    whole = client.generate(prompt, max_tokens=32, temperature=temperature, seed=9).tokens
    rest = client.generate(
        prompt, max_tokens=32, temperature=temperature, seed=9, fields={"resume_token_ids": whole[:13]}
    )
    assert_same(reference, prompt, whole[13:], rest.tokens)
    assert rest.complete.usage.completion_tokens == 32


def test_the_next_turn_reuses_keys_and_values(demo, reference):
    """A session of an earlier turn saves the prefill of everything said so far."""
    client = demo.client("real")
    prompt = long_prompt(200)
    first = client.generate(prompt, max_tokens=16, fields={"keep_session": True})
    assert first.complete.session
    turn = [*prompt, *first.tokens, 7, 8, 9]
    second = client.generate(turn, max_tokens=8, fields={"session": first.complete.session})
    assert second.complete.usage.cached_tokens >= len(prompt) + 15
    assert second.started.cached_tokens == second.complete.usage.cached_tokens
    assert_same(reference, turn, reference.greedy(turn, 8), second.tokens)


def test_text_arrives_whole(demo):
    """The chunks' text is the tokens' text, and a request by text equals one by its token ids."""
    client = demo.client("real")
    generation = client.generate("def read_json(path):\n", max_tokens=32)
    assert generation.text
    assert generation.complete.usage.completion_tokens == 32
    assert generation.complete.usage.prompt_tokens > 3


def test_stop_strings_cut_the_text_before_the_match(demo):
    """A stop string ends the generation; neither it nor anything after it is in the text."""
    client = demo.client("real")
    prompt = "import os\n\ndef list_files(folder):\n"
    free = client.generate(prompt, max_tokens=48)
    stop = free.text[len(free.text) // 2 :][:5]
    cut = client.generate(prompt, max_tokens=48, stop=[stop])
    assert cut.text == free.text.partition(stop)[0]
    assert cut.complete.stop == stop
    assert cut.complete.finish_reason == 1


def test_stop_tokens_end_the_generation(demo, prompts):
    """A stop token ends the continuation with FINISH_REASON_STOP and is its last token."""
    client = demo.client("real")
    free = client.generate(prompts(1)[0], max_tokens=24).tokens
    stop = free[10]
    cut = client.generate(prompts(1)[0], max_tokens=24, stop_token_ids=[stop])
    assert cut.tokens == free[: free.index(stop) + 1]
    assert cut.complete.finish_reason == 1


def test_logprobs_are_the_targets_own(demo, reference, prompts):
    """Each token comes with its log probability under the target, and the best alternatives."""
    prompt = prompts(2)[1]
    generation = demo.client("real").generate(prompt, max_tokens=8, logprobs=3)
    logits = reference.logits([*prompt, *generation.tokens]).log_softmax(-1)
    assert [one.token for one in generation.logprobs] == generation.tokens
    for index, one in enumerate(generation.logprobs):
        row = logits[len(prompt) - 1 + index]
        assert one.logprob == pytest.approx(row[one.token].item(), abs=1e-3)
        assert [top.token for top in one.top] == row.topk(3).indices.tolist()


def test_the_timeline_has_all_lanes(demo, prompts):
    """A request that asks for its timeline gets draft, wire and verify bars. In AUTO its draft might rest."""
    fields = {"record_timeline": True}
    client = demo.client("real")
    generation = client.generate(
        prompts(1)[0], task="timeline", mode=SEQUENTIAL, max_tokens=64, fields=fields
    )
    lanes = {event.lane for event in generation.complete.timeline}
    lane = generation_pb2.TimelineEvent
    assert {lane.LANE_DRAFT, lane.LANE_WIRE, lane.LANE_VERIFY} <= lanes


def test_continuations_can_be_told_apart(demo, prompts):
    """n = 3 gives three continuations, each with its own Complete."""
    generations = collect(demo.client("real").stream(request(prompts(1)[0], n=3, temperature=1.0)))
    assert [generation.complete.index for generation in generations] == [0, 1, 2]
    assert len({tuple(generation.tokens) for generation in generations}) == 3
