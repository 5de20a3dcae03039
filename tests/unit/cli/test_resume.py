"""When a broken stream is taken up again."""

from __future__ import annotations

from outrider.cli.resume import PAUSES, Resumptions
from outrider.errors import DeadlineExceeded, InvalidRequest, NoReplica, Overloaded, Unavailable

GONE = Unavailable("gone")


def test_attempts_end_unless_they_bring_tokens() -> None:
    """As many in a row as there are pauses; a token begins the row anew."""
    resumptions = Resumptions()
    assert tuple(resumptions.pause(GONE, 5) for _ in PAUSES) == PAUSES
    assert resumptions.pause(GONE, 5) is None
    assert resumptions.pause(GONE, 6) == PAUSES[0]
    assert resumptions.count == len(PAUSES) + 1


def test_only_what_may_pass_is_tried_again() -> None:
    """Lost connections, missing replicas and full queues; not a wrong request, nor a deadline."""
    assert Resumptions().pause(NoReplica("none"), 0) is not None
    assert Resumptions().pause(InvalidRequest("text", "wrong"), 0) is None
    assert Resumptions().pause(DeadlineExceeded("late"), 0) is None


def test_a_full_orchestrator_says_how_long_to_wait() -> None:
    """Its time is obeyed where it is longer than ours."""
    assert Resumptions().pause(Overloaded("full", retry_after=3.0), 0) == 3.0
