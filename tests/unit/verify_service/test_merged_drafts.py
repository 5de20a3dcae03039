"""Several drafts feed one session: fewer steps than with either, and the tokens of the target alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from outrider.protocol.messages import SamplingParams, TokenBlock, VerifyPolicy
from outrider.speculation.candidate_tree import first_id_of
from tests.unit.verify_service.fakes import VOCABULARY, Bench, block, chain_block, opening, text, verdicts
from verify_service.mailbox import Propose

PROMPT = (1, 2, 3)
COUNT = 80
Draft = Callable[[int, list[int], int], TokenBlock]
"""A block from its first id, prompt and answer, and the committed length."""


def knows(parity: int) -> Draft:
    """Right where the position's pair is of a parity, elsewhere silent or wrong."""

    def propose(first: int, known: list[int], base: int) -> TokenBlock:
        right = [
            token if (base + place) // 4 % 2 == parity else (token + 1) % VOCABULARY
            for place, token in enumerate(known[base : base + 6])
        ]
        return chain_block(first, base, right, 0.8, ready=True)

    return propose


def lies(first: int, known: list[int], base: int) -> TokenBlock:
    """Claims to be certain of tokens that are wrong, on many branches."""
    wrong = [token for token in range(VOCABULARY) if token != known[base]] if base < len(known) else [0]
    return block(first, [(-base, token, 1.0) for token in wrong], base=base)


def run(
    drafts: Sequence[Draft], truth: Sequence[int], sampling: SamplingParams, dies_at: int = 10**9
) -> tuple[list[int], int]:
    """Tokens and steps of a session with these drafts; the first of them falls silent at a length."""
    bench = Bench(lookup=False)
    policy = VerifyPolicy.PIPELINED if drafts else VerifyPolicy.OFF
    stream = bench.open(opening(PROMPT, sampling=sampling, policy=policy))
    known = [*PROMPT, *truth]
    numbers = [first_id_of(number) for number in range(len(drafts))]
    while not bench.core.sessions[stream.id].finished:
        base = bench.core.sessions[stream.id].tree.committed_length
        messages = []
        for number, draft in enumerate(drafts):
            if not (number == 0 and base >= dies_at):
                proposed = draft(numbers[number], known, base)
                numbers[number] += len(proposed)
                stream.sent += 1
                messages.append(Propose(stream, proposed, bench.clock()))
        bench.core.turn(messages)
    found = verdicts(stream)
    return text(found), len(found)


def sampling(temperature: float, count: int = COUNT) -> SamplingParams:
    """A request of so many tokens."""
    return SamplingParams(max_tokens=count, ignore_eos=True, temperature=temperature, seed=9)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "drafts", [(knows(0), knows(1)), (knows(0), lies), (lies, lies, knows(1))], ids=["both", "liar", "liars"]
)
def test_tokens_are_those_of_the_target_alone(drafts: tuple[Draft, ...], temperature: float) -> None:
    """Whoever agrees, lies, or dies on the way."""
    truth, _ = run((), (), sampling(temperature))
    for dies_at in (10**9, 30):
        assert run(drafts, truth, sampling(temperature), dies_at)[0] == truth


def test_two_drafts_that_know_different_things_save_more_steps_than_either() -> None:
    """Their nodes hang in one tree: a chain goes on where the other draft knows better."""
    truth, _ = run((), (), sampling(0.0))
    steps = {
        name: run(drafts, truth, sampling(0.0))[1]
        for name, drafts in {
            "first": (knows(0),),
            "second": (knows(1),),
            "both": (knows(0), knows(1)),
        }.items()
    }
    assert steps["both"] < min(steps["first"], steps["second"])


def test_a_liar_among_honest_drafts_costs_few_steps() -> None:
    """It gets no nodes once it is known, which takes some steps however long the text is."""
    for count in (80, 180):
        truth, _ = run((), (), sampling(0.0, count))
        _, alone = run((knows(0),), truth, sampling(0.0, count))
        _, beside = run((lies, knows(0)), truth, sampling(0.0, count))
        assert beside <= alone + 15
