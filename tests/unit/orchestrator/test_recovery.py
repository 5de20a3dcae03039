"""How long a session looks for a verify replica, and when it gives up."""

from __future__ import annotations

from orchestrator.events import ConnectVerify, Fail, VerifyFailed, VerifyOpened
from orchestrator.session import MAX_BROKEN
from outrider.protocol.messages import Opened
from tests.unit.orchestrator.test_session import GONE, kinds, only, session, started, verdict


def test_only_time_without_a_replica_counts() -> None:
    """A replica that computed a long prompt for longer than the recovery time may be lost too."""
    machine = session()
    machine.start(0.0)
    machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)
    stream = only(machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 5.0), ConnectVerify).stream
    machine.handle_event(VerifyOpened(stream, Opened("w", "j"), "verify:2"), 5.1)
    again = only(machine.handle_event(VerifyFailed(stream, GONE, "verify:2"), 60.0), ConnectVerify)
    assert again.give_up_at == 70.0


def test_a_request_with_which_replicas_die_is_given_up() -> None:
    """Each takes it and is lost: it may be what kills them."""
    machine, stream, now = session(), 1, 0.0
    machine.start(now)
    for lost in range(1, MAX_BROKEN + 1):
        machine.handle_event(VerifyOpened(stream, Opened("v", "i"), "verify:1"), now)
        actions = machine.handle_event(VerifyFailed(stream, GONE, "verify:1"), now + 1.0)
        assert machine.finished is (lost == MAX_BROKEN)
        if not machine.finished:
            now, stream = now + 20.0, only(actions, ConnectVerify).stream
    assert actions[-1] == Fail(GONE)


def test_weights_that_were_announced_are_kept() -> None:
    """The caller resumes with them, so no other replica may generate the text."""
    machine = session()
    machine.start(0.0)
    assert not machine.needs_weights
    machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)
    assert machine.needs_weights


def test_verify_replicas_that_keep_failing_end_the_request_in_time() -> None:
    """Without progress, the request ends after the recovery time with the last error."""
    machine, now, stream = started(), 0.0, 1
    while not machine.finished:
        actions = machine.handle_event(VerifyFailed(stream, GONE, "verify:1"), now)
        if ConnectVerify in kinds(actions):
            now, stream = only(actions, ConnectVerify).not_before, only(actions, ConnectVerify).stream
    assert 8.0 < now <= 10.0
    assert actions[-1] == Fail(GONE)


def test_progress_restores_patience() -> None:
    """A verdict after a recovery lets the next loss wait as long again."""
    machine = started()
    machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 1.0)
    machine.handle_event(VerifyOpened(3, Opened("w", "j"), "verify:2"), 8.0)
    machine.handle_event(verdict(4, 11, stream=3), 8.0)
    again = only(machine.handle_event(VerifyFailed(3, GONE, "verify:2"), 9.0), ConnectVerify)
    assert (again.not_before, again.give_up_at) == (9.0, 19.0)
