"""Decides which nodes of which sessions to expand next, and when a block is marked ready. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from draft_service.session import DraftSession
from outrider.speculation.candidate_tree import Node

PREFILL_CHUNK = 256
"""Most missing tokens of all sessions in one forward; it bounds how long other sessions wait."""
YIELD = 0.35
"""Tokens that waiting for a draft step brings, for each unit of reach of the nodes that it expands. The next
token is among a node's children in about 0.7 of all cases. Half of that counts, because the target has room
only for some nodes, and a pipeline drafts the others while the target runs. Simulated on the demo pair (T =
0.7, a draft step of 0.05 target steps) with factors of 1, 0.5, 0.25 and 0.1 in place of that half, it makes
2.41, 2.51, 2.52 and 2.06 tokens per target step."""


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """One node to expand; None is the last committed token."""

    session: DraftSession
    node: Node | None


def choose(sessions: Sequence[DraftSession], count: int) -> list[NodeChoice]:
    """Take the `count` unexpanded nodes with the highest reach over all sessions, parents before children."""
    heads = [(-each.best_reach, index) for index, each in enumerate(sessions) if each.best_reach > 0.0]
    heapq.heapify(heads)
    chosen: list[NodeChoice] = []
    while heads and len(chosen) < count:
        index = heads[0][1]
        session = sessions[index]
        chosen.append(NodeChoice(session, session.take()))
        if session.best_reach > 0.0:
            heapq.heapreplace(heads, (-session.best_reach, index))
        else:
            heapq.heappop(heads)
    return chosen


def divide(missing: Mapping[int, int], room: int) -> dict[int, int]:
    """Return how many of its missing tokens each session computes next, at most `room` in all.

    Half of them go to those that miss the fewest, so that they need not wait for long prompts, the rest in
    the order given.
    """
    given = dict.fromkeys(missing, 0)
    for order, kept in ((sorted(missing, key=missing.__getitem__), room // 2), ([*missing], 0)):
        for key in order:
            tokens = min(missing[key] - given[key], room - kept)
            given[key] += tokens
            room -= tokens
    return given


def is_ready(session: DraftSession, share: int, step_seconds: float) -> bool:
    """True if one more draft step would cost the session more tokens than it brings.

    The step brings `YIELD` times the reach of the session's `share` best nodes. While it runs, the target
    could commit `step_seconds` times the session's rate.
    """
    if session.best_reach == 0.0:
        return True
    if session.root_pending and not session.pipelined:
        return False  # a session that stops here would never get past its prompt
    return YIELD * session.gain(share) < step_seconds * session.rate


def should_send(session: DraftSession, ready: bool, now: float) -> bool:
    """True if a block should go out: the verify side waits for it, or it is time to send new nodes."""
    if not session.wanted:
        return False
    due = session.best_reach == 0.0 or session.outbound.due(now)  # 0: no further nodes will come
    if ready:
        return due or session.starved or not session.pipelined
    return due and bool(session.outbound.nodes) and not session.outbound.spent


def share_of(sessions: Iterable[DraftSession], count: int) -> int:
    """Return how many nodes of each growing session one step expands on average; at least 1."""
    growing = sum(1 for session in sessions if session.best_reach > 0.0)
    return max(1, count // max(1, growing))


def to_suspend(holders: Iterable[DraftSession]) -> DraftSession:
    """Return the session whose memory is freed first: one that needs no more drafts, otherwise the newest."""
    return max(holders, key=lambda session: (session.finished, session.key))
