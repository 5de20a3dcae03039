"""Which texts are compared with which, and when a difference is a near-tie."""

from __future__ import annotations

import pytest
import torch

from benchmarks.arms.base import OWN, PEER, REFERENCE
from benchmarks.equality import Difference, EqualityTally, compare, first_difference, judge_logits
from benchmarks.samples import Batch, SampledRequest
from benchmarks.workload import Cell, Tokens, Turn

KINDS = {"off": OWN, "auto": OWN, "HF": REFERENCE, "vLLM": PEER}
NO_NOISE = torch.zeros(4, dtype=torch.float64)


def batch(arm: str, tokens: Tokens, temperature: float = 0.0) -> Batch:
    """One text of prompt 0."""
    return Batch(
        arm, Turn(Cell(0.0, 1, temperature), 0, (0,)), (SampledRequest(tokens, ((0.1, 1), (0.2, 2))),)
    )


def test_greedy_texts_are_compared_with_the_reference() -> None:
    """Every arm is counted; differences of own arms are to be judged, those of peers are not."""
    tallies, differences = compare(
        [batch("HF", (1, 2, 3)), batch("off", (1, 2, 3)), batch("auto", (1, 9, 3)), batch("vLLM", (1, 2, 8))],
        KINDS,
    )
    assert tallies["off", 0.0] == EqualityTally(1, 1)
    assert tallies["auto", 0.0] == tallies["vLLM", 0.0] == EqualityTally(0, 1)
    assert differences == {Difference(0, 0.0, (1,), 2, 9)}


def test_sampled_texts_are_compared_with_those_of_the_target_alone() -> None:
    """Other engines draw other noise: only own arms can be equal."""
    tallies, differences = compare(
        [batch("HF", (7, 7, 7), 1.0), batch("off", (1, 2, 3), 1.0), batch("auto", (1, 2, 4), 1.0)], KINDS
    )
    assert ("HF", 1.0) not in tallies
    assert differences == {Difference(0, 1.0, (1, 2), 3, 4)}


def test_texts_of_different_lengths_are_an_error() -> None:
    """No rounding makes a text shorter."""
    with pytest.raises(ValueError, match="3 tokens were expected and 2 came"):
        first_difference((1, 2, 3), (1, 2))


def test_a_peer_that_keeps_tokens_to_itself_has_another_text() -> None:
    """The comparison goes on; an own arm that lacks tokens ends it."""
    tallies, differences = compare([batch("off", (1, 2, 3)), batch("vLLM", (1, 2))], KINDS)
    assert tallies["vLLM", 0.0] == EqualityTally(0, 1)
    assert not differences
    with pytest.raises(ValueError, match="3 tokens were expected and 2 came"):
        compare([batch("off", (1, 2, 3)), batch("auto", (1, 2))], KINDS)


def test_two_tokens_within_the_rounding_error_are_a_near_tie() -> None:
    """Rounding moved a logit by 0.1 here, so a gap of 0.15 can turn around, a gap of 0.3 cannot."""
    run = torch.tensor([5.0, 4.9, 1.0, 0.0])
    close, far = torch.tensor([5.0, 4.85, 1.1, 0.0]), torch.tensor([5.0, 4.7, 1.1, 0.0])
    difference = Difference(0, 0.0, (), 0, 1)
    assert judge_logits(difference, run, run + (close - run).clamp(-0.1, 0.1), NO_NOISE).near_tie
    judged = judge_logits(difference, far + torch.tensor([0.0, 0.1, 0.0, 0.0]), far, NO_NOISE)
    assert judged.distance == pytest.approx(0.3)
    assert judged.tolerance == pytest.approx(0.2, abs=1e-6)
    assert not judged.near_tie


def test_a_pair_far_below_the_best_token_is_no_near_tie() -> None:
    """Two equal tokens explain nothing when neither could have won."""
    logits = torch.tensor([9.0, 1.0, 1.0, 0.0])
    assert not judge_logits(Difference(0, 0.0, (), 1, 2), logits + 0.01, logits, NO_NOISE).near_tie


def test_noise_and_temperature_are_part_of_the_score() -> None:
    """Where tokens are sampled the noise decides, and rounding counts by the temperature."""
    logits = torch.tensor([2.0, 1.0, 0.0, 0.0])
    noise = torch.tensor([0.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    judged = judge_logits(Difference(0, 0.5, (), 0, 1), logits + 0.01, logits, noise)
    assert judged.distance == pytest.approx(0.0)
    assert judged.tolerance == pytest.approx(0.04, abs=1e-6)
