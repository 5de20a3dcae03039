"""What the target commits without drafts, by batch size."""

from __future__ import annotations

import pytest

from orchestrator.pace import MEMORY, MIN_ROUNDS, Pace
from outrider.messages import StepTimes, Verdict


def round_of(tokens: int, milliseconds: int, batch_size: int = 8, prompt_tokens: int = 0) -> Verdict:
    """A verdict after a round of some length, a tenth of which was waiting."""
    times = StepTimes(queue_us=100 * milliseconds, forward_us=900 * milliseconds)
    return Verdict(1, 5, (7,) * tokens, batch_size=batch_size, prompt_tokens=prompt_tokens, times=times)


def after(rounds: int, verdict: Verdict, pace: Pace | None = None) -> Pace:
    """A pace that has seen one round again and again."""
    pace = pace or Pace()
    for _ in range(rounds):
        pace.observe(verdict)
    return pace


def test_tokens_are_in_proportion_to_the_time() -> None:
    """One token in 20 milliseconds makes two in 40."""
    assert after(MIN_ROUNDS, round_of(1, 20)).expected(round_of(5, 40)) == pytest.approx(2.0)


def test_nothing_is_known_before_some_rounds() -> None:
    """Nor of another batch size."""
    pace = after(MIN_ROUNDS - 1, round_of(1, 20))
    assert pace.expected(round_of(1, 20)) is None
    pace.observe(round_of(1, 20))
    assert pace.expected(round_of(1, 20)) is not None
    assert pace.expected(round_of(1, 20, batch_size=9)) is None


def test_large_batches_of_about_one_size_are_one() -> None:
    """The whole target's rate is kept: of 33 sessions, a session has a little less of it than of 32."""
    expected = after(MIN_ROUNDS, round_of(1, 20, batch_size=32)).expected(round_of(1, 20, batch_size=33))
    assert expected == pytest.approx(32 / 33)


def test_rounds_with_prompts_teach_nothing() -> None:
    """They are long for another reason."""
    pace = after(MIN_ROUNDS, round_of(1, 20))
    after(MEMORY, round_of(1, 200, prompt_tokens=128), pace)
    assert pace.expected(round_of(1, 20)) == pytest.approx(1.0)


def test_rounds_that_took_no_time_teach_nothing() -> None:
    """What a broken replica says must not break the session."""
    assert after(2 * MIN_ROUNDS, round_of(1, 0)).expected(round_of(1, 20)) is None


def test_it_follows_a_machine_that_slows_down() -> None:
    """What was seen long ago counts less and less."""
    pace = after(MEMORY, round_of(1, 40), after(MEMORY, round_of(1, 20)))
    expected = pace.expected(round_of(1, 40))
    assert expected is not None
    assert 1.0 < expected < 1.3


def test_a_replica_that_names_no_batch_is_borne() -> None:
    """A batch of none counts like one of one."""
    nobody = round_of(1, 20, batch_size=0)
    assert after(MIN_ROUNDS, nobody).expected(nobody) == pytest.approx(1.0)
