"""What counts as foreseen, which of two drafts is better, and which replicas change places."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.replicas.pool import Replica
from orchestrator.shadow.comparison import MAX_PAIRS, MIN_GAIN, MIN_TOKENS, Comparisons, swap_of
from orchestrator.shadow.foresight import Foresight, Score
from outrider.protocol.messages import TokenBlock
from tests.fakes import INFO


def block(first: int, *nodes: tuple[int, int, float]) -> TokenBlock:
    """Nodes as (parent, token, acceptance)."""
    parents, tokens, acceptances = zip(*nodes, strict=True)
    return TokenBlock(first, parents, tokens, acceptances, base_length=2)


def test_the_first_choice_below_each_committed_token_counts():
    """Other children are proposals, and no more."""
    draft = Foresight([1, 2])
    draft.block(block(0, (-2, 5, 0.6), (-2, 6, 0.3), (0, 7, 0.2), (0, 8, 0.4), (1, 9, 0.9)))
    assert draft.verdict([5, 7]) == Score(tokens=2, proposed=2, foreseen=1)


def test_what_was_foreseen_deeper_counts_with_later_verdicts():
    """The tree goes on below what is committed."""
    draft = Foresight([1, 2])
    draft.block(block(0, (-2, 5, 0.9), (0, 6, 0.9), (1, 7, 0.9), (2, 8, 0.9)))
    assert draft.verdict([5]) == Score(1, 1, 1)
    assert draft.verdict([6, 7, 9]) == Score(3, 3, 2)
    assert draft.verdict([10]) == Score(1, 0, 0)


def test_what_comes_after_its_verdict_does_not_count():
    """A draft that is late foresaw nothing."""
    draft = Foresight([1, 2])
    assert draft.verdict([5]) == Score(1, 0, 0)
    draft.block(block(0, (-2, 5, 0.9), (0, 6, 0.9)))
    assert draft.verdict([6]) == Score(1, 1, 1)


def tallied(*scores: tuple[str, str, int, int, int]) -> Comparisons:
    """Comparisons as (shadow, serving, tokens, of shadow, of serving)."""
    found = Comparisons()
    for shadow, serving, tokens, new, old in scores:
        found.add(shadow, serving, Score(tokens, tokens, new), Score(tokens, tokens, old))
    return found


@pytest.mark.parametrize(
    ("tokens", "gain", "won"),
    [
        (MIN_TOKENS, 2 * MIN_GAIN, True),
        (MIN_TOKENS, MIN_GAIN / 2, False),
        (MIN_TOKENS, -0.2, False),
        (MIN_TOKENS - 1, 0.5, False),
    ],
)
def test_a_shadow_wins_by_enough_on_enough(tokens, gain, won):
    """Chance and trifles are no reason for an exchange."""
    old = tokens // 2
    assert tallied(("new", "old", tokens, old + round(gain * tokens), old)).of("new", "old").won is won


def test_pairs_are_bounded():
    """Versions come from replicas."""
    found = Comparisons()
    for number in range(MAX_PAIRS + 1):
        found.add(str(number), "old", Score(1, 1, 1), Score(1, 1, 0))
    assert found.of("0", "old").tokens == 0
    assert found.of(str(MAX_PAIRS), "old").tokens == 1


def replicas(version: str, *endpoints: str) -> list[Replica]:
    """Replicas with these weights."""
    return [Replica(endpoint, info=replace(INFO, version=version)) for endpoint in endpoints]


def test_one_shadow_changes_places_with_one_of_what_it_beat():
    """The largest gain first, and of equal replicas the same ones on every orchestrator."""
    many = 2 * MIN_TOKENS
    found = tallied(
        ("new", "old", many, many // 2, many // 4),
        ("newer", "old", many, many // 3, many // 4),
        ("new", "other", many, many // 2, many // 2),
    )
    serving = [*replicas("old", "d:2", "d:1"), *replicas("other", "d:0")]
    swap = swap_of([*replicas("newer", "s:0"), *replicas("new", "s:2", "s:1")], serving, found)
    assert swap is not None
    assert (swap.up, swap.up_version, swap.down, swap.down_version) == ("s:1", "new", "d:1", "old")
    assert swap_of(replicas("new", "s:1"), replicas("other", "d:0"), found) is None
    assert swap_of(replicas("new", "s:1"), [], found) is None
    assert swap_of([], serving, found) is None


def test_drafts_change_places_once_for_each_change_of_traffic():
    """What won the last exchange does not undo the next one."""
    found = Comparisons()
    roles, swaps = ["old", "new"], 0  # the draft in use, and the shadow
    for better, rounds in (("new", 5), ("old", 50), ("new", 300)):
        for _ in range(rounds):
            serving, shadow = roles
            scores = (
                Score(MIN_TOKENS, MIN_TOKENS, 900 if name == better else 600) for name in (shadow, serving)
            )
            found.add(shadow, serving, *scores)
            if swap_of(replicas(shadow, "r:0"), replicas(serving, "r:1"), found):
                roles.reverse()
                swaps += 1
        assert roles[0] == better
    assert swaps == 3


def test_equal_weights_do_not_change_places():
    """The shadow has less to do, and is late less often."""
    many = 2 * MIN_TOKENS
    found = tallied(("new", "new", many, many, many // 2))
    assert swap_of(replicas("new", "s:1"), replicas("new", "d:1"), found) is None
