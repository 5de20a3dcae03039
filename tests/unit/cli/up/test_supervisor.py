"""Decisions about child processes, with a clock of our own."""

from __future__ import annotations

from outrider.cli.up.supervisor import MAX_PAUSE_SECONDS, STEADY_SECONDS, GiveUp, Restart, Supervisor


def _running() -> Supervisor:
    supervisor = Supervisor(("verify-0", "draft-0"))
    supervisor.ready("verify-0", 0.0)
    supervisor.ready("draft-0", 1.0)
    return supervisor


def test_a_child_that_never_started_ends_everything() -> None:
    """Before all were up once, an exit is a wrong setting: retrying would not change it."""
    supervisor = Supervisor(("verify-0", "draft-0"))
    supervisor.ready("verify-0", 0.0)
    assert not supervisor.up
    assert isinstance(supervisor.exited("draft-0", 1.0), GiveUp)


def test_a_crash_is_restarted_with_growing_pauses() -> None:
    """A child that keeps crashing is tried less and less often, up to a bound."""
    supervisor = _running()
    pauses = []
    for crash in range(12):
        decision = supervisor.exited("draft-0", 2.0 + crash)
        assert isinstance(decision, Restart)
        pauses.append(decision.pause_seconds)
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == MAX_PAUSE_SECONDS


def test_a_steady_child_is_forgiven() -> None:
    """After a good while of service, the next crash counts as the first."""
    supervisor = _running()
    supervisor.exited("draft-0", 2.0)
    supervisor.exited("draft-0", 3.0)
    supervisor.ready("draft-0", 10.0)
    assert supervisor.exited("draft-0", 10.0 + STEADY_SECONDS) == Restart(0.5)


def test_a_child_that_crashes_while_loading_again_keeps_its_pauses() -> None:
    """Time spent loading is not service."""
    supervisor = _running()
    supervisor.exited("draft-0", 100.0)
    assert supervisor.exited("draft-0", 100.0 + 2 * STEADY_SECONDS) == Restart(1.0)


def test_crashes_of_one_child_do_not_count_for_another() -> None:
    """Each child has its own history."""
    supervisor = _running()
    supervisor.exited("draft-0", 2.0)
    assert supervisor.exited("verify-0", 2.0) == Restart(0.5)


def test_exits_while_stopping_are_expected() -> None:
    """Nothing comes back after Ctrl-C."""
    supervisor = _running()
    supervisor.stop()
    assert supervisor.exited("draft-0", 5.0) is None
