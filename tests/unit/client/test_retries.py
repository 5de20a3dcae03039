"""When a request that failed, or a stream that broke, is tried again."""

from __future__ import annotations

import pytest

from outrider.client.retries import NEVER, Attempts, Retries
from outrider.protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoReplica,
    NotRead,
    Overloaded,
    Unavailable,
)

GONE = Unavailable("gone")
GONE.retry_after = None
PAUSES = Retries().resume


def _attempts(retries: Retries | None = None, drawn: float = 0.0) -> Attempts:
    return Attempts(retries or Retries(), lambda: drawn)


def test_attempts_end_unless_they_bring_tokens() -> None:
    """As many in a row as there are pauses; a token begins the row anew."""
    attempts = _attempts()
    assert tuple(attempts.pause(GONE, True, 5) for _ in PAUSES) == PAUSES
    assert attempts.pause(GONE, True, 5) is None
    assert attempts.pause(GONE, True, 6) == PAUSES[0]
    assert attempts.count == len(PAUSES) + 1


def test_what_has_not_begun_has_pauses_of_its_own() -> None:
    """And does not count as a resumption."""
    attempts = _attempts(Retries(begin=(0.5,)))
    assert (attempts.pause(GONE, False, 0), attempts.pause(GONE, False, 0)) == (0.5, None)
    assert attempts.count == 0


def test_only_what_may_pass_is_tried_again() -> None:
    """Lost connections, missing replicas, full queues, and streams that were not read; not a wrong request,
    nor a deadline."""
    assert _attempts().pause(NotRead("for 60 s"), True, 0) is not None
    assert _attempts().pause(NoReplica("none"), True, 0) is not None
    assert _attempts().pause(InvalidRequest("text", "wrong"), True, 0) is None
    assert _attempts().pause(DeadlineExceeded("late"), True, 0) is None
    assert _attempts(NEVER).pause(GONE, False, 0) is None


@pytest.mark.parametrize("error", [Overloaded("full"), NoReplica("none")])
def test_a_service_says_how_long_to_wait(error: Overloaded | NoReplica) -> None:
    """Its time is obeyed where it is longer than ours."""
    error.retry_after = 3.0
    assert _attempts().pause(error, False, 0) == 3.0


def test_pauses_are_spread() -> None:
    """Those who were refused together do not come back together, and none comes too early."""
    error = Overloaded("full", retry_after=2.0)
    assert _attempts(drawn=0.0).pause(error, True, 0) == 2.0
    assert _attempts(drawn=1.0).pause(error, True, 0) == 2.5
