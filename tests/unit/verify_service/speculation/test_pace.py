"""A session that is behind the pace its caller asked for goes before others, within bounds."""

from __future__ import annotations

from tests.unit.verify_service.fakes import chain_block, make_session
from verify_service.scheduler import Work, plan_step
from verify_service.session import VerifySession
from verify_service.speculation.controller import Controller
from verify_service.speculation.cost_model import CostModel
from verify_service.speculation.pace import LATE_WEIGHT, Pace

BUSY = CostModel([1, 8, 64], [1.0, 1.0, 8.0], 64)
"""Eight tokens cost what one does; each further one costs an eighth of that."""


def session(id: int, seconds_per_token: float = 0.0, acceptance: float = 0.6) -> VerifySession:
    """It got its first verdict at time 0, and candidates afterwards."""
    found = make_session(id, seconds_per_token=seconds_per_token)
    found.published(0.0, 0.0)
    found.propose(chain_block(0, 3, [1] * 4, acceptance), arrived=0.0)
    return found


def works(sessions: list[VerifySession]) -> dict[int, Work]:
    """The step at the time 5, by session."""
    return {work.session.id: work for work in plan_step(sessions, 5.0, BUSY, 64).works}


def test_a_pace_begins_with_the_first_verdict() -> None:
    """A long prompt or a queue is no lateness that nodes could mend."""
    pace = Pace(0.5)
    assert pace.weight(100.0, 10) == 1.0
    pace.observe(100.0, 11)
    pace.observe(101.0, 12)
    assert pace.weight(101.9, 14) == 1.0
    assert pace.weight(102.1, 14) == LATE_WEIGHT
    assert pace.weight(102.1, 15) == 1.0
    assert Pace(0.0).weight(1e9, 1) == 1.0


def test_only_those_behind_get_nodes_where_nodes_are_dear() -> None:
    """Their own nodes, however likely those of the others are; without a pace nobody gets any."""
    others = [session(id) for id in range(1, 8)]
    late, early = session(8, 0.1, 0.6), session(9, 100.0, 0.6)
    found = works([*others, late, early])
    assert [id for id, work in found.items() if work.nodes] == [8]
    assert not any(work.nodes for work in works([*others, session(8), session(9)]).values())


def test_what_the_late_may_take_is_bounded() -> None:
    """Nodes that hardly ever come true are not verified for them either."""
    found = works([*(session(id) for id in range(1, 9)), session(9, 0.1, acceptance=0.02)])
    assert not found[9].nodes


def test_the_late_have_drafts_where_drafting_rests() -> None:
    """But for the few steps in which it is measured what the replica does without drafts."""
    controller = Controller(BUSY, 64)
    controller._drafting.max_drafts = lambda traffic, batch_size: 0  # type: ignore[method-assign]
    late, usual = session(1, 0.1), session(2)
    controller.decide_drafts([late, usual], 5.0)
    assert (late.draft_wanted, usual.draft_wanted) == (True, False)
    controller._drafting._probe = 3
    controller.decide_drafts([late, usual], 5.0)
    assert not late.draft_wanted
