"""Log probabilities of prompts on their way from a replica to the client."""

from __future__ import annotations

import pytest

from orchestrator.request.resolver import ResolvedRequest
from orchestrator.soundness import prompt_problem_of
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import PromptLogprobs, SamplingParams, TokenLogprob
from tests.fakes import INFO, FakeDraft, FakeVerify, continuation
from tests.unit.orchestrator.rig import AUTO, OFF, SEQUENTIAL, Answer, Rig

PROMPT = tuple(range(10, 22))


def check(answer: Answer, count: int = 40) -> None:
    """All of the prompt, and the text that comes without."""
    assert [one.token for one in answer.prompt_logprobs] == list(PROMPT)
    assert [one.logprob for one in answer.prompt_logprobs] == [-float(i) for i in range(len(PROMPT))]
    assert answer.tokens[0] == continuation(PROMPT, count)


@pytest.mark.parametrize("mode", [AUTO, SEQUENTIAL, OFF])
async def test_they_come_before_the_text(mode: int) -> None:
    """One for each token, the first without a meaning; the text is the same in every mode."""
    async with Rig(FakeVerify(), FakeDraft()) as rig:
        check(await rig.generate(PROMPT, mode=mode, prompt_logprobs=0))
        assert not (await rig.generate(PROMPT, mode=mode)).prompt_logprobs


async def test_a_lost_replica_does_not_tell_them_twice() -> None:
    """Another one goes on where the client is."""
    verify = FakeVerify()
    verify.break_in_prompt = 5
    async with Rig(verify) as rig:
        check(await rig.generate(PROMPT, prompt_logprobs=0))
        assert [opening.first_prompt_logprob for opening in verify.openings] == [1, 5]


async def test_the_first_continuation_alone_tells_them() -> None:
    """The prompt is the same for all, and is not computed for each."""
    verify = FakeVerify()
    async with Rig(verify) as rig:
        check(await rig.generate(PROMPT, prompt_logprobs=0, n=3))
        asked = [opening.sampling.prompt_logprobs for opening in verify.openings]
        assert sorted(asked, key=str) == [0, None, None]


async def test_a_session_is_not_taken_up_for_them() -> None:
    """What it covers would not be computed."""
    verify = FakeVerify()
    async with Rig(verify) as rig:
        first = await rig.generate(PROMPT[:4], max_tokens=2, keep_session=True)
        prompt = (*PROMPT[:4], *first.tokens[0], 9)
        ticket = first.completes[0].session
        answer = await rig.generate(prompt, session=ticket, prompt_logprobs=0)
        assert [one.token for one in answer.prompt_logprobs] == list(prompt)
        assert verify.openings[-1].kv_handle is None
        await rig.generate(prompt, session=ticket)
        assert verify.openings[-1].kv_handle is not None


async def test_they_are_not_for_streams_that_are_resumed() -> None:
    """They came before the tokens that the caller has."""
    async with Rig(FakeVerify()) as rig:
        with pytest.raises(InvalidRequest) as caught:
            await rig.generate(PROMPT, prompt_logprobs=0, resume_token_ids=[1])
        assert caught.value.field == "sampling.prompt_logprobs"


def test_what_cannot_be_those_of_the_prompt() -> None:
    """Other tokens, another place, none at all, or nobody asked: the replica's mistake."""
    request = ResolvedRequest(
        request_id="r", served=INFO, prompt=PROMPT, sampling=SamplingParams(max_tokens=4, prompt_logprobs=0)
    )

    def part(position: int, *tokens: int) -> PromptLogprobs:
        return PromptLogprobs(position, tuple(TokenLogprob(token, -1.0) for token in tokens))

    assert prompt_problem_of(part(1, *PROMPT[1:3]), request, 1) == ""
    for wrong in (part(2, *PROMPT[2:3]), part(1, 99), part(1), part(1, *PROMPT[1:], 7)):
        assert prompt_problem_of(wrong, request, 1)
    assert prompt_problem_of(part(1, PROMPT[1]), request.without_prompt_logprobs(), 1)
