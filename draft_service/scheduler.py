"""Which nodes of which sessions to expand next, and when a block is `ready`. Decides; does nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draft_service.session import DraftSession
from outrider.speculation.candidate_tree import Node

URGENT = 8.0
"""How much more an expansion is worth while the verify side has nothing to verify."""
YIELD = 0.35
"""Share of the reach of a draft step's nodes that waiting for it really brings in tokens. A node's children
hold the next token in some 0.7 of all cases; half of that, because the target has room for some nodes only,
and in a pipeline the others are drafted while it runs. Simulated on the demo pair (T = 0.7, a draft step of
0.05 target steps) with 1, 0.5, 0.25 and 0.1 for that half: 2.41, 2.51, 2.52 and 2.06 tokens per target
step."""


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """One node to expand; None is the last committed token."""

    session: DraftSession
    node: Node | None


def choose(sessions: Sequence[DraftSession], count: int) -> list[NodeChoice]:
    """Take the `count` most valuable unexpanded nodes over all sessions, parents before children."""
    heads = [(-_weight(session), index) for index, session in enumerate(sessions) if session.worth > 0.0]
    heapq.heapify(heads)
    chosen: list[NodeChoice] = []
    while heads and len(chosen) < count:
        index = heads[0][1]
        session = sessions[index]
        chosen.append(NodeChoice(session, session.take()))
        if session.worth > 0.0:
            heapq.heapreplace(heads, (-_weight(session), index))
        else:
            heapq.heappop(heads)
    return chosen


def is_ready(session: DraftSession, share: int, step_seconds: float) -> bool:
    """True when one more draft step would cost the session more tokens than it brings.

    A step that expands the session's `share` best nodes brings a part of the sum of their worth. While it
    runs, the target could have committed `step_seconds` times the session's rate.
    """
    if session.worth == 0.0:
        return True
    if session.root_pending and not session.pipelined:
        return False  # a session that stops here would never get past its prompt
    return YIELD * session.gain(share) < step_seconds * session.rate


def should_send(session: DraftSession, ready: bool, now: float) -> bool:
    """True when a block should go out: what the verify side waits for, or nodes that waited for company."""
    if not session.wanted:
        return False
    due = session.worth == 0.0 or session.due(now)  # nothing will come to go with them
    if ready:
        return due or session.starved or not session.pipelined
    return due and session.has_unsent and not session.spent


def share_of(sessions: Iterable[DraftSession], count: int) -> int:
    """Expansions of one step that each growing session can count on."""
    growing = sum(1 for session in sessions if session.worth > 0.0)
    return max(1, count // max(1, growing))


def to_suspend(holders: Iterable[DraftSession]) -> DraftSession:
    """The session whose memory is given up first: one that needs no more drafts, else the newest."""
    return max(holders, key=lambda session: (session.finished, session.key))


def _weight(session: DraftSession) -> float:
    return session.worth * URGENT if session.urgent else session.worth
