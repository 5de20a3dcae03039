"""Times of messages follow the round trips of the machine at hand."""

from __future__ import annotations

import pytest

from simulator.pair.messages import ECHO, MESSAGE, RESTED_ECHO, REWARM, measure_messages, scaled


def test_messages_take_as_much_longer_as_round_trips() -> None:
    """Both without pauses and after them; a machine that pauses cost nothing has nothing to add."""
    same, slow = scaled(ECHO, RESTED_ECHO), scaled(2 * ECHO, 2 * RESTED_ECHO)
    assert (same.message, same.rewarm) == pytest.approx((MESSAGE, REWARM))
    assert (slow.message, slow.rewarm) == pytest.approx((2 * MESSAGE, 2 * REWARM))
    assert scaled(ECHO, 0.9 * ECHO).rewarm == 0.0


def test_round_trips_are_measured_between_processes() -> None:
    """The echo starts, answers and is gone."""
    found = measure_messages()
    assert found.message > 0.0
    assert found.rewarm >= 0.0
