"""When a session has the client told that its continuation begins."""

from __future__ import annotations

from orchestrator.events import Announce, DropVerify, Emit, VerifyFailed, VerifyOpened
from outrider.protocol.messages import Mode, Opened
from tests.unit.orchestrator.test_session import GONE, kinds, only, session, verdict


def test_the_client_is_told_once_that_it_begins() -> None:
    """When the first verify replica has opened; another one after it changes nothing for the client."""
    machine = session(Mode.OFF)
    machine.start(0.0)
    opened = Opened("v", "i", cached_length=2)
    assert Announce in kinds(machine.handle_event(VerifyOpened(1, opened, "verify:1"), 0.0))
    assert machine.statistics.cached == 2
    machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 0.0)
    assert Announce not in kinds(machine.handle_event(VerifyOpened(2, opened, "verify:2"), 0.0))


def test_no_token_comes_before_the_beginning() -> None:
    """A verdict on a stream that was not opened is the replica's mistake; the client has nothing of it."""
    machine = session(Mode.OFF)
    machine.start(0.0)
    actions = machine.handle_event(verdict(3, 10), 0.0)
    assert "before the session was opened" in str(only(actions, DropVerify).error)
    assert Emit not in kinds(actions)
    assert machine.generated == []
